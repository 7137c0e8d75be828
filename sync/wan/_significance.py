"""Gaia's significance filter (Hsieh et al., NSDI 2017, section 4.1: Approximate Synchronous Parallel)."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from sync.layout import Vector

__all__ = ["significant"]

_LEAST = np.float32(1e-3)
"""A coordinate near zero would make every change significant; it is taken to be this large."""


def significant(change: Vector, model: Vector, threshold: float, sequence: int) -> npt.NDArray[np.bool_]:
    """Which coordinates' accumulated changes may not wait any longer, shape (n,).

    |change| >= threshold / sqrt(sequence) * |model|: the threshold shrinks with time, as the learning rate would.
    """
    bound = np.maximum(np.abs(model), _LEAST) * np.float32(threshold / math.sqrt(max(1, sequence)))
    return np.asarray(np.abs(change) >= bound)
