"""With exact curves and no failure no promise is ever broken, whatever arrives and whomever changes pause."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import budget

from scheduler.deadline import Overhead, Rules, curve_from_table
from scheduler.lab.policies import POLICIES
from scheduler.simulate import Pauses, TraceJob, simulate

from .traces import TABLES


def arrivals(count: int, seed: int, every_s: float, tight: float) -> list[TraceJob]:
    """Bursts and single jobs, some without a deadline; at `tight` near 1 windows are as long as the job takes alone."""
    draw = random.Random(seed)
    jobs, at = [], 0.0
    for number in range(count):
        at += draw.choice((0.0, draw.expovariate(1 / every_s)))
        table = draw.choice(TABLES)
        curve = curve_from_table(table)
        assert curve is not None
        work = draw.lognormvariate(5.5, 1.0) * curve.rates[-1]
        window_s = work / curve.rates[-1] * draw.uniform(tight, 4 * tight)
        deadlines = ((at + window_s, 1.0),) if draw.random() < 0.9 else ()
        jobs.append(TraceJob(f"j{number}", at, work, deadlines, 1, window_s, curve, table, user=draw.choice("ab")))
    return jobs


@pytest.mark.slow
@settings(max_examples=budget(16), deadline=None)
@given(
    seed=st.integers(0, 10**6),
    every_s=st.sampled_from([5.0, 40.0, 150.0]),
    tight=st.floats(1.0, 2.0),
    nodes=st.sampled_from([1, 2, 4]),
    base_s=st.sampled_from([0.0, 2.0, 7.0]),
    everyone=st.booleans(),
    margin=st.sampled_from([0.0, 0.03, 0.08]),
)
def test_nobody_who_was_promised_a_deadline_is_late(
    seed: int, every_s: float, tight: float, nodes: int, base_s: float, everyone: bool, margin: float
) -> None:
    overhead = Overhead(base_s=base_s, everyone=everyone)
    chosen = POLICIES["geofed"](Rules(overhead, margin=margin, kept_margin=margin / 2), 0.0, 0.0)
    done = simulate(arrivals(25, seed, every_s, tight), chosen, nodes, 8, Pauses(overhead))
    assert not [job.name for job in done.outcomes if job.broken]
    assert done.promised == done.met, "nothing is met but what was promised, as who is refused is sent away"


@pytest.mark.slow
def test_the_promises_of_the_property_are_many() -> None:
    """So that the property is about something: also in the hardest of its cases half of the jobs and more run."""
    overhead = Overhead(everyone=True)
    done = simulate(arrivals(40, 1, 40.0, 1.5), POLICIES["geofed"](Rules(overhead), 0.0, 0.0), 2, 8, Pauses(overhead))
    assert done.promised >= 15
    assert done.changes >= 20
