"""Encoding of the values of a list, in 32, 16, 8 or 4 bits.

A decoded value is always a small multiple of a power of two, or the value itself, so that the residual is known
exactly.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from sync.codec._arrays import require
from sync.codec.bf16 import BFloat16
from sync.layout import Vector

__all__ = ["VALUE_FORMATS", "Bytes", "Float8", "Int4", "ValueFormat"]

Bytes = npt.NDArray[np.uint8]
_LARGEST = np.finfo(np.float32).max


class ValueFormat(Protocol):
    """Converts float32 values, shape (n,), to bytes and back."""

    lossy: bool

    def pack(self, values: Vector) -> Bytes: ...

    def unpack(self, packed: Bytes, count: int) -> Vector:
        """Decode bytes, whose number is ``nbytes(count)``; the values may be in their memory, and not aligned."""

    def nbytes(self, count: int) -> int:
        """Return the number of bytes of so many values."""


class _Float32:
    lossy = False

    def pack(self, values: Vector) -> Bytes:
        return values.astype("<f4", copy=False).view(np.uint8)

    def unpack(self, packed: Bytes, count: int) -> Vector:
        return np.asarray(np.ascontiguousarray(packed).view("<f4"), np.float32)

    def nbytes(self, count: int) -> int:
        return 4 * count


class _BFloat16:
    lossy = True
    _codec = BFloat16()

    def pack(self, values: Vector) -> Bytes:
        return np.asarray(self._codec.encode(values)["bf16"]).astype("<u2").view(np.uint8)

    def unpack(self, packed: Bytes, count: int) -> Vector:
        halves = np.asarray(np.ascontiguousarray(packed).view("<u2"), np.uint16)
        return self._codec.decode({"bf16": halves}, count)

    def nbytes(self, count: int) -> int:
        return 2 * count


class Float8:
    """Encodes each value as a sign, a 4-bit exponent and three further bits: a precision of 1/16, within a range of
    2^15.

    Exponents count down from the largest one of the list; values smaller than its 2^-15th part become zero.
    """

    lossy = True

    def pack(self, values: Vector) -> Bytes:
        fractions, exponents = np.frexp(np.fmin(np.abs(values), _LARGEST))
        sixteenths = np.rint(fractions * np.float32(16)).astype(np.int32)
        carried = sixteenths == 16
        sixteenths[carried] = 8
        exponents[carried] += 1
        # float32 cannot represent 2^128.
        sixteenths[exponents > 128] = 15
        exponents = np.minimum(exponents, 128)
        top = int(exponents.max(initial=-200, where=values != 0))
        codes = ((exponents - top + 15) << 3) + sixteenths - 8
        codes[(codes < 0) | (values == 0)] = 0
        codes = (codes | (np.signbit(values) & (codes > 0)) << 7).astype(np.uint8)
        return np.concatenate([np.array([top], "<i2").view(np.uint8), codes])

    def unpack(self, packed: Bytes, count: int) -> Vector:
        largest = int(np.frombuffer(packed[:2].tobytes(), "<i2")[0])
        require(-200 <= largest <= 128, "an exponent is invalid")
        low = np.arange(128)
        table = np.ldexp((8 + (low & 7)) / 16, (low >> 3) - 15 + largest).astype(np.float32)
        table[0] = 0.0
        return np.asarray(np.concatenate([table, -table])[packed[2:]], np.float32)

    def nbytes(self, count: int) -> int:
        return 2 + count


class Int4:
    """Encodes values as multiples, from -7 to 7, of a power of two for every 64 values: 4.13 bits per value.

    Values below half of that power become zero: a value is sent if it is large enough within its block.
    """

    lossy = True
    _BLOCK = 64
    _MIN_EXPONENT = -128
    """Smallest exponent of the power of two."""
    _MAX_EXPONENT = 125
    """Largest exponent: float32 cannot represent 7.5 times 2^126."""

    def pack(self, values: Vector) -> Bytes:
        blocks = -(-values.size // self._BLOCK)
        row = np.zeros(blocks * self._BLOCK, np.float32)
        np.copysign(np.fmin(np.abs(values), _LARGEST), values, out=row[: values.size])
        whole = row.reshape(blocks, self._BLOCK)
        _, exponents = np.frexp(np.abs(whole).max(axis=1) / np.float32(7.5))
        # The largest value then becomes 4 to 7.
        steps = np.clip(exponents, self._MIN_EXPONENT, self._MAX_EXPONENT).astype(np.int8)
        codes = np.clip(np.rint(np.ldexp(whole, -steps.astype(np.int32)[:, None])), -7, 7).astype(np.int8).reshape(-1)
        nibbles = (codes[: 2 * -(-values.size // 2)] & 15).astype(np.uint8)
        return np.concatenate([steps.view(np.uint8), nibbles[::2] << 4 | nibbles[1::2]])

    def unpack(self, packed: Bytes, count: int) -> Vector:
        blocks = -(-count // self._BLOCK)
        steps, pairs = packed[:blocks].view(np.int8), packed[blocks:]
        require(blocks == 0 or int(steps.max()) <= self._MAX_EXPONENT, "a power of two is invalid")
        codes = np.empty(2 * pairs.size, np.int8)
        codes[::2], codes[1::2] = pairs >> 4, pairs & 15
        codes[codes > 7] -= 16
        require(not (codes == -8).any(), "a multiple is invalid")
        scales = np.ldexp(np.float32(1), steps.astype(np.int32)).astype(np.float32)
        return np.asarray(codes[:count] * np.repeat(scales, self._BLOCK)[:count], np.float32)

    def nbytes(self, count: int) -> int:
        return -(-count // self._BLOCK) + -(-count // 2)


VALUE_FORMATS: dict[str, ValueFormat] = {"fp32": _Float32(), "bf16": _BFloat16(), "fp8": Float8(), "int4": Int4()}
"""The formats, by their names in job files."""
