"""Coefficients from what was measured, by robust linear least squares.

All forms are linear in their coefficients, so that no start point is needed: FasDL's own fit of a (B + b) / (M + m)
begins at a singular one. Residuals are relative, as a step of 20 ms and one of 5 s must count alike, and Huber's
weights (1964) by iteration keep a few bad points from leading; a prior holds what the points do not tell.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from scheduler._nonnegative import nonnegative_least_squares
from scheduler.tuning._model import ChannelProfile, Compute, Memory
from sync.collective import TERMS, Correction, Merges, merge_terms

Floats = npt.NDArray[np.float64]

_HUBER = 1.345
"""Standard deviations from which on a residual counts less (95 % efficiency for normal ones)."""
_ROUNDS = 30
"""Rounds of reweighting, at most; few points agree after less than ten, and then it ends earlier."""
_LEAST_SPREAD = 1e-3
"""Relative; of points that agree better than this no one is an outlier."""
_MOST_APART = 0.5
"""Relative; a residual counts for no more where platforms are compared."""
_CORE_MB = (0.0, 1769.0)
"""Platforms where memory buys no speed, and AWS Lambda."""


@dataclass(frozen=True)
class StepPoint:
    """A worker's forward and backward pass, measured."""

    batch: int
    memory_mb: int
    seconds: float
    peak_mb: float = 0.0
    """Largest memory of the process meanwhile; 0: not measured."""


@dataclass(frozen=True)
class MergePoint:
    """A merge, measured: an iteration without its compute."""

    collective: str
    workers: int
    chunks: int
    size_bytes: float
    seconds: float
    share: float = 1.0
    """Of the bandwidth, by the function's memory."""
    compute_seconds: float = 0.0
    """Of the iteration: errors of the merge count relative to the whole."""


def least_squares(
    features: npt.ArrayLike,
    targets: npt.ArrayLike,
    *,
    scale: npt.ArrayLike | None = None,
    prior: npt.ArrayLike | None = None,
    pull: npt.ArrayLike | float = 0.0,
) -> Floats:
    """Nonnegative coefficients of a linear form, by Huber's M-estimate.

    ``features``: (points, coefficients). ``scale``: what a residual is measured by, of each point (default: the
    target). ``prior``: where coefficients are drawn to, with the weight ``pull`` of so many points that say so, each
    by its share of the scale. Raises ``ValueError`` for no points, or for numbers that are none.
    """
    x, y = np.atleast_2d(np.asarray(features, float)), np.asarray(targets, float)
    by = np.abs(y) if scale is None else np.asarray(scale, float)
    if not len(y) or not (np.isfinite(x).all() and np.isfinite(y).all() and (by > 0).all()):
        raise ValueError("coefficients need points with finite numbers, and a scale above zero")
    x, y = x / by[:, None], y / by
    count = x.shape[1]
    drawn = np.zeros(count) if prior is None else np.asarray(prior, float)
    rows, sums, pulls = np.zeros((len(y) + count, count)), np.empty(len(y) + count), np.sqrt(np.asarray(pull, float))
    rows.reshape(-1)[len(y) * count :: count + 1], sums[len(y) :] = pulls, pulls * drawn
    weights = np.ones(len(y))
    coefficients = drawn
    for _ in range(_ROUNDS):
        before = coefficients
        root = np.sqrt(weights)
        rows[: len(y)], sums[: len(y)] = x * root[:, None], y * root
        coefficients = nonnegative_least_squares(rows, sums)
        residuals = np.abs(y - x @ coefficients)
        spread = max(_LEAST_SPREAD, 1.4826 * statistics.median(residuals.tolist()))
        earlier, weights = weights, np.minimum(1.0, _HUBER * spread / np.maximum(residuals, 1e-12))
        if (weights == earlier).all() or np.allclose(before, coefficients, rtol=1e-9, atol=1e-15):
            break
    return coefficients


def fit_compute(points: Sequence[StepPoint], core_mbs: Sequence[float] = _CORE_MB) -> Compute:
    """T = (fixed + per sample * batch) / share; of the platforms, the one that leaves the smallest residual.

    Points of one memory do not tell what memory buys: there it buys nothing. Raises ``ValueError`` for no points.
    """
    return _fit_compute(tuple(points), tuple(core_mbs))


@lru_cache(maxsize=2048)
def _fit_compute(points: tuple[StepPoint, ...], core_mbs: tuple[float, ...]) -> Compute:
    """Return it; cached, since every batch that a plan tries asks for each region's."""
    if len({point.memory_mb for point in points}) < 2:
        core_mbs = (0.0,)
    found: list[tuple[float, Compute]] = []
    seconds = np.array([point.seconds for point in points])
    for core_mb in core_mbs:
        slower = np.array([max(1.0, core_mb / point.memory_mb) for point in points])
        features = np.column_stack([slower, slower * [point.batch for point in points]])
        fixed, each = least_squares(features, seconds)
        # Not the median: where most points are of much memory, those of little are what tells platforms apart.
        residual = float(np.minimum(np.abs(features @ [fixed, each] / seconds - 1), _MOST_APART).mean())
        found.append((residual, Compute(float(fixed), float(each), core_mb)))
    return min(found, key=lambda one: one[0])[1]


def fit_memory(points: Sequence[StepPoint]) -> Memory:
    """Peak memory by batch. Raises ``ValueError`` where none was measured."""
    return _fit_memory(tuple(points))


@lru_cache(maxsize=2048)
def _fit_memory(points: tuple[StepPoint, ...]) -> Memory:
    """Return it; cached, since a plan asks twice for each region."""
    told = [point for point in points if point.peak_mb > 0]
    features = [[1.0, float(point.batch)] for point in told]
    base, each = least_squares(np.reshape(features, (-1, 2)), [point.peak_mb for point in told])
    # No point may need more than is predicted: who has too little memory fails.
    missing = max(max(0.0, point.peak_mb - base - each * point.batch) for point in told)
    return Memory(float(base) + missing, float(each))


def fit_correction(points: Sequence[MergePoint], channel: ChannelProfile, *, faithful: bool = False) -> Correction:
    """What measured merges make of the closed form over a channel's probed constants.

    A few points move the terms that they tell of; the others stay as they are. Raises ``ValueError`` for no points.
    """
    terms = np.vstack([_terms(point, channel, faithful) for point in points]) if points else np.zeros((0, len(TERMS)))
    seconds = np.array([point.seconds for point in points])
    whole = seconds + np.array([point.compute_seconds for point in points])
    # What overlapping hides is told as what it fails to hide, which is nonnegative like all others.
    could = terms[:, _HIDING].sum(axis=1)
    latency = max(1e-6, channel.put_seconds + channel.get_seconds)
    units = np.array([1.0] * _SHARES + [latency / 10, latency])
    scaled = least_squares(terms * units, seconds + could, scale=whole, prior=_PRIOR, pull=_PULLS)
    found = scaled * units
    found[_HIDING] = 1.0 - found[_HIDING]
    return Correction(*(float(value) for value in found))


_HIDING = [TERMS.index("hidden"), TERMS.index("duplex")]
_PRIOR = (1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0)
"""In the order of `TERMS`; of what is hidden: how much of it is not."""
_PULLS = (1e-3, 1e-3, 1e-3, 1e-4, 1e-4, 1e-3, 1e-3, 1e-3, 1e-3)
_SHARES = len(TERMS) - 2
"""The last two coefficients are seconds, and are drawn to zero by what of the latency they are."""


def _terms(point: MergePoint, channel: ChannelProfile, faithful: bool) -> Floats:
    row = Merges.of([(point.collective, point.workers, point.chunks, point.share)])
    return merge_terms(row, point.size_bytes, channel, faithful=faithful).terms


assert len(_PRIOR) == len(TERMS) == len(fields(Correction))
