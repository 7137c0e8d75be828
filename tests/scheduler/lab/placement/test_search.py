"""What the search finds that no job alone would."""

from __future__ import annotations

import random

import numpy as np

from scheduler.lab.placement import Device, PlacementJob, PlacementRegion, PlacementShard, federation
from scheduler.lab.placement._cheapest import cheapest
from scheduler.lab.placement._search import Search, by_weight
from scheduler.lab.placement._sites import paces_of, sites_of

GB = 10**9


def test_one_that_costs_more_is_refused_for_several_that_cost_less() -> None:
    """Four machines, jobs that need three, two and two: without the first there is room for both others."""
    where = federation((PlacementRegion("a", "x", (Device("cpu", 4, 100.0, 1.0, 8 * GB),), 0.0),), {})
    jobs = [PlacementJob(f"of {n}", (PlacementShard("s", "a", n * 360_000, 0),), 3600.0, 0, 0) for n in (3, 2, 2)]
    sites = sites_of(where)
    needs = [paces_of(sites, job) for job in jobs]
    alone = [choice for paces in needs if (choice := cheapest(sites, paces, sites.units)) is not None]
    search = Search(sites, needs, sites.units, [10 * choice.usd for choice in alone])
    scarcity = np.zeros_like(sites.units)
    search.insert(by_weight(needs), scarcity)
    draw = random.Random(0)
    search.improve(100, scarcity, alone, draw)
    assert search.usd == 3 + 20 + 20, "whoever comes back alone would cost more"
    search.exchange(100, scarcity, alone, draw)
    assert search.usd == 2 + 2 + 30
    assert search.left.tolist() == [0]
