"""Decisions that break no promise: each is simulated before it is made.

The invariant: after every decision there is a schedule in which every job that was promised a deadline keeps it,
simulated from the present state with all later changes and all pauses that they cause (``simulate_schedule``). An
admission, a share of spare devices or a better plan after a job's end is accepted only if such a schedule exists with
it. Else the last schedule continues, which still holds, since only time has passed. With exact curves and no failure,
no job with a promise is late, whatever arrives. This does not depend on margins; they only keep devices free for jobs
to come.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from scheduler.deadline._model import DeadlineJob, DeviceCapacity, Rules
from scheduler.deadline._schedule_simulation import Placement, Plan, ScheduledJob, SimulatedSchedule, simulate_schedule
from scheduler.lab.one_region._admit_one_region import admit
from scheduler.lab.one_region._capacity import CapacityLedger, DeviceReservation
from scheduler.lab.one_region._minimum_share import request_of
from scheduler.lab.one_region._spread import spread

__all__ = ["VerifiedDecision", "verified_decision"]

_MAX_REPAIRS = 2
"""Attempts to repair a plan that makes a job late, by reserving more time for it."""
_MAX_REPAIRED_JOBS = 64
"""Number of jobs up to which that is tried; beyond, it takes too long and rarely helps."""
_TIGHTENING_S, _MAX_TIGHTENING = 2.0, 0.05
"""Seconds beyond a job's lateness by which its window is tightened, and the largest share of the window for that."""


@dataclass(frozen=True)
class VerifiedDecision:
    """A decision, and the schedule which shows that it breaks no promise."""

    promised: tuple[DeadlineJob, ...]
    """The new jobs that have a promise now, with the deadline that was promised."""
    shares: Mapping[str, int]
    """Devices from now on, by job; refused jobs are missing."""
    schedule: SimulatedSchedule
    """SimulatedSchedule to be followed until something happens; the next decision needs it."""


def verified_decision(
    now: float,
    capacity: DeviceCapacity,
    region: str,
    jobs: Sequence[DeadlineJob],
    new: Collection[str] = (),
    rules: Rules | None = None,
    asking: Rules | None = None,
    before: SimulatedSchedule | None = None,
    placement: Placement | None = None,
    keep: bool = False,
) -> VerifiedDecision:
    """Decide on one region: which of the `new` jobs are promised a deadline, and the share of each job from now on.

    The answer of ``admit`` (with the rules of `asking`) and ``spread`` is used only if a schedule holds with it. If
    none does, plans are tightened for the jobs that would be late; then new jobs get what the schedule of `before`
    leaves free, or are refused. A job that is refused only because of margins is tried once more without.

    `jobs` are all jobs, in the order in which the `placement` is to be arranged: infinite deadlines are best effort,
    finite ones promised, except for `new` ones. With `keep`, refused jobs run on what is left. If even `before` no
    longer holds, curves were wrong or devices failed: then the schedule with the fewest late jobs counts.
    """
    return _Decision(now, capacity, region, jobs, new, rules or Rules(), asking, before, placement, keep).decide()


@dataclass(frozen=True)
class _Candidate:
    """A candidate that was tried."""

    promised: tuple[DeadlineJob, ...]
    schedule: SimulatedSchedule
    jobs: tuple[DeadlineJob, ...]
    """All jobs that would be in the system."""
    tight: dict[str, float] = field(default_factory=dict)
    """Seconds that plans are shorter than promises, by job."""

    def decision(self, now: float) -> VerifiedDecision:
        return VerifiedDecision(
            self.promised, {job.name: self.schedule.level(job.name, now) for job in self.jobs}, self.schedule
        )


class _Decision:
    """Makes one decision."""

    def __init__(
        self,
        now: float,
        capacity: DeviceCapacity,
        region: str,
        jobs: Sequence[DeadlineJob],
        new: Collection[str],
        rules: Rules,
        asking: Rules | None,
        before: SimulatedSchedule | None,
        placement: Placement | None,
        keep: bool,
    ) -> None:
        self.now, self.capacity, self.region, self.jobs, self.rules = now, capacity, region, jobs, rules
        self.asking = asking or rules
        self.asked = [job for job in jobs if job.name in new and math.isfinite(job.deadline_s)]
        names = {job.name for job in self.asked}
        self.old = [job for job in jobs if math.isfinite(job.deadline_s) and job.name not in names]
        self.before, self.placement, self.keep = before, placement, keep
        later = [(at, (devices,)) for at, devices in capacity.changes if at > now]
        past = [devices for at, devices in capacity.changes if at <= now]
        self.capacity_steps = ((now, (past[-1] if past else capacity.devices,)), *later)

    def decide(self) -> VerifiedDecision:
        found = self._repaired(self.asked)
        if not found.schedule.holds and found.promised:
            found = self._in_free_capacity(found.promised) or found
        while not found.schedule.holds and found.promised:
            found = self._repaired(self._without_worst(found))
        found = self._without_margins(found)
        if not found.schedule.holds:
            kept = self._kept()
            worse = (found.schedule.fits, -len(found.schedule.late)) < (kept.schedule.fits, -len(kept.schedule.late))
            found = kept if worse else found
        return found.decision(self.now)

    def _without_worst(self, found: _Candidate) -> list[DeadlineJob]:
        """Return the burst without the job that is latest in it, or else has the most work."""
        names = {job.name for job in found.promised}
        burst = [job for job in self.asked if job.name in names]
        late = found.schedule.late
        burst.remove(
            max(burst, key=lambda job: (late.get(job.name, -1.0), job.work / job.curves[self.region].rates[0]))
        )
        return burst

    def _without_margins(self, found: _Candidate) -> _Candidate:
        """Admit jobs that were refused because of margins if a schedule holds with them, unless demand is high.

        A job without any slack would prevent all changes that pause it.
        """
        for job in (
            self.asked if math.isinf(self.asking.usual_device_s) and len(self.jobs) <= _MAX_REPAIRED_JOBS else ()
        ):
            taken = [new for new in self.asked if new.name in {each.name for each in found.promised}]
            if job not in taken:
                more = self._candidate([*taken, job], {}, replace(self.asking, margin=0.0))
                found = more if more.schedule.holds and len(more.promised) > len(taken) else found
        return found

    # --- what is tried

    def _repaired(self, asked: Sequence[DeadlineJob]) -> _Candidate:
        """Return the plan, computed again with more time for the jobs that it makes late."""
        found = self._candidate(asked, {}, self.asking)
        for _ in range(_MAX_REPAIRS if len(self.jobs) <= _MAX_REPAIRED_JOBS else 0):
            if found.schedule.holds:
                break
            tight = dict(found.tight)
            deadlines = {job.name: job.deadline_s for job in found.jobs}
            for name, late_s in found.schedule.late.items():
                most = max(0.0, _MAX_TIGHTENING * (deadlines[name] - self.now))
                tight[name] = tight.get(name, 0.0) + min(late_s + _TIGHTENING_S, most)
            other = self._candidate(asked, tight, self.asking)
            if len(other.promised) < len(found.promised):
                break
            found = other
        return found

    def _candidate(self, asked: Sequence[DeadlineJob], tight: dict[str, float], asking: Rules) -> _Candidate:
        """Return the answer of ``admit`` and ``spread``."""
        rules = asking if asked else self.rules
        old, burst = _with_less_time(self.old, tight), _with_less_time(asked, tight)
        answer = admit(self.now, {self.region: self.capacity}, old, burst, rules)
        given = {}
        for job in answer.promised:
            # Planned earlier, but promised is what was asked for, to the last bit.
            meant, own = job.deadline_s + tight.get(job.name, 0.0), next(new for new in asked if new.name == job.name)
            given[job.name] = min((own.deadline_s, *(at for at, _ in own.later)), key=lambda at: abs(at - meant))
        jobs = self._jobs_with(given)
        sure = [job for job in jobs if math.isfinite(job.deadline_s)]
        waiting = [job for job in jobs if math.isinf(job.deadline_s)]
        ledger = answer.ledgers[self.region]
        told = spread(ledger, self.region, _with_less_time(sure, tight), waiting, self.rules)
        still = any(told.shares[job.name] < ledger.reservations[job.name].share() for job in sure)
        plans = {job.name: _plan(ledger.reservations[job.name], self.now) for job in sure}
        schedule = self._simulated(jobs, plans, told.shares, told.wake_s if still else -math.inf)
        return _Candidate(tuple(job for job in jobs if job.name in given), schedule, tuple(jobs), tight)

    def _kept(self) -> _Candidate:
        """Return all jobs as in the last schedule, without new ones."""
        jobs = self._jobs_with({})
        before = self.before or SimulatedSchedule({}, {}, {}, math.inf)
        plans = {job.name: before.plans.get(job.name, ()) for job in jobs}
        shares = {job.name: before.level(job.name, self.now) for job in jobs}
        return _Candidate((), self._simulated(jobs, plans, shares), tuple(jobs))

    def _in_free_capacity(self, new: Sequence[DeadlineJob]) -> _Candidate | None:
        """Return the new jobs in what the last schedule leaves free, the others unchanged; None: it is too little."""
        kept = self._kept().schedule
        ledger, changes = self._free_after(kept), sorted({at for plan in kept.plans.values() for at, _ in plan})
        # Best effort has what it has, and is sure of nothing.
        plans = {job.name: kept.plans[job.name] for job in self.old}
        shares = {name: kept.level(name, self.now) for name in kept.plans}
        for job in sorted(new, key=lambda job: job.deadline_s):
            pauses = 2 + sum(self.now < at < job.deadline_s for at in changes)
            reserve_s = self.rules.overhead.base_s * pauses if self.rules.overhead.everyone else 0.0
            request = request_of(job, job.curves[self.region], self.now, self.asking, 0.0, reserve_s)
            held = ledger.take(job.name, request)
            if held is None:
                return None
            plans[job.name], shares[job.name] = _plan(held, self.now), held.share()
        jobs = self._jobs_with({job.name: job.deadline_s for job in new})
        schedule = self._simulated(jobs, plans, shares)
        names = {job.name for job in new}
        return (
            _Candidate(tuple(job for job in jobs if job.name in names), schedule, tuple(jobs))
            if schedule.holds
            else None
        )

    def _free_after(self, schedule: SimulatedSchedule) -> CapacityLedger:
        """Return what a schedule leaves free, without best effort, which yields."""
        spans = []
        for job in self.old:
            plan = schedule.plans[job.name]
            ends = [*(at for at, _ in plan[1:]), schedule.ends[job.name]]
            spans += [(at, end, level) for (at, level), end in zip(plan, ends, strict=True) if end > at and level]
        points = [at for begin, end, _ in spans for at in (begin, end) if math.isfinite(at)]
        ledger = CapacityLedger(self.now, self.capacity, points)
        for begin, end, level in spans:
            ledger.free[ledger.times.searchsorted(begin) : ledger.times.searchsorted(end)] -= level
        return ledger

    def _jobs_with(self, promised: Mapping[str, float]) -> list[DeadlineJob]:
        """Return the jobs in the system if these new jobs are promised their deadlines."""
        refused = {job.name for job in self.asked} - set(promised)
        found = []
        for job in self.jobs:
            if job.name in promised:
                found.append(replace(job, deadline_s=promised[job.name]))
            elif job.name not in refused:
                found.append(job)
            elif self.keep:
                found.append(replace(job, deadline_s=math.inf))
        return found

    def _simulated(
        self,
        jobs: Sequence[DeadlineJob],
        plans: Mapping[str, Plan],
        shares: Mapping[str, int],
        fixed_until_s: float = -math.inf,
    ) -> SimulatedSchedule:
        scheduled = [
            ScheduledJob(
                job.name, job.work, job.deadline_s, job.share, job.ready_s, plans.get(job.name, ()),
                job.curves[self.region].rate, _devices,
            )
            for job in jobs
        ]  # fmt: skip
        return simulate_schedule(
            self.now, self.capacity_steps, scheduled, shares, self.rules.overhead, self.placement, fixed_until_s
        )


def _devices(share: int) -> tuple[tuple[int, int]]:
    return ((0, share),)


def _with_less_time(jobs: Sequence[DeadlineJob], tight: Mapping[str, float]) -> list[DeadlineJob]:
    """Return jobs as they would be with less time left."""
    found = []
    for job in jobs:
        less = tight.get(job.name, 0.0)
        later = tuple((at - less, value) for at, value in job.later)
        found.append(replace(job, deadline_s=job.deadline_s - less, later=later) if less else job)
    return found


def _plan(held: DeviceReservation, now: float) -> Plan:
    """Return what a ledger holds, as levels over time; the last one lasts to the end, for jobs that are paused
    meanwhile."""
    if held.shares is not None and held.times is not None:
        steps = list(zip(held.times.tolist(), held.shares.tolist(), strict=False))
    elif held.switch_s <= now:
        steps = [(now, held.second)]
    else:
        steps = [(now, held.first), (held.switch_s, held.second)]
    while len(steps) > 1 and not steps[-1][1]:
        steps.pop()
    return tuple(step for index, step in enumerate(steps) if not index or step[1] != steps[index - 1][1])
