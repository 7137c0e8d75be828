"""Which updates are refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sync.layout import Vector
from sync.wan import Guard, norm_of


def update(norm: float) -> Vector:
    return np.array([norm, 0.0], np.float32)


def judged(guard: Guard, norms: list[float], rounds: int = 1) -> list[str]:
    """What is said of each of one region's updates, one after the other."""
    memory: dict[str, Vector] = {}
    said = []
    for norm in norms:
        why, memory["guard/b"] = guard.judge("b", norm_of([update(norm * rounds)]), memory, rounds)
        said.append(why)
    return said


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused_at_once_and_forgotten(bad: float) -> None:
    assert judged(Guard(0.0), [bad, 1.0, bad]) == ["it is not finite", "", "it is not finite"]


def test_a_norm_that_overflows_is_large_but_finite() -> None:
    assert judged(Guard(100.0), [3e38]) == [""]


def test_one_is_refused_that_is_far_larger_than_usual_and_the_next_usual_one_is_not() -> None:
    *usual, far, after = judged(Guard(100.0), [1.0, 2.0, 1.0, 101.0, 1.0])
    assert not any(usual)
    assert "its norm of 101 is 101 times" in far
    assert after == ""


def test_of_a_sum_of_rounds_the_norm_of_one_counts() -> None:
    assert not any(judged(Guard(100.0), [1.0] * 3 + [99.0], rounds=50))


def test_a_region_that_had_nothing_left_to_learn_alone_is_heard_again() -> None:
    """It has learnt its shard by heart behind a cut: its updates have all but vanished, then it meets the others."""
    assert not any(judged(Guard(100.0), [1.0] * 5 + [1e-6] * 50 + [5.0]))


def test_one_outlier_at_the_start_does_not_set_what_is_usual() -> None:
    assert judged(Guard(100.0), [50.0, 1.0, 1.0, 200.0])[-1]


@given(st.lists(st.floats(1e-3, 1e3), min_size=3, max_size=40), st.floats(1.0, 50.0))
def test_without_a_factor_or_within_it_nothing_finite_is_refused(norms: list[float], factor: float) -> None:
    assert not any(judged(Guard(0.0), norms))
    known = judged(Guard(factor), norms[:3])
    assert not any(known), "too few are known"
    usual = float(np.median(norms[:3]))
    assert not any(judged(Guard(factor), [*norms[:3], usual * factor * 0.99]))
    assert judged(Guard(factor), [*norms[:3], usual * factor * 1.01])[-1]
