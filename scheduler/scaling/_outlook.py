"""How far a job has to go, and what each number of workers makes of a step: every explanation of the losses, weighed.

A step of W workers with B samples each makes 1 / (1 + noise / (W B)) of the progress that one of endless samples makes
(McCandlish et al., arXiv 1812.06162, §2.2), and the loss is 1 / (a t^p + c) + floor of the progress t, MLLess's form.
Noise, exponent and floor are tried over a grid; a and c follow by least squares. Each explanation weighs as likely as
it makes the losses (normal errors whose size the best one shows), times what is believed of the noise beforehand.

The noise that counts is the one that steps show. What gradients tell of it is a prior only: under Adam, with sparse
gradients and a learning rate that goes with the square root of the batch, they put it many times too high.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scheduler.scaling._curve import Floats, floors_of, line_of
from scheduler.scaling._model import Observation

_EXPONENTS = (0.5, 0.75, 1.0, 1.5, 2.0)
_NOISES = np.geomspace(1 / 16, 8.0, 15)
"""In batches of all workers."""
_MOST_POINTS = 48
_PRIOR_LOG = 1.0
"""Standard deviation of the noise's logarithm around what gradients tell."""
_VAGUE_LOG = 1.5
"""The same, around one batch of all workers, where they tell nothing."""
_FARTHEST = 20.0
"""Times the progress until now: where a curve never reaches the target, or later than that."""


@dataclass(frozen=True)
class Outlook:
    """Explanations, each with its weight; arrays of shape (E,). Progress counts in steps of endless samples."""

    weights: Floats
    """They add up to 1."""
    noises: Floats
    """In batches of one worker."""
    done: Floats
    """Progress until now."""
    left: Floats
    """To the target."""

    def steps(self, workers: int) -> Floats:
        """To the target, with so many workers from now on; shape (E,)."""
        return np.asarray(self.left * (1 + self.noises / workers))

    def likely(self, holds: Floats) -> float:
        """How much weight those have for which something holds."""
        return float(self.weights @ holds)

    def quantile(self, values: Floats, share: float) -> float:
        """The least value that so much of the weight does not exceed."""
        order = np.argsort(values, kind="stable")
        place = int(np.searchsorted(np.cumsum(self.weights[order]), share * (1 - 1e-12)))
        return float(values[order[min(place, len(order) - 1)]])


def outlook(seen: Sequence[Observation], most: int, target: float) -> Outlook:
    """From all steps until now. Raises ``ValueError`` where there are fewer than four."""
    if len(seen) < 4:
        raise ValueError("an outlook needs four steps")
    losses, groups = np.array([one.loss for one in seen]), _groups(len(seen))
    workers = np.array([float(one.workers) for one in seen])
    made = np.diff([one.step for one in seen], prepend=0)
    counts = np.bincount(groups).astype(float)
    means = np.bincount(groups, losses) / counts
    # The mean of more samples is nearer the truth, and what is late tells more of what is to come.
    inverse = np.bincount(groups, workers) * (1.0 + np.arange(len(counts)))
    inverse /= inverse.mean()
    floors, last = floors_of(means), float(np.mean(means[-2:]))
    rows: list[tuple[Floats, Floats, Floats, Floats]] = []
    for noise in _NOISES * most:
        progress = np.cumsum(made / (1 + noise / workers))
        t = np.bincount(groups, progress) / counts
        for exponent in _EXPONENTS:
            line = line_of((t / t[-1]) ** exponent, means, inverse, floors)
            left = _left(line.slopes, line.starts, line.floors, exponent, float(progress[-1] / t[-1]), last, target)
            shape = line.squares.shape
            with np.errstate(over="ignore"):
                # Losses that leap by orders of magnitude promise progress that no float holds: it is bounded below.
                left = left * t[-1]
            rows.append((line.squares, np.full(shape, noise), np.full(shape, progress[-1]), left))
    squares, noises, done, left = (np.concatenate(part) for part in zip(*rows, strict=True))
    left = np.minimum(left, _FARTHEST * done)
    freedom = max(1, len(means) - 4)
    variance = max(float(squares.min()) / freedom, (1e-6 * max(abs(float(means[0])), 1e-12)) ** 2)
    score = -(squares - squares.min()) / (2 * variance) + _prior(seen, noises, most)
    weights = np.exp(score - score.max())
    return Outlook(weights / weights.sum(), noises, done, left)


def unseen(most: int) -> Outlook:
    """Before the first step: what is believed of the noise alone, of a way of length 1."""
    noises = np.asarray(_NOISES * most)
    weights = np.exp(_prior((), noises, most))
    return Outlook(weights / weights.sum(), noises, np.zeros_like(noises), np.ones_like(noises))


def _groups(count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Which steps are taken together, so that there are not too many points."""
    size = math.ceil(count / _MOST_POINTS)
    # From the end, so that the last group is whole.
    found = -((np.arange(count)[::-1]) // size)
    return np.asarray(found - found.min(), np.int64)


def _left(
    slopes: Floats, starts: Floats, floors: Floats, exponent: float, now: float, last: float, target: float
) -> Floats:
    """Progress to the target, in that of the last point; none where the losses are there already."""
    if last <= target:
        return np.zeros_like(floors)
    gap = target - floors
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        there = ((1 / gap - starts) / slopes) ** (1 / exponent)
    found = np.where((gap > 0) & (slopes > 0) & np.isfinite(there), there - now, np.inf)
    # A curve that is already below a target which the losses have not reached: it is near.
    return np.asarray(np.maximum(found, 0.02 * now))


def _prior(seen: Sequence[Observation], noises: Floats, most: int) -> Floats:
    """Logarithm of what is believed before the losses are looked at."""
    told = gradient_noise(seen)
    if told is None:
        return np.asarray(-0.5 * (np.log(noises / most) / _VAGUE_LOG) ** 2)
    centre = min(max(told, most / 8), most * 2.0)
    return np.asarray(-0.5 * (np.log(noises / centre) / _PRIOR_LOG) ** 2)


def gradient_noise(seen: Sequence[Observation]) -> float | None:
    """The gradient noise scale in batches of one worker (McCandlish et al., appendix A.1): tr(Σ) / |G|².

    Each step's gradient of one worker and mean of all give both without bias; they are averaged apart. None where
    there are none, or where the gradient cannot be told from its noise.
    """
    noise = signal = 0.0
    for one in seen:
        if one.small_norm2 is None or one.large_norm2 is None or one.workers < 2:
            continue
        signal += (one.workers * one.large_norm2 - one.small_norm2) / (one.workers - 1)
        noise += (one.small_norm2 - one.large_norm2) / (1 - 1 / one.workers)
    return noise / signal if signal > 0 and noise > 0 else None
