"""The line of jobs that wait for workers: who may start, and who gives workers up for them.

A job that cannot start for lack of workers is taken in and waits; one that could not start even on an idle federation
is declined. Those with a deadline go first, by deadline, then the others as they came. A job that waits keeps its
place: nobody behind it takes workers in a region that it needs. Jobs that run without a deadline and leave their number
of workers to the plan give way: they give up to half of their workers up for those that wait, and where that is not
enough for one with a deadline they pause, the latest first, until there is room again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

from control_plane.core import Begun, Planned, ScaleAsked, Waits
from control_plane.pki import utc_now
from control_plane.service._draft import Draft, JobEntry
from control_plane.service._planning import first_state, plan_json, snapshot_of, workers_now
from control_plane.spec import JobSpec, to_demand
from control_plane.store import RunRow
from scheduler import Declined, Demand, Plan, Reason, plan

__all__ = ["decide", "in_line", "start_waiting"]

GIVES_UP_AT_LEAST_EVERY_SECONDS = 10.0
"""Between two times that jobs give workers up: those of the last time must have become free first."""


def in_line(jobs: Iterable[JobEntry]) -> list[JobEntry]:
    """Those that wait, the next one first."""
    waiting = [job for job in jobs if job.state.phase == "queued"]
    return sorted(waiting, key=lambda job: (job.state.deadline_at or math.inf, job.row.created_at, job.row.id))


def decide(draft: Draft, spec: JobSpec, job: str, runs: list[RunRow]) -> tuple[Plan, str] | Declined:
    """The plan of a new job, and what it waits for; empty: it may start. Declined: it cannot be done at all.

    A deadline is promised only if it can be kept after waiting for all jobs in the regions that it needs, as long as
    they may still take; those that would pause for it are not waited for.
    """
    demand = to_demand(spec, job, utc_now(draft.at))
    snapshot = snapshot_of(draft.regions.values(), draft.jobs.values(), runs)
    chosen = plan(snapshot, demand)
    line = in_line(draft.jobs.values())
    if isinstance(chosen, Plan) and not (
        _places(chosen) & {region for entry in line for region in _places(entry.plan)}
    ):
        return chosen, ""
    idle = plan(replace(snapshot, busy_workers={}), demand)
    if isinstance(idle, Declined):
        return idle
    ends = math.inf if demand.deadline_seconds is None else draft.at + demand.deadline_seconds
    before = [
        entry
        for entry in draft.jobs.values()
        if _places(entry.plan) & _places(idle)
        and (entry.state.phase != "queued" or (entry.state.deadline_at or math.inf) <= ends)
    ]
    if demand.deadline_seconds is not None:
        wait = max((_left(entry, draft.at) for entry in before if entry.state.phase != "queued"), default=0.0)
        if any(_gives_way(entry) for entry in before):
            wait += 2 * GIVES_UP_AT_LEAST_EVERY_SECONDS * len(before)
        wait += sum(entry.plan.estimate.seconds.high for entry in before if entry.state.phase == "queued")
        needed = wait + idle.estimate.seconds.high
        if needed > demand.deadline_seconds:
            return _too_late(needed, demand)
    return idle, _what_for(idle, before)


def start_waiting(draft: Draft, runs: Mapping[str, list[RunRow]], gave_up_at: float) -> float:
    """Start those for which there is room, in their order; ``runs`` are of earlier jobs, by task key.

    Returns when jobs were last asked to give workers up for those that wait, ``gave_up_at`` if they were not now.
    """
    kept: set[str] = set()
    ahead: list[JobEntry] = [entry for entry in _now(draft) if entry.state.phase != "queued"]
    for entry in in_line(_now(draft)):
        chosen = _startable(draft, entry, runs.get(entry.row.task_key, []))
        if chosen is not None and not _places(chosen) & kept:
            _start(draft, entry, chosen)
            continue
        kept |= _places(entry.plan)
        before = [job for job in ahead if _places(job.plan) & _places(entry.plan)]
        ahead.append(entry)
        draft.tell_job(entry.row.id, Waits(draft.at, _what_for(entry.plan, before)))
        if chosen is None and draft.at >= gave_up_at + GIVES_UP_AT_LEAST_EVERY_SECONDS and _make_room(draft, entry):
            gave_up_at = draft.at
    _go_on(draft, kept)
    return gave_up_at


def _now(draft: Draft) -> list[JobEntry]:
    """The jobs as this change leaves them."""
    entries = (draft.job(name) for name in {**draft.jobs, **draft.changed_jobs})
    return [entry for entry in entries if entry is not None and not entry.state.terminal]


def _startable(draft: Draft, entry: JobEntry, runs: list[RunRow]) -> Plan | None:
    """A plan in what is free now. A deadline that cannot be kept any more holds nobody back: late is better."""
    at = utc_now(entry.row.created_at)
    demand = to_demand(entry.spec, entry.row.id, at)
    passed = draft.at - entry.row.created_at
    if demand.deadline_seconds is not None:
        demand = replace(demand, deadline_seconds=demand.deadline_seconds - passed)
    snapshot = snapshot_of(draft.regions.values(), _now(draft), runs)
    for wanted in (demand, replace(demand, deadline_seconds=None, minimise="time")):
        if isinstance(chosen := plan(snapshot, wanted), Plan):
            return chosen
        if demand.deadline_seconds is None or demand.deadline_seconds > entry.plan.estimate.seconds.high:
            # There is time to wait for more room.
            return None
    return None


def _start(draft: Draft, entry: JobEntry, chosen: Plan) -> None:
    state = first_state(entry.row.id, entry.row.created_at, entry.spec, chosen, dict(draft.regions))
    row = replace(entry.row, plan_json=plan_json(chosen))
    draft.add_job(JobEntry(row, state, entry.spec, chosen))
    draft.tell_job(entry.row.id, Planned(draft.at))
    draft.tell_job(entry.row.id, Begun(draft.at))


def _gives_way(entry: JobEntry) -> bool:
    best_effort = entry.state.deadline_at is None and entry.spec.train.workers == "auto"
    return best_effort and entry.state.phase in ("starting", "running")


def _make_room(draft: Draft, waiting: JobEntry) -> bool:
    """Have jobs that give way do so where somebody waits; True where any does."""
    asked = False
    able = [entry for entry in _now(draft) if _gives_way(entry) and _places(entry.plan) & _places(waiting.plan)]
    for entry in able:
        planned = {part.region: part.workers for part in entry.plan.partitions}
        held = workers_now(entry)
        # Never fewer than half of the planned ones: a worker's memory was chosen for its batch.
        fewer = {
            region: max(1, held[region] // 2, math.ceil(planned[region] / 2))
            for region in _places(waiting.plan) & set(held)
            if held[region] > 1
        }
        fewer = {region: count for region, count in fewer.items() if count < held[region]}
        if fewer:
            draft.tell_job(entry.row.id, ScaleAsked(draft.at, fewer, f"makes room for {waiting.row.id}"))
            asked = True
    working = [entry for entry in able if any(workers_now(entry).values())]
    if asked or not working or waiting.state.deadline_at is None:
        return asked
    latest = max(working, key=lambda entry: (entry.row.created_at, entry.row.id))
    nobody = dict.fromkeys(_places(latest.plan), 0)
    draft.tell_job(latest.row.id, ScaleAsked(draft.at, nobody, f"gives way to {waiting.row.id}", gives_way=True))
    return True


def _go_on(draft: Draft, kept: set[str]) -> None:
    """Have jobs that paused go on where nobody waits any more; ``kept``: regions in which somebody does."""
    capacity = {name: entry.catalogue.capacity.workers for name, entry in draft.regions.items() if entry.catalogue}
    for entry in sorted(_now(draft), key=lambda entry: entry.row.created_at):
        if not entry.state.gave_way or _places(entry.plan) & kept:
            continue
        held: dict[str, int] = {}
        for other in _now(draft):
            for region, workers in workers_now(other).items():
                held[region] = held.get(region, 0) + workers
        room = {p.region: min(p.workers, capacity.get(p.region, 0) - held[p.region]) for p in entry.plan.partitions}
        if min(room.values()) > 0:
            draft.tell_job(entry.row.id, ScaleAsked(draft.at, room, "there is room again"))


def _places(chosen: Plan) -> set[str]:
    return {part.region for part in chosen.partitions}


def _left(entry: JobEntry, at: float) -> float:
    """What a running job may still take."""
    if _gives_way(entry):
        return 0.0
    begun = entry.state.started_at or entry.row.created_at
    return max(0.0, begun + entry.plan.estimate.seconds.high - at)


def _what_for(wanted: Plan, before: list[JobEntry]) -> str:
    where = ", ".join(sorted(_places(wanted)))
    who = ", ".join(sorted(entry.row.id for entry in before))
    return f"for workers in {where}" + (f", behind {who}" if who else "")


def _too_late(needed: float, demand: Demand) -> Declined:
    return Declined(
        (
            Reason(
                "INADMISSIBLE",
                f"needs up to {needed:.0f} s, waiting for other jobs included, the deadline leaves "
                f"{demand.deadline_seconds:.0f} s",
                f"a deadline of {math.ceil(needed)} s from now could be promised",
            ),
        )
    )
