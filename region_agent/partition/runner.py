"""Carries out the actions of a partition's state machine: processes, calls, files and meters."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from geofed_pb.errors import CATALOGUE, GeofedError, unforeseen_as_internal
from geofed_pb.tasks import background, cancel_all
from geofed_pb.tracing import JobTrace
from geofed_pb.v1 import agent_pb2, sync_pb2
from region_agent.gateway.call_token import CallToken
from region_agent.own_model import copy_own_model, remove_all_but_own_model
from region_agent.partition.calls import (
    batches_of,
    gpus_of,
    initial_adapter_file,
    initial_model_file,
    stretches_json,
    whole_pipelines,
)
from region_agent.partition.context import PartitionContext
from region_agent.partition.events import (
    Action,
    ActionFailed,
    ConfigurePs,
    Deployed,
    Event,
    IdleTick,
    Invoke,
    PartitionConfigured,
    PartitionPrepared,
    Preempted,
    PreparePartition,
    PsEnded,
    PsReady,
    PsStatusChanged,
    Publish,
    PublishAsked,
    Published,
    RecordEvent,
    RemoveReplicas,
    Retry,
    RetryLater,
    Scaled,
    ScaleWorkers,
    SendReport,
    ShutDown,
    ShutDownFinished,
    Started,
    StartPs,
    StoreBatches,
    WorkerEnded,
)
from region_agent.partition.invocation_bodies import HeldDevices, Invocations
from region_agent.partition.logs import FunctionLogs
from region_agent.partition.machine import PartitionMachine
from region_agent.partition.peers import follow_peers
from region_agent.partition.report import (
    PartitionMeter,
    report_of,
    view_of,
    withhold,
    withhold_metrics,
    withhold_small_counts,
)
from region_agent.partition.server.events import ServerEvents
from region_agent.partition.server.running import ServerObserver, ServerRuns
from region_agent.partition.shards import SHARDS, PartitionShards
from region_agent.partition.worker_function import WorkerFunction
from region_agent.privacy import PrivacyGuard, is_private, keeps_texts, ships_logs, without_quotes
from region_agent.shards.digests import JobDigests
from region_agent.shards.indexing import INDEXES, Indexes
from region_agent.shards.weights import copy_weights
from region_agent.state.store import AgentStore, PartitionRow
from region_agent.worker.invocation import CALL_GRACE, Outcome

__all__ = ["TRACING", "PartitionRunner"]

_log = structlog.get_logger("geofed.partition")
TRACING = "geofed-region-agent"
"""Name of the agent in traces."""
_ACCOUNT_SECONDS = 5.0
"""Longest interval between reports on a running partition, so that the control plane's account is up to date."""


def _stored_row(store: AgentStore, job: str) -> PartitionRow:
    row = store.partition(job)
    if row is None:
        raise GeofedError("INTERNAL", f"partition {job} was not stored")
    return row


def _task_config_of(start: agent_pb2.StartPartition) -> object:
    """Return the task's configuration; None if it is not JSON."""
    with contextlib.suppress(ValueError):
        return json.loads(start.task.config_json or "{}")
    return None


def _worker_function_of(
    context: PartitionContext, start: agent_pb2.StartPartition, row: PartitionRow, machine: PartitionMachine
) -> WorkerFunction:
    return WorkerFunction(
        start,
        machine,
        context.gateway,
        context.config,
        context.channel,
        start.task.image or context.image,
        context.owner,
        CallToken.derived(row.token_key) if context.config.platform.callable_by_others else CallToken(),
    )


def _machine_of(start: agent_pb2.StartPartition, row: PartitionRow) -> PartitionMachine:
    """Return the state machine of a partition as the agent's last run has left it."""
    workers = start.plan.workers if row.workers is None else whole_pipelines(start.plan, row.workers)
    return PartitionMachine(
        start.region,
        workers,
        epoch=start.epoch,
        attempt=row.attempt,
        batches=batches_of(start.plan, row),
        preemptible=row.preemptible,
        order=row.scale_order,
    )


def _private_folder(parent: Path, name: str) -> Path:
    """Create a folder whose parent no other user can enter."""
    parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    parent.chmod(0o700)
    folder = parent / name
    folder.mkdir(exist_ok=True)
    return folder


class PartitionRunner:
    """The partition of one job in this region. Not thread-safe: call it on the event loop."""

    def __init__(self, context: PartitionContext, start: agent_pb2.StartPartition) -> None:
        self._context, self.start = context, start
        self.job = start.job
        self._trace = JobTrace.of(start.traceparent, start.job, TRACING, region=start.region)
        self._task_config = _task_config_of(start)
        row = _stored_row(context.store, start.job)
        self.machine = _machine_of(start, row)
        self._folder = _private_folder(context.state_dir / "jobs", start.job)
        self._privacy = PrivacyGuard(context.config, context.state_dir)
        self._merged_by = ""
        """Collective that the workers have reported."""
        self._kept = agent_pb2.UploadedModel()
        """Answer to the control plane's last command to keep the model of a round."""
        self._function = _worker_function_of(context, start, row, self.machine)
        self._logs = FunctionLogs(context.gateway, lambda: self._function.names, self._log_of_worker)
        self._shards = PartitionShards(
            context.config,
            context.identity.tls,
            start,
            context.state_dir / SHARDS / start.job,
            Indexes(context.state_dir / INDEXES),
            lambda durable: self._report(durable=durable),
            lambda action: context.record_event(start.job, action),
        )
        each = context.config.worker_devices(gpus_of(start.task))
        self.meter = PartitionMeter(context.store, start.job, each)
        self._devices = HeldDevices(context.devices, start.job, each, self._workers_with_devices)
        own = context.config.datasets.get(start.task.dataset) if self._shards.own else None
        self._digests = JobDigests(context.state_dir, own, context.config.stores)
        self._invocations = Invocations(
            start, context.config, context.identity, context.channel, context.isolation, self._shards, self.meter,
            self._privacy,
        )  # fmt: skip
        self._server_events = ServerEvents()
        self._server = ServerRuns(
            context, start, row, self.meter, self._trace,
            ServerObserver(self._function.connect_to_server, self._server_ready, self._server_reported),
            folder=self._folder, ledger=self._privacy.folder,
        )  # fmt: skip
        self._reported_at = self._progress_at = time.monotonic()
        self._logged_state = self._waits_for = ""
        self._progress_mark: tuple[object, ...] = ()
        self._tasks: set[asyncio.Task[None]] = set()
        self._following: asyncio.Task[None] | None = None
        """Resolves the addresses of the other regions."""
        self._wanted_config: ConfigurePs | None = None

    # Events in

    def feed(self, event: Event) -> None:
        """Pass an event to the state machine and carry out the actions that it returns."""
        # Tasks that are started meanwhile have the job in all their lines, too.
        with structlog.contextvars.bound_contextvars(job=self.job):
            for action in self.machine.handle(self._without_quotes(event)):
                self._carry_out(action)
        self._devices.settle()

    def _workers_with_devices(self) -> int:
        """Return how many workers keep their devices between calls. A function that is ended may still compute."""
        return 0 if self.machine.state in ("finished", "published") else self.machine.workers

    def _without_quotes(self, event: Event) -> Event:
        """Return an event with an error as it may leave the region: reports, conditions and the history quote it."""
        if not keeps_texts(self._context.config, self.start.task.dataset, self.start.plan):
            return event
        region = self.start.region
        match event:
            case PsStatusChanged(view) if view.error is not None:
                error = without_quotes(view.error, region, self.job)
                condition = view.condition if error is view.error else ""
                return PsStatusChanged(replace(view, error=error, condition=condition))
            case WorkerEnded() | ActionFailed() | PsEnded() if event.error is not None:
                return replace(event, error=without_quotes(event.error, region, self.job))
        return event

    def begin(self) -> None:
        """Start the partition, or resume it after a restart of the agent."""
        self.feed(Started(self.start.epoch))
        row = self._server.row
        if row.peers is not None:
            self.peers(agent_pb2.Peers.FromString(row.peers))
        if row.publish:
            self.feed(PublishAsked())

    def repeated(self, start: agent_pb2.StartPartition) -> None:
        """Handle a repeated start command of the control plane, which may have a higher epoch."""
        self.feed(Started(start.epoch))

    def scale(self, wanted: Scaled) -> None:
        """Set the number of workers, which the caller has stored."""
        self.feed(replace(wanted, workers=whole_pipelines(self.start.plan, wanted.workers)))

    def keep(self, round_: int) -> None:
        """Upload the model of an evaluated round to the control plane."""
        self._run(self._keep(round_))

    def preempt(self, workers: int) -> None:
        """Keep this number of workers and end the others, as the cloud does when it takes their machines away."""
        self.feed(Preempted(workers))

    def peers(self, message: agent_pb2.Peers) -> None:
        """Set the addresses of the other regions' parameter servers, and which regions exchange directly."""
        if self._following is not None:
            self._following.cancel()
        follow = follow_peers(
            message,
            self.start.region,
            self._context.config.policy.peer_networks,
            self.feed,
            lambda: self.machine.state in ("stopped", "failed"),
        )
        self._following = background(self._guarded(follow, ActionFailed), self.fail)

    async def drained(self) -> None:
        """Wait until all background tasks have ended, as after a stop."""
        await self._unfollow()
        while self._tasks:
            await asyncio.wait(set(self._tasks))
        self._devices.release()

    async def _unfollow(self) -> None:
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait([self._following])

    async def close(self) -> None:
        """End the partition's processes and tasks; its state stays on disk."""
        self._digests.close()
        await self._unfollow()
        await cancel_all(self._tasks)

    async def forget_state(self) -> None:
        """Delete the state that the parameter server and the workers have stored. The partition must be closed."""
        if self._context.config.platform.local_files:
            # Replicas would keep the folder of a file channel that is deleted here: it is mounted when they start.
            await self._function.delete()
        with contextlib.suppress(GeofedError):
            await asyncio.to_thread(self._context.channel.discard, self.job)
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    def report_account(self, now: float) -> None:
        """Charge the server's running time, and report the account at an interval even if nothing else changes."""
        self.meter.add_server_time(now)
        self._check_progress(now)
        if self.machine.holds_workers and now - self._reported_at > _ACCOUNT_SECONDS:
            self._report(durable=False)

    def _check_progress(self, now: float) -> None:
        """Report the time without a step. A wait for other regions, which sets the server's condition, is not idle."""
        status = self._server.status
        mark = (self.machine.attempt, status.round, status.step, status.condition)
        if mark != self._progress_mark or status.condition or self.machine.state != "training":
            self._progress_mark, self._progress_at = mark, now
        limit = timedelta(seconds=self.start.plan.slice_seconds) + CALL_GRACE
        self.feed(IdleTick(now - self._progress_at, limit.total_seconds()))

    # Actions out

    def _carry_out(self, action: Action) -> None:
        match action:
            case PreparePartition():
                self._run(self._prepare(), lambda error: ActionFailed(error, "prepare"))
            case StartPs():
                self._run(self._run_ps(action), PsEnded)
            case ConfigurePs():
                self._wanted_config = action
                self._run(self._configure(action))
            case ScaleWorkers():
                self._run(self._scale(), lambda error: ActionFailed(error, "scale"))
            case RemoveReplicas():
                self._run(self._remove_replicas(), lambda error: ActionFailed(error, "scale"))
            case StoreBatches():
                self._context.store.keep_stretches(self.job, stretches_json(action.stretches))
            case Invoke():
                worker, attempt = action.worker, action.attempt
                self._run(self._invoke(action), lambda error: WorkerEnded(worker, attempt, "failed", error=error))
            case RetryLater():
                self._run(self._pause(action))
            case Publish():
                self._run(self._publish(), lambda error: ActionFailed(error, "publish"))
            case SendReport():
                self._log_state(action)
                self._report(durable=True, blob_digest=action.blob_digest)
            case RecordEvent():
                if "code" in action.data:
                    # The job's log shows the failure among the workers' lines, of which many are only consequences.
                    self._context.log(self.job, "agent", f"{action.data['code']}: {action.text}")
                self._context.record_event(self.job, action)
            case ShutDown():
                # What could not be shut down is in the log; the partition's end is reported nevertheless.
                self._run(self._shut_down(action), lambda _: ShutDownFinished())

    def _log_state(self, action: SendReport) -> None:
        """Log the state for the region's operator, who cannot read a job's history."""
        if action.state == self._logged_state:
            return
        self._logged_state = action.state
        log = _log.warning if action.state == "failed" else _log.info
        log("partition", job=self.job, state=action.state, condition=action.condition or None)

    def _run(self, work: Coroutine[Any, Any, None], failed: Callable[[GeofedError], Event] = ActionFailed) -> None:
        """Run a coroutine in the background; ``failed`` makes the event for its failure."""
        task = background(self._guarded(work, failed), self.fail)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # A task that is cancelled before it starts never awaits the coroutine.
        task.add_done_callback(lambda _: work.close())

    def fail(self, error: GeofedError) -> None:
        """Fail the partition: it may not run (any longer), or its state machine could not handle an event, and might
        wait for ever."""
        for action in self.machine.fail(error):
            self._carry_out(action)

    async def _guarded(self, work: Coroutine[Any, Any, None], failed: Callable[[GeofedError], Event]) -> None:
        try:
            # Every failure must reach the state machine.
            with unforeseen_as_internal(partial(_log.exception, "an action of a partition failed", job=self.job)):
                await work
        except GeofedError as error:
            self.feed(failed(error))

    def _report(self, *, durable: bool, blob_digest: str = "") -> None:
        self._reported_at = time.monotonic()
        message = report_of(
            self.machine,
            self.job,
            self._server.status,
            self.meter,
            self._context.config.prices,
            self._context.config.channel.prices,
        )
        message.condition = message.condition or self._shards.condition or self._waits_for
        message.evaluation.error = self._function.redact(message.evaluation.error)
        message.shard_address, message.shards_here = self._shards.address, self._shards.complete
        message.workers, message.preempted = self.machine.workers, self.machine.preempted
        message.scale_order = self.machine.order
        message.speed.merged_by = self._merged_by
        message.blob_digest = blob_digest
        message.keeps_models = True
        message.data.update(self._digests.values)
        message.kept.CopyFrom(self._kept)
        held = self._context.config.datasets.get(self.start.task.dataset)
        if is_private(self.start.plan):
            withhold(message, self._privacy.spent(self.job))
        if held is not None and held.minimum_count:
            withhold_small_counts(message.evaluation, held.minimum_count, self._task_config)
        elif held is not None and held.privacy is not None and not self.start.plan.wan_settings.get("measured"):
            withhold_metrics(message.evaluation)
        self._context.report(message, durable)

    # Implementation of the actions

    async def _prepare(self) -> None:
        plan, task = self.start.plan, self.start.task
        context = self._context
        await self._shards.receive(self._run)
        await self._invocations.sign_splits()
        self._run(self._digests.compute())
        with self._trace.span("fetch task"):
            folder = await context.fetch_task(task.bundle_digest)
        # The parameter server reads this file when the first worker connects, which is later.
        if (initial := initial_model_file(self.start, self._folder)) is not None:
            if task.initial_uri:
                given = context.config, task.initial_uri, task.initial_model, initial
                await asyncio.to_thread(copy_weights, *given)
            else:
                await context.fetch_model(task.initial_model, initial)
            if (adapter := initial_adapter_file(self.start, self._folder)) is not None:
                await context.fetch_model(task.initial_adapter, adapter)
            if task.local:
                await asyncio.to_thread(copy_own_model, self._folder, task.initial_job)
        if context.environments is not None and task.requirements:
            self._waits_for = f"installing the packages of {task.requirements}"
            self._report(durable=False)
            packages = await context.environments.prepare(self.job, folder, task.requirements)
            self._invocations.packages, self._waits_for = packages, ""
        context.channel.require(plan.channel or "auto")
        await asyncio.to_thread(self._invocations.prepare_channel, folder)
        await self._function.give_secrets()
        self._function.grants = await asyncio.to_thread(self._invocations.grants)
        with self._trace.span("deploy function"):
            await self._function.deploy()
            await self._function.wait_ready()
        if ships_logs(context.config, task.dataset, plan):
            self._run(self._logs.follow())
        elif context.config.policy.ship_logs is None:
            text = f"lines of job code stay in {self.start.region}, since they may quote data"
            context.log(self.job, "agent", text)
        self.feed(PartitionPrepared())

    async def _digests_known(self) -> None:
        """Wait for the digests of the data: the last report has them."""
        if not self._digests.known:
            self._waits_for = "reading the data for their digests"
            self._report(durable=False)
        with contextlib.suppress(GeofedError):  # it is told where they were begun
            await self._digests.compute()
        self._waits_for = ""

    async def _scale(self) -> None:
        self.feed(await self._function.deploy())

    async def _remove_replicas(self) -> None:
        await self._function.remove_replicas()
        self.feed(Deployed(None))

    async def _run_ps(self, action: StartPs) -> None:
        ended = await self._server.run(action, max(1, self.machine.workers))
        if ended is not None:
            self.feed(ended)

    def _server_ready(self, address: str) -> None:
        self._server_events.server_started()
        self.feed(PsReady(address))

    async def _server_reported(self, status: sync_pb2.PsStatus) -> None:
        for event in self._server_events.new_in(status):
            self._context.record_event(self.job, event)
        if status.phase == "finished":
            await self._digests_known()
        self.feed(PsStatusChanged(view_of(status)))
        self._report(durable=False)

    def _log_of_worker(self, source: str, line: str) -> None:
        self._context.log(self.job, source, self._function.redact(line))

    async def _configure(self, action: ConfigurePs) -> None:
        if self._server.process is None or action is not self._wanted_config:
            return
        self._context.store.keep_attempt(self.job, action.attempt)
        try:
            status = await self._server.process.configure(action)
            self.feed(PartitionConfigured(action.attempt, status.round, action.halt))
        except GeofedError as error:
            self._context.log(self.job, "agent", f"the parameter server could not be configured: {error}")
            if action is self._wanted_config:
                # A server that is about to end is configured again after its restart; otherwise workers may wait.
                self.feed(ActionFailed(error, "configure"))

    async def _invoke(self, action: Invoke) -> None:
        async with self._devices.of(action.worker) as numbers:
            ended = await self._called(action, numbers)
        self.feed(ended)

    async def _called(self, action: Invoke, gpu_numbers: tuple[int, ...]) -> WorkerEnded:
        """Call a worker; returns how it ended."""
        context, plan = self._context, self.start.plan
        context.store.keep_attempt(self.job, action.attempt)
        body = await self._invocations.body(action, self._server.row, gpu_numbers)
        begun = time.time()
        number = context.store.invocation_begun(self.job, begun, preemptible=action.preemptible)
        self.meter.invocation_begun(number, begun, plan.memory_mb, preemptible=action.preemptible)
        failure: GeofedError | None = None
        outcome: Outcome | None = None
        try:
            with self._trace.span("invocation", worker=action.worker, attempt=action.attempt):
                outcome = await self._function.call(action.worker, body)
        except GeofedError as error:
            failure = error
        finally:
            self.meter.invocation_ended(number, time.time())
        if outcome is None or outcome.status == "failed":
            await self._logs.catch_up()
        if outcome is None:
            return WorkerEnded(action.worker, action.attempt, "failed", error=failure)
        self.meter.add_outcome(outcome)
        if outcome.status in ("failed", "left"):
            code = outcome.code if outcome.code in CATALOGUE else "FUNCTION_FAILED"
            failure = GeofedError(code, outcome.message, hint=outcome.hint or None)
        if outcome.merged_by and outcome.merged_by != self._merged_by and action.workers > 1:
            self._merged_by = outcome.merged_by
            text = f"{self.start.region}: {action.workers} workers merge by {outcome.merged_by}"
            self._context.record_event(
                self.job, RecordEvent("collective.used", text, {"collective": outcome.merged_by})
            )
        return WorkerEnded(
            action.worker,
            action.attempt,
            outcome.status,
            outcome.resume_key,
            failure,
            outcome.step,
            outcome.waits_for,
        )

    async def _pause(self, action: RetryLater) -> None:
        if action.attempt > 1:
            with contextlib.suppress(GeofedError):
                await asyncio.to_thread(self._invocations.end_attempt, action.attempt - 1)
        await asyncio.sleep(action.seconds)
        self.feed(Retry(action.attempt))

    async def _publish(self) -> None:
        if self._server.process is None:
            raise GeofedError("UNAVAILABLE", "the parameter server is not running")
        with self._trace.span("upload model"):
            digest = await self._context.publish_model(self.job, self._server.process, 0)
        self.feed(Published(digest))

    async def _keep(self, round_: int) -> None:
        """Upload the model of an evaluated round. The job continues without it if that fails."""
        try:
            if self._server.process is None:
                raise GeofedError("UNAVAILABLE", "the parameter server is not running")
            digest = await self._context.publish_model(self.job, self._server.process, round_)
            answer = agent_pb2.UploadedModel(round=round_, blob_digest=digest)
        except GeofedError as error:
            answer = agent_pb2.UploadedModel(round=round_, error=error.message)
        # Every report repeats the answer, so it is set once it is complete.
        self._kept = answer
        self._report(durable=True)

    async def _shut_down(self, action: ShutDown) -> None:
        await self._logs.catch_up()
        await cancel_all([task for task in self._tasks if task is not asyncio.current_task()])
        self.feed(ShutDownFinished())
        await self._function.delete()
        self._devices.release()
        if self._context.environments is not None:
            self._context.environments.release(self.job)
        with contextlib.suppress(GeofedError):
            await asyncio.to_thread(self._context.channel.discard, self.job)
        if action.discard:
            await asyncio.to_thread(remove_all_but_own_model, self._folder)
            await asyncio.to_thread(shutil.rmtree, self._shards.folder, ignore_errors=True)
