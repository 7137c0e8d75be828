"""The core that allocates workers in the live federation, as a policy of one region: the quality of its decisions on
traces."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import replace

from scheduler.deadline import (
    AssignmentPace,
    DeviceCapacity,
    Gang,
    Reservation,
    Rules,
    SpeedCurve,
    allot,
    curve_from_table,
    offer,
)
from scheduler.simulate._engine import PolicyDecision, RunningJob
from scheduler.simulate._nodes import ClusterNodes

__all__ = ["Live"]

_REGION = "here"
_QUANTILE = 0.95
"""Quantile of the seen errors that a curve is trusted to keep within: one level in twenty may be slower than the
caution covers. A choice between promises that break and jobs that are declined."""
_FEW = 10
"""Measurements after which the stated error of curves counts half."""


class _MeasuredCurves:
    """Curves as the control plane knows them: a level that a job has run on has its measured rate, others that of the
    curve less the error that was seen so far."""

    def __init__(self, curve_error: float) -> None:
        self._stated, self._errors = curve_error, list[float]()
        self._seen: dict[str, dict[int, float]] = {}

    def learn(self, job: RunningJob) -> None:
        """Record the rate of a job on its level."""
        rates = self._seen.setdefault(job.name, {})
        if job.seen_share and job.seen_share not in rates:
            rates[job.seen_share] = job.believed.rate(job.seen_share) / job.slowness
            insort(self._errors, max(0.0, 1.0 - 1.0 / job.slowness))

    def of(self, job: RunningJob) -> SpeedCurve:
        """Return a job's curve."""
        count, seen, error = len(self._errors), self._seen.get(job.name, {}), self._stated
        if count:
            error = max(self._errors[min(count - 1, int(_QUANTILE * count))], error / (1 + count / _FEW))
        if not error:
            return job.believed
        told = zip(job.believed.levels, job.believed.rates, strict=True)
        return curve_from_table({level: seen.get(level, rate * (1.0 - error)) for level, rate in told}) or job.believed


class Live:
    """``scheduler.deadline.offer`` at each arrival, ``allot`` at each event. Refused jobs are declined."""

    slot_s = 0.0
    at_edges = False

    def __init__(self, rules: Rules, curve_error: float = 0.0, name: str = "geofed") -> None:
        """``curve_error``: how far off curves may be, as a part, before anything was measured."""
        self.name, self.rules, self._curves = name, rules, _MeasuredCurves(curve_error)
        self._held: Mapping[str, Reservation] = {}
        self._most = 0
        """Largest number of devices so far."""

    def decide(
        self, now: float, devices: int, active: Sequence[RunningJob], arrived: Sequence[RunningJob]
    ) -> PolicyDecision:
        """Offer a deadline to each arrival, then allot the devices to all gangs."""
        capacities = {_REGION: DeviceCapacity(devices)}
        self._most = max(self._most, devices)
        for job in active:
            self._curves.learn(job)
        new = {job.name for job in arrived if job.spec.deadlines}
        gangs = {job.name: _gang(job, self._curves.of(job), devices) for job in active if job.name not in new}
        # Devices on a level that pays no longer count as free.
        blocks = {job.name: job.blocks for job in active if job.blocks and gangs[job.name].held >= 0}
        placement = ClusterNodes.of(devices, blocks) if devices == self._most else None
        promised: dict[str, float] = {}
        declined = []
        for job in sorted((job for job in arrived if job.name in new), key=lambda job: job.spec.deadlines[0][0]):
            gang = _gang(job, self._curves.of(job), devices)
            told = offer(now, capacities, list(gangs.values()), gang, self.rules, self._held, placement)
            if told.deadline_s is None:
                declined.append(job.name)
                continue
            self._held = told.held
            promised[job.name] = told.deadline_s
            gangs[job.name] = replace(gang, deadline_s=told.deadline_s)
        present = [gangs[job.name] for job in active if job.name in gangs]
        answer = allot(now, capacities, present, self.rules, self._held, placement)
        self._held = answer.held
        shares = {name: gangs[name].workers(pace).get(_REGION, 0) for name, pace in answer.paces.items()}
        turns = [at for held in answer.held.values() for at, _ in held.schedule if at > now]
        return PolicyDecision(shares, tuple(declined), promised, min(turns, default=math.inf))


def _gang(job: RunningJob, curve: SpeedCurve, devices: int) -> Gang:
    """Return the job as a gang, whose paces are the levels of the curve's lower hull that the region has."""
    levels, rates = curve.ladder
    paces = tuple(
        AssignmentPace({_REGION: level}, rate)
        for level, rate in zip(levels[1:], rates[1:], strict=True)
        if level <= max(devices, levels[1])
    )
    first, *later = job.spec.deadlines or ((math.inf, 0.0),)
    held = next((index for index, pace in enumerate(paces) if pace.workers[_REGION] == job.share), -1)
    return Gang(
        job.name,
        paces,
        job.left,
        job.promised_s if math.isfinite(job.promised_s) else first[0],
        tuple(at for at, _ in later),
        held=held,
        ready_s=job.ready_s,
        wish=len(paces) - 1,
        since_s=job.spec.submit_s,
        user=job.spec.user,
    )
