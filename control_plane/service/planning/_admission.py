"""Admission of a new job: whether it is admitted, with which promise, and with which workers.

Planning may take seconds if many regions may process each other's shards. It therefore runs in a thread on a copy of
the federation's state (`PendingAdmission`), while other requests are served. Before the decision is stored, `confirm`
checks it against what has changed in the meantime.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from control_plane.pki import utc_now
from control_plane.service.measuring._task_history import TaskHistory, measured_batches
from control_plane.service.planning._competing_jobs import CompetingJobs, competing_jobs
from control_plane.service.planning._gangs import (
    capacities_of,
    gang_of_plan,
    may_scale,
    planned_workers,
    preemptible_of,
)
from control_plane.service.planning._planning import snapshot_of
from control_plane.service.planning._possible_deadline import too_late, with_dates
from control_plane.service.planning._privacy_noise import with_noise
from control_plane.service.planning._required_features import refused_by_age, refused_by_lack, refused_by_shares
from control_plane.service.planning._scaling import is_tuned
from control_plane.service.state._callers import caller_named
from control_plane.service.state._draft import Draft
from control_plane.service.state._entries import JobEntry
from control_plane.service.state._quota import over_quota, rules_for, turn_of
from control_plane.spec import JobSpec, to_demand
from scheduler import BatchPlanner, Declined, Demand, Plan, Planner, Snapshot, tried_batches
from scheduler.deadline import Gang, Reservation, allot_kinds, devices_of, offer

__all__ = [
    "AdmittedJob",
    "Answer",
    "PendingAdmission",
    "free_workers",
    "frozen",
    "has_room",
    "jobs_before",
    "turn_of_entry",
    "what_for",
]

_MOMENT_SECONDS = 1.0
"""A deadline that a refusal offers must still be possible this much later, when the user requests it."""
_MAX_PLACEMENTS = 150
"""Number of shard placements to evaluate before the search for an earlier deadline stops."""


@dataclass(frozen=True)
class AdmittedJob:
    """An admitted job: its plan, promise and first workers."""

    plan: Plan
    deadline_at: float | None
    """Promised deadline in Unix seconds; None: best effort."""
    workers: Mapping[str, int]
    """Workers by region to start with now; empty: the job waits."""
    waits_for: str
    """What the job waits for: "for workers in frankfurt"; empty: it may start."""
    preemptible: bool = False
    """Whether the workers are preemptible."""
    step: int = 0
    """Index of the promised soft deadline; 0: the requested one."""
    competing: CompetingJobs | None = field(default=None, compare=False)
    """The jobs that it was planned together with."""


Answer = AdmittedJob | Declined
_Planner = Planner | BatchPlanner


@dataclass(frozen=True)
class PendingAdmission:
    """A new job and an immutable copy of all state that its admission depends on, so that a thread can plan it."""

    draft: Draft
    """A frozen copy of the federation's state."""
    spec: JobSpec
    job: str
    history: TaskHistory
    user: str
    """Empty: the operator, who has no quota."""
    gangs_of: Callable[[Draft, CompetingJobs], Sequence[Gang]]
    """Returns the gangs of jobs."""
    held: Mapping[str, Reservation]
    """Workers reserved for promises, by the last allocation."""
    served: Mapping[str, float]
    """Recent worker seconds without a promise, by user."""
    by_price: bool = False
    """Whether deadlines are promised by price (`scheduler.deadline.Rules`)."""

    def answer(self) -> Answer:
        """Plan the job. It is declined if it cannot run, cannot meet its deadline, or exceeds its user's quota."""
        # Prefer a plan without workers that inelastic jobs hold; if there is none, plan with those too, and wait.
        fixed, devices = self.draft.fixed_workers(), self.draft.fixed_devices()
        seen: dict[int, Snapshot] = {}
        kinds = [(fixed, devices), ({}, {})] if fixed else [({}, {})]
        planners = [self._planner(*busy, seen) for busy in kinds]
        demands = self._demands()
        refusals: list[Declined] = []
        for step, demand in enumerate(demands):
            for planner in planners:
                answer = self._decided(planner, demand, step)
                if isinstance(answer, AdmittedJob):
                    return answer
                refusals.append(answer)

        soon = replace(self, draft=replace(self.draft, at=self.draft.at + _MOMENT_SECONDS))

        def refusal(other: Demand, *, later: bool = False) -> Declined | None:
            refused, admission = None, soon if later else self
            for planner in planners:
                offered = admission._offered(planner, other)
                if not isinstance(offered, Declined):
                    return None
                refused = offered
            return refused

        def enough() -> bool:
            return sum(planner.placements for planner in planners) >= _MAX_PLACEMENTS

        return with_dates(refusals[len(planners) - 1], demands[0], refusal, enough)

    def confirm(self, decided: AdmittedJob, before: PendingAdmission) -> AdmittedJob | None:
        """Return the decision with its plan under the present state; None if the job must be planned again.

        Args:
            before: the admission that the decision was made by.
        """
        chosen, demand = decided.plan, self._demands()[decided.step]
        regions = (*(part.region for part in chosen.partitions), *(copy.source for copy in chosen.copies))
        if any(_inputs_of(self.draft, name) != _inputs_of(before.draft, name) for name in regions):
            return None
        if decided.competing is not None and self._competing(chosen).same_as(decided.competing):
            seconds = demand.deadline_seconds
            ends = None if seconds is None else self.draft.at + seconds
            if seconds is None or chosen.estimate.seconds.high <= seconds:
                return replace(decided, deadline_at=ends)
        if demand.deadline_seconds is not None and chosen.estimate.seconds.high > demand.deadline_seconds:
            return None
        offered = self._offer(chosen, demand)
        return None if isinstance(offered, Declined) else self._decision(chosen, *offered, decided.step)

    def _demands(self) -> list[Demand]:
        """Return the requested demand, followed by its soft deadlines and best effort, if it has soft deadlines."""
        now, soft = utc_now(self.draft.at), self.spec.objective.soft
        hard = to_demand(self.spec, self.job, now)
        if not soft:
            return [hard]
        steps = [to_demand(self.spec, self.job, now, deadline=step.deadline) for step in soft]
        return [hard, *steps, replace(hard, deadline_seconds=None)]

    def _planner(self, busy: dict[str, int], devices: dict[str, int], seen: dict[int, Snapshot]) -> _Planner:
        """Return the planner of a demand. ``seen``: the federation's snapshots by batch, to which others are added."""
        train, demand = self.spec.train, self._demands()[0]

        def snapshot(batch: int) -> Snapshot:
            if batch not in seen:
                seen[batch] = snapshot_of(self.draft.regions.values(), (), self.history, batch)
            return replace(seen[batch], busy_workers=busy, busy_devices=devices)

        usual = snapshot(train.probed_batch)
        planner = Planner(usual)
        if train.batch != "auto":
            return planner
        tried = tried_batches(usual, demand, measured_batches(self.history, usual.profiles))
        return BatchPlanner(lambda batch: Planner(snapshot(batch), like=planner), tried)

    def _offered(self, planner: _Planner, demand: Demand) -> tuple[Plan, Gang, Mapping[str, Reservation]] | Declined:
        """Return the plan, the job's gang, and the workers reserved for all promises with it.

        If the cheapest plan's deadline cannot be promised, the fastest one's is tried.
        """
        found = self._planned(planner, demand)
        if not isinstance(found, Declined) or demand.minimise == "time" or demand.deadline_seconds is None:
            return found
        faster = self._planned(planner, replace(demand, minimise="time"))
        return found if isinstance(faster, Declined) else faster

    def _planned(self, planner: _Planner, demand: Demand) -> tuple[Plan, Gang, Mapping[str, Reservation]] | Declined:
        chosen = planner.plan(demand)
        if isinstance(chosen, Declined):
            return chosen
        for refused_by in (refused_by_age, refused_by_lack, refused_by_shares):
            if (refused := refused_by(self.spec, chosen, self.draft.regions)) is not None:
                return refused
        chosen = with_noise(self.spec, chosen)
        if isinstance(chosen, Declined):
            return chosen
        offered = self._offer(chosen, demand)
        return offered if isinstance(offered, Declined) else (chosen, *offered)

    def _offer(self, chosen: Plan, demand: Demand) -> tuple[Gang, Mapping[str, Reservation]] | Declined:
        draft, spec, user = self.draft, self.spec, self.user
        ends = math.inf if demand.deadline_seconds is None else draft.at + demand.deadline_seconds
        new = gang_of_plan(
            demand.job,
            chosen,
            draft.regions,
            elastic=may_scale(spec, chosen),
            deadline_s=ends,
            since_s=draft.at,
            user=user,
            spec=spec if is_tuned(spec) else None,
        )
        new = replace(new, served_s=self.served.get(user, 0.0))
        if demand.deadline_seconds is None:
            return new, self.held
        together, rules = self._competing(chosen), rules_for(draft.users, user, by_price=self.by_price)
        capacities, gangs = together.lasting, self.gangs_of(draft, together)
        offered = offer(draft.at, capacities, gangs, new, rules, before=self.held)
        if offered.over_quota:
            return over_quota(draft.at, capacities, gangs, new, rules, self.held)
        if offered.deadline_s is None:
            whole = capacities_of(entry for name in capacities if (entry := draft.region(name)) is not None)
            alone = not gangs or offer(draft.at, whole, [], new, rules).deadline_s is None
            return too_late(offered, demand, chosen, draft.at, alone=alone)
        return new, offered.held

    def _decided(self, planner: _Planner, demand: Demand, step: int) -> AdmittedJob | Declined:
        offered = self._offered(planner, demand)
        return offered if isinstance(offered, Declined) else self._decision(*offered, step)

    def _competing(self, chosen: Plan) -> CompetingJobs:
        """Return the jobs that compete with a plan for workers; with a quota, all jobs of its user with a promise."""
        draft, user = self.draft, self.user
        limited = user in rules_for(draft.users, user).quotas
        mine = [
            name
            for name, entry in (draft.jobs.items() if limited else ())
            if entry.row.user == user and entry.state.deadline_at is not None
        ]
        return competing_jobs(draft, planned_workers(chosen), self.held, mine)

    def _decision(self, chosen: Plan, new: Gang, held: Mapping[str, Reservation], step: int) -> AdmittedJob:
        draft, together = self.draft, self._competing(chosen)
        gangs = [*self.gangs_of(draft, together), new]
        now = allot_kinds(draft.at, together.lasting, together.preemptible, gangs, before=held)
        pace, preemptible = now.pace(new.name), new.name in now.preemptible
        need = new.workers(pace)
        available = need and has_room(draft, new, pace, preemptible=preemptible)
        before = jobs_before(draft, chosen, new.name, self.user, turn_of(new), self.served)
        waits_for = "" if available else what_for(chosen, before)
        ends = None if math.isinf(new.deadline_s) else new.deadline_s
        return AdmittedJob(chosen, ends, need if available else {}, waits_for, preemptible, step, together)


def frozen(draft: Draft) -> Draft:
    """Return a copy of a draft's state that later changes do not affect."""
    jobs = dict(draft.jobs)
    for name, entry in draft.changed_jobs.items():
        if entry.state.terminal:
            jobs.pop(name, None)
        else:
            jobs[name] = entry
    index = None if draft.changed_jobs else draft.index
    return Draft(draft.at, jobs, {**draft.regions, **draft.changed_regions}, dict(draft.users), index=index)


def _inputs_of(draft: Draft, region: str) -> object:
    """Return what a plan depends on in a region; None if the region is not usable."""
    entry = draft.region(region)
    if entry is None or not entry.state.takes_new_jobs:
        return None
    return entry.catalogue, draft.fixed(region), draft.fixed(devices_of(region))


def free_workers(draft: Draft, regions: Iterable[str], *, preemptible: bool = False) -> dict[str, int]:
    """Return the workers of usable regions, and the devices (`devices_of`), that no job has or was commanded to
    have."""
    known = [entry for region in regions if (entry := draft.region(region)) is not None]
    there = (preemptible_of if preemptible else capacities_of)(known)
    return {
        name: capacity.devices - draft.busy(name, preemptible=preemptible) for name, capacity in there.items()
    }  # fmt: skip


def has_room(draft: Draft, gang: Gang, pace: int, *, preemptible: bool) -> bool:
    """Whether no job has the workers and devices that a gang needs for a pace."""
    free = free_workers(draft, gang.workers(pace), preemptible=preemptible)
    return all(count <= free.get(row, 0) for row, count in gang.needs(pace).items())


def jobs_before(
    draft: Draft,
    wanted: Plan,
    job: str,
    user: str,
    turn: tuple[float, float, float],
    served: Mapping[str, float],
) -> list[str]:
    """Return the jobs that have workers in the regions that a user's job needs, or are before it in the queue.

    Jobs that the user may not read are only counted.
    """
    regions = planned_workers(wanted)
    names = dict.fromkeys(name for region in regions for name in draft.jobs_in(region))
    there = [entry for name in names if (entry := draft.job(name)) is not None and not entry.state.terminal]
    before = [
        entry.row
        for entry in there
        if entry.row.id != job
        and regions.keys() & planned_workers(entry.plan).keys()
        and (entry.state.phase != "queued" or turn_of_entry(entry, served) < turn)
    ]
    caller = caller_named(draft.users, user)
    shown = sorted(other.id for other in before if caller.may_read(other))
    hidden = len(before) - len(shown)
    return [*shown, *([f"{hidden} job{'s' if hidden > 1 else ''} of other users"] if hidden else [])]


def turn_of_entry(entry: JobEntry, served: Mapping[str, float]) -> tuple[float, float, float]:
    """Return the sort key of a job in the queue, as `turn_of` does for a gang."""
    deadline_at = entry.state.deadline_at or math.inf
    return deadline_at, served.get(entry.row.user, 0.0) * math.isinf(deadline_at), entry.row.created_at


def what_for(wanted: Plan, before: Sequence[str]) -> str:
    """Return what a job waits for: "for workers in a, b, behind JOB"."""
    where = ", ".join(sorted(planned_workers(wanted)))
    return f"for workers in {where}" + (f", behind {', '.join(before)}" if before else "")
