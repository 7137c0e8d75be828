"""Linear least squares whose coefficients are not negative."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

__all__ = ["nonnegative_least_squares"]

Floats = npt.NDArray[np.float64]
_TOLERANCE = 1e-12
"""Relative to the length of the targets: smaller gradients and coefficients are zero but for rounding."""
_ROUNDS = 10
"""Per coefficient; the method takes about one, and ends here if rounding has it go in a circle."""


def nonnegative_least_squares(features: Floats, targets: Floats) -> Floats:
    """Return the coefficients, all at least 0, with the smallest sum of squared residuals; shape (coefficients,).

    ``features``: (points, coefficients), ``targets``: (points,), finite. Where several do, as with equal columns, it is
    one of them. The active-set method NNLS of Lawson and Hanson, Solving Least Squares Problems (1974), chapter 23.
    """
    lengths = np.sqrt((features * features).sum(axis=0))
    lengths[lengths == 0.0] = 1.0
    # Columns of length 1, so that the tolerance means the same for each.
    columns = features / lengths
    tolerance = _TOLERANCE * math.sqrt(targets @ targets)
    found = np.zeros(columns.shape[1])
    free, useless = np.zeros(len(found), bool), np.zeros(len(found), bool)
    for _ in range(_ROUNDS * len(found)):
        gradient = columns.T @ (targets - columns @ found)
        gradient[free | useless] = 0.0
        new = int(gradient.argmax())
        if gradient[new] <= tolerance:
            break
        free[new] = True
        solved = _solved(columns, targets, free)
        if solved[new] <= 0:
            # Only by rounding: its gradient says that it grows.
            free[new], useless[new] = False, True
            continue
        useless[:] = False
        while (solved[free] <= 0).any():
            # Go towards the solution until the first coefficient is zero, and solve for the others again.
            falling = free & (solved <= 0)
            share = float((found[falling] / (found[falling] - solved[falling])).min())
            found += share * (solved - found)
            free &= found > tolerance
            found[~free] = 0.0
            solved = _solved(columns, targets, free)
        found = solved
    return np.asarray(found / lengths)


def _solved(columns: Floats, targets: Floats, free: npt.NDArray[np.bool_]) -> Floats:
    """Return the least squares over some of the columns; the others' coefficients are zero."""
    solved = np.zeros(len(free))
    if free.any():
        solved[free] = np.linalg.lstsq(columns[:, free], targets, rcond=None)[0]
    return solved
