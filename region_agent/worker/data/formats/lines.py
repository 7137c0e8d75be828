"""Cuts files of lines into blocks."""

from __future__ import annotations

from collections.abc import Iterator

from geofed_pb.errors import GeofedError
from region_agent.worker.data.index import least_block_bytes
from region_agent.worker.data.sources import Source

__all__ = ["line_blocks"]

_MOST_LINE_BYTES = 16 << 20
"""Most bytes of a line."""
_READ_BYTES = 4 << 20
"""Bytes that are read at a time for the index."""


def line_blocks(
    source: Source, begin: int = 0, *, quotes: bool = False, least: int | None = None
) -> Iterator[tuple[int, bytes]]:
    """Yield a file's blocks of whole lines from a position on, each with its first byte's position.

    ``quotes``: a line does not end within double quotes. ``least``: bytes of a block, unless the file ends; None: the
    usual. Raises ``GeofedError("LIMIT_EXCEEDED")`` for a line that is too long.
    """
    least, held, at = least or least_block_bytes(source.size), b"", begin
    for start in range(begin, source.size, _READ_BYTES):
        held += source.read(start, min(_READ_BYTES, source.size - start))
        last = start + _READ_BYTES >= source.size
        used = 0
        while len(held) - used >= least or (last and used < len(held)):
            end = _line_end(held, used, min(len(held), used + least), quotes)
            if end < 0 and not last:
                break
            end = len(held) if end < 0 or (last and len(held) - used <= least) else end
            _check_length(end - used, least, source.name, at)
            yield at, held[used:end]
            at, used = at + end - used, end
        held = held[used:]
        _check_length(len(held), least, source.name, at)


def _line_end(held: bytes, used: int, until: int, quotes: bool) -> int:
    """Return the end of the last line that ends before ``until``, or of the first line if it is longer; -1: none."""
    end = held.rfind(b"\n", used, until) + 1
    while end > used:
        if not quotes or held.count(b'"', used, end) % 2 == 0:
            return end
        end = held.rfind(b"\n", used, end - 1) + 1
    end = until - 1
    odd = held.count(b'"', used, until) % 2 if quotes else 0
    while (found := held.find(b"\n", end + 1)) >= 0:
        odd = (odd + held.count(b'"', max(used, end + 1), found)) % 2 if quotes else 0
        if not odd:
            return found + 1
        end = found
    return -1


def _check_length(length: int, least: int, name: str, at: int) -> None:
    if length > max(_MOST_LINE_BYTES, 2 * least):
        text = f"{name}: the line at byte {at:,} has more than {_MOST_LINE_BYTES >> 20} MiB"
        raise GeofedError("LIMIT_EXCEEDED", text, hint="shorten it; an open quotation mark also makes lines long")
