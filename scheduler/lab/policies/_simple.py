"""Baseline policies: earliest deadline first, with and without admission, and Tiresias."""

from __future__ import annotations

import math
from collections.abc import Sequence

from scheduler.simulate._engine import PolicyDecision, RunningJob


class EarliestDeadline:
    """All jobs by deadline, each with the largest measured level that is free; no job is declined.

    As in ElasticFlow's simulator that level is used even where a smaller one is faster, unless `pareto`.
    """

    at_edges = False

    def __init__(self, slot_s: float = 0.0, pareto: bool = False) -> None:
        self.name, self.slot_s, self.pareto = "edf-pareto" if pareto else "edf", slot_s, pareto

    def decide(
        self, now: float, devices: int, active: Sequence[RunningJob], arrived: Sequence[RunningJob]
    ) -> PolicyDecision:
        """Serve all jobs in the order of their deadlines; none is declined."""
        return PolicyDecision(_by_deadline(active, devices, self.pareto))


def _by_deadline(jobs: Sequence[RunningJob], devices: int, pareto: bool) -> dict[str, int]:
    shares, free = {}, devices
    for job in sorted(jobs, key=lambda job: job.spec.deadline_s):
        levels = job.believed.levels if pareto else tuple(job.spec.table)
        shares[job.name] = max((level for level in levels if level <= free), default=0)
        free -= shares[job.name]
    return shares


class EarliestDeadlineWithAdmission:
    """The same with admission: jobs that would end late, or make another job late, are declined."""

    at_edges = False
    name = "edf-admission"
    slot_s = 0.0

    def decide(
        self, now: float, devices: int, active: Sequence[RunningJob], arrived: Sequence[RunningJob]
    ) -> PolicyDecision:
        """Decline arrivals that would end late or make another job late, and serve the rest by deadline."""
        new = {job.name for job in arrived}
        taken = [job for job in active if job.name not in new]
        declined, promised = [], {}
        late = _late(now, devices, taken)
        for job in sorted(arrived, key=lambda job: job.spec.deadline_s):
            if not job.spec.deadlines or _late(now, devices, [*taken, job]) <= late:
                taken.append(job)
                if job.spec.deadlines:
                    promised[job.name] = job.spec.deadline_s
            else:
                declined.append(job.name)
        return PolicyDecision(_by_deadline(taken, devices, True), declined, promised)


def _late(now: float, devices: int, jobs: Sequence[RunningJob]) -> set[str]:
    """Return the jobs that would end late if these jobs, and no others, ran by deadline."""
    left = {job.name: job.left for job in jobs}
    queue = sorted(jobs, key=lambda job: job.spec.deadline_s)
    late: set[str] = set()
    while queue:
        free, running = devices, []
        for job in queue:
            share = job.believed.fitting(free)
            free -= share
            if share:
                running.append((job, job.believed.rate(share)))
        if not running:
            return late | {job.name for job in queue}
        step = min(left[job.name] / rate for job, rate in running)
        now += step
        for job, rate in running:
            left[job.name] -= rate * step
            if left[job.name] <= 1e-6 and now > job.spec.deadline_s:
                late.add(job.name)
        queue = [job for job in queue if left[job.name] > 1e-6]
    return late


class Tiresias:
    """Two-dimensional least attained service (NSDI'19): the shares that users asked for, in queues by attained device
    time."""

    at_edges = False
    name = "tiresias"
    limits = (3250.0, 7200.0)
    """Device seconds at which a job falls into the next queue; as in ElasticFlow's copy."""

    def __init__(self, slot_s: float = 0.0) -> None:
        self.slot_s = slot_s
        self.order: dict[str, int] = {}

    def decide(
        self, now: float, devices: int, active: Sequence[RunningJob], arrived: Sequence[RunningJob]
    ) -> PolicyDecision:
        """Give jobs what they asked for, by queue of attained device time and then by arrival, as long as it is
        free."""
        for job in arrived:
            self.order[job.name] = len(self.order)
        shares, free, wake_s = {}, devices, math.inf

        def place(job: RunningJob) -> tuple[int, bool, int]:
            queue = sum(job.device_s >= limit for limit in self.limits)
            return (queue, not job.share, self.order[job.name])

        for job in sorted(active, key=place):
            want = job.spec.devices
            if want > free:
                continue
            shares[job.name] = want
            free -= want
            limit = next((limit for limit in self.limits if job.device_s < limit), math.inf)
            wake_s = min(wake_s, now + max(1.0, (limit - job.device_s) / want))
        return PolicyDecision(shares, wake_s=wake_s)
