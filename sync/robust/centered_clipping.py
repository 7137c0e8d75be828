"""The robust rule ``centered-clipping``: the last merged change, plus the mean of the clipped differences from it
(Karimireddy et al. 2021, arXiv 2012.10333, algorithm 1, one iteration)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

import numpy as np

from sync.layout import Vector
from sync.means import weighted_sum
from sync.robust._contract import Combined, RobustRule
from sync.robust._numbers import squared_distance

__all__ = ["METHODS"]

_CENTER = "center"


def _combine(deltas: Sequence[Vector], wrong: int, memory: Mapping[str, Vector]) -> Combined:
    """Clip to the median distance, instead of a radius that the user would have to find for each task: as long as the
    wrong changes are fewer than half, it is no larger than the largest distance of a right one."""
    center = memory[_CENTER] if _CENTER in memory else np.zeros_like(deltas[0])
    lengths = [math.sqrt(squared_distance(delta, center)) for delta in deltas]
    radius = statistics.median_low(lengths)
    factors = [min(1.0, radius / length) / len(deltas) if length else 0.0 for length in lengths]
    delta = weighted_sum([center, *deltas], [1.0 - sum(factors), *factors])
    return Combined(delta, {_CENTER: delta})


METHODS = (RobustRule("centered-clipping", _combine, lambda wrong: 2 * wrong + 1, from_last=True),)
