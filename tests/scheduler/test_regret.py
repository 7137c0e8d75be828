"""What is found by changing one or two regions at a time, against what trying everything finds."""

from __future__ import annotations

import random
import statistics

import pytest
from support.planner_draws import drawn_demand, drawn_federation, regret

from scheduler.search import _staffings

HARD = (64, 72, 102, 397, 468)
"""Draws where regions must be changed together, for whole steps that fit their shards at another interval."""


def test_the_search_finds_what_trying_everything_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    """In federations whose staffings are few, and which are searched here as if they were many."""
    found = []
    for seed in (*range(20), *HARD):
        rng = random.Random(seed)
        snapshot = drawn_federation(rng, regions=2 + seed % 4)
        demand = drawn_demand(rng, snapshot)
        with monkeypatch.context() as patched:
            patched.setattr(_staffings, "MOST_ENUMERATED", 0)
            found.append(regret(snapshot, demand))
    told = [one for one in found if one is not None]
    assert len(told) > 12
    assert statistics.median(told) <= 0.005
    assert max(told) <= 0.03, "and none is refused that could be admitted"
