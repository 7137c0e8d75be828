"""Checks and reshaping of arrays, shared by several codecs."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from geofed_pb.errors import GeofedError
from sync.layout import Vector

__all__ = ["in_rows", "powers", "require"]


def require(condition: object, what: str) -> None:
    """Raise ``GeofedError("FRAME_INVALID")`` unless the condition holds."""
    if not condition:
        raise GeofedError("FRAME_INVALID", f"an encoded update is damaged: {what}")


def in_rows(vector: Vector, width: int) -> npt.NDArray[np.float32]:
    """Return a vector in rows of ``width``, read-only for the caller.

    It is a view, or, if the last row is not full, a copy padded with zeros.
    """
    if vector.size % width == 0:
        return vector.reshape(-1, width)
    rows = -(-vector.size // width)
    out = np.zeros((rows, width), np.float32)
    out.reshape(-1)[: vector.size] = vector
    return out


def powers(exponents: npt.NDArray[np.generic], least: int, most: int) -> Vector:
    """Return powers of two. Raises ``GeofedError("FRAME_INVALID")`` for exponents outside ``least`` to ``most``."""
    whole = exponents.astype(np.int32)
    require(whole.size == 0 or (whole.min() >= least and whole.max() <= most), "a scale is out of range")
    return np.ldexp(np.float32(1), whole).astype(np.float32)
