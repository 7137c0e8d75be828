"""The region agent: connects the session with the control plane, the function gateway and the partitions."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import structlog

from geofed_pb.bounds import clean
from geofed_pb.errors import GeofedError
from geofed_pb.fork_server import ExecStarter, Starter
from geofed_pb.logs import describe_process
from geofed_pb.rpc import to_proto
from geofed_pb.tasks import awaited, background
from geofed_pb.tracing import flush
from geofed_pb.v1 import agent_pb2
from region_agent.approvals import Approvals
from region_agent.capacity import preemptible_workers
from region_agent.config import EmbeddedGateway, FileChannelConfig, OpenFaasGateway, RegionConfig
from region_agent.embedded_gateway import WORKER_IMAGE, EmbeddedGatewayProcess, openfaas_client, reachable
from region_agent.gateway import GatewayClient
from region_agent.gateway.device_blocks import DeviceBlocks
from region_agent.gateway.functions import Isolation
from region_agent.gateway.owner import Owner
from region_agent.isolation import isolation_of
from region_agent.link.blobs import Blobs
from region_agent.link.control_plane_stream import ControlPlaneStream
from region_agent.link.identity import Identity
from region_agent.link.log_shipping import LogShipping
from region_agent.partition.billing import invocation_amounts
from region_agent.partition.calls import gpus_of
from region_agent.partition.channel import RegionChannel, channel_text
from region_agent.partition.context import PartitionContext
from region_agent.partition.events import ActionFailed, PublishAsked, RecordEvent, Scaled, Stopped
from region_agent.partition.runner import TRACING, PartitionRunner
from region_agent.partition.shards import SHARDS
from region_agent.policy import (
    check_isolation,
    check_partition,
    check_sending,
    check_user_of_dataset,
    longest_slice,
    most_workers,
    over_quota,
)
from region_agent.privacy import PrivacyGuard
from region_agent.profiling import Profiler
from region_agent.shards.indexing import INDEXES, Indexes
from region_agent.shards.offered import OfferedDatasets
from region_agent.shards.sending import Sending, SendingContext
from region_agent.state.audit_log import AUDIT_KEY, RegionAudit
from region_agent.state.store import AgentStore, PartitionRow
from region_agent.status import Status, StatusFile
from region_agent.storage import SENDING, RegionStorage, channel_folder
from region_agent.tasks.environments import Environments
from sync.ps.tokens import new_key

__all__ = ["Agent", "run"]

_log = structlog.get_logger("geofed.agent")
_TICK_SECONDS = 1.0
"""Interval at which status, capacity and accounts are updated."""
_LOG_FLUSH_SECONDS = 0.3
"""Interval at which log lines are sent."""
_RENEW_RETRY_SECONDS = 30.0
"""Pause before a failed renewal of the certificate is retried."""
_CLOSING_SECONDS = 5.0
"""Time for partitions and transfers to end when the agent ends; the next start continues what takes longer."""
_SWEEP_SECONDS = 3600.0
"""Interval at which files that no job needs any more are looked for."""
_QUOTA_SECONDS = 5.0
"""Interval at which the disk space of jobs is measured, where the region limits it."""


_AUDITED = frozenset({"shard.sent", "shard.received"})
"""Events that are in the region's audit log, too."""


class Agent:
    """The daemon of a region."""

    def __init__(
        self,
        config: RegionConfig,
        state_dir: Path,
        log_format: str = "text",
        config_file: Path | None = None,
        starter: Starter | None = None,
    ) -> None:
        """Create the daemon.

        Args:
            log_format: format of the child processes' logs: "text" or "json".
            config_file: file that the configuration was read from; its datasets are followed.
            starter: starts the child processes; None: by executing Python.
        """
        self._starter = starter or ExecStarter()
        self._config_file = config_file
        # Child processes have other working directories, and get paths below it.
        state_dir = state_dir.resolve()
        self._config, self._state_dir, self._log_format = config, state_dir, log_format
        self._identity = Identity(state_dir, config)
        self._store = AgentStore(state_dir / "agent.db")
        self._preemptible = preemptible_workers(state_dir, config.capacity.preemptible)
        """Present number of preemptible workers."""
        self._hub = ControlPlaneStream(
            self._identity,
            self._store,
            self._catalogue_json,
            version("geofed"),
        )
        self._offered_datasets = OfferedDatasets(config, self._hub.open_new_session, Indexes(state_dir / INDEXES))
        self._partitions: dict[str, PartitionRunner] = {}
        self._sendings: dict[str, Sending] = {}
        """Shards that are sent to other regions, by job."""
        self._gateway: EmbeddedGatewayProcess | None = None
        self._context: PartitionContext | None = None
        self._profiler: Profiler | None = None
        self._approvals = Approvals(state_dir, config.policy.approve)
        self._privacy = PrivacyGuard(config, state_dir)
        self._audit = RegionAudit(self._store, state_dir / AUDIT_KEY, config.name, version("geofed"))
        self._blobs = Blobs(self._hub, self._audit, state_dir)
        self._unapproved: dict[str, agent_pb2.StartPartition] = {}
        """Partitions that wait for the operator's approval, or until their start can be recorded, by job."""
        self._unrecorded: set[str] = set()
        """Jobs of them whose start could not be recorded, which has been reported."""
        self._logs = LogShipping(self._store, self._hub.send_durably)
        self._storage = RegionStorage.of(config, state_dir)
        self._closing: set[asyncio.Task[None]] = set()
        """Tasks that end partitions and transfers."""
        self._isolation = Isolation("none", "the function gateway has not started")
        self._status_file = StatusFile(state_dir, self._store)
        self.stopped = asyncio.Event()

    def _catalogue_json(self) -> str:
        """Return what the region offers, for the control plane."""
        datasets = self._offered_datasets
        catalogue = self._config.catalogue(
            self._preemptible, datasets.sizes, datasets.withheld, self._isolation.kind, datasets.schemas,
            longest_slice(self._config),
        )  # fmt: skip
        return json.dumps(catalogue)

    async def run(self) -> None:
        """Run until `stopped` is set."""
        self._charge_interrupted()
        (self._state_dir / SHARDS).mkdir(parents=True, exist_ok=True, mode=0o700)
        client = await self._open_gateway()
        self._config = await reachable(self._config, client)
        self._isolation = await isolation_of(self._config, client)
        if self._isolation.kind == "none":
            _log.warning("job code is not isolated", isolation=self._isolation.text, hint=self._isolation.hint)
        self._context = self._partition_context(client)
        self._profiler = Profiler(self._context, self._hub.report_profile, self._audit.measuring)
        tasks = [awaited(work) for work in self._background_tasks()]
        if self._gateway is not None:
            tasks.append(awaited(self._watch_gateway(self._gateway)))
        try:
            self._privacy.require(self._audit.releases())
            self._privacy.reconcile({row.job for row in self._store.open_partitions()})
            for row in self._store.open_partitions():
                self._start_or_wait(agent_pb2.StartPartition.FromString(row.start))
            for row, discard in self._store.stopped_partitions():
                self._end(self._partition_of(row), "stopped before the agent started again", discard)
            for message, sent in self._store.sendings():
                self._start_sending(agent_pb2.SendShard.FromString(message), sent=sent)
            stopping = awaited(self.stopped.wait())
            done, _ = await asyncio.wait([*tasks, stopping], return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            for task in done - {stopping}:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            if self._closing:
                # The next start of the agent continues what takes longer.
                await asyncio.wait(self._closing, timeout=_CLOSING_SECONDS)
            for task in self._closing:
                task.cancel()
            await asyncio.gather(*tasks, *self._closing, return_exceptions=True)
            await asyncio.gather(*(partition.close() for partition in self._partitions.values()))
            await asyncio.gather(*(sending.close() for sending in self._sendings.values()))
            await self._profiler.close()
            await client.aclose()
            if self._gateway is not None:
                await self._gateway.stop()
            self._store.close()
            with suppress(OSError):
                self._channel_folder().rmdir()  # fails if a partition's values are kept for the next start

    def _background_tasks(self) -> list[Coroutine[Any, Any, None]]:
        file = self._config_file
        return [
            self._tick(), self._keep_certificate(), self._flush_logs(), self._keep_session(), self._sweep(),
            *([self._delete_orphans(context)] if (context := self._context) and context.owner.mark else []),
            self._offered_datasets.keep_checking(), *([self._offered_datasets.follow(file)] if file else []),
            *([self._watch_disk(most)] if (most := self._config.policy.max_disk_mb_per_job) is not None else []),
        ]  # fmt: skip

    async def _keep_session(self) -> None:
        # The session's first message contains the datasets, so they are checked before.
        await self._offered_datasets.check()
        await self._hub.run(self)

    # Context of the partitions

    def _partition_context(self, client: GatewayClient) -> PartitionContext:
        gateway = self._config.gateway
        return PartitionContext(
            config=self._config,
            identity=self._identity,
            store=self._store,
            gateway=client,
            state_dir=self._state_dir,
            channel=RegionChannel(self._config.channel, self._channel_folder(), self._config.name),
            image=WORKER_IMAGE if isinstance(gateway, EmbeddedGateway) else gateway.image,
            fetch_task=self._blobs.task_folder,
            fetch_model=self._hub.fetch_file,
            publish_model=self._blobs.publish_model,
            report=self._report,
            record_event=self._record_event,
            log=self._logs.add,
            log_format=self._log_format,
            starter=self._starter,
            isolation=self._isolation,
            owner=self._owner(),
            environments=Environments(self._state_dir, self._config),
            devices=DeviceBlocks(self._config.machine_devices),
        )

    def _owner(self) -> Owner:
        """Return the owner of the region's functions; those of the agent's own platform need no mark."""
        if not self._config.platform.shared:
            return Owner()
        made = Owner.of(self._config.name, self._identity.authority)
        # The authority's key may change later.
        return Owner(made.region, self._store.owner_mark(made.mark))

    def _channel_folder(self) -> Path:
        """Return the folder of a channel of files."""
        configured = self._config.channel
        return channel_folder(
            configured if isinstance(configured, FileChannelConfig) else FileChannelConfig(), self._state_dir
        )

    async def _open_gateway(self) -> GatewayClient:
        gateway = self._config.gateway
        if isinstance(gateway, OpenFaasGateway):
            return openfaas_client(gateway)
        capacity = self._config.capacity
        if isinstance(self._config.channel, FileChannelConfig):
            self._channel_folder().mkdir(parents=True, exist_ok=True, mode=0o700)
        self._gateway = EmbeddedGatewayProcess(
            self._state_dir,
            gateway,
            isolation=self._config.policy.isolation,
            warm=capacity.workers + capacity.preemptible > 0,
            owner=self._owner().mark,
            worker_host=self._config.server.worker_host,
            gpus=capacity.devices.count if capacity.devices is not None else 0,
            log_format=self._log_format,
            starter=self._starter,
        )
        return await self._gateway.start()

    async def _sweep(self) -> None:
        """Remove what the retention rules no longer keep: at the start, and at an interval."""
        while True:
            self._audit.erased(await asyncio.to_thread(self._storage.sweep, time.time()))
            await asyncio.to_thread(self._store.clear_log)
            await asyncio.sleep(_SWEEP_SECONDS)

    async def _delete_orphans(self, context: PartitionContext) -> None:
        """Delete what this region has on the platform and no job or profile uses: at the start, and at an interval."""
        while True:
            try:
                there = await context.gateway.list()
                for name in context.owner.orphans(there, self._active()):
                    _log.warning("a function that no job uses is deleted", function=name)
                    with suppress(GeofedError):
                        await context.gateway.delete(name)
                secrets = await context.gateway.list_secrets()
                for name in context.owner.orphan_secrets(secrets, self._active()):
                    with suppress(GeofedError):
                        await context.gateway.delete_secret(name)
            except GeofedError as error:
                _log.warning("the platform's functions and secrets could not be listed", error=str(error))
            await asyncio.sleep(_SWEEP_SECONDS)

    def _active(self) -> set[str]:
        """Return the identities of the jobs and profiles that are here."""
        partitions = {row.job for row in self._store.open_partitions()} | self._partitions.keys()
        return partitions | set(self._profiler.running if self._profiler is not None else ())

    async def _watch_disk(self, most_mb: int) -> None:
        """Fail jobs that take more disk space than the region gives one."""
        while True:
            await asyncio.sleep(_QUOTA_SECONDS)
            for job, partition in list(self._partitions.items()):
                used_mb = await asyncio.to_thread(self._storage.job_bytes, job) / 1e6
                if used_mb > most_mb and not partition.machine.over:
                    partition.feed(ActionFailed(over_quota(self._config.name, used_mb, most_mb)))

    async def _watch_gateway(self, gateway: EmbeddedGatewayProcess) -> None:
        await gateway.ended()
        raise GeofedError(
            "GATEWAY_UNAVAILABLE", "the embedded gateway has ended", hint="see gateway.log; restart the agent"
        )

    def _record_event(self, job: str, action: RecordEvent) -> None:
        if action.kind == "shard.sending":
            self._audit.sending_shard(job, action.data)
        elif action.kind in _AUDITED:
            self._audit.event(job, action.kind, action.data)
        message = agent_pb2.Happening(
            job=job, at=time.time(), kind=action.kind, text=clean(action.text), data_json=json.dumps(action.data)
        )
        self._hub.send_durably(agent_pb2.FromAgent(happening=message))

    async def _flush_logs(self) -> None:
        while True:
            await asyncio.sleep(_LOG_FLUSH_SECONDS)
            self._logs.flush()

    def _report(self, message: agent_pb2.PartitionReport, durable: bool) -> None:
        if durable:
            # Users look for the reason of a failure in the job's log, so its lines are sent before the report.
            self._logs.flush_job(message.job)
            self._audit.note(message)
        self._hub.report(message, durable=durable)

    def _charge_interrupted(self) -> None:
        """Charge the invocations that ran when the agent ended last, until the time at which it was last alive."""
        alive = self._store.last_alive()
        for number, job, begun, kind in self._store.open_invocations():
            row = self._store.partition(job)
            start = agent_pb2.StartPartition.FromString(row.start) if row else agent_pb2.StartPartition()
            devices = self._config.worker_devices(gpus_of(start.task)) if row else 0
            amounts = invocation_amounts(
                max(0.0, alive - begun), start.plan.memory_mb, preemptible=kind, devices=devices
            )
            self._store.invocation_ended(number, job, amounts)

    async def _tick(self) -> None:
        while True:
            now = time.time()
            self._status_file.write(self._status(now))
            self._update_capacity()
            self._start_approved()
            for partition in self._partitions.values():
                partition.report_account(time.monotonic())
            # Write the status immediately when a session begins or ends.
            await self._hub.session_changed(_TICK_SECONDS)

    def _update_capacity(self) -> None:
        """Read the number of preemptible workers. If there are too few, the job that started last loses its own
        first."""
        left = preemptible_workers(self._state_dir, self._config.capacity.preemptible)
        if left != self._preemptible:
            _log.info("preemptible workers changed", before=self._preemptible, now=left)
            self._preemptible = left
            self._hub.report_capacity(left)
        preemptible = [p for p in self._partitions.values() if p.machine.preemptible and p.machine.holds_workers]
        surplus = sum(partition.machine.workers for partition in preemptible) - left
        for partition in reversed(preemptible):
            before = partition.machine.workers
            if surplus > 0 and before:
                partition.preempt(before - min(surplus, before))
                # A partition that is about to end keeps its workers.
                surplus -= before - partition.machine.workers

    async def _keep_certificate(self) -> None:
        shown = self._identity.certificate.serial_number
        while True:
            with suppress(OSError, ValueError):
                if (found := self._identity.certificate.serial_number) != shown:
                    # Servers use it for each new connection; the session is opened anew with it.
                    shown = found
                    self._hub.open_new_session()
            if self._hub.connected and self._identity.renewal_due_in(time.time()) < 0:
                try:
                    await self._hub.renew()
                    _log.info("the certificate was renewed")
                except GeofedError as error:
                    _log.warning("the certificate could not be renewed yet", error=str(error))
                    await asyncio.sleep(_RENEW_RETRY_SECONDS)
            await asyncio.sleep(_TICK_SECONDS)

    def _status(self, now: float) -> Status:
        federation = self._identity.federation
        return Status(
            region=self._config.name,
            pid=os.getpid(),
            at=now,
            connected=self._hub.connected,
            last_heard=self._hub.last_heard,
            control_plane=federation.address,
            federation=federation.federation,
            certificate_ends=self._identity.certificate.not_valid_after_utc.timestamp(),
            gateway=self._config.gateway.kind,
            channel=channel_text(self._config),
            pending=[asdict(one) for one in self._approvals.pending()],
            isolation=self._isolation.text,
            partitions={
                job: {"state": p.machine.state, "attempt": p.machine.attempt, "condition": p.machine.condition}
                for job, p in sorted(self._partitions.items())
            },
            shards={
                job: {"to": s.order.to, "state": s.state, "condition": s.condition}
                for job, s in sorted(self._sendings.items())
            },
            condition="; ".join(filter(None, [str(self._hub.refusal or ""), self._offered_datasets.condition])),
        )

    # Commands of the control plane

    def start(self, seq: int, command: agent_pb2.StartPartition) -> None:
        """Store and start a partition; one that is running gets the command again.

        A command that the region's policy forbids is refused.
        """
        try:
            check_partition(self._config, command)
            check_isolation(self._config, self._isolation)
            self._privacy.admit(command)
            waits = not self._approvals.is_approved(command.job, command.task)
        except GeofedError as error:
            self._store.took(seq)
            self._refuse(command, error)
            return
        policy = self._config.policy
        checked = policy.allow_users is not None
        audit = self._audit.of_start(command, policy.approve, checked=checked, waits=waits)
        self._store.took_start(seq, command.job, command.SerializeToString(), new_key(), audit)
        running = self._partitions.get(command.job)
        if running is not None:
            running.repeated(command)
        else:
            self._start_or_wait(command)

    def _start_or_wait(self, command: agent_pb2.StartPartition) -> None:
        """Start a partition, unless the region's operator has to approve it first."""
        if not self._approvals.waits(command.job, command.task):
            policy = self._config.policy
            try:
                approver = self._approvals.approver(command.job, command.task)
                checked = policy.allow_users is not None
                self._audit.starting(command, policy.approve, checked=checked, approver=approver)
            except GeofedError as error:
                # Tried again with the next tick.
                self._unapproved[command.job] = command
                if command.job not in self._unrecorded:
                    self._unrecorded.add(command.job)
                    _log.warning("a job waits until its start can be recorded", job=command.job, error=str(error))
                    text = f"waiting until its start can be recorded: {error.message}"
                    report = agent_pb2.PartitionReport(
                        job=command.job, epoch=command.epoch, state="accepted", condition=text
                    )
                    self._hub.report(report, durable=False)
                return
            self._unapproved.pop(command.job, None)
            self._unrecorded.discard(command.job)
            self._start_partition(command)
            return
        self._unapproved[command.job] = command
        text = f"waiting for the approval of {command.region}'s operator: `geofed agent approve {command.job}`"
        _log.info("a job waits for approval", job=command.job, user=command.task.submission.user)
        report = agent_pb2.PartitionReport(job=command.job, epoch=command.epoch, state="accepted", condition=text)
        self._hub.report(report, durable=True)

    def _start_approved(self) -> None:
        """Start the partitions that the operator has approved by now."""
        for command in list(self._unapproved.values()):
            if not self._approvals.waits(command.job, command.task):
                self._start_or_wait(command)

    def _start_partition(self, command: agent_pb2.StartPartition) -> None:
        partition = self._partition(command)
        self._partitions[command.job] = partition
        try:
            # Again: the owner may have set a rule or a budget since the command was stored.
            check_user_of_dataset(self._config, command.task)
            self._privacy.admit(command)
        except GeofedError as error:
            partition.fail(error)
            return
        partition.begin()

    def _partition_of(self, row: PartitionRow) -> PartitionRunner:
        return self._partition(agent_pb2.StartPartition.FromString(row.start))

    def _partition(self, command: agent_pb2.StartPartition) -> PartitionRunner:
        if self._context is None:
            raise GeofedError("INTERNAL", "a command arrived before the agent was ready")
        return PartitionRunner(self._context, command)

    def _refuse(self, command: agent_pb2.StartPartition | agent_pb2.SendShard, error: GeofedError) -> None:
        _log.warning("job refused", job=command.job, error=str(error))
        report = agent_pb2.PartitionReport(
            job=command.job, epoch=command.epoch, state="refused", condition=error.message, error=to_proto(error)
        )
        self._report(report, durable=True)

    def peers(self, seq: int, command: agent_pb2.Peers) -> None:
        """Store the addresses of the other regions, and pass them to the running partition."""
        self._store.took_peers(seq, command.job, command.SerializeToString())
        if command.job in self._partitions:
            self._partitions[command.job].peers(command)

    def scale(self, seq: int, command: agent_pb2.ScalePartition) -> None:
        """Store and apply a partition's new number of workers, which the region's policy may limit."""
        kind = command.preemptible
        workers = min(command.workers, most_workers(self._config, preemptible=kind))
        # If the region allows fewer workers, each worker's batch stays the same.
        batch = command.batch * workers // command.workers if command.workers else 0
        rate, order = command.learning_rate, command.order
        self._store.took_scale(seq, command.job, workers, batch, rate, preemptible=kind, order=order)
        if command.job in self._partitions:
            self._partitions[command.job].scale(Scaled(workers, command.reason, batch, rate, kind, order))

    def publish(self, seq: int, command: agent_pb2.PublishModel) -> None:
        """Store that the job's model is wanted, and have the running partition publish it."""
        self._store.took_publish(seq, command.job)
        if command.job in self._partitions:
            self._partitions[command.job].feed(PublishAsked())

    def keep(self, seq: int, command: agent_pb2.KeepModel) -> None:
        """Have the running partition upload the model of a round. The command is not stored: the control plane chooses
        another round after a restart."""
        self._store.took(seq)
        if (partition := self._partitions.get(command.job)) is not None:
            partition.keep(command.round)

    def send_shard(self, seq: int, command: agent_pb2.SendShard) -> None:
        """Store and start the transfer of a shard to another region; one that is running for the job is replaced.

        A command that the region's policy forbids is refused.
        """
        try:
            check_sending(self._config, command, None)
            if command.job in self._partitions:
                raise GeofedError("CONFIG_INVALID", f"a partition of {command.job} is running here on the same shard")
        except GeofedError as error:
            self._store.took(seq)
            self._refuse(command, error)
            return
        self._store.took_sending(seq, command.job, command.SerializeToString())
        before = self._sendings.pop(command.job, None)
        if before is not None:
            self._close(before)
        self._start_sending(command)

    def _start_sending(self, command: agent_pb2.SendShard, *, sent: bool = False) -> None:
        context = SendingContext(
            self._config,
            self._store,
            self._identity.tls,
            self._state_dir / SENDING,
            self._report,
            self._record_event,
        )
        sending = self._sendings[command.job] = Sending(context, command, sent=sent)
        sending.begin()

    def _close(self, sending: Sending) -> None:
        self._run_to_end(sending.close(), sending.order.job, sending.order.epoch)

    def state_restored(self) -> None:
        """Restart partitions of several regions without state, as after the loss of a disk.

        A parameter server with an older state lacks updates that the other regions have deleted. A job in this region
        only continues from its state. What was spent of privacy since the copy is not known.
        """
        self._privacy.state_restored()
        for partition in list(self._partitions.values()):
            if len(partition.start.regions) > 1:
                self._run_to_end(self._restart_without_state(partition), partition.job, partition.start.epoch)

    async def _restart_without_state(self, partition: PartitionRunner) -> None:
        await partition.close()
        await partition.forget_state()
        row = self._store.partition(partition.job)
        if row is not None and self._partitions.get(partition.job) is partition:
            start = agent_pb2.StartPartition.FromString(row.start)
            start.resumed = True
            self._start_partition(start)

    def profile(self, command: agent_pb2.ProfileTask) -> None:
        """Measure a task at length; ignored until the agent has its profiler."""
        if self._profiler is not None:
            self._profiler.profile(command)

    def probe(self, command: agent_pb2.ProfileTask) -> None:
        """Run a few steps of a task; ignored until the agent has its profiler."""
        if self._profiler is not None:
            self._profiler.probe(command)

    def own_model(self, command: agent_pb2.OwnModel) -> None:
        """Upload the region's own model of a job that runs here, or has run here lately."""

        def failed(error: GeofedError) -> None:
            self._hub.report_profile(agent_pb2.ProfileReport(id=command.id, error=to_proto(error)))

        async def upload() -> None:
            self._privacy.require_own_model(Path(command.job).name)
            digest = await self._blobs.upload_own_model(command)
            self._hub.report_profile(agent_pb2.ProfileReport(id=command.id, model_digest=digest))

        task = background(upload(), failed)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def stop(self, seq: int, command: agent_pb2.StopPartition) -> None:
        """Store and carry out the end of the job's partition or of its shard's transfer, and its deletion.

        A job that is not known here is reported as stopped.
        """
        partition = self._partitions.get(command.job)
        sending = self._sendings.pop(command.job, None)
        if sending is not None:
            sending.stopped()
            self._store.took_end_of_sending(seq, command.job)
            self._close(sending)
        else:
            self._stop(seq, command)
        if command.deleted:
            self._run_to_end(self._delete(command, partition), command.job, command.epoch)

    async def _delete(self, command: agent_pb2.StopPartition, partition: PartitionRunner | None) -> None:
        """Delete all that is kept of a job; what cannot be deleted now is swept later."""
        if partition is not None:
            await partition.drained()
        gone = await asyncio.to_thread(self._storage.delete_job, command.job, command.bundle_digest)
        self._audit.erased(gone, command.job)
        if self._context is not None:
            with suppress(GeofedError):
                await asyncio.to_thread(self._context.channel.discard, command.job)

    def _stop(self, seq: int, command: agent_pb2.StopPartition) -> None:
        self._store.took_stop(seq, command.job, discard=command.discard)
        self._approvals.done(command.job)
        self._unrecorded.discard(command.job)
        if self._unapproved.pop(command.job, None) is not None:
            self._store.forget(command.job)
            self._privacy.close(command.job)
        partition = self._partitions.pop(command.job, None)
        if partition is None:
            report = agent_pb2.PartitionReport(job=command.job, epoch=command.epoch, state="stopped")
            self._report(report, durable=True)
            return
        self._end(partition, command.reason, command.discard)

    def _end(self, partition: PartitionRunner, reason: str, discard: bool) -> None:
        """Stop a partition. After a crash the next start of the agent completes it."""

        async def drain() -> None:
            await partition.drained()
            self._privacy.close(partition.job)
            self._store.forget(partition.job)

        partition.feed(Stopped(reason, discard))
        self._run_to_end(drain(), partition.job, partition.start.epoch)

    def _run_to_end(self, work: Coroutine[Any, Any, None], job: str, epoch: int) -> None:
        """End or restart a partition or a transfer in the background; if that fails, the job does."""

        def failed(error: GeofedError) -> None:
            report = agent_pb2.PartitionReport(
                job=job, epoch=epoch, state="failed", condition=error.message, error=to_proto(error)
            )
            self._report(report, durable=True)

        closing = background(work, failed)
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)


async def run(config: RegionConfig, state_dir: Path, log_format: str, config_file: Path, starter: Starter) -> None:
    """Run the agent until SIGTERM or SIGINT."""
    describe_process(region=config.name)
    agent = Agent(config, state_dir, log_format, config_file, starter)
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, agent.stopped.set)
    await agent.run()
    await asyncio.to_thread(flush, TRACING)
