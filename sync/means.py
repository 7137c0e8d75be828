"""The exact sample-weighted mean, which the result of every collective must equal."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from geofed_pb.errors import GeofedError
from sync.layout import Vector

__all__ = ["weighted_mean", "weighted_sum"]

_BLOCK = 1 << 16
"""Elements that are summed at a time, so that the float64 sums stay in the CPU's cache."""


def weighted_mean(vectors: Sequence[Vector], weights: Sequence[float]) -> Vector:
    """Return sum(w_i * x_i) / sum(w_i), summed in float64 in the given order, so that equal inputs give equal bits.

    Vectors have equal shapes (n,); weights are samples, and a weight of zero leaves its vector out. Raises
    ``GeofedError("FRAME_INVALID")`` if shapes differ or no weight is positive.
    """
    total = float(sum(weights))
    if not (math.isfinite(total) and total > 0) or min(weights) < 0:
        raise GeofedError(
            "FRAME_INVALID", f"the weights of a merge must not be negative, and not all zero: {list(weights)}"
        )
    if len(vectors) == len(weights) == 1:
        return vectors[0].copy()
    return _summed(vectors, weights, total)


def weighted_sum(vectors: Sequence[Vector], factors: Sequence[float]) -> Vector:
    """Return sum(f_i * x_i) in float32, term by term, so that equal inputs give equal bits; shapes (n,), at least one
    vector.

    It takes a third of the time of float64, and is precise enough for a few vectors whose own values have been rounded
    to float32 more coarsely than their sum is. Raises ``GeofedError("FRAME_INVALID")`` if shapes differ.
    """
    _require_alike(vectors, factors)
    out, term = vectors[0] * np.float32(factors[0]), np.empty_like(vectors[0][:_BLOCK])
    for start in range(0, out.size, _BLOCK):
        sums = out[start : start + _BLOCK]
        for vector, factor in zip(vectors[1:], factors[1:], strict=True):
            np.multiply(vector[start : start + _BLOCK], np.float32(factor), out=term[: sums.size])
            sums += term[: sums.size]
    return out


def _require_alike(vectors: Sequence[Vector], factors: Sequence[float]) -> None:
    if len({vector.shape for vector in vectors}) != 1 or len(vectors) != len(factors):
        raise GeofedError("FRAME_INVALID", "vectors to merge differ in shape or number")


def _summed(vectors: Sequence[Vector], factors: Sequence[float], divisor: float) -> Vector:
    _require_alike(vectors, factors)
    out = np.empty_like(vectors[0])
    used = [(vector, factor) for vector, factor in zip(vectors, factors, strict=True) if factor != 0]
    block, product = np.empty((2, min(_BLOCK, out.size)))
    for start in range(0, out.size, _BLOCK):
        part = slice(start, min(start + _BLOCK, out.size))
        sums, term = block[: part.stop - start], product[: part.stop - start]
        sums.fill(0.0)
        for vector, factor in used:
            # Converting and multiplying in one operation takes half as long again.
            term[...] = vector[part]
            term *= factor
            sums += term
        if divisor != 1.0:
            sums /= divisor
        out[part] = sums
    return out
