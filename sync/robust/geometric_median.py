"""The robust rule ``geometric-median``: the point with the smallest sum of distances to all changes (RFA, Pillutla et
al. 2022, arXiv 1912.13445, algorithm 2: the smoothed Weiszfeld iteration)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from sync.layout import Vector
from sync.means import weighted_mean
from sync.robust._contract import Combined, RobustRule
from sync.robust._numbers import distances

__all__ = ["METHODS", "median_weights"]

_ITERATIONS = 100
"""Most iterations; each needs only the distances between the changes."""
_SMOOTHING = 1e-6
"""Least distance that a weight is computed from, as a fraction of the largest distance between two changes."""
_FAR = 1e4
"""A change that lies so many times as far from the most central one as the median change has no weight: its distance
would cancel the digits of all others."""
_CONVERGED = 1e-9
"""Change of all weights at which the iteration ends."""


def median_weights(squares: Sequence[Sequence[float]]) -> list[float]:
    """Return the weights, with the sum 1, of the changes in their geometric median, from their squared distances.

    The squared distance of x_i to the point sum(w_j x_j) is sum(w_j D_ij) - sum(w_j w_k D_jk) / 2.
    """
    central = min(squares, key=lambda row: sorted(row)[len(row) // 2])
    limit = _FAR**2 * sorted(central)[len(central) // 2]
    used = [number for number, square in enumerate(central) if square <= limit]
    found = _iterated([[squares[row][column] for column in used] for row in used])
    weights = dict(zip(used, found, strict=True))
    return [weights.get(number, 0.0) for number in range(len(squares))]


def _iterated(squares: Sequence[Sequence[float]]) -> list[float]:
    weights = [1.0 / len(squares)] * len(squares)
    least = _SMOOTHING * math.sqrt(max(max(row) for row in squares))
    if not least:
        return weights
    for _ in range(_ITERATIONS):
        to_point = [sum(w * d for w, d in zip(weights, row, strict=True)) for row in squares]
        spread = sum(w * d for w, d in zip(weights, to_point, strict=True)) / 2
        inverse = [1.0 / max(least, math.sqrt(max(0.0, d - spread))) for d in to_point]
        total = sum(inverse)
        before, weights = weights, [one / total for one in inverse]
        if max(abs(one - other) for one, other in zip(weights, before, strict=True)) < _CONVERGED:
            break
    return weights


def _combine(deltas: Sequence[Vector], wrong: int, memory: Mapping[str, Vector]) -> Combined:
    return Combined(weighted_mean(deltas, median_weights(distances(deltas))))


METHODS = (RobustRule("geometric-median", _combine, lambda wrong: 2 * wrong + 1),)
