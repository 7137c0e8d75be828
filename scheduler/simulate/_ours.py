"""Our own policy: the core that runs live, asked by the simulator."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Sequence
from dataclasses import replace

from scheduler.deadline import Capacity, Job, Overhead, Rules, admit, least_device_seconds, spread
from scheduler.simulate._engine import Decision, Running

_REGION = "here"
_CROWDED = 0.5
_ENOUGH = 10
"""So many jobs must have asked before their median says what is usual."""


class Deadlines:
    """Job-by-job promises without slots, spare devices by marginal return; see ``scheduler.deadline``."""

    at_edges = False

    def __init__(self, rules: Rules | None = None, name: str = "geofed", slot_s: float = 0.0, selective: bool = False) -> None:
        self.name, self.slot_s = name, slot_s
        self.rules = rules or Rules()
        self.selective = selective
        self.sizes: list[float] = []
        self.asked_s, self.begin_s, self.until_s, self.crowded = 0.0, math.inf, -math.inf, _CROWDED

    def decide(self, now: float, devices: int, active: Sequence[Running], arrived: Sequence[Running]) -> Decision:
        new = {job.name for job in arrived}
        rules = self.rules
        everyone = rules.overhead.base_s if rules.overhead.everyone else 0.0
        capacity = {_REGION: Capacity(devices)}
        old = [self._job(job) for job in active if job.name not in new and math.isfinite(job.promised_s)]
        asked = [self._job(job) for job in arrived if job.spec.deadlines]
        rules = self._priced(now, devices, asked, rules)
        answer = admit(now, capacity, old, asked, replace(rules, change_pause_s=everyone) if asked else rules)
        promised = {job.name: job.deadline_s for job in answer.promised}
        hopeless = {job.name for job in asked if job.name not in promised}
        waiting = [
            self._job(job)
            for job in active
            if not math.isfinite(job.promised_s) and job.name not in promised and job.name not in hopeless
        ]
        allocation = spread(answer.books[_REGION], _REGION, [*old, *answer.promised], waiting, rules)
        return Decision(allocation.shares, tuple(hopeless), promised, allocation.wake_s)

    def _priced(self, now: float, devices: int, asked: Sequence[Job], rules: Rules) -> Rules:
        """With the usual size of jobs as it was seen so far, the new ones included, where demand is high."""
        for job in asked:
            size = least_device_seconds(job, job.curves[_REGION], now)
            if math.isfinite(size):
                insort(self.sizes, size / max(job.value, 1e-9))
                self.asked_s += size
                self.begin_s = min(self.begin_s, now)
                self.until_s = max(self.until_s, job.deadline_s)
        if not self.selective or len(self.sizes) < _ENOUGH:
            return rules
        if self.asked_s < self.crowded * devices * (self.until_s - self.begin_s):
            return rules
        return replace(rules, usual_device_s=self.sizes[len(self.sizes) // 2])

    def _job(self, job: Running) -> Job:
        spec = job.spec
        first, *later = spec.deadlines or ((math.inf, 0.0),)
        deadline_s = job.promised_s if math.isfinite(job.promised_s) else first[0]
        return Job(
            job.name, {_REGION: job.believed}, job.left, deadline_s, _REGION, job.share, job.ready_s,
            first[1], tuple(later), spec.user, served_s=job.device_s,
        )  # fmt: skip


def rules_for(devices: int) -> Rules:
    """Rules with the overheads of ElasticFlow's simulator for a cluster of this size, where any change pauses all."""
    return Rules(overhead=Overhead(base_s=7.0 if devices >= 256 else 2.0, everyone=True))
