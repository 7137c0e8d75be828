"""Statistical efficiency: how many steps a job needs by its batch, from gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


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
