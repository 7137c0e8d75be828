"""Convert the federation's state to the scheduler's snapshot, and the scheduler's answer to the user's."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from control_plane.core import Copy, Goal, InitialModel, JobState, Keep, Partition
from control_plane.service.measuring._task_history import (
    TaskHistory,
    fixed_shares_of,
    gpu_bytes_of,
    gpu_lacks_of,
    merges_of,
    probed_speeds,
    speeds_of,
    stage_paces_of,
    starts_of,
)
from control_plane.service.planning._required_features import most_left_out
from control_plane.service.planning._tuning import profiles_of
from control_plane.service.rpc._wire import to_json
from control_plane.service.state._entries import JobEntry, RegionEntry
from control_plane.spec import MOST_KEPT, JobSpec
from control_plane.store import RunRow
from geofed_pb.errors import GeofedError
from scheduler import Declined, Plan, Snapshot

_TELLING_RUNS = 5
"""Newest runs of which the median counts for what rounds and ends take: in one of them the machines may have been busy,
or a region away."""


def snapshot_of(
    regions: Iterable[RegionEntry], jobs: Iterable[JobEntry], history: TaskHistory, batch: int = 0
) -> Snapshot:
    """Return the scheduler's view of the federation, with all measurements of a task at a batch.

    A region that is unreachable but whose lease has not expired counts as live; one that takes no new jobs as absent.
    """
    live, absent = [], []
    for entry in regions:
        if entry.state.takes_new_jobs and (planned := entry.planned) is not None:
            live.append(planned)
        else:
            absent.append(entry.row.name)
    busy, devices = _held(jobs)
    runs, weight = history.runs, history.weight
    profiles = profiles_of(runs)
    speeds, guessed = speeds_of(runs, batch, profiles, weight)
    # A count by an agent is of this code's model; runs of other versions of the code may have another size.
    counted = weight is not None and not history.of_own_code(weight.task_key)
    ran_bytes = next((run.model_bytes for run in runs if run.model_bytes), None)
    ran = {run.region for run in runs if not run.profile_json and run.samples_per_second > 0}
    # A start that a run has measured counts more than a profile's.
    started = min((run for run in runs if run.start_seconds > 0), key=lambda run: bool(run.profile_json), default=None)
    probed_start = weight.start_seconds if weight is not None and weight.start_seconds > 0 else None
    return Snapshot(
        regions=tuple(live),
        absent=tuple(sorted(absent)),
        busy_workers=busy,
        busy_devices=devices,
        speeds=speeds,
        other_batch=guessed,
        profiled=frozenset(speeds) - ran,
        model_bytes=weight.model_bytes if counted and weight is not None else ran_bytes,
        held_bytes=(weight.held_bytes or None) if weight is not None else None,
        counted=counted,
        start_seconds=probed_start if started is None else started.start_seconds,
        start_probed=started is None,
        start_of_run=started is not None and not started.profile_json,
        probed=probed_speeds(weight, batch),
        fixed_shares=fixed_shares_of((region.name for region in live), runs, batch, profiles, weight),
        normalises_by_batches=weight is not None and weight.batch_norms_json != "[]",
        gpu_bytes=gpu_bytes_of(weight),
        gpu_lacks=gpu_lacks_of(weight),
        profiles=profiles,
        started=starts_of(runs),
        round_end_seconds=_told(runs, "round_end_seconds"),
        background_end_seconds=_told(runs, "background_end_seconds"),
        rest_seconds=_told(runs, "rest_seconds") or 0.0,
        round_work_seconds=_told(runs, "round_work_seconds") or 0.0,
        sent_share=next((run.sent_share for run in runs if run.sent_share), None),
        merges={region: merges_of(runs, region) for region in {run.region for run in runs}},
        stage_paces=stage_paces_of(runs),
    )


def _held(jobs: Iterable[JobEntry]) -> tuple[dict[str, int], dict[str, int]]:
    """Return the regular workers of active jobs by region, and their devices."""
    workers: dict[str, int] = {}
    devices: dict[str, int] = {}
    for job in jobs:
        if not job.state.terminal:
            has = lasting_workers_now(job)
            for total, part in ((workers, has), (devices, devices_held(job.plan, has))):
                for region, count in part.items():
                    total[region] = total.get(region, 0) + count
    return workers, devices


def _told(runs: Iterable[RunRow], field: str) -> float | None:
    """Return the median of a field over the newest runs that tell it; None: none does."""
    told = {run.job: value for run in runs if (value := getattr(run, field)) is not None}
    return statistics.median(list(told.values())[:_TELLING_RUNS]) if told else None


def workers_now(job: JobEntry) -> dict[str, int]:
    """Return the workers of a job by region, as last commanded; empty for a queued job."""
    if job.state.phase == "queued":
        return {}
    asked = {part.region: part.workers for part in job.state.partitions if part.workers is not None}
    return {part.region: part.workers for part in job.plan.partitions} | asked


def devices_held(chosen: Plan, workers: Mapping[str, int]) -> dict[str, int]:
    """Return the devices that so many workers of a plan hold, by region; regions without devices are left out."""
    each = {part.region: part.devices for part in chosen.partitions}
    return {region: count * each[region] for region, count in workers.items() if each.get(region)}


def on_preemptible(job: JobEntry) -> bool:
    """Whether a job runs on preemptible workers."""
    return job.state.phase != "queued" and any(part.preemptible for part in job.state.partitions)


def lasting_workers_now(job: JobEntry) -> dict[str, int]:
    """Return the regular workers of a job by region; empty for a job on preemptible ones."""
    return {} if on_preemptible(job) else workers_now(job)


def plan_json(
    answer: Plan | Declined,
    waits_for: str = "",
    warnings: Sequence[str] = (),
    initial_model: InitialModel | None = None,
    promise: dict[str, Any] | None = None,
) -> str:
    """Return the scheduler's answer as JSON, with what the job waits for, all warnings, the model to start from, and
    what is promised."""
    own = answer.warnings if isinstance(answer, Plan) else ()
    more: dict[str, Any] = {"waits_for": waits_for, "warnings": [*own, *warnings]}
    more["promise"] = promise
    more["initial_model"] = asdict(initial_model) if initial_model is not None else None
    return to_json(asdict(answer) | {name: value for name, value in more.items() if value})


def declined_error(declined: Declined) -> GeofedError:
    """Return one error for all reasons, with their common code, else INADMISSIBLE."""
    codes = {reason.code for reason in declined.reasons}
    code = codes.pop() if len(codes) == 1 else "INADMISSIBLE"
    message = "; ".join(reason.text for reason in declined.reasons)
    return GeofedError(code, message, hint="; ".join(dict.fromkeys(reason.remedy for reason in declined.reasons)))


def first_state(
    job: str,
    at: float,
    spec: JobSpec,
    plan: Plan,
    regions: dict[str, RegionEntry],
    deadline_at: float | None,
    initial_model: InitialModel | None = None,
) -> JobState:
    """Return the state of a new job, queued."""
    parts = [Partition(part.region) for part in plan.partitions]
    return JobState(
        job=job,
        deadline_at=deadline_at,
        goal=goal_of(spec),
        evaluate_every=spec.train.evaluate_every,
        keep=keep_of(spec),
        patience=spec.train.end.patience or 0,
        time_limit_seconds=spec.train.end.time.total_seconds() if spec.train.end.time is not None else None,
        budget_usd=spec.objective.budget,
        lost_limit_seconds=spec.limits.lost_region.total_seconds(),
        created_at=at,
        exact=not plan.background,
        continues=spec.regions.lost == "continue",
        most_left_out=most_left_out(spec, plan, regions),
        initial_model=initial_model,
        copies=tuple(
            Copy(
                copy.source,
                copy.destination,
                copy.bytes,
                link="unreachable" if regions[copy.source].state.phase != "live" else "live",
                since=at,
            )
            for copy in plan.copies
        ),
        partitions=tuple(
            replace(part, since=at, link="unreachable" if regions[part.region].state.phase != "live" else "live")
            for part in parts
        ),
    )


def goal_of(spec: JobSpec) -> Goal | None:
    """Return the goal of a job's file; None: the job runs to its planned end."""
    wanted = spec.train.end.goal
    if wanted is None:
        return None
    at_least, at_most = wanted.at_least, wanted.at_most
    bound = at_least if at_least is not None else at_most
    return Goal(wanted.metric, bound or 0.0, at_least is not None, spec.train.evaluate_every)


def keep_of(spec: JobSpec) -> Keep:
    """Return which models of a job's rounds are kept, and what makes one the best."""
    train, best = spec.train, spec.train.compared
    models = {"last": 1, "best": 1, "all": MOST_KEPT}.get(str(train.keep), train.keep)
    return Keep(int(models), train.keep == "best", best.metric, best.mode == "max")
