"""The exact sample-weighted mean that every collective must equal."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from geofed_pb.errors import GeofedError
from sync.layout import Vector

__all__ = ["weighted_mean"]

_BLOCK = 1 << 18
"""Elements summed at a time, so that the float64 sums stay in the cache."""


def weighted_mean(vectors: Sequence[Vector], weights: Sequence[float]) -> Vector:
    """sum(w_i * x_i) / sum(w_i), summed in float64 in the order given, so that equal inputs give equal bits.

    Vectors have equal shapes (n,), weights are samples; a weight of zero leaves its vector out. Raises
    ``GeofedError("FRAME_INVALID")`` where shapes differ or no weight is positive.
    """
    if len({vector.shape for vector in vectors}) != 1 or len(vectors) != len(weights):
        raise GeofedError("FRAME_INVALID", "vectors to merge differ in shape or number")
    total = float(sum(weights))
    if not (math.isfinite(total) and total > 0) or min(weights) < 0:
        raise GeofedError("FRAME_INVALID", f"weights to merge by must be positive: {list(weights)}")
    if len(vectors) == 1:
        return vectors[0].copy()
    out = np.empty_like(vectors[0])
    used = [(vector, weight) for vector, weight in zip(vectors, weights, strict=True) if weight > 0]
    for start in range(0, out.size, _BLOCK):
        part = slice(start, start + _BLOCK)
        block = np.zeros(out[part].shape, np.float64)
        for vector, weight in used:
            block += vector[part].astype(np.float64) * weight
        out[part] = block / total
    return out
