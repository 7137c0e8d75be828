"""One tuner for all regions: how its workers are partitioned, and what it knows of a round."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler import RunningRegion
from scheduler.scaling import (
    ScalingGoal,
    ScalingTuner,
    StepCosts,
    StepObservation,
    federated_step_costs,
    workers_by_region,
)

POOLS = st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 9), min_size=1)


@given(POOLS)
def test_everybody_is_dealt_out_and_more_are_never_fewer_anywhere(pool: dict[str, int]) -> None:
    most, before = sum(pool.values()), dict.fromkeys(pool, 1)
    for workers in range(len(pool), most + 1):
        given_now = workers_by_region(workers, pool)
        assert sum(given_now.values()) == workers
        assert all(before[region] <= given_now[region] <= pool[region] for region in pool)
        before = given_now
    assert before == pool


def test_they_are_dealt_out_in_proportion() -> None:
    assert workers_by_region(6, {"east": 8, "west": 4}) == {"east": 4, "west": 2}


@pytest.mark.parametrize("workers", [1, 7])
def test_more_than_there_are_and_fewer_than_regions_are_refused(workers: int) -> None:
    with pytest.raises(ValueError, match="cannot be partitioned"):
        workers_by_region(workers, {"east": 4, "west": 2})


def test_a_round_lasts_as_long_as_that_of_its_slowest_region_whoever_has_how_many() -> None:
    east = RunningRegion("east", 4, 4, 32, 10, 320.0, 1e-5, 1e-6, merge_seconds=0.02)
    west = RunningRegion("west", 2, 2, 32, 10, 160.0, 3e-5, 1e-6, merge_seconds=0.01)
    step_costs = federated_step_costs([east, west], {"east": 4, "west": 2}, exchange_seconds=0.5)
    # West alone is slower with one worker; with two it merges as well.
    assert step_costs.expected_seconds == pytest.approx((2.5, 2.5, 2.5, 2.5, 2.6, 2.6))
    assert (step_costs.least, step_costs.most) == (2, 6)
    assert step_costs.worker_usd_per_second == pytest.approx((4 * 1e-5 + 2 * 3e-5) / 6)
    assert step_costs.usd_per_second == pytest.approx(2e-6)


def test_steps_that_are_told_together_count_as_so_many() -> None:
    """A round's loss may be measured only now and then."""
    step_costs = StepCosts((1.0,) * 8, worker_usd_per_second=1e-5, usd_per_second=1e-5, join_seconds=1.0)
    tuners = {every: ScalingTuner(step_costs, ScalingGoal(0.5, None)) for every in (1, 3)}
    for every, tuner in tuners.items():
        for step in range(every, 61, every):
            usd = step * step_costs.rate(8)
            tuner.observe(StepObservation(step, float(step), 0.4 + 1 / (1 + 0.05 * step), 8, usd))
        assert tuner.step_seconds(8) == pytest.approx(1.0)
    # Both see the same curve: the way that is left, in steps, is about the same.
    left = [
        tuner.observe(StepObservation(61, 61.0, 0.4 + 1 / 4.05, 8, 61 * step_costs.rate(8)))
        for tuner in tuners.values()
    ]
    assert left[0].workers == left[1].workers


@pytest.mark.parametrize(("most_steps", "stay"), [(None, 1), (100_000, 1), (420, 3), (130, 8)])
def test_fewer_leave_where_the_steps_that_are_left_would_not_do(most_steps: int | None, stay: int) -> None:
    """Fewer workers need more steps, and a job has only so many."""
    step_costs = StepCosts((1.0,) * 8, worker_usd_per_second=1e-5, usd_per_second=1e-7, join_seconds=1.0)
    tuner, least = ScalingTuner(step_costs, ScalingGoal(0.45, None, most_steps=most_steps)), 8
    for step in range(1, 120):
        loss = 0.3 + 1 / (1.5 + 5.17 * step / 400)
        least = min(
            least, tuner.observe(StepObservation(step, float(step), loss, 8, step * step_costs.rate(8))).workers
        )
    assert least == stay
