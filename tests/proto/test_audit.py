"""An audit log: whatever is changed, dropped, added or put elsewhere is found."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from geofed_pb.security.audit import (
    GENESIS,
    AuditBroken,
    Head,
    Verified,
    entry_line,
    entry_text,
    hash_of,
    head_line,
    header_line,
    public_key_of,
    verify,
    witness_of,
)

KEY, OTHER = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()


def written(kinds: list[str], key: Ed25519PrivateKey = KEY) -> tuple[list[str], list[Head]]:
    """The lines of a log, and its heads after 0, 1, 2 … entries."""
    before, lines, heads = GENESIS, [header_line("f")], [Head.sign(key, 0, GENESIS, 1.0)]
    for seq, kind in enumerate(kinds, start=1):
        text = json.dumps({"seq": seq, "kind": kind, "ü": "\u2028"}, ensure_ascii=False)
        before = hash_of(before, text)
        lines.append(entry_line(text, before))
        heads.append(Head.sign(key, seq, before, 1.0))
    return [*lines, head_line(heads[-1], key, "f")], heads


def test_a_log_is_verified_with_its_witnesses() -> None:
    lines, heads = written(["a", "b", "a"])
    told = verify(lines, public_key=public_key_of(KEY), witnesses=heads[1:3])
    assert (told.federation, told.head, told.kinds) == ("f", heads[3], {"a": 2, "b": 1})
    assert (told.witnessed, told.witnessed_seq) == (2, 2)
    assert verify(written([])[0]).head.seq == 0


def test_the_federation_that_a_file_names_is_signed() -> None:
    lines, heads = written(["a"])
    with pytest.raises(AuditBroken, match="the federation that line 1 names is not signed"):
        verify([header_line("g"), *lines[1:]], witnesses=heads)
    with pytest.raises(AuditBroken, match="the federation that line 1 names is not signed"):
        witness_of([header_line("g"), *lines[1:]], "")
    for without in ({"head": json.loads(lines[-1])["head"]}, {**json.loads(lines[-1]), "file": "00"}):
        with pytest.raises(AuditBroken, match="is not signed"):
            verify([*lines[:-1], json.dumps(without)])


CHANGES = ("drop", "repeat", "swap", "byte", "insert", "cut")


@given(st.integers(2, 12), st.sampled_from(CHANGES), st.data())
def test_no_change_of_a_file_stays_unnoticed(count: int, change: str, data: st.DataObject) -> None:
    lines, _ = written([f"k{number % 3}" for number in range(count)])
    before = list(lines)
    at = data.draw(st.integers(1, count))
    match change:
        case "drop":
            del lines[at]
        case "repeat":
            lines.insert(at, lines[at])
        case "swap":
            other = data.draw(st.integers(1, count).filter(lambda other: other != at))
            lines[at], lines[other] = lines[other], lines[at]
        case "byte":
            place = data.draw(st.integers(0, len(lines[at]) - 1))
            lines[at] = lines[at][:place] + data.draw(st.sampled_from('0fg"} ')) + lines[at][place + 1 :]
        case "insert":
            lines.insert(at, written(["x"])[0][1])
        case "cut":
            del lines[at:]
    if [json.loads(line) for line in before] == _read(lines):
        return  # a character of JSON that means nothing, or the same one
    with pytest.raises(AuditBroken):
        verify(lines)


def _read(lines: list[str]) -> list[object] | None:
    try:
        return [json.loads(line) for line in lines]
    except ValueError:
        return None


def test_a_log_that_was_written_again_is_found_by_whoever_has_an_earlier_head() -> None:
    _, heads = written(["a", "b", "c"])
    shorter, other, same = written(["a"])[0], written(["a", "x", "c"])[0], written(["a", "b", "c"], OTHER)[0]
    assert verify(shorter)
    assert verify(other)
    with pytest.raises(AuditBroken, match="entries 2 to 3 are missing"):
        verify(shorter, witnesses=[heads[3]])
    with pytest.raises(AuditBroken, match="up to entry 2 differs from what a witness has received"):
        verify(other, witnesses=[heads[2]])
    with pytest.raises(AuditBroken, match="signed with another key"):
        verify(same, witnesses=[heads[1]])
    with pytest.raises(AuditBroken, match="either it is of another log"):
        verify(written(["a", "b", "c"])[0], public_key=public_key_of(KEY), witnesses=written(["x", "y"], OTHER)[1])
    with pytest.raises(AuditBroken, match="the head is signed with the key"):
        verify(same, public_key=public_key_of(KEY))


@pytest.mark.parametrize(
    "value",
    [
        None, [], {}, {"seq": 1}, {**asdict(written(["a"])[1][1]), "more": 1},
        *({**asdict(written(["a"])[1][1]), key: wrong} for key, wrong in (
            ("seq", 2), ("seq", True), ("signature", "00" * 64), ("signature", "zz" * 64), ("public_key", "00"),
            ("at", "now"),
        )),
    ],
)  # fmt: skip
def test_what_is_no_signed_head_is_refused(value: object) -> None:
    with pytest.raises(AuditBroken):
        Head.read(value)


def test_a_head_survives_its_way() -> None:
    (_, head), key = written(["a"])[1], public_key_of(KEY)
    assert Head.read(json.loads(json.dumps(asdict(head)))) == head
    assert head.public_key == key
    with pytest.raises(AuditBroken):
        Head.read(asdict(replace(head, hash=GENESIS)))


@pytest.mark.slow
def test_the_log_of_ten_thousand_jobs_is_verified_in_seconds() -> None:
    lines, heads = written(["job.submitted", "model.read", "job.ended"] * 10_000)
    began = time.process_time()
    verify(lines, witnesses=heads[::3])
    assert time.process_time() - began < 10.0


def told(facts: list[dict[str, Any]], key: Ed25519PrivateKey, region: str = "", federation: str = "f") -> list[str]:
    """Lines of a log with these entries."""
    before, lines = GENESIS, [header_line(federation, region)]
    for seq, one in enumerate(facts, start=1):
        text = entry_text(seq, one)
        before = hash_of(before, text)
        lines.append(entry_line(text, before))
    return [*lines, head_line(Head.sign(key, len(facts), before, 1.0, region), key, federation)]


def head_of(lines: list[str]) -> dict[str, Any]:
    head: dict[str, Any] = json.loads(lines[-1])["head"]
    return head


STARTED = {"kind": "job.started", "job": "j"}
OWN = told([STARTED, {"kind": "job.ended", "job": "j"}], KEY, "a")
CONTROL = told([{"kind": "region.head", "region": "a", "head": head_of(OWN)}], OTHER)


def checked(lines: list[str], witness: list[str], region: str = "") -> Verified:
    return verify(iter(lines), witness_files=[("w", iter(witness))], region=region)


def test_the_log_of_a_region_is_compared_with_the_control_planes() -> None:
    found = checked(OWN, CONTROL, "a")
    assert (found.region, found.witnessed, found.witnessed_seq, found.other_keys) == ("a", 1, 2, 0)
    heads = [json.dumps({"received": 1.0, **head_of(CONTROL)})]
    assert checked(CONTROL, heads).witnessed == 1
    odd = {"kind": "region.head", "region": "a", "error": "it is no head of a log"}
    with_odd = told([odd, {"kind": "region.head", "region": "a", "head": head_of(OWN)}], OTHER)
    found = checked(OWN, with_odd)
    assert (found.witnessed, found.without_head) == (1, 1)


def _edited(lines: list[str]) -> list[str]:
    return [lines[0], json.dumps(json.loads(lines[1]) | {"entry": "{}"}), *lines[2:]]


@pytest.mark.parametrize(
    ("lines", "witness", "region", "why"),
    [
        (OWN, CONTROL[:1], "", "witness w: the file ends before the head"),
        (OWN, _edited(CONTROL), "", "witness w: line 2: entry 1 is not the one that was recorded"),
        (OWN, [*CONTROL, CONTROL[1]], "", "witness w: line 4: there is more after the head"),
        (OWN, [CONTROL[0].replace('"f"', '"g"'), *CONTROL[1:]], "", "witness w: line 3: the federation that line 1"),
        (OWN, told([], OTHER, federation="g"), "", "witness w: it is of federation g"),
        (OWN, told([], OTHER), "", "witness w: it has no head of the log of region a"),
        (OWN, [], "", "witness w: it has no head of the log of region a"),
        (OWN, OWN, "", "witness w: line 1: it is not the log of a control plane"),
        (OWN, CONTROL, "b", "it is the log of region a, not of region b"),
        ([header_line("f", "b"), *OWN[1:]], CONTROL, "", "witness w: it has no head of the log of region b"),
        ([header_line("f"), *OWN[1:]], CONTROL, "", "witness w: it has no head of the log of the control plane"),
        (told([STARTED], OTHER, "a"), CONTROL, "", "a witness has a head that is signed with another key"),
        (told([STARTED], KEY, "a"), CONTROL, "", "entries 2 to 2 are missing"),
    ],
)
def test_a_log_passes_only_with_a_witness_that_has_a_head_of_it(
    lines: list[str], witness: list[str], region: str, why: str
) -> None:
    with pytest.raises(AuditBroken, match=why):
        checked(lines, witness, region)


def test_the_name_of_the_region_is_signed() -> None:
    with pytest.raises(AuditBroken, match="says that it is the log of region b, its head region a"):
        verify([header_line("f", "b"), *OWN[1:]])
    with pytest.raises(AuditBroken, match="signature"):
        Head.read(head_of(OWN) | {"region": "b"})


def test_a_region_that_enrolled_again_is_compared_with_the_heads_of_its_key() -> None:
    before = told([STARTED] * 5, OTHER, "a")
    both = told([{"kind": "region.head", "region": "a", "head": head_of(one)} for one in (before, OWN)], KEY)
    found = checked(OWN, both)
    assert (found.witnessed, found.witnessed_seq, found.other_keys) == (1, 2, 1)
    with pytest.raises(AuditBroken, match="signed with another key"):
        verify(CONTROL, witnesses=[Head.read(head_of(CONTROL)), Head.read(head_of(told([], KEY)))])


def test_a_wrong_number_is_told() -> None:
    text = json.dumps({"seq": 7, "kind": "x"})
    hashed = hash_of(GENESIS, text)
    lines = [header_line("f"), entry_line(text, hashed), head_line(Head.sign(KEY, 1, hashed, 1.0), KEY, "f")]
    with pytest.raises(AuditBroken, match="the entry has the number 7, not 1"):
        verify(lines)


@pytest.mark.parametrize("at", [float("nan"), float("inf"), 10**400])
def test_a_head_without_a_time_is_refused(at: float) -> None:
    with pytest.raises(AuditBroken, match="its time or number is none"):
        Head.read(asdict(Head.sign(KEY, 1, "a" * 64, 1.0)) | {"at": at})
