"""Nonnegative least squares, with SciPy's as the referee."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import nnls
from support.budget import budget

from scheduler._nonnegative import nonnegative_least_squares


@settings(max_examples=budget(300))
@given(
    seed=st.integers(0, 2**32 - 1),
    points=st.integers(1, 30),
    count=st.integers(1, 9),
    spread=st.floats(0, 4),
    equal=st.booleans(),
)
def test_no_other_leaves_less(seed: int, points: int, count: int, spread: float, equal: bool) -> None:
    """Also where columns differ in scale, are equal, or are more than the points."""
    drawn = np.random.default_rng(seed)
    features = drawn.normal(size=(points, count)) * 10.0 ** drawn.uniform(-spread, spread, count)
    if equal:
        features[:, -1] = features[:, 0]
    targets = drawn.normal(size=points)
    found = nonnegative_least_squares(features, targets)
    assert (found >= 0).all()
    # SciPy's tolerance is absolute: it is given columns of one scale.
    _, least = nnls(features / np.linalg.norm(features, axis=0), targets)
    assert np.linalg.norm(features @ found - targets) == pytest.approx(least, rel=1e-6, abs=1e-7)


def test_a_column_that_was_given_up_is_taken_again() -> None:
    """To drop what comes out negative, for good, leaves more than the least."""
    drawn = np.random.default_rng(3)
    worse = 0
    for _ in range(200):
        features, targets = drawn.normal(size=(6, 5)), drawn.normal(size=6)
        free = np.ones(5, bool)
        dropped = np.zeros(5)
        while free.any():
            dropped[:] = 0.0
            dropped[free] = np.linalg.lstsq(features[:, free], targets, rcond=None)[0]
            if (dropped >= 0).all():
                break
            free &= dropped > 0
        found = nonnegative_least_squares(features, targets)
        left = float(np.linalg.norm(features @ found - targets))
        worse += float(np.linalg.norm(features @ dropped - targets)) > left + 1e-9
        assert found == pytest.approx(nnls(features, targets)[0], abs=1e-9)
    assert worse > 0


def test_nothing_to_fit() -> None:
    assert nonnegative_least_squares(np.zeros((3, 2)), np.ones(3)).tolist() == [0, 0]
    assert nonnegative_least_squares(np.ones((3, 1)), -np.ones(3)).tolist() == [0]
    assert nonnegative_least_squares(np.ones((3, 0)), np.ones(3)).tolist() == []
