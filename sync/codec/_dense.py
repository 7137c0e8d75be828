"""Codecs that keep every coordinate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from geofed_pb.errors import GeofedError
from sync.codec._contract import Codec, Tensors
from sync.codec._slabs import SLAB, Slab, Slabwise, in_slabs, one_behind_the_other
from sync.layout import Vector

__all__ = ["BFloat16", "Float32", "Int8Blocks", "in_rows", "powers", "require"]

_LARGEST_BF16 = np.uint32(0x7F7F0000)


def require(condition: object, what: str) -> None:
    if not condition:
        raise GeofedError("FRAME_INVALID", f"an encoded update is damaged: {what}")


class Float32(Codec):
    """The vector as it is: 32 bits a coordinate."""

    name, mark, lossy = "fp32", 0, False

    def encode(self, vector: Vector) -> Tensors:
        return {"delta": vector}

    def apart(self, size: int) -> Iterator[Slab]:
        return in_slabs(self, size, SLAB)

    def joined(self, parts: Sequence[Tensors]) -> Tensors:
        return one_behind_the_other(parts)

    def decode(self, tensors: Tensors, size: int) -> Vector:
        delta = tensors.get("delta")
        require(delta is not None and delta.dtype == np.float32 and delta.shape == (size,), "not a vector of float32")
        return np.asarray(delta, np.float32)


class BFloat16(Slabwise):
    """The upper half of each float32, rounded to nearest even: 16 bits a coordinate."""

    name, mark, lossy = "bf16", 1, True

    def encode(self, vector: Vector) -> Tensors:
        bits = vector.view(np.uint32)
        rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        # What would round up to infinity becomes the largest finite value of its sign.
        overflown = (rounded & np.uint32(0x7F800000)) == np.uint32(0x7F800000)
        if overflown.any():
            rounded[overflown] = (bits[overflown] & np.uint32(0x80000000)) | _LARGEST_BF16
        return {"bf16": (rounded >> np.uint32(16)).astype(np.uint16)}

    def decode_into(self, tensors: Tensors, out: Vector) -> None:
        halves = tensors.get("bf16")
        require(
            halves is not None and halves.dtype == np.uint16 and halves.shape == out.shape, "not a vector of bfloat16"
        )
        bits = out.view(np.uint32)
        for part, _ in self.apart(out.size):
            bits[part] = np.asarray(halves)[part]
            bits[part] <<= np.uint32(16)


class Int8Blocks(Slabwise):
    """Blocks of 256 coordinates with one scale, a power of two: 8.03 bits a coordinate.

    The power of two costs at most one bit of precision against the exact scale, and makes the residual exact.
    """

    name, mark, lossy = "int8", 2, True
    slab = 3 * SLAB
    """What numpy takes to begin with a slab counts as well: a third faster than in one."""
    _BLOCK = 256
    _LEAST, _MOST = -126, 120
    """Exponents of the scale: normal float32, and 127 times it still finite."""

    def encode(self, vector: Vector) -> Tensors:
        return self._scaled(vector)[0]

    def encode_into(self, vector: Vector, out: Vector) -> Tensors:
        tensors, scale = self._scaled(vector)
        self._put(np.asarray(tensors["int8"]), scale, out)
        return tensors

    def _scaled(self, vector: Vector) -> tuple[Tensors, Vector]:
        """The arrays, and the scale of each block."""
        blocks = in_rows(vector, self._BLOCK)
        largest = np.maximum(blocks.max(axis=1, initial=0.0), -blocks.min(axis=1, initial=0.0))
        # frexp: largest / 127 = m * 2^e with m < 1, so 127 * 2^e holds it.
        exponents = np.clip(np.frexp(largest / np.float32(127))[1], self._LEAST, self._MOST).astype(np.int8)
        scale = powers(exponents, self._LEAST, self._MOST)
        # By a power of two, so that it is the same as dividing; of the least its inverse is still finite.
        scaled = blocks * (1 / scale[:, None])
        np.rint(scaled, out=scaled)
        if exponents.max(initial=self._LEAST) == self._MOST:
            # The only ones that may be larger than their scale holds.
            np.clip(scaled, -127, 127, out=scaled)
        return {"int8": scaled.astype(np.int8).reshape(-1)[: vector.size], "exponents": exponents}, scale

    def _put(self, values: npt.NDArray[np.generic], scale: Vector, out: Vector) -> None:
        """Whole numbers times the scales of their blocks."""
        whole = out.size // self._BLOCK * self._BLOCK
        out[...] = values
        blocks = out[:whole].reshape(-1, self._BLOCK)
        blocks *= scale[: len(blocks), None]
        out[whole:] *= scale[len(blocks) :]

    def decode_into(self, tensors: Tensors, out: Vector) -> None:
        values, exponents = tensors.get("int8"), tensors.get("exponents")
        require(values is not None and values.dtype == np.int8 and values.shape == out.shape, "not a vector of int8")
        rows = -(-out.size // self._BLOCK)
        require(exponents is not None and exponents.dtype == np.int8 and exponents.shape == (rows,), "no scales")
        whole, scale = np.asarray(values), powers(np.asarray(exponents), self._LEAST, self._MOST)
        for part, _ in self.apart(out.size):
            self._put(whole[part], scale[part.start // self._BLOCK : -(-part.stop // self._BLOCK)], out[part])


def in_rows(vector: Vector, width: int) -> npt.NDArray[np.float32]:
    """In rows of ``width``, to be read; a copy, the last one filled with zeros, where it is not of whole rows."""
    if vector.size % width == 0:
        return vector.reshape(-1, width)
    rows = -(-vector.size // width)
    out = np.zeros((rows, width), np.float32)
    out.reshape(-1)[: vector.size] = vector
    return out


def powers(exponents: npt.NDArray[np.generic], least: int, most: int) -> Vector:
    """Of two; raises ``GeofedError("FRAME_INVALID")`` for exponents beyond ``least`` and ``most``."""
    whole = exponents.astype(np.int32)
    require(whole.size == 0 or (whole.min() >= least and whole.max() <= most), "a scale is out of range")
    return np.ldexp(np.float32(1), whole).astype(np.float32)
