"""Published rules as baselines: they choose as their papers say, on the planner's own model."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import get_args

import pytest
from support.planner_draws import drawn_federation

from control_plane.spec.sections import Objective
from scheduler import Capacity, Dataset, Declined, Demand, Plan, Prices, Region, Snapshot, Split, plan
from scheduler._published_rules import METHODS
from scheduler.search._search import OTHER_WORTH, POINT_WORTH

PRICES = Prices("test", "2026-01", 1.6667e-5, 2e-7, 0.02, 0.09)
MODEL_BYTES = 40_000


def federation() -> Snapshot:
    """West has about twice the data and twice the speed."""
    shapes = {"east": (20_000, 4, 100.0), "west": (39_000, 8, 200.0)}
    regions = tuple(
        Region(name, "c", Capacity(workers, 2048, speed), PRICES, (Dataset("d", {"train": Split(samples)}),))
        for name, (samples, workers, speed) in shapes.items()
    )
    return Snapshot(regions, model_bytes=MODEL_BYTES)


def demand(method: str | None, **more: object) -> Demand:
    return replace(Demand("job", "d", batch=32, epochs=3.0, steps=None, seed=1, method=method), **more)  # type: ignore[arg-type]


def planned(snapshot: Snapshot, wanted: Demand) -> Plan:
    found = plan(snapshot, wanted)
    assert isinstance(found, Plan), found
    return found


def workers(found: Plan) -> dict[str, int]:
    return {part.region: part.workers for part in found.partitions}


def score(found: Plan) -> float:
    """What a plan of `minimise: cost` is chosen by: money for the same progress, and what it may give up."""
    assert found.learning is not None
    usd, seconds = found.estimate.usd.expected, found.estimate.seconds.expected
    worth = POINT_WORTH * found.learning.points + OTHER_WORTH * math.log(seconds)
    return math.log(usd * found.learning.samples_factor) + worth


def test_the_job_file_has_all_rules() -> None:
    assert set(get_args(Objective.model_fields["method"].annotation)) == {"auto", *METHODS}


def test_greedy_takes_all_that_is_free() -> None:
    snapshot = replace(federation(), busy_workers={"west": 3})
    assert workers(planned(snapshot, demand("greedy"))) == {"east": 4, "west": 5}


def test_load_power_matches_the_slowest_region() -> None:
    # East needs 51 s for a pass with all its workers, and west 50 s with four of its eight.
    assert workers(planned(federation(), demand("load-power"))) == {"east": 4, "west": 4}


@pytest.mark.parametrize("method", ["greedy", "load-power"])
def test_updates_are_not_coded_and_what_the_job_fixes_stays(method: str) -> None:
    found = planned(federation(), demand(method, interval=50, workers={"east": 2, "west": 3}, topology="mesh"))
    assert (found.codec, found.interval, workers(found)) == ("fp32", 50, {"east": 2, "west": 3})
    assert planned(federation(), demand(method, codec="int8")).codec == "int8"
    background = planned(federation(), demand(method, exchange="background")).wan_settings
    assert not {"choose_codec", "choose_interval"} & set(background)


@pytest.mark.parametrize("method", ["greedy", "load-power"])
def test_a_plan_says_what_the_search_would_choose(method: str) -> None:
    found, auto = planned(federation(), demand(method)), planned(federation(), demand(None))
    told = found.alternatives[0]
    assert told.decision == f"method {method}"
    assert f"${auto.estimate.usd.expected:.4f}" in told.text
    assert score(auto) < score(found)


def test_limits_hold_for_a_rule_too() -> None:
    refused = plan(federation(), demand("greedy", budget_usd=1e-5))
    assert isinstance(refused, Declined)
    assert "the budget is" in refused.reasons[0].text


def test_fasdl_needs_profiles() -> None:
    refused = plan(federation(), demand("fasdl"))
    assert isinstance(refused, Declined)
    assert {reason.text for reason in refused.reasons} == {
        f"method fasdl chooses by a profile of the task, and region {name} has none" for name in ("east", "west")
    }
    assert "geofed profile" in refused.reasons[0].remedy


@pytest.mark.parametrize("seed", [seed for seed in range(40) if drawn_federation(random.Random(seed), 1).profiles])
def test_fasdl_merges_by_k_reduce_and_is_never_better_than_the_search(seed: int) -> None:
    snapshot = drawn_federation(random.Random(seed), 1, most=8)
    assert snapshot.profiles
    wanted = Demand("job", "data", batch=8, epochs=10.0, steps=None, seed=1, method="fasdl")
    found, auto = plan(snapshot, wanted), plan(snapshot, replace(wanted, method=None, tolerance=100.0))
    assert isinstance(found, Plan)
    assert isinstance(auto, Plan)
    assert found.collective == "k-reduce"
    assert all(1 <= found.merging["k"] <= part.workers for part in found.partitions if part.workers > 1)
    assert score(auto) <= score(found) + 0.01
