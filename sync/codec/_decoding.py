"""The values of an encoded vector, decoded range by range when they are read."""

from __future__ import annotations

import numpy as np

from sync.codec._contract import RANGE, Codec, Tensors
from sync.layout import Vector
from sync.mapped import release

__all__ = ["Decoding"]


class Decoding:
    """A vector of ``size`` elements that is never in memory as a whole."""

    def __init__(self, codec: Codec, tensors: Tensors, size: int) -> None:
        """Raises ``GeofedError("FRAME_INVALID")`` if the arrays don't fit."""
        codec.check(tensors, size)
        self._codec, self._tensors, self.size = codec, tensors, size

    def __getitem__(self, part: slice) -> Vector:
        begin, stop, _ = part.indices(self.size)
        if begin >= stop:
            return np.empty(0, np.float32)
        first = begin // RANGE * RANGE
        return self._codec.decode_range(self._tensors, slice(first, stop), self.size)[begin - first :]

    def release(self) -> None:
        """Give back the pages of the file that the arrays are views of."""
        release(*self._tensors.values())
