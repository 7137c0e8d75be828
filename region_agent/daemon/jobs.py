"""The jobs of a region: carries out the control plane's commands, and reports to it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from geofed_pb.bounds import clean
from geofed_pb.errors import GeofedError
from geofed_pb.rpc import to_proto
from geofed_pb.tasks import background, cancel_all
from geofed_pb.v1 import agent_pb2
from region_agent.approvals import Approvals
from region_agent.config import RegionConfig
from region_agent.gateway.functions import Isolation
from region_agent.link.blobs import Blobs
from region_agent.link.control_plane_stream import ControlPlaneStream
from region_agent.link.identity import Identity
from region_agent.link.log_shipping import LogShipping
from region_agent.partition.billing import invocation_amounts
from region_agent.partition.calls import gpus_of
from region_agent.partition.context import PartitionContext
from region_agent.partition.events import ActionFailed, PublishAsked, RecordEvent, Scaled, Stopped
from region_agent.partition.runner import PartitionRunner
from region_agent.policy import (
    check_isolation,
    check_partition,
    check_sending,
    check_user_of_dataset,
    most_workers,
    over_quota,
)
from region_agent.privacy import PrivacyGuard
from region_agent.profiling import Profiler
from region_agent.shards.sending import Sending, SendingContext
from region_agent.state.audit_log import RegionAudit
from region_agent.state.store import AgentStore, PartitionRow
from region_agent.storage import SENDING, RegionStorage
from sync.ps.tokens import new_key

__all__ = ["RegionJobs", "RegionParts"]

_log = structlog.get_logger("geofed.agent")
_CLOSING_SECONDS = 5.0
"""Time for partitions and transfers to end when the agent ends; the next start continues what takes longer."""
_QUOTA_SECONDS = 5.0
"""Interval at which the disk space of jobs is measured, where the region limits it."""
_AUDITED = frozenset({"shard.sent", "shard.received"})
"""Events that are in the region's audit log, too."""


@dataclass(frozen=True)
class RegionParts:
    """The parts of the agent that its jobs use."""

    config: RegionConfig
    state_dir: Path
    identity: Identity
    store: AgentStore
    hub: ControlPlaneStream
    approvals: Approvals
    privacy: PrivacyGuard
    audit: RegionAudit
    blobs: Blobs
    logs: LogShipping
    storage: RegionStorage


class RegionJobs:
    """What runs in this region: partitions, transfers of shards, profiles. Not thread-safe: call it on the event loop.

    It is the receiver of the control plane's commands (`link.control_plane_stream.Commands`).
    """

    def __init__(self, parts: RegionParts) -> None:
        self._config, self._state_dir, self._identity = parts.config, parts.state_dir, parts.identity
        self._store, self._hub, self._logs = parts.store, parts.hub, parts.logs
        self._approvals, self._privacy, self._audit = parts.approvals, parts.privacy, parts.audit
        self._blobs, self._storage = parts.blobs, parts.storage
        self._isolation = Isolation("none", "the function gateway has not started")
        self._context: PartitionContext | None = None
        self._profiler: Profiler | None = None
        self.partitions: dict[str, PartitionRunner] = {}
        """Running partitions, by job."""
        self.sendings: dict[str, Sending] = {}
        """Shards that are sent to other regions, by job."""
        self._unapproved: dict[str, agent_pb2.StartPartition] = {}
        """Partitions that wait for the operator's approval, or until their start can be recorded, by job."""
        self._unrecorded: set[str] = set()
        """Jobs of them whose start could not be recorded, which has been reported."""
        self._closing: set[asyncio.Task[None]] = set()
        """Tasks that end partitions and transfers."""

    def open(self, context: PartitionContext) -> None:
        """Run partitions on a region's gateway from now on."""
        self._context, self._config, self._isolation = context, context.config, context.isolation
        self._profiler = Profiler(context, self._hub.report_profile, self._audit.measuring)

    def resume(self) -> None:
        """Resume the partitions and transfers that the agent's last run has left."""
        for row in self._store.open_partitions():
            self._start_or_wait(agent_pb2.StartPartition.FromString(row.start))
        for row, discard in self._store.stopped_partitions():
            self._end(self._partition_of(row), "stopped before the agent started again", discard)
        for message, sent in self._store.sendings():
            self._start_sending(agent_pb2.SendShard.FromString(message), sent=sent)

    async def close(self) -> None:
        """End all processes and tasks, after some seconds for what is ending already; their state stays on disk."""
        if self._closing:
            # The next start of the agent continues what takes longer.
            await asyncio.wait(self._closing, timeout=_CLOSING_SECONDS)
        await cancel_all(self._closing)
        await asyncio.gather(*(partition.close() for partition in self.partitions.values()))
        await asyncio.gather(*(sending.close() for sending in self.sendings.values()))
        if self._profiler is not None:
            await self._profiler.close()

    def active(self) -> set[str]:
        """Return the identities of the jobs and profiles that are here."""
        partitions = {row.job for row in self._store.open_partitions()} | self.partitions.keys()
        return partitions | set(self._profiler.running if self._profiler is not None else ())

    def record_event(self, job: str, action: RecordEvent) -> None:
        """Add an event to a job's history, and to the region's audit log if it belongs there."""
        if action.kind == "shard.sending":
            self._audit.sending_shard(job, action.data)
        elif action.kind in _AUDITED:
            self._audit.event(job, action.kind, action.data)
        message = agent_pb2.Happening(
            job=job, at=time.time(), kind=action.kind, text=clean(action.text), data_json=json.dumps(action.data)
        )
        self._hub.send_durably(agent_pb2.FromAgent(happening=message))

    def report(self, message: agent_pb2.PartitionReport, durable: bool) -> None:
        """Send a report to the control plane; ``durable``: until it is acknowledged."""
        if durable:
            # Users look for the reason of a failure in the job's log, so its lines are sent before the report.
            self._logs.flush_job(message.job)
            self._audit.note(message)
        self._hub.report(message, durable=durable)

    def charge_interrupted(self) -> None:
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

    async def watch_disk(self, most_mb: int) -> None:
        """Fail jobs that take more disk space than the region gives one."""
        while True:
            await asyncio.sleep(_QUOTA_SECONDS)
            for job, partition in list(self.partitions.items()):
                used_mb = await asyncio.to_thread(self._storage.job_bytes, job) / 1e6
                if used_mb > most_mb and not partition.machine.over:
                    partition.feed(ActionFailed(over_quota(self._config.name, used_mb, most_mb)))

    def report_accounts(self, now: float) -> None:
        """Bring the accounts of the running partitions up to date."""
        for partition in self.partitions.values():
            partition.report_account(now)

    def preempt_beyond(self, left: int) -> None:
        """End preemptible workers beyond the ``left`` that the region has; the job that started last loses its own
        first."""
        preemptible = [p for p in self.partitions.values() if p.machine.preemptible and p.machine.holds_workers]
        surplus = sum(partition.machine.workers for partition in preemptible) - left
        for partition in reversed(preemptible):
            before = partition.machine.workers
            if surplus > 0 and before:
                partition.preempt(before - min(surplus, before))
                # A partition that is about to end keeps its workers.
                surplus -= before - partition.machine.workers

    def partition_states(self) -> dict[str, dict[str, object]]:
        """Return state, attempt and condition of each partition, by job."""
        return {
            job: {"state": p.machine.state, "attempt": p.machine.attempt, "condition": p.machine.condition}
            for job, p in sorted(self.partitions.items())
        }

    def shard_states(self) -> dict[str, dict[str, object]]:
        """Return destination, state and condition of each transfer of a shard, by job."""
        return {
            job: {"to": s.order.to, "state": s.state, "condition": s.condition}
            for job, s in sorted(self.sendings.items())
        }

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
        running = self.partitions.get(command.job)
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

    def start_approved(self) -> None:
        """Start the partitions that the operator has approved by now."""
        for command in list(self._unapproved.values()):
            if not self._approvals.waits(command.job, command.task):
                self._start_or_wait(command)

    def _start_partition(self, command: agent_pb2.StartPartition) -> None:
        partition = self._partition(command)
        self.partitions[command.job] = partition
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
        self.report(report, durable=True)

    def peers(self, seq: int, command: agent_pb2.Peers) -> None:
        """Store the addresses of the other regions, and pass them to the running partition."""
        self._store.took_peers(seq, command.job, command.SerializeToString())
        if command.job in self.partitions:
            self.partitions[command.job].peers(command)

    def scale(self, seq: int, command: agent_pb2.ScalePartition) -> None:
        """Store and apply a partition's new number of workers, which the region's policy may limit."""
        kind = command.preemptible
        workers = min(command.workers, most_workers(self._config, preemptible=kind))
        # If the region allows fewer workers, each worker's batch stays the same.
        batch = command.batch * workers // command.workers if command.workers else 0
        rate, order = command.learning_rate, command.order
        self._store.took_scale(seq, command.job, workers, batch, rate, preemptible=kind, order=order)
        if command.job in self.partitions:
            self.partitions[command.job].scale(Scaled(workers, command.reason, batch, rate, kind, order))

    def publish(self, seq: int, command: agent_pb2.PublishModel) -> None:
        """Store that the job's model is wanted, and have the running partition publish it."""
        self._store.took_publish(seq, command.job)
        if command.job in self.partitions:
            self.partitions[command.job].feed(PublishAsked())

    def keep(self, seq: int, command: agent_pb2.KeepModel) -> None:
        """Have the running partition upload the model of a round. The command is not stored: the control plane chooses
        another round after a restart."""
        self._store.took(seq)
        if (partition := self.partitions.get(command.job)) is not None:
            partition.keep(command.round)

    def send_shard(self, seq: int, command: agent_pb2.SendShard) -> None:
        """Store and start the transfer of a shard to another region; one that is running for the job is replaced.

        A command that the region's policy forbids is refused.
        """
        try:
            check_sending(self._config, command, None)
            if command.job in self.partitions:
                raise GeofedError("CONFIG_INVALID", f"a partition of {command.job} is running here on the same shard")
        except GeofedError as error:
            self._store.took(seq)
            self._refuse(command, error)
            return
        self._store.took_sending(seq, command.job, command.SerializeToString())
        before = self.sendings.pop(command.job, None)
        if before is not None:
            self._close(before)
        self._start_sending(command)

    def _start_sending(self, command: agent_pb2.SendShard, *, sent: bool = False) -> None:
        context = SendingContext(
            self._config,
            self._store,
            self._identity.tls,
            self._state_dir / SENDING,
            self.report,
            self.record_event,
        )
        sending = self.sendings[command.job] = Sending(context, command, sent=sent)
        sending.begin()

    def _close(self, sending: Sending) -> None:
        self._run_to_end(sending.close(), sending.order.job, sending.order.epoch)

    def state_restored(self) -> None:
        """Restart partitions of several regions without state, as after the loss of a disk.

        A parameter server with an older state lacks updates that the other regions have deleted. A job in this region
        only continues from its state. What was spent of privacy since the copy is not known.
        """
        self._privacy.state_restored()
        for partition in list(self.partitions.values()):
            if len(partition.start.regions) > 1:
                self._run_to_end(self._restart_without_state(partition), partition.job, partition.start.epoch)

    async def _restart_without_state(self, partition: PartitionRunner) -> None:
        await partition.close()
        await partition.forget_state()
        row = self._store.partition(partition.job)
        if row is not None and self.partitions.get(partition.job) is partition:
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
        partition = self.partitions.get(command.job)
        sending = self.sendings.pop(command.job, None)
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
        partition = self.partitions.pop(command.job, None)
        if partition is None:
            report = agent_pb2.PartitionReport(job=command.job, epoch=command.epoch, state="stopped")
            self.report(report, durable=True)
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
            self.report(report, durable=True)

        closing = background(work, failed)
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
