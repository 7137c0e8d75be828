"""Vectors with few entries as lists: where they lie, in about a byte an entry, and their values.

Places are written as Elias (1974) and Fano (1971) do: of n places in a row of ascending numbers, the low bits as they
are and the high bits in unary, 2 + log2(size / n) bits an entry. No entry takes more than 5 bytes with bfloat16 values
at any density, nor with float32 values down to one entry in 64.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from sync.codec import BFloat16, Codec, Float32, Tensors
from sync.codec._dense import require
from sync.layout import Vector

__all__ = ["AsPublished", "ListCodec", "Lists", "Places"]

Bits = npt.NDArray[np.uint8]
Places = npt.NDArray[np.intp]


class ListCodec(Codec, Protocol):
    """A codec of vectors with few entries."""

    def encode_entries(self, size: int, places: Places, values: Vector) -> tuple[Tensors, Vector]:
        """A vector that is zero but at ``places``, which ascend; and the values as they will be read there."""


class Lists:
    """A list of the coordinates that are not zero, or the dense vector where that is smaller."""

    mark = -1
    """Never in a frame of an update."""

    def __init__(self, values: str) -> None:
        """``values``: fp32, bf16 or fp8."""
        forms: dict[str, tuple[Codec, str, int]] = {
            "fp32": (Float32(), "delta", 32),
            "bf16": (BFloat16(), "bf16", 16),
            "fp8": (Float8(), "fp8", 8),
        }
        self._values, self._key, self._width = forms[values]
        self.name, self.lossy = f"lists-{values}", self._values.lossy

    def encode(self, vector: Vector) -> Tensors:
        # Of truth values numpy finds the places several times as fast as of numbers.
        (places,) = np.nonzero(vector != 0)
        return self.encode_entries(vector.size, places, vector[places])[0]

    def encode_entries(self, size: int, places: Places, values: Vector) -> tuple[Tensors, Vector]:
        coded = self._values.encode(values)
        read = self._values.decode(coded, values.size)
        if self._key == "fp8" and not read.all():
            # Too small beside the largest to be told of.
            left = read != 0
            tensors, told = self.encode_entries(size, places[left], values[left])
            read[left] = told
            return tensors, read
        low = _low_bits(size, places.size)
        if places.size * (self._width + low + 1) + (size >> low) >= size * self._width:
            dense = np.zeros(size, np.float32)
            dense[places] = values
            return dict(self._values.encode(dense)), read
        lows = (places & ((1 << low) - 1)).astype(np.uint32)
        high = np.zeros((size >> low) + places.size + 1, np.uint8)
        high[(places >> low) + np.arange(places.size)] = 1
        return {**coded, "low": np.packbits(_bits_of(lows, low)), "high": np.packbits(high)}, read

    def decode(self, tensors: Tensors, size: int) -> Vector:
        if "high" not in tensors:
            return self._values.decode(tensors, size)
        values, packed, unary = tensors.get(self._key), tensors.get("low"), tensors["high"]
        require(values is not None and values.ndim == 1 and values.size <= size, "no values")
        require(packed is not None and packed.dtype == unary.dtype == np.uint8, "no places")
        count = int(np.asarray(values).size)
        low = _low_bits(size, count)
        require(np.asarray(packed).size == -(-count * low // 8), "the places' low bits are too few or too many")
        require(unary.size == -(-((size >> low) + count + 1) // 8), "the places' high bits are too few or too many")
        (marks,) = np.nonzero(np.unpackbits(np.asarray(unary, np.uint8)))
        require(marks.size == count, "there are not as many places as values")
        places = (marks - np.arange(count)) << low
        if low:
            bits = np.unpackbits(np.asarray(packed, np.uint8), count=count * low).reshape(count, low)
            places |= bits.astype(np.int64) @ (1 << np.arange(low, dtype=np.int64))
        require(count == 0 or (places[-1] < size and (np.diff(places) > 0).all()), "places are not in order")
        out = np.zeros(size, np.float32)
        rest = {name: array for name, array in tensors.items() if name not in ("low", "high")}
        out[places] = self._values.decode(rest, count)
        return out


class Float8:
    """Sign, exponent of four bits and three further bits of each value: one part in 16, within a factor of 2^15.

    Exponents count down from the largest of the vector; what is smaller than its 2^15th part becomes zero. Everything
    that is read is a small multiple of a power of two, so that residuals are exact.
    """

    name, mark, lossy = "fp8", -1, True

    def encode(self, vector: Vector) -> Tensors:
        fractions, exponents = np.frexp(np.fmin(np.abs(vector), np.finfo(np.float32).max))
        sixteenths = np.rint(fractions * np.float32(16)).astype(np.int32)
        carried = sixteenths == 16
        sixteenths[carried] = 8
        exponents[carried] += 1
        # Of 2^128 there is no float32.
        sixteenths[exponents > 128] = 15
        exponents = np.minimum(exponents, 128)
        top = int(exponents.max(initial=-200, where=vector != 0))
        codes = ((exponents - top + 15) << 3) + sixteenths - 8
        codes[(codes < 0) | (vector == 0)] = 0
        return {
            "fp8": (codes | (np.signbit(vector) & (codes > 0)) << 7).astype(np.uint8),
            "top": np.array([top], np.int32),
        }

    def decode(self, tensors: Tensors, size: int) -> Vector:
        codes, top = tensors.get("fp8"), tensors.get("top")
        require(codes is not None and codes.dtype == np.uint8 and codes.shape == (size,), "not a vector of eight bits")
        require(top is not None and top.dtype == np.int32 and top.shape == (1,), "no largest exponent")
        largest = int(np.asarray(top)[0])
        require(-200 <= largest <= 128, "an exponent that is none")
        low = np.arange(128)
        table = np.ldexp((8 + (low & 7)) / 16, (low >> 3) - 15 + largest).astype(np.float32)
        table[0] = 0.0
        return np.asarray(np.concatenate([table, -table])[np.asarray(codes)], np.float32)


class AsPublished:
    """Float64 values and int64 places: 16 bytes an entry, as MLLess pickles them. For comparison only."""

    name, mark, lossy = "lists-as-published", -1, False

    def encode(self, vector: Vector) -> Tensors:
        (places,) = np.nonzero(vector != 0)
        return self.encode_entries(vector.size, places, vector[places])[0]

    def encode_entries(self, size: int, places: Places, values: Vector) -> tuple[Tensors, Vector]:
        return {"at": places.astype(np.int64), "values": values.astype(np.float64)}, values

    def decode(self, tensors: Tensors, size: int) -> Vector:
        out = np.zeros(size, np.float32)
        out[np.asarray(tensors["at"], np.int64)] = tensors["values"]
        return out


def _low_bits(size: int, count: int) -> int:
    """How many bits of each place are written as they are."""
    return max(0, (size // count).bit_length() - 1) if count else max(0, size.bit_length())


def _bits_of(numbers: npt.NDArray[np.uint32], width: int) -> Bits:
    """Shape (count, width), the lowest bit first."""
    return ((numbers[:, None] >> np.arange(width, dtype=np.uint32)) & 1).astype(np.uint8)
