"""What is found by changing one or two regions at a time, against what trying everything finds."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterable
from dataclasses import replace

import pytest
from support.planner_draws import drawn_demand, drawn_federation, movable, regret, regret_of_moves

from scheduler import Demand, Plan, Planner, Snapshot, _shard_moves
from scheduler.search import _assignments
from scheduler.tuning import MergePoint

HARD = (64, 72, 102, 397, 468)
"""Draws where regions must be changed together, for whole steps that fit their shards at another interval."""


def check_search(drawn: Iterable[tuple[Snapshot, Demand]], least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare the search with trying everything, in federations whose assignments are few, and which are searched here
    as if they were many. ``least``: demands more than which can be met."""
    with monkeypatch.context() as patched:
        patched.setattr(_assignments, "MOST_ENUMERATED", 0)
        told = [one for one in (regret(snapshot, demand) for snapshot, demand in drawn) if one is not None]
    assert len(told) > least
    assert statistics.median(told) <= 0.005
    assert max(told) <= 0.03, "and none is refused that could be admitted"


@pytest.mark.slow
def test_the_search_finds_what_trying_everything_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    for seed in (*range(20), *HARD):
        rng = random.Random(seed)
        snapshot = drawn_federation(rng, regions=2 + seed % 4)
        drawn.append((snapshot, drawn_demand(rng, snapshot)))
    check_search(drawn, 12, monkeypatch)


@pytest.mark.slow
def test_workers_that_divide_batches_are_searched_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    for seed in range(40):
        rng = random.Random(seed)
        snapshot = drawn_federation(rng, regions=2 + seed % 2)
        demand = replace(drawn_demand(rng, snapshot), divides_batch=True)
        if not snapshot.profiles:
            fixed = {region.name: 0.4 * rng.random() for region in snapshot.regions}
            merges = {name: (MergePoint("server-reduce", 2, 1, 1000.0, 0.004),) for name in fixed}
            snapshot = replace(snapshot, model_bytes=1000, fixed_shares=fixed, merges=merges)
        drawn.append((snapshot, demand))
    check_search(drawn, 24, monkeypatch)


@pytest.mark.slow
def test_layouts_of_shards_are_as_good_as_searching_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of few shards; each layout is evaluated roughly, and three are searched."""
    for name in ("WORTH", "WORTH_EACH"):
        monkeypatch.setattr(_shard_moves, name, 0.0)
    found = []
    for seed in (*range(9), 107):
        rng = random.Random(seed)
        snapshot = movable(rng, drawn_federation(rng, regions=4 if seed in (0, 107) else 3, most=6))
        epochs, minimise = 10 ** rng.uniform(0, 1.5), rng.choice(["cost", "time"])
        demand = Demand("job", "data", 32, epochs, None, 1, residency="anywhere", minimise=minimise)
        if rng.random() < 0.5:
            soonest = Planner(snapshot).plan(replace(demand, minimise="time"))
            assert isinstance(soonest, Plan)
            limit = soonest.estimate.seconds.high * rng.choice([1.0 + 1e-6, 1.2, 2.0])
            demand = replace(demand, deadline_seconds=limit)
        found.append(regret_of_moves(snapshot, demand))
    told = [one for one in found if one is not None]
    assert len(told) > 6
    assert statistics.median(told) <= 0.005
    assert max(told) <= 0.03, "and none is refused that could be admitted"
