"""Normalised averaging, against the paper's formula and against what it is made for."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geofed_pb.errors import GeofedError
from sync.policy import Contribution, ModelAverage
from sync.wan import policy_of

SIZE = 50


def contributions(seed: int, steps: list[int], shares: list[float]) -> list[Contribution]:
    random = np.random.default_rng(seed)
    return [
        Contribution(
            f"r{at}", own * 8.0, random.normal(scale=0.1, size=SIZE).astype(np.float32), steps=own, data_share=share
        )
        for at, (own, share) in enumerate(zip(steps, shares, strict=True))
    ]


@settings(deadline=None)
@given(
    regions=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 100)), min_size=1, max_size=6),
    seed=st.integers(0, 9),
)
def test_it_is_the_papers_formula(regions: list[tuple[int, int]], seed: int) -> None:
    steps, data = [one for one, _ in regions], [two for _, two in regions]
    shares = [one / sum(data) for one in data]
    given = contributions(seed, steps, shares)
    base = np.random.default_rng(99).normal(size=SIZE).astype(np.float32)
    found = policy_of("fednova").merge(base, given[::-1], {})
    effective = sum(share * own for share, own in zip(shares, steps, strict=True))
    for at in range(SIZE):
        mean = math.fsum(share * float(c.delta[at]) / own for share, c, own in zip(shares, given, steps, strict=True))
        assert found.model[at] == pytest.approx(float(base[at]) + effective * mean, rel=1e-4, abs=1e-5)
    assert found.memory == {}


def test_with_equal_steps_it_is_averaging_by_data() -> None:
    base, given = np.ones(SIZE, np.float32), contributions(1, [7, 7, 7], [0.5, 0.3, 0.2])
    by_data = [Contribution(c.region, c.data_share, c.delta) for c in given]
    found = policy_of("fednova").merge(base, given, {}).model
    np.testing.assert_allclose(found, ModelAverage().merge(base, by_data, {}).model, rtol=1e-6)


def test_its_fixed_point_is_the_minimum_over_all_data_and_that_of_ma_is_not() -> None:
    """Two regions with quadratic losses around 0 and 1, half of the data each; one makes nine times as many steps, so
    small that a round moves along a straight line."""
    steps, rate, at = {"a": 18, "b": 2}, 2e-3, {"a": 0.0, "b": 1.0}
    ends = {}
    for name in ("ma", "fednova"):
        x = np.full(1, 0.3, np.float32)
        for _ in range(1500):
            made = []
            for region, count in steps.items():
                w = float(x[0])
                for _ in range(count):
                    w -= rate * (w - at[region])
                made.append(Contribution(region, float(count), np.float32([w]) - x, steps=count, data_share=0.5))
            x = policy_of(name).merge(x, made, {}).model
        ends[name] = float(x[0])
    assert ends["ma"] < 0.2
    assert ends["fednova"] == pytest.approx(0.5, abs=0.02)


def test_a_refused_update_leaves_the_others_in_proportion() -> None:
    base, (first, second, _) = np.zeros(SIZE, np.float32), contributions(2, [4, 8, 2], [0.2, 0.6, 0.2])
    found = policy_of("fednova").merge(base, [first, second], {}).model
    expected = (0.25 * 4 + 0.75 * 8) * (0.25 * first.delta / 4 + 0.75 * second.delta / 8)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)


def test_momentum_that_is_kept_from_round_to_round_moves_in_proportion_to_the_steps() -> None:
    """A gradient that stays the same, in rounds of 2 and of 10 steps."""
    moved = {}
    for steps in (2, 10):
        velocity, total = 0.0, 0.0
        for at in range(20 * steps):
            velocity = 0.9 * velocity + 1.0
            total += velocity if at >= 10 * steps else 0.0
        moved[steps] = total / steps
    assert moved[10] == pytest.approx(moved[2], rel=0.15)


def test_what_the_plan_has_not_told_is_not_guessed() -> None:
    with pytest.raises(GeofedError, match="does not tell how many local steps r0 makes"):
        policy_of("fednova").merge(np.zeros(SIZE, np.float32), contributions(3, [0, 1], [0.5, 0.5]), {})
