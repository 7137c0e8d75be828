"""The result of an ended job, with predicted and measured figures."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from control_plane.core import Copy, JobState, Partition, Report, federated_metrics, loss_of_round, models_of
from control_plane.service.measuring._known import task_keys
from control_plane.spec import JobSpec
from control_plane.store import JobRow, RunRow
from scheduler import Plan, PlannedPartition, step_seconds
from scheduler.tuning import MergePoint
from sync.collective import collective_named, collectives


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
    seconds = state.finished_at - row.created_at
    # A job that never started was queued all the time.
    queued = (state.begun_at or (row.created_at if state.started_at else state.finished_at)) - row.created_at
    expected = plan.estimate
    planned = {part.region: part for part in plan.partitions}
    training = state.finished_at - state.started_at if state.started_at else 0.0
    return {
        "job": row.id,
        "name": row.name,
        "state": state.phase,
        "metrics": federated_metrics(report.evaluation for report in reports.values()),
        "ended_early": state.ends_early or None,
        "steps": {name: report.step for name, report in reports.items()},
        "rounds": max((report.round for report in reports.values()), default=0),
        "seconds": seconds,
        "queued_seconds": queued,
        "training_seconds": training,
        "regions": [_region(part, planned.get(part.region), training) for part in state.partitions],
        "wan_bytes": links,
        "shards": [_shard(copy) for copy in state.copies],
        "money": money,
        "usd": usd,
        "initial_model": asdict(state.initial_model) if state.initial_model else None,
        "model": _model(state),
        "models": [asdict(model) for model in models_of(state)],
        "successor": state.successor or None,
        "predicted": {
            "seconds": asdict(expected.seconds),
            "wan_bytes": asdict(expected.wan_bytes),
            "usd": asdict(expected.usd),
            "link_bytes": expected.link_bytes,
            "basis": expected.basis,
        },
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


def runs_of(row: JobRow, state: JobState, spec: JobSpec, plan: Plan) -> tuple[RunRow, ...]:
    """Return the measurements of a task by a job that has succeeded; empty if it did not."""
    return runs_so_far(row, state, spec, plan, state.finished_at) if state.phase == "succeeded" else ()


def runs_so_far(row: JobRow, state: JobState, spec: JobSpec, plan: Plan, at: float) -> tuple[RunRow, ...]:
    """Return the measurements of a task by a running or ended job, one for each region."""
    # With shards to copy, the start time says nothing about the next job's start.
    start_seconds = 0.0 if state.copies else max(0.0, _first_steps_at(state, spec) - (state.begun_at or row.created_at))
    planned = {part.region: part for part in plan.partitions}
    return tuple(
        RunRow(
            job=row.id,
            region=part.region,
            task_key=row.task_key,
            at=at,
            samples_per_second=part.report.speed.samples_per_second,
            model_bytes=state.flat_bytes or state.blob_bytes,
            start_seconds=start_seconds,
            merge_json=_merge_of(part.report, planned.get(part.region), plan, state.flat_bytes or state.blob_bytes),
            kin_key=task_keys(spec, "")[1],
            batch=spec.train.batch,
            stage_pace=_stage_pace_of(part.report, planned.get(part.region)),
        )
        for part in state.partitions
        if part.report is not None and part.report.speed.samples_per_second > 0
    )


def _first_steps_at(state: JobState, spec: JobSpec) -> float:
    """Return when the last region began to train: its first report minus the time of the steps made by then."""
    last = state.partition(state.stepped_region)
    if last is None or last.report is None or last.report.speed.samples_per_second <= 0 or not spec.train.batch:
        # Jobs started under an older version lack these fields.
        return state.started_at
    made_seconds = state.stepped_steps * spec.train.batch / last.report.speed.samples_per_second
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
    if planned.workers < 2 or collective not in collectives(lambda method: method.predictable):
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


def _region(part: Partition, planned: PlannedPartition | None, training_seconds: float) -> dict[str, Any]:
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
        "applied_updates": report.exchange.applied_updates,
        "usd": report.totals.usd,
        "privacy": asdict(report.privacy) if report.privacy is not None else None,
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
