"""What links are seen to carry, and when that calls for other ways."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler import LinkMeasurement, Path, choose_topology, evaluate_topologies, rerouted, with_measurements
from scheduler._link import pace

SIZE = 5_000_000


def complete(names: str, mbps: float = 100.0) -> dict[tuple[str, str], Path]:
    return {pair: Path(30.0, mbps, 0.09) for pair in permutations(names, 2)}


def told(path: Path, size: int = SIZE, beyond: float = 0.0) -> float:
    """The rate that a sender tells of a link; ``beyond``: seconds that the receiver took."""
    return size * 8 / 1e6 / (pace(path, size).first_seconds + path.rtt_seconds + beyond)


@given(mbps=st.floats(0.5, 60.0), rtt_ms=st.floats(1.0, 300.0), size=st.integers(1_000_000, 100_000_000))
def test_a_slower_link_is_seen_as_it_is(mbps: float, rtt_ms: float, size: int) -> None:
    stated, true = Path(rtt_ms, 200.0, 0.0), Path(rtt_ms, mbps, 0.0)
    seen = with_measurements({("a", "b"): stated}, {("a", "b"): LinkMeasurement(told(true, size), rtt_ms)}, size)[
        "a", "b"
    ]
    slow = told(true, size) * 1.6 < told(stated, size, beyond=0.1)
    assert seen == stated or seen.mbps == pytest.approx(mbps, rel=0.06)
    assert seen != stated or not slow


@pytest.mark.parametrize("size", [10_000, 300_000, 5_000_000, 500_000_000])
def test_what_a_good_link_cannot_help_does_not_count(size: int) -> None:
    """Small updates take as long as a round trip and a disk do, whatever the rate."""
    path = Path(80.0, 1000.0, 0.0)
    sighting = LinkMeasurement(told(path, size, beyond=0.05), 80.0)
    assert with_measurements({("a", "b"): path}, {("a", "b"): sighting}, size) == {("a", "b"): path}


def test_a_faster_link_and_a_longer_way_are_seen() -> None:
    stated = {("a", "b"): Path(30.0, 10.0, 0.5)}
    assert with_measurements(stated, {("a", "b"): LinkMeasurement(88.8, 31.0)}, SIZE)["a", "b"] == Path(30.0, 89.0, 0.5)
    assert with_measurements(stated, {("a", "b"): LinkMeasurement(0.0, 456.0)}, SIZE)["a", "b"] == Path(
        460.0, 10.0, 0.5
    )


def test_what_nobody_knows_is_not_counted_on() -> None:
    table = complete("abc")
    known = [("a", "b"), ("b", "a")]
    seen = with_measurements(
        table, {("b", "c"): LinkMeasurement(50.0), ("a", "b"): LinkMeasurement(down=True)}, SIZE, known
    )
    assert set(seen) == {("b", "a"), ("b", "c")}


def test_other_ways_must_make_the_round_shorter() -> None:
    good = complete("abcd")
    slow = good | {("a", "b"): replace(good["a", "b"], mbps=5.0)}
    mesh = choose_topology(evaluate_topologies("abcd", good, SIZE))
    assert mesh is not None
    found = rerouted(mesh, [slow] * 3, good, SIZE, compute_seconds=1.0, background=False)
    assert found is not None
    assert ("a", "b") not in found.topology.links
    assert found.before_seconds > 1.0 + 8.0 > found.after_seconds > 1.0
    assert found.why == "a>b carries 5 Mbit/s, not 100"
    assert rerouted(mesh, [slow] * 3, good, SIZE, compute_seconds=1000.0, background=False) is None
    assert rerouted(mesh, [slow] * 3, good, SIZE, compute_seconds=20.0, background=True) is None, "it is hidden"
    assert rerouted(mesh, [good] * 3, good, SIZE, compute_seconds=1.0, background=False) is None


def test_a_link_that_is_down_takes_for_ever() -> None:
    good = complete("abc")
    mesh = choose_topology(evaluate_topologies("abc", good, SIZE))
    assert mesh is not None
    down = {pair: path for pair, path in good.items() if pair != ("c", "b")}
    found = rerouted(mesh, [down] * 3, good, SIZE, compute_seconds=1.0, background=True)
    assert found is not None
    assert found.before_seconds == math.inf
    assert found.why == "c>b is down"
