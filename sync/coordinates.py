"""Conversion of a tensor's values to float32 coordinates that can be averaged and added, and back.

Values that float32 represents exactly, and everything that gradients train, have one coordinate per element. Wider
integers and floating-point numbers are the sum of several coordinates: averaging is linear, so the mean of the parts is
the parts of the mean, and values that are equal everywhere are restored bit for bit. If an untrained tensor contains
infinite values or NaN, two more coordinates per element mark them, because differences of such values would be NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

__all__ = ["PLAIN", "Coding", "array_dtype", "coding_of", "decode", "encode"]

_Array = npt.NDArray[Any]
_Vector = npt.NDArray[np.float32]

_NARROW_FLOATS = (
    "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"
)  # fmt: skip
_INTEGER_BITS = {
    "bool": 1, "int8": 8, "uint8": 8, "int16": 16, "uint16": 16, "int32": 32, "uint32": 32, "int64": 64, "uint64": 64
}  # fmt: skip
_COMPLEX = {"complex64": "float32"}
# Other dtypes, such as complex128, are not supported by safetensors files.
_PARTS = {
    **dict.fromkeys(_NARROW_FLOATS, 1),
    **{name: 1 if bits <= 16 else 2 if bits == 32 else 3 for name, bits in _INTEGER_BITS.items()},
    "float64": 3,
    "complex64": 2,
}
_MIN_MARK = 1e-3
"""Smallest averaged mark that counts: regions or workers with less than this share of the weight cannot make a value
infinite."""


@dataclass(frozen=True)
class Coding:
    """The number and meaning of an element's coordinates."""

    parts: int = 1
    """Coordinates whose sum is the value; for a complex number, first those of the real part."""
    marked: bool = False
    """Whether two more coordinates mark +infinity and -infinity; both marks together mean NaN."""

    @property
    def coordinates(self) -> int:
        """Number of coordinates of an element."""
        return self.parts + 2 * self.marked


PLAIN = Coding()
"""One coordinate per element, which is the value."""


def coding_of(dtype: str, *, trained: bool = False, marked: bool = False) -> Coding | None:
    """Return the coding of a tensor with torch's ``dtype``; None: this type is not supported.

    A tensor that gradients train has one coordinate per element, like its gradient; float64 is then rounded to float32.
    """
    if trained:
        return PLAIN if dtype in _NARROW_FLOATS or dtype == "float64" else None
    parts = _PARTS.get(dtype)
    return None if parts is None else Coding(parts, marked and dtype not in _INTEGER_BITS and dtype not in _COMPLEX)


def array_dtype(dtype: str) -> np.dtype[np.generic]:
    """Return NumPy's type for torch's ``dtype``."""
    return np.dtype(getattr(ml_dtypes, dtype) if hasattr(ml_dtypes, dtype) else dtype)


def encode(values: _Array, coding: Coding) -> _Vector:
    """Return the coordinates of the values, shape (n * coordinates,): all first coordinates, then all second ones, and
    so on.

    ``values`` may have any shape, with n elements.
    """
    flat = np.ascontiguousarray(values).reshape(-1)
    marks: list[_Array] = []
    if coding.marked:
        wrong = np.isnan(flat)
        marks = [(flat == np.inf) | wrong, (flat == -np.inf) | wrong]
        flat = np.where(np.isfinite(flat), flat, np.zeros((), flat.dtype))
    out = [part.astype(np.float32) for part in (*_parts(flat, coding.parts), *marks)]
    return out[0] if len(out) == 1 else np.concatenate(out)


def decode(vector: _Vector, dtype: str, coding: Coding) -> _Array:
    """Return the values, shape (n,). If coordinates have been averaged, these are the nearest values of the type.

    Narrow floating-point types are returned as float32, not rounded yet.
    """
    parts = vector.reshape(coding.coordinates, -1)
    values = _whole(parts[: coding.parts], dtype)
    if coding.marked:
        above, below = parts[-2] > _MIN_MARK, parts[-1] > _MIN_MARK
        if above.any() or below.any():
            values = values.copy()
            values[above] = np.inf
            values[below] = -np.inf
            values[above & below] = np.nan
    return values


def _parts(flat: _Array, parts: int) -> list[_Array]:
    if np.iscomplexobj(flat):
        return [*_parts(np.real(flat), parts // 2), *_parts(np.imag(flat), parts // 2)]
    if parts == 1:
        return [flat]
    if flat.dtype.kind == "f":
        left, found = flat.astype(np.float64), list[_Array]()
        for _ in range(parts):
            with np.errstate(over="ignore"):
                found.append(left.astype(np.float32))
            left = left - found[-1]
        return found
    # Magnitude and sign are separated, so that the parts of small numbers are small, and rounding errors of their means
    # are in proportion.
    size = np.where(flat < 0, np.uint64(0) - flat.astype(np.uint64), flat.astype(np.uint64))
    sign = np.where(flat < 0, np.float32(-1), np.float32(1))
    shift = np.uint64(16 if parts == 2 else 24)
    mask = (np.uint64(1) << shift) - np.uint64(1)
    places = [shift * np.uint64(parts - 1 - number) for number in range(parts)]
    return [sign * (((size >> by) & mask) << by).astype(np.float32) for by in places]


def _whole(parts: npt.NDArray[np.float32], dtype: str) -> _Array:
    if dtype in _COMPLEX:
        half = len(parts) // 2
        out = np.empty(parts.shape[1], np.dtype(dtype))
        out.real, out.imag = (_whole(one, _COMPLEX[dtype]) for one in (parts[:half], parts[half:]))
        return out
    if dtype == "bool":
        return np.asarray(np.rint(parts[0]) > 0)
    if dtype not in _INTEGER_BITS:
        if len(parts) == 1:
            return np.asarray(parts[0], np.float64 if dtype == "float64" else np.float32)
        return np.asarray(parts[::-1].sum(0, dtype=np.float64))
    target = np.dtype(dtype)
    limits = np.iinfo(target)
    rounded = np.rint(parts.astype(np.float64))
    if _INTEGER_BITS[dtype] < 64:
        if len(parts) > 1:
            rounded = np.rint(parts.astype(np.float64).sum(0, keepdims=True))
        return np.asarray(np.clip(rounded[0], limits.min, limits.max), target)
    # float64 cannot represent every sum, so the parts are added as integers modulo 2^64; the first part is clipped away
    # from the limits.
    rounded[0] = np.clip(rounded[0], limits.min, limits.max - (1 << 48))
    if target.kind == "u":
        rounded[:, rounded.sum(0) < 0] = 0
    sizes = np.abs(rounded).astype(np.uint64)
    return np.asarray(np.where(rounded < 0, np.uint64(0) - sizes, sizes).sum(0, dtype=np.uint64).astype(target))
