"""Random federations and demands, and the planner that tries everything."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

import numpy as np

from scheduler import Capacity, Dataset, Declined, Demand, Link, Plan, Planner, Prices, Region, Snapshot, Split
from scheduler._plan import _Problem, _problem, limits_of
from scheduler._shard_moves import PlacedShards, _placed
from scheduler.search import PlanCriteria, PlanSearch
from scheduler.tuning import ChannelProfile, NormPair, StepPoint, TaskProfile

MOST_STAFFINGS = 1500
"""About as many assignments does a drawn federation have at most, so that everything can be tried."""
_CHUNK = 500


def drawn_federation(rng: random.Random, regions: int, most: int | None = None) -> Snapshot:
    """Regions that differ in size, speed, prices and links, some with profiles.

    ``most``: workers of a region at most; None: so few that everything can be tried.
    """
    names = [f"r{number}" for number in range(regions)]
    dear = rng.choice([0.0, 0.02, 0.09, 0.15])
    table = {(a, b): (10 ** rng.uniform(0.3, 2.5), 10 ** rng.uniform(1, 3.5)) for a in names for b in names if a != b}
    most = most or max(1, min(16, int(MOST_STAFFINGS ** (1 / regions) / (3 if regions < 4 else 1.5))))
    found = tuple(
        Region(
            name,
            rng.choice(["one", "two"]),
            Capacity(rng.randint(1, most), rng.choice([2048, 4096])),
            Prices(
                "drawn", "2026-01", 10 ** rng.uniform(-5.3, -4.3), rng.choice([0.0, 2e-7]), rng.choice([0.0, 0.1]),
                dear * rng.choice([0.5, 1.0, 1.0]),
            ),
            (Dataset("data", {"train": Split(int(10 ** rng.uniform(2.3, 5)))}),),
            tuple(Link(name, other, *table[name, other]) for other in names if other != name),
            channel="redis",
        )
        for name in names
    )  # fmt: skip
    profiles = {region.name: _profile(rng, region) for region in found} if rng.random() < 0.4 else {}
    speeds = {name: 10 ** rng.uniform(1, 3.5) for name in names} if not profiles else {}
    return Snapshot(
        found, speeds=speeds, model_bytes=int(10 ** rng.uniform(3.5, 8.5)), start_seconds=rng.uniform(1, 10),
        profiles=profiles,
    )  # fmt: skip


def _profile(rng: random.Random, region: Region) -> TaskProfile:
    base, each = 10 ** rng.uniform(-3, -1), 10 ** rng.uniform(-4, -2)
    buys = rng.random() < 0.5
    steps = tuple(
        StepPoint(b, m, (base + each * b) * (max(1.0, 1769 / m) if buys else 1.0), 200.0)
        for b in (8, 32)
        for m in (512, 1769)
    )
    noise = 10 ** rng.uniform(1, 4)
    return TaskProfile(
        region=region.name, samples=region.datasets[0].splits["train"].samples, batch=32, parameters=1_000_000,
        model_bytes=4_000_000, steps=steps, update_seconds=0.001,
        norms=(NormPair(8, 1 + noise / 8, 64, 1 + noise / 64),), evaluation_peak_mb=0.0,
        channel=ChannelProfile(0.001, 0.001, 1e8, 1e8, put_usd=rng.choice([0.0, 5e-6]), name="redis"),
        start_seconds=1.0, again_seconds=rng.choice([0.0, 1.0]), gb_seconds=1.0, usd=1e-5, layers=({"name": "0"},),
    )  # fmt: skip


def drawn_demand(rng: random.Random, snapshot: Snapshot) -> Demand:
    """Both objectives, some decisions fixed, with and without limits; limits are such that some can just be kept."""
    epochs = rng.random() < 0.7
    demand = Demand(
        "job", "data", batch=rng.choice([8, 32, 128]), epochs=10 ** rng.uniform(0, 2) if epochs else None,
        steps=None if epochs else int(10 ** rng.uniform(1, 4)), seed=1, minimise=rng.choice(["cost", "time"]),
        to_goal=rng.random() < 0.3, interval=rng.choice([None, None, None, 20, 50]),
        codec=rng.choice([None, None, None, "fp32", "int8"]), exchange=rng.choice([None, None, "synchronous"]),
        memory_mb=rng.choice([None, None, 1024]), balance=rng.choice(["data", "data", "speed"]),
        tolerance=rng.choice([0.0, 0.3, 1.0]),
    )  # fmt: skip
    if rng.random() < 0.5:
        return demand
    problem = problem_of(snapshot, demand)
    assert isinstance(problem, _Problem)
    seconds = problem.search.least(PlanCriteria("time", possible=True))[0]
    deadline = seconds * rng.choice([0.9, 1.0 + 1e-6, 1.1, 1.5, 3.0])
    usd = problem.search.least(PlanCriteria("cost", deadline if rng.random() < 0.5 else math.inf, possible=True))[1]
    budget = usd * rng.choice([0.95, 1.0 + 1e-6, 1.1, 1.5, 3.0]) if math.isfinite(usd) else None
    which = rng.choice(["deadline", "budget", "both"])
    return replace(
        demand,
        deadline_seconds=deadline if which != "budget" else None,
        budget_usd=budget if which != "deadline" else None,
    )


def movable(rng: random.Random, snapshot: Snapshot) -> Snapshot:
    """Return the federation with shards that any region may process; some are worth moving, some are too large."""
    regions = []
    for region in snapshot.regions:
        (held,) = region.datasets
        size = int(held.splits["train"].samples * 10 ** rng.uniform(2, 5))
        moved = replace(held, residency="anywhere", splits={"train": replace(held.splits["train"], bytes=size)})
        regions.append(replace(region, datasets=(moved,), takes_shards=True))
    return replace(snapshot, regions=tuple(regions))


def layouts(names: Sequence[str]) -> Iterator[dict[str, str]]:
    """Return every way to process shards elsewhere: the region in which each is processed, of those that move."""
    for places in product(names, repeat=len(names)):
        moves = {shard: place for shard, place in zip(names, places, strict=True) if shard != place}
        if not set(moves.values()) & set(moves):
            yield moves


def regret_of_moves(snapshot: Snapshot, demand: Demand) -> float | None:
    """Return by how much the plan's money or time is worse than the best one's of all layouts, each searched by itself;
    infinite: it is refused although there is one; None: it is refused, and there is none."""
    planner, what = Planner(snapshot), "seconds" if demand.minimise == "time" else "usd"

    def value(found: Plan | Declined) -> float:
        return math.inf if isinstance(found, Declined) else float(getattr(found.estimate, what).expected)

    every = layouts([region.name for region in snapshot.regions])
    best = min(value(planner._placed(_placed(snapshot, demand, moves), demand)) for moves in every)
    found = value(Planner(snapshot).plan(demand))
    return None if math.isinf(best) else found / best - 1


def problem_of(snapshot: Snapshot, demand: Demand) -> _Problem | Declined:
    """Return what is to be searched, independent of deadline and budget."""
    return _problem(PlacedShards(snapshot), replace(demand, deadline_seconds=None, budget_usd=None))


def best_score(search: PlanSearch, limits: PlanCriteria) -> float:
    """Return the score of the best plan of all assignments, intervals and ways; infinite: none keeps the limits."""
    ways, best = tuple(range(len(search.evaluation.ways.each))), math.inf
    every = np.array(list(product(*(range(size) for size in search.evaluation.sizes))))
    for begin in range(0, len(every), _CHUNK):
        evaluated = search.evaluation.evaluate(every[begin : begin + _CHUNK], ways=ways)
        place = search._picked(evaluated, limits)
        if place is not None:
            best = min(best, search.score_of(evaluated, place, limits))
    return best


def regret(snapshot: Snapshot, demand: Demand) -> float | None:
    """Return by how much the plan's objective is worse than the best one's; infinite: it is refused although there is
    one; None: it is refused, and there is none."""
    problem = problem_of(snapshot, demand)
    assert isinstance(problem, _Problem)
    limits = limits_of(demand)
    # With a larger batch only where the tolerance or the limits allow no other.
    tried = [replace(limits, careful=True), limits] if limits.progress else [limits]
    best = next((score for one in tried if math.isfinite(score := best_score(problem.search, one))), math.inf)
    found = problem.search.best(limits)
    if found is None:
        return math.inf if math.isfinite(best) else None
    return math.expm1(problem.search.score_of(*found, limits) - best)
