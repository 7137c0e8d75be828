"""The largest coordinates of each chunk, with 2-bit values (chunked top-k as in SparseLoCo, arXiv 2508.15706)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sync.codec._contract import Tensors
from sync.codec._dense import in_rows, powers, require
from sync.layout import Vector

__all__ = ["ChunkedTopK"]

_LEAST, _MOST = -126, 120
_ROWS_AT_ONCE = 32
"""Chunks that are worked on together: what arises on the way stays in the cache."""


class ChunkedTopK:
    """At most 64 of every 4096 coordinates, as sign and one of two magnitudes: at most 0.22 bits a coordinate.

    A chunk's magnitudes are s and 3 s, with s a power of two near half the mean magnitude of its largest
    coordinates; one that is nearer to zero than to s is not sent. Indices take 12 bits, values 2.
    """

    name, mark, lossy = "topk", 3, True
    _CHUNK, _KEEP = 4096, 64

    def encode(self, vector: Vector) -> Tensors:
        slab = self._CHUNK * _ROWS_AT_ONCE
        keep = min(self._KEEP, vector.size) or 1
        parts = [self._encode_slab(vector[at : at + slab], keep) for at in range(0, vector.size, slab)]
        parts = parts or [self._encode_slab(vector, keep)]
        counts, places, levels, exponents = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        return {
            "counts": counts,
            "places": _pack12(places.astype(np.uint16, copy=False)),
            "levels": _pack2(levels.astype(np.uint8, copy=False)),
            "exponents": exponents.astype(np.int8, copy=False),
        }

    def _encode_slab(self, vector: Vector, keep: int) -> tuple[npt.NDArray[np.generic], ...]:
        """Counts, places, levels and exponents of some chunks."""
        chunks = in_rows(vector, self._CHUNK)
        size = np.abs(chunks)
        places = np.argpartition(size, self._CHUNK - keep, axis=1)[:, -keep:]
        places.sort(axis=1)
        rows = np.arange(len(chunks))[:, None]
        chosen, magnitude = chunks[rows, places], size[rows, places]
        exponents = np.clip(np.frexp(magnitude.mean(axis=1, dtype=np.float64) / 2)[1], _LEAST, _MOST).astype(np.int8)
        unit = powers(exponents, _LEAST, _MOST)[:, None]
        sent = magnitude >= unit / 2
        levels = (2 * (chosen < 0) + (magnitude >= 2 * unit)).astype(np.uint8)
        return sent.sum(axis=1).astype(np.uint8), places[sent].astype(np.uint16), levels[sent], exponents

    def decode(self, tensors: Tensors, size: int) -> Vector:
        out = np.empty(size, np.float32)
        self.decode_into(tensors, out)
        return out

    def decode_into(self, tensors: Tensors, out: Vector) -> None:
        size = out.size
        rows = -(-size // self._CHUNK)
        counts, exponents = tensors.get("counts"), tensors.get("exponents")
        require(counts is not None and counts.dtype == np.uint8 and counts.shape == (rows,), "no counts")
        require(exponents is not None and exponents.dtype == np.int8 and exponents.shape == (rows,), "no scales")
        number = np.asarray(counts).astype(np.int64)
        total = int(number.sum())
        places = _unpack12(tensors, "places", total).astype(np.int64)
        levels = _unpack2(tensors, "levels", total)
        at = np.repeat(np.arange(rows, dtype=np.int64) * self._CHUNK, number) + places
        require(total == 0 or (at[-1] < size and (np.diff(at) > 0).all()), "places are not in order")
        unit = np.repeat(powers(np.asarray(exponents), _LEAST, _MOST), number)
        value = unit * np.where(levels & 1, np.float32(3), np.float32(1))
        out[...] = 0.0
        out[at] = np.where(levels & 2, -value, value)


def _pack12(values: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint8]:
    """Pairs of 12-bit numbers in three bytes each."""
    pairs = np.zeros((-(-values.size // 2), 2), np.uint16)
    pairs.reshape(-1)[: values.size] = values
    first, second = pairs[:, 0], pairs[:, 1]
    out = np.empty((len(pairs), 3), np.uint8)
    out[:, 0], out[:, 1], out[:, 2] = first & 0xFF, (first >> 8) | ((second & 0xF) << 4), second >> 4
    return out.reshape(-1)


def _unpack12(tensors: Tensors, name: str, count: int) -> npt.NDArray[np.uint16]:
    packed = tensors.get(name)
    pairs = -(-count // 2)
    require(packed is not None and packed.dtype == np.uint8 and packed.shape == (3 * pairs,), "not the places")
    bytes_ = np.asarray(packed).reshape(pairs, 3).astype(np.uint16)
    out = np.empty((pairs, 2), np.uint16)
    out[:, 0] = bytes_[:, 0] | (bytes_[:, 1] & 0xF) << 8
    out[:, 1] = bytes_[:, 1] >> 4 | bytes_[:, 2] << 4
    return out.reshape(-1)[:count]


def _pack2(values: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    fours = np.zeros((-(-values.size // 4), 4), np.uint8)
    fours.reshape(-1)[: values.size] = values
    return fours @ np.array([1, 4, 16, 64], np.uint8)


def _unpack2(tensors: Tensors, name: str, count: int) -> npt.NDArray[np.uint8]:
    packed = tensors.get(name)
    fours = -(-count // 4)
    require(packed is not None and packed.dtype == np.uint8 and packed.shape == (fours,), "not the values")
    shifts = np.array([0, 2, 4, 6], np.uint8)
    fields = np.right_shift(np.asarray(packed, np.uint8)[:, None], shifts) & np.uint8(3)
    return np.asarray(fields, np.uint8).reshape(-1)[:count]
