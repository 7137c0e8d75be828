"""ElasticFlow's own simulator, with its clock and its pauses as published, to compare our port with its output.

It differs from ours where its results depend on it. A job ends where its plan does, at the edge of a slot and a pause
later, done or not; only then are its devices free. Whether it met its deadline is determined by that plan too, without
any pause. Every decision pauses every running job, by less where as many devices have begun at the same place before.
Events within a slot after a decision wait for the end of that slot.

In a cluster of several switches, as its largest are, it counts the nodes of each switch from zero, so that jobs overlap
and other places are recorded. That is not reproduced: all nodes are at one switch here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from scheduler.deadline import Overhead
from scheduler.lab.policies._elasticflow import ElasticFlow
from scheduler.simulate._engine import RunningJob
from scheduler.simulate._outcome import JobOutcome, SimulationRun
from scheduler.simulate._trace import TraceJob

_LARGE = 256
"""Number of devices from which it charges more."""


def simulate_published(
    jobs: Sequence[TraceJob], policy: ElasticFlow, nodes: int, devices_per_node: int
) -> SimulationRun:
    """Simulate a trace as ElasticFlow's published simulator does.

    ``JobOutcome.ended_s`` is the time that it compares with the deadline. Jobs must have distinct names. Raises
    ``ValueError`` for best effort, which was not compared with it.
    """
    if policy.keep or not all(job.deadlines for job in jobs):
        raise ValueError("best effort is not simulated as published; leave out jobs without a deadline, and keep")
    return _Published(jobs, policy, nodes * devices_per_node).run()


class _Published:
    def __init__(self, jobs: Sequence[TraceJob], policy: ElasticFlow, devices: int) -> None:
        self.policy, self.devices = policy, devices
        large = devices >= _LARGE
        self.overhead, self.restart_s = Overhead(7.0 if large else 2.0), 47.0 if large else 27.0
        self.waiting = sorted(jobs, key=lambda job: job.submit_s, reverse=True)
        self.active: list[RunningJob] = []
        self.ends_s: dict[str, float] = {}
        """When each active job returns its devices."""
        self.real_ends_s: dict[str, float] = {}
        """When each job is done by its last plan, without pauses."""
        self.pauses_s: dict[str, float] = {}
        self.seen: set[tuple[int, int]] = set()
        """(first device, how many) that have run together."""
        self.outcomes: list[JobOutcome] = []
        self.timeline: list[tuple[float, int, int]] = []
        self.changes = 0

    def run(self) -> SimulationRun:
        before = now = self.waiting[-1].submit_s if self.waiting else math.inf
        while math.isfinite(now):
            self._advance(before, now)
            wake_s = self._decide(now, self._arrivals(now))
            if wake_s >= min(self._events(), default=math.inf):
                wake_s = math.inf  # reported before pauses postpone ends, and not again
            self._pause()
            before, now = now, self._next(now, {wake_s, *self._events()} - {math.inf})
        for job in self.active:
            self._close(job, math.inf)
        return SimulationRun(
            self.policy.name, self.devices, tuple(sorted(self.outcomes, key=lambda outcome: outcome.submit_s)),
            len(self.timeline), self.changes, 0, 0, tuple(self.timeline),
        )  # fmt: skip

    def _events(self) -> set[float]:
        return {job.submit_s for job in self.waiting} | set(self.ends_s.values())

    def _next(self, now: float, due: set[float]) -> float:
        """Return the next decision, at least a slot after the last one unless only one event is left."""
        first_s = min(due, default=math.inf)
        return now + self.policy.slot_s if len(due) > 1 and first_s - now <= self.policy.slot_s else first_s

    def _advance(self, before: float, now: float) -> None:
        """Advance time: no job runs beyond the end of its plan, and jobs with devices leave at their end."""
        over = []
        for job in self.active:
            if not job.share:
                continue
            name, rate = job.name, job.rate()
            job.device_s += job.share * (now - before)
            steps = max(0.0, min(now, self.real_ends_s[name]) - before - self.pauses_s[name]) * rate
            if now >= self.ends_s[name] or steps >= job.left:
                over.append(job)
            job.left -= steps
        for job in over:
            self._close(job, self.real_ends_s[job.name])

    def _arrivals(self, now: float) -> list[RunningJob]:
        arrived = []
        while self.waiting and self.waiting[-1].submit_s <= now:
            spec = self.waiting.pop()
            arrived.append(RunningJob(spec, spec.curve, spec.work))
        self.active += arrived
        return arrived

    def _decide(self, now: float, arrived: Sequence[RunningJob]) -> float:
        """Ask the policy; returns when a share is to change."""
        decision = self.policy.decide(now, self.devices, self.active, arrived)
        gone = set(decision.declined)
        for job in [job for job in self.active if job.name in gone]:
            self._close(job, math.inf, declined=True)
        self.active.sort(key=lambda job: self.policy.order[job.name])
        self.changes += any(job.share != decision.shares[job.name] for job in self.active)
        for job in self.active:
            plan = self.policy.plans[job.name]
            job.share, job.promised_s = decision.shares[job.name], decision.promised.get(job.name, job.promised_s)
            self.ends_s[job.name], self.real_ends_s[job.name] = plan.end_s, plan.real_end_s
            if job.share:
                job.started_s = min(job.started_s, now)
        self.timeline.append((now, sum(job.share for job in self.active), len(self.active)))
        return decision.wake_s

    def _pause(self) -> None:
        """Pause all running jobs; they are placed side by side from the first device on, in their order.

        Once per as many decisions as a slot has seconds, trainers restart, but only those on devices that have not run
        together; what was seen is forgotten then, that decision's own places too.
        """
        decided = len(self.timeline) - 1
        restart = decided > 0 and decided % self.policy.slot_s == 0
        first = 0
        for job in self.active:
            if not job.share:
                continue
            pause_s = self.overhead.base_s
            if (first, job.share) not in self.seen:
                pause_s = self.overhead.seconds(job.share) + (self.restart_s if restart else 0.0)
            self.seen.add((first, job.share))
            first += job.share
            self.pauses_s[job.name] = pause_s
            self.ends_s[job.name] += pause_s
        if restart:
            self.seen.clear()

    def _close(self, job: RunningJob, ended_s: float, declined: bool = False) -> None:
        self.active = [other for other in self.active if other is not job]
        self.ends_s.pop(job.name, None)
        spec = job.spec
        outcome = JobOutcome(
            spec.name, spec.submit_s, spec.deadline_s, job.promised_s, declined, job.started_s, ended_s,
            job.device_s, spec.value_at(ended_s), not spec.deadlines, spec.user,
        )  # fmt: skip
        self.outcomes.append(outcome)
