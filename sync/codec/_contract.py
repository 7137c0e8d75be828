"""The interface of a codec."""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import IntEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from sync.layout import Vector

__all__ = ["RANGE", "Automatic", "Codec", "Tensors"]

Tensors = Mapping[str, npt.NDArray[np.generic]]


RANGE = 256
"""Coordinates of which each range that is decoded alone begins at a multiple: the usual block."""


class Automatic(IntEnum):
    """When ``codec: auto`` may choose a codec; each value includes those before it."""

    NEVER = 0
    UNDER_WAY = 1
    """While the job runs, by the controller of background exchange, if no less lossy codec keeps up."""
    BACKGROUND = 2
    """Also in a plan, for background exchange over enough rounds to send the residual."""
    ALWAYS = 3


class Codec(Protocol):
    """Encodes a vector of finite float32, shape (n,), as named arrays, and states what a planner must know about it.

    Every lossy codec guarantees, by using powers of two as scales, that ``vector - decode(encode(vector))`` has no
    rounding error in float32. The residual is then known exactly, and error feedback loses nothing.
    """

    name: str
    """Name in job files and plans."""
    mark: int
    """Number that identifies the codec in a frame, 0 to 15; never reused for another codec. Plug-ins have 12 to 15."""
    lossy: bool
    size_factor: float = 1.0
    """Bytes of an encoded update, as a multiple of those in float32. Of two codecs, the one with the larger factor
    counts as less lossy."""
    bytes_per_second: float = math.inf
    """float32 bytes per second that one core encodes and decodes, including error feedback; rather underestimated."""
    automatic: Automatic = Automatic.NEVER
    offered: bool = True
    """Whether job files may name it."""
    in_blocks: bool = False
    """Whether coordinates share a scale. State that no gradient trains is then sent in float32 (`Mixed`)."""
    merges: bool = True
    """Whether workers of a region may merge with it in each step (`merge.codec`). Codecs that hold most of an update
    back may not: a step would apply the gradients of many steps before."""
    masked: str = ""
    """Name of the codec that takes its place with secure aggregation; empty: it cannot be used with it."""
    first_size_factor: float = 0.0
    """`size_factor` of a region's first update; 0: the same as of the others."""
    last: str = ""
    """Name of the codec of a region's last update, since no later one could send the residual; empty: the same
    codec."""
    in_ranges: bool = False
    """Whether `decode_range` decodes some coordinates without the others. An update is then merged without a copy of
    all its values in memory."""
    in_place: bool = False
    """Whether `decode_into` is faster with an existing buffer: allocating memory can cost more than the arithmetic."""

    verbatim: bool = False
    """Whether the only array is "delta", the vector itself. An update is then made block by block, and no more of it is
    in memory."""

    def encode(self, vector: Vector) -> Tensors:
        """Encode a vector as named arrays for a frame."""

    def encode_into(self, vector: Vector, out: Vector) -> Tensors:
        """Encode, and write what the arrays decode to into ``out``, shape (n,); a codec may know it while encoding."""
        tensors = self.encode(vector)
        self.decode_into(tensors, out)
        return tensors

    def decode(self, tensors: Tensors, size: int) -> Vector:
        """Decode a vector of ``size`` elements. Raises ``GeofedError("FRAME_INVALID")`` if the arrays don't fit."""

    def check(self, tensors: Tensors, size: int) -> None:
        """Raise ``GeofedError("FRAME_INVALID")`` if `decode` would; a codec may know it without decoding."""
        self.decode(tensors, size)

    def decode_into(self, tensors: Tensors, out: Vector) -> None:
        """Decode into ``out``, shape (n,)."""
        out[...] = self.decode(tensors, out.size)

    def decode_range(self, tensors: Tensors, part: slice, size: int) -> Vector:
        """Decode some coordinates of a vector of ``size`` that `check` accepts. ``part`` begins at a multiple of
        `RANGE`."""
        return self.decode(tensors, size)[part]
