"""The region agent: starts and ends the gateway, the session with the control plane, and all work at intervals."""

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

from geofed_pb.errors import GeofedError
from geofed_pb.fork_server import ExecStarter, Starter
from geofed_pb.logs import describe_process
from geofed_pb.tasks import awaited, cancel_all
from geofed_pb.tracing import flush
from region_agent.approvals import Approvals
from region_agent.capacity import preemptible_workers
from region_agent.config import EmbeddedGateway, FileChannelConfig, OpenFaasGateway, RegionConfig
from region_agent.daemon.jobs import RegionJobs, RegionParts
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
from region_agent.partition.channel import RegionChannel, channel_text
from region_agent.partition.context import PartitionContext
from region_agent.partition.runner import TRACING
from region_agent.partition.shards import SHARDS
from region_agent.policy import (
    longest_slice,
)
from region_agent.privacy import PrivacyGuard
from region_agent.shards.indexing import INDEXES, Indexes
from region_agent.shards.offered import OfferedDatasets
from region_agent.state.audit_log import AUDIT_KEY, RegionAudit
from region_agent.state.store import AgentStore
from region_agent.status import Status, StatusFile
from region_agent.storage import RegionStorage, channel_folder
from region_agent.tasks.environments import Environments

__all__ = ["Agent", "run"]

_log = structlog.get_logger("geofed.agent")
_TICK_SECONDS = 1.0
"""Interval at which status, capacity and accounts are updated."""
_LOG_FLUSH_SECONDS = 0.3
"""Interval at which log lines are sent."""
_RENEW_RETRY_SECONDS = 30.0
"""Pause before a failed renewal of the certificate is retried."""
_SWEEP_SECONDS = 3600.0
"""Interval at which files that no job needs any more are looked for."""


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
        self._gateway: EmbeddedGatewayProcess | None = None
        self._context: PartitionContext | None = None
        self._approvals = Approvals(state_dir, config.policy.approve)
        self._privacy = PrivacyGuard(config, state_dir)
        self._audit = RegionAudit(self._store, state_dir / AUDIT_KEY, config.name, version("geofed"))
        self._blobs = Blobs(self._hub, self._audit, state_dir)
        self._logs = LogShipping(self._store, self._hub.send_durably)
        self._storage = RegionStorage.of(config, state_dir)
        self.jobs = RegionJobs(
            RegionParts(
                config,
                state_dir,
                self._identity,
                self._store,
                self._hub,
                self._approvals,
                self._privacy,
                self._audit,
                self._blobs,
                self._logs,
                self._storage,
            )
        )
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
        self.jobs.charge_interrupted()
        (self._state_dir / SHARDS).mkdir(parents=True, exist_ok=True, mode=0o700)
        client = await self._open_gateway()
        self._config = await reachable(self._config, client)
        self._isolation = await isolation_of(self._config, client)
        if self._isolation.kind == "none":
            _log.warning("job code is not isolated", isolation=self._isolation.text, hint=self._isolation.hint)
        self._context = self._partition_context(client)
        self.jobs.open(self._context)
        tasks = [awaited(work) for work in self._background_tasks()]
        if self._gateway is not None:
            tasks.append(awaited(self._watch_gateway(self._gateway)))
        try:
            self._privacy.require(self._audit.releases())
            self._privacy.reconcile({row.job for row in self._store.open_partitions()})
            self.jobs.resume()
            stopping = awaited(self.stopped.wait())
            done, _ = await asyncio.wait([*tasks, stopping], return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            for task in done - {stopping}:
                task.result()
        finally:
            await cancel_all(tasks)
            await self.jobs.close()
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
            *([self.jobs.watch_disk(most)] if (most := self._config.policy.max_disk_mb_per_job) is not None else []),
        ]  # fmt: skip

    async def _keep_session(self) -> None:
        # The session's first message contains the datasets, so they are checked before.
        await self._offered_datasets.check()
        await self._hub.run(self.jobs)

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
            report=self.jobs.report,
            record_event=self.jobs.record_event,
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
                for name in context.owner.orphans(there, self.jobs.active()):
                    _log.warning("a function that no job uses is deleted", function=name)
                    with suppress(GeofedError):
                        await context.gateway.delete(name)
                secrets = await context.gateway.list_secrets()
                for name in context.owner.orphan_secrets(secrets, self.jobs.active()):
                    with suppress(GeofedError):
                        await context.gateway.delete_secret(name)
            except GeofedError as error:
                _log.warning("the platform's functions and secrets could not be listed", error=str(error))
            await asyncio.sleep(_SWEEP_SECONDS)

    async def _watch_gateway(self, gateway: EmbeddedGatewayProcess) -> None:
        await gateway.ended()
        raise GeofedError(
            "GATEWAY_UNAVAILABLE", "the embedded gateway has ended", hint="see gateway.log; restart the agent"
        )

    async def _flush_logs(self) -> None:
        while True:
            await asyncio.sleep(_LOG_FLUSH_SECONDS)
            self._logs.flush()

    async def _tick(self) -> None:
        while True:
            now = time.time()
            self._status_file.write(self._status(now))
            self._update_capacity()
            self.jobs.start_approved()
            self.jobs.report_accounts(time.monotonic())
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
        self.jobs.preempt_beyond(left)

    async def _keep_certificate(self) -> None:
        shown = self._identity.certificate.serial_number
        while True:
            with suppress(OSError, ValueError):
                if (found := self._identity.certificate.serial_number) != shown:
                    # Servers use it for each new connection; the session is opened again with it.
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
            partitions=self.jobs.partition_states(),
            shards=self.jobs.shard_states(),
            condition="; ".join(filter(None, [str(self._hub.refusal or ""), self._offered_datasets.condition])),
        )


async def run(config: RegionConfig, state_dir: Path, log_format: str, config_file: Path, starter: Starter) -> None:
    """Run the agent until SIGTERM or SIGINT."""
    describe_process(region=config.name)
    agent = Agent(config, state_dir, log_format, config_file, starter)
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, agent.stopped.set)
    await agent.run()
    await asyncio.to_thread(flush, TRACING)
