"""A partition's parameter server as a process of its own, and the agent's connection to it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import grpc.aio

from geofed_pb.errors import CATALOGUE, GeofedError
from geofed_pb.files.durable import write_durably
from geofed_pb.fork_server import Process, Starter, end
from geofed_pb.rpc import channel, error_of, region_name
from geofed_pb.tasks import background
from geofed_pb.v1 import common_pb2, sync_pb2, sync_pb2_grpc
from region_agent.link.identity import Identity
from region_agent.partition.events import ConfigurePs
from sync.ps.config import PsConfig

__all__ = ["PsProcess", "free_ports"]

_READY_SECONDS = 30.0
"""Timeout of a start, from the process to its listening ports."""
_STOP_SECONDS = 5.0
"""Time that a server has to end after SIGTERM, before SIGKILL."""
_RECONNECT_SECONDS = 0.3
"""Pause before the agent reconnects to a server whose stream of statuses has ended."""
_MAX_LISTED_PORTS = 6
"""Ports that an error message lists."""
_ERROR_LINE = re.compile(r"^error\[([A-Z_]+)\]: (.*)$")
"""Last line of a server that fails: error code and message."""


class PsProcess:
    """One run of a parameter server. It ends with the agent; the next run continues from its state on disk."""

    def __init__(
        self,
        config: PsConfig,
        config_file: Path,
        identity: Identity,
        log: Callable[[str], None],
        *,
        log_format: str,
        starter: Starter,
    ) -> None:
        """``log`` takes each line of its log, in ``log_format``: "text" or "json"."""
        self._config, self._config_file, self._identity = config, config_file, identity
        self._log, self._log_format = log, log_format
        self._starter = starter
        self._process: Process | None = None
        self._reading: asyncio.Future[None] | None = None
        self._error: GeofedError | None = None
        self.ports: dict[str, int] = {}

    async def start(self) -> None:
        """Start the process and wait until it listens.

        Raises ``GeofedError`` with the error that the process has printed, or with INTERNAL after a timeout.
        """
        self._config.ready_file.unlink(missing_ok=True)
        write_durably(self._config_file, [self._config.model_dump_json().encode()], mode=0o600)
        self._process = await self._starter.start(
            "sync.ps", "--config", str(self._config_file), "--log-format", self._log_format, environment=_environment()
        )
        self._reading = background(self._read_stderr(), self._unread)
        async with contextlib.AsyncExitStack() as undo:
            # Also when this start is cancelled: no other code has the process yet.
            undo.push_async_callback(self.kill)
            await self._until_ready(self._process)
            undo.pop_all()
        self.ports = json.loads(self._config.ready_file.read_text())

    def _unread(self, error: GeofedError) -> None:
        """End the process: it would wait for ever once the pipe of its log is full."""
        self._error = self._error or error
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    def _connect(self) -> grpc.aio.Channel:
        """Open a connection with the present certificate; each call opens its own, as the agent renews certificates."""
        return channel(
            f"{_reachable(self._config.exchange_listen)}:{self.ports['exchange']}",
            ca_pem=self._identity.ca_file.read_bytes(),
            name=region_name(self._config.region),
            certificate_pem=self._identity.certificate_file.read_bytes(),
            key_pem=self._identity.key_file.read_bytes(),
        )

    async def _until_ready(self, process: Process) -> None:
        deadline = asyncio.get_running_loop().time() + _READY_SECONDS
        while not self._config.ready_file.exists():
            if process.returncode is not None or asyncio.get_running_loop().time() > deadline:
                await self.kill()
                raise self._error or GeofedError("INTERNAL", "the parameter server did not start")
            await asyncio.sleep(0.02)

    async def ended(self) -> GeofedError:
        """Wait until the process has exited; returns the reason."""
        if self._process is None:
            return GeofedError("INTERNAL", "the parameter server was never started")
        status = await self._process.wait()
        if self._reading is not None:
            await asyncio.wait({self._reading})
        if self._error is not None:
            return self._error
        exit_text = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
        return GeofedError("UNAVAILABLE", f"the parameter server ended with {exit_text}")

    @property
    def pid(self) -> int | None:
        """Process ID of the server; None before it was started."""
        return self._process.pid if self._process else None

    async def configure(self, wanted: ConfigurePs) -> sync_pb2.PsStatus:
        """Send peers, epoch and attempt; returns the server's status, after which it fences every older attempt."""
        topology = wanted.topology
        request = sync_pb2.PsConfig(
            epoch=wanted.epoch,
            attempt=wanted.attempt,
            peers=[
                sync_pb2.PsPeer(region=p.region, address=p.address, epoch=p.epoch, unsigned=p.unsigned)
                for p in wanted.peers
            ],
            routes=topology.routes,
            neighbours=[sync_pb2.Neighbours(a=a, b=b) for a, b in topology.neighbours],
            former=[sync_pb2.Neighbours(a=a, b=b) for a, b in topology.former],
            finish=wanted.finish,
            halt=wanted.halt,
        )
        async with self._connect() as connection:
            try:
                status: sync_pb2.PsStatus = await sync_pb2_grpc.PsAdminStub(connection).Configure(request, timeout=10)
                return status
            except grpc.RpcError as error:
                raise error_of(error) from None

    async def watch(self) -> AsyncIterator[sync_pb2.PsStatus]:
        """Yield the server's status at each change, without end: a lost connection is opened again."""
        while True:
            async with self._connect() as connection:
                with contextlib.suppress(grpc.RpcError):
                    async for status in sync_pb2_grpc.PsAdminStub(connection).Watch(sync_pb2.PsWatchRequest()):
                        yield status
            await asyncio.sleep(_RECONNECT_SECONDS)

    async def model(self, round_: int = 0) -> AsyncIterator[common_pb2.BlobChunk]:
        """Yield the present model, or that of one of the last evaluated rounds, as chunks of a safetensors file."""
        request = sync_pb2.PsModelRequest(round=round_)
        async with self._connect() as connection:
            try:
                async for chunk in sync_pb2_grpc.PsAdminStub(connection).GetModel(request):
                    yield chunk
            except grpc.RpcError as error:
                raise error_of(error) from None

    async def stop(self) -> None:
        """End the process with SIGTERM, and with SIGKILL after a timeout."""
        if self._process is not None:
            await end(self._process, _STOP_SECONDS)
        await self.kill()

    async def kill(self) -> None:
        """Kill the process, and wait for it and for the rest of its output."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        if self._reading is not None:
            await asyncio.wait({self._reading})

    async def _read_stderr(self) -> None:
        if self._process is None or self._process.stderr is None:
            return
        async for raw in self._process.stderr:
            line = raw.decode(errors="replace").rstrip()
            if found := _ERROR_LINE.match(line):
                code = found[1] if found[1] in CATALOGUE else "INTERNAL"
                self._error = GeofedError(code, found[2])
            elif line.startswith("hint: ") and self._error is not None:
                self._error = GeofedError(self._error.code, self._error.message, hint=line.removeprefix("hint: "))
            self._log(line)


def free_ports(
    host: str, port_range: tuple[int, int] | None, kept: tuple[int, int, int], *, worker_host: str = ""
) -> tuple[int, int, int | None]:
    """Choose a server's ports for its workers, its peers and their bulk streams.

    ``kept``: the ports of the server's last run, which are used again where they are free; 0 where there was none.
    Without ``port_range`` a port that is taken becomes 0, with which the system chooses one. In a range with only two
    free ports there is none for bulk streams: None. Raises ``GeofedError("PORT_IN_USE")`` if the range has fewer. A
    port that another process takes before the server listens fails that start; the next start chooses again.
    """

    def free(port: int) -> bool:
        return all(_is_free(each, port) for each in {host, worker_host or host})

    if port_range is None:
        worker, exchange, bulk = (port if free(port) else 0 for port in kept)
        return worker, exchange, bulk
    first, last = port_range
    found = [port for port in kept if first <= port <= last and free(port)]
    if len(found) < 2 or found[:2] != list(kept[:2]):
        found = []
    taken: list[int] = []
    for port in range(first, last + 1):
        if len(found) == 3:
            break
        if port not in found:
            (found if free(port) else taken).append(port)
    if len(found) < 2:
        text = (
            f"server.ports {first}-{last}: {_listed(taken)} {'is' if len(taken) == 1 else 'are'} in use; "
            f"{len(found) or 'none'} {'is' if len(found) == 1 else 'are'} free, a parameter server needs at least two"
        )
        hint = (
            "stop the processes that use them, or another job of the region, or widen server.ports in the region file"
        )
        raise GeofedError("PORT_IN_USE", text, hint=hint)
    return found[0], found[1], found[2] if len(found) == 3 else None


def _is_free(host: str, port: int) -> bool:
    address = host.strip("[]")
    try:
        socket.create_server((address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET).close()
    except OSError:
        return False
    return True


def _listed(ports: list[int]) -> str:
    return ", ".join(map(str, ports[:_MAX_LISTED_PORTS])) + (", …" if len(ports) > _MAX_LISTED_PORTS else "")


def _reachable(listen: str) -> str:
    host = listen.rpartition(":")[0]
    return "127.0.0.1" if host in ("0.0.0.0", "") else "[::1]" if host == "[::]" else host


def _environment() -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        # From AWS_* variables an SDK takes the credentials of the region's channel, OTEL_* ones name a collector.
        if name in ("PATH", "LANG", "HOME", "TMPDIR", "PYTHONPATH") or name.startswith(("AWS_", "OTEL_"))
    }
    # One thread is enough: the server waits far more than it computes.
    return kept | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
