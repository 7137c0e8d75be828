"""The codec ``bf16``: bfloat16, the upper half of each float32."""

from __future__ import annotations

import numpy as np

from sync.codec._arrays import require
from sync.codec._contract import Tensors
from sync.codec._slabs import SlabCodec
from sync.layout import Vector

__all__ = ["METHODS", "BFloat16"]

_LARGEST_BF16 = np.uint32(0x7F7F0000)
"""Bits of the largest finite bfloat16, as float32."""


class BFloat16(SlabCodec):
    """The upper half of each float32, rounded to nearest even: 16 bits per coordinate."""

    name, mark, lossy = "bf16", 1, True
    size_factor, bytes_per_second, in_ranges = 0.5, 200e6, True
    masked = "bf16-masked"

    def encode(self, vector: Vector) -> Tensors:
        """Encode float32 of shape (n,) as the upper 16 bits of each value."""
        bits = vector.view(np.uint32)
        rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        # Values that would round up to infinity become the largest finite value of their sign.
        overflown = (rounded & np.uint32(0x7F800000)) == np.uint32(0x7F800000)
        if overflown.any():
            rounded[overflown] = (bits[overflown] & np.uint32(0x80000000)) | _LARGEST_BF16
        return {"bf16": (rounded >> np.uint32(16)).astype(np.uint16)}

    def check(self, tensors: Tensors, size: int) -> None:
        """Check type and shape."""
        halves = tensors.get("bf16")
        known = halves is not None and halves.dtype == np.uint16 and halves.shape == (size,)
        require(known, "not a vector of bfloat16")

    def decode_into(self, tensors: Tensors, out: Vector) -> None:
        """Write the decoded coordinates to `out`, shape (n,).

        Raises ``GeofedError("FRAME_INVALID")`` for another type or shape.
        """
        self.check(tensors, out.size)
        bits = out.view(np.uint32)
        for part, _ in self.slabs_of(out.size):
            bits[part] = np.asarray(tensors["bf16"])[part]
            bits[part] <<= np.uint32(16)

    def decode_range(self, tensors: Tensors, part: slice, size: int) -> Vector:
        """Decode some coordinates to a new vector."""
        bits = np.asarray(tensors["bf16"])[part].astype(np.uint32)
        bits <<= np.uint32(16)
        return bits.view(np.float32)


METHODS = (BFloat16(),)
