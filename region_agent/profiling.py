"""Profiles of tasks: the agent's part. One at a time, so that they do not disturb each other."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

from pydantic import ValidationError

from geofed_pb.errors import GeofedError
from geofed_pb.rpc import to_proto
from geofed_pb.v1 import agent_pb2
from region_agent.gateway import FunctionSpec, fixed_scale_labels, timeout_env
from region_agent.machine_rates import durable_write_rate, fresh_memory_rate
from region_agent.partition.billing import bill, invocation_amounts
from region_agent.partition.calls import bundle_key
from region_agent.partition.channel import usage_meters
from region_agent.partition.runner import PartitionContext
from region_agent.policy import check_partition
from region_agent.shards.reading import shard_files
from region_agent.worker.profile_call import ProfileCall, Profiled
from sync.channel import Usage

__all__ = ["Profiler"]

_log = logging.getLogger("geofed.profile")
_FUNCTION = "geofed-profile"
"""What the names of functions begin with; the region and the memory follow, as a platform that replaces a function
may let the old one answer for a while."""
_READY = timedelta(seconds=60)
_GRACE = timedelta(seconds=60)
"""Beyond its limit an invocation may finish what it measures, and what must be known."""
_KEPT = 8
"""Profiles of which the answer is kept, should the command come again."""
_MOST_WAITING = 16
"""Commands at once, the one that is measured included."""
_MARK = "profiling"
"""A file in the state directory, while there is something to clear away."""


@dataclass
class _Meters:
    """What measuring takes."""

    amounts: dict[str, float] = field(default_factory=dict)

    def add(self, amounts: dict[str, float]) -> None:
        for name, value in amounts.items():
            self.amounts[name] = self.amounts.get(name, 0.0) + value

    def add_usage(self, usage: Usage | dict[str, int]) -> None:
        counts = usage if isinstance(usage, dict) else asdict(usage)
        self.add(usage_meters(counts))


_Measure = Callable[[agent_pb2.ProfileTask, _Meters], Awaitable[agent_pb2.ProfileReport]]


class Profiler:
    """Measures tasks on request and tells how far it is. Lives on the event loop."""

    def __init__(self, around: PartitionContext, tell: Callable[[agent_pb2.ProfileReport], None]) -> None:
        self._context, self._tell = around, tell
        self._functions = f"{_FUNCTION}-{around.config.name}-"
        self._turn = asyncio.Lock()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._answers: dict[str, agent_pb2.ProfileReport] = {}
        """The last word on each, for a command that comes again."""
        self._clearing: asyncio.Task[None] | None = None
        if (around.state_dir / _MARK).exists():
            self._clearing = asyncio.create_task(self._clear_up_after_a_crash())

    def ask(self, command: agent_pb2.ProfileTask) -> None:
        """Measure, unless that is done or running; then only report."""
        self._begin(command, self._profiled)

    def probe(self, command: agent_pb2.ProfileTask) -> None:
        """The same, of only what a first plan needs: how large the model is, and how quick a few steps are."""
        self._begin(command, self._probed)

    async def close(self) -> None:
        """Break off what continues, and clear it away."""
        tasks = [*self._tasks.values(), *([self._clearing] if self._clearing else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # Inside

    def _begin(self, command: agent_pb2.ProfileTask, measure: _Measure) -> None:
        if command.id in self._answers:
            self._tell(self._answers[command.id])
        elif command.id in self._tasks:
            return
        elif len(self._tasks) >= _MOST_WAITING:
            text = f"{len(self._tasks)} tasks are being measured or wait for it"
            error = to_proto(GeofedError("FUNCTION_BUSY", text, hint="try again when some have ended"))
            self._tell(agent_pb2.ProfileReport(id=command.id, error=error))
        else:
            task = asyncio.create_task(self._answer(command, measure))
            self._tasks[command.id] = task
            task.add_done_callback(lambda _: self._tasks.pop(command.id, None))

    async def _answer(self, command: agent_pb2.ProfileTask, measure: _Measure) -> None:
        report, meters = agent_pb2.ProfileReport(id=command.id), _Meters()
        try:
            async with _as_long_as_somebody_waits(command):
                if self._turn.locked():
                    self._say(command, "waits for another profile to end")
                async with self._turn:
                    report.MergeFrom(await measure(command, meters))
        except GeofedError as error:
            report.error.CopyFrom(to_proto(error))
        except Exception as error:  # noqa: BLE001 - the task's edge: whoever waits must be told
            _log.exception("profile %s", command.id)
            report.error.CopyFrom(to_proto(GeofedError("INTERNAL", f"{type(error).__name__}: {error}")))
        if report.HasField("error"):
            report.usd = self._usd(meters)
        while len(self._answers) >= _KEPT:
            del self._answers[next(iter(self._answers))]
        self._answers[command.id] = report
        self._tell(report)

    def _say(self, command: agent_pb2.ProfileTask, condition: str) -> None:
        self._tell(agent_pb2.ProfileReport(id=command.id, condition=condition))

    async def _profiled(self, command: agent_pb2.ProfileTask, meters: _Meters) -> agent_pb2.ProfileReport:
        begun = time.monotonic()
        async with self._ready(command, meters) as body:
            # First of all: memory that a function has let go of a moment ago would be quicker to have than any other.
            self._say(command, "measures disk and memory")
            aside, folder = time.monotonic(), self._context.state_dir
            rates = await asyncio.to_thread(lambda: (durable_write_rate(folder), fresh_memory_rate()))
            begun += time.monotonic() - aside
            body = await self._with_data(command, body)
            told = [await self._at_memory(command, memory, body, meters) for memory in command.memories_mb]
            cold = told[0].ready_seconds + time.monotonic() - begun - sum(one.seconds for one in told)
            self._say(command, f"measures the channel ({self._context.channel.kind})")
            costs, usage = await asyncio.to_thread(self._context.channel.costs, command.id)
            meters.add_usage(usage)
            numbers = self._numbers(command, told, cold, asdict(costs), rates, meters)
            return agent_pb2.ProfileReport(profile_json=json.dumps(numbers))

    async def _probed(self, command: agent_pb2.ProfileTask, meters: _Meters) -> agent_pb2.ProfileReport:
        """The size is told as soon as it is known; reading the data may take long, and fail."""
        begun, weight = time.monotonic(), agent_pb2.TaskWeight()
        memory = max(command.memories_mb, default=0)
        limit = timedelta(seconds=command.limit_seconds) + _GRACE
        async with self._ready(command, meters) as body:
            body = body.model_copy(update={"memory_mb": memory, "measure": "size"})
            name = await self._deployed(command, memory, limit)
            self._say(command, "counts the model")
            size = await self._size(command, name, body, limit, meters)
            weight.parameters, weight.model_bytes = size.parameters, size.model_bytes
            self._tell(agent_pb2.ProfileReport(id=command.id, weight=weight))
            counted = time.monotonic() - begun
            try:
                body = await self._with_data(command, body.model_copy(update={"measure": "pace"}))
                pace, _ = await self._call(name, body, memory, limit, meters)
                weight.steps.extend(agent_pb2.TimedStep(batch=one.batch, seconds=one.seconds) for one in pace.steps)
                # A worker makes the model once.
                weight.start_seconds = counted - size.loaded_seconds + pace.loaded_seconds
            except GeofedError as error:
                # What is known is worth having.
                weight.note = f"{error.code}: {error.message}"
        weight.usd, weight.last = self._usd(meters), True
        return agent_pb2.ProfileReport(weight=weight)

    async def _size(
        self, command: agent_pb2.ProfileTask, name: str, body: ProfileCall, limit: timedelta, meters: _Meters
    ) -> Profiled:
        """Without the data, unless the model cannot be made before `dataset` has been called."""
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
    async def _ready(self, command: agent_pb2.ProfileTask, meters: _Meters) -> AsyncIterator[ProfileCall]:
        """The task's code in the channel, and what a call of it is told but for data; all is cleared away after."""
        around, start = self._context, _as_partition(command)
        check_partition(around.config, start)
        if around.config.prices is None:
            text = f"region {command.region} states no prices"
            raise GeofedError("PRICE_UNKNOWN", text, hint="add `prices` to its configuration")
        mark = around.state_dir / _MARK
        mark.write_text(command.id)
        try:
            self._say(command, "fetches the task")
            bundle = await around.fetch_bundle(command.task.bundle_digest)
            await asyncio.to_thread(self._put_bundle, start, bundle, meters)
            address = await asyncio.to_thread(around.channel.worker_address, command.id)
            yield ProfileCall(
                job=command.id, region=command.region, channel=around.channel.kind, channel_address=address,
                bundle_key=bundle_key(start), module=command.task.module,
                config=json.loads(command.task.config_json or "{}"), splits={}, batch=command.batch,
                evaluation_batch=command.evaluation_batch,
                seed=command.seed, limit_seconds=command.limit_seconds,
            )  # fmt: skip
        finally:
            await self._clear_up(command.id)
            mark.unlink(missing_ok=True)

    async def _with_data(self, command: agent_pb2.ProfileTask, body: ProfileCall) -> ProfileCall:
        dataset = self._context.config.datasets[command.task.dataset]
        splits = await asyncio.to_thread(shard_files, dataset, self._context.config.stores)
        return body.model_copy(update={"splits": splits, "declared_samples": dataset.splits["train"].samples})

    def _put_bundle(self, start: agent_pb2.StartPartition, bundle: bytes, meters: _Meters) -> None:
        channel = self._context.channel.open(start.job)
        try:
            channel.put(bundle_key(start), [bundle])
        finally:
            meters.add_usage(channel.usage)
            channel.close()

    async def _at_memory(
        self, command: agent_pb2.ProfileTask, memory_mb: int, body: ProfileCall, meters: _Meters
    ) -> _Told:
        """Deploy one replica of so much memory, and have it measure, and once more make ready."""
        begun = time.monotonic()
        limit = timedelta(seconds=command.limit_seconds) + _GRACE
        body = body.model_copy(update={"memory_mb": memory_mb})
        name = await self._deployed(command, memory_mb, limit)
        deployed = time.monotonic() - begun
        self._say(command, f"measures steps with {memory_mb} MB")
        measured, _ = await self._call(name, body, memory_mb, limit, meters)
        _, again = await self._call(name, body.model_copy(update={"measure": "nothing"}), memory_mb, limit, meters)
        await self._context.gateway.delete(name)
        return _Told(memory_mb, measured, deployed + measured.loaded_seconds, again, time.monotonic() - begun)

    async def _deployed(self, command: agent_pb2.ProfileTask, memory_mb: int, limit: timedelta) -> str:
        """The name of a function with one replica that is ready."""
        around, name = self._context, f"{self._functions}{memory_mb}"
        self._say(command, f"starts a function of {memory_mb} MB")
        await around.gateway.deploy(
            FunctionSpec(
                service=name,
                image=around.image,
                labels=fixed_scale_labels(1),
                env_vars={**timeout_env(limit), **around.channel.worker_env()},
                limits={"memory": f"{memory_mb}Mi"},
            )
        )
        await around.gateway.scale(name, 1)
        await around.gateway.wait_ready(name, 1, _READY)
        return name

    async def _call(
        self, name: str, body: ProfileCall, memory_mb: int, limit: timedelta, meters: _Meters
    ) -> tuple[Profiled, float]:
        """The answer, and the seconds that it took."""
        begun = time.monotonic()
        try:
            answer = await self._context.gateway.invoke(name, body.model_dump_json().encode(), timeout=limit)
        finally:
            took = time.monotonic() - begun
            meters.add(invocation_amounts(took, memory_mb))
        try:
            told = Profiled.model_validate_json(answer.body)
        except ValidationError:
            raise GeofedError("FUNCTION_FAILED", f"the function answered {answer.body[:200]!r}") from None
        meters.add_usage(told.channel)
        if told.status == "failed":
            raise GeofedError(told.code or "FUNCTION_FAILED", told.message, hint=told.hint or None)
        return told, took

    def _numbers(
        self,
        command: agent_pb2.ProfileTask,
        told: list[_Told],
        cold: float,
        costs: dict[str, Any],
        rates: tuple[float, float],
        meters: _Meters,
    ) -> dict[str, Any]:
        """The fields of `scheduler.tuning.Profile`."""
        config, first = self._context.config, told[0].numbers
        prices = config.channel.prices
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
            "steps": [{**step.model_dump(), "memory_mb": one.memory_mb} for one in told for step in one.numbers.steps],
            "update_seconds": first.update_seconds,
            "stored_bytes_per_second": rates[0],
            "fresh_bytes_per_second": rates[1],
            "norms": [pair.model_dump() for pair in first.norms],
            "evaluation_peak_mb": max(one.numbers.evaluation_peak_mb for one in told),
            "channel": channel,
            "start_seconds": cold,
            "again_seconds": min(one.again_seconds for one in told),
            "gb_seconds": meters.amounts.get("gb_seconds", 0.0),
            "usd": self._usd(meters),
            "layers": [layer.model_dump() for layer in first.layers],
            "layers_note": first.layers_note,
            "message_seconds": first.message_seconds,
            "message_core_seconds": first.message_core_seconds,
        }

    def _usd(self, meters: _Meters) -> float:
        config = self._context.config
        items = bill(meters.amounts, config.prices, config.channel.prices) if config.prices is not None else []
        return sum(item.usd for item in items)

    async def _clear_up(self, job: str) -> None:
        with contextlib.suppress(GeofedError):
            for function in await self._context.gateway.list():
                name = function.spec.service
                # Another region's name may begin with this one's.
                if name.startswith(self._functions) and name.removeprefix(self._functions).isdigit():
                    await self._context.gateway.delete(function.spec.service)
        with contextlib.suppress(GeofedError):
            await asyncio.to_thread(self._context.channel.discard, job)

    async def _clear_up_after_a_crash(self) -> None:
        mark = self._context.state_dir / _MARK
        async with self._turn:
            await self._clear_up(mark.read_text())
            mark.unlink(missing_ok=True)


@dataclass(frozen=True)
class _Told:
    """What one memory has come to."""

    memory_mb: int
    numbers: Profiled
    ready_seconds: float
    """Until its first step could be made."""
    again_seconds: float
    seconds: float
    """Of all that was done with this memory."""


@contextlib.asynccontextmanager
async def _as_long_as_somebody_waits(command: agent_pb2.ProfileTask) -> AsyncIterator[None]:
    """Break off what nobody wants to know any more, also before its turn has come: its calls cost.

    Raises ``GeofedError`` WAIT_TIMEOUT.
    """
    limit = asyncio.timeout(command.wait_seconds or None)
    try:
        async with limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise GeofedError("WAIT_TIMEOUT", f"it was not measured within {command.wait_seconds:.0f} s") from None


def _as_partition(command: agent_pb2.ProfileTask) -> agent_pb2.StartPartition:
    """A partition of one worker that would do the same: what it may not do, a profile may not either."""
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
