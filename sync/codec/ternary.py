"""The codec ``ternary``: every coordinate is -1, 0 or 1 times its block's scale (TernGrad, Wen et al. 2017, arXiv
1705.07878). It must be used with error feedback, which compensates for the bias of rounding to nearest (Karimireddy et
al. 2019, arXiv 1901.09847)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sync.codec._arrays import in_rows, powers, require
from sync.codec._contract import Automatic, Tensors
from sync.codec._slabs import SlabCodec
from sync.layout import Vector

__all__ = ["METHODS", "Ternary"]

_BLOCK = 256
"""Coordinates of a block."""
_MIN_EXPONENT = -126
"""Smallest exponent of a scale."""
_MAX_EXPONENT = 120
"""Largest exponent of a scale."""
_SCALE = 1.2
"""Ratio of the scale to the root mean square; 1.22 would lose least of a normally distributed block."""
_FIVES = 3**5
"""Number of values of a byte that holds five coordinates."""
_MIN_EXACT = np.float32(2.0**-80)
_MAX_EXACT = np.float32(2.0**120)
"""Sums of squares between these bounds have lost no relevant precision in float32."""


class Ternary(SlabCodec):
    """Encodes blocks of 256 coordinates with one scale, a power of two; five coordinates per byte: 1.63 bits per
    coordinate.

    Each of a slab's bytes holds one coordinate of the slab's first fifth, one of its second, and so on, so that whole
    fifths are processed at once. Coordinates that are closer to zero than to the scale are not sent, so that the
    residual stays exact.
    """

    name, mark, lossy = "ternary", 7, True
    size_factor, bytes_per_second, automatic, in_blocks = 0.052, 100e6, Automatic.BACKGROUND, True
    in_ranges, merges = True, False
    slab = 56 * 5 * _BLOCK
    """A whole number of blocks and of bytes."""

    def encode(self, vector: Vector) -> Tensors:
        """Encode float32 of shape (n,) as packed trits and one exponent per block."""
        return self.join_slabs([_encoded(vector[part]) for part, _ in self.slabs_of(vector.size)])

    def encode_into(self, vector: Vector, out: Vector) -> Tensors:
        """Encode `vector`, and write what the receiver will decode to `out`; both have shape (n,)."""
        return self.join_slabs([_encoded(vector[part], out[part]) for part, _ in self.slabs_of(vector.size)])

    def decode_into(self, tensors: Tensors, out: Vector) -> None:
        """Write the decoded coordinates to `out`, shape (n,).

        Raises ``GeofedError("FRAME_INVALID")`` for invalid tensors.
        """
        packed, scales = self._arrays(tensors, out.size)
        for part, _ in self.slabs_of(out.size):
            trits = _unpacked(packed[part.start // 5 : -(-part.stop // 5)])
            _put(trits, scales[part.start // _BLOCK : -(-part.stop // _BLOCK)], out[part])

    def check(self, tensors: Tensors, size: int) -> None:
        """Check types, shapes, scales and trits."""
        self._arrays(tensors, size)

    def decode_range(self, tensors: Tensors, part: slice, size: int) -> Vector:
        """Decode some coordinates to a new vector: those of the slabs that hold them."""
        begin, stop, _ = part.indices(size)
        out = np.empty(stop - begin, np.float32)
        packed, exponents = np.asarray(tensors["trits"], np.uint8), np.asarray(tensors["exponents"])
        for at in range(begin // self.slab * self.slab, stop, self.slab):
            last = min(at + self.slab, size)
            trits = _unpacked(packed[at // 5 : -(-last // 5)])
            # The range begins with a block.
            low, high = max(at, begin), min(last, stop)
            scales = powers(exponents[low // _BLOCK : -(-high // _BLOCK)], _MIN_EXPONENT, _MAX_EXPONENT)
            _put(trits[low - at : high - at], scales, out[low - begin : high - begin])
        return out

    @staticmethod
    def _arrays(tensors: Tensors, size: int) -> tuple[npt.NDArray[np.uint8], Vector]:
        """Return the packed trits, and the scale of each block."""
        trits, exponents = tensors.get("trits"), tensors.get("exponents")
        fives, rows = -(-size // 5), -(-size // _BLOCK)
        require(trits is not None and trits.dtype == np.uint8 and trits.shape == (fives,), "not a vector of trits")
        require(
            exponents is not None and exponents.dtype == np.int8 and exponents.shape == (rows,),
            "the scales are missing or invalid",
        )
        packed = np.asarray(trits, np.uint8)
        require(packed.size == 0 or packed.max() < _FIVES, "a byte holds more than five trits")
        return packed, powers(np.asarray(exponents), _MIN_EXPONENT, _MAX_EXPONENT)


def _encoded(vector: Vector, out: Vector | None = None) -> Tensors:
    """Return a slab's arrays, and write what they decode to into ``out``."""
    size = vector.size
    blocks = in_rows(vector, _BLOCK)
    square = _squares(blocks)
    filled = np.full(len(blocks), _BLOCK, np.float64)
    if filled.size:
        filled[-1] = size - _BLOCK * (len(blocks) - 1)
    exact = np.maximum(_SCALE * np.sqrt(square / filled), 2.0**-140)
    exponents = np.clip(np.rint(np.log2(exact)), _MIN_EXPONENT, _MAX_EXPONENT).astype(np.int8)
    scales = powers(exponents, _MIN_EXPONENT, _MAX_EXPONENT)
    half = scales[:, None] / 2
    trits = ((blocks >= half).view(np.int8) - (blocks <= -half).view(np.int8)).reshape(-1)[:size]
    if out is not None:
        _put(trits, scales, out)
    return {"trits": _packed(trits), "exponents": exponents}


def _put(trits: npt.NDArray[np.int8], scales: Vector, out: Vector) -> None:
    """Write trits times the scales of their blocks into ``out``; surplus trits are ignored."""
    out[...] = trits[: out.size]
    if out.size % _BLOCK:
        out *= scales.repeat(_BLOCK)[: out.size]
    else:
        blocks = out.reshape(-1, _BLOCK)
        blocks *= scales[:, None]


def _packed(trits: npt.NDArray[np.int8]) -> npt.NDArray[np.uint8]:
    """Pack one coordinate of each fifth of the vector into a byte; the last fifth may be shorter."""
    if trits.size % 5:
        trits = np.append(trits, np.zeros(-trits.size % 5, np.int8))
    fifths = trits.reshape(5, -1)
    sums = fifths[4].copy()
    for fifth in fifths[3::-1]:
        # Intermediate results are between -121 and 121, so int8 holds them.
        sums *= np.int8(3)
        sums += fifth
    packed: npt.NDArray[np.uint8] = sums.view(np.uint8)
    packed += np.uint8(_FIVES // 2)
    return packed


def _unpacked(packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.int8]:
    """Unpack the bytes of `_packed`; the result is padded to a multiple of five."""
    fifths = np.empty((5, packed.size), np.uint8)
    for fifth in fifths[:4]:
        rest = packed // np.uint8(3)
        np.multiply(rest, np.uint8(3), out=fifth)
        np.subtract(packed, fifth, out=fifth)
        packed = rest
    fifths[4] = packed
    trits = fifths.view(np.int8).reshape(-1)
    trits -= np.int8(1)
    return trits


def _squares(blocks: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """Return the sum of squares of each row, computed in float64 where float32 is not precise enough."""
    with np.errstate(over="ignore"):
        square = np.einsum("ij,ij->i", blocks, blocks)
    exact: npt.NDArray[np.float64] = square.astype(np.float64)
    odd = ~((square > _MIN_EXACT) & (square < _MAX_EXACT))
    if odd.any():
        exact[odd] = np.einsum("ij,ij->i", blocks[odd], blocks[odd], dtype=np.float64)
    return exact


METHODS = (Ternary(),)
