"""The codec ``exact``: lossless, for sums of updates that lossy codecs have encoded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from sync.codec._arrays import in_rows, powers, require
from sync.codec._contract import Tensors
from sync.codec._slabs import SLAB, Decoding, SlabCodec
from sync.layout import Vector
from sync.mapped_files import windows

__all__ = ["METHODS", "Exact"]

_BLOCK = 256
"""Coordinates of a block."""
_MIN_EXPONENT = -126
"""Smallest exponent of a scale."""
_MAX_EXPONENT = 127
"""Largest exponent of a scale."""
_NAMES = {1: "int8", 2: "int16", 4: "float32"}
"""Names of the arrays, by the bytes of a coordinate."""
_TYPES = {1: np.int8, 2: np.uint16, 4: np.float32}
"""Types of the arrays in a frame, which has uint16 but not int16."""


class Exact(SlabCodec):
    """Encodes each block of 256 coordinates exactly, in as few bytes per coordinate as possible: none if all are zero,
    one or two if they are small multiples of a power of two, otherwise four.

    Updates of codecs with powers of two as scales are such multiples, and so are sums of a few of them: sums of
    ``int8`` take two bytes per coordinate, half of float32.
    """

    name, mark, lossy = "exact", 6, False
    size_factor, bytes_per_second, offered, in_ranges = 1.01, 200e6, False, True

    def encode(self, vector: Vector) -> Tensors:
        """Encode float32 of shape (n,), each block in its smallest width."""
        return self.join_slabs([_encoded(vector[part]) for part, _ in self.slabs_of(vector.size)])

    def encode_sum(self, updates: Sequence[tuple[Vector | Decoding, slice]], size: int) -> Tensors:
        """Encode the sum of vectors, added in this order, each of which covers a part of ``size`` coordinates; neither
        the sum nor what the vectors decode to is in memory as a whole."""
        return self.join_slabs(_sums(updates, size))

    def decode_into(self, tensors: Tensors, out: Vector) -> None:
        """Write the decoded coordinates to `out`, shape (n,).

        Raises ``GeofedError("FRAME_INVALID")`` for invalid tensors.
        """
        self.check(tensors, out.size)
        taken = dict.fromkeys(_NAMES, 0)
        for part, _ in self.slabs_of(out.size):
            out[part] = _decoded(tensors, part, taken)

    def check(self, tensors: Tensors, size: int) -> None:
        """Check types, sizes, widths and scales."""
        count = -(-size // _BLOCK)
        widths, exponents = tensors.get("widths"), tensors.get("exponents")
        require(
            widths is not None and widths.dtype == np.uint8 and widths.shape == (count,),
            "the widths are missing or invalid",
        )
        require(
            exponents is not None and exponents.dtype == np.int8 and exponents.shape == (count,),
            "the scales are missing or invalid",
        )
        widths = np.asarray(widths)
        powers(np.asarray(exponents), _MIN_EXPONENT, _MAX_EXPONENT)
        require(np.isin(widths, (0, *_NAMES)).all(), "a width is invalid")
        for width, name in _NAMES.items():
            found, due = tensors.get(name), int(np.count_nonzero(widths == width)) * _BLOCK
            require(
                found is not None and found.dtype == _TYPES[width] and found.size == due,
                f"the number of {name} values is wrong",
            )

    def decode_range(self, tensors: Tensors, part: slice, size: int) -> Vector:
        """Decode some coordinates to a new vector."""
        begin, stop, _ = part.indices(size)
        before = np.asarray(tensors["widths"])[: begin // _BLOCK]
        taken = {width: int(np.count_nonzero(before == width)) for width in _NAMES}
        return _decoded(tensors, slice(begin, stop), taken)


def _sums(updates: Sequence[tuple[Vector | Decoding, slice]], size: int) -> Iterator[Tensors]:
    for window in windows(size, *(values for values, _ in updates)):
        for at in range(window.start, window.stop, SLAB):
            total = np.zeros(min(SLAB, window.stop - at), np.float32)
            for values, part in updates:
                begin, stop, _ = part.indices(size)
                first, last = max(at, begin), min(at + total.size, stop)
                if first < last:
                    total[first - at : last - at] += values[first - begin : last - begin]
            yield _encoded(total)


def _decoded(tensors: Tensors, part: slice, taken: dict[int, int]) -> Vector:
    """Decode coordinates that begin with a block, shape (part,). ``taken``: number of blocks of each width before them;
    those of these coordinates are added."""
    rows = slice(part.start // _BLOCK, -(-part.stop // _BLOCK))
    widths = np.asarray(tensors["widths"])[rows]
    blocks = np.zeros((rows.stop - rows.start, _BLOCK), np.float32)
    for width, name in _NAMES.items():
        mine = np.flatnonzero(widths == width)
        begin, taken[width] = taken[width], taken[width] + len(mine)
        values = np.asarray(tensors[name])[begin * _BLOCK : taken[width] * _BLOCK]
        blocks[mine] = (values.view(np.int16) if width == 2 else values).reshape(-1, _BLOCK)
    # A damaged float32 may be a signalling NaN, or overflow when it is scaled; such values are detected later.
    with np.errstate(invalid="ignore", over="ignore"):
        blocks *= powers(np.asarray(tensors["exponents"])[rows], _MIN_EXPONENT, _MAX_EXPONENT)[:, None]
    return blocks.reshape(-1)[: part.stop - part.start]


def _encoded(vector: Vector) -> dict[str, npt.NDArray[np.generic]]:
    blocks = in_rows(vector, _BLOCK)
    largest = np.abs(blocks).max(axis=1, initial=0.0)
    # frexp: largest = m * 2^e with m < 1, so in units of 2^(e - 15) all are below 2^15.
    exponents = np.clip(np.frexp(largest)[1] - 15, _MIN_EXPONENT, _MAX_EXPONENT - 8)
    scaled = blocks * np.ldexp(np.float32(1), -exponents).astype(np.float32)[:, None]
    two = np.isfinite(largest) & (np.rint(scaled) == scaled).all(axis=1)
    units = scaled[two].astype(np.int16)
    narrow = ((units & 0xFF) == 0).all(axis=1)
    widths = np.full(len(blocks), 4, np.uint8)
    widths[two] = np.where(narrow, 1, 2)
    widths[largest == 0] = 0
    exponents[widths == 1] += 8
    exponents[(widths == 0) | (widths == 4)] = 0
    kept = widths[two]
    return {
        "widths": widths,
        "exponents": exponents.astype(np.int8),
        "int8": (units[kept == 1] >> 8).astype(np.int8).reshape(-1),
        "int16": units[kept == 2].reshape(-1).view(np.uint16),
        "float32": blocks[widths == 4].reshape(-1),
    }


METHODS = (Exact(),)
