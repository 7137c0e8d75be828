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
    _BLOCK = 256
    _LEAST, _MOST = -126, 120
    """Exponents of the scale: normal float32, and 127 times it still finite."""

    def encode(self, vector: Vector) -> Tensors:
        return self._scaled(vector)[0]

    def encode_into(self, vector: Vector, out: Vector) -> Tensors:
        tensors, scaled, scale = self._scaled(vector)
        scaled *= scale
        out[...] = scaled.reshape(-1)[: out.size]
        return tensors

    def _scaled(self, vector: Vector) -> tuple[Tensors, npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """The arrays, the whole numbers in them in rows of blocks, and the scale of each row, shape (rows, 1)."""
        blocks = in_rows(vector, self._BLOCK)
        largest = np.abs(blocks).max(axis=1, initial=0.0)
        # frexp: largest / 127 = m * 2^e with m < 1, so 127 * 2^e holds it.
        exponents = np.clip(np.frexp(largest / np.float32(127))[1], self._LEAST, self._MOST).astype(np.int8)
        scale = np.ldexp(np.float32(1), exponents.astype(np.int32)).astype(np.float32)[:, None]
        # By a power of two, so that it is the same as dividing; of the least its inverse is still finite.
        scaled = blocks * (1 / scale)
        np.rint(scaled, out=scaled)
        np.clip(scaled, -127, 127, out=scaled)
        scaled += 0.0  # -0.0 becomes 0.0, as which whole numbers read
        return {"int8": scaled.astype(np.int8).reshape(-1)[: vector.size], "exponents": exponents}, scaled, scale

    def decode_into(self, tensors: Tensors, out: Vector) -> None:
        values, exponents = tensors.get("int8"), tensors.get("exponents")
        require(values is not None and values.dtype == np.int8 and values.shape == out.shape, "not a vector of int8")
        rows = -(-out.size // self._BLOCK)
        require(exponents is not None and exponents.dtype == np.int8 and exponents.shape == (rows,), "no scales")
        scale = powers(np.asarray(exponents), self._LEAST, self._MOST)
        whole = out.size // self._BLOCK
        for part, _ in self.apart(whole * self._BLOCK):
            rows_ = slice(part.start // self._BLOCK, part.stop // self._BLOCK)
            out[part] = np.asarray(values)[part]
            blocks = out[part].reshape(-1, self._BLOCK)
            blocks *= scale[rows_, None]
        rest = slice(whole * self._BLOCK, out.size)
        np.multiply(np.asarray(values)[rest], scale[whole:], out=out[rest], dtype=np.float32)


def in_rows(vector: Vector, width: int) -> npt.NDArray[np.float32]:
    """A copy in rows of ``width``, the last one filled with zeros."""
    rows = -(-vector.size // width)
    out = np.zeros((rows, width), np.float32)
    out.reshape(-1)[: vector.size] = vector
    return out


def powers(exponents: npt.NDArray[np.generic], least: int, most: int) -> Vector:
    """Of two; raises ``GeofedError("FRAME_INVALID")`` for exponents beyond ``least`` and ``most``."""
    whole = exponents.astype(np.int32)
    require(whole.size == 0 or (whole.min() >= least and whole.max() <= most), "a scale is out of range")
    return np.ldexp(np.float32(1), whole).astype(np.float32)
