"""What people write is read strictly, and every mistake is named with its place."""

from __future__ import annotations

import difflib
from typing import Annotated, Literal
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field
from support.budget import budget

from geofed_pb.files.strict_yaml import InvalidYaml, parse, scalar, validate


class _Closed(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Red(_Closed):
    kind: Literal["red"]
    warm: int = 0


class _Blue(_Closed):
    kind: Literal["blue"]
    cold: int = 0


class _File(_Closed):
    name: str
    colour: Annotated[_Red | _Blue, Field(discriminator="kind")] | None = None
    links: list[_Red] = []
    sizes: dict[str, _Blue] = {}
    size: int | Literal["auto"] = "auto"


def _mistakes(text: str) -> list[str]:
    with pytest.raises(InvalidYaml) as raised:
        validate(_File, parse(text, "f.yaml"))
    return str(raised.value).splitlines()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("name: a\nname: b\n", "f.yaml:2:1: duplicate key `name`; first used in line 1"),
        ("name: a\nsize: 1\nsizes: {b: {kind: blue, kind: blue}}", "f.yaml:3:25: duplicate key `kind`; first used in"),
        ("name: !!str a\nsize: !x 1", "f.yaml:2:7: tags are not supported: !x"),
        ("? [a]\n: 1\n", "f.yaml:1:3: a key must be a scalar"),
        ("name: a\nnam: b\n", "f.yaml:2:1: unknown key `nam` in the file; did you mean `name`?"),
        (
            "name: a\ncolour:\n  kind: blue\n  cool: 1\n",
            "f.yaml:4:3: unknown key `cool` in colour; did you mean `cold`?",
        ),
        (
            "name: a\nsizes:\n  b:\n    kind: blue\n    zzz: 1\n",
            "f.yaml:5:5: unknown key `zzz` in sizes.b; valid keys: kind, cold",
        ),
        (
            "name: a\nlinks:\n  - {kind: red}\n  - {kind: red, warn: 1}\n",
            "f.yaml:4:17: unknown key `warn` in links.1; did you mean `warm`?",
        ),
        ("size: 1\n", "f.yaml:1:1: `name` is required"),
        ("name: a\nsize: [1]\n", "f.yaml:2:7: `size`: input should be a valid integer"),
        ("[a]", "f.yaml:1:1: the file must be a mapping"),
        ("", "f.yaml:1:1: the file must be a mapping"),
        ("name: [", "f.yaml:1:8: "),
        ("name: &a [*a]\n", "f.yaml:1:7: an alias (`*name`) stands in the value that it repeats"),
        ("name: &a {<<: *a}\n", "f.yaml:1:7: an alias (`*name`) stands in the value that it repeats"),
        ("name: {<<: 3}\n", "f.yaml:1:12: `<<` must be a mapping or a list of mappings"),
        ("name: a\ncolour:\n", "f.yaml:2:1: `colour` has no value: give one, or remove the key; `null` states that"),
        ("name: " + "[" * 200 + "]" * 200, "f.yaml:1:107: more than 100 levels"),
        ("name: " + "[" * 1500, "f.yaml:1:107: more than 100 levels"),
    ],
)
def test_each_mistake_has_its_sentence_and_its_place(text: str, told: str) -> None:
    assert _mistakes(text)[0].startswith(told)


def test_all_mistakes_are_told_in_the_order_of_the_file() -> None:
    found = _mistakes("nam: b\nsize: x\ncolour: {kind: green}\n")
    assert [line.split(":")[1] for line in found] == sorted(line.split(":")[1] for line in found)
    assert len(found) >= 4


@pytest.mark.slow
def test_of_thousands_of_mistakes_a_hundred_are_told_and_the_others_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = Mock(wraps=difflib.get_close_matches)
    monkeypatch.setattr(difflib, "get_close_matches", compared)
    told = _mistakes("".join(f"k{number}: 1\n" for number in range(3000)))
    assert len(told) == 101
    assert told[-2:] == ["f.yaml:99:1: unknown key `k98` in the file", "and 2,901 more"]
    (*told, last) = _mistakes("name: a\n" + "name: b\n" * 3000)
    assert (len(told), last) == (100, "and 2,900 more")
    assert 0 < compared.call_count <= 20 * 3


def test_a_key_that_states_that_there_is_no_value_is_valid() -> None:
    for text in ("colour: null", "colour: ~", "<<: {colour: null}"):
        assert validate(_File, parse(f"name: a\n{text}\n", "f")).colour is None
    # As the first key without a value, also where a mapping is merged or repeated.
    assert _mistakes("name: a\n<<: {colour: }\n")[0].startswith("f.yaml:2:6: `colour` has no value")


def test_keys_that_the_file_chooses_need_no_value() -> None:
    class Free(_Closed):
        config: dict[str, int | None]

    assert validate(Free, parse("config: {a: , b: 1}\n", "f")).config == {"a": None, "b": 1}


def test_aliases_and_merges_are_resolved() -> None:
    text = "a: &x {k: 1, l: [2]}\nb: *x\nc: {<<: *x, k: 3}\nd:\n  <<: [{k: 4}, *x]\n"
    document = parse(text, "f")
    x = {"k": 1, "l": [2]}
    assert document.value == {"a": x, "b": x, "c": {"k": 3, "l": [2]}, "d": {"k": 4, "l": [2]}}
    assert document.error(("c", "k"), "wrong") == "f:3:16: wrong"
    assert document.error(("d",), "wrong") == "f:5:3: wrong"


def test_aliases_repeat_no_more_than_a_bound() -> None:
    """Nine levels of ten each would be a billion values."""
    levels = ["a0: &a0 [x]"] + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)]
    (told,) = _mistakes("\n".join(levels))
    assert "aliases repeat more than 10,000 values" in told


@settings(max_examples=budget(200))
@given(st.text(max_size=60) | st.text(alphabet="&*a<:{}[]- \n?!", max_size=60))
def test_no_text_breaks_the_reader(text: str) -> None:
    scalar(text)
