"""Robust rules: against independent implementations, against attacks, and the same bits everywhere."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sync.robust import RobustRule, robust_rule_named, robust_rules, squared_distance

SIZE = 70_000
"""Above two blocks of the sums."""


def honest(number: int, size: int = 300, seed: int = 0) -> list[np.ndarray]:
    """Changes around one direction."""
    random = np.random.default_rng(seed)
    common = random.normal(size=size)
    return [(common + random.normal(scale=0.5, size=size)).astype(np.float32) for _ in range(number)]


def combined(name: str, deltas: list[np.ndarray], wrong: int) -> np.ndarray:
    return np.asarray(robust_rule_named(name).combine(deltas, wrong, {}).delta)


def test_there_are_these() -> None:
    expected = {"trimmed-mean", "median", "krum", "multi-krum", "geometric-median", "centered-clipping"}
    assert set(robust_rules()) == expected


def test_the_distance_is_the_norm_of_the_difference() -> None:
    one, other = honest(2, SIZE)
    assert squared_distance(one, other) == pytest.approx(np.linalg.norm((one - other).astype(np.float64)) ** 2)


def test_median_and_trimmed_mean_by_coordinate() -> None:
    deltas = honest(5, SIZE)
    assert np.allclose(combined("median", deltas, 2), np.median(np.stack(deltas), axis=0), atol=1e-6)
    middle = np.sort(np.stack(deltas).astype(np.float64), axis=0)[1:-1].mean(axis=0)
    assert np.allclose(combined("trimmed-mean", deltas, 1), middle, atol=1e-6)


def test_krum_is_the_change_with_the_closest_neighbours() -> None:
    deltas = honest(7)
    scores = [
        sum(sorted(float(np.sum((one - other) ** 2)) for j, other in enumerate(deltas) if j != i)[: 7 - 2 - 2])
        for i, one in enumerate(deltas)
    ]
    assert np.array_equal(combined("krum", deltas, 2), deltas[int(np.argmin(scores))])
    best = [deltas[i] for i in np.argsort(scores)[: 7 - 2 - 2]]
    assert np.allclose(combined("multi-krum", deltas, 2), np.mean(best, axis=0), atol=1e-6)


def test_the_geometric_median_has_the_least_sum_of_distances() -> None:
    deltas = [delta.astype(np.float64) for delta in honest(5, 20)]

    def total(point: np.ndarray) -> float:
        return sum(float(np.linalg.norm(delta - point)) for delta in deltas)

    found = combined("geometric-median", [delta.astype(np.float32) for delta in deltas], 2)
    random = np.random.default_rng(1)
    best = total(found)
    for scale, _ in itertools.product((1.0, 0.1, 0.01), range(50)):
        assert total(found + scale * random.normal(size=20)) > best


def test_the_geometric_median_of_equal_changes_is_that_change() -> None:
    assert np.array_equal(combined("geometric-median", [np.ones(3, np.float32)] * 3, 1), np.ones(3, np.float32))


def test_clipping_moves_the_last_result_by_no_more_than_the_median_distance() -> None:
    rule, deltas = robust_rule_named("centered-clipping"), honest(5)
    first = rule.combine(deltas, 1, {})
    lengths = sorted(float(np.linalg.norm(delta)) for delta in deltas)
    by_hand = sum(delta * min(1.0, lengths[2] / np.linalg.norm(delta)) for delta in deltas) / 5
    assert np.allclose(first.delta, by_hand, atol=1e-5)
    spoilt = [*deltas[:4], np.full(300, 1e6, np.float32)]
    second = rule.combine(spoilt, 1, first.memory)
    radius = np.median([np.linalg.norm(delta - first.delta) for delta in spoilt])
    assert np.linalg.norm(second.delta - first.delta) <= radius * 1.001


@pytest.mark.parametrize("name", robust_rules())
@given(
    wrong=st.integers(1, 2),
    further=st.integers(0, 3),
    size=st.sampled_from([1e-6, 1.0, 1e4, 1e30]),
    seed=st.integers(0, 1000),
)
def test_no_minority_leads_the_result_away(name: str, wrong: int, further: int, size: float, seed: int) -> None:
    rule = robust_rule_named(name)
    number = rule.fewest(wrong) + further
    right = honest(number - wrong, seed=seed)
    lies = [np.full(300, -size if lie else size, np.float32) for lie in range(wrong)]
    found = rule.combine([*lies, *right], wrong, {}).delta
    middle = np.mean(right, axis=0)
    spread = max(float(np.linalg.norm(delta - middle)) for delta in right)
    # Clipping begins at 0: one merge moves as far as the median of all changes.
    reach = max(float(np.linalg.norm(delta)) for delta in right) if name == "centered-clipping" else 3 * spread
    assert np.linalg.norm(found - middle) <= reach + 1e-3
    assert np.isfinite(found).all()


@pytest.mark.parametrize("name", robust_rules())
@given(seed=st.integers(0, 1000))
def test_without_an_attack_it_is_close_to_the_mean(name: str, seed: int) -> None:
    deltas = honest(7, seed=seed)
    middle = np.mean(deltas, axis=0)
    spread = max(float(np.linalg.norm(delta - middle)) for delta in deltas)
    rule, memory = robust_rule_named(name), {}
    for _ in range(4):
        done = rule.combine(deltas, rule.most(7), memory)
        memory = dict(done.memory)
    assert np.linalg.norm(done.delta - middle) <= 1.2 * spread


@pytest.mark.parametrize("rule", [robust_rule_named(name) for name in robust_rules()], ids=robust_rules())
def test_how_many_it_withstands(rule: RobustRule) -> None:
    needs = 3 if "krum" in rule.name else 1
    assert [rule.fewest(wrong) for wrong in (1, 2, 3)] == [2 * wrong + needs for wrong in (1, 2, 3)]
    assert [rule.most(regions) for regions in (1, 2, 7)] == [0, 0, (7 - needs) // 2]
