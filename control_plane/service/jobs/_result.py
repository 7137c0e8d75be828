"""The result of an ended job, with predicted and measured figures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from control_plane.core import (
    Copy,
    JobState,
    Partition,
    Report,
    federated_histograms,
    federated_metrics,
    loss_of_round,
    models_of,
)
from control_plane.service.measuring._task_history import task_keys
from control_plane.spec import JobSpec, batch_of
from control_plane.store import JobRow, RunRow
from scheduler import (
    SLICE_ENDS,
    LinkTable,
    Plan,
    PlanEstimate,
    PlannedPartition,
    step_seconds,
    stood_still_seconds,
)
from scheduler.tuning import MergePoint
from sync.collective import collective_named, collectives
from sync.histograms import Histogram, quantile

_LEAST_BILLED = 0.9
"""Part of a training that must have been billed for what is billed besides to be known: while a region is away, as
after a kill, nothing is. A run without meters has billed nothing."""
_MOST_UNBILLED_SECONDS = 10.0
"""Most seconds of a training that need not have been billed: functions end before the job does, by the few seconds in
which the model and the last reports arrive. What is missing beyond that was not metered, and would be taken off later
jobs' bills, however short they are. A choice, not measured."""
_QUANTILES = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)
"""Quantiles of a histogram that a result states."""
_MOST_BINS_OF_REGIONS = 10_000
"""Most bins of the regions' own histograms in a result, which is one message; with more it has the sums alone."""


def result_of(row: JobRow, state: JobState, plan: Plan) -> dict[str, Any]:
    """Return the result of an ended job. The figures of each region are from its own meters."""
    reports = {part.region: part.report for part in state.partitions if part.report is not None}
    copies = {copy.source: copy.report for copy in state.copies if copy.report is not None}
    every = {**reports, **copies}
    money = [{"region": name, **asdict(charge)} for name, report in every.items() for charge in report.totals.money]
    usd = sum(item["usd"] for item in money)
    links = {
        f"{name}>{other}": count for name, report in every.items() for other, count in report.totals.sent_bytes.items()
    }
    histograms, left_out = federated_histograms(report.evaluation for report in reports.values())
    bins = sum(len(one.counts) for report in reports.values() for one in report.evaluation.histograms.values())
    shows = bins <= _MOST_BINS_OF_REGIONS
    seconds, queued = state.finished_at - row.created_at, _queued_seconds(row, state)
    planned = {part.region: part for part in plan.partitions}
    training = state.finished_at - state.started_at if state.started_at else 0.0
    return {
        "job": row.id,
        "name": row.name,
        "state": state.phase,
        "metrics": federated_metrics(report.evaluation for report in reports.values()),
        "histograms": _histograms(histograms),
        "histograms_left_out": left_out or None,
        "ended_early": state.ends_early or None,
        "steps": {name: report.step for name, report in reports.items()},
        "rounds": max((report.round for report in reports.values()), default=0),
        "seconds": seconds,
        "queued_seconds": queued,
        "training_seconds": training,
        "regions": [
            _region(part, planned.get(part.region), training, shows_histograms=shows) for part in state.partitions
        ],
        "wan_bytes": links,
        "shards": [_shard(copy) for copy in state.copies],
        "money": money,
        "usd": usd,
        "initial_model": asdict(state.initial_model) if state.initial_model else None,
        "model": _model(state),
        "models": [asdict(model) for model in models_of(state)],
        "successor": state.successor or None,
        "predicted": _predicted(plan.estimate),
        "measured": {"seconds": seconds - queued, "wan_bytes": sum(links.values()), "usd": usd},
        "digests": {
            "code": row.bundle_digest,
            "spec_and_code": row.content_digest,
            "model_parameters": state.model_digest,
        },
        "residency": plan.residency,
        "applied_updates": {name: report.exchange.applied_updates for name, report in reports.items()},
        "error": asdict(state.error) if state.error else None,
    }


def _queued_seconds(row: JobRow, state: JobState) -> float:
    # A job that never started was queued all the time.
    return (state.begun_at or (row.created_at if state.started_at else state.finished_at)) - row.created_at


def _predicted(estimate: PlanEstimate) -> dict[str, Any]:
    return {
        "seconds": asdict(estimate.seconds),
        "wan_bytes": asdict(estimate.wan_bytes),
        "usd": asdict(estimate.usd),
        "link_bytes": estimate.link_bytes,
        "basis": estimate.basis,
    }


def runs_of(
    row: JobRow, state: JobState, spec: JobSpec, plan: Plan, table: LinkTable | None = None
) -> tuple[RunRow, ...]:
    """Return the measurements of a task by a job that has succeeded; empty if it did not.

    ``table``: the links between its regions as the next plan takes them; empty: not known.
    """
    return runs_so_far(row, state, spec, plan, state.finished_at, table) if state.phase == "succeeded" else ()


def runs_so_far(
    row: JobRow, state: JobState, spec: JobSpec, plan: Plan, at: float, table: LinkTable | None = None
) -> tuple[RunRow, ...]:
    """Return the measurements of a task by a running or ended job, one for each region."""
    # With shards to copy, the start time says nothing about the next job's start.
    planned = {part.region: part for part in plan.partitions}
    begun_at, stepped_at = state.begun_at or row.created_at, _first_steps_at(state, batch_of(spec, plan), planned)
    start_seconds = 0.0 if state.copies else max(0.0, stepped_at - begun_at)
    told = _times_of(state, plan, stepped_at, table or {})
    return tuple(
        RunRow(
            job=row.id,
            region=part.region,
            task_key=row.task_key,
            at=at,
            # Workers with unequal parts do not tell what equal parts take.
            samples_per_second=0.0 if "ratio" in plan.merging else part.report.speed.samples_per_second,
            model_bytes=state.flat_bytes or state.blob_bytes,
            start_seconds=start_seconds,
            merge_json=_merge_of(part.report, planned.get(part.region), plan, state.flat_bytes or state.blob_bytes),
            kin_key=task_keys(spec, "")[1],
            batch=_batch_in(part.region, batch_of(spec, plan), planned),
            stage_pace=_stage_pace_of(part.report, planned.get(part.region)),
            start_function_seconds=functions,
            start_server_seconds=server,
            round_end_seconds=None if plan.background else told.standing,
            background_end_seconds=told.standing if plan.background else None,
            round_work_seconds=told.round_work,
            rest_seconds=told.rest,
            sent_share=_sent_share(state, plan),
        )
        for part in state.partitions
        if part.report is not None and part.report.speed.samples_per_second > 0
        for functions, server in [_billed_besides(part.report, planned.get(part.region), state, stepped_at)]
    )


def _billed_besides(
    report: Report, planned: PlannedPartition | None, state: JobState, stepped_at: float
) -> tuple[float | None, float | None]:
    """Return the seconds for which a worker and the parameter server were billed besides those from the first step to
    the job's end; None unless the job has ended, and the same workers ran all the time on data of their region."""
    if planned is None or state.copies or report.workers != planned.workers or not state.finished_at:
        return None, None
    charges, trained = report.totals.money, state.finished_at - stepped_at
    functions = sum(charge.quantity for charge in charges if charge.unit == "GB-s") * 1024 / planned.memory_mb
    served = sum(charge.quantity for charge in charges if charge.item == "parameter-server") * 3600
    each = functions / planned.workers
    if not min(each, served) > max(_LEAST_BILLED * trained, trained - _MOST_UNBILLED_SECONDS):
        return None, None
    return each - trained, served - trained


@dataclass(frozen=True)
class _Times:
    """What the phases of a training have told, in seconds; None: nothing."""

    standing: float | None = None
    """Of a round, for which workers stood still beyond what the cost model has."""
    round_work: float | None = None
    """Of a round, besides its steps and its end."""
    rest: float | None = None
    """From the end of the training to that of the job."""


def _times_of(state: JobState, plan: Plan, stepped_at: float, table: LinkTable) -> _Times:
    """Return what the region that has waited least for others tells; nothing of stages, which are profiled.

    What a single worker's steps take besides compute is not in its steps: plans have no merge for it. What an
    undisturbed training took in none of its phases counts to its rounds, unless it is longer than these: so is an
    outage.
    """
    told = [(one, one.time, one.round) for part in state.partitions if (one := part.report) and one.time and one.round]
    if not told or any(part.pipeline is not None for part in plan.partitions):
        return _Times()
    report, time, rounds = min(told, key=lambda one: one[1].wait / one[2])
    work, rest = time.evaluate + (time.merge if report.workers == 1 else 0.0), None
    if state.trained_at and _is_undisturbed(state, plan):
        phases = time.compute + time.merge + time.exchange + time.wait + time.evaluate
        besides = state.trained_at - stepped_at - phases - _phase_seconds(plan, SLICE_ENDS)
        work += besides if 0.0 < besides <= phases else 0.0
        ending = state.finished_at - state.trained_at
        rest = ending if state.publishes <= 1 and 0.0 <= ending <= phases else None
    predicted = _standing_as_planned(state, plan, table)
    standing = None if predicted is None else time.exchange / rounds - predicted
    return _Times(standing, work / rounds, rest)


def _is_undisturbed(state: JobState, plan: Plan) -> bool:
    """Whether all regions have trained from the begin to the end, with the planned workers."""
    workers = {part.region: part.workers for part in plan.partitions}
    return not (state.copies or state.left_out or state.successor) and all(
        part.report is not None
        and part.report.workers == workers.get(part.region)
        and (part.scale_order, part.epoch, part.preempted) == (0, 1, False)
        for part in state.partitions
    )


def _standing_as_planned(state: JobState, plan: Plan, table: LinkTable) -> float | None:
    """Return the seconds of a round for which workers stand still by the cost model; None: the links, or the size of
    the model, are not known."""
    model_bytes = state.flat_bytes or state.blob_bytes
    if not table or not model_bytes:
        return None
    # Later plans count with what has passed the filter, too.
    passed = replace(plan, sent_share=_sent_share(state, plan) or plan.sent_share)
    try:
        return stood_still_seconds(passed, table, model_bytes)
    except ValueError:
        # A path of the plan's is stated to be gone by now.
        return None


def _phase_seconds(plan: Plan, name: str) -> float:
    return sum(phase.seconds for phase in plan.estimate.phases if phase.name == name)


def _sent_share(state: JobState, plan: Plan) -> float | None:
    """Return the part of the updates that has passed the policy's filter, by the bytes of all regions; above 1 where
    most coordinates have, each with its number. None: the policy has none, or nothing was sent."""
    reports = [part.report for part in state.partitions if part.report is not None]
    rounds = max((report.round for report in reports), default=0)
    sent = sum(sum(report.totals.sent_bytes.values()) for report in reports)
    if not (plan.wan_settings.get("significance") and sent and rounds and plan.estimate.wan_bytes.expected):
        return None
    unfiltered = plan.estimate.wan_bytes.expected / plan.sent_share * rounds / plan.rounds
    return sent / unfiltered


def _batch_in(region: str, batch: int, planned: Mapping[str, PlannedPartition]) -> int:
    """Return the samples of one worker of a region in a step, of a job whose workers take or divide ``batch``."""
    return batch // planned[region].divided if region in planned else batch


def _first_steps_at(state: JobState, batch: int, planned: Mapping[str, PlannedPartition]) -> float:
    """Return when the last region began to train: its first report minus the time of the steps made by then."""
    last, batch = state.partition(state.stepped_region), _batch_in(state.stepped_region, batch, planned)
    if last is None or last.report is None or last.report.speed.samples_per_second <= 0 or not batch:
        return state.started_at
    speed = last.report.speed
    made_seconds = state.stepped_steps * (batch / speed.samples_per_second + speed.merge_seconds)
    return max(state.started_at, state.stepped_at - made_seconds)


def unpromised_worker_seconds(state: JobState, plan: Plan) -> float:
    """Return the metered worker seconds of a job without a promised deadline; 0 for a job with one."""
    if state.deadline_at is not None:
        return 0.0
    memory_gb = {part.region: part.memory_mb / 1024 for part in plan.partitions}
    return sum(
        charge.quantity / memory_gb[part.region]
        for part in state.partitions
        if part.report is not None and part.region in memory_gb
        for charge in part.report.totals.money
        if charge.unit == "GB-s"
    )


def _merge_of(report: Report, planned: PlannedPartition | None, plan: Plan, model_bytes: int) -> str:
    """Return the measured merge time as JSON; empty unless the same workers ran all the time, uncompressed."""
    collective, _, chunks = report.speed.merged_by.partition(" with K = ")
    plain = plan.merging_codec == "fp32" and not plan.merging.get("staleness")
    whole = planned is not None and planned.pipeline is None and report.workers == planned.workers
    if planned is None or not (whole and plain) or report.speed.merge_seconds <= 0:
        return ""
    if planned.workers < 2 or collective not in collectives():
        return ""
    point = MergePoint(
        collective=collective,
        workers=planned.workers,
        chunks=collective_named(collective).owners(planned.workers, int(chunks) if chunks else None),
        size_bytes=float(model_bytes),
        seconds=report.speed.merge_seconds,
        compute_seconds=planned.batch / report.speed.samples_per_second,
    )
    return json.dumps(asdict(point))


def _stage_pace_of(report: Report, planned: PlannedPartition | None) -> float:
    """Return the ratio of measured to profiled step time of a pipeline; 0 unless its planned workers ran."""
    if planned is None or planned.pipeline is None or report.workers != planned.workers:
        return 0.0
    return report.speed.step_seconds / (planned.pipeline.step_seconds / planned.pipeline.pace)


def _region(
    part: Partition, planned: PlannedPartition | None, training_seconds: float, *, shows_histograms: bool
) -> dict[str, Any]:
    report = part.report or Report(part.epoch, part.state)
    # Includes evaluations and restarts of invocations, but not the waits for other regions.
    own_seconds = max(0.0, training_seconds - report.speed.wait_seconds)
    measured_step_seconds = own_seconds / report.step if report.step else None
    if planned is not None and planned.pipeline is not None and report.speed.step_seconds > 0:
        # The end of a round of a large model takes as long as many steps, and is predicted separately.
        measured_step_seconds = report.speed.step_seconds
    return {
        "name": part.region,
        "epoch": part.epoch,
        "workers": report.workers or (planned.workers if planned is not None else 0),
        "predicted_step_seconds": step_seconds(planned) if planned is not None else None,
        "step_seconds": measured_step_seconds,
        "merge_seconds": report.speed.merge_seconds,
        "samples": report.samples,
        "steps": report.step,
        "rounds": report.round,
        "samples_per_second": report.speed.samples_per_second,
        "compute_seconds": report.speed.compute_seconds,
        "wait_seconds": report.speed.wait_seconds,
        "loss": loss_of_round(report),
        "metrics": report.evaluation.metrics,
        "metrics_samples": report.evaluation.samples,
        "histograms": _histograms(report.evaluation.histograms) if shows_histograms else {},
        "applied_updates": report.exchange.applied_updates,
        "usd": report.totals.usd,
        "privacy": asdict(report.privacy) if report.privacy is not None else None,
        "data": report.data,
    }


def _histograms(histograms: Mapping[str, Histogram]) -> dict[str, dict[str, Any]]:
    """Return histograms as in a result, those of numbers with quantiles."""
    return {
        name: {
            **asdict(one),
            "total": one.total,
            "quantiles": {f"{part:g}": quantile(one, part) for part in _QUANTILES} if one.edges else {},
        }
        for name, one in histograms.items()
    }


def _shard(copy: Copy) -> dict[str, Any]:
    """Return the result of a shard that another region processed."""
    report = copy.report or Report(copy.epoch, copy.state)
    return {
        "source": copy.source,
        "destination": copy.destination,
        "bytes": copy.bytes,
        "sent_bytes": report.totals.sent_bytes.get(copy.destination, 0),
        "usd": report.totals.usd,
    }


def _model(state: JobState) -> dict[str, Any] | None:
    if not state.blob_digest:
        return None
    return {"digest": state.blob_digest, "bytes": state.blob_bytes, "format": "safetensors"}
