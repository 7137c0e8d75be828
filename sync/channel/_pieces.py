"""The bytes of a value, which come in pieces and are not copied where it can be helped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from geofed_pb.errors import GeofedError
from sync.channel._contract import Buffer

__all__ = ["checked_size", "cut", "joined", "views"]


def views(pieces: Sequence[Buffer]) -> list[memoryview]:
    """The pieces as flat bytes, without those that are empty."""
    seen = [piece if isinstance(piece, memoryview) else memoryview(piece) for piece in pieces]
    return [view.cast("B") for view in seen if view.nbytes]


def checked_size(key: str, pieces: Iterable[memoryview], most_bytes: int, store: str) -> int:
    """The size of a value in bytes; raises ``GeofedError("LIMIT_EXCEEDED")`` where the store takes none so large."""
    size = sum(piece.nbytes for piece in pieces)
    if size > most_bytes:
        raise GeofedError(
            "LIMIT_EXCEEDED",
            f"{key} has {size} bytes; the channel {store} takes values of at most {most_bytes}",
            hint="cut the value into more chunks, or use another channel",
        )
    return size


def cut(pieces: Iterable[memoryview], part_bytes: int) -> Iterator[list[memoryview]]:
    """The pieces anew, in parts of one size; the last may be shorter."""
    part, room = list[memoryview](), part_bytes
    for piece in pieces:
        while piece.nbytes:
            part.append(piece[:room])
            piece = piece[part[-1].nbytes :]
            room -= part[-1].nbytes
            if not room:
                yield part
                part, room = [], part_bytes
    if part:
        yield part


def joined(pieces: Sequence[memoryview]) -> bytes | bytearray:
    """The pieces in one: the object behind a single piece itself where it is the whole of it, else a copy."""
    if len(pieces) == 1 and isinstance(pieces[0].obj, (bytes, bytearray)) and len(pieces[0].obj) == pieces[0].nbytes:
        return pieces[0].obj
    return b"".join(pieces)
