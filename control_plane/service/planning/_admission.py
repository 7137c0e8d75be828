"""The answer to a new job: whether it is taken, by when, and with which workers.

That may take seconds where many regions may process each other's shards. So it is worked out over a copy of what is
known (`Asked`), in a thread, while everybody else is answered; and what was promised so is held against what has
changed meanwhile (`still`) before it is stored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from control_plane.pki import utc_now
from control_plane.service.measuring._known import Learnt
from control_plane.service.planning._dates import too_late, with_dates
from control_plane.service.planning._gangs import (
    capacities_of,
    gang_of_plan,
    may_scale,
    planned_workers,
    preemptible_of,
)
from control_plane.service.planning._planning import lasting_workers_now, on_preemptible, snapshot_of, workers_now
from control_plane.service.planning._scaling import is_tuned
from control_plane.service.state._draft import Draft, JobEntry
from control_plane.service.state._quota import over_quota, quota_of, turn_of
from control_plane.spec import JobSpec, to_demand
from scheduler import Declined, Demand, Plan, Planner
from scheduler.deadline import Gang, Held, allot_kinds, offer

__all__ = [
    "Answer",
    "Asked",
    "Decision",
    "free_preemptible",
    "free_workers",
    "frozen",
    "jobs_before",
    "jobs_now",
    "turn_of_entry",
    "what_for",
]

_MOMENT_SECONDS = 1.0
"""A date that a refusal names must still be there so much later: it is asked for once somebody has read of it."""
_MOST_PLACEMENTS = 150
"""Ways to lay out shards that are evaluated before a date that was found is made finer still."""


@dataclass(frozen=True)
class Decision:
    """What becomes of a new job."""

    plan: Plan
    deadline_at: float | None
    """Promised, Unix seconds; None: it is done as well as can be."""
    workers: Mapping[str, int]
    """By region, that are there for it now; empty where it waits."""
    waits_for: str
    """In words; empty: it may begin."""
    preemptible: bool = False
    """Those workers may be taken away."""
    step: int = 0
    """Of a soft deadline: 0 is what was asked for."""


Answer = Decision | Declined


@dataclass(frozen=True)
class Asked:
    """A new job, and all that the answer to it depends on; nobody changes it, so that a thread may answer."""

    draft: Draft
    """A copy of its own."""
    spec: JobSpec
    job: str
    learnt: Learnt
    user: str
    """Empty: the operator, who has no quota."""
    gangs: Sequence[Gang]
    """The jobs that are there."""
    held: Mapping[str, Held]
    """What those with a promise hold, by the last answer."""
    served: Mapping[str, float]
    """Worker seconds without a promise of late, by user."""

    def answer(self) -> Answer:
        """Declined: it cannot be done at all, or not by the deadline that it must keep, or its user was promised
        enough."""
        # Best with what cannot be taken from others left out; but that may be too little, and end in time.
        fixed = _fixed_workers(self.draft)
        planners = [self._planner(busy) for busy in ([fixed, {}] if fixed else [{}])]
        demands = self._demands()
        refusals: list[Declined] = []
        for step, demand in enumerate(demands):
            for planner in planners:
                answer = self._decided(planner, demand, step)
                if isinstance(answer, Decision):
                    return answer
                refusals.append(answer)

        soon = replace(self, draft=replace(self.draft, at=self.draft.at + _MOMENT_SECONDS))

        def refusal(other: Demand, *, later: bool = False) -> Declined | None:
            refused, asked = None, soon if later else self
            for planner in planners:
                offered = asked._offered(planner, other)
                if not isinstance(offered, Declined):
                    return None
                refused = offered
            return refused

        def enough() -> bool:
            return sum(planner.placements for planner in planners) >= _MOST_PLACEMENTS

        return with_dates(refusals[len(planners) - 1], demands[0], refusal, enough)

    def still(self, decided: Decision, before: Asked) -> Decision | None:
        """The same plan as things are now, by when it is promised and what it begins with; None: it must be planned
        anew. ``before``: what it was decided for."""
        chosen, demand = decided.plan, self._demands()[decided.step]
        places = (*(part.region for part in chosen.partitions), *(copy.source for copy in chosen.copies))
        if any(_rests_on(self.draft, name) != _rests_on(before.draft, name) for name in places):
            return None
        if demand.deadline_seconds is not None and chosen.estimate.seconds.high > demand.deadline_seconds:
            return None
        offered = self._offer(chosen, demand)
        return None if isinstance(offered, Declined) else self._decision(chosen, *offered, decided.step)

    def _demands(self) -> list[Demand]:
        """What is asked for; then the further steps of a soft deadline, and best effort as the last."""
        now, soft = utc_now(self.draft.at), self.spec.objective.soft
        hard = to_demand(self.spec, self.job, now)
        if not soft:
            return [hard]
        steps = [to_demand(self.spec, self.job, now, deadline=step.deadline) for step in soft]
        return [hard, *steps, replace(hard, deadline_seconds=None)]

    def _planner(self, busy: dict[str, int]) -> Planner:
        snapshot = snapshot_of(self.draft.regions.values(), (), self.learnt, self.spec.train.batch)
        given = self.spec.train.initial_model is not None
        return Planner(replace(snapshot, busy_workers=busy, first_model_given=given))

    def _offered(self, planner: Planner, demand: Demand) -> tuple[Plan, Gang, Mapping[str, Held]] | Declined:
        """The plan, the job as it is shared out to, and what all with a promise would hold with it."""
        chosen = planner.plan(demand)
        if isinstance(chosen, Declined):
            return chosen
        offered = self._offer(chosen, demand)
        return offered if isinstance(offered, Declined) else (chosen, *offered)

    def _offer(self, chosen: Plan, demand: Demand) -> tuple[Gang, Mapping[str, Held]] | Declined:
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
        capacities, quota = capacities_of(draft.regions.values()), quota_of(draft.users, user)
        told = offer(draft.at, capacities, self.gangs, new, quota, before=self.held)
        if told.over_quota:
            return over_quota(draft.at, capacities, self.gangs, new, quota, self.held)
        if told.deadline_s is None:
            alone = not self.gangs or offer(draft.at, capacities, [], new, quota).deadline_s is None
            return too_late(told, demand, chosen, draft.at, alone=alone)
        return new, told.held

    def _decided(self, planner: Planner, demand: Demand, step: int) -> Decision | Declined:
        offered = self._offered(planner, demand)
        return offered if isinstance(offered, Declined) else self._decision(*offered, step)

    def _decision(self, chosen: Plan, new: Gang, held: Mapping[str, Held], step: int) -> Decision:
        draft = self.draft
        capacities, preemptibles = capacities_of(draft.regions.values()), preemptible_of(draft.regions.values())
        now = allot_kinds(draft.at, capacities, preemptibles, [*self.gangs, new], before=held)
        need, preemptible = new.workers(now.pace(new.name)), new.name in now.preemptible
        free = free_preemptible(draft) if preemptible else free_workers(draft)
        there = need and all(count <= free.get(region, 0) for region, count in need.items())
        before = jobs_before(draft, chosen, new.name, turn_of(new), self.served)
        waits_for = "" if there else what_for(chosen, before)
        ends = None if math.isinf(new.deadline_s) else new.deadline_s
        return Decision(chosen, ends, need if there else {}, waits_for, preemptible, step)


def frozen(draft: Draft) -> Draft:
    """What a draft shows, as it is now: what is stored later does not change it."""
    return Draft(
        draft.at,
        {entry.row.id: entry for entry in jobs_now(draft)},
        {**draft.regions, **draft.changed_regions},
        dict(draft.users),
    )


def _rests_on(draft: Draft, region: str) -> object:
    """What a plan rests on in a region; None: it is not there."""
    entry = draft.region(region)
    there = entry is not None and entry.state.phase in ("live", "unreachable")
    return (entry.catalogue, _fixed_workers(draft).get(region, 0)) if entry is not None and there else None


def jobs_now(draft: Draft) -> list[JobEntry]:
    """The jobs as this change leaves them."""
    entries = (draft.job(name) for name in {**draft.jobs, **draft.changed_jobs})
    return [entry for entry in entries if entry is not None and not entry.state.terminal]


def free_workers(draft: Draft) -> dict[str, int]:
    """Workers that nobody has, or was told to have, by region."""
    free = {name: capacity.devices for name, capacity in capacities_of(draft.regions.values()).items()}
    for entry in jobs_now(draft):
        if entry.state.phase == "finishing":
            continue
        for region, workers in lasting_workers_now(entry).items():
            free[region] = free.get(region, 0) - workers
    return free


def free_preemptible(draft: Draft) -> dict[str, int]:
    """The same of workers that may be taken away."""
    free = {name: capacity.devices for name, capacity in preemptible_of(draft.regions.values()).items()}
    for entry in jobs_now(draft):
        if on_preemptible(entry) and entry.state.phase != "finishing":
            for region, workers in workers_now(entry).items():
                free[region] = free.get(region, 0) - workers
    return free


def _fixed_workers(draft: Draft) -> dict[str, int]:
    """Workers of jobs that keep theirs to the end, by region; those of a job that only hands its model in are free."""
    busy: dict[str, int] = {}
    for entry in jobs_now(draft):
        if entry.state.phase != "finishing" and not may_scale(entry.spec, entry.plan):
            for region, workers in workers_now(entry).items():
                busy[region] = busy.get(region, 0) + workers
    return busy


def jobs_before(
    draft: Draft, wanted: Plan, job: str, turn: tuple[float, float, float], served: Mapping[str, float]
) -> list[str]:
    """Jobs that have workers where a job wants them, or wait for some and come first."""
    places = set(planned_workers(wanted))
    return sorted(
        entry.row.id
        for entry in jobs_now(draft)
        if entry.row.id != job
        and places & set(planned_workers(entry.plan))
        and (entry.state.phase != "queued" or turn_of_entry(entry, served) < turn)
    )


def turn_of_entry(entry: JobEntry, served: Mapping[str, float]) -> tuple[float, float, float]:
    deadline_at = entry.state.deadline_at or math.inf
    return deadline_at, served.get(entry.row.user, 0.0) * math.isinf(deadline_at), entry.row.created_at


def what_for(wanted: Plan, before: Sequence[str]) -> str:
    where = ", ".join(sorted(planned_workers(wanted)))
    return f"for workers in {where}" + (f", behind {', '.join(before)}" if before else "")
