"""An audit log: whatever is changed, dropped, added or put elsewhere is found."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from geofed_pb.audit import (
    GENESIS,
    AuditBroken,
    Head,
    entry_line,
    hash_of,
    head_line,
    header_line,
    public_key_of,
    verify,
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
    return [*lines, head_line(heads[-1])], heads


def test_a_log_is_verified_with_its_witnesses() -> None:
    lines, heads = written(["a", "b", "a"])
    told = verify(lines, public_key=public_key_of(KEY), witnesses=heads[1:3])
    assert (told.federation, told.head, told.kinds) == ("f", heads[3], {"a": 2, "b": 1})
    assert (told.witnessed, told.witnessed_seq) == (2, 2)
    assert verify(written([])[0]).head.seq == 0


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


def test_a_log_that_was_written_anew_is_found_by_whoever_has_an_earlier_head() -> None:
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


def test_the_log_of_ten_thousand_jobs_is_verified_in_seconds() -> None:
    lines, heads = written(["job.submitted", "model.read", "job.ended"] * 10_000)
    began = time.process_time()
    verify(lines, witnesses=heads[::3])
    assert time.process_time() - began < 10.0
