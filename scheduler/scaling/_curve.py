"""Loss curves of the form loss = 1 / q(t) + floor, where q has nonnegative coefficients.

For a given floor (and exponent of t), 1 / (loss - floor) is linear in the coefficients. So floors and exponents are
tried over a grid, and each is solved by weighted least squares; no start point is needed. An error e of the loss is an
error e / (loss - floor)² of its inverse, hence the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scheduler._nonnegative import nonnegative_least_squares

Floats = npt.NDArray[np.float64]

_GAPS = np.geomspace(0.02, 4.0, 16)
"""Gaps between the lowest loss and the floor that are tried, relative to the range of the losses."""


@dataclass(frozen=True)
class LossCurve:
    """1 / sum(coefficient * t ** exponent) + floor."""

    coefficients: tuple[float, ...]
    exponents: tuple[float, ...]
    floor: float

    def at(self, t: float) -> float:
        """Loss at `t`, finite for every t."""
        value = sum(c * t**p for c, p in zip(self.coefficients, self.exponents, strict=True))
        return float(self.floor + 1 / max(value, 1e-12))


@dataclass(frozen=True)
class FittedLine:
    """The fit for each floor: 1 / (loss - floor) = slope * x + start, and the weighted squared errors of the losses."""

    floors: Floats
    slopes: Floats
    starts: Floats
    squares: Floats


def floors_of(losses: Floats) -> Floats:
    """Return the floors that are tried, below the losses and not below zero; shape (F,)."""
    spread = max(float(losses.max() - losses.min()), 1e-9)
    return np.asarray(np.unique(np.maximum(0.0, losses.min() - _GAPS * spread)))


def line_of(x: Floats, losses: Floats, weights: Floats, floors: Floats) -> FittedLine:
    """``x``, ``losses``, ``weights``: (N,); ``weights`` are inverse variances of the losses, up to a factor."""
    above = np.maximum(losses[None, :] - floors[:, None], 1e-9)
    y, w = 1 / above, weights[None, :] * above**4
    total = w.sum(1)
    mean_x, mean_y = (w @ x) / total, (w * y).sum(1) / total
    off = x[None, :] - mean_x[:, None]
    slopes = np.maximum(0.0, (w * off * (y - mean_y[:, None])).sum(1) / np.maximum((w * off**2).sum(1), 1e-300))
    starts = mean_y - slopes * mean_x
    below = starts < 0  # through zero, then
    slopes = np.where(below, (w * y * x).sum(1) / np.maximum((w @ x**2), 1e-300), slopes)
    starts = np.maximum(starts, 0.0)
    told = floors[:, None] + 1 / np.maximum(slopes[:, None] * x + starts[:, None], 1e-12)
    return FittedLine(floors, slopes, starts, (weights * (losses - told) ** 2).sum(1))


def fit(t: Floats, losses: Floats, weights: Floats, forms: Sequence[tuple[float, ...]]) -> LossCurve:
    """Return the curve with the least squared error; ``forms``: exponents of t that may be combined.

    Raises ``ValueError`` where there are fewer than three points.
    """
    if len(t) < 3:
        raise ValueError("a curve needs three points")
    best, least = None, np.inf
    for floor in floors_of(losses):
        above = np.maximum(losses - floor, 1e-9)
        for exponents in forms:
            columns = np.stack([t**p for p in exponents], axis=1)
            root = np.sqrt(weights) * above**2
            found = nonnegative_least_squares(columns * root[:, None], root / above)
            told = floor + 1 / np.maximum(columns @ found, 1e-12)
            left = float((weights * (losses - told) ** 2).sum())
            if left < least:
                best, least = LossCurve(tuple(found.tolist()), exponents, float(floor)), left
    assert best is not None
    return best
