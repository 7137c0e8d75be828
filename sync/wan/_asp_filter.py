"""Gaia's significance filter (Hsieh et al., NSDI 2017, section 4.1: Approximate Synchronous Parallel)."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from sync.layout import Vector

__all__ = ["significant"]

_MIN_MAGNITUDE = np.float32(1e-3)
"""Coordinates count as at least this large: near zero, every change would be significant."""


def significant(change: Vector, model: Vector, threshold: float, sequence: int) -> npt.NDArray[np.bool_]:
    """Return which coordinates' accumulated changes must be sent now, shape (n,).

    |change| >= threshold / sqrt(sequence) * |model|: the threshold shrinks over time, as a learning rate would.
    """
    bound = np.maximum(np.abs(model), _MIN_MAGNITUDE) * np.float32(threshold / math.sqrt(max(1, sequence)))
    return np.asarray(np.abs(change) >= bound)
