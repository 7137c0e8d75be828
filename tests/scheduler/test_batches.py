"""The batch that a plan chooses, against planning with each batch by itself."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from support.planner_draws import best_score, drawn_demand, drawn_federation, problem_of

from scheduler import BatchPlanner, Capacity, Declined, Demand, Link, Plan, Planner, Region, Snapshot, tried_batches
from scheduler._plan import limits_of
from scheduler.search import _assignments
from scheduler.search._search import OTHER_WORTH, POINT_WORTH
from scheduler.tuning import NormPair, StepPoint
from tests.scheduler.test_plan import demand, region
from tests.scheduler.test_tuned import profile

MEASURED = (8, 16, 32, 64)
FIXED_SECONDS, SECONDS_PER_SAMPLE = 0.01, 0.001


def federation(noise: float | None = None, samples: int = 42_000, mb_per_sample: float = 1.0) -> Snapshot:
    """Three regions with a profile each: a step takes 10 ms, and 1 ms for each sample. ``noise``: its scale."""
    links = {a: tuple(Link(a, b, 100.0, 500.0) for b in "abc" if b != a) for a in "abc"}
    steps = tuple(
        StepPoint(b, 1024, FIXED_SECONDS + SECONDS_PER_SAMPLE * b, 300.0 + mb_per_sample * b) for b in MEASURED
    )
    # |G|^2 = 1 and tr = scale.
    norms = () if noise is None else (NormPair(8, 1 + noise / 8, 64, 1 + noise / 64),)
    found = {name: replace(profile(name), samples=samples, steps=steps, norms=norms) for name in "abc"}
    regions = tuple(
        replace(region(name, samples, links=links[name], channel="redis"), capacity=Capacity(4, 2048)) for name in "abc"
    )
    return Snapshot(regions, profiles=found, model_bytes=400_000, start_seconds=2.0)


def auto(**more: object) -> Demand:
    return replace(demand(batch=64, epochs=20.0, chooses_batch=True), **more)  # type: ignore[arg-type]


def answer(snapshot: Snapshot, wanted: Demand) -> Plan | Declined:
    return BatchPlanner(lambda _: Planner(snapshot), tried_batches(snapshot, wanted, MEASURED)).plan(wanted)


def planned(snapshot: Snapshot, wanted: Demand) -> Plan:
    found = answer(snapshot, wanted)
    assert isinstance(found, Plan), found
    return found


@pytest.mark.parametrize("objective", ["cost", "time"])
def test_the_noisier_the_gradients_the_larger_the_batch(objective: str) -> None:
    chosen = [planned(federation(noise), auto(minimise=objective, workers=1)) for noise in (3.0, 300.0, 1e5)]
    batches = [one.batch for one in chosen]
    assert batches == sorted(set(batches))
    assert batches[0] <= 16
    assert batches[-1] >= 64
    assert {one.learning.basis for one in chosen} == {"measured"}
    for one in chosen:
        assert {part.batch for part in one.partitions} == {one.batch}
        assert one.batches == (4, 8, 16, 32, 64, 128)


def test_without_a_measured_noise_scale_the_prior_counts_and_is_told() -> None:
    chosen = planned(federation(), auto(workers=1, tolerance=0.5))
    assert (chosen.learning.basis, chosen.learning.noise_samples) == ("prior", 1000.0)
    told = [other for other in chosen.alternatives if other.decision == f"batch {chosen.batch}"]
    assert told == list(chosen.alternatives[:2])
    assert all(" s and $" in other.text for other in told)
    larger = {batch: planned(federation(), auto(workers=4, tolerance=batch / 10)) for batch in (1, 1000)}
    why = [other.why_not for other in larger[1000].alternatives if other.decision == f"batch {larger[1000].batch}"]
    assert any("more samples for the same progress, by an assumed noise scale" in one for one in why), why
    assert larger[1].batch < larger[1000].batch


def test_a_batch_that_gives_up_too_much_is_told_with_the_tolerance() -> None:
    chosen = planned(federation(50.0), auto(workers=1))
    (told,) = (o.why_not for o in chosen.alternatives[:2] if "objective.tolerance is 0.3" in o.why_not)
    assert "may give up" in told
    assert chosen.learning.tolerated
    assert planned(federation(50.0), auto(workers=1, tolerance=100.0)).batch > chosen.batch


def test_where_no_larger_batch_was_tried_the_plan_says_why() -> None:
    chosen = planned(federation(1e6), auto(minimise="time"))
    told = chosen.alternatives[2]
    assert (told.text, told.decision) == ("256", "batch 128")
    assert told.why_not == "not tried: larger than 2 times the largest batch that was measured, 64"


def test_what_is_chosen_is_what_planning_with_each_batch_finds() -> None:
    """By money or time and the samples for the same progress, both counted here."""
    chosen_by_noise = set()
    for noise in (30.0, 1000.0, 20_000.0):
        for more in ({}, {"minimise": "time"}, {"tolerance": 5.0}, {"to_goal": True}, {"epochs": 2.0}):
            wanted, snapshot = auto(workers=1, **more), federation(noise)
            batches = tried_batches(snapshot, wanted, MEASURED).batches
            each = {b: Planner(snapshot).plan(replace(wanted, batch=b, least_batch=batches[0])) for b in batches}
            scores = {b: _score(one, noise, wanted) for b, one in each.items()}
            chosen = planned(snapshot, wanted)
            assert scores[chosen.batch] <= min(scores.values()) + 1e-3
            chosen_by_noise.add(chosen.batch)
    assert len(chosen_by_noise) > 2


def _score(found: Plan | Declined, noise: float, wanted: Demand) -> float:
    assert isinstance(found, Plan)
    # One worker in each region.
    samples = 1 + 3 * found.batch / noise
    if 0 < found.learning.points > wanted.tolerance:
        return math.inf
    own = (found.estimate.usd.expected, found.estimate.seconds.expected)
    main, other = own if wanted.minimise == "cost" else own[::-1]
    return math.log(main * samples) + OTHER_WORTH * math.log(other) + POINT_WORTH * found.learning.points


def test_where_even_the_smallest_global_batch_gives_up_too_much_a_search_finds_no_careful_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that none needs to be searched for."""
    monkeypatch.setattr(_assignments, "MOST_ENUMERATED", 0)
    skipped = 0
    for seed in range(24):
        rng = random.Random(seed)
        snapshot = drawn_federation(rng, regions=2 + seed % 3)
        wanted = replace(drawn_demand(rng, snapshot), chooses_batch=True, steps=None, epochs=10 ** rng.uniform(0, 1.5))
        for batch in (4, 16, 64):
            problem = problem_of(snapshot, replace(wanted, batch=batch, least_batch=4))
            if isinstance(problem, Declined) or problem.search.may_be_careful:
                continue
            limits = replace(limits_of(wanted), careful=True)
            assert math.isinf(best_score(problem.search, limits))
            skipped += 1
    assert skipped > 5


def _sharing(snapshot: Snapshot) -> Callable[[int], Planner]:
    shared = Planner(snapshot)
    return lambda _: Planner(snapshot, like=shared)


def test_no_random_federation_has_a_batch_with_a_better_plan() -> None:
    compared = 0
    for seed in range(24):
        rng = random.Random(seed)
        snapshot = drawn_federation(rng, regions=2 + seed % 2)
        wanted = replace(drawn_demand(rng, snapshot), chooses_batch=True, steps=None, epochs=10 ** rng.uniform(0, 1.5))
        tried = tried_batches(snapshot, wanted, (8, 32))
        found = BatchPlanner(_sharing(snapshot), tried).plan(wanted)
        each = [
            Planner(snapshot).plan(replace(wanted, batch=batch, least_batch=tried.batches[0]))
            for batch in tried.batches
        ]
        plans = [one for one in each if isinstance(one, Plan)]
        assert isinstance(found, Plan) == bool(plans), "none is refused that could be admitted"
        if isinstance(found, Plan):
            best = min((not one.learning.tolerated, one.learning.score) for one in plans)
            assert (not found.learning.tolerated, found.learning.score) == best
            compared += len(plans) > 1
    assert compared > 8


def test_a_deadline_or_budget_that_one_batch_keeps_is_kept() -> None:
    snapshot, wanted = federation(30.0), auto(workers=1)
    usual = planned(snapshot, wanted)
    each = {b: Planner(snapshot).plan(replace(wanted, batch=b, least_batch=4)) for b in (4, 8, 16, 32, 64, 128)}
    highs = {b: one.estimate for b, one in each.items() if isinstance(one, Plan)}
    soonest = min(highs, key=lambda b: highs[b].seconds.high)
    least = min(highs, key=lambda b: highs[b].usd.high)
    assert usual.batch < min(soonest, least)
    in_time = planned(snapshot, replace(wanted, deadline_seconds=highs[soonest].seconds.high * 1.001))
    assert in_time.batch > usual.batch
    assert in_time.learning.points > usual.learning.points
    refused = [other for other in in_time.alternatives if other.decision == f"batch {in_time.batch}"]
    assert any("the deadline leaves" in other.why_not for other in refused), refused
    cheap = planned(snapshot, replace(wanted, minimise="time", budget_usd=highs[least].usd.high * 1.001))
    assert cheap.estimate.usd.high <= highs[least].usd.high * 1.001
    none = answer(snapshot, replace(wanted, deadline_seconds=0.5 * highs[soonest].seconds.high, budget_usd=1e-9))
    assert isinstance(none, Declined)
    late = next(reason for reason in none.reasons if reason.earliest_seconds is not None)
    assert late.earliest_seconds == pytest.approx(highs[soonest].seconds.high, rel=0.01)


def test_a_batch_that_no_function_holds_is_not_chosen() -> None:
    """Of 2048 MB: 300 MB and 20 for each sample, and a fifth as reserve."""
    snapshot = federation(1e6, mb_per_sample=20.0)
    chosen = planned(snapshot, auto(minimise="time", parallelism="data"))
    assert chosen.batch == 64
    told = [other.why_not for other in chosen.alternatives[:2] if other.text == "128"]
    assert told == [
        "; ".join(f"a step of 128 samples does not fit into a function of 2048 MB in {r}, as profiled" for r in "abc")
    ]


def test_batches_are_powers_of_two_around_the_measured_within_the_smallest_shard() -> None:
    snapshot, wanted = federation(100.0), auto()
    assert tried_batches(snapshot, wanted, (16, 64)).batches == (8, 16, 32, 64, 128)
    unprofiled = replace(snapshot, profiles={"a": snapshot.profiles["a"]})
    told = tried_batches(unprofiled, wanted, (16, 64, 100))
    assert told.batches == (8, 16, 32, 64)
    assert "`geofed profile` measures larger ones" in told.why_no_larger
    assert tried_batches(snapshot, wanted, ()).batches == (64,)
    assert tried_batches(snapshot, wanted, (1,)).batches == (2,)
    small = replace(snapshot, regions=(*snapshot.regions[:2], replace_samples(snapshot.regions[2], 40)))
    told = tried_batches(small, wanted, (16, 64))
    assert told.batches == (8, 16, 32)
    assert told.why_no_larger.startswith("larger than the shard of c allows")
    assert tried_batches(small, replace(wanted, workers=3), (16, 64)).batches == (8,)
    assert tried_batches(small, replace(wanted, workers=30), (16, 64)).batches == (1,)
    assert tried_batches(small, replace(wanted, avoid=("c",)), (16, 64)).batches[-1] == 128
    assert len(tried_batches(snapshot, wanted, (2, 30_000)).batches) == 8


def replace_samples(one: Region, samples: int) -> Region:
    return replace(one, datasets=region(one.name, samples).datasets)
