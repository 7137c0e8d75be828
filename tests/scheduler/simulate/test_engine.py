"""Time passes as it should: work is done once, pauses cost, devices are never given twice."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from scheduler.deadline import Overhead, SpeedCurve
from scheduler.simulate import Incidents, Pauses, PolicyDecision, RunningJob, TraceJob, simulate

LINE = SpeedCurve((1, 2, 4), (1.0, 2.0, 4.0))
NO_PAUSES = Pauses(Overhead(0.0, 0.0))


def job(name: str, submit_s: float, work: float, deadline_s: float = 1e6) -> TraceJob:
    table = dict(zip(LINE.levels, LINE.rates, strict=True))
    return TraceJob(name, submit_s, work, ((deadline_s, 1.0),), 1, work, LINE, table)


class Scripted:
    """Shares by job and instant; asked again at each of them."""

    name, slot_s, at_edges = "scripted", 0.0, False

    def __init__(self, script: dict[float, dict[str, int]], slot_s: float = 0.0, declined: Sequence[str] = ()) -> None:
        self.script, self.slot_s, self.declined = script, slot_s, declined
        self.asked: list[tuple[float, list[str], list[float]]] = []

    def decide(
        self, now: float, devices: int, active: Sequence[RunningJob], arrived: Sequence[RunningJob]
    ) -> PolicyDecision:
        self.asked.append((now, [job.name for job in arrived], [job.left for job in active]))
        shares = self.script[max((at for at in self.script if at <= now), default=min(self.script))]
        wake_s = min((at for at in self.script if at > now), default=math.inf)
        gone = [job.name for job in arrived if job.name in self.declined]
        return PolicyDecision({job.name: shares.get(job.name, 0) for job in active}, gone, wake_s=wake_s)


def test_work_is_done_at_the_rate_of_the_share() -> None:
    run = simulate([job("a", 0, 100)], Scripted({0.0: {"a": 1}, 20.0: {"a": 4}}), 1, 4, NO_PAUSES)
    assert run.outcomes[0].ended_s == pytest.approx(40.0)
    assert run.outcomes[0].device_s == pytest.approx(20 + 4 * 20)


def test_a_change_pauses_the_job_and_where_it_is_so_everybody() -> None:
    jobs = [job("a", 0, 100), job("b", 0, 100)]
    script = {0.0: {"a": 1, "b": 1}, 50.0: {"a": 1, "b": 2}}
    own = simulate(jobs, Scripted(script), 1, 4, Pauses(Overhead(2.0, 2.0)))
    ends = {outcome.name: outcome.ended_s for outcome in own.outcomes}
    assert ends["a"] == pytest.approx(104.0), "a start takes 2 s and 2 s for one device"
    assert ends["b"] == pytest.approx(50 + 6 + 54 / 2)
    every = simulate(jobs, Scripted(script), 1, 4, Pauses(Overhead(2.0, 2.0, everyone=True)))
    assert {outcome.name: outcome.ended_s for outcome in every.outcomes}["a"] == pytest.approx(106.0)


def test_a_declined_job_does_not_run_and_does_not_meet() -> None:
    run = simulate(
        [job("a", 0, 10, 100), job("b", 5, 10, 100)], Scripted({0.0: {"a": 1}}, declined="b"), 1, 4, NO_PAUSES
    )
    first, second = run.outcomes
    assert (first.met, second.met, second.declined) == (True, False, True)
    assert (run.met, run.ratio) == (1, 0.5)


def test_events_within_a_slot_are_decided_on_together() -> None:
    policy = Scripted({0.0: {"a": 1}}, slot_s=60.0)
    simulate([job("a", 0, 1000), job("b", 10, 10), job("c", 55, 10)], policy, 1, 4, NO_PAUSES)
    assert [(now, arrived) for now, arrived, _ in policy.asked[:2]] == [(0.0, ["a"]), (60.0, ["b", "c"])]


def test_more_devices_than_there_are_cannot_be_given() -> None:
    with pytest.raises(ValueError, match="gave 5 of 4"):
        simulate([job("a", 0, 10), job("b", 0, 10)], Scripted({0.0: {"a": 4, "b": 1}}), 1, 4, NO_PAUSES)


def test_a_failed_node_takes_its_jobs_and_comes_back() -> None:
    class Greedy(Scripted):
        def decide(
            self, now: float, devices: int, active: Sequence[RunningJob], arrived: Sequence[RunningJob]
        ) -> PolicyDecision:
            self.seen.add(devices)
            return PolicyDecision({job.name: job.believed.fitting(devices) for job in active})

    policy = Greedy({0.0: {}})
    policy.seen = set()  # type: ignore[attr-defined]  # what the test looks at
    incidents = Incidents(failures_per_device_hour=0.2, repair_s=600.0, lost_s=60.0, seed=3)
    run = simulate([job("a", 0, 40_000)], policy, 2, 4, NO_PAUSES, incidents)
    assert run.failures > 0
    assert policy.seen == {8, 4} or policy.seen == {8, 4, 0}  # type: ignore[attr-defined]
    assert run.outcomes[0].ended_s > 10_000.0
    assert math.isfinite(run.outcomes[0].ended_s)


def test_curves_may_be_off_and_the_work_still_takes_what_it_takes() -> None:
    policy = Scripted({0.0: {"a": 2}})
    run = simulate([job("a", 0, 100)], policy, 1, 4, NO_PAUSES, curve_error=0.3)
    assert run.outcomes[0].ended_s == pytest.approx(50.0)


def test_progress_is_told_to_the_last_job() -> None:
    told: list[tuple[int, int]] = []
    policy = Scripted({0.0: {"a": 1, "b": 1}})
    simulate([job("a", 0, 10), job("b", 3, 10)], policy, 1, 4, NO_PAUSES, progress=lambda *at: told.append(at))
    assert told == [(1, 2), (2, 2)]
