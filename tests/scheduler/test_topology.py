"""What every topology holds, whatever the links look like, and that the best ones are the best."""

from __future__ import annotations

import heapq
import math
from dataclasses import replace
from itertools import combinations, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import budget

from scheduler import (
    Alternative,
    Capacity,
    Dataset,
    Declined,
    Demand,
    Link,
    LinkTable,
    Path,
    Plan,
    Prices,
    Region,
    Snapshot,
    Split,
    Topologies,
    Topology,
    choose_again,
    choose_topology,
    evaluate_topologies,
    evaluate_topology,
    plan,
)
from scheduler._link import pace

NAMES = "abcdefghijklmnop"
SIZES = st.integers(1_000, 2_000_000_000)


@st.composite
def tables(draw: st.DrawFn, most: int = 7, missing: bool = True) -> tuple[list[str], dict[tuple[str, str], Path]]:
    names = list(NAMES[: draw(st.integers(2, most))])
    path = st.builds(Path, st.floats(1, 400), st.floats(5, 20_000), st.floats(0, 0.2))
    table = {}
    for a, b in combinations(names, 2):
        if not missing or draw(st.integers(0, 4)):
            table[a, b], table[b, a] = draw(path), draw(path)
    return names, table


def complete(names: str, mbps: float = 100.0, rtt_ms: float = 50.0, usd: float = 0.09) -> dict[tuple[str, str], Path]:
    return {(a, b): Path(rtt_ms, mbps, usd) for a in names for b in names if a != b}


def reference(links: tuple[tuple[str, str], ...], table: LinkTable, size: int) -> float:
    """The flood as events: fewest hops, the first way by name; links send in the order of what came."""
    names = sorted({name for link in links for name in link})
    near = {name: sorted({x for link in links if name in link for x in link} - {name}) for name in names}
    above: dict[tuple[str, str], str] = {}
    for origin in names:
        queue = [origin]
        for here in queue:
            for there in near[here]:
                if there != origin and (origin, there) not in above:
                    above[origin, there] = here
                    queue.append(there)
    free: dict[tuple[str, str], tuple[float, int]] = {}
    events, last = [(0.0, name, name) for name in names], 0.0
    while events:
        at, origin, here = heapq.heappop(events)
        last = max(last, at)
        for there in near[here]:
            if above.get((origin, there)) != here:
                continue
            link = pace(table[here, there], size)
            begin, (until, sent) = at + link.offer_seconds, free.get((here, there), (-math.inf, 0))
            if begin - until > link.idle_seconds:
                until, sent = begin + link.first_seconds, 1
            else:
                until = max(begin, until) + (link.second_seconds if sent == 1 else link.next_seconds)
                sent += 1
            free[here, there] = until, sent
            heapq.heappush(events, (until + link.way_seconds, origin, there))
    return last


def reached(links: tuple[tuple[str, str], ...], start: str) -> set[str]:
    seen = {start}
    while more := {x for link in links if seen & set(link) for x in link} - seen:
        seen |= more
    return seen


@settings(deadline=None)
@given(tables(), SIZES)
def test_every_topology_spans_the_regions_over_links_that_are_there(
    drawn: tuple[list[str], dict[tuple[str, str], Path]], size: int
) -> None:
    names, table = drawn
    evaluated = evaluate_topologies(names, table, size)
    connected = reached(tuple(table), names[0]) == set(names)
    assert bool(evaluated.possible) == connected
    for topology in evaluated.possible:
        assert reached(topology.links, names[0]) == set(names)
        assert list(topology.links) == sorted(set(topology.links))
        assert all(a < b and (a, b) in table and (b, a) in table for a, b in topology.links)
        assert topology.seconds == pytest.approx(reference(topology.links, table, size))
        # Each region receives every other one's update once.
        sent = sum(sum(to.values()) for to in topology.sent.values())
        assert sent == pytest.approx(len(names) * (len(names) - 1) * size)
        assert evaluate_topology(topology, table, size) == topology
    kinds = {topology.kind for topology in evaluated.possible}
    assert not kinds & set(evaluated.impossible)
    assert kinds | set(evaluated.impossible) >= {"mesh", "star", "tree", "ring", "two-level"}


@settings(deadline=None, max_examples=budget(40))
@given(tables(most=6), SIZES)
def test_stars_and_rings_are_the_best_of_all(drawn: tuple[list[str], dict[tuple[str, str], Path]], size: int) -> None:
    names, table = drawn
    found = {topology.kind: topology.seconds for topology in evaluate_topologies(names, table, size).possible}

    def best(graphs: list[list[tuple[str, str]]]) -> float | None:
        there = [links for links in graphs if all(link in table for link in links)]
        return min((reference(tuple(links), table, size) for links in there), default=None)

    stars = best([[(hub, other) for other in names if other != hub] for hub in names])
    assert found.get("star") == (pytest.approx(stars) if stars is not None and found else None)
    if len(names) > 2 and found:
        orders = [(names[0], *rest) for rest in permutations(names[1:])]
        rings = best([list(zip(order, (*order[1:], order[0]), strict=True)) for order in orders])
        assert found.get("ring") == (pytest.approx(rings) if rings is not None else None)


@settings(deadline=None)
@given(tables(), SIZES, st.floats(1, 10))
def test_a_larger_update_takes_no_less_time_on_its_way(
    drawn: tuple[list[str], dict[tuple[str, str], Path]], size: int, factor: float
) -> None:
    names, table = drawn
    larger = int(size * factor)
    for path in table.values():
        assert pace(path, larger).total_seconds >= pace(path, size).total_seconds
    for topology in evaluate_topologies(names, table, size).possible:
        other = evaluate_topology(topology, table, larger)
        assert other is not None
        if topology.kind == "mesh":
            assert other.seconds >= topology.seconds
        # Elsewhere a link that stays busy keeps its window, which may save a cold start on the way.
        starts = sum(table[link].rtt_seconds * 20 for pair in topology.links for link in (pair, pair[::-1]))
        assert other.seconds >= topology.seconds - starts
        assert other.usd_per_round >= topology.usd_per_round


def test_a_long_ring_is_near_the_best_of_many() -> None:
    """Regions on a circle, shuffled: the search must find the way round."""
    order = "fjbdhkacgeil"
    table = {}
    for i, a in enumerate(order):
        for j, b in enumerate(order):
            apart = min((i - j) % 12, (j - i) % 12)
            if apart:
                table[a, b] = Path(20.0 * apart, 1000.0 / apart**2, 0.09)
    ring = next(t for t in evaluate_topologies(order, table, 100_000_000).possible if t.kind == "ring")
    assert set(ring.links) == {tuple(sorted(pair)) for pair in zip(order, order[1:] + order[:1], strict=True)}


def test_clusters_far_apart_make_two_levels_with_a_hub_in_each() -> None:
    """Three by three regions, of which only the hubs have good links to far away."""
    table = {}
    for a, b in permutations("abcdefghi", 2):
        far = NAMES.index(a) // 3 != NAMES.index(b) // 3
        good = not far or (a in "adg" and b in "adg")
        table[a, b] = Path(200.0 if far else 2.0, 1000.0 if good else 5.0, 0.09)
    chosen = choose_topology(evaluate_topologies("abcdefghi", table, 50_000_000))
    assert chosen is not None
    assert set(chosen.hubs) == set("adg") or chosen.kind == "tree"
    assert {("a", "b"), ("a", "c"), ("d", "e"), ("d", "f"), ("g", "h"), ("g", "i")} <= set(chosen.links)


def test_the_fastest_is_taken_unless_another_is_as_fast_and_cheaper() -> None:
    evaluated = Topologies(
        (
            Topology("mesh", (), (("a", "b"), ("a", "c"), ("b", "c")), 1.00, 0.10),
            Topology("star", ("b",), (("a", "b"), ("b", "c")), 1.04, 0.09),
            Topology("tree", (), (("a", "c"), ("b", "c")), 1.60, 0.07),
        ),
        {},
    )
    chosen = choose_topology(evaluated)
    assert chosen is not None
    assert chosen.kind == "star", "the tree is much cheaper, but more than 5 % slower"


def test_one_region_exchanges_nothing() -> None:
    alone = choose_topology(evaluate_topologies(["a"], {}, 1000))
    assert alone == Topology("mesh", (), (), 0.0, 0.0)
    with pytest.raises(ValueError):
        evaluate_topologies([], {}, 1000)


# --- in plans


def regions(stated: dict[tuple[str, str], float], names: str) -> tuple[Region, ...]:
    """Regions with links of these rates; 0: no direct path."""
    prices = Prices("list", "2026-01", 1.67e-5, 2e-7, 0.05, 0.09)
    return tuple(
        Region(
            name,
            "cloud",
            Capacity(4, 2048, 500.0),
            prices,
            (Dataset("digits", {"train": Split(1000)}),),
            tuple(Link(a, b, 50.0, mbps) for (a, b), mbps in stated.items() if a == name),
        )
        for name in names
    )


DEMAND = Demand("job", "digits", batch=32, epochs=3.0, steps=None, seed=1, minimise="time")


def planned(stated: dict[tuple[str, str], float], names: str, **more: object) -> Plan | Declined:
    snapshot = Snapshot(regions(stated, names), model_bytes=20_000_000)
    return plan(snapshot, replace(DEMAND, **more))  # type: ignore[arg-type]


def _other_topologies(answer: Plan) -> list[Alternative]:
    return [other for other in answer.alternatives if other.decision.startswith("topology")]


def test_links_that_nobody_states_make_a_mesh() -> None:
    answer = planned({}, "abc")
    assert isinstance(answer, Plan)
    assert answer.topology == "mesh"
    assert answer.neighbours == (("a", "b"), ("a", "c"), ("b", "c"))
    assert answer.exchange_seconds > 0
    others = _other_topologies(answer)
    assert [other.text.partition(" ")[0] for other in others] == ["star", "two-level"]
    assert others[0].text.startswith("star via a: ")
    assert "dearer" in others[0].why_not or "slower" in others[0].why_not
    assert "needs four regions" in others[1].why_not


def test_without_a_direct_path_updates_are_passed_on() -> None:
    answer = planned({("a", "c"): 0.0}, "abc", epochs=1000.0, codec="fp32")
    assert isinstance(answer, Plan)
    assert answer.neighbours == (("a", "b"), ("b", "c"))
    assert set(answer.estimate.link_bytes) == {"a>b", "b>a", "b>c", "c>b"}
    ratio = answer.estimate.link_bytes["b>c"] / answer.estimate.link_bytes["c>b"]
    assert ratio == pytest.approx(2.0, rel=0.02), "b passes on a's updates"
    assert "a and c have no direct path" in str(answer.alternatives)


def test_a_slow_direct_link_is_gone_round() -> None:
    answer = planned({("a", "c"): 1.0, ("c", "a"): 1.0, ("a", "b"): 500.0, ("b", "c"): 500.0}, "abc")
    assert isinstance(answer, Plan)
    assert answer.topology == "star via b"


@pytest.mark.parametrize("kind", ["mesh", "star", "tree", "ring", "two-level"])
def test_a_fixed_kind_is_the_best_of_that_kind(kind: str) -> None:
    answer = planned({}, "abcd", topology=kind)
    assert isinstance(answer, Plan)
    assert answer.topology.partition(" ")[0] == kind
    assert not _other_topologies(answer)


def test_what_cannot_be_joined_is_declined_with_what_would_help() -> None:
    impossible = planned({("a", "c"): 0.0}, "abc", topology="mesh")
    assert isinstance(impossible, Declined)
    (reason,) = impossible.reasons
    assert "a and c have no direct path" in reason.text
    assert "set advanced.wan.topology to auto" in reason.remedy
    apart = planned({("a", "c"): 0.0, ("a", "b"): 0.0}, "abc")
    assert isinstance(apart, Declined)
    assert "no path joins a with b, c" in apart.reasons[0].text
    assert "regions.avoid" in apart.reasons[0].remedy


# --- choosing again


def test_a_topology_is_changed_only_for_a_gain_that_lasts() -> None:
    good, size = complete("abcd"), 10_000_000
    mesh = choose_topology(evaluate_topologies("abcd", good, size))
    assert mesh is not None
    assert mesh.kind == "mesh"
    slow = {**good, ("a", "b"): Path(50.0, 5.0, 0.09)}
    assert choose_again(mesh, [good, good, good], size) is None
    assert choose_again(mesh, [slow, slow], size) is None, "two measurements are not enough"
    assert choose_again(mesh, [slow, good, slow], size) is None, "it did not last"
    other = choose_again(mesh, [good, slow, slow, slow], size)
    assert other is not None
    assert ("a", "b") not in other.links
    assert other.seconds < 0.8 * reference(mesh.links, slow, size)
    little = {**good, ("a", "b"): Path(50.0, 85.0, 0.09)}
    assert choose_again(mesh, [little] * 3, size) is None
    gone = {link: path for link, path in good.items() if set(link) != {"a", "b"}}
    assert choose_again(mesh, [gone] * 3, size) is not None
    assert choose_again(mesh, [gone, gone, good], size) is None
    alone = choose_topology(evaluate_topologies("a", {}, size))
    assert alone is not None
    assert choose_again(alone, [{}] * 3, size) is None
