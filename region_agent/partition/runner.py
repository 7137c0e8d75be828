"""The thin shell around a partition's machine: processes, calls, files and meters."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import time
from collections.abc import Callable, Collection, Coroutine
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from geofed_pb.errors import CATALOGUE, GeofedError
from geofed_pb.v1 import agent_pb2, sync_pb2
from region_agent.config import OpenFaasGateway, RegionConfig
from region_agent.gateway import FunctionSpec, GatewayClient, fixed_scale_labels, timeout_env
from region_agent.gateway.functions import SHARE_ANNOTATION
from region_agent.link.identity import Identity
from region_agent.partition.calls import (
    Told,
    batches_of,
    bundle_key,
    initial_model_file,
    invocation_of,
    server_config_of,
    stretches_json,
    whole_pipelines,
)
from region_agent.partition.channel import RegionChannel
from region_agent.partition.events import (
    Action,
    Begin,
    Configured,
    ConfigurePs,
    Deployed,
    Ended,
    Event,
    Happened,
    Invoke,
    KeepBatches,
    PeersKnown,
    Preempted,
    Prepared,
    Progress,
    PsEnded,
    PsPeer,
    PsReady,
    PsSaid,
    PsWays,
    Publish,
    PublishAsked,
    Published,
    Quit,
    Report,
    Restart,
    Retry,
    Scale,
    Scaled,
    Setback,
    Started,
    StartPs,
    TakeAway,
    WorkerEnded,
)
from region_agent.partition.logs import FunctionLogs
from region_agent.partition.machine import PartitionMachine
from region_agent.partition.report import PartitionMeter, report_of, view_of
from region_agent.partition.server_events import ServerEvents
from region_agent.partition.server_process import PsProcess
from region_agent.partition.shards import SHARDS, PartitionShards
from region_agent.shards.reading import SIGNATURE_LIFE
from region_agent.state.store import AgentStore
from region_agent.worker.invocation import CALL_GRACE, Outcome, ShardFile
from sync.channel import fence_key
from sync.ps.config import PsConfig

__all__ = ["Partition", "Surroundings"]

_log = logging.getLogger("geofed.partition")
_READY = timedelta(seconds=60)
_METER_SECONDS = 1.0
_ACCOUNT_SECONDS = 5.0
"""The control plane's picture of the account is hardly older than this."""
_CAPACITY_LABEL = "geofed.capacity"
"""Of a function on capacity that may be taken away."""
_LONGEST_PAUSE_SECONDS = 15.0


@dataclass(frozen=True)
class Surroundings:
    """What a partition has around it in its region."""

    config: RegionConfig
    identity: Identity
    store: AgentStore
    gateway: GatewayClient
    state_dir: Path
    channel: RegionChannel
    image: str
    """Of the worker function."""
    fetch_bundle: Callable[[str], Coroutine[Any, Any, bytes]]
    """The packed task folder under a digest, from the control plane."""
    fetch_model: Callable[[str, Path], Coroutine[Any, Any, None]]
    """Has the model under a digest lie in a file, verified."""
    publish_model: Callable[[PsProcess], Coroutine[Any, Any, str]]
    """Hands the server's model to the control plane; its digest."""
    report: Callable[[agent_pb2.PartitionReport, bool], None]
    """Tell the control plane; the flag: durably."""
    happened: Callable[[str, Happened], None]
    log: Callable[[str, str, str], None]
    """(job, source, line)."""


class Partition:
    """One job's partition in this region. Lives on the event loop."""

    def __init__(self, around: Surroundings, start: agent_pb2.StartPartition) -> None:
        self._around, self.start = around, start
        self.job = start.job
        row = around.store.partition(start.job)
        if row is None:
            raise GeofedError("INTERNAL", f"partition {start.job} was not stored")
        self._row = row
        workers = start.plan.workers if row.workers is None else whole_pipelines(start.plan, row.workers)
        batches = batches_of(start.plan, row)
        self.machine = PartitionMachine(
            start.region,
            workers,
            epoch=start.epoch,
            attempt=row.attempt,
            batches=batches,
            preemptible=row.preemptible,
            order=row.scale_order,
        )
        self._deploying = asyncio.Lock()
        """What was deployed last is what was read last of how it is to be."""
        self._folder = around.state_dir / "jobs" / start.job
        self._folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._folder.parent.chmod(0o700)
        self._folder.mkdir(exist_ok=True)
        self._opening_channel = asyncio.Lock()
        self._worker_channel = ""
        """Address of the channel for the workers; empty: not made yet."""
        self._costs: dict[str, float] = {}
        """What requests to the channel take, where the workers have to choose by that."""
        self._merged_by = ""
        self._function = f"geofed-{start.job}"[:63].rstrip("-")
        self._logs = FunctionLogs(around.gateway, self._function, partial(around.log, self.job))
        self._ps: PsProcess | None = None
        self._began = row.attempt > 0
        """A parameter server has run here before: that it finds nothing then means that its state was lost."""
        self._ps_runs = False
        """From before it is started until it is gone; `_ps` is there only while it listens."""
        self._shards = PartitionShards(
            around.config,
            around.identity.tls,
            start,
            around.state_dir / SHARDS / start.job,
            lambda durable: self._report(durable=durable),
            lambda action: around.happened(start.job, action),
        )
        self._splits: dict[str, tuple[ShardFile, ...]] = {}
        self._signed_at = 0.0
        """Of the addresses in the splits, which are good for a limited time."""
        self._status = sync_pb2.PsStatus()
        self.meter = PartitionMeter(around.store, start.job)
        self._news = ServerEvents()
        self._reported_at = self._progress_at = time.monotonic()
        self._logged_state = ""
        self._progress_mark: tuple[object, ...] = ()
        self._tasks: set[asyncio.Task[None]] = set()
        self._wanted_config: ConfigurePs | None = None

    # Events in

    def feed(self, event: Event) -> None:
        """Give the machine an event and carry out what it answers."""
        for action in self.machine.handle(event):
            self._carry_out(action)

    def begin(self) -> None:
        """Take the partition up, for the first time or after a restart of the agent."""
        self.feed(Started(self.start.epoch))
        if self._row.peers is not None:
            self.peers(agent_pb2.Peers.FromString(self._row.peers))
        if self._row.publish:
            self.feed(PublishAsked())

    def again(self, start: agent_pb2.StartPartition) -> None:
        """The control plane repeats the command, perhaps with a higher epoch."""
        self.feed(Started(start.epoch))

    def scale(self, wanted: Scaled) -> None:
        """The control plane wants another number of workers; it is stored already."""
        self.feed(replace(wanted, workers=whole_pipelines(self.start.plan, wanted.workers)))

    def preempt(self, workers: int) -> None:
        """So many of its workers are left; the others are ended, as whoever takes their machines away would do."""
        self.feed(Preempted(workers))

    def peers(self, message: agent_pb2.Peers) -> None:
        peers = tuple(PsPeer(p.region, p.epoch, p.address) for p in message.peers)
        neighbours, former = (tuple((pair.a, pair.b) for pair in ps) for ps in (message.neighbours, message.former))
        self.feed(PeersKnown(peers, PsWays(message.routes, neighbours, former), message.finish))

    async def drained(self) -> None:
        """Wait until what a stop has begun is done."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    async def close(self) -> None:
        """End everything of this partition here; its durable state stays."""
        await _cancelled(self._tasks)

    async def forget_state(self) -> None:
        """Remove what its parameter server and its workers have stored. It must be closed."""
        with contextlib.suppress(GeofedError):
            await asyncio.to_thread(self._around.channel.discard, self.job)
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    def tell_account(self, now: float) -> None:
        """What calls and the server take as long as they run; from time to time the control plane hears of it, also
        where nothing else happens."""
        self.meter.server_runs(now)
        self._look_at_progress(now)
        if self.machine.holds_workers and now - self._reported_at > _ACCOUNT_SECONDS:
            self._report(durable=False)

    def _look_at_progress(self, now: float) -> None:
        """A wait for others is no idleness of the task: the server's condition tells it."""
        mark = (self.machine.attempt, self._status.round, self._status.step, self._status.condition)
        if mark != self._progress_mark or self._status.condition or self.machine.state != "training":
            self._progress_mark, self._progress_at = mark, now
        limit = timedelta(seconds=self.start.plan.slice_seconds) + CALL_GRACE
        self.feed(Progress(now - self._progress_at, limit.total_seconds()))

    # Actions out

    def _carry_out(self, action: Action) -> None:
        match action:
            case Begin():
                self._run(self._prepare(), lambda error: Setback(error, "prepare"))
            case StartPs():
                self._run(self._run_ps(action), PsEnded)
            case ConfigurePs():
                self._wanted_config = action
                self._run(self._configure(action))
            case Scale():
                self._run(self._scale(), lambda error: Setback(error, "scale"))
            case TakeAway():
                self._run(self._take_away(), lambda error: Setback(error, "scale"))
            case KeepBatches():
                self._around.store.keep_stretches(self.job, stretches_json(action.stretches))
            case Invoke():
                who = (action.worker, action.attempt)
                self._run(self._invoke(action), lambda error: WorkerEnded(*who, "failed", error=error))
            case Restart():
                self._run(self._pause(action))
            case Publish():
                self._run(self._publish(), lambda error: Setback(error, "publish"))
            case Report():
                self._log_state(action)
                self._report(durable=True, blob_digest=action.blob_digest)
            case Happened():
                if "code" in action.data:
                    # Beside what its workers wrote, which is of what followed from it as well.
                    self._around.log(self.job, "agent", f"{action.data['code']}: {action.text}")
                self._around.happened(self.job, action)
            case Quit():
                self._run(self._quit(action))

    def _log_state(self, action: Report) -> None:
        """For the operator of the region, who sees no job's history."""
        if action.state == self._logged_state:
            return
        self._logged_state = action.state
        level = logging.WARNING if action.state == "failed" else logging.INFO
        _log.log(level, "job %s: %s%s", self.job, action.state, f" ({action.condition})" if action.condition else "")

    def _run(self, work: Coroutine[Any, Any, None], failed: Callable[[GeofedError], Event] = Setback) -> None:
        """Do something beside; whatever becomes of it, the machine hears of it."""
        task = asyncio.create_task(self._guarded(work, failed))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # A task that is cancelled before its first step never comes to its work.
        task.add_done_callback(lambda _: work.close())

    async def _guarded(self, work: Coroutine[Any, Any, None], failed: Callable[[GeofedError], Event]) -> None:
        try:
            await work
        except GeofedError as error:
            self.feed(failed(error))
        except Exception as error:  # noqa: BLE001 - the task's edge: what it broke on is told to the control plane
            _log.exception("partition %s", self.job)
            self.feed(failed(GeofedError("INTERNAL", f"{type(error).__name__}: {error}")))

    def _report(self, *, durable: bool, blob_digest: str = "") -> None:
        self._reported_at = time.monotonic()
        message = report_of(
            self.machine,
            self.job,
            self._status,
            self.meter,
            self._around.config.prices,
            self._around.config.channel.prices,
        )
        message.condition = message.condition or self._shards.condition
        message.shard_address, message.shards_here = self._shards.address, self._shards.here
        message.workers, message.preempted = self.machine.workers, self.machine.preempted
        message.scale_order = self.machine.order
        message.merged_by = self._merged_by
        message.blob_digest = blob_digest
        self._around.report(message, durable)

    # What the actions mean

    async def _prepare(self) -> None:
        plan, task = self.start.plan, self.start.task
        around = self._around
        await self._shards.take(self._run)
        await self._sign_splits()
        bundle = await around.fetch_bundle(task.bundle_digest)
        # Workers are called only after this, and before one has come the server asks for no model.
        if (initial := initial_model_file(self.start, self._folder)) is not None:
            await around.fetch_model(task.initial_model, initial)
        around.channel.require(plan.channel or "auto")
        await asyncio.to_thread(self._prepare_channel, bundle)
        await self._deploy()
        await around.gateway.wait_ready(self._function, self.machine.workers, _READY)
        if around.config.policy.ship_logs:
            self._run(self._logs.follow())
        self.feed(Prepared())

    async def _scale(self) -> None:
        self.feed(await self._deploy())

    async def _take_away(self) -> None:
        async with self._deploying:
            await self._around.gateway.scale(self._function, self.machine.workers)
        self.feed(Deployed(None))

    async def _deploy(self) -> Deployed:
        """Have a replica for each worker."""
        gateway = self._around.gateway
        async with self._deploying:
            workers, preemptible = self.machine.workers, self.machine.preemptible
            await gateway.deploy(self._spec(workers, preemptible=preemptible))
            await gateway.scale(self._function, workers)
        return Deployed(workers, preemptible)

    def _spec(self, workers: int, *, preemptible: bool) -> FunctionSpec:
        plan = self.start.plan
        call_seconds = timedelta(seconds=plan.slice_seconds) + CALL_GRACE
        kind = {_CAPACITY_LABEL: "preemptible"} if preemptible else {}
        return FunctionSpec(
            service=self._function,
            image=self._around.image,
            labels={**fixed_scale_labels(workers), **kind},
            annotations={SHARE_ANNOTATION: self.job} if self._shards.foreign else {},
            constraints=self._constraints(preemptible=preemptible),
            env_vars={**timeout_env(call_seconds), **self._around.channel.worker_env()},
            limits={"memory": f"{plan.memory_mb}Mi"},
        )

    def _constraints(self, *, preemptible: bool) -> tuple[str, ...]:
        """Where the platform may put the function."""
        gateway = self._around.config.gateway
        if preemptible and isinstance(gateway, OpenFaasGateway):
            return gateway.preemptible_constraints
        return ()

    def _prepare_channel(self, bundle: bytes) -> None:
        channel = self._around.channel.open(self.job)
        try:
            channel.put(bundle_key(self.start), [bundle])
        finally:
            self.meter.channel_used(channel.usage)
            channel.close()
        plan = self.start.plan
        kind = self._around.channel.kind
        # Workers that are told nothing must know how long a request takes, whatever they were told to do.
        asks = plan.collective in ("auto", "k-reduce", "isp") or (kind == "s3" and plan.collective != "server-reduce")
        if plan.workers > 1 and kind != "file" and asks and not self._costs:
            costs, usage = self._around.channel.costs(self.job)
            self._costs = {name: float(value) for name, value in asdict(costs).items()}
            if (prices := self._around.config.channel.prices) is not None:
                self._costs |= {"put_usd": prices.usd_per_put, "get_usd": prices.usd_per_get}
            self.meter.channel_used(usage)

    def _end_attempt(self, attempt: int) -> None:
        """Tell workers that wait for each other in the channel that their attempt is over."""
        channel = self._around.channel.open(self.job)
        try:
            channel.put(fence_key(attempt), [b"over"])
        finally:
            self.meter.channel_used(channel.usage)
            channel.close()

    async def _sign_splits(self) -> None:
        self._splits = await asyncio.to_thread(self._shards.splits)
        self._signed_at = time.monotonic()

    async def _run_ps(self, action: StartPs) -> None:
        if self._ps_runs:
            return
        self._ps_runs = True
        ps: PsProcess | None = None
        try:
            ps = PsProcess(
                await self._ps_config(action),
                self._folder / "ps.json",
                self._around.identity,
                lambda line: self._around.log(self.job, "ps", line),
            )
            await ps.start()
            self._around.store.keep_attempt(self.job, action.attempt)
            reason = await self._while_ps_runs(ps)
        except GeofedError as error:
            self._row = self._without_ports(error)
            reason = error
        finally:
            self._ps = None
            if ps is not None:
                await ps.stop()
            self._ps_runs = False
        self.feed(PsEnded(reason))

    async def _while_ps_runs(self, ps: PsProcess) -> GeofedError:
        """Listen to it until it ends; returns why."""
        self._around.store.keep_ports(self.job, ps.ports["worker"], ps.ports["exchange"], ps.ports.get("bulk", 0))
        self._row = self._around.store.partition(self.job) or self._row
        self._ps, self._began = ps, True
        self.meter.server_started(time.monotonic())
        self._news.server_started()
        tasks = {asyncio.create_task(self._watch(ps)), (ended := asyncio.create_task(ps.ended()))}
        self.feed(PsReady(f"{self._around.config.advertise}:{ps.ports['exchange']}"))
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            return await ended
        finally:
            await _cancelled(tasks)
            self.meter.server_ended(time.monotonic())

    def _without_ports(self, error: GeofedError) -> Any:
        """A port that somebody else has taken is not asked for again."""
        if error.code == "PORT_IN_USE":
            self._around.store.keep_ports(self.job, 0, 0, 0)
        return self._around.store.partition(self.job) or self._row

    async def _ps_config(self, action: StartPs) -> PsConfig:
        around = self._around
        config = server_config_of(
            self.start,
            action,
            workers=max(1, self.machine.workers),
            identity=around.identity,
            server=around.config.server,
            row=self._row,
            channel=around.channel.kind,
            channel_address=await asyncio.to_thread(around.channel.address, self.job),
            folder=self._folder,
            begun=self._began,
        )
        if config.bulk_port is None:
            text = "server.ports has no free port for bulk streams: large updates take the exchange port, and longer"
            around.log(self.job, "ps", text)
        return config

    async def _watch(self, ps: PsProcess) -> None:
        metered, status = 0.0, None
        try:
            async for status in ps.watch():
                self._status = status
                for told in self._news.of(status):
                    self._around.happened(self.job, told)
                if time.monotonic() - metered > _METER_SECONDS or status.phase == "finished":
                    metered = time.monotonic()
                    self.meter.server_said(status, metered)
                self.feed(PsSaid(view_of(status)))
                self._report(durable=False)
        finally:
            if status is not None:
                self.meter.server_said(status, time.monotonic())

    async def _configure(self, action: ConfigurePs) -> None:
        if self._ps is None or action is not self._wanted_config:
            return
        self._around.store.keep_attempt(self.job, action.attempt)
        try:
            status = await self._ps.configure(action)
            self.feed(Configured(action.attempt, status.round))
        except GeofedError as error:
            self._around.log(self.job, "agent", f"the parameter server could not be configured: {error}")
            if action is self._wanted_config:
                # If it is about to end, what follows configures it anew; else workers may wait for it.
                self.feed(Setback(error, "configure"))

    async def _invoke(self, action: Invoke) -> None:
        around, plan = self._around, self.start.plan
        around.store.keep_attempt(self.job, action.attempt)
        if time.monotonic() - self._signed_at > SIGNATURE_LIFE.total_seconds() / 2:
            await self._sign_splits()
        body = await self._invocation(action)
        begun = time.time()
        number = around.store.invocation_begun(self.job, begun, preemptible=action.preemptible)
        self.meter.invocation_begun(number, begun, plan.memory_mb, preemptible=action.preemptible)
        failure: GeofedError | None = None
        outcome: Outcome | None = None
        try:
            outcome = await self._call(body, timedelta(seconds=plan.slice_seconds) + CALL_GRACE)
        except GeofedError as error:
            failure = error
        finally:
            self.meter.invocation_ended(number, time.time())
        if outcome is None or outcome.status == "failed":
            await self._logs.catch_up()
        if outcome is None:
            self.feed(WorkerEnded(action.worker, action.attempt, "failed", error=failure))
            return
        self.meter.invocation_said(outcome)
        if outcome.status in ("failed", "left"):
            code = outcome.code if outcome.code in CATALOGUE else "FUNCTION_FAILED"
            failure = GeofedError(code, outcome.message, hint=outcome.hint or None)
        if outcome.merged_by and outcome.merged_by != self._merged_by and action.workers > 1:
            self._merged_by = outcome.merged_by
            text = f"{self.start.region}: {action.workers} workers merge by {outcome.merged_by}"
            self._around.happened(self.job, Happened("collective.used", text, {"collective": outcome.merged_by}))
        self.feed(WorkerEnded(action.worker, action.attempt, outcome.status, outcome.resume_key, failure, outcome.step))

    async def _call(self, body: bytes, limit: timedelta) -> Outcome:
        """One call of the function; only a busy platform is asked again, since the call has not begun there."""
        pause = 0.05
        while True:
            try:
                answer = await self._around.gateway.invoke(self._function, body, timeout=limit)
            except GeofedError as error:
                if error.code != "FUNCTION_BUSY":
                    raise
                await asyncio.sleep(pause)
                pause = min(pause * 1.5, 1.0)
                continue
            if answer.status != 200:
                raise GeofedError("FUNCTION_FAILED", f"the function answered {answer.status}: {answer.body[:200]!r}")
            try:
                return Outcome.model_validate_json(answer.body)
            except ValidationError:
                raise GeofedError("FUNCTION_FAILED", f"the function answered {answer.body[:200]!r}") from None

    async def _invocation(self, action: Invoke) -> bytes:
        around = self._around
        async with self._opening_channel:
            # Once for all: each time the workers' user gets another password.
            if not self._worker_channel:
                self._worker_channel = await asyncio.to_thread(around.channel.worker_address, self.job)
        told = Told(
            around.identity, around.config.server, self._row, self._splits, self._shards.declared_samples,
            around.channel.kind, self._worker_channel, self._costs,
        )  # fmt: skip
        return invocation_of(self.start, action, told).model_dump_json().encode()

    async def _pause(self, action: Restart) -> None:
        if action.attempt > 1:
            with contextlib.suppress(GeofedError):
                await asyncio.to_thread(self._end_attempt, action.attempt - 1)
        await asyncio.sleep(action.seconds)
        self.feed(Retry(action.attempt))

    async def _publish(self) -> None:
        if self._ps is None:
            raise GeofedError("UNAVAILABLE", "the parameter server does not run")
        digest = await self._around.publish_model(self._ps)
        self.feed(Published(digest))

    async def _quit(self, action: Quit) -> None:
        await self._logs.catch_up()
        await _cancelled(self._tasks - {asyncio.current_task()})
        self.feed(Ended())
        await self._delete_function()
        with contextlib.suppress(GeofedError):
            await asyncio.to_thread(self._around.channel.discard, self.job)
        if action.discard:
            for folder in (self._folder, self._shards.folder):
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    async def _delete_function(self) -> None:
        """However long the gateway is away: a function that is left behind would cost money for ever."""
        pause = 0.2
        while True:
            try:
                await self._around.gateway.delete(self._function)
                return
            except GeofedError as error:
                if not error.retryable:
                    return
            await asyncio.sleep(pause)
            pause = min(pause * 2, _LONGEST_PAUSE_SECONDS)


async def _cancelled(tasks: Collection[asyncio.Task[Any] | None]) -> None:
    """Cancel tasks and wait until they have cleared up."""
    running = [task for task in tasks if task is not None]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
