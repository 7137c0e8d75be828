"""The core that allocates workers in the live federation, as a policy of one region: the quality of its decisions on
traces."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from scheduler.deadline import AssignmentPace, DeviceCapacity, Gang, Reservation, Rules, allot, offer
from scheduler.simulate._engine import PolicyDecision, RunningJob
from scheduler.simulate._nodes import ClusterNodes

__all__ = ["Live"]

_REGION = "here"


class Live:
    """``scheduler.deadline.offer`` at each arrival, ``allot`` at each event. Refused jobs are declined."""

    name = "geofed-live"
    slot_s = 0.0
    at_edges = False

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self._held: Mapping[str, Reservation] = {}
        self._most = 0
        """Largest number of devices so far."""

    def decide(
        self, now: float, devices: int, active: Sequence[RunningJob], arrived: Sequence[RunningJob]
    ) -> PolicyDecision:
        """Offer a deadline to each arrival, then allot the devices to all gangs."""
        capacities = {_REGION: DeviceCapacity(devices)}
        self._most = max(self._most, devices)
        blocks = {job.name: job.blocks for job in active if job.blocks}
        placement = ClusterNodes.of(devices, blocks) if devices == self._most else None
        new = {job.name for job in arrived if job.spec.deadlines}
        gangs = {job.name: _gang(job, devices) for job in active if job.name not in new}
        promised: dict[str, float] = {}
        declined = []
        for job in sorted((job for job in arrived if job.name in new), key=lambda job: job.spec.deadlines[0][0]):
            gang = _gang(job, devices)
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


def _gang(job: RunningJob, devices: int) -> Gang:
    """Return the job as a gang, whose paces are the levels of the curve's lower hull that the region has."""
    levels, rates = job.believed.ladder
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
