"""Simulates all jobs from now to their ends with every pause, which proves whether promises are kept.

A reservation says which devices a job has; it does not say what the changes of shares cost the other jobs. So the
schedule is simulated from the present state with all changes that will be made: if no job is late in it, none will be.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Protocol

from scheduler.deadline._model import Overhead

__all__ = ["CapacitySteps", "Placement", "ScheduledJob", "SimulatedSchedule", "simulate_schedule"]

_SLACK_S = 1e-3
"""Seconds by which each promise is kept at least, so that rounding cannot invalidate a proof."""
_SAME_S = 1e-9
"""Seconds within which instants count as the same."""

Plan = tuple[tuple[float, int], ...]
"""(instant, level from then on), ascending; before the first there is no level, and the last one lasts to the job's
end."""
CapacitySteps = tuple[tuple[float, tuple[int, ...]], ...]
"""(instant, devices of each region from then on), ascending; the first is now."""


class Placement(Protocol):
    """Where the devices of each job are, which determines the jobs that a change moves."""

    def copy(self) -> Placement:
        """Return a copy for trials."""
        ...

    def release(self, job: str) -> None:
        """Free a job's devices, if it has any."""
        ...

    def arrange(self, changed: Sequence[tuple[str, int]]) -> set[str]:
        """Give jobs their new shares; returns the others that had to move, and pause for it."""
        ...


@dataclass(frozen=True, slots=True)
class ScheduledJob:
    """A job in its present state. Level 0 has no devices; the caller defines the others."""

    name: str
    left: float
    """Steps."""
    deadline_s: float
    """The promised instant; infinite: none, so that the job yields to all that have one."""
    level: int
    """Level until now."""
    ready_s: float
    """Instant until which it is paused by an earlier change."""
    plan: Plan
    """Reserved levels; the job may have more devices while no other job has reserved them."""
    rate: Callable[[int], float]
    """Steps a second by level."""
    need: Callable[[int], Sequence[tuple[int, int]]]
    """Devices by level: pairs of a region's number and its devices; regions of which none are needed may be left out.
    There may be many regions of which each job needs few."""


@dataclass(frozen=True)
class SimulatedSchedule:
    """Levels and ends of all jobs if nothing unplanned happens."""

    plans: Mapping[str, Plan]
    """Levels by job, as they really change; a job that ends has its last level to its end."""
    ends: Mapping[str, float]
    """End of each job; infinite: never."""
    late: Mapping[str, float]
    """By promised job that misses its deadline: seconds by which it is late."""
    next_s: float
    """The first change after now; infinite: none."""
    fits: bool = True
    """False: at some instant plans need more than the capacity."""

    @property
    def holds(self) -> bool:
        """Whether all jobs that were promised a deadline keep it."""
        return self.fits and not self.late

    def level(self, job: str, at: float) -> int:
        """The level of a job at an instant; 0 for a job that is not in the schedule."""
        found = 0
        for since_s, level in self.plans.get(job, ()):
            if since_s > at + _SAME_S:
                break
            found = level
        return found


def simulate_schedule(
    now: float,
    capacity: CapacitySteps,
    jobs: Sequence[ScheduledJob],
    levels_now: Mapping[str, int],
    overhead: Overhead,
    placement: Placement | None = None,
) -> SimulatedSchedule:
    """Simulate all jobs, with the levels ``levels_now`` at first, and later as their plans need.

    A job's level increases when its plan's does. No level decreases before the devices are needed: first those of jobs
    without a promise, then those above the job's plan. At every change the changed jobs pause, the jobs that
    ``placement`` moves for them, and with ``overhead.everyone`` all that run. Plans together must fit the ``capacity``.

    Every change takes O(log n), however many jobs pause for it: pauses of all jobs stop a clock of their own, by which
    ends are counted.
    """
    return _ScheduleSimulation(now, capacity, jobs, levels_now, overhead, placement).run()


class _ScheduleSimulation:
    def __init__(
        self,
        now: float,
        capacity: CapacitySteps,
        jobs: Sequence[ScheduledJob],
        levels_now: Mapping[str, int],
        overhead: Overhead,
        placement: Placement | None,
    ) -> None:
        self.now, self.overhead = now, overhead
        self.base_s = overhead.base_s if overhead.everyone else 0.0
        self.placement = placement.copy() if placement is not None else None
        self.jobs = jobs
        self.index = {job.name: number for number, job in enumerate(jobs)}
        count = len(jobs)
        self.level = [job.level for job in jobs]
        self.left = [job.left for job in jobs]
        self.ready = [job.ready_s for job in jobs]
        self.rate = [0.0] * count
        self.end = [math.nan] * count
        """Ends on the clock that pauses of all jobs stop; nan: the job does not run now."""
        self.done = [math.inf] * count
        self.planned = [0] * count
        """Level that each job has reserved now."""
        self.steps_to_come = sorted(
            ((at, number, place) for number, job in enumerate(jobs) for place, (at, _) in enumerate(job.plan)),
            reverse=True,
        )
        self.above: set[int] = set()
        """Jobs whose level is above their plan."""
        self.version = [0] * count
        """Numbers of changes, by which outdated entries of the queues are recognised."""
        self.steps: list[list[tuple[float, int]]] = [[] for _ in jobs]
        self.ends: list[tuple[float, int, int]] = []
        self.resumes: list[tuple[float, int, int]] = []
        self.increases: list[tuple[float, int, int]] = []
        self.clock, self.stopped_s = 0.0, now
        self.changes = list(capacity[1:])
        self.free = list(capacity[0][1])
        self.next_s, self.started = math.inf, False
        self.blocked: list[tuple[int, int]] = []
        """Jobs whose level should have increased, but whose devices are still in use."""
        self._begin(levels_now)

    def _begin(self, levels_now: Mapping[str, int]) -> None:
        for number, job in enumerate(self.jobs):
            for region, count in job.need(job.level):
                self.free[region] -= count
            if job.level:
                self._resume(number)
        wanted = {number: levels_now.get(job.name, 0) for number, job in enumerate(self.jobs)}
        for number, level in wanted.items():
            self._take(number, self.level[number], level)
        self.fits = min(self.free, default=0) >= 0 or self._free_devices(wanted)
        self._change(wanted)
        self.started = True
        for number in range(len(self.jobs)):
            self._compare_with_plan(number)
            if not self.steps[number]:
                self.steps[number].append((self.now, self.level[number]))
                self._queue_increase(number)
        heapify(self.increases)

    def run(self) -> SimulatedSchedule:
        """Simulate to the end and return the schedule."""
        jobs, unfinished = self.jobs, sum(math.isfinite(job.deadline_s) for job in self.jobs)
        while unfinished:
            end_s, resume_s, increase_s = self._end_s(), self._due(self.resumes), self._due(self.increases)
            capacity_s = self.changes[0][0] if self.changes else math.inf
            at = min(end_s, resume_s, increase_s, capacity_s)
            if math.isinf(at):
                break
            self._advance(at)
            if end_s <= at + _SAME_S:
                number = heappop(self.ends)[1]
                self._end(number, end_s)
                unfinished -= math.isfinite(jobs[number].deadline_s)
                if self.blocked:
                    self._apply_due_changes(at)
            elif resume_s <= at:
                self._resume(heappop(self.resumes)[1])
            else:
                self._apply_due_changes(at)
        ends = {job.name: done for job, done in zip(jobs, self.done, strict=True)}
        late = {
            job.name: ends[job.name] - job.deadline_s
            for job in jobs
            if math.isfinite(job.deadline_s) and ends[job.name] > job.deadline_s - _SLACK_S
        }
        plans = {job.name: tuple(steps) for job, steps in zip(jobs, self.steps, strict=True)}
        return SimulatedSchedule(plans, ends, late, self.next_s, self.fits)

    # --- time

    def _advance(self, at: float) -> None:
        if at > self.stopped_s:
            self.clock += at - self.stopped_s
            self.stopped_s = at
        self.now = max(self.now, at)

    def _due(self, heap: list[tuple[float, int, int]]) -> float:
        while heap and heap[0][2] != self.version[heap[0][1]]:
            heappop(heap)
        return heap[0][0] if heap else math.inf

    def _end_s(self) -> float:
        clock = self._due(self.ends)
        return self.stopped_s + max(0.0, clock - self.clock)

    def _resume(self, number: int) -> None:
        """A job continues from now, or when its own pause is over."""
        if self.ready[number] > self.stopped_s:
            heappush(self.resumes, (self.ready[number], number, self.version[number]))
            return
        self.rate[number] = rate = self.jobs[number].rate(self.level[number])
        if rate > 0:
            self.end[number] = self.clock + self.left[number] / rate
            heappush(self.ends, (self.end[number], number, self.version[number]))

    def _end(self, number: int, at: float) -> None:
        job = self.jobs[number]
        self.version[number] += 1
        self.done[number] = at
        self.above.discard(number)
        for region, count in job.need(self.level[number]):
            self.free[region] += count
        if self.placement is not None:
            self.placement.release(job.name)

    # --- changes

    def _follow_plans(self) -> None:
        """Take the plans' steps up to now."""
        while self.steps_to_come and self.steps_to_come[-1][0] <= self.now + _SAME_S:
            _, number, place = self.steps_to_come.pop()
            self.planned[number] = self.jobs[number].plan[place][1]
            self._compare_with_plan(number)

    def _compare_with_plan(self, number: int) -> None:
        if self.level[number] > self.planned[number] and math.isinf(self.done[number]):
            self.above.add(number)
        else:
            self.above.discard(number)

    def _queue_increase(self, number: int, *, later: bool = False) -> None:
        """Queue the next increase by a job's plan; `later`: the devices that the plan gives now are not available."""
        have, now = self.level[number], self.now + _SAME_S
        for place, (since_s, level) in enumerate(plan := self.jobs[number].plan):
            passed = since_s <= now and (later or (place + 1 < len(plan) and plan[place + 1][0] <= now))
            if level > have and not passed:
                heappush(self.increases, (max(since_s, self.now), number, self.version[number]))
                return

    def _apply_due_changes(self, at: float) -> None:
        """Increase the levels that are due, by deadline, and decrease others for them; a job without free devices waits
        for the next end."""
        wanted: dict[int, int] = {}
        while self.changes and self.changes[0][0] <= at + _SAME_S:
            before = self._devices()
            _, devices = self.changes.pop(0)
            self.free = [free + new - old for free, new, old in zip(self.free, devices, before, strict=True)]
        if min(self.free, default=0) < 0:
            self.fits = self._free_devices(wanted) and self.fits
        self._follow_plans()
        increasing = {number for number, version in self.blocked if version == self.version[number]}
        self.blocked = []
        while self._due(self.increases) <= at + _SAME_S:
            increasing.add(heappop(self.increases)[1])
        for number in sorted(increasing, key=lambda number: (self.jobs[number].deadline_s, number)):
            have, level = wanted.get(number, self.level[number]), self.planned[number]
            if level <= have:
                if number not in wanted:
                    self._queue_increase(number)
                continue
            tried = {**wanted, number: level}
            kept = list(self.free)
            self._take(number, have, level)
            if min(self.free) >= 0 or self._free_devices(tried):
                wanted = tried
            else:
                self.free = kept
                self.blocked.append((number, self.version[number]))
                self._queue_increase(number, later=True)
        self._change(wanted)

    def _devices(self) -> list[int]:
        """Return the number of all devices, free and in use."""
        total = list(self.free)
        for number, job in enumerate(self.jobs):
            if math.isinf(self.done[number]):
                for region, count in job.need(self.level[number]):
                    total[region] += count
        return total

    def _change(self, wanted: dict[int, int]) -> None:
        """Set levels whose devices are taken already; the changed jobs pause, and those that are moved for them."""
        changed = sorted(number for number, level in wanted.items() if level != self.level[number])
        if not changed:
            return
        if self.started:
            self.next_s = min(self.next_s, self.now)
        paused = dict.fromkeys(changed)
        for number in changed:
            self._set(number, wanted[number])
        # What does not fit has no place; such a schedule does not hold anyway.
        if self.placement is not None and self.fits:
            jobs = self.jobs
            moved = self.placement.arrange(
                [(jobs[number].name, self._all_devices(number, wanted[number])) for number in changed]
            )
            for name in moved:
                number = self.index[name]
                if number not in paused:
                    self._set(number, self.level[number])
                    paused[number] = None
        self.stopped_s = max(self.stopped_s, self.now + self.base_s)
        for number in paused:
            if self.level[number]:
                devices = self._all_devices(number, self.level[number])
                self.ready[number] = max(self.ready[number], self.now + self.overhead.seconds(devices))
                self._resume(number)
            self._queue_increase(number)

    def _set(self, number: int, level: int) -> None:
        """Stop a job, and record its work so far."""
        if not math.isnan(self.end[number]):
            self.left[number] = max(0.0, (self.end[number] - self.clock) * self.rate[number])
            self.end[number] = math.nan
        self.version[number] += 1
        if level != self.level[number] or not self.steps[number]:
            self.level[number] = level
            self.steps[number].append((self.now, level))
            self._compare_with_plan(number)

    def _take(self, number: int, before: int, after: int) -> None:
        if before == after:
            return
        need = self.jobs[number].need
        for region, count in need(before):
            self.free[region] += count
        for region, count in need(after):
            self.free[region] -= count

    def _all_devices(self, number: int, level: int) -> int:
        return sum(count for _, count in self.jobs[number].need(level))

    def _free_devices(self, wanted: dict[int, int]) -> bool:
        """Decrease levels that are above their plans, as few as needed; return whether that is enough."""
        self._follow_plans()
        spare = [
            (math.isfinite(self.jobs[number].deadline_s), number, planned)
            for number in sorted(self.above.union(wanted))
            if math.isinf(self.done[number])
            and wanted.get(number, self.level[number]) > (planned := self.planned[number])
        ]
        while spare and min(self.free) < 0:
            spare.sort(key=lambda entry: self._decrease_order(entry, wanted))
            _, number, planned = spare.pop(0)
            self._take(number, wanted.get(number, self.level[number]), planned)
            wanted[number] = planned
        return min(self.free) >= 0

    def _decrease_order(self, entry: tuple[bool, int, int], wanted: Mapping[int, int]) -> tuple[bool, bool, int, float]:
        """Return the order of decreases: best effort first; then the smallest that suffices alone, else the largest."""
        promised, number, planned = entry
        need = self.jobs[number].need
        given = [0] * len(self.free)
        for region, count in need(wanted.get(number, self.level[number])):
            given[region] += count
        for region, count in need(planned):
            given[region] -= count
        enough = all(free + more >= 0 for free, more in zip(self.free, given, strict=True))
        helps = sum(min(more, max(0, -free)) for free, more in zip(self.free, given, strict=True))
        return promised, not enough, sum(given) if enough else -helps, -self.jobs[number].deadline_s
