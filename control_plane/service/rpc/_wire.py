"""Convert between protobuf messages and the types of `control_plane.core` and the store."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from itertools import islice
from typing import Any, TypeVar

from google.protobuf.json_format import Parse

from control_plane._finite import finite
from control_plane.core import (
    ENDED_PARTITION,
    Charge,
    Copy,
    Evaluation,
    Failure,
    JobAction,
    JobState,
    LinkReport,
    Logged,
    MeterTotals,
    Partition,
    PrivacySpent,
    Record,
    RegionState,
    Report,
    ResourceUsage,
    RoundTime,
    SendKeep,
    SendPeers,
    SendPublish,
    SendScale,
    SendShard,
    SendStart,
    Speed,
    Uploaded,
    WanExchange,
    best_model,
    condition_of,
    models_of,
    wan_links,
)
from control_plane.service.planning._scaling import batch_with
from control_plane.spec import JobSpec
from control_plane.store import EventRow, JobRow, LogRow
from geofed_pb.bounds import (
    LOG_LINE_BYTES,
    LOGGED_NAME_BYTES,
    MOST_LOGGED,
    NAME_BYTES,
    bounded_metrics,
    clean,
)
from geofed_pb.errors import CATALOGUE
from geofed_pb.tracing import partition_key, traceparent
from geofed_pb.user_code.recording import RESERVED
from geofed_pb.v1 import agent_pb2, common_pb2, control_pb2
from scheduler import PipelineShape, Plan, PlannedPartition
from sync.histograms import from_messages
from sync.policy import policy_named
from sync.robust import QUARANTINE_ROUNDS, SUSPECT_ROUNDS

_MAX_NAMES = 5000
"""Limit of the entries by region in a report; more than a federation has regions."""
_MOST_SECONDS = 1e9
"""Longest time of a job's rounds that is possible: 30 years."""
_MOST_SPLITS = 100
"""Limit of a dataset's splits in a report; most have two."""
_DATA_DIGEST = re.compile(r"(hmac-)?sha256(-etags)?:[0-9a-f]{64}")
_Number = TypeVar("_Number", int, float)


def report_of(message: agent_pb2.PartitionReport) -> Report:
    """Convert a partition report from its message."""
    return Report(
        epoch=message.epoch,
        state=clean(message.state, NAME_BYTES),
        condition=clean(message.condition),
        ps_address=clean(message.ps_address, NAME_BYTES),
        ps_signs=message.ps_signs,
        round=message.round,
        step=message.step,
        samples=message.samples,
        loss=message.loss,
        round_loss=message.round_loss if message.HasField("round_loss") else None,
        model_digest=message.model_digest,
        blob_digest=message.blob_digest,
        error=failure_of(message.error) if message.HasField("error") else None,
        workers=message.workers,
        attempt=message.attempt,
        preempted=message.preempted,
        scale_order=message.scale_order,
        shard_address=message.shard_address,
        shards_here=message.shards_here,
        meter=message.meter,
        totals=_totals_of(message.totals),
        evaluation=_evaluation_of(message.evaluation),
        speed=_speed_of(message.speed),
        exchange=_exchange_of(message.exchange),
        links={
            clean(name, NAME_BYTES): LinkReport(link.rtt_ms, link.mbps, link.streams, link.down)
            for name, link in islice(message.links.items(), _MAX_NAMES)
        },
        keeps_models=message.keeps_models,
        kept=Uploaded(message.kept.round, message.kept.blob_digest, clean(message.kept.error)),
        logged=_logged_of(message.logged),
        usage=_usage_of(message.usage),
        time=_time_of(message.time) if message.HasField("time") else None,
        privacy=_privacy_of(message.privacy) if message.HasField("privacy") else None,
        data=_data_of(message.data),
    )


def _data_of(digests: Mapping[str, str]) -> dict[str, str]:
    told = islice(digests.items(), _MOST_SPLITS)
    return {clean(split, NAME_BYTES): digest for split, digest in told if _DATA_DIGEST.fullmatch(digest)}


def _privacy_of(message: agent_pb2.Privacy) -> PrivacySpent:
    numbers = (message.epsilon, message.delta)
    epsilon, delta = (number if math.isfinite(number) else 0.0 for number in numbers)
    return PrivacySpent(epsilon, delta, message.releases)


def _logged_of(message: common_pb2.Logged) -> Logged:
    values = {
        clean(name, LOGGED_NAME_BYTES): value
        for name, value in islice(message.values.items(), MOST_LOGGED)
        if math.isfinite(value) and name not in RESERVED
    }
    return Logged(message.round, values)


def _usage_of(message: common_pb2.Usage) -> ResourceUsage:
    cores = message.cpu_cores if math.isfinite(message.cpu_cores) else 0.0
    return ResourceUsage(cores, message.memory_bytes, message.gpu_memory_bytes)


def _time_of(message: common_pb2.RoundTime) -> RoundTime | None:
    """Convert the times of rounds; None if one is not possible."""
    times = message.compute, message.merge, message.exchange, message.wait, message.evaluate
    return RoundTime(*times) if all(0 <= seconds <= _MOST_SECONDS for seconds in times) else None


def _evaluation_of(message: agent_pb2.Evaluation) -> Evaluation:
    histograms, dropped = from_messages(message.histograms)
    return Evaluation(
        metrics=bounded_metrics(message.metrics)[0],
        samples=message.samples,
        round=message.round,
        error=clean(message.error or dropped),
        histograms=histograms,
    )


def _totals_of(message: agent_pb2.MeterTotals) -> MeterTotals:
    charges = (
        Charge(clean(m.item, NAME_BYTES), m.quantity, clean(m.unit, NAME_BYTES), m.usd, clean(m.source, NAME_BYTES))
        for m in message.money
    )
    return MeterTotals(tuple(charges), _by_region(message.sent_bytes), _by_region(message.received_bytes))


def _speed_of(message: agent_pb2.Speed) -> Speed:
    return Speed(
        samples_per_second=message.samples_per_second,
        round_samples_per_second=message.round_samples_per_second,
        step_seconds=message.step_seconds,
        merge_seconds=message.merge_seconds,
        compute_seconds=message.compute_seconds,
        wait_seconds=message.wait_seconds,
        merged_by=clean(message.merged_by, NAME_BYTES),
    )


def _exchange_of(message: agent_pb2.WanExchange) -> WanExchange:
    return WanExchange(
        applied_updates=message.applied_updates,
        staleness=_by_region(message.staleness),
        refused=_by_region(message.refused),
        interval=message.interval,
        codec=clean(message.codec, NAME_BYTES),
        update_bytes=message.update_bytes,
        routes=message.routes,
        suspicion=_by_region(message.suspicion),
    )


def _by_region(values: Mapping[str, _Number]) -> dict[str, _Number]:
    """Convert a map by region, with cleaned names and limited in size."""
    return {clean(name, NAME_BYTES): value for name, value in islice(values.items(), _MAX_NAMES)}


def failure_of(message: common_pb2.Error) -> Failure:
    """Convert an error from its message; an unknown code becomes INTERNAL."""
    code = message.code if message.code in CATALOGUE else "INTERNAL"
    return Failure(code, clean(message.message), clean(message.hint))


def error_message(failure: Failure) -> common_pb2.Error:
    """Convert a failure to its message."""
    entry = CATALOGUE[failure.code]
    return common_pb2.Error(
        code=failure.code, message=failure.message, hint=failure.hint or entry.hint, retryable=entry.retryable
    )


def command_of(
    action: JobAction, row: JobRow, spec: JobSpec, plan: Plan, known: Callable[[str], RegionState]
) -> agent_pb2.ToAgent:
    """Return the command for an action, without a sequence number. ``known`` returns a region's state."""
    if isinstance(action, Record):
        raise TypeError("a Record is not a command")
    if isinstance(action, SendStart):
        return agent_pb2.ToAgent(start=_start(action, row, spec, plan))
    if isinstance(action, SendPeers):
        return agent_pb2.ToAgent(peers=_peers(action, row, known))
    if isinstance(action, SendScale):
        batch, rate = batch_with(spec, plan, action.region, action.workers)
        wanted = agent_pb2.ScalePartition(
            job=row.id,
            epoch=action.epoch,
            workers=action.workers,
            reason=action.reason,
            batch=batch,
            learning_rate=rate,
            preemptible=action.preemptible,
            order=action.order,
        )
        return agent_pb2.ToAgent(scale=wanted)
    if isinstance(action, SendPublish):
        return agent_pb2.ToAgent(publish=agent_pb2.PublishModel(job=row.id, epoch=action.epoch))
    if isinstance(action, SendKeep):
        return agent_pb2.ToAgent(keep=agent_pb2.KeepModel(job=row.id, epoch=action.epoch, round=action.round))
    if isinstance(action, SendShard):
        order = agent_pb2.SendShard(
            job=row.id,
            epoch=action.epoch,
            dataset=spec.data.dataset,
            to=action.destination,
            address=action.address,
            seen=known(action.destination).address,
        )
        return agent_pb2.ToAgent(send_shard=order)
    stop = agent_pb2.StopPartition(job=row.id, epoch=action.epoch, reason=action.reason, discard=action.discard)
    return agent_pb2.ToAgent(stop=stop)


def submission_of(row: JobRow) -> common_pb2.Submission:
    """Return who submitted a job, with the signature if there is one."""
    if row.signature_json:
        return Parse(row.signature_json, common_pb2.Submission())
    return common_pb2.Submission(user=row.user or "operator")


def _local_steps(plan: Plan) -> dict[str, float]:
    """Return each region's local steps of a round; empty: the policy does not normalise by them."""
    if not policy_named(plan.wan_policy).normalises:
        return {}
    return {part.region: float(part.steps_per_round) for part in plan.partitions}


def _data_shares(plan: Plan) -> dict[str, float]:
    """Return each region's share of the data; empty: the policy does not normalise."""
    if not policy_named(plan.wan_policy).normalises:
        return {}
    samples = sum(part.samples for part in plan.partitions)
    return {part.region: part.samples / samples for part in plan.partitions}


def task_of(spec: JobSpec, bundle_digest: str, submission: common_pb2.Submission) -> agent_pb2.TaskRef:
    """Return what an agent needs to know of a job's task, whether it trains, probes or profiles it."""
    return agent_pb2.TaskRef(
        bundle_digest=bundle_digest,
        module=spec.task.module,
        config_json=json.dumps(spec.task.config),
        env=spec.task.env,
        requirements=spec.task.requirements or "",
        image=spec.task.image or "",
        secrets=spec.task.secrets,
        dataset=spec.data.dataset,
        precision=spec.train.precision,
        accumulate=spec.train.accumulate,
        compile=spec.train.compile,
        local=spec.train.local,
        submission=submission,
        clients=client_rounds(spec),
        evaluates_only=spec.evaluates_only,
        gpus=str(spec.function.gpus),
        sharding="" if spec.function.sharding == "none" else spec.function.sharding,
    )


def client_rounds(spec: JobSpec) -> agent_pb2.ClientRounds | None:
    """Return how the regions' clients train; None: samples belong to no clients."""
    wanted = spec.clients
    if wanted is None:
        return None
    return agent_pb2.ClientRounds(
        fraction=wanted.fraction,
        least=wanted.min,
        epochs=0 if wanted.steps else wanted.epochs or 1,
        steps=wanted.steps or 0,
        # A job with clients states its batch.
        batch=spec.train.probed_batch,
    )


def _peers(action: SendPeers, row: JobRow, known: Callable[[str], RegionState]) -> agent_pb2.Peers:
    peers = [
        agent_pb2.Peer(
            region=p.region,
            epoch=p.epoch,
            address=p.address,
            seen=known(p.region).address,
            unsigned=p.unsigned,
        )
        for p in action.peers
    ]
    return agent_pb2.Peers(
        job=row.id,
        epoch=action.epoch,
        peers=peers,
        routes=action.routes,
        neighbours=[agent_pb2.RegionPair(a=a, b=b) for a, b in action.neighbours],
        former=[agent_pb2.RegionPair(a=a, b=b) for a, b in action.former],
        finish=action.finish,
        halt=action.halt,
    )


def _start(action: SendStart, row: JobRow, spec: JobSpec, plan: Plan) -> agent_pb2.StartPartition:
    part = next(part for part in plan.partitions if part.region == action.region)
    # Whether there is a collector is for each process to know.
    traced = spec.tracking == "all" or "otlp" in spec.tracking
    task = task_of(spec, row.bundle_digest, submission_of(row))
    task.initial_model, task.initial_job, task.initial_holds = (
        action.initial_model, action.initial_job, action.initial_holds,
    )  # fmt: skip
    task.initial_uri, task.initial_adapter = action.initial_uri, action.initial_adapter
    task.keeps_base, task.clip_norm = True, spec.train.clip_norm or 0.0
    if (rate := _learning_rate(spec, part)) is not None:
        task.learning_rate.CopyFrom(rate)
    return agent_pb2.StartPartition(
        job=row.id,
        region=action.region,
        epoch=action.epoch,
        task=task,
        plan=_partition_plan(part, plan),
        traceparent=traceparent(row.id, partition_key(action.region), wanted=traced),
        regions=sorted(part.region for part in plan.partitions),
        resumed=action.resumed,
    )


def _partition_plan(part: PlannedPartition, plan: Plan) -> agent_pb2.PartitionPlan:
    return agent_pb2.PartitionPlan(
        workers=part.workers,
        batch=part.batch,
        steps_per_round=part.steps_per_round,
        rounds=plan.rounds,
        seed=plan.seed,
        memory_mb=part.memory_mb,
        slice_seconds=plan.slice_seconds,
        collective=plan.collective,
        channel=plan.channel,
        merging=plan.merging,
        merging_codec=plan.merging_codec,
        wan_policy=plan.wan_policy,
        wan_settings=plan.wan_settings,
        topology=plan.topology,
        neighbours=[agent_pb2.RegionPair(a=a, b=b) for a, b in plan.neighbours],
        shares=plan.shares,
        local_steps=_local_steps(plan),
        data_shares=_data_shares(plan),
        codec=plan.codec,
        evaluate_every=plan.evaluate_every,
        evaluation_batch=plan.evaluation_batch,
        pipeline=_pipeline(part.pipeline) if part.pipeline is not None else None,
        shards=_shards(part, plan),
    )


def _shards(part: PlannedPartition, plan: Plan) -> list[agent_pb2.ShardRef]:
    """Return the shards of a partition; empty if it trains on its region's own, as in older plans."""
    sizes = {copy.source: copy.bytes for copy in plan.copies}
    return [agent_pb2.ShardRef(region=region, bytes=sizes.get(region, 0)) for region in part.shards]


def _learning_rate(spec: JobSpec, part: PlannedPartition) -> agent_pb2.LearningRate | None:
    wanted = spec.train.learning_rate
    if wanted is None:
        return None
    # As where a tuner changes the batch (`learning_rate_factor`).
    scale = 0.0 if wanted.batch is None else math.sqrt(part.step_samples / wanted.batch)
    return agent_pb2.LearningRate(
        schedule=wanted.schedule, warmup=wanted.warmup, floor=wanted.floor, begin=wanted.begin, scale=scale
    )


def _pipeline(shape: PipelineShape) -> agent_pb2.Pipeline:
    return agent_pb2.Pipeline(
        stages=[
            agent_pb2.Stage(
                first_layer=stage.first,
                last_layer=stage.last,
                rematerialise=stage.rematerialise,
                memory_mb=stage.memory_mb,
            )
            for stage in shape.stages
        ],
        degree=shape.degree,
        micro_batch=shape.micro_batch,
        order=shape.order,
        activation_codec="" if shape.activation_codec == "fp32" else shape.activation_codec,
    )


def job_message(row: JobRow, state: JobState, plan: Plan, contact: Callable[[str], float]) -> control_pb2.Job:
    """Return a job's message for users; `contact` returns the last contact of a region, in Unix seconds."""
    workers = {part.region: part.workers for part in plan.partitions}
    suspicions = _suspicions(state, quarantine=bool(plan.wan_settings.get("quarantine", QUARANTINE_ROUNDS)))
    message = control_pb2.Job(
        id=row.id,
        name=row.name,
        state=state.phase,
        condition=condition_of(state),
        created_at=row.created_at,
        started_at=state.started_at,
        finished_at=state.finished_at,
        spec_json=row.spec_json,
        plan_json=row.plan_json,
        result_json=row.result_json,
        partitions=[
            _partition(
                part,
                contact(part.region),
                workers.get(part.region, 0),
                suspicions.get(part.region, ""),
                ended=state.terminal,
            )
            for part in state.partitions
        ],
        rounds=plan.rounds,
        links=[control_pb2.WanLink(**asdict(link)) for link in wan_links(state)],
        copies=[_copy(copy, ended=state.terminal) for copy in state.copies],
        deadline_at=state.deadline_at or 0.0,
        initial_model=control_pb2.InitialModel(**asdict(state.initial_model)) if state.initial_model else None,
        successor=state.successor,
        expected_seconds=plan.estimate.seconds.expected,
        models=_models(state),
    )
    if state.error is not None:
        message.error.CopyFrom(error_message(state.error))
    return message


def _models(state: JobState) -> list[control_pb2.KeptModel]:
    best = best_model(state)
    return [
        control_pb2.KeptModel(
            round=one.round, digest=one.digest, bytes=one.bytes, metrics=one.metrics, best=one == best
        )
        for one in models_of(state)
    ]


def _copy(copy: Copy, *, ended: bool) -> control_pb2.ShardCopy:
    report = copy.report or Report(copy.epoch, "")
    return control_pb2.ShardCopy(
        source=copy.source,
        destination=copy.destination,
        state=copy.state,
        condition="" if ended else f"region is {copy.link}" if copy.link != "live" else report.condition,
        bytes=copy.bytes,
        sent_bytes=report.totals.sent_bytes.get(copy.destination, 0),
        money=_money(report),
    )


def _state_at_end(part: Partition) -> str:
    """Return the state of a partition of an ended job, which trains no more whatever it has reported last."""
    if part.state in ENDED_PARTITION or part.report is None:
        return part.state
    return "lost" if part.link == "lost" else "stopping"


def _money(report: Report) -> list[common_pb2.Money]:
    return [
        common_pb2.Money(item=m.item, quantity=m.quantity, unit=m.unit, usd=m.usd, source=m.source)
        for m in report.totals.money
    ]


def _suspicions(state: JobState, *, quarantine: bool) -> dict[str, str]:
    """Return what is to be said of regions whose updates lie far from the others', by region: nothing where no
    ``quarantine`` follows.

    All regions judge alike, so the median of what they report is right while most of them are.
    """
    told = [part.report.exchange.suspicion for part in state.partitions if part.report is not None]
    if not (quarantine and told):
        return {}
    text = f"of the {SUSPECT_ROUNDS} rounds that lead to quarantine"
    found = {
        part.region: min(statistics.median_low(one.get(part.region, 0) for one in told), SUSPECT_ROUNDS)
        for part in state.partitions
    }
    return {
        region: f"its updates lay far from the others' in {rounds} {text}" for region, rounds in found.items() if rounds
    }


def _partition(
    part: Partition, last_contact: float, planned_workers: int, suspicion: str, *, ended: bool
) -> control_pb2.PartitionStatus:
    report = part.report or Report(part.epoch, "")
    away = "" if part.link == "live" else f"region is {part.link}"
    return control_pb2.PartitionStatus(
        region=part.region,
        state=_state_at_end(part) if ended else part.state,
        epoch=part.epoch,
        round=report.round,
        step=report.step,
        samples=report.samples,
        loss=report.loss,
        # Before the first report, the planned number.
        workers=report.workers if report.attempt else planned_workers,
        # Nothing of an ended job waits.
        condition="" if ended else away or report.condition or suspicion,
        metrics=report.evaluation.metrics,
        sent_bytes=report.totals.sent_bytes,
        money=_money(report),
        last_contact=last_contact,
        samples_per_second=report.speed.samples_per_second,
        preemptible=part.preemptible,
        usage=common_pb2.Usage(**asdict(report.usage)),
        logged=common_pb2.Logged(round=report.logged.round, values=report.logged.values),
        epsilon=report.privacy.epsilon if report.privacy is not None else None,
    )


def event_message(row: EventRow) -> control_pb2.Event:
    """Convert an event to its message."""
    return control_pb2.Event(
        cursor=row.cursor,
        at=row.at,
        job=row.job,
        region=row.region,
        kind=row.kind,
        text=row.text,
        data_json=row.data_json,
        terminal=row.terminal,
    )


def log_message(row: LogRow) -> control_pb2.LogLine:
    """Convert a log line to its message."""
    return control_pb2.LogLine(cursor=row.cursor, at=row.at, region=row.region, source=row.source, text=row.text)


def log_rows(region: str, records: Iterable[agent_pb2.LogRecord]) -> tuple[LogRow, ...]:
    """Convert a batch of log lines; lines that are too long are truncated."""
    return tuple(
        LogRow(r.at, clean(r.job, 64), region, clean(r.source, 64), clean(r.text, LOG_LINE_BYTES)) for r in records
    )


def to_json(value: Any) -> str:
    """Return strictly valid JSON: NaN and infinities become null."""
    return json.dumps(finite(value), allow_nan=False)
