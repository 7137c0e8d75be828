"""The agent's part of profiles and probes of tasks. It runs one at a time, so that they do not disturb each other."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import structlog
from pydantic import ValidationError

from geofed_pb.errors import GeofedError, unforeseen_as_internal
from geofed_pb.rpc import to_proto
from geofed_pb.tasks import background, log_only
from geofed_pb.v1 import agent_pb2
from region_agent.approvals import Approvals
from region_agent.gateway import FunctionSpec, fixed_scale_labels, timeout_env
from region_agent.gateway.call_token import CallToken
from region_agent.gateway.functions import Grants
from region_agent.isolation import grants_of
from region_agent.machine_rates import durable_write_rate, fresh_memory_rate
from region_agent.partition.billing import bill, invocation_amounts
from region_agent.partition.calls import at_once, bundle_key, client_rounds, gpus_of, precision_of, sharding_of
from region_agent.partition.channel import usage_meters
from region_agent.partition.context import PartitionContext
from region_agent.partition.invocation_bodies import HeldDevices
from region_agent.policy import check_isolation, check_partition
from region_agent.privacy import keeps_texts, labels_that_leave, without_quotes
from region_agent.shards.indexing import INDEXES, Indexes, streams_of
from region_agent.shards.reading import shard_files
from region_agent.tasks.folder import TaskFolder
from region_agent.tasks.secrets import GivenSecrets, give_secrets, remove_secrets
from region_agent.worker.data.spec import FormatSpec, Stream
from region_agent.worker.invocation import ShardFile
from region_agent.worker.profile_call import ProfileCall, Profiled
from sync.channel import Usage

__all__ = ["Profiler"]

_log = structlog.get_logger("geofed.profile")
_FUNCTION = "geofed-profile"
"""Prefix of functions' names; region, mark of the region and memory follow. Each memory has a name of its own, since a
platform that replaces a function may route calls to the old one for a while."""
_GRACE = timedelta(seconds=60)
"""Time beyond its limit in which an invocation may finish the present measurement, and those that every profile
needs."""
_MEMORY_RATE_SECONDS = 3600.0
"""Time for which the machine's rate of fresh memory is used again. A virtual machine may move to another host."""
_MAX_KEPT_ANSWERS = 8
"""Answers that are kept for repeated commands."""
_MAX_COMMANDS = 16
"""Most commands that run or wait at a time."""
_MARKER = "profiling"
"""File in the state directory that exists while there is something to clean up."""


@dataclass
class _Meters:
    """Resources that measuring has used."""

    amounts: dict[str, float] = field(default_factory=dict)

    def add(self, amounts: dict[str, float]) -> None:
        for name, value in amounts.items():
            self.amounts[name] = self.amounts.get(name, 0.0) + value

    def add_usage(self, usage: Usage | dict[str, int]) -> None:
        counts = usage if isinstance(usage, dict) else asdict(usage)
        self.add(usage_meters(counts))


_Measure = Callable[[agent_pb2.ProfileTask, _Meters], Awaitable[agent_pb2.ProfileReport]]


class Profiler:
    """Measures tasks on request and reports the progress. Not thread-safe: call it on the event loop."""

    def __init__(
        self,
        context: PartitionContext,
        report: Callable[[agent_pb2.ProfileReport], None],
        begins: Callable[[str, agent_pb2.TaskRef], None],
    ) -> None:
        """``begins``: is called with each command's ID and task before its code runs, which it does not if this
        raises."""
        self._context, self._report, self._begins = context, report, begins
        mark = f"{context.owner.mark}-" if context.owner.mark else ""
        self._functions = f"{_FUNCTION}-{context.config.name}-{mark}"
        self._turn = asyncio.Lock()
        self._secrets = GivenSecrets()
        """Secrets of the present task."""
        self._token = CallToken()
        """Token of the present function."""
        self._gpu = 0
        """Number of the GPU that is measured now, of those that the function sees."""
        self._packages: Path | None = None
        """Folder with the packages that the present task requires."""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._answers: dict[str, agent_pb2.ProfileReport] = {}
        """The last report on each command, for repeated commands."""
        self._measured_memory: tuple[float, float] | None = None
        """When the rate of fresh memory was measured, and the rate in bytes/s."""
        self._clearing: asyncio.Task[None] | None = None
        if (context.state_dir / _MARKER).exists():
            self._clearing = background(self._clear_up_after_a_crash(), log_only)

    def profile(self, command: agent_pb2.ProfileTask) -> None:
        """Start a full measurement, unless it is running; if it is done, only send its report again."""
        self._begin(command, self._profiled)

    def probe(self, command: agent_pb2.ProfileTask) -> None:
        """Start a measurement of what a first plan needs: the size of the model, and the duration of a few steps."""
        self._begin(command, self._probed)

    @property
    def running(self) -> tuple[str, ...]:
        """Commands that run or wait."""
        return tuple(self._tasks)

    async def close(self) -> None:
        """Abort running measurements and clean up."""
        tasks = [*self._tasks.values(), *([self._clearing] if self._clearing else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # Implementation

    def _begin(self, command: agent_pb2.ProfileTask, measure: _Measure) -> None:
        if command.id in self._answers:
            self._report(self._answers[command.id])
        elif command.id in self._tasks:
            return
        elif len(self._tasks) >= _MAX_COMMANDS:
            text = f"{len(self._tasks)} tasks are being measured or waiting"
            error = to_proto(GeofedError("FUNCTION_BUSY", text, hint="try again when some have ended"))
            self._report(agent_pb2.ProfileReport(id=command.id, error=error))
        else:

            def failed(error: GeofedError) -> None:
                self._report(agent_pb2.ProfileReport(id=command.id, error=to_proto(error)))

            task = background(self._answer(command, measure), failed)
            self._tasks[command.id] = task
            task.add_done_callback(lambda _: self._tasks.pop(command.id, None))

    async def _answer(self, command: agent_pb2.ProfileTask, measure: _Measure) -> None:
        report, meters = agent_pb2.ProfileReport(id=command.id), _Meters()
        try:
            # Every failure must be reported.
            with unforeseen_as_internal(partial(_log.exception, "a profile failed", profile=command.id)):
                async with _within_wait_time(command):
                    if self._turn.locked():
                        self._report_condition(command, "waiting for another profile to end")
                    async with self._turn, self._device_for(command) as numbers:
                        self._gpu = numbers[0] if numbers else 0
                        report.MergeFrom(await measure(command, meters))
        except GeofedError as error:
            report.error.CopyFrom(to_proto(self._without_quotes(command, error)))
        if report.HasField("error"):
            report.usd = self._usd(meters)
        while len(self._answers) >= _MAX_KEPT_ANSWERS:
            del self._answers[next(iter(self._answers))]
        self._answers[command.id] = report
        self._report(report)

    def _device_for(self, command: agent_pb2.ProfileTask) -> AbstractAsyncContextManager[tuple[int, ...]]:
        """Keep a device until all is cleaned up: one, which is all that is measured, or none where labels are counted.

        It is taken before what is timed begins.
        """
        return HeldDevices(self._context.devices, command.id, int(not command.labels_only), lambda: 0).of(0)

    def _without_quotes(self, command: agent_pb2.ProfileTask, error: GeofedError) -> GeofedError:
        """Return an error as it may leave the region."""
        if not keeps_texts(self._context.config, command.task.dataset):
            return error
        return without_quotes(error, command.region, command.id)

    def _report_condition(self, command: agent_pb2.ProfileTask, condition: str) -> None:
        self._report(agent_pb2.ProfileReport(id=command.id, condition=condition))

    async def _profiled(self, command: agent_pb2.ProfileTask, meters: _Meters) -> agent_pb2.ProfileReport:
        begun = time.monotonic()
        async with self._prepared(command, meters) as body:
            # Measured before any function runs, since memory that was freed a moment ago is allocated faster.
            self._report_condition(command, "measuring disk and memory")
            aside, folder = time.monotonic(), self._context.state_dir
            rates = await asyncio.to_thread(lambda: (durable_write_rate(folder), self._memory_rate()))
            begun += time.monotonic() - aside
            body = await self._with_data(command, body)
            profiles = [await self._at_memory(command, memory, body, meters) for memory in command.memories_mb]
            cold = profiles[0].ready_seconds + time.monotonic() - begun - sum(one.seconds for one in profiles)
            self._report_condition(command, f"measuring the channel ({self._context.channel.kind})")
            costs, usage = await asyncio.to_thread(self._context.channel.costs, command.id)
            meters.add_usage(usage)
            numbers = self._numbers(command, profiles, cold, asdict(costs), rates, meters)
            return agent_pb2.ProfileReport(profile_json=json.dumps(numbers))

    def _memory_rate(self) -> float:
        """Return the machine's rate of fresh memory. It takes seconds of CPU time, and is that of every task."""
        now = time.monotonic()
        if self._measured_memory is None or now - self._measured_memory[0] > _MEMORY_RATE_SECONDS:
            self._measured_memory = now, fresh_memory_rate()
        return self._measured_memory[1]

    async def _probed(self, command: agent_pb2.ProfileTask, meters: _Meters) -> agent_pb2.ProfileReport:
        """Probe a task. The size is reported as soon as it is known, since reading the data may take long, and fail."""
        begun, weight = time.monotonic(), agent_pb2.TaskWeight()
        memory = max(command.memories_mb, default=0)
        limit = timedelta(seconds=command.limit_seconds) + _GRACE
        if command.labels_only:
            return await self._labels(command, memory, limit, meters)
        async with self._prepared(command, meters) as body:
            body = body.model_copy(update={"memory_mb": memory, "measure": "size"})
            name = await self._deployed(command, memory, limit)
            self._report_condition(command, "measuring the model's size")
            size = await self._size(command, name, body, limit, meters)
            weight.parameters, weight.model_bytes = size.parameters, size.model_bytes
            weight.held_bytes = size.held_bytes
            weight.batch_norms.extend(size.batch_norms)
            self._report(agent_pb2.ProfileReport(id=command.id, weight=weight))
            counted = time.monotonic() - begun
            try:
                body = await self._with_data(command, body.model_copy(update={"measure": "pace"}))
                pace, _ = await self._call(name, body, memory, limit, meters)
                weight.steps.extend(
                    agent_pb2.TimedStep(batch=one.batch, seconds=one.seconds, device_bytes=one.device_bytes)
                    for one in pace.steps
                )
                # Both calls create the model, but a worker creates it only once.
                weight.start_seconds = counted - size.loaded_seconds + pace.loaded_seconds
                self._take_labels(command, pace, weight)
            except GeofedError as error:
                # The size is still useful.
                error = self._without_quotes(command, error)
                weight.note = f"{error.code}: {error.message}"
        weight.usd, weight.last = self._usd(meters), True
        return agent_pb2.ProfileReport(weight=weight)

    async def _labels(
        self, command: agent_pb2.ProfileTask, memory: int, limit: timedelta, meters: _Meters
    ) -> agent_pb2.ProfileReport:
        """Count labels, and nothing else."""
        weight = agent_pb2.TaskWeight(last=True)
        async with self._prepared(command, meters) as body:
            body = await self._with_data(command, body.model_copy(update={"memory_mb": memory, "measure": "labels"}))
            name = await self._deployed(command, memory, limit)
            counted, _ = await self._call(name, body, memory, limit, meters)
            self._take_labels(command, counted, weight)
        weight.usd = self._usd(meters)
        return agent_pb2.ProfileReport(weight=weight)

    def _take_labels(self, command: agent_pb2.ProfileTask, numbers: Profiled, weight: agent_pb2.TaskWeight) -> None:
        """Take over what may leave the region of the labels that a worker has counted."""
        weight.samples = numbers.samples
        weight.labels.update(labels_that_leave(self._context.config, command.task.dataset, numbers.labels))

    async def _size(
        self, command: agent_pb2.ProfileTask, name: str, body: ProfileCall, limit: timedelta, meters: _Meters
    ) -> Profiled:
        """Measure the model's size: without the data, unless the model needs a call of `dataset` before it."""
        try:
            return (await self._call(name, body, body.memory_mb, limit, meters))[0]
        except GeofedError as error:
            if error.code != "TASK_FAILED":
                raise
            try:
                body = await self._with_data(command, body)
            except GeofedError:
                raise error from None
            return (await self._call(name, body, body.memory_mb, limit, meters))[0]

    @contextlib.asynccontextmanager
    async def _prepared(self, command: agent_pb2.ProfileTask, meters: _Meters) -> AsyncIterator[ProfileCall]:
        """Store the task's code in the channel; yields the body of a call, without data. Cleans up afterwards."""
        context, start = self._context, _as_partition(command)
        check_partition(context.config, start)
        Approvals(context.state_dir, context.config.policy.approve).require(command.id, command.task)
        check_isolation(context.config, context.isolation)
        if context.config.prices is None:
            text = f"region {command.region} states no prices"
            raise GeofedError("PRICE_UNKNOWN", text, hint="add `prices` to its configuration")
        mark = context.state_dir / _MARKER
        mark.write_text(command.id)
        try:
            self._report_condition(command, "downloading the task")
            folder = await context.fetch_task(command.task.bundle_digest)
            self._packages = None
            if context.environments is not None:
                self._packages = await context.environments.prepare(command.id, folder, command.task.requirements)
            await asyncio.to_thread(self._put_folder, start, folder, meters)
            stated = context.config.datasets[command.task.dataset].splits["train"].clients
            address = await asyncio.to_thread(context.channel.worker_address, command.id)
            self._begins(command.id, command.task)
            yield ProfileCall(
                job=command.id, region=command.region, channel=context.channel.kind, channel_address=address,
                bundle_key=bundle_key(start), module=command.task.module,
                config=json.loads(command.task.config_json or "{}"), env=dict(command.task.env), splits={},
                packages=str(self._packages or ""),
                batch=command.batch, at_once=at_once(command.batch, command.task),
                precision=precision_of(command.task), compile=command.task.compile, gpus=gpus_of(command.task),
                sharding=sharding_of(command.task),
                billed_gpus=context.config.worker_devices(gpus_of(command.task)), gpu=self._gpu,
                local=tuple(command.task.local),
                evaluates_only=command.task.evaluates_only,
                evaluation_batch=command.evaluation_batch,
                clients=client_rounds(command.task, stated),
                seed=command.seed, limit_seconds=command.limit_seconds, labels=command.labels,
            )  # fmt: skip
        finally:
            if context.environments is not None:
                context.environments.release(command.id)
            await self._clear_up(command.id)
            mark.unlink(missing_ok=True)

    async def _with_data(self, command: agent_pb2.ProfileTask, body: ProfileCall) -> ProfileCall:
        dataset = self._context.config.datasets[command.task.dataset]
        splits = await asyncio.to_thread(shard_files, dataset, self._context.config.stores)
        update: dict[str, Any] = {"splits": splits, "declared_samples": dataset.splits["train"].samples}
        if dataset.format is not None:
            update["streams"] = await asyncio.to_thread(self._put_indexes, command.id, dataset.format, splits)
        return body.model_copy(update=update)

    def _put_indexes(self, id: str, spec: FormatSpec, splits: Mapping[str, tuple[ShardFile, ...]]) -> dict[str, Stream]:
        """Store the indexes of the splits in the channel; returns how the function reads them. Blocks."""
        indexes = Indexes(self._context.state_dir / INDEXES)
        streams, contents = streams_of(spec, {split: indexes.of(spec, files) for split, files in splits.items()})
        channel = self._context.channel.open(id)
        try:
            for key, content in contents.items():
                channel.put(key, [content])
        finally:
            channel.close()
        return streams

    def _put_folder(self, start: agent_pb2.StartPartition, folder: TaskFolder, meters: _Meters) -> None:
        channel = self._context.channel.open(start.job)
        try:
            folder.put_into(channel, bundle_key(start))
        finally:
            meters.add_usage(channel.usage)
            channel.close()

    async def _at_memory(
        self, command: agent_pb2.ProfileTask, memory_mb: int, body: ProfileCall, meters: _Meters
    ) -> _MemoryProfile:
        """Deploy one replica with this memory, have it measure, and call it once more to measure a warm call."""
        begun = time.monotonic()
        limit = timedelta(seconds=command.limit_seconds) + _GRACE
        body = body.model_copy(update={"memory_mb": memory_mb})
        name = await self._deployed(command, memory_mb, limit)
        deployed = time.monotonic() - begun
        self._report_condition(command, f"measuring steps with {memory_mb} MB")
        measured, _ = await self._call(name, body, memory_mb, limit, meters)
        _, again = await self._call(name, body.model_copy(update={"measure": "nothing"}), memory_mb, limit, meters)
        await self._context.gateway.delete(name)
        return _MemoryProfile(memory_mb, measured, deployed + measured.loaded_seconds, again, time.monotonic() - begun)

    async def _deployed(self, command: agent_pb2.ProfileTask, memory_mb: int, limit: timedelta) -> str:
        """Deploy a function with one replica and wait until it is ready; returns its name."""
        context, name = self._context, f"{self._functions}{memory_mb}"
        self._report_condition(command, f"starting a function with {memory_mb} MB")
        grants = await asyncio.to_thread(self._grants, command)
        task = command.task
        self._secrets = await give_secrets(
            context.config, context.gateway, context.owner, command.id, task.secrets,
            *context.channel.worker_env(context.config.platform),
        )  # fmt: skip
        self._token = CallToken.new() if context.config.platform.callable_by_others else CallToken()
        await context.gateway.deploy(
            FunctionSpec(
                service=name,
                image=task.image or context.image,
                labels={**fixed_scale_labels(1), **context.owner.labels(command.id)},
                annotations=grants.annotations() if context.config.platform.local_files else {},
                env_vars={
                    **timeout_env(limit),
                    **self._token.env,
                    **self._secrets.env,
                },
                secrets=self._secrets.names,
                limits={"memory": f"{memory_mb}Mi"},
            )
        )
        await context.gateway.scale(name, 1)
        await context.gateway.wait_ready(name, 1, timedelta(seconds=context.config.start_seconds))
        return name

    def _grants(self, command: agent_pb2.ProfileTask) -> Grants:
        """Return what the function may use outside of its sandbox."""
        config = self._context.config
        dataset = config.datasets[command.task.dataset]
        splits: dict[str, tuple[ShardFile, ...]] = {}
        # A probe measures the size of the model even if no data can be read.
        with contextlib.suppress(GeofedError):
            splits = shard_files(dataset, config.stores)
        return grants_of(config, self._context.channel, command.id, dataset, splits=splits, packages=self._packages)

    async def _call(
        self, name: str, body: ProfileCall, memory_mb: int, limit: timedelta, meters: _Meters
    ) -> tuple[Profiled, float]:
        """Call the function; returns its answer and the duration in seconds."""
        begun = time.monotonic()
        try:
            answer = await self._context.gateway.invoke(
                name, body.model_dump_json().encode(), headers=self._token.headers, timeout=limit
            )
        finally:
            seconds = time.monotonic() - begun
            meters.add(invocation_amounts(seconds, memory_mb, devices=self._context.config.worker_devices(body.gpus)))
        try:
            profiled = Profiled.model_validate_json(answer.body)
        except ValidationError:
            text = self._secrets.redact(answer.body.decode(errors="replace"))[:200]
            raise GeofedError("FUNCTION_FAILED", f"the function answered {text!r}") from None
        meters.add_usage(profiled.channel)
        if profiled.status == "failed":
            text = self._secrets.redact(profiled.message)
            raise GeofedError(profiled.code or "FUNCTION_FAILED", text, hint=profiled.hint or None)
        return profiled, seconds

    def _numbers(
        self,
        command: agent_pb2.ProfileTask,
        profiles: list[_MemoryProfile],
        cold: float,
        costs: dict[str, Any],
        rates: tuple[float, float],
        meters: _Meters,
    ) -> dict[str, Any]:
        """Return the fields of `scheduler.tuning.TaskProfile`."""
        config, first = self._context.config, profiles[0].numbers
        prices, held = config.channel.prices, config.datasets[command.task.dataset]
        channel = {"name": self._context.channel.kind, **costs}
        if prices is not None:
            channel |= {
                "put_usd": prices.usd_per_put, "list_usd": prices.usd_per_put, "get_usd": prices.usd_per_get,
                "usd_per_hour": prices.usd_per_hour,
            }  # fmt: skip
        return {
            "region": command.region,
            "samples": first.samples,
            "batch": command.batch,
            "parameters": first.parameters,
            "model_bytes": first.model_bytes,
            "steps": [
                {**step.model_dump(exclude={"device_bytes"}), "memory_mb": one.memory_mb}
                for one in profiles
                for step in one.numbers.steps
            ],
            "update_seconds": first.update_seconds,
            "stored_bytes_per_second": rates[0],
            "fresh_bytes_per_second": rates[1],
            # Of gradients without noise.
            "norms": [] if held.privacy is not None else [pair.model_dump() for pair in first.norms],
            "evaluation_peak_mb": max(one.numbers.evaluation_peak_mb for one in profiles),
            "channel": channel,
            "start_seconds": cold,
            "again_seconds": min(one.again_seconds for one in profiles),
            "gb_seconds": meters.amounts.get("gb_seconds", 0.0),
            "usd": self._usd(meters),
            "layers": [layer.model_dump() for layer in first.layers],
            "layers_note": first.layers_note,
            "message_seconds": first.message_seconds,
            "message_core_seconds": first.message_core_seconds,
            "labels": labels_that_leave(config, command.task.dataset, first.labels),
        }

    def _usd(self, meters: _Meters) -> float:
        config = self._context.config
        items = bill(meters.amounts, config.prices, config.channel.prices) if config.prices is not None else []
        return sum(item.usd for item in items)

    async def _clear_up(self, job: str) -> None:
        with contextlib.suppress(GeofedError):
            for function in await self._context.gateway.list():
                name = function.spec.service
                # Only digits may follow, since another region's name may begin with this one's.
                if name.startswith(self._functions) and name.removeprefix(self._functions).isdigit():
                    with contextlib.suppress(GeofedError):
                        await self._context.gateway.delete(name)
        with contextlib.suppress(GeofedError):
            await remove_secrets(self._context.gateway, self._context.owner, job)
        with contextlib.suppress(GeofedError):
            await asyncio.to_thread(self._context.channel.discard, job)

    async def _clear_up_after_a_crash(self) -> None:
        mark = self._context.state_dir / _MARKER
        async with self._turn:
            await self._clear_up(mark.read_text())
            mark.unlink(missing_ok=True)


@dataclass(frozen=True)
class _MemoryProfile:
    """Measurements with one memory."""

    memory_mb: int
    numbers: Profiled
    ready_seconds: float
    """Time from the deployment until the first step could be made."""
    again_seconds: float
    """Duration of a call of the warm replica that only loads."""
    seconds: float
    """Duration of all measurements with this memory."""


@contextlib.asynccontextmanager
async def _within_wait_time(command: agent_pb2.ProfileTask) -> AsyncIterator[None]:
    """Abort a measurement, running or waiting, after the time for which the user waits, since its calls are billed.

    Raises ``GeofedError("WAIT_TIMEOUT")``.
    """
    limit = asyncio.timeout(command.wait_seconds or None)
    try:
        async with limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise GeofedError("WAIT_TIMEOUT", f"the measurement timed out after {command.wait_seconds:.0f} s") from None


def _as_partition(command: agent_pb2.ProfileTask) -> agent_pb2.StartPartition:
    """Return a partition with one worker that uses the same resources; the region's policy is checked for it."""
    return agent_pb2.StartPartition(
        job=command.id,
        region=command.region,
        task=command.task,
        plan=agent_pb2.PartitionPlan(
            workers=1,
            batch=command.batch,
            slice_seconds=command.limit_seconds,
            memory_mb=max(command.memories_mb, default=0),
        ),
    )
