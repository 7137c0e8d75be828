"""Statistical efficiency: how many steps a job needs by its batch, from gradients and from runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scheduler.tuning._fit import least_squares
from scheduler.tuning._model import Convergence


@dataclass(frozen=True)
class NormPair:
    """Squared norms of the gradient at one model, from a few samples and from many."""

    small_batch: int
    small_norm2: float
    """Mean over the small batches, where there were several."""
    large_batch: int
    large_norm2: float


def noise_scale(pairs: Sequence[NormPair]) -> float:
    """The simple gradient noise scale in samples, tr(Σ) / |G|² (McCandlish et al., arXiv 1812.06162, appendix A.1).

    Numerator and denominator are unbiased for each pair and averaged apart, since their ratio is not. ``math.inf``
    where the gradient itself cannot be told from its noise. Raises ``ValueError`` without a pair of two batches.
    """
    told = [pair for pair in pairs if 0 < pair.small_batch < pair.large_batch]
    if not told:
        raise ValueError("the noise scale needs gradients of two batches")
    signal = float(np.mean([_signal(pair) for pair in told]))
    noise = float(np.mean([_noise(pair) for pair in told]))
    if signal <= 0:
        return math.inf
    return max(0.0, noise) / signal


def _signal(pair: NormPair) -> float:
    difference = pair.large_batch - pair.small_batch
    return (pair.large_batch * pair.large_norm2 - pair.small_batch * pair.small_norm2) / difference


def _noise(pair: NormPair) -> float:
    return (pair.small_norm2 - pair.large_norm2) / (1 / pair.small_batch - 1 / pair.large_batch)


@dataclass(frozen=True)
class RunPoint:
    """A run that has reached its goal."""

    global_batch: float
    steps: float
    stale_share: float = 0.0
    """Of the samples, those of workers that were ``staleness`` behind."""
    staleness: int = 0


def fit_progress(points: Sequence[RunPoint], noise_samples: float | None = None) -> Convergence:
    """Steps to a goal = least * (1 + noise / batch) * (1 + rho * staleness * share stale), fitted to runs.

    ``noise_samples``: as gradients tell it, where runs of one batch only cannot. Staleness is fitted after the rest, to
    what fresh runs leave. Raises ``ValueError`` where no run was fresh, or where one batch alone has to tell both.
    """
    fresh = [point for point in points if not point.staleness * point.stale_share]
    batches = {point.global_batch for point in fresh}
    if not fresh or (len(batches) < 2 and noise_samples is None):
        raise ValueError("the steps to a goal need fresh runs of two batches, or a noise scale")
    steps = [point.steps for point in fresh]
    if len(batches) < 2 and noise_samples is not None:
        (least,) = least_squares([[1 + noise_samples / point.global_batch] for point in fresh], steps)
        noise = noise_samples
    else:
        least, work = least_squares([[1.0, 1 / point.global_batch] for point in fresh], steps)
        # All noise: the batch only divides the samples.
        least = max(float(least), 1e-12)
        noise = float(work) / least
    progress = Convergence(least_steps=float(least), noise_samples=float(noise))
    stale = [point for point in points if point.staleness * point.stale_share > 0]
    if not stale:
        return progress
    excess = [max(0.0, p.steps / (progress.least_steps * (1 + noise / p.global_batch)) - 1) for p in stale]
    behind = [[p.staleness * p.stale_share] for p in stale]
    (rho,) = least_squares(behind, excess, scale=np.ones(len(stale)))
    return Convergence(
        least_steps=float(least),
        noise_samples=float(noise),
        rho=float(rho),
        staleness=max(point.staleness for point in stale),
    )
