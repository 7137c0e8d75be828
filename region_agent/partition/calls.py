"""Builds the inputs of a partition's processes: a worker's invocation, and the parameter server's configuration."""

from __future__ import annotations

import hmac
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from geofed_pb.bounds import clean
from geofed_pb.errors import GeofedError
from geofed_pb.rpc import region_name
from geofed_pb.v1 import agent_pb2
from region_agent.config import ServerConfig
from region_agent.link.identity import Identity
from region_agent.own_model import initial_own_model
from region_agent.partition.batches import BatchPlan
from region_agent.partition.events import Invoke, StartPs
from region_agent.partition.server.process import free_ports
from region_agent.privacy import is_private
from region_agent.state.store import PartitionRow
from region_agent.worker.invocation import (
    ClientRounds,
    Gpus,
    Invocation,
    Precision,
    PrivateSteps,
    Schedule,
    Sharding,
    Stretch,
)
from sync.collective import DEFAULT
from sync.policy import policy_named
from sync.ps.config import PsConfig
from sync.ps.tokens import WorkerIdentity, sign
from sync.wan import ExchangeSettings

__all__ = [
    "RegionInputs",
    "WorkerInputs",
    "at_once",
    "batches_of",
    "bundle_key",
    "client_rounds",
    "gpus_of",
    "initial_adapter_file",
    "initial_model_file",
    "invocation_of",
    "precision_of",
    "server_config_of",
    "sharding_of",
    "stretches_json",
    "whole_pipelines",
]

_PRECISION: TypeAdapter[Precision] = TypeAdapter(Precision)
_GPUS: TypeAdapter[Gpus] = TypeAdapter(Gpus)
_SHARDING: TypeAdapter[Sharding] = TypeAdapter(Sharding)
_STRETCHES = TypeAdapter(tuple[Stretch, ...])
_TOKEN_GRACE = timedelta(seconds=300)
"""Time for which a worker's token stays valid after the slice."""
_PART_ELEMENTS = 1 << 22
"""Elements in a part of a model that pipeline workers read in parts; 16 MiB in float32."""


@dataclass(frozen=True)
class RegionInputs:
    """Values of the region that all processes of a partition need."""

    identity: Identity
    server: ServerConfig
    row: Any
    """The partition's row in the agent's store."""
    channel: str
    """Kind of the channel."""
    channel_address: str
    """Address of the channel for the process."""


@dataclass(frozen=True)
class WorkerInputs(RegionInputs):
    """Values of the region that go into an invocation."""

    splits: Mapping[str, Any]
    streams: Mapping[str, Any]
    samples: int | None
    """Samples of the training split by the region's file; None if unknown."""
    clients: int | None
    """Clients of the training split by the region's file; None if unknown."""
    channel_costs: Mapping[str, float]
    server_address: str
    """Address of the parameter server for the worker."""
    packages: Path | None = None
    """Folder with the packages that the task requires."""
    billed_gpus: int = 0
    """GPUs that the region bills for the worker."""
    gpu_numbers: tuple[int, ...] = ()
    """Numbers of the machine's GPUs that the worker has; empty: the agent does not say."""
    sampling_rate: float = 1.0
    """With differential privacy of samples: probability with which each is in a step."""


def bundle_key(start: agent_pb2.StartPartition) -> str:
    """Return the channel key of the packed task folder."""
    return f"bundle/{start.task.bundle_digest.removeprefix('sha256:')}"


def initial_model_file(start: agent_pb2.StartPartition, folder: Path) -> Path | None:
    """Return the file of the model that the job begins with; None: the task creates the model."""
    return _model_file(start.task.initial_model, folder)


def initial_adapter_file(start: agent_pb2.StartPartition, folder: Path) -> Path | None:
    """Return the file whose tensors replace those of `initial_model_file`; None: there is none."""
    return _model_file(start.task.initial_adapter, folder)


def _model_file(digest: str, folder: Path) -> Path | None:
    return folder / f"initial-{digest.removeprefix('sha256:')}.safetensors" if digest else None


def batches_of(plan: agent_pb2.PartitionPlan, row: PartitionRow) -> BatchPlan:
    """Restore the batch sizes of the steps, and the last request for another one, from the store."""
    wanted = None if row.batch is None else (row.batch, row.rate or 1.0)
    return BatchPlan(plan.steps_per_round, _region_batch(plan), _STRETCHES.validate_json(row.stretches), wanted)


def _region_batch(plan: agent_pb2.PartitionPlan) -> int:
    """Return the planned samples of a step of all workers: a pipeline's stages compute on the same ones."""
    return plan.batch * (plan.pipeline.degree if plan.HasField("pipeline") else plan.workers)


def stretches_json(stretches: tuple[Stretch, ...]) -> str:
    """Serialise stretches for the store."""
    return _STRETCHES.dump_json(stretches).decode()


def whole_pipelines(plan: agent_pb2.PartitionPlan, workers: int) -> int:
    """Round a number of workers down to whole pipelines, but at least one; 0 stays 0, which is a pause."""
    stages = len(plan.pipeline.stages) or 1
    return max(stages, workers - workers % stages) if workers else 0


def _schedule(rate: agent_pb2.LearningRate) -> Schedule:
    fields = {
        "shape": rate.schedule, "warmup": rate.warmup, "floor": rate.floor, "begin": rate.begin,
        "scale": rate.scale or 1.0,
    }  # fmt: skip
    try:
        return Schedule.model_validate(fields)
    except ValidationError:
        text = f"unknown learning-rate schedule {rate.schedule!r}"
        raise GeofedError("CONFIG_INVALID", text, hint="the control plane is newer: update this agent") from None


def at_once(batch: int, task: agent_pb2.TaskRef) -> int:
    """Return the largest number of samples in one pass of a step, with `train.accumulate`."""
    return -(-batch // max(1, task.accumulate))


def precision_of(task: agent_pb2.TaskRef) -> Precision:
    """Return the precision of the passes. Raises ``GeofedError("CONFIG_INVALID")`` for one that is not known here."""
    try:
        return _PRECISION.validate_python(task.precision or "fp32")
    except ValidationError:
        text = f"unknown precision {task.precision!r}"
        raise GeofedError("CONFIG_INVALID", text, hint="the control plane is newer: update this agent") from None


def gpus_of(task: agent_pb2.TaskRef) -> Gpus:
    """Return the GPUs of a worker. Raises ``GeofedError("CONFIG_INVALID")`` for what is no such number."""
    try:
        return _GPUS.validate_python(task.gpus if task.gpus == "auto" else int(task.gpus or 1))
    except ValueError:
        raise GeofedError("CONFIG_INVALID", f"{clean(task.gpus)!r} is no number of GPUs") from None


def sharding_of(task: agent_pb2.TaskRef) -> Sharding:
    """Return how a worker's devices divide the model. Raises ``GeofedError("CONFIG_INVALID")`` for a way that is not
    known here."""
    try:
        return _SHARDING.validate_python(task.sharding or "none")
    except ValidationError:
        text = f"unknown sharding {clean(task.sharding)!r}"
        raise GeofedError("CONFIG_INVALID", text, hint="the control plane is newer: update this agent") from None


def _proximal(plan: agent_pb2.PartitionPlan) -> float:
    """Return the weight of the workers' proximal term; 0: the policy has none."""
    policy = policy_named(plan.wan_policy)
    return {**policy.settings, **plan.wan_settings}[policy.proximal] if policy.proximal else 0.0


def invocation_of(start: agent_pb2.StartPartition, action: Invoke, inputs: WorkerInputs) -> Invocation:
    """Build the body of one call of a worker."""
    plan, task = start.plan, start.task
    identity = WorkerIdentity(start.job, start.region, action.worker, action.attempt, action.workers)
    life = timedelta(seconds=plan.slice_seconds) + _TOKEN_GRACE
    return Invocation(
        job=start.job,
        region=start.region,
        worker=action.worker,
        workers=action.workers,
        attempt=action.attempt,
        token=sign(identity, inputs.row.token_key, life),
        ps_address=inputs.server_address,
        ps_name=region_name(start.region),
        ca_pem=inputs.identity.ca_file.read_text(),
        channel=inputs.channel,
        channel_address=inputs.channel_address,
        bundle_key=bundle_key(start),
        module=task.module,
        config=json.loads(task.config_json or "{}"),
        env=dict(task.env),
        packages=str(inputs.packages or ""),
        splits=dict(inputs.splits),
        streams=dict(inputs.streams),
        declared_samples=inputs.samples,
        region_batch=_region_batch(plan),
        stretches=action.stretches,
        batch=at_once(task.clients.batch or plan.batch, task),
        evaluation_batch=plan.evaluation_batch,
        steps_per_round=plan.steps_per_round,
        rounds=plan.rounds,
        seed=plan.seed,
        **_training_fields(task),
        billed_gpus=inputs.billed_gpus,
        gpu_numbers=inputs.gpu_numbers,
        proximal=_proximal(plan),
        slice_seconds=plan.slice_seconds,
        resume_key=action.resume_key,
        collective=plan.collective or DEFAULT,
        merging=dict(plan.merging),
        merging_codec=plan.merging_codec or "fp32",
        channel_costs=dict(inputs.channel_costs),
        **_pipeline_fields(plan.pipeline, action.workers),
        private=_private_steps(start, inputs),
        clients=client_rounds(task, inputs.clients),
        keeps_base=task.keeps_base,
        base_given=bool(task.initial_model) and _holds(task) != "some",
    )


def _training_fields(task: agent_pb2.TaskRef) -> dict[str, Any]:
    """Return what an invocation says of how a worker trains, as the job file states it."""
    return {
        "schedule": _schedule(task.learning_rate) if task.HasField("learning_rate") else None,
        "clip_norm": task.clip_norm,
        "precision": precision_of(task),
        "compile": task.compile,
        "gpus": gpus_of(task),
        "sharding": sharding_of(task),
        "evaluates_only": task.evaluates_only,
        "local": tuple(task.local),
    }


def _pipeline_fields(pipeline: agent_pb2.Pipeline, workers: int) -> dict[str, Any]:
    """Return what an invocation says of the pipeline; without one, all workers have the whole model."""
    return {
        "stages": tuple((stage.first_layer, stage.last_layer) for stage in pipeline.stages),
        "degree": workers // len(pipeline.stages) if pipeline.stages else 1,
        "micro_batch": pipeline.micro_batch or 1,
        "order": "gpipe" if pipeline.order == "gpipe" else "1f1b",
        "rematerialise": tuple(stage.rematerialise for stage in pipeline.stages),
        "activation_codec": "bf16" if pipeline.activation_codec == "bf16" else "fp32",
    }


def _private_steps(start: agent_pb2.StartPartition, inputs: WorkerInputs) -> PrivateSteps | None:
    """Return how the workers' steps are private; None: they are not.

    Samples are drawn by a key that follows from the region's own secret of the job, so that a step which is made again
    has the same ones.
    """
    settings, _ = ExchangeSettings.of(start.plan.wan_settings)
    if not (settings.noise and settings.sampled):
        return None
    key = hmac.new(bytes.fromhex(inputs.row.token_key), b"samples of private steps", "sha256").hexdigest()
    return PrivateSteps(clip=settings.clip, noise=settings.noise, rate=inputs.sampling_rate, key=key)


def client_rounds(task: agent_pb2.TaskRef, stated: int | None) -> ClientRounds | None:
    """Return how the region's clients train; None: the job has none. ``stated``: clients of the training split by the
    region's file; None: not known.

    Raises ``GeofedError("CONFIG_INVALID")`` for numbers that cannot be used.
    """
    if not task.HasField("clients"):
        return None
    told = task.clients
    try:
        return ClientRounds(
            fraction=told.fraction, least=told.least or 1, epochs=told.epochs, steps=told.steps, batch=told.batch,
            stated=stated or 0,
        )  # fmt: skip
    except ValidationError as error:
        raise GeofedError("CONFIG_INVALID", f"the plan of the job's clients: {error.errors()[0]['msg']}") from None


def _holds(task: agent_pb2.TaskRef) -> Literal["", "all", "some"]:
    """Return what a user's file has of the model; "": the job begins with another job's model, or the task's own."""
    return "some" if task.initial_holds == "some" else "all" if task.initial_holds else ""


def _weights_of(start: agent_pb2.StartPartition) -> dict[str, Any]:
    """Return the parameter server's settings of what each region's updates weigh."""
    plan = start.plan
    return {
        "shares": dict(plan.shares),
        "local_steps": dict(plan.local_steps),
        "data_shares": dict(plan.data_shares),
        "weighs_by_shares": start.task.HasField("clients"),
        "round_samples": _round_samples(start),
    }


def _round_samples(start: agent_pb2.StartPartition) -> dict[str, float]:
    """Return the planned samples of one round of every region of the job; the plan states those of this one, and each
    region's share of all."""
    plan = start.plan
    own = plan.shares.get(start.region, 0.0)
    # Where regions weigh by their shares, the samples of a round are told for the account alone.
    if not own or start.task.HasField("clients"):
        return {}
    replicas = plan.pipeline.degree if plan.HasField("pipeline") else plan.workers
    total = plan.batch * replicas * plan.steps_per_round / own
    return {name: share * total for name, share in plan.shares.items()}


def _ports_of(server: ServerConfig, row: PartitionRow) -> tuple[int, int, int | None]:
    last = (row.worker_port, row.exchange_port, row.bulk_port)
    return free_ports(server.exchange_host, server.ports, last, worker_host=server.worker_host)


def _stated_bins(task: agent_pb2.TaskRef) -> dict[str, tuple[float | str, ...]]:
    """Return the lists of numbers, or of texts, in the job's ``task.config``, by their keys."""
    config = json.loads(task.config_json or "{}")
    lists = {name: tuple(one) for name, one in config.items() if isinstance(one, list) and one}
    numbers = {name: tuple(map(float, one)) for name, one in lists.items() if all(map(_is_number, one))}
    texts = {name: one for name, one in lists.items() if all(isinstance(value, str) for value in one)}
    return {**numbers, **texts}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def server_config_of(
    start: agent_pb2.StartPartition,
    action: StartPs,
    inputs: RegionInputs,
    *,
    workers: int,
    folder: Path,
    begun: bool,
    ledger: Path | None = None,
) -> PsConfig:
    """Build the parameter server's configuration; its ports are those of its last run, where they are free.

    ``begun``: a parameter server of this partition has run here before. ``ledger``: folder of the ledger of releases.
    """
    plan, identity, server, row = start.plan, inputs.identity, inputs.server, inputs.row
    worker_port, exchange_port, bulk_port = _ports_of(server, row)
    return PsConfig(
        job=start.job,
        region=start.region,
        regions=tuple(start.regions),
        epoch=action.epoch,
        attempt=action.attempt,
        workers=workers,
        rounds=plan.rounds,
        steps_per_round=plan.steps_per_round,
        evaluate_every=plan.evaluate_every,
        wan_policy=plan.wan_policy,
        wan_settings=dict(plan.wan_settings),
        **_weights_of(start),
        neighbours=tuple((pair.a, pair.b) for pair in plan.neighbours),
        codec=plan.codec,
        part_elements=_PART_ELEMENTS if plan.HasField("pipeline") else 0,
        channel=inputs.channel,
        channel_address=inputs.channel_address,
        state_dir=folder / "ps",
        initial_model=initial_model_file(start, folder),
        initial_holds=_holds(start.task),
        initial_adapter=initial_adapter_file(start, folder),
        initial_own_model=initial_own_model(folder) if start.task.local else None,
        begun=begun or start.resumed,
        worker_listen=f"{server.worker_host}:{worker_port}",
        exchange_listen=f"{server.exchange_host}:{exchange_port}",
        bulk_port=bulk_port,
        ready_file=folder / "ps-ready.json",
        token_key=row.token_key,
        ca_file=identity.ca_file,
        certificate_file=identity.certificate_file,
        key_file=identity.key_file,
        revoked_file=identity.revoked_file,
        privacy_ledger=ledger if is_private(plan) else None,
        stated_bins=_stated_bins(start.task) if is_private(plan) else {},
        traceparent=start.traceparent,
    )
