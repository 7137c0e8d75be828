"""What every codec does."""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import IntEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from sync.layout import Vector

__all__ = ["Automatic", "Codec", "Tensors"]

Tensors = Mapping[str, npt.NDArray[np.generic]]


class Automatic(IntEnum):
    """Where ``codec: auto`` may choose a codec; each includes those before it."""

    NEVER = 0
    UNDER_WAY = 1
    """While the job runs, by the controller of background exchange, where nothing less lossy keeps up."""
    BACKGROUND = 2
    """In a plan, too, for background exchange of enough rounds to bring what is held back."""
    ALWAYS = 3


class Codec(Protocol):
    """A vector of finite float32, shape (n,), to named arrays and back, and what a planner must know of it.

    Every lossy codec keeps one promise, by powers of two as scales: ``vector - decode(encode(vector))`` has no
    rounding error in float32. What is held back is then known exactly, and error feedback loses nothing.
    """

    name: str
    """As job files and plans give it."""
    mark: int
    """Stands in the frame, 0 to 15; never given to another codec. Those of other packages: 12 to 15."""
    lossy: bool
    size_factor: float = 1.0
    """Bytes of an encoded update over those in float32; of two codecs the one with the larger is taken for the less
    lossy."""
    bytes_per_second: float = math.inf
    """float32 bytes that one core encodes and decodes in a second, error feedback included: on the low side."""
    automatic: Automatic = Automatic.NEVER
    offered: bool = True
    """Job files may name it."""
    in_blocks: bool = False
    """Coordinates share a scale. What no gradient trains is then sent in float32 beside it (`Mixed`)."""
    last: str = ""
    """The codec of a region's last update, which nothing follows that could bring what this one holds back; empty:
    itself."""
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
