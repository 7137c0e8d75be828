"""Every coordinate as -1, 0 or 1 times its block's scale (TernGrad, Wen et al. 2017, arXiv 1705.07878), to be used with
error feedback, which makes up for the bias of rounding to the nearest (Karimireddy et al. 2019, arXiv 1901.09847)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sync.codec._contract import Tensors
from sync.codec._dense import in_rows, powers, require
from sync.codec._slabs import Slabwise
from sync.layout import Vector

__all__ = ["Ternary"]

_LEAST, _MOST = -126, 120
_SCALE = 1.2
"""Of the scale over the root mean square: what loses least of a normally distributed block is 1.22."""
_PLACES = np.array([1, 3, 9, 27, 81])
_VALUES = (np.arange(243)[:, None] // _PLACES % 3 - 1).astype(np.float32)
"""The five coordinates of each byte, in units of the scale, shape (243, 5)."""
_TINY, _HUGE = np.float32(2.0**-80), np.float32(2.0**120)
"""Sums of squares between these have lost nothing that matters in float32."""


class Ternary(Slabwise):
    """Blocks of 256 coordinates with one scale, a power of two; five coordinates in a byte: 1.63 bits a coordinate.

    What is nearer to zero than to the scale is not sent, so that what is held back stays exact.
    """

    name, mark, lossy = "ternary", 5, True
    _BLOCK = 256
    slab = 28 * 5 * 256
    """Whole blocks and whole bytes."""

    def encode(self, vector: Vector) -> Tensors:
        return self.joined([self._encode_slab(vector[part]) for part, _ in self.apart(vector.size)])

    def _encode_slab(self, vector: Vector) -> Tensors:
        size = vector.size
        blocks = vector.reshape(-1, self._BLOCK) if size % self._BLOCK == 0 else in_rows(vector, self._BLOCK)
        square = _squares(blocks)
        filled = np.full(len(blocks), self._BLOCK, np.float64)
        if filled.size:
            filled[-1] = size - self._BLOCK * (len(blocks) - 1)
        exact = np.maximum(_SCALE * np.sqrt(square / filled), 2.0**-140)
        exponents = np.clip(np.rint(np.log2(exact)), _LEAST, _MOST).astype(np.int8)
        half = powers(exponents, _LEAST, _MOST)[:, None] / 2
        trits = (blocks >= half).view(np.int8) - (blocks <= -half).view(np.int8)
        fives = np.zeros((-(-size // 5), 5), np.float32)
        fives.reshape(-1)[:size] = trits.reshape(-1)[:size]
        # All sums are whole numbers up to 121: exact in float32, whichever way they are added.
        packed = fives @ _PLACES.astype(np.float32) + np.float32(_PLACES.sum())
        return {"trits": packed.astype(np.uint8), "exponents": exponents}

    def decode_into(self, tensors: Tensors, out: Vector) -> None:
        trits, exponents = tensors.get("trits"), tensors.get("exponents")
        fives, rows = -(-out.size // 5), -(-out.size // self._BLOCK)
        require(trits is not None and trits.dtype == np.uint8 and trits.shape == (fives,), "not a vector of trits")
        require(exponents is not None and exponents.dtype == np.int8 and exponents.shape == (rows,), "no scales")
        packed = np.asarray(trits, np.uint8)
        require(packed.size == 0 or packed.max() < 243, "a byte holds more than five trits")
        scales = powers(np.asarray(exponents), _LEAST, _MOST)
        for part, _ in self.apart(out.size):
            bytes_ = packed[part.start // 5 : -(-part.stop // 5)]
            scale = scales[part.start // self._BLOCK : -(-part.stop // self._BLOCK), None]
            # Of the last slab the last byte and the last block may be partly filled.
            filled = part.stop - part.start == self.slab
            room = out[part] if filled else np.zeros(max(5 * bytes_.size, self._BLOCK * len(scale)), np.float32)
            np.take(_VALUES, bytes_, axis=0, out=room[: 5 * bytes_.size].reshape(-1, 5), mode="clip")
            blocks = room[: self._BLOCK * len(scale)].reshape(-1, self._BLOCK)
            blocks *= scale
            if not filled:
                out[part] = room[: part.stop - part.start]


def _squares(blocks: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """Sum of squares of each row, in float64 where float32 does not hold them."""
    with np.errstate(over="ignore"):
        square = np.einsum("ij,ij->i", blocks, blocks)
    exact: npt.NDArray[np.float64] = square.astype(np.float64)
    odd = ~((square > _TINY) & (square < _HUGE))
    if odd.any():
        exact[odd] = np.einsum("ij,ij->i", blocks[odd], blocks[odd], dtype=np.float64)
    return exact
