"""The bytes of a value, as consecutive pieces that are copied as rarely as possible."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from geofed_pb.errors import GeofedError
from sync.channel import Buffer

__all__ = ["checked_size", "cut", "joined", "kept", "views"]


def views(pieces: Sequence[Buffer]) -> list[memoryview]:
    """Return the pieces as flat byte views, without empty ones."""
    seen = [piece if isinstance(piece, memoryview) else memoryview(piece) for piece in pieces]
    return [view.cast("B") for view in seen if view.nbytes]


def checked_size(key: str, pieces: Iterable[memoryview], most_bytes: int, store: str) -> int:
    """Return the size of a value in bytes. Raises ``GeofedError("LIMIT_EXCEEDED")`` if it exceeds the store's limit."""
    size = sum(piece.nbytes for piece in pieces)
    if size > most_bytes:
        raise GeofedError(
            "LIMIT_EXCEEDED",
            f"{key} has {size} bytes; the channel {store} accepts values of at most {most_bytes}",
            hint="cut the value into more chunks, or use another channel",
        )
    return size


def kept(pieces: Iterable[memoryview]) -> list[bytes]:
    """Return copies of pieces that are valid until the next one only."""
    return [bytes(piece) for piece in pieces]


def cut(pieces: Iterable[memoryview], part_bytes: int) -> Iterator[list[memoryview]]:
    """Regroup the pieces into parts of one size; the last part may be shorter."""
    part, left = list[memoryview](), part_bytes
    for piece in pieces:
        while piece.nbytes:
            part.append(piece[:left])
            piece = piece[part[-1].nbytes :]
            left -= part[-1].nbytes
            if not left:
                yield part
                part, left = [], part_bytes
    if part:
        yield part


def joined(pieces: Sequence[memoryview]) -> bytes | bytearray:
    """Return the concatenated pieces: the object of a single piece that covers it whole, else a copy."""
    if len(pieces) == 1 and isinstance(pieces[0].obj, (bytes, bytearray)) and len(pieces[0].obj) == pieces[0].nbytes:
        return pieces[0].obj
    return b"".join(pieces)
