"""A job's placement with one partition moved is a placement, and costs what it says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.budget import budget

from scheduler import Path
from scheduler.lab.placement import (
    Device,
    PlacementFederation,
    PlacementJob,
    PlacementOutcome,
    PlacementRegion,
    PlacementShard,
    audit,
    federation,
)
from scheduler.lab.placement._cheapest import at_prices, priced
from scheduler.lab.placement._choice import bill_of, elsewhere, placement_of
from scheduler.lab.placement._sites import paces_of, sites_of

from .strategies import GB, worlds

QUICK = settings(max_examples=budget(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])


@QUICK
@given(worlds(jobs=1), st.data())
def test_whatever_moves_is_a_placement_that_costs_what_it_says(
    world: tuple[PlacementFederation, tuple[PlacementJob, ...]], data: st.DataObject
) -> None:
    where, (job,) = world
    sites = sites_of(where)
    scarcity = np.array(data.draw(st.lists(st.floats(0, 5), min_size=len(sites.units), max_size=len(sites.units))))
    choice, _ = priced(sites, paces_of(sites, job), sites.units, scarcity)
    if choice is None:
        return
    for other in elsewhere(sites, choice, sites.units, scarcity, 3):
        assert audit(where, [job], PlacementOutcome((placement_of(sites, other),), ())) == ()
        bill = bill_of(sites, other.need, other.hub, list(other.parts))
        assert other.usd == pytest.approx(bill.usd, rel=1e-9, abs=1e-9)
        assert other.priced_usd == pytest.approx(at_prices(other, scarcity), rel=1e-9, abs=1e-9)
        assert other.priced_usd >= choice.priced_usd - 1e-9


def test_the_cheapest_other_regions_are_found_and_what_is_pinned_stays() -> None:
    prices = {"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0}
    regions = tuple(
        PlacementRegion(name, "x", (Device("cpu", 9, 100.0, usd, 8 * GB),), 0.0) for name, usd in prices.items()
    )
    where = federation(regions, {(a, b): Path(50, 1e4, 0.0) for a in prices for b in prices if a != b})
    sites = sites_of(where)
    job = PlacementJob(
        "job",
        (PlacementShard("here", "d", 360_000, 0), PlacementShard("free", "d", 360_000, 0, "anywhere")),
        3600.0,
        0,
        0,
    )
    none = np.zeros_like(sites.units)
    choice, _ = priced(sites, paces_of(sites, job), sites.units, none)
    assert choice is not None
    assert choice.sites == [0, 3]
    others = elsewhere(sites, choice, sites.units, none, 5)
    assert [(other.sites, other.usd) for other in others] == [([1, 3], 2 + 4), ([2, 3], 3 + 4)]
    (cheapest,) = elsewhere(sites, choice, sites.units, np.array([0, 9.0, 0, 0]), 1)
    assert cheapest.sites == [2, 3], "scarce capacity counts"
