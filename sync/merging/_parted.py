"""Vectors that are no array: in consecutive parts of memory, such as the gradients of a model's parameters; or in a
channel, from which they are read in ranges."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Sequence

import numpy as np

from geofed_pb.errors import GeofedError
from sync import framing
from sync.channel import RangedValue
from sync.layout import Vector
from sync.mapped_files import windows

__all__ = ["PartedVector", "RangedVector"]

_HEAD_BYTES = 256
"""Bytes of a value that are read for the head of its frame: a head with one tensor and its weight takes less than 100.
"""


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


class RangedVector:
    """A vector of float32, shape (n,), in the frame of a value that a channel gives in ranges. It is read once, from
    begin to end."""

    def __init__(self, value: RangedValue, name: str, size: int) -> None:
        """``name``: of the frame's only tensor. Raises ``GeofedError("FRAME_INVALID")`` unless it is such a vector."""
        (begin,) = value.pieces(0, _HEAD_BYTES, _HEAD_BYTES)
        head = framing.decode_head(begin)
        entry = head.entries.get(name)
        if entry is None or entry.dtype != np.float32 or entry.shape != (size,):
            raise GeofedError("FRAME_INVALID", f"a part has no vector of {size} elements of float32")
        self.facts, self.size, self.shape = head.facts, size, (size,)
        self._value, self._start = value, entry.start
        self._pieces: Iterator[memoryview] | None = None
        self._range, self._loaded = 0, np.empty(0, np.float32)

    def load(self, part: slice) -> None:
        """Read the next range. All have the size of the first one, except for the last."""
        if self._pieces is None:
            stop, at_once = self._start + 4 * self.size, 4 * (part.stop - part.start)
            self._pieces = self._value.pieces(self._start, stop, at_once)
        self._range, self._loaded = part.start, np.frombuffer(next(self._pieces), np.float32)

    def __getitem__(self, part: slice) -> Vector:
        """Return a range of the one that is loaded."""
        return self._loaded[part.start - self._range : part.stop - self._range]

    def release(self) -> None:
        """Free the memory of the loaded range."""
        self._loaded = np.empty(0, np.float32)
