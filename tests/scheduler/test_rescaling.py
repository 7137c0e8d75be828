"""When a running job changes its workers, and that it does not go to and fro."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler import RunningRegion, WorkerChange, pace, paces, worker_change

PAID = 0.06 / 3600
"""USD/s of a worker with 1 GB."""


def assigned(region: str, workers: int = 4, speed: float = 1000.0, **more: Any) -> RunningRegion:
    given = {"free": 8, "batch": 256, "steps_per_round": 20, "usd_per_second": 1e-6}
    return RunningRegion(region, workers, samples_per_second=speed, worker_usd_per_second=PAID, **{**given, **more})


def changed(*regions: RunningRegion, **more: Any) -> WorkerChange | None:
    given = {"rounds_left": 100, "exchange_seconds": 0.1, "background": True, "minimise": "cost"}
    return worker_change(regions, **{**given, **more})


states = st.lists(
    st.builds(
        lambda workers, free, speed, batch: assigned("", min(workers, free, batch), speed, free=free, batch=batch),
        st.integers(1, 16),
        st.integers(1, 16),
        st.floats(10, 1e5),
        st.integers(1, 512),
    ),
    min_size=1,
    max_size=5,
)
limits = st.one_of(st.none(), st.floats(0.1, 1e5))


@given(states, st.integers(1, 1000), st.booleans(), st.sampled_from(["cost", "time"]), limits, limits)
def test_a_change_is_within_what_is_free_and_is_not_taken_back(
    found: list[RunningRegion],
    rounds: int,
    background: bool,
    minimise: str,
    deadline: float | None,
    budget: float | None,
) -> None:
    regions = [replace(region, region=f"r{n}") for n, region in enumerate(found)]
    asked: dict[str, Any] = {
        "rounds_left": rounds,
        "exchange_seconds": 0.2,
        "background": background,
        "minimise": minimise,
        "deadline_seconds": deadline,
        "budget_usd": budget,
    }
    change = worker_change(regions, **asked)
    if change is None:
        return
    assert change.reason
    for region in regions:
        wanted = change.workers.get(region.region, region.workers)
        assert wanted == region.workers or 1 <= wanted <= min(region.free, region.batch)
    after = [replace(region, workers=change.workers.get(region.region, region.workers)) for region in regions]
    assert worker_change(after, **asked) is None


def test_a_region_that_was_throttled_gets_more_workers_and_the_others_none_that_wait() -> None:
    change = changed(assigned("a", 4, 400.0), assigned("b", 4), minimise="time")
    assert change is not None
    assert change.workers["a"] == 8
    cheap = changed(assigned("a", 4, 400.0, free=4), assigned("b", 4))
    assert cheap is not None
    assert "a" not in cheap.workers
    assert cheap.workers["b"] < 4
    assert "of what is left to pay" in cheap.reason


def test_small_differences_and_short_rests_change_nothing() -> None:
    assert changed(assigned("a", 4, 980.0), assigned("b", 4, 1020.0)) is None
    assert changed(assigned("a", 4, 400.0), assigned("b", 4), minimise="time", rounds_left=1) is None


def test_a_deadline_that_comes_near_takes_what_it_needs() -> None:
    alone = assigned("a", 2)
    relaxed = changed(alone, minimise="cost")
    needed = 100 * alone.round_seconds(2)
    hurried = changed(alone, minimise="cost", deadline_seconds=needed * 0.8)
    assert hurried is not None
    assert "deadline" in hurried.reason
    assert hurried.workers["a"] > (relaxed.workers["a"] if relaxed else 2)


def test_a_paused_region_is_left_alone() -> None:
    assert changed(assigned("a", 0), assigned("b")) is None


@given(states, st.floats(0, 10), st.booleans())
def test_paces_ascend_and_what_there_is_is_one_of_them(
    found: list[RunningRegion], exchange: float, background: bool
) -> None:
    regions = [replace(region, region=f"r{n}") for n, region in enumerate(found)]
    ways = paces(regions, exchange, background)
    now = {region.region: region.workers for region in regions}
    assert now in [dict(workers) for workers, _ in ways]
    for (slow, low), (fast, high) in itertools.pairwise(ways):
        assert low < high
        assert all(slow[region] <= fast[region] for region in now)
    for workers, rate in ways:
        counts = [workers[region.region] for region in regions]
        assert rate == pytest.approx(pace(regions, exchange, background, counts), rel=1e-5)
        assert all(1 <= count <= max(r.free, r.workers) for count, r in zip(counts, regions, strict=True))
