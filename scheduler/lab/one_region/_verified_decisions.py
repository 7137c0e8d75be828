"""Decisions that break no promise: each is proven before it is made.

The invariant: after every decision there is a course on which every job that was promised a deadline keeps it,
simulated from the state at that time, with all changes still to come and all pauses that they cause (``follow``).
Whatever is not needed for that (an admission, spare devices, a better plan after a job is done) is done only if a
course holds with it. Else things continue as in the last course: time has only advanced along it, so that it still
holds. With exact curves and no failure, no job with a promise is late, whatever arrives. This does not depend on
margins; they only reserve room for jobs to come.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from scheduler.deadline._model import DeadlineJob, DeviceCapacity, Rules
from scheduler.deadline._promises import Course, Going, Ground, Plan, follow
from scheduler.lab.one_region._admit_one_region import admit
from scheduler.lab.one_region._capacity import Book, Holding
from scheduler.lab.one_region._minimum_share import wish_of
from scheduler.lab.one_region._spread import spread

__all__ = ["Proven", "prove"]

_ROUNDS = 2
"""Attempts to repair a plan that makes a job late, by reserving more time for it."""
_MAX_REPAIRED_JOBS = 64
"""Number of jobs up to which that is tried; beyond, it takes too long and rarely helps."""
_TIGHTER_S, _TIGHTER = 2.0, 0.05
"""Seconds beyond a job's lateness by which its window is tightened, and the largest share of the window for that."""


@dataclass(frozen=True)
class Proven:
    """A decision, and the course that shows that it breaks no promise."""

    promised: tuple[DeadlineJob, ...]
    """The new jobs that have a promise now, with the deadline that was promised."""
    shares: Mapping[str, int]
    """Devices from now on, by job; refused jobs are missing."""
    course: Course
    """Course to be followed until something happens; the next decision needs it."""


def prove(
    now: float,
    capacity: DeviceCapacity,
    region: str,
    jobs: Sequence[DeadlineJob],
    new: Collection[str] = (),
    rules: Rules | None = None,
    asking: Rules | None = None,
    before: Course | None = None,
    ground: Ground | None = None,
    keep: bool = False,
) -> Proven:
    """Decide on one region: which of the `new` jobs are promised a deadline, and the share of each job from now on.

    The answer of ``admit`` (with the rules of `asking`) and ``spread`` is used only if a course holds with it. If none
    does, plans are tightened for the jobs that would be late; then new jobs get what the course of `before` leaves
    free, or are refused. A job that is refused for margins alone is tried once more without.

    `jobs` are all jobs, in the order in which the `ground` is to be arranged: infinite deadlines are best effort,
    finite ones promised, except for `new` ones. With `keep`, refused jobs run on what is left. If even `before` no
    longer holds, curves were wrong or devices failed: then the course with the fewest late jobs counts.
    """
    return _Court(now, capacity, region, jobs, new, rules or Rules(), asking, before, ground, keep).decide()


@dataclass(frozen=True)
class _Found:
    """A candidate that was tried."""

    promised: tuple[DeadlineJob, ...]
    course: Course
    jobs: tuple[DeadlineJob, ...]
    """All jobs that would be in the system."""
    tight: dict[str, float] = field(default_factory=dict)
    """Seconds that plans are shorter than promises, by job."""

    def proven(self, now: float) -> Proven:
        return Proven(self.promised, {job.name: self.course.level(job.name, now) for job in self.jobs}, self.course)


class _Court:
    """One decision: what was asked, and what it is compared with."""

    def __init__(
        self,
        now: float,
        capacity: DeviceCapacity,
        region: str,
        jobs: Sequence[DeadlineJob],
        new: Collection[str],
        rules: Rules,
        asking: Rules | None,
        before: Course | None,
        ground: Ground | None,
        keep: bool,
    ) -> None:
        self.now, self.capacity, self.region, self.jobs, self.rules = now, capacity, region, jobs, rules
        self.asking = asking or rules
        self.asked = [job for job in jobs if job.name in new and math.isfinite(job.deadline_s)]
        names = {job.name for job in self.asked}
        self.old = [job for job in jobs if math.isfinite(job.deadline_s) and job.name not in names]
        self.before, self.ground, self.keep = before, ground, keep
        later = [(at, (devices,)) for at, devices in capacity.changes if at > now]
        past = [devices for at, devices in capacity.changes if at <= now]
        self.room = ((now, (past[-1] if past else capacity.devices,)), *later)

    def decide(self) -> Proven:
        found = self._repaired(self.asked)
        if not found.course.holds and found.promised:
            found = self._appended(found.promised) or found
        while not found.course.holds and found.promised:
            found = self._repaired(self._without_worst(found))
        found = self._without_margins(found)
        if not found.course.holds:
            kept = self._kept()
            worse = (found.course.fits, -len(found.course.late)) < (kept.course.fits, -len(kept.course.late))
            found = kept if worse else found
        return found.proven(self.now)

    def _without_worst(self, found: _Found) -> list[DeadlineJob]:
        """Return the burst without the job that is latest in it, or else has the most work."""
        names = {job.name for job in found.promised}
        burst = [job for job in self.asked if job.name in names]
        late = found.course.late
        burst.remove(
            max(burst, key=lambda job: (late.get(job.name, -1.0), job.work / job.curves[self.region].rates[0]))
        )
        return burst

    def _without_margins(self, found: _Found) -> _Found:
        """Admit jobs that were refused because of margins if a course holds with them, unless demand is high.

        A job without any slack would prevent all changes that pause it.
        """
        for job in (
            self.asked if math.isinf(self.asking.usual_device_s) and len(self.jobs) <= _MAX_REPAIRED_JOBS else ()
        ):
            taken = [new for new in self.asked if new.name in {each.name for each in found.promised}]
            if job not in taken:
                more = self._tried([*taken, job], {}, replace(self.asking, margin=0.0))
                found = more if more.course.holds and len(more.promised) > len(taken) else found
        return found

    # --- what is tried

    def _repaired(self, asked: Sequence[DeadlineJob]) -> _Found:
        """Return the plan, computed again with more time for the jobs that it makes late."""
        found = self._tried(asked, {}, self.asking)
        for _ in range(_ROUNDS if len(self.jobs) <= _MAX_REPAIRED_JOBS else 0):
            if found.course.holds:
                break
            tight = dict(found.tight)
            deadlines = {job.name: job.deadline_s for job in found.jobs}
            for name, late_s in found.course.late.items():
                most = max(0.0, _TIGHTER * (deadlines[name] - self.now))
                tight[name] = tight.get(name, 0.0) + min(late_s + _TIGHTER_S, most)
            other = self._tried(asked, tight, self.asking)
            if len(other.promised) < len(found.promised):
                break
            found = other
        return found

    def _tried(self, asked: Sequence[DeadlineJob], tight: dict[str, float], asking: Rules) -> _Found:
        """Return the answer of ``admit`` and ``spread``."""
        rules = asking if asked else self.rules
        old, burst = _sooner(self.old, tight), _sooner(asked, tight)
        answer = admit(self.now, {self.region: self.capacity}, old, burst, rules)
        given = {}
        for job in answer.promised:
            # Planned sooner, but promised is what was asked for, to the last bit.
            meant, own = job.deadline_s + tight.get(job.name, 0.0), next(new for new in asked if new.name == job.name)
            given[job.name] = min((own.deadline_s, *(at for at, _ in own.later)), key=lambda at: abs(at - meant))
        jobs = self._there(given)
        sure = [job for job in jobs if math.isfinite(job.deadline_s)]
        waiting = [job for job in jobs if math.isinf(job.deadline_s)]
        book = answer.books[self.region]
        told = spread(book, self.region, _sooner(sure, tight), waiting, self.rules)
        still = any(told.shares[job.name] < book.holdings[job.name].share() for job in sure)
        plans = {job.name: _plan(book.holdings[job.name], self.now) for job in sure}
        course = self._follow(jobs, plans, told.shares, told.wake_s if still else -math.inf)
        return _Found(tuple(job for job in jobs if job.name in given), course, tuple(jobs), tight)

    def _kept(self) -> _Found:
        """Return all jobs as in the last course, without new ones."""
        jobs = self._there({})
        before = self.before or Course({}, {}, {}, math.inf)
        plans = {job.name: before.plans.get(job.name, ()) for job in jobs}
        shares = {job.name: before.level(job.name, self.now) for job in jobs}
        return _Found((), self._follow(jobs, plans, shares), tuple(jobs))

    def _appended(self, new: Sequence[DeadlineJob]) -> _Found | None:
        """Return new jobs in what the last course leaves free, the others unchanged; None where that is too little."""
        kept = self._kept().course
        book, turns = self._left_by(kept), sorted({at for plan in kept.plans.values() for at, _ in plan})
        # Best effort has what it has, and is sure of nothing.
        plans = {job.name: kept.plans[job.name] for job in self.old}
        shares = {name: kept.level(name, self.now) for name in kept.plans}
        for job in sorted(new, key=lambda job: job.deadline_s):
            pauses = 2 + sum(self.now < at < job.deadline_s for at in turns)
            reserve_s = self.rules.overhead.base_s * pauses if self.rules.overhead.everyone else 0.0
            wish = wish_of(job, job.curves[self.region], self.now, self.asking, 0.0, reserve_s)
            held = book.take(job.name, wish)
            if held is None:
                return None
            plans[job.name], shares[job.name] = _plan(held, self.now), held.share()
        jobs = self._there({job.name: job.deadline_s for job in new})
        course = self._follow(jobs, plans, shares)
        names = {job.name for job in new}
        return _Found(tuple(job for job in jobs if job.name in names), course, tuple(jobs)) if course.holds else None

    def _left_by(self, course: Course) -> Book:
        """Return what a course leaves free, without best effort, which yields."""
        spans = []
        for job in self.old:
            plan = course.plans[job.name]
            ends = [*(at for at, _ in plan[1:]), course.ends[job.name]]
            spans += [(at, end, level) for (at, level), end in zip(plan, ends, strict=True) if end > at and level]
        points = [at for begin, end, _ in spans for at in (begin, end) if math.isfinite(at)]
        book = Book(self.now, self.capacity, points)
        for begin, end, level in spans:
            book.free[book.times.searchsorted(begin) : book.times.searchsorted(end)] -= level
        return book

    def _there(self, promised: Mapping[str, float]) -> list[DeadlineJob]:
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

    def _follow(
        self,
        jobs: Sequence[DeadlineJob],
        plans: Mapping[str, Plan],
        shares: Mapping[str, int],
        still_s: float = -math.inf,
    ) -> Course:
        going = [
            Going(
                job.name, job.work, job.deadline_s, job.share, job.ready_s, plans.get(job.name, ()),
                job.curves[self.region].rate, _devices,
            )
            for job in jobs
        ]  # fmt: skip
        return follow(self.now, self.room, going, shares, self.rules.overhead, self.ground, still_s)


def _devices(share: int) -> tuple[int, ...]:
    return (share,)


def _sooner(jobs: Sequence[DeadlineJob], tight: Mapping[str, float]) -> list[DeadlineJob]:
    """Return jobs as they would be with less time left."""
    found = []
    for job in jobs:
        less = tight.get(job.name, 0.0)
        later = tuple((at - less, value) for at, value in job.later)
        found.append(replace(job, deadline_s=job.deadline_s - less, later=later) if less else job)
    return found


def _plan(held: Holding, now: float) -> Plan:
    """Return what a book holds, as levels over time; the last one lasts to the end, for jobs that are paused
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
