"""When preemptible capacity has to be left."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import budget

from scheduler.deadline import Overhead, SpeedCurve, latest_exit, preemptible_share

CURVE = SpeedCurve((1, 2, 4, 8), (1.0, 1.9, 3.4, 5.5))
OVERHEAD = Overhead()


@settings(max_examples=budget(100), deadline=None)
@given(st.floats(10, 5000), st.floats(20, 5000), st.floats(0, 200))
def test_whoever_leaves_at_the_last_safe_moment_is_in_time(work: float, deadline_s: float, lost_s: float) -> None:
    way_out = latest_exit(work, deadline_s, CURVE, 0.0, OVERHEAD, lost_s=lost_s)
    fastest_s = work / 5.5 + OVERHEAD.seconds(8)
    if not way_out.share:
        assert fastest_s > deadline_s
        return
    leave_s = max(0.0, way_out.leave_s)
    assert leave_s + OVERHEAD.seconds(way_out.share) + work / CURVE.rate(way_out.share) <= deadline_s + 1e-6


def test_what_a_preemption_takes_is_kept_free() -> None:
    sure = latest_exit(500.0, 2000.0, CURVE, 0.0, OVERHEAD, margin=0.0)
    careful = latest_exit(500.0, 2000.0, CURVE, 0.0, OVERHEAD, margin=0.0, lost_s=100.0)
    assert careful.leave_s == sure.leave_s - 100.0
    assert careful.share == sure.share == 1


def test_on_preemptible_capacity_half_of_the_time_is_slack() -> None:
    assert preemptible_share(400.0, 1000.0, CURVE, 0.0) == 1
    assert preemptible_share(900.0, 1000.0, CURVE, 0.0) == 2
    assert preemptible_share(9000.0, 1000.0, CURVE, 0.0) == 8
