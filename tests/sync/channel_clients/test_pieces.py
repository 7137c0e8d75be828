"""Values in pieces: cut and packed without losing or doubling a byte."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geofed_pb.errors import GeofedError
from sync.channel_clients._pieces import checked_size, cut, joined, views

PIECES = st.lists(st.binary(max_size=50), max_size=12)


@given(PIECES, st.integers(1, 60))
def test_parts_hold_the_same_bytes_and_all_but_the_last_are_full(pieces: list[bytes], part_bytes: int) -> None:
    parts = [b"".join(part) for part in cut(views(pieces), part_bytes)]
    assert b"".join(parts) == b"".join(pieces)
    assert all(len(part) == part_bytes for part in parts[:-1])
    assert all(0 < len(part) <= part_bytes for part in parts)


def test_a_single_piece_is_not_copied() -> None:
    for whole in (b"abc", bytearray(b"abc")):
        assert joined(views([whole, b""])) is whole
    assert joined(views([memoryview(b"abcd")[1:]])) == b"bcd"
    assert joined([]) == b""


def test_a_size_counts_bytes_whatever_the_pieces_hold() -> None:
    pieces = views([memoryview(bytearray(16)).cast("d"), memoryview(bytearray(24)).cast("B", (2, 3, 4))])
    assert checked_size("key", pieces, 40, "store") == 40
    with pytest.raises(GeofedError, match="LIMIT_EXCEEDED: key has 40 bytes"):
        checked_size("key", pieces, 39, "store")


def _unpacked(data: bytes) -> list[list[bytes]]:
    """Commands as a Redis server reads them."""
    commands, at = [], 0

    def line() -> bytes:
        nonlocal at
        end = data.index(b"\r\n", at)
        found, at = data[at:end], end + 2
        return found

    while at < len(data):
        words = []
        for _ in range(int(line().removeprefix(b"*"))):
            length = int(line().removeprefix(b"$"))
            words.append(data[at : at + length])
            at += length + 2
        commands.append(words)
    return commands


@given(st.lists(st.tuples(st.text(max_size=5), st.integers(), PIECES), max_size=4), st.booleans())
def test_packed_commands_are_read_as_they_were_meant(
    commands: Sequence[tuple[str, int, list[bytes]]], large: bool
) -> None:
    from sync.channel_clients._redis_wire import packed

    swollen = [
        (word, number, [piece * (1000 if large else 1) for piece in pieces]) for word, number, pieces in commands
    ]
    sent = packed([(word, number, views(pieces)) for word, number, pieces in swollen])
    expected = [[word.encode(), str(number).encode(), b"".join(pieces)] for word, number, pieces in swollen]
    assert _unpacked(b"".join(sent)) == expected
