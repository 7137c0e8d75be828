"""A vector that lies in consecutive parts of memory, such as the gradients of a model's parameters."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Sequence

import numpy as np

from sync.layout import Vector
from sync.mapped_files import windows

__all__ = ["PartedVector"]


class PartedVector:
    """A vector, shape (n,), that is read and written in the memory of its parts."""

    def __init__(self, parts: Sequence[Vector]) -> None:
        self.parts = [part for part in parts if part.size] or [np.empty(0, np.float32)]
        """Consecutive arrays of float32; at least one."""
        self._stops = list(itertools.accumulate(part.size for part in self.parts))
        self.size: int = self._stops[-1]
        self.shape = (self.size,)

    def _pieces(self, start: int, stop: int) -> Iterator[Vector]:
        number = bisect_right(self._stops, start)
        while start < stop:
            begin = self._stops[number] - self.parts[number].size
            yield self.parts[number][start - begin : stop - begin]
            start, number = self._stops[number], number + 1

    def range(self, part: slice) -> PartedVector:
        """Return a range of the vector, in the same memory."""
        return PartedVector(list(self._pieces(part.start, min(part.stop, self.size))))

    def __getitem__(self, part: slice) -> Vector:
        """Return a range of the vector, which must not be written to: a copy, if it lies in several parts."""
        start, stop, _ = part.indices(self.size)
        pieces = list(self._pieces(start, stop))
        return pieces[0] if len(pieces) == 1 else np.concatenate([np.empty(0, np.float32), *pieces])

    def __setitem__(self, part: slice, values: np.ndarray[tuple[int], np.dtype[np.floating]]) -> None:
        """Write a range of the vector. Values that are mapped from a file are read once, so that little of them counts
        as memory of the process."""
        start, stop, _ = part.indices(self.size)
        for window in windows(stop - start, values):
            at = window.start
            for piece in self._pieces(start + window.start, start + window.stop):
                piece[...] = values[at : at + piece.size]
                at += piece.size
