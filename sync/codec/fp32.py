"""The codec ``fp32``: uncompressed float32."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import numpy as np

from sync.codec._arrays import require
from sync.codec._contract import Automatic, Codec, Tensors
from sync.codec._slabs import SLAB, Slab, concatenated, equal_slabs
from sync.layout import Vector

__all__ = ["METHODS", "Float32"]


class Float32(Codec):
    """The vector unchanged: 32 bits per coordinate."""

    name, mark, lossy = "fp32", 0, False
    size_factor, bytes_per_second, automatic, in_ranges = 1.0, math.inf, Automatic.ALWAYS, True
    masked, verbatim = "fp32-masked", True

    def encode(self, vector: Vector) -> Tensors:
        """Return the vector itself, not a copy."""
        return {"delta": vector}

    def slabs_of(self, size: int) -> Iterator[Slab]:
        """Return slices of `SLAB` coordinates, each with this codec."""
        return equal_slabs(self, size, SLAB)

    def join_slabs(self, parts: Iterable[Tensors]) -> Tensors:
        """Concatenate the tensors of all slabs, in order."""
        return concatenated(parts)

    def decode(self, tensors: Tensors, size: int) -> Vector:
        """Return the received vector, shape (size,), not a copy.

        Raises ``GeofedError("FRAME_INVALID")`` for another type or shape.
        """
        delta = tensors.get("delta")
        require(delta is not None and delta.dtype == np.float32 and delta.shape == (size,), "not a vector of float32")
        return np.asarray(delta, np.float32)

    def decode_range(self, tensors: Tensors, part: slice, size: int) -> Vector:
        """Return a view of some received coordinates."""
        return self.decode(tensors, size)[part]


METHODS = (Float32(),)
