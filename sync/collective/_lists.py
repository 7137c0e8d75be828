"""Vectors with few entries as lists: where they lie, in about a byte an entry, and their values.

Places are written as Elias (1974) and Fano (1971) do: of n places in a row of ascending numbers, the low bits as they
are and the high bits in unary, 2 + log2(size / n) bits an entry. No entry takes more than 5 bytes with bfloat16 values
at any density, nor with float32 values down to one entry in 64.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sync.codec import BFloat16, Codec, Float32, Tensors
from sync.codec._dense import require
from sync.layout import Vector

__all__ = ["AsPublished", "Lists"]

Bits = npt.NDArray[np.uint8]


class Lists:
    """A list of the coordinates that are not zero, or the dense vector where that is smaller."""

    mark = -1
    """Never in a frame of an update."""

    def __init__(self, values: str) -> None:
        """``values``: fp32 or bf16."""
        self._values: Codec = Float32() if values == "fp32" else BFloat16()
        self._key = "delta" if values == "fp32" else "bf16"
        self._width = 32 if values == "fp32" else 16
        self.name, self.lossy = f"lists-{values}", self._values.lossy

    def encode(self, vector: Vector) -> Tensors:
        (places,) = np.nonzero(vector)
        low = _low_bits(vector.size, places.size)
        if places.size * (self._width + low + 1) + (vector.size >> low) >= vector.size * self._width:
            return dict(self._values.encode(vector))
        lows = (places & ((1 << low) - 1)).astype(np.uint32)
        high = np.zeros((vector.size >> low) + places.size + 1, np.uint8)
        high[(places >> low) + np.arange(places.size)] = 1
        return {
            **self._values.encode(vector[places]),
            "low": np.packbits(_bits_of(lows, low)),
            "high": np.packbits(high),
        }

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


class AsPublished:
    """Float64 values and int64 places: 16 bytes an entry, as MLLess pickles them. For comparison only."""

    name, mark, lossy = "lists-as-published", -1, False

    def encode(self, vector: Vector) -> Tensors:
        (places,) = np.nonzero(vector)
        return {"at": places.astype(np.int64), "values": vector[places].astype(np.float64)}

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
