"""Allocate workers to jobs: promises first, then the jobs that gain most. All jobs are reviewed together every second.

The scheduler decides (`scheduler.deadline`); this module applies its decisions. Jobs that cannot start wait. Jobs whose
number of workers is left to the plan are scaled in when others need workers, and pause for promises.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import structlog

from control_plane.core import Planned, ScaleRequested, StartAllowed, StartDelayed
from control_plane.service.measuring._speeds import JobSpeeds
from control_plane.service.measuring._task_history import TaskHistory
from control_plane.service.planning._admission import (
    PendingAdmission,
    free_workers,
    frozen,
    has_room,
    jobs_before,
    turn_of_entry,
    what_for,
)
from control_plane.service.planning._competing_jobs import CompetingJobs, competing_jobs
from control_plane.service.planning._gangs import (
    assigned_regions,
    first_workers,
    gang_of,
    inputs_of,
    is_elastic,
    merges_of,
    planned_workers,
    with_progress,
)
from control_plane.service.planning._planning import workers_now
from control_plane.service.planning._scaling import Tuning, is_tuned, told
from control_plane.service.state._draft import Draft
from control_plane.service.state._entries import JobEntry
from control_plane.service.state._quota import turn_of
from control_plane.spec import JobSpec, to_demand
from scheduler import WorkerChange, worker_change
from scheduler.deadline import Gang, KindAllotment, Reservation, allot, allot_kinds, promised_at_once

__all__ = ["Allocation", "Review", "begin"]

_log = structlog.get_logger("geofed.allocation")

_REST_FACTOR = 10.0
"""Least pause between two reviews, as a multiple of the last review's duration."""
_MAX_REST_SECONDS = 60.0
"""A longer pause means that the clock was set back, and is ignored."""
_REVIEW_SECONDS = 0.1
"""Duration after which a review ends; the next one continues with the other jobs."""


@dataclass(frozen=True)
class Review:
    """Jobs whose workers are to be allocated together, with an immutable copy of what that depends on."""

    at: float
    together: CompetingJobs
    gangs: Mapping[str, Gang]
    held: Mapping[str, Reservation]
    rests: frozenset[str]

    def answer(self) -> KindAllotment:
        """Allocate the workers; this may take a while, and depends on nothing else."""
        lasting, preemptible = self.together.lasting, self.together.preemptible
        return allot_kinds(
            self.at, lasting, preemptible, list(self.gangs.values()), before=self.held, rests=self.rests
        )  # fmt: skip


@dataclass(frozen=True)
class _KnownGang:
    """A job's gang, with all that it depends on."""

    entry: JobEntry
    key: tuple[object, ...]
    """Of what is measured, and of the regions' catalogues."""
    gang: Gang | None


class Allocation:
    """Allocates the federation's workers to its jobs. Measured speeds are kept in memory only."""

    def __init__(self) -> None:
        self._watched: dict[str, JobSpeeds] = {}
        self._rests_until = 0.0
        self._begun: float | None = None
        """When the review that is under way began; None: none is."""
        self._waiting: dict[str, None] = {}
        """Jobs that are still to be reviewed, until all were."""
        self._held: dict[str, Reservation] = {}
        """Workers reserved for promises, by the last allocation."""
        self._gang_cache: dict[str, _KnownGang] = {}
        self.served: Mapping[str, float] = {}
        """Recent worker seconds of users' ended jobs without a promise, by user."""
        self.by_price = False
        """Whether deadlines are promised by price (`scheduler.deadline.Rules`)."""

    def admission(
        self, draft: Draft, spec: JobSpec, job: str, history: TaskHistory, user: str = "", *, at_once: bool = False
    ) -> PendingAdmission:
        """Return a new job of a user (empty: the operator, who has no quota), with the state that it is planned by:
        a copy, unless it is used ``at_once``."""
        served = self._served(draft)

        def gangs_of(present: Draft, together: CompetingJobs) -> list[Gang]:
            return list(self._gangs(present, together, served).values())

        state = draft if at_once else frozen(draft)
        return PendingAdmission(state, spec, job, history, user, gangs_of, dict(self._held), served, self.by_price)

    def review(self, draft: Draft) -> None:
        """Start, scale, pause and resume jobs by a common allocation.

        Called every second; skipped while the last review was recent compared with its duration.
        """
        while (review := self.due(draft)) is not None:
            self.apply(draft, review, review.answer())

    def due(self, draft: Draft) -> Review | None:
        """Return the next jobs to review; None: enough were for now.

        Jobs in whose regions something has changed are first; then all others, in turn.
        """
        if 0 < self._rests_until - draft.at < _MAX_REST_SECONDS:
            return None
        now = time.perf_counter()
        if self._begun is None:
            self._begun = now
            self._queue_up(draft)
        while now - self._begun < _REVIEW_SECONDS and self._waiting:
            if (review := self._next(draft)) is not None:
                return review
            now = time.perf_counter()
        self._rests_until = draft.at + _REST_FACTOR * (now - self._begun)
        self._begun = None
        return None

    def _queue_up(self, draft: Draft) -> None:
        for known in (self._watched, self._held, self._gang_cache):
            for gone in [job for job in known if job not in draft.jobs]:
                del known[gone]
        if not self._waiting:
            self._waiting = dict.fromkeys(draft.jobs)
        touched = draft.touched()
        first = dict.fromkeys(name for region in touched for name in draft.jobs_in(region))
        touched.clear()
        self._waiting = {**first, **self._waiting}

    def _next(self, draft: Draft) -> Review | None:
        """Return the next job with those that it competes with; None if it needs no workers any more."""
        name = next(iter(self._waiting))
        entry = draft.job(name)
        if entry is None or entry.state.terminal:
            del self._waiting[name]
            return None
        together = competing_jobs(draft, planned_workers(entry.plan), self._held)
        for each in {name, *together.entries}:
            self._waiting.pop(each, None)
        for other in together.entries.values():
            self._observe(draft, other)
        gangs = self._gangs(draft, together, self._served(draft))
        rests = {name for name in gangs if name in self._watched and not self._watched[name].rested(draft.at)}
        return Review(draft.at, together, gangs, dict(self._held), frozenset(rests)) if gangs else None

    def apply(self, draft: Draft, review: Review, answer: KindAllotment) -> None:
        """Command what an allocation requires, to the jobs that stand as they did."""
        gangs = {
            name: gang
            for name, gang in review.gangs.items()
            if (use := draft.use(name)) is not None and use.standing == review.together.standing.get(name)
        }
        for name in review.gangs:
            self._held.pop(name, None)
        self._held |= {name: held for name, held in answer.held.items() if name in gangs}
        ends = {name: held.end_s for name, held in answer.held.items() if name in gangs}
        self._record_breaches(draft, answer.late, ends)
        for name, gang in gangs.items():
            entry = _entry(draft, name)
            if entry.state.phase == "queued":
                continue
            self._scale(draft, entry, gang, answer, gangs)
        for name, gang in sorted(gangs.items(), key=lambda item: turn_of(item[1])):
            entry = _entry(draft, name)
            if entry.state.phase == "queued":
                self._begin_or_wait(draft, entry, gang, answer.pace(name), name in answer.preemptible)

    def reported(self, draft: Draft, job: str) -> None:
        """Pass an agent's report to the tuner of a tuned job."""
        entry = draft.job(job)
        if entry is None or entry.state.phase != "running" or not is_tuned(entry.spec):
            return
        watched = self._watched.setdefault(job, JobSpeeds())
        if watched.tuning is None:
            assigned = assigned_regions(entry.plan, planned_workers(entry.plan), draft.regions, {})
            watched.tuning = Tuning.of(entry.spec, entry.plan, entry.state, assigned)
        try:
            answer = watched.tuning.observe(entry.state, draft.at) if watched.tuning is not None else None
        except Exception as error:  # noqa: BLE001 - a tuner's failure on a user's metric must not end a region's session
            assert watched.tuning is not None
            _log.exception("a tuner failed", job=job)
            text, data = watched.tuning.fails(error, sum(workers_now(entry).values()))
            draft.record("job.tuning", text, job=job, data=data)
            return
        if answer is None or not answer[1].changed or not is_elastic(entry):
            return
        assert watched.tuning is not None
        wanted = watched.tuning.workers_by_region(answer[1].workers)
        if wanted != watched.wanted:
            watched.wanted, watched.reason = wanted, answer[1].reason
            text, data = told(*answer)
            draft.record("job.tuning", text, job=job, data=data)

    def scaled_by_hand(self, entry: JobEntry, workers: Mapping[str, int], at: float) -> None:
        """Record that a user has scaled a job: it keeps these workers until its speed suggests others."""
        wanted = {**workers_now(entry), **workers}
        watched = self._watched.setdefault(entry.row.id, JobSpeeds())
        if all(wanted.values()):
            watched.wanted, watched.reason = wanted, ""
        watched.changed(at, by_itself=True)

    def promised_workers(self, draft: Draft) -> dict[str, int]:
        """Return by user the largest number of workers reserved for its promises at any time from now on."""
        promised = [
            name for name, entry in draft.jobs.items() if entry.row.user and entry.state.deadline_at is not None
        ]
        together = competing_jobs(draft, (), self._held, promised)
        gangs = list(self._gangs(draft, together, self._served(draft)).values())
        held = allot(draft.at, together.lasting, gangs, before=self._held).held
        return {user: promised_at_once(gangs, held, user) for user in draft.users}

    # --- demands of jobs

    def _served(self, draft: Draft) -> dict[str, float]:
        """Return recent worker seconds without a promise by user, of ended and of active jobs."""
        found = dict(self.served)
        for user, seconds in draft.unpromised_seconds().items():
            found[user] = found.get(user, 0.0) + seconds
        return found

    def _gangs(self, draft: Draft, together: CompetingJobs, served: Mapping[str, float]) -> dict[str, Gang]:
        found = {}
        for name, entry in together.entries.items():
            gang = self._gang(draft, entry)
            if gang is not None:
                served_s = served.get(gang.user, 0.0)
                found[name] = gang if gang.served_s == served_s else replace(gang, served_s=served_s)
        return found

    def _gang(self, draft: Draft, entry: JobEntry) -> Gang | None:
        """Return a job's gang, which is computed again once something that it depends on has changed but progress."""
        name = entry.row.id
        watched = self._watched.get(name, JobSpeeds())
        regions = (draft.region(part.region) for part in entry.plan.partitions)
        catalogues = tuple(region.catalogue if region is not None else None for region in regions)
        key = (*watched.version(), *catalogues)
        known = self._gang_cache.get(name)
        if known is not None and _all_same(known.key, key):
            if known.entry is entry:
                return known.gang
            if _all_same(inputs_of(known.entry), inputs_of(entry)):
                gang = with_progress(known.gang, entry) if known.gang is not None else None
                self._gang_cache[name] = _KnownGang(entry, key, gang)
                return gang
        gang = gang_of(entry, watched, draft.regions)
        self._gang_cache[name] = _KnownGang(entry, key, gang)
        return gang

    def _observe(self, draft: Draft, entry: JobEntry) -> None:
        """Record the measured speeds of a running job; from time to time, compute the workers that it would prefer."""
        parts = entry.state.partitions
        if is_tuned(entry.spec) and is_elastic(entry):
            # Already during the start, before any round is reported.
            self._watched.setdefault(entry.row.id, JobSpeeds()).tuned_by_now(first_workers(entry, draft.regions))
        if entry.state.phase != "running":
            return
        watched = self._watched.setdefault(entry.row.id, JobSpeeds())
        for part in parts:
            if part.report is not None:
                watched.record(part.region, part.report)
        training = is_elastic(entry) and all(part.state == "training" for part in parts)
        if not is_tuned(entry.spec) and training and watched.due((part.region for part in parts), draft.at):
            change = _change(entry, watched, draft)
            wanted = {**workers_now(entry), **change.workers} if change is not None else {}
            watched.reviewed(wanted, change.reason if change is not None else "")

    # --- decisions for jobs

    def _scale(
        self, draft: Draft, entry: JobEntry, gang: Gang, answer: KindAllotment, gangs: Mapping[str, Gang]
    ) -> None:
        pace, preemptible = answer.pace(gang.name), gang.name in answer.preemptible
        moves = pace >= 0 and gang.held >= 0 and preemptible != gang.preemptible
        if gang.fixed or (pace == gang.held and not moves and not any(p.preempted for p in entry.state.partitions)):
            return
        watched = self._watched.setdefault(gang.name, JobSpeeds())
        promised = answer.held.get(gang.name)
        needed = promised is not None and (promised.now > gang.held or promised.late)
        if pace > gang.held >= 0 and not moves and not (watched.rested(draft.at) or needed):
            return
        wanted = dict(gang.workers(pace)) or dict.fromkeys(planned_workers(entry.plan), 0)
        if moves or (gang.preemptible and pace >= 0 and gang.held < 0):
            reason = _why_moved(preemptible, promised)
        else:
            paces = {name: answer.pace(name) for name in gangs}
            reason = _reason(gang, paces, gangs, watched, needed=needed)
        asked = ScaleRequested(draft.at, wanted, reason, gives_way=pace < 0, preemptible=preemptible)
        draft.apply_to_job(gang.name, asked)
        by_itself = pace > gang.held >= 0 or reason == watched.reason
        watched.changed(draft.at, by_itself=by_itself or (moves and preemptible))

    def _begin_or_wait(self, draft: Draft, entry: JobEntry, gang: Gang, pace: int, preemptible: bool) -> None:
        wanted, served, workers = planned_workers(entry.plan), self._served(draft), gang.workers(pace)
        free = free_workers(draft, wanted)
        absent = [region for region in wanted if region not in free]
        closed = [name for name in wanted if name not in absent and not draft.regions[name].state.takes_new_jobs]
        # Workers count as free only after the jobs that give them up were commanded to.
        available = has_room(draft, gang, pace, preemptible=preemptible)
        if not absent and not closed and workers and available:
            begin(draft, entry, workers, preemptible=preemptible)
            return
        returns = f"for {', '.join(absent)} to reconnect" if absent else ""
        if closed and not absent:
            states = (f"{name} ({draft.regions[name].state.standing})" for name in closed)
            returns = f"for {', '.join(states)} to take new jobs"
        turn, row = turn_of_entry(entry, served), entry.row
        waits_for = returns or what_for(entry.plan, jobs_before(draft, entry.plan, row.id, row.user, turn, served))
        draft.apply_to_job(entry.row.id, StartDelayed(draft.at, waits_for))

    def _record_breaches(self, draft: Draft, late: Iterable[str], ends: Mapping[str, float]) -> None:
        """Record once that a promise is in danger, and once that it is not any more."""
        for name in ends:
            watched, entry = self._watched.setdefault(name, JobSpeeds()), _entry(draft, name)
            if entry.state.deadline_at is None or watched.late == (name in late):
                continue
            watched.late = name in late
            by = ends.get(name, math.inf) - entry.state.deadline_at
            text, seconds = "the promised deadline is not in danger any more", by if math.isfinite(by) else None
            if watched.late:
                why = f"it would be missed by {by:.0f} s" if seconds else "no workers are available"
                text = f"the promised deadline is in danger: {why}"
            data = {"in_danger": watched.late, "late_seconds": seconds if watched.late else None}
            draft.record("job.promise", text, job=name, data=data)


def begin(draft: Draft, entry: JobEntry, workers: Mapping[str, int], *, preemptible: bool = False) -> None:
    """Start a queued or new job with the given workers in each of its regions."""
    planned = planned_workers(entry.plan)
    parts = tuple(
        replace(
            part,
            since=draft.at,
            link="live" if draft.regions[part.region].state.phase == "live" else "unreachable",
            workers=None if workers[part.region] == planned[part.region] and not preemptible else workers[part.region],
            preemptible=preemptible,
        )
        for part in entry.state.partitions
    )
    copies = tuple(
        replace(
            copy,
            since=draft.at,
            link="live" if draft.regions[copy.source].state.phase == "live" else "unreachable",
        )
        for copy in entry.state.copies
    )
    draft.add_job(replace(entry, state=replace(entry.state, partitions=parts, copies=copies)))
    draft.apply_to_job(entry.row.id, Planned(draft.at))
    draft.apply_to_job(entry.row.id, StartAllowed(draft.at))


def _all_same(some: tuple[object, ...], others: tuple[object, ...]) -> bool:
    return len(some) == len(others) and all(map(_same, some, others))


def _same(one: object, other: object) -> bool:
    """Whether two are the same object, or equal numbers or texts."""
    return one is other or (isinstance(one, float | int | str) and one == other)


def _why_moved(preemptible: bool, promised: Reservation | None) -> str:
    if preemptible:
        return "preemptible workers cost less"
    if promised is not None and promised.now >= 0:
        return "its promised deadline needs regular workers"
    return "preemptible workers were preempted"


def _entry(draft: Draft, name: str) -> JobEntry:
    entry = draft.job(name)
    assert entry is not None
    return entry


def _reason(
    gang: Gang, paces: Mapping[str, int], gangs: Mapping[str, Gang], watched: JobSpeeds, *, needed: bool
) -> str:
    """Return why a job's number of workers changes."""
    pace = paces[gang.name]
    if pace > gang.held:
        if gang.held < 0:
            return "workers are free again"
        if needed:
            return "its promised deadline is in danger" if watched.late else "its promised deadline needs them"
        saved = 1 - gang.paces[gang.held].rate / gang.paces[pace].rate
        return watched.reason or f"saves {saved:.0%} of the remaining time"
    regions = set(gang.paces[0].workers)
    others = [
        other
        for name, other in gangs.items()
        if name != gang.name and regions & set(other.paces[0].workers) and paces[name] > other.held
    ]
    if not others:
        return "no workers are available" if pace < 0 else watched.reason or "fewer workers are as fast"
    first = min(others, key=lambda other: (other.deadline_s, other.since_s))
    return f"paused in favour of {first.name}" if pace < 0 else f"workers are needed by {first.name}"


def _change(entry: JobEntry, watched: JobSpeeds, draft: Draft) -> WorkerChange | None:
    """Return the workers that a running job would prefer if no other job needed any."""
    demand = to_demand(entry.spec, entry.row.id, datetime.fromtimestamp(entry.row.created_at, UTC))
    speeds = {part.region: watched.speed(part.region) or 0.0 for part in entry.state.partitions}
    held = workers_now(entry)
    assigned = assigned_regions(entry.plan, held, draft.regions, speeds, merges_of(entry.state))
    reports = [part.report for part in entry.state.partitions if part.report is not None]
    if len(assigned) < len(held) or not reports:
        return None
    free = free_workers(draft, held)
    others = (draft.job(name) for region in held for name in draft.jobs_in(region))
    queued = any(job is not None and job.state.phase == "queued" for job in others)
    # While a job is queued for its regions, no running job is scaled out.
    bounded = [
        replace(region, free=region.workers + (0 if queued else max(0, free.get(region.region, 0))))
        for region in assigned
    ]
    ends = entry.state.deadline_at
    return worker_change(
        bounded,
        rounds_left=entry.plan.rounds - min(report.round for report in reports),
        exchange_seconds=entry.plan.exchange_seconds,
        background=entry.plan.background,
        minimise=demand.minimise,
        deadline_seconds=None if ends is None else max(0.0, ends - draft.at),
        budget_usd=None if demand.budget_usd is None else max(0.0, demand.budget_usd - entry.state.usd),
    )
