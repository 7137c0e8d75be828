"""The runs of a partition's parameter server: start, watch, meter; the next run continues from its state on disk."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import structlog

from geofed_pb.errors import GeofedError
from geofed_pb.tasks import awaited, cancel_all
from geofed_pb.tracing import JobTrace
from geofed_pb.v1 import agent_pb2, sync_pb2
from region_agent.partition.calls import RegionInputs, server_config_of
from region_agent.partition.context import PartitionContext
from region_agent.partition.events import PsEnded, StartPs
from region_agent.partition.report import PartitionMeter
from region_agent.partition.server.process import PsProcess
from region_agent.state.store import PartitionRow
from sync.ps.config import PsConfig
from sync.tcp_streams.sockets import DIAL_FAULT

__all__ = ["ServerObserver", "ServerRuns"]

_log = structlog.get_logger("geofed.partition")
_METER_SECONDS = 1.0
"""Shortest interval at which the parameter server's counters are stored."""


@dataclass(frozen=True)
class ServerObserver:
    """What the partition does when its server listens, and with what it reports."""

    connect_workers: Callable[[str], Awaitable[None]]
    """Let the workers connect to an address of the server."""
    ready: Callable[[str], None]
    """The server runs; the other regions reach it at an address."""
    reported: Callable[[sync_pb2.PsStatus], Awaitable[None]]
    """The server has a new status."""


class ServerRuns:
    """Runs the parameter server of one partition. Not thread-safe: call it on the event loop."""

    def __init__(
        self,
        context: PartitionContext,
        start: agent_pb2.StartPartition,
        row: PartitionRow,
        meter: PartitionMeter,
        trace: JobTrace,
        observer: ServerObserver,
        *,
        folder: Path,
        ledger: Path,
    ) -> None:
        """Create it without a run.

        Args:
            row: the partition as the agent's last run has left it.
            folder: folder of the job's state.
            ledger: folder of the region's privacy ledger.
        """
        self._context, self._start, self._meter, self._trace = context, start, meter, trace
        self._observer, self._folder, self._ledger = observer, folder, ledger
        self.row = row
        """The stored partition, with the ports of the last run."""
        self.process: PsProcess | None = None
        """The present run, while it listens."""
        self.status = sync_pb2.PsStatus()
        """Last status."""
        self._running = False
        """True from before the process is started until it has exited."""
        self._began = row.attempt > 0
        """A server has run here before; if the next one finds no state, the state was lost."""

    async def run(self, action: StartPs, workers: int) -> PsEnded | None:
        """Run the server for an attempt of this many workers until it ends; None if one is running already."""
        if self._running:
            return None
        self._running = True
        ps: PsProcess | None = None
        try:
            ps = PsProcess(
                await self._config(action, workers),
                self._folder / "ps.json",
                self._context.identity,
                self._log_line,
                log_format=self._context.log_format,
                starter=self._context.starter,
            )
            with self._trace.span("start server", attempt=action.attempt):
                await ps.start()
            self._context.store.keep_attempt(self._start.job, action.attempt)
            return PsEnded(await self._until_end(ps))
        except GeofedError as error:
            if error.code == "PORT_IN_USE":
                # Another process uses a stored port.
                self._context.store.keep_ports(self._start.job, 0, 0, 0)
            self._read_row()
            return PsEnded(error)
        finally:
            self.process = None
            if ps is not None:
                await ps.stop()
            self._running = False

    async def _until_end(self, ps: PsProcess) -> GeofedError:
        """Watch a started server until it ends; returns the reason."""
        self._context.store.keep_ports(
            self._start.job, ps.ports["worker"], ps.ports["exchange"], ps.ports.get("bulk", 0)
        )
        self._read_row()
        config = self._context.config
        await self._observer.connect_workers(f"{config.server.worker_host}:{ps.ports['worker']}")
        self.process, self._began = ps, True
        self._meter.server_started(time.monotonic())
        tasks = {awaited(self._watch(ps)), (ended := awaited(ps.ended()))}
        self._observer.ready(f"{config.advertise}:{ps.ports['exchange']}")
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            return await ended
        finally:
            await cancel_all(tasks)
            self._meter.server_ended(time.monotonic())

    async def _watch(self, ps: PsProcess) -> None:
        metered, status = 0.0, None
        try:
            async for status in ps.watch():
                self.status = status
                if time.monotonic() - metered > _METER_SECONDS or status.phase == "finished":
                    metered = time.monotonic()
                    self._meter.add_server_status(status, metered)
                self._meter.see_times(status)
                await self._observer.reported(status)
        finally:
            if status is not None:
                self._meter.add_server_status(status, time.monotonic())

    async def _config(self, action: StartPs, workers: int) -> PsConfig:
        context = self._context
        address = await asyncio.to_thread(context.channel.address, self._start.job)
        inputs = RegionInputs(
            context.identity, context.config.server, self.row, context.channel.kind, channel_address=address
        )
        config = server_config_of(
            self._start, action, inputs, workers=workers, folder=self._folder, begun=self._began, ledger=self._ledger
        )
        if config.bulk_port is None:
            text = "server.ports has no free port for bulk streams: large updates use the exchange port and take longer"
            context.log(self._start.job, "ps", text)
        return config

    def _read_row(self) -> None:
        self.row = self._context.store.partition(self._start.job) or self.row

    def _log_line(self, line: str) -> None:
        """Take a line of the server's log. What answers at another region's address is not for users."""
        if DIAL_FAULT in line:
            _log.warning(line, job=self._start.job)
        else:
            self._context.log(self._start.job, "ps", line)
