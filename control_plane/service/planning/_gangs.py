"""Convert jobs to the scheduler's gangs: their possible numbers of workers with speeds, remaining work and deadline."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from control_plane.core import JobState
from control_plane.pki import utc_now
from control_plane.service.measuring._speeds import JobSpeeds
from control_plane.service.planning._planning import on_preemptible, workers_now
from control_plane.service.planning._scaling import begins_with, is_tuned, tuned_paces
from control_plane.service.state._entries import JobEntry, RegionEntry
from control_plane.spec import JobSpec, to_demand
from scheduler import Plan, RunningRegion, pace, paces
from scheduler.deadline import AssignmentPace, DeviceCapacity, Gang, devices_of

__all__ = [
    "assigned_regions",
    "capacities_of",
    "first_workers",
    "gang_of",
    "gang_of_plan",
    "inputs_of",
    "is_elastic",
    "may_scale",
    "merges_of",
    "planned_workers",
    "preemptible_of",
    "with_progress",
]

CAUTION = 1.1
"""Safety factor on the remaining time of a running job with measured speeds."""
AWAY_SECONDS = 60.0
"""Time for which a job without a promise keeps its workers while one of its regions is unreachable: about a lease."""
ENDING_SECONDS = 5.0
"""Expected time for which a job that is being cancelled keeps its workers."""


def capacities_of(regions: Iterable[RegionEntry]) -> dict[str, DeviceCapacity]:
    """Return the workers of usable regions, live ones and unreachable ones whose lease has not expired; and, by
    `devices_of` a region, the devices that these workers share."""
    found = {}
    for entry in regions:
        if entry.catalogue is not None and entry.state.phase in ("live", "unreachable"):
            capacity = entry.catalogue.capacity
            found[entry.row.name] = DeviceCapacity(capacity.workers)
            if capacity.shared_devices is not None:
                found[devices_of(entry.row.name)] = DeviceCapacity(capacity.shared_devices)
    return found


def preemptible_of(regions: Iterable[RegionEntry]) -> dict[str, DeviceCapacity]:
    """Return the same of preemptible workers, for each of which one device is kept."""
    found = {}
    for entry in regions:
        if entry.catalogue is not None and entry.state.phase in ("live", "unreachable"):
            capacity = entry.catalogue.capacity
            if capacity.preemptible:
                found[entry.row.name] = DeviceCapacity(capacity.preemptible)
                if capacity.shared_devices is not None:
                    found[devices_of(entry.row.name)] = DeviceCapacity(capacity.preemptible)
    return found


def is_elastic(entry: JobEntry) -> bool:
    """Whether a job's number of workers may be changed now: the job allows it, runs, and all regions are reachable."""
    parts = entry.state.partitions
    running = entry.state.phase in ("starting", "running") and all(part.link == "live" for part in parts)
    return may_scale(entry.spec, entry.plan) and running


def may_scale(spec: JobSpec, chosen: Plan) -> bool:
    """Whether a job's number of workers may change: the plan or a tuner chooses it, no region runs a pipeline, and
    workers have one device each, as what is counted in workers supposes."""
    free = (spec.train.workers == "auto" and spec.objective.method == "auto") or is_tuned(spec)
    free = free and spec.function.gpus == 1
    return free and all(part.pipeline is None for part in chosen.partitions)


def gang_of_plan(
    name: str,
    chosen: Plan,
    regions: Mapping[str, RegionEntry],
    *,
    elastic: bool,
    deadline_s: float,
    since_s: float,
    user: str = "",
    spec: JobSpec | None = None,
) -> Gang:
    """Return the gang of a job that has not started, at the lowest speed of its plan's range.

    Args:
        spec: spec of a tuned job; None: the job is not tuned.
    """
    planned = planned_workers(chosen)
    ways = _ways(chosen, planned, regions, {}, elastic, tuned=spec is not None, promised=math.isfinite(deadline_s))
    if spec is not None:
        planned = begins_with(spec, chosen, assigned_regions(chosen, planned, regions, {}))
    return Gang(
        name,
        ways,
        chosen.rounds,
        deadline_s,
        wish=_index(ways, planned),
        fixed=not elastic,
        since_s=since_s,
        user=user,
    )


def gang_of(entry: JobEntry, watched: JobSpeeds, regions: Mapping[str, RegionEntry]) -> Gang | None:
    """Return the gang of a job; None if it needs no workers, since a user has paused it or its steps are done."""
    state = entry.state
    if state.phase == "queued":
        return gang_of_plan(
            entry.row.id,
            entry.plan,
            regions,
            elastic=may_scale(entry.spec, entry.plan),
            deadline_s=_deadline_s(entry),
            since_s=entry.row.created_at,
            user=entry.row.user,
            spec=entry.spec if is_tuned(entry.spec) else None,
        )
    held = {region: count for region, count in workers_now(entry).items() if count}
    if state.phase == "cancelling" and held:
        return Gang(
            entry.row.id,
            (_with_devices(held, 1.0, entry.plan, regions),),
            ENDING_SECONDS,
            held=0,
            fixed=True,
            since_s=entry.row.created_at,
            preemptible=on_preemptible(entry),
        )
    preempted = any(part.preempted for part in state.partitions)
    if state.phase in ("starting", "running") and (held or state.gave_way or preempted):
        return _running_gang(entry, watched, regions, held, preempted=preempted)
    return None


def _deadline_s(entry: JobEntry) -> float:
    return math.inf if entry.state.deadline_at is None else entry.state.deadline_at


def _running_gang(
    entry: JobEntry,
    watched: JobSpeeds,
    regions: Mapping[str, RegionEntry],
    held: dict[str, int],
    *,
    preempted: bool,
) -> Gang:
    """Return the gang of a job that runs with the workers ``held``, or may do so again."""
    state, chosen, deadline_s = entry.state, entry.plan, _deadline_s(entry)
    speeds = {part.region: speed for part in state.partitions if (speed := watched.speed(part.region)) is not None}
    if any(part.pipeline is not None for part in chosen.partitions):
        # The stages of a pipeline wait for each other, so that compute speed does not determine its pace.
        speeds = {}
    planned = planned_workers(chosen)
    # If some regions are done, or paused by hand, the others keep their workers.
    elastic = is_elastic(entry) and (len(held) in (0, len(planned)) or preempted)
    if preempted and elastic:
        # With workers left in only some regions, the job does not progress.
        held = {region: count for region, count in held.items() if len(held) == len(planned)}
    tuned, promised = is_tuned(entry.spec), math.isfinite(deadline_s)
    merges = merges_of(entry.state)
    ways = _ways(chosen, held or planned, regions, speeds, elastic, merges, tuned=tuned, promised=promised)
    return Gang(
        entry.row.id,
        ways,
        _rounds_left(entry, ways, deadline_s, elastic=elastic),
        deadline_s,
        held=next((index for index, way in enumerate(ways) if way.workers == held), -1),
        wish=_index(ways, watched.wanted or (first_workers(entry, regions) if tuned else planned)),
        fixed=not elastic,
        since_s=entry.row.created_at,
        user=entry.row.user,
        preemptible=on_preemptible(entry),
        value=_value(entry),
        insists=tuned,
    )


def _rounds_left(entry: JobEntry, ways: Sequence[AssignmentPace], deadline_s: float, *, elastic: bool) -> float:
    """Return the rounds for which a running job keeps its workers."""
    done = min((part.report.round for part in entry.state.partitions if part.report is not None), default=0)
    left = float(max(1, entry.plan.rounds - done))
    if may_scale(entry.spec, entry.plan) and not elastic and math.isinf(deadline_s):
        # It cannot be scaled while a region is unreachable, but it must not reserve its workers until its end.
        left = min(left, AWAY_SECONDS * ways[-1].rate)
    return left


def inputs_of(entry: JobEntry) -> tuple[object, ...]:
    """Return all that a job's gang depends on in the job, but for its progress, as objects that are replaced."""
    state = entry.state
    merges = merges_of(state)
    parts = ((p.workers, p.link, p.preempted, p.preemptible, merges.get(p.region)) for p in state.partitions)
    known = (entry.row, entry.spec, entry.plan, state.phase, state.gave_way, state.deadline_at)
    return (*known, *chain.from_iterable(parts))


def with_progress(gang: Gang, entry: JobEntry) -> Gang:
    """Return the gang that `gang_of` makes of a job, of which one with other progress is known."""
    if entry.state.phase not in ("starting", "running"):
        return gang
    left = _rounds_left(entry, gang.paces, gang.deadline_s, elastic=not gang.fixed)
    return gang if gang.work == left else replace(gang, work=left)


def first_workers(entry: JobEntry, regions: Mapping[str, RegionEntry]) -> dict[str, int]:
    """Return the workers of a tuned job before its tuner's first decision: its present ones, or those to start with."""
    now = workers_now(entry)
    if entry.state.phase == "running" and all(now.values()):
        return now
    return begins_with(entry.spec, entry.plan, assigned_regions(entry.plan, planned_workers(entry.plan), regions, {}))


def assigned_regions(
    chosen: Plan,
    workers: Mapping[str, int],
    regions: Mapping[str, RegionEntry],
    speeds: Mapping[str, float],
    merges: Mapping[str, float] | None = None,
) -> list[RunningRegion]:
    """Return a job's regions with their workers, prices and speeds, measured or else planned.

    All workers of a region count as free.

    Args:
        merges: measured seconds of a step's merge by region.
    """
    merges = merges or {}
    return [
        RunningRegion(
            region=part.region,
            workers=workers[part.region],
            free=max(workers[part.region], min(catalogue.capacity.workers, part.most_workers)),
            batch=math.ceil(part.step_samples - 1e-9),
            steps_per_round=part.steps_per_round,
            samples_per_second=speeds.get(part.region, part.samples_per_second) / part.largest_share,
            worker_usd_per_second=catalogue.prices.worker_usd_per_second(part.memory_mb, part.devices),
            usd_per_second=catalogue.prices.server_usd_per_hour / 3600,
            merge_seconds=merges.get(part.region) or part.merge_seconds or RunningRegion.merge_seconds,
        )
        for part in chosen.partitions
        if part.region in workers
        and (known := regions.get(part.region)) is not None
        and (catalogue := known.catalogue) is not None
        and catalogue.prices is not None
    ]


def _value(entry: JobEntry) -> float:
    """Return the value of the promised deadline: 1 for the first requested one, less for later soft deadlines."""
    created = utc_now(entry.row.created_at)
    for step in entry.spec.objective.soft:
        seconds = to_demand(entry.spec, entry.row.id, created, step.deadline).deadline_seconds
        if seconds is not None and abs(entry.row.created_at + seconds - (entry.state.deadline_at or 0.0)) < 1.0:
            return step.value
    return 1.0


def merges_of(state: JobState) -> dict[str, float]:
    """Return the reported seconds of a step's merge by region; regions without a report are left out."""
    return {
        p.region: p.report.speed.merge_seconds
        for p in state.partitions
        if p.report and p.report.speed.merge_seconds > 0
    }


def planned_workers(chosen: Plan) -> dict[str, int]:
    """Return the planned number of workers by region."""
    return {part.region: part.workers for part in chosen.partitions}


def _ways(
    chosen: Plan,
    workers: Mapping[str, int],
    regions: Mapping[str, RegionEntry],
    speeds: Mapping[str, float],
    elastic: bool,
    merges: Mapping[str, float] | None = None,
    *,
    tuned: bool = False,
    promised: bool = False,
) -> tuple[AssignmentPace, ...]:
    """Return the possible numbers of workers with their speeds in rounds/s; only `workers` if the job is not
    elastic."""
    assigned = assigned_regions(chosen, workers, regions, speeds, merges)
    if len(assigned) < len(workers):
        # A region is not known any more: assume the slowest speed of the plan.
        return (_with_devices(workers, chosen.rounds / chosen.estimate.seconds.high, chosen, regions),)
    if tuned and not elastic:
        batches = {part.region: part.batch for part in chosen.partitions}
        assigned = [replace(one, batch=batches[one.region] * one.workers) for one in assigned]
    if tuned and elastic:
        found = tuple((way.workers, way.rate) for way in tuned_paces(chosen, assigned, workers, promised=promised))
    elif elastic:
        found = paces(assigned, chosen.exchange_seconds, chosen.background)
    else:
        found = ((dict(workers), pace(assigned, chosen.exchange_seconds, chosen.background)),)
    caution = CAUTION
    if not speeds:
        planned = planned_workers(chosen)
        as_planned = workers == planned and not merges and not tuned
        if as_planned and not elastic:
            [(_, rate)] = found
        else:
            usual = assigned if as_planned else assigned_regions(chosen, planned, regions, {})
            rate = pace(usual, chosen.exchange_seconds, chosen.background)
        caution = max(1.0, chosen.estimate.seconds.high * rate / chosen.rounds)
    return tuple(_with_devices(ways, rate / caution, chosen, regions) for ways, rate in found)


def _with_devices(
    workers: Mapping[str, int], rate: float, chosen: Plan, regions: Mapping[str, RegionEntry]
) -> AssignmentPace:
    """Return a pace with the devices of its workers in regions that count them."""
    devices = {
        part.region: workers[part.region] * part.devices
        for part in chosen.partitions
        if part.region in workers
        and (known := regions.get(part.region)) is not None
        and known.catalogue is not None
        and known.catalogue.capacity.shared_devices is not None
    }
    return AssignmentPace(dict(workers), rate, devices)


def _index(ways: tuple[AssignmentPace, ...], wanted: Mapping[str, int]) -> int:
    """Return the index of the fastest pace with at most the wanted workers in each region; 0 if there is none."""
    within = [
        index
        for index, way in enumerate(ways)
        if all(count <= wanted.get(region, count) for region, count in way.workers.items())
    ]
    return max(within, default=0)
