"""Sets of byte ranges."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

__all__ = ["Ranges", "pieces"]


class Ranges:
    """A set of bytes, stored as sorted half-open ranges that neither overlap nor touch."""

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []
        for begin, end in ranges:
            self.add(begin, end)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(list(zip(self._begins, self._ends, strict=True)))

    @property
    def total(self) -> int:
        """Number of bytes in the set."""
        return sum(self._ends) - sum(self._begins)

    @property
    def prefix(self) -> int:
        """Number of bytes from the start without a gap."""
        return self._ends[0] if self._begins and self._begins[0] == 0 else 0

    def add(self, begin: int, end: int) -> None:
        """Add a range."""
        if begin >= end:
            return
        first, last = bisect_left(self._ends, begin), bisect_right(self._begins, end)
        if first < last:
            begin, end = min(begin, self._begins[first]), max(end, self._ends[last - 1])
        self._begins[first:last], self._ends[first:last] = [begin], [end]

    def remove(self, begin: int, end: int) -> None:
        """Remove a range."""
        kept = []
        for first, last in self:
            kept += [(first, min(last, begin)), (max(first, end), last)]
        self.__init__(kept)  # type: ignore[misc]  # rebuilds the same set

    def missing(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Return the parts of a range that are not in the set."""
        found, at = [], begin
        for first, last in self:
            if first >= end:
                break
            if first > at:
                found.append((at, first))
            at = max(at, last)
        if at < end:
            found.append((at, end))
        return found


def pieces(missing: Iterable[tuple[int, int]], largest: int) -> Iterator[tuple[int, int]]:
    """Cut ranges into (offset, length) of at most `largest` bytes."""
    for begin, end in missing:
        for offset in range(begin, end, largest):
            yield offset, min(largest, end - offset)
