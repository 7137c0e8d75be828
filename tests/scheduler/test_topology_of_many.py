"""Over many regions topologies are evaluated in other ways than over few; the figures are the same."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.planner_draws import drawn_federation

from scheduler import Demand, Plan, link_table, plan
from scheduler._estimate import MOST_ON_BILL
from scheduler.topology import links_among, links_of
from scheduler.topology._exchange_time import MANY, carried_updates, originals, trees_seconds
from scheduler.topology._large_trees import tree_seconds_of_many


def test_links_are_those_of_the_table() -> None:
    regions = list(drawn_federation(random.Random(3), 6).regions)
    first, last = regions[0], regions[-1]
    assert first.prices is not None
    regions[0] = replace(
        first,
        links=(replace(first.links[0], mbps=0.0), *first.links[2:], replace(first.links[1], destination="elsewhere")),
        prices=replace(first.prices, egress_to={last.name: 0.5, "elsewhere": 0.7}),
    )
    table = link_table(regions)
    found = links_of(regions[::-1])
    wanted = links_among(
        sorted(region.name for region in regions), table, {region.name: region.cloud for region in regions}
    )
    assert (found.names, found.clouds) == (wanted.names, wanted.clouds)
    assert (found.there == wanted.there).all()
    for name in ("rtt", "rate", "usd_per_gb"):
        own, other = getattr(found, name), getattr(wanted, name)
        assert own[found.there] == pytest.approx(other[found.there])


@given(st.permutations(range(9)), st.integers(3, 9))
def test_the_updates_of_a_ring_are_counted(order: list[int], size: int) -> None:
    ring = [place for place in order if place < size]
    neighbours: list[list[int]] = [[] for _ in ring]
    for place, here in enumerate(ring):
        neighbours[here] = sorted((ring[place - 1], ring[(place + 1) % size]))
    assert carried_updates(neighbours) == {link: len(sources) for link, sources in originals(neighbours).items()}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("size", [2_000, 3_000_000])
def test_a_tree_takes_as_long_as_update_by_update(seed: int, size: int) -> None:
    rng = random.Random(seed)
    net = links_of(drawn_federation(rng, 60).regions).hops(size)
    shapes = {
        "star": [-1] + [0] * 59,
        "two levels": [-1] + [0] * 4 + [rng.randint(0, 4) for _ in range(55)],
        "random": [-1] + [rng.randint(0, n - 1) for n in range(1, 60)],
    }
    for shape, tree in shapes.items():
        parents = np.array(tree)
        exactly = float(trees_seconds(net, parents[None, :])[0])
        # A link that falls idle begins again; the running maximum counts that for the first update alone.
        assert tree_seconds_of_many(net.pace, parents) == pytest.approx(exactly, rel=0.1), shape
        assert tree_seconds_of_many(net.pace, parents) <= exactly * (1 + 1e-9), shape


def test_a_plan_of_many_regions_names_every_link_and_sums_the_egress_of_a_price() -> None:
    snapshot = drawn_federation(random.Random(1), MANY + 2, most=4)
    found = plan(snapshot, Demand("job", "data", batch=32, epochs=3.0, steps=None, seed=1, topology="mesh"))
    assert isinstance(found, Plan)
    count = MANY + 2
    assert len(found.estimate.link_bytes) == count * (count - 1)
    egress = [item for item in found.estimate.items if item.item.startswith("egress")]
    assert {item.item for item in egress} == {f"egress to {count - 1} regions"}
    assert count - 1 > MOST_ON_BILL
    assert sum(item.quantity for item in egress) * 1e9 == pytest.approx(sum(found.estimate.link_bytes.values()))
