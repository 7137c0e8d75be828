"""How long rounds take in which regions wait for each other, against rounds that are followed one by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler._cost_model import Assignments, Exchanges, JobConstants, course, standing_seconds
from scheduler._estimate import seconds_apart
from scheduler.topology import Topology

ROUNDS = 400


def followed(compute: list[float], way: float, own: float) -> float:
    """Seconds of a round in the long run: a region begins one when it has the updates of all others."""
    begun, half = np.zeros(len(compute)), 0.0
    for number in range(ROUNDS):
        if number == ROUNDS // 2:
            half = float(begun.max())
        arrives = (begun + compute)[:, None] + way * (1 - np.eye(len(compute)))
        begun = arrives.max(axis=0) + own
    return (float(begun.max()) - half) / (ROUNDS - ROUNDS // 2)


@given(
    compute=st.lists(st.floats(0.01, 10.0), min_size=2, max_size=6), way=st.floats(0.0, 5.0), own=st.floats(0.0, 1.0)
)
def test_updates_of_faster_regions_travel_while_the_slowest_one_computes(
    compute: list[float], way: float, own: float
) -> None:
    nothing = np.zeros((1, len(compute)))
    assignments = Assignments(
        *(np.array([compute]) if name == "step_seconds" else nothing for name in Assignments.__annotations__)
    )
    late, start = nothing[0].astype(bool), nothing[0]
    constants = JobConstants(1e9, 0.0, 0.0, 0.0, first_model_known=True, served_late=late, started=start, served=start)
    exchange = Exchanges.one(way + own, background=False, apart=0.0, contact=0.0, links=way, beyond=0.0)
    took = course(assignments, constants, np.full((1, 1), float(ROUNDS)), np.ones((1, 1, len(compute))), exchange)
    assert took.seconds[0, 0, 0] / ROUNDS == pytest.approx(followed(compute, way, own), rel=1e-6)


def begun_apart(compute: float, way: float, lead: int) -> float:
    """Seconds of a round in the long run: one ends when the other region's update of ``lead`` rounds before it is here;
    where ``lead`` is 0, whatever is here."""
    ended = [0.0]
    for number in range(1, ROUNDS + 1):
        awaited = number - 1 - lead if lead else 0
        here = ended[awaited] + way if awaited > 0 else 0.0
        ended.append(max(ended[-1] + compute, here))
    return (ended[-1] - ended[ROUNDS // 2]) / (ROUNDS - ROUNDS // 2)


@given(compute=st.floats(0.01, 1.0), way=st.floats(0.0, 5.0), lead=st.integers(0, 8))
def test_of_rounds_that_may_run_ahead_several_exchanges_are_under_way_at_once(
    compute: float, way: float, lead: int
) -> None:
    topology = Topology("mesh", (), (("a", "b"),), way, 0.0)
    apart = seconds_apart(topology, 4, "fp32", {"quorum": 1.0, "lead": float(lead)})
    stands = standing_seconds(
        np.array([compute, compute]),
        Exchanges.one(way, background=True, apart=apart, contact=0.0, links=way, beyond=0.0),
    )
    # Rounds that wait end in groups of as many as may be ahead.
    assert compute + stands[0] == pytest.approx(begun_apart(compute, way, lead), rel=0.05, abs=1e-6)


def test_exchanges_are_no_closer_than_the_busiest_link_carries_them() -> None:
    topology = Topology("mesh", (), (("a", "b"),), 3.0, 0.0, busy_seconds=2.0)
    assert seconds_apart(topology, 4, "fp32", {"quorum": 1.0, "lead": 8.0}) == 2.0
    assert seconds_apart(topology, 4, "fp32", {}) == pytest.approx(3.0), "others wait for each round"
