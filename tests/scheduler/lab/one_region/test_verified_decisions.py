"""What is not proven is not done."""

from __future__ import annotations

from dataclasses import replace

from scheduler.deadline import DeadlineJob, DeviceCapacity, Overhead, Rules, SpeedCurve
from scheduler.lab.one_region import verified_decision

HERE = "here"
LINE = SpeedCurve((1, 2, 4), (1.0, 2.0, 4.0))
ALL = Rules(Overhead(2.0, 0.0, everyone=True), margin=0.0, kept_margin=0.0)


def job(name: str, work: float, deadline_s: float, share: int = 0) -> DeadlineJob:
    return DeadlineJob(name, {HERE: LINE}, work, deadline_s, HERE, share)


def test_a_newcomer_does_not_pause_who_has_no_time_for_it() -> None:
    frail = replace(job("frail", 90.0, 91.0, 1), curves={HERE: SpeedCurve((1,), (1.0,))})
    capacity = DeviceCapacity(2)
    waits = verified_decision(0.0, capacity, HERE, [frail, job("new", 50.0, 400.0)], {"new"}, ALL)
    assert waits.schedule.holds
    assert waits.schedule.ends["frail"] <= 91.0
    assert waits.shares.get("new", 0) == 0
    sturdy = verified_decision(
        0.0, capacity, HERE, [replace(frail, deadline_s=300.0), job("new", 50.0, 400.0)], {"new"}, ALL
    )
    assert [new.name for new in sturdy.promised] == ["new"]
    assert sturdy.schedule.holds


def test_where_capacity_went_the_schedule_with_fewest_late_is_taken() -> None:
    jobs = [job("a", 100.0, 60.0, 2), job("b", 100.0, 60.0, 2)]
    before = verified_decision(0.0, DeviceCapacity(4), HERE, jobs, (), ALL).schedule
    assert before.holds
    after = verified_decision(0.0, DeviceCapacity(2), HERE, jobs, (), ALL, before=before)
    assert sum(after.shares.values()) <= 2
    assert len(after.schedule.late) == 1
