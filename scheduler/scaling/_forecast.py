"""The rest of a job, and the effect of the number of workers on a step: all explanations of the losses, evaluated.

A step of W workers with B samples each makes 1 / (1 + noise / (W B)) of the progress of a step with infinitely many
samples (McCandlish et al., arXiv 1812.06162, §2.2). The distance of the target follows from 1 / (a t^p + c) + floor of
the progress t, MLLess's form: exponent and floor are tried over a grid, a and c follow by least squares, and each is
weighted by the likelihood of the losses (normal errors of the size that the best one shows).

The noise is not estimated by that form: where losses fall faster and faster, as a network's do at first, it would
attribute that to the last change of workers. Only a change shows the noise, by the kink in the losses there: over the
progress of the right noise there is none (`_told`). Gradients are not used: under Adam, with sparse gradients and a
learning rate proportional to the square root of the batch, they overestimate it many times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scheduler.scaling._curve import Floats, floors_of, line_of
from scheduler.scaling._model import StepObservation

_EXPONENTS = (0.5, 0.75, 1.0, 1.5, 2.0)
_NOISES = np.geomspace(1 / 16, 8.0, 15)
"""Noise scales that are tried, in batches of all workers."""
_MOST_POINTS = 48
"""Points of the loss curve that are fitted at most; longer histories are averaged in groups, so that a fit's time
stays bounded."""
_PRIOR_LOG = 1.5
"""Standard deviation of the noise's logarithm around one batch of all workers, before a change has been observed."""
_DRIFT_LOG = 0.7
"""Standard deviation of the logarithm of the remaining noise around that at a change: it grows as a model learns, by a
factor of ten and more from first to last (McCandlish et al., §2.3), and the law of a step is only approximate."""
_AROUND = 8
"""Steps before and after a change that are compared at most: over more, a curve is not as smooth everywhere."""
_LEAST_AROUND = 6
"""Least steps of both together: a parabola takes three."""
_LONGEST_AROUND, _MOST_AROUND = 40, 16
"""Steps around changes in quick succession, the last ones, and number of last changes, that are used at most."""
_BENDS = np.geomspace(0.1, 1e9, 11)
_FARTHEST = 20.0
"""Largest distance of the target, as a factor of the progress until now; also used where a curve never reaches it."""


@dataclass(frozen=True)
class Forecast:
    """Explanations, each with its weight; arrays of shape (E,). Progress counts in steps of endless samples."""

    weights: Floats
    """Weights that add up to 1."""
    noises: Floats
    """Noise scales in batches of one worker."""
    done: Floats
    """Progress until now."""
    left: Floats
    """Progress left to the target."""

    def steps(self, workers: int) -> Floats:
        """Return the steps to the target, with a constant number of workers from now on; shape (E,)."""
        return np.asarray(self.left * (1 + self.noises / workers))

    def mean(self, values: Floats) -> float:
        """Mean of `values`, of shape (E,), over the explanations by their weights."""
        return float(self.weights @ values)

    def likely(self, holds: npt.NDArray[np.bool_]) -> float:
        """Return the weight of the explanations for which a condition holds."""
        return float(self.weights @ holds)

    def quantile(self, values: Floats, share: float) -> float:
        """Return the least value that a given share of the weight does not exceed."""
        order = np.argsort(values, kind="stable")
        place = int(np.searchsorted(np.cumsum(self.weights[order]), share * (1 - 1e-12)))
        return float(values[order[min(place, len(order) - 1)]])


def forecast(seen: Sequence[StepObservation], most: int, target: float) -> Forecast:
    """Return the forecast after all steps until now. Raises ``ValueError`` where there are fewer than four."""
    if len(seen) < 4:
        raise ValueError("a forecast needs four steps")
    losses, groups = np.array([one.loss for one in seen]), _groups(len(seen))
    workers = np.array([float(one.workers) for one in seen])
    made = np.diff([one.step for one in seen], prepend=0)
    counts = np.bincount(groups).astype(float)
    means = np.bincount(groups, losses) / counts
    # The mean of more samples is more accurate, and late losses predict the rest better.
    inverse = np.bincount(groups, workers) * (1.0 + np.arange(len(counts)))
    inverse /= inverse.mean()
    floors, last = floors_of(means), float(np.mean(means[-2:]))
    grid = np.asarray(_NOISES * most)
    progress = np.cumsum(made / (1 + grid[:, None] / workers), axis=1)
    squares, left = [], []
    for done in progress:
        t = np.bincount(groups, done) / counts
        for exponent in _EXPONENTS:
            line = line_of((t / t[-1]) ** exponent, means, inverse, floors)
            way = _left(line.slopes, line.starts, line.floors, exponent, float(done[-1] / t[-1]), last, target)
            squares.append(line.squares)
            with np.errstate(over="ignore"):
                # Losses that leap by orders of magnitude promise progress that no float holds: it is bounded below.
                left.append(np.minimum(way * t[-1], _FARTHEST * done[-1]))
    off = np.reshape(squares, (len(grid), -1))
    best = off.min(1, keepdims=True)
    variance = np.maximum(best / max(1, len(means) - 4), (1e-6 * max(abs(float(means[0])), 1e-12)) ** 2)
    shapes = np.exp((best - off) / (2 * variance))
    belief = np.exp(_prior()) * _told(made, workers, losses, grid)
    weights = shapes * (belief / shapes.sum(1))[:, None]
    each = weights.shape[1]
    weights = weights.ravel() / weights.sum()
    return Forecast(weights, np.repeat(grid, each), np.repeat(progress[:, -1], each), np.concatenate(left))


def unseen(most: int) -> Forecast:
    """Return the forecast before the first step: the prior of the noise alone, with a target at distance 1."""
    noises, weights = np.asarray(_NOISES * most), np.exp(_prior())
    return Forecast(weights / weights.sum(), noises, np.zeros_like(noises), np.ones_like(noises))


def _groups(count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the group of each step; steps are averaged in groups to limit the number of points."""
    size = math.ceil(count / _MOST_POINTS)
    # From the end, so that the last group is whole.
    found = -((np.arange(count)[::-1]) // size)
    return np.asarray(found - found.min(), np.int64)


def _left(
    slopes: Floats, starts: Floats, floors: Floats, exponent: float, now: float, last: float, target: float
) -> Floats:
    """Return the progress to the target, in units of the last point's; none where the losses have reached it."""
    if last <= target:
        return np.zeros_like(floors)
    gap = target - floors
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        there = ((1 / gap - starts) / slopes) ** (1 / exponent)
    found = np.where((gap > 0) & (slopes > 0) & np.isfinite(there), there - now, np.inf)
    # A curve that is already below a target which the losses have not reached: it is near.
    return np.asarray(np.maximum(found, 0.02 * now))


def _prior() -> Floats:
    """Return the logarithm of each noise's prior."""
    return np.asarray(-0.5 * (np.log(_NOISES) / _PRIOR_LOG) ** 2)


def _told(made: Floats, workers: Floats, losses: Floats, grid: Floats) -> Floats:
    """Return how likely each noise makes the losses around changes of workers, up to a factor."""
    found = np.zeros(len(grid))
    changes = np.flatnonzero(np.diff(workers)) + 1
    changes = changes[changes <= len(losses) - 2]
    # Of changes that follow closely each loss is counted once.
    apart = np.flatnonzero(np.diff(changes) >= _AROUND) + 1
    for close in np.split(changes, apart)[-_MOST_AROUND:]:
        if not len(close):
            continue
        end = int(close[-1]) + _AROUND
        near = slice(max(0, int(close[0]) - _AROUND, end - _LONGEST_AROUND), end)
        if len(losses[near]) >= _LEAST_AROUND:
            progress = np.cumsum(made[near] / (1 + grid[:, None] / workers[near]), axis=1)
            found += _smoothness(progress / progress[:, -1:], losses[near], workers[near])
    off = np.log(grid[:, None] / grid) / _DRIFT_LOG
    blur = np.exp(-0.5 * off**2)
    return np.asarray((blur / blur.sum(1, keepdims=True)) @ np.exp(found - found.max()))


def _smoothness(t: Floats, losses: Floats, workers: Floats) -> Floats:
    """Return the log-likelihood of losses that are smooth over t; shape (K,) for t of shape (K, N) in (0, 1].

    Smooth is a parabola with a third derivative of white noise (a spline of degree five; Wahba 1978, J. R. Stat. Soc. B
    40:364), of any size relative to the errors: sizes are tried over a grid, with equal weights. The prior of the
    parabola is flat, and the size of the errors is the most likely one.
    """
    low = np.minimum(t[:, :, None], t[:, None, :])
    off = np.abs(t[:, :, None] - t[:, None, :])
    bent = (low**5 / 5 + off * low**4 / 2 + off**2 * low**3 / 3) / 4
    spread = _BENDS[:, None, None] * bent[:, None] + np.diag(workers.mean() / workers)
    root = np.linalg.cholesky(spread)
    y = (losses - losses.mean()) / max(float(np.ptp(losses)), 1e-300)
    columns = np.stack([np.ones_like(t), t, t**2, np.broadcast_to(y, t.shape)], axis=-1)[:, None]
    white = np.linalg.solve(root, np.broadcast_to(columns, (*root.shape[:-1], 4)))
    plain, rest = white[..., :3], white[..., 3:]
    normal, side = (np.swapaxes(plain, -1, -2) @ part for part in (plain, rest))
    # Of steps so far apart that all but one are at zero there is no parabola.
    normal = normal + 1e-12 * np.trace(normal, axis1=-2, axis2=-1)[..., None, None] * np.eye(3)
    squares = (rest**2).sum((-2, -1)) - (side * np.linalg.solve(normal, side)).sum((-2, -1))
    logs = -(t.shape[1] - 3) / 2 * np.log(np.maximum(squares, 1e-12))
    logs -= np.log(np.diagonal(root, axis1=-2, axis2=-1)).sum(-1) + np.linalg.slogdet(normal)[1] / 2
    return np.asarray(np.logaddexp.reduce(logs, axis=1))
