"""What scarce capacity is worth: how much the prices prove, and how soon."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from scheduler import Path
from scheduler.lab.placement import (
    Device,
    PlacementFederation,
    PlacementJob,
    PlacementRegion,
    PlacementShard,
    federation,
    place,
)
from scheduler.lab.placement._cheapest import cheapest, priced
from scheduler.lab.placement._choice import PlacementChoice, placement_of
from scheduler.lab.placement._pool import Pool
from scheduler.lab.placement._scarcity import Scarcity, scarcity_of
from scheduler.lab.placement._sites import Need, paces_of, sites_of

GB = 10**9


def region(name: str, usd: float, units: int) -> PlacementRegion:
    return PlacementRegion(name, "x", (Device("cpu", units, 100.0, usd, 8 * GB),), 0.0)


def job(name: str, *shards: PlacementShard, hours: float = 1.0, model_bytes: int = 0) -> PlacementJob:
    return PlacementJob(name, shards, hours * 3600, model_bytes, rounds=10 if model_bytes else 0)


def crowd() -> tuple[PlacementFederation, tuple[PlacementJob, ...]]:
    """Twelve regions with little room, and thirty jobs whose data may go anywhere."""
    draw = random.Random(3)
    regions = tuple(region(f"r{number}", draw.uniform(1, 2), 6) for number in range(12))
    links = {(a.name, b.name): Path(50, 1e4, draw.uniform(0.01, 0.2)) for a in regions for b in regions if a is not b}
    jobs = []
    for number in range(30):
        shards = [
            PlacementShard(
                f"s{place}",
                f"r{draw.randrange(12)}",
                int(draw.uniform(1, 8) * 360_000),
                int(draw.uniform(0, 10) * GB),
                "anywhere",
            )
            for place in range(2)
        ]
        jobs.append(job(f"job-{number}", *shards, hours=5.0, model_bytes=GB // 10))
    return federation(regions, links), tuple(jobs)


def prices(
    where: PlacementFederation, jobs: Sequence[PlacementJob], steps: int
) -> tuple[Scarcity, list[tuple[Need, ...]]]:
    sites = sites_of(where)
    needs = [paces_of(sites, each) for each in jobs]
    answers = [priced(sites, paces, sites.units) for paces in needs]
    alone = [(choice, least) for choice, least in answers if choice is not None]
    penalties = [10 * choice.usd for choice, _ in alone]
    return scarcity_of(sites, needs, sites.units, penalties, alone, steps=steps, enough=1e-4), needs


def test_the_bound_is_that_of_the_prices() -> None:
    """One unit, two jobs that each want it: the price settles between what the two would pay to stay."""
    a, b = region("a", 1.0, 1), region("b", 3.0, 1)
    where = federation((a, b), {("a", "b"): Path(50, 1e4, 0.0), ("b", "a"): Path(50, 1e4, 0.0)})
    both = [job(name, PlacementShard("s", "a", 360_000, 0, "anywhere")) for name in ("one", "two")]
    scarcity, needs = prices(where, both, steps=60)
    assert scarcity.bound_usd == pytest.approx(4.0, rel=0.02)
    assert scarcity.bound_usd <= 4.0 + 1e-9
    sites = sites_of(where)
    choice = cheapest(sites, needs[0], sites.units, scarcity.usd)
    assert choice is not None
    assert placement_of(sites, choice).usd == choice.usd


@pytest.mark.slow
def test_a_dozen_steps_prove_nearly_all_that_prices_can() -> None:
    where, jobs = crowd()
    few, many = (prices(where, jobs, steps)[0].bound_usd for steps in (12, 80))
    assert few <= many <= 1.002 * few
    outcome = place(where, jobs)
    assert outcome.refusals == ()
    assert many <= outcome.usd <= 1.03 * many


def test_a_climb_ends_at_the_best_prices_within_its_box() -> None:
    """Two jobs may stay at the only unit for USD 1 each, or leave for 3 and 6: it is worth the 2 of the first."""
    where = federation((region("a", 1.0, 1), region("b", 1.0, 9)), {})
    sites = sites_of(where)
    (need,) = paces_of(sites, job("one", PlacementShard("s", "a", 360_000, 0)))[:1]
    pool = Pool(sites.units, [100.0, 100.0])
    for number, away in enumerate((3.0, 6.0)):
        stay = PlacementChoice(need, 1.0, 1.0, 0, ((0, 1, (0,)),))
        pool.add(number, stay)
        pool.add(number, stay)
        pool.add(number, replace(stay, usd=away, hub=1, parts=((1, 1, (0,)),)))
    none = np.zeros(2)
    usd, value = pool.climb(none, width=4.0)
    assert value == pytest.approx(1.0 + 3.0, rel=1e-3)
    assert 2.0 - 0.01 <= usd[0] <= 5.0 + 0.01
    usd, value = pool.climb(none, width=1.0)
    assert value == pytest.approx(2 * (1.0 + 1.0) - 1.0, rel=1e-3), "both stay, and pay one more for the one unit"
    assert usd == pytest.approx([1.0, 0.0], abs=1e-3)
