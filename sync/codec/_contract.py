"""What every codec does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt

from sync.layout import Vector

__all__ = ["Codec", "Tensors"]

Tensors = Mapping[str, npt.NDArray[np.generic]]


class Codec(Protocol):
    """A vector of finite float32, shape (n,), to named arrays and back.

    Every lossy codec keeps one promise, by powers of two as scales: ``vector - decode(encode(vector))`` has no
    rounding error in float32. What is held back is then known exactly, and error feedback loses nothing.
    """

    name: str
    mark: int
    """Stands in the frame; never given to another codec."""
    lossy: bool
    in_place: bool = False
    """It has a use for memory that is there already: fresh memory can cost more than the arithmetic."""

    def encode(self, vector: Vector) -> Tensors:
        """Named arrays for a frame."""

    def encode_into(self, vector: Vector, out: Vector) -> Tensors:
        """As `encode`, and what that decodes to into ``out``, shape (n,): a codec may know it on the way."""
        tensors = self.encode(vector)
        self.decode_into(tensors, out)
        return tensors

    def decode(self, tensors: Tensors, size: int) -> Vector:
        """The vector of ``size`` elements; raises ``GeofedError("FRAME_INVALID")`` for arrays that are not of one."""

    def decode_into(self, tensors: Tensors, out: Vector) -> None:
        """As `decode`, into ``out``, shape (n,)."""
        out[...] = self.decode(tensors, out.size)
