"""Every coordinate as -1, 0 or 1 times its block's scale (TernGrad, Wen et al. 2017, arXiv 1705.07878), to be used with
error feedback, which makes up for the bias of rounding to the nearest (Karimireddy et al. 2019, arXiv 1901.09847)."""

from __future__ import annotations

import numpy as np

from sync.codec._contract import Tensors
from sync.codec._dense import _in_rows, _powers, require
from sync.layout import Vector

__all__ = ["Ternary"]

_LEAST, _MOST = -126, 120
_SCALE = 1.2
"""Of the scale over the root mean square: what loses least of a normally distributed block is 1.22."""
_PLACES = np.array([1, 3, 9, 27, 81], np.uint8)


_VALUES = (np.arange(243)[:, None] // _PLACES.astype(np.int64) % 3 - 1).astype(np.float32)
"""The five coordinates of each byte, in units of the scale, shape (243, 5)."""


class Ternary:
    """Blocks of 256 coordinates with one scale, a power of two; five coordinates in a byte: 1.63 bits a coordinate.

    What is nearer to zero than to the scale is not sent, so that what is held back stays exact.
    """

    name, mark, lossy = "ternary", 5, True
    _BLOCK = 256

    def encode(self, vector: Vector) -> Tensors:
        blocks = _in_rows(vector, self._BLOCK)
        square = np.einsum("ij,ij->i", blocks, blocks, dtype=np.float64)
        filled = np.full(len(blocks), self._BLOCK, np.float64)
        if filled.size:
            filled[-1] = vector.size - self._BLOCK * (len(blocks) - 1)
        exact = np.maximum(_SCALE * np.sqrt(square / filled), 2.0**-140)
        exponents = np.clip(np.rint(np.log2(exact)), _LEAST, _MOST).astype(np.int8)
        half = _powers(exponents, _LEAST, _MOST)[:, None] / 2
        fives = np.ones((-(-vector.size // 5), 5), np.uint8)
        fives.reshape(-1)[: vector.size] += (blocks >= half).reshape(-1)[: vector.size]
        fives.reshape(-1)[: vector.size] -= (blocks <= -half).reshape(-1)[: vector.size]
        packed = fives[:, 0] * _PLACES[0]
        for digit in range(1, 5):
            packed += fives[:, digit] * _PLACES[digit]
        return {"trits": packed, "exponents": exponents}

    def decode(self, tensors: Tensors, size: int) -> Vector:
        trits, exponents = tensors.get("trits"), tensors.get("exponents")
        fives, rows = -(-size // 5), -(-size // self._BLOCK)
        require(trits is not None and trits.dtype == np.uint8 and trits.shape == (fives,), "not a vector of trits")
        require(exponents is not None and exponents.dtype == np.int8 and exponents.shape == (rows,), "no scales")
        packed = np.asarray(trits, np.uint8)
        require(packed.size == 0 or packed.max() < 243, "a byte holds more than five trits")
        values = _VALUES[packed]
        blocks = _in_rows(values.reshape(-1)[:size], self._BLOCK)
        blocks *= _powers(np.asarray(exponents), _LEAST, _MOST)[:, None]
        return blocks.reshape(-1)[:size]
