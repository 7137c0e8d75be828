"""The codec ``topk``: the largest coordinates of each chunk, with 2-bit values (chunked top-k as in SparseLoCo, arXiv
2508.15706)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from sync.codec._arrays import in_rows, powers, require
from sync.codec._contract import Automatic, Tensors
from sync.codec._slabs import Slab, SlabCodec, concatenated
from sync.layout import Vector

__all__ = ["METHODS", "ChunkedTopK"]

_MIN_EXPONENT = -126
"""Smallest exponent of a scale."""
_MAX_EXPONENT = 120
"""Largest exponent of a scale."""
_CHUNK = 4096
"""Coordinates of a chunk."""
_KEEP = 64
"""Coordinates that are sent of a chunk, at most."""
_GROUPS = 256
"""Groups of a chunk; each consists of every 256th coordinate."""
_SMALLEST = np.float32(2.0**-149)
"""The smallest positive float32."""


class ChunkedTopK(SlabCodec):
    """Encodes at most 64 of every 4096 coordinates, as a sign and one of two magnitudes: at most 0.22 bits per
    coordinate.

    A chunk's magnitudes are s and 3 s, where s is a power of two near half the mean magnitude of its largest
    coordinates. A coordinate that is closer to zero than to s is not sent. Indices take 12 bits, values 2.
    """

    name, mark, lossy = "topk", 3, True
    size_factor, bytes_per_second, automatic, in_blocks = 0.0072, 200e6, Automatic.UNDER_WAY, True
    last, in_ranges, merges = "int8", True, False

    def encode(self, vector: Vector) -> Tensors:
        """Encode float32 of shape (n,) slab by slab."""
        return self.join_slabs([slab.encode(vector[part]) for part, slab in self.slabs_of(vector.size)])

    def slabs_of(self, size: int) -> Iterator[Slab]:
        """Return the slices of a vector of `size` coordinates, with a codec for each that leaves indices and levels
        unpacked."""
        return _UNPACKED.slabs_of(size)

    def join_slabs(self, parts: Iterable[Tensors]) -> Tensors:
        """Concatenate the tensors of all slabs, in order, and pack indices in 12 bits and levels in 2."""
        loose = concatenated(parts)
        indices, levels = np.asarray(loose["places"], np.uint16), np.asarray(loose["levels"], np.uint8)
        return {**loose, "places": _pack12(indices), "levels": _pack2(levels)}

    def decode_into(self, tensors: Tensors, out: Vector) -> None:
        """Write the decoded coordinates to `out`, shape (n,).

        Raises ``GeofedError("FRAME_INVALID")`` for invalid tensors.
        """
        _UNPACKED.decode_into(_unpacked(tensors), out)

    def check(self, tensors: Tensors, size: int) -> None:
        """Check types, shapes, scales and indices."""
        _values(_unpacked(tensors), size)

    def decode_range(self, tensors: Tensors, part: slice, size: int) -> Vector:
        """Decode some coordinates to a new vector."""
        begin, stop, _ = part.indices(size)
        rows, counts = slice(begin // _CHUNK, -(-stop // _CHUNK)), np.asarray(tensors["counts"])
        before, number = int(counts[: rows.start].sum(dtype=np.int64)), counts[rows].astype(np.int64)
        total = int(number.sum())
        # Pairs and groups of four that are shared with the chunk before are decoded, and left out.
        pairs, fours = slice(before // 2, -(-(before + total) // 2)), slice(before // 4, -(-(before + total) // 4))
        packed = np.asarray(tensors["places"], np.uint8)[3 * pairs.start : 3 * pairs.stop]
        places = _pairs_of(packed)[before % 2 : before % 2 + total]
        levels = _fours_of(np.asarray(tensors["levels"], np.uint8)[fours])[before % 4 : before % 4 + total]
        at = np.repeat(np.arange(rows.start, rows.stop) * _CHUNK - begin, number) + places
        value = _levelled(levels, np.asarray(tensors["exponents"])[rows], number)
        out = np.zeros(stop - begin, np.float32)
        if begin % _CHUNK or stop % _CHUNK:
            inside = (at >= 0) & (at < out.size)
            at, value = at[inside], value[inside]
        out[at] = value
        return out


class _Unpacked(SlabCodec):
    """The same with two bytes per index, and one per value."""

    name, mark, lossy = ChunkedTopK.name, ChunkedTopK.mark, ChunkedTopK.lossy
    size_factor, bytes_per_second = ChunkedTopK.size_factor, ChunkedTopK.bytes_per_second
    slab = 32 * _CHUNK

    def encode(self, vector: Vector) -> Tensors:
        return _chosen(vector)[0]

    def encode_into(self, vector: Vector, out: Vector) -> Tensors:
        tensors, at, value = _chosen(vector)
        out[...] = 0.0
        out[at] = value
        return tensors

    def decode_into(self, tensors: Tensors, out: Vector) -> None:
        at, value = _values(tensors, out.size)
        out[...] = 0.0
        out[at] = value


_UNPACKED = _Unpacked()


def _unpacked(tensors: Tensors) -> Tensors:
    """Return the arrays with two bytes per index and one per value. Raises ``GeofedError("FRAME_INVALID")``."""
    counts = tensors.get("counts")
    require(counts is not None and counts.dtype == np.uint8, "the counts are missing or invalid")
    total = int(np.asarray(counts).sum(dtype=np.int64))
    return {**tensors, "places": _unpack12(tensors, "places", total), "levels": _unpack2(tensors, "levels", total)}


def _values(tensors: Tensors, size: int) -> tuple[npt.NDArray[np.int64], Vector]:
    """Return the coordinates that are sent, in order, and their values. Raises ``GeofedError("FRAME_INVALID")``."""
    rows = -(-size // _CHUNK)
    counts, exponents = tensors.get("counts"), tensors.get("exponents")
    require(counts is not None and counts.shape == (rows,), "the counts are missing or invalid")
    require(
        exponents is not None and exponents.dtype == np.int8 and exponents.shape == (rows,),
        "the scales are missing or invalid",
    )
    number, levels = np.asarray(counts).astype(np.int64), np.asarray(tensors["levels"], np.uint8)
    at = np.repeat(np.arange(rows, dtype=np.int64) * _CHUNK, number) + np.asarray(tensors["places"], np.int64)
    require(at.size == 0 or (at[-1] < size and (np.diff(at) > 0).all()), "indices are not in order")
    return at, _levelled(levels, np.asarray(exponents), number)


def _levelled(
    levels: npt.NDArray[np.uint8], exponents: npt.NDArray[np.generic], number: npt.NDArray[np.int64]
) -> Vector:
    """Return the values of chunks that have so many each."""
    unit = np.repeat(powers(exponents, _MIN_EXPONENT, _MAX_EXPONENT), number)
    value = unit * np.where(levels & 1, np.float32(3), np.float32(1))
    return np.where(levels & 2, -value, value)


def _chosen(vector: Vector) -> tuple[Tensors, npt.NDArray[np.int64], Vector]:
    """Return a slab's arrays, the coordinates that they contain, in order, and the value of each."""
    size = np.abs(vector)
    chunks = in_rows(size, _CHUNK)
    rows, at = len(chunks), _candidates(chunks)
    row, magnitude = at // _CHUNK, chunks.reshape(-1)[at]
    largest = _largest(row, magnitude, rows)
    filled = np.full(rows, _KEEP)
    filled[-1:] = max(1, min(_KEEP, vector.size - _CHUNK * (rows - 1)))
    mean = largest.sum(axis=1, dtype=np.float64) / filled
    exponents = np.clip(np.frexp(mean / 2)[1], _MIN_EXPONENT, _MAX_EXPONENT).astype(np.int8)
    unit = powers(exponents, _MIN_EXPONENT, _MAX_EXPONENT)
    least = np.maximum(largest[:, 0], unit / 2)
    sent = magnitude >= least[row]
    counts = np.bincount(row[sent], minlength=rows)
    if counts.max(initial=0) > _KEEP:
        sent &= ~_beyond(row, magnitude, least, rows)
        counts = np.bincount(row[sent], minlength=rows)
    at, row, magnitude = at[sent], row[sent], magnitude[sent]
    unit, negative = unit[row], vector[at] < 0
    large = magnitude >= 2 * unit
    value = unit * np.where(large, np.float32(3), np.float32(1))
    tensors = {
        "counts": counts.astype(np.uint8),
        "places": (at % _CHUNK).astype(np.uint16),
        "levels": (2 * negative + large).astype(np.uint8),
        "exponents": exponents,
    }
    return tensors, at, np.where(negative, -value, value)


def _candidates(size: Vector) -> npt.NDArray[np.int64]:
    """Return coordinates, in order, that include the largest ones of each row that are not zero.

    They are hardly more than those, unless many coordinates are equal.
    """
    # As many groups as coordinates are to be sent have one that is at least this large, so at least as many coordinates
    # are.
    least = size.reshape(len(size), _CHUNK // _GROUPS, _GROUPS).max(axis=1)
    least.partition(_GROUPS - _KEEP, axis=1)
    return np.flatnonzero(size >= np.maximum(least[:, _GROUPS - _KEEP, None], _SMALLEST))


def _largest(row: npt.NDArray[np.int64], magnitude: Vector, rows: int) -> Vector:
    """Return the largest magnitudes of each row, the smallest of them first, shape (rows, 64); zeros if there are
    fewer."""
    count = np.bincount(row, minlength=rows)
    width = max(_KEEP, int(count.max(initial=0)))
    column = np.arange(row.size) - np.repeat(np.cumsum(count) - count, count)
    table = np.zeros((rows, width), np.float32)
    table[row, column] = magnitude
    table.partition(width - _KEEP, axis=1)
    return table[:, width - _KEEP :]


def _beyond(row: npt.NDArray[np.int64], magnitude: Vector, least: Vector, rows: int) -> npt.NDArray[np.bool_]:
    """Return which coordinates exceed the limit of their row: the last ones of those that equal the smallest magnitude
    sent."""
    tied, larger = magnitude == least[row], magnitude > least[row]
    free = _KEEP - np.bincount(row[larger], minlength=rows)
    before = np.cumsum(np.bincount(row[tied], minlength=rows))
    number = np.cumsum(tied) - np.append(0, before[:-1])[row]
    beyond: npt.NDArray[np.bool_] = tied & (number > free[row])
    return beyond


def _pack12(values: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint8]:
    """Pack pairs of 12-bit numbers into three bytes each."""
    pairs = np.zeros((-(-values.size // 2), 2), np.uint16)
    pairs.reshape(-1)[: values.size] = values
    first, second = pairs[:, 0], pairs[:, 1]
    out = np.empty((len(pairs), 3), np.uint8)
    out[:, 0], out[:, 1], out[:, 2] = first & 0xFF, (first >> 8) | ((second & 0xF) << 4), second >> 4
    return out.reshape(-1)


def _unpack12(tensors: Tensors, name: str, count: int) -> npt.NDArray[np.uint16]:
    packed = tensors.get(name)
    pairs = -(-count // 2)
    require(
        packed is not None and packed.dtype == np.uint8 and packed.shape == (3 * pairs,),
        "the indices are missing or invalid",
    )
    return _pairs_of(np.asarray(packed, np.uint8))[:count]


def _pairs_of(packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint16]:
    """Return the numbers of pairs of 12 bits."""
    bytes_ = packed.reshape(-1, 3).astype(np.uint16)
    out = np.empty((len(bytes_), 2), np.uint16)
    out[:, 0] = bytes_[:, 0] | (bytes_[:, 1] & 0xF) << 8
    out[:, 1] = bytes_[:, 1] >> 4 | bytes_[:, 2] << 4
    return out.reshape(-1)


def _pack2(values: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    fours = np.zeros((-(-values.size // 4), 4), np.uint8)
    fours.reshape(-1)[: values.size] = values
    return fours @ np.array([1, 4, 16, 64], np.uint8)


def _unpack2(tensors: Tensors, name: str, count: int) -> npt.NDArray[np.uint8]:
    packed = tensors.get(name)
    fours = -(-count // 4)
    require(
        packed is not None and packed.dtype == np.uint8 and packed.shape == (fours,),
        "the values are missing or invalid",
    )
    return _fours_of(np.asarray(packed, np.uint8))[:count]


def _fours_of(packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Return the numbers of groups of four of 2 bits."""
    shifts = np.array([0, 2, 4, 6], np.uint8)
    fields = np.right_shift(packed[:, None], shifts) & np.uint8(3)
    return np.asarray(fields, np.uint8).reshape(-1)


METHODS = (ChunkedTopK(),)
