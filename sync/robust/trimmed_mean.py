"""The robust rules ``trimmed-mean`` and ``median``, coordinate by coordinate (Yin et al. 2018, arXiv 1803.01498,
definitions 1 and 2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sync.layout import Vector
from sync.robust._contract import Combined, RobustRule
from sync.robust._numbers import middle_mean

__all__ = ["METHODS", "median"]


def median(deltas: Sequence[Vector]) -> Vector:
    """Return the coordinate-wise median: the mean of the two middle values if their number is even."""
    return middle_mean(deltas, (len(deltas) - 1) // 2)


def _trimmed(deltas: Sequence[Vector], wrong: int, memory: Mapping[str, Vector]) -> Combined:
    return Combined(middle_mean(deltas, wrong))


def _median(deltas: Sequence[Vector], wrong: int, memory: Mapping[str, Vector]) -> Combined:
    return Combined(median(deltas))


def _minority(wrong: int) -> int:
    return 2 * wrong + 1


METHODS = (RobustRule("trimmed-mean", _trimmed, _minority), RobustRule("median", _median, _minority))
