"""How long rounds take in which regions wait for each other, against rounds that are followed one by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler._cost_model import Assignments, Exchanges, JobConstants, course

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
    exchange = Exchanges.one(way + own, background=False, contact=0.0, links=way, beyond=0.0)
    took = course(assignments, constants, np.full((1, 1), float(ROUNDS)), np.ones((1, 1, len(compute))), exchange)
    assert took.seconds[0, 0, 0] / ROUNDS == pytest.approx(followed(compute, way, own), rel=1e-6)
