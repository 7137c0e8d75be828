"""A partition's parameter server as a process of its own, and the agent's line to it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import grpc.aio

from geofed_pb.errors import CATALOGUE, GeofedError
from geofed_pb.rpc import channel, error_of, region_name
from geofed_pb.v1 import common_pb2, sync_pb2, sync_pb2_grpc
from region_agent.link.identity import Identity
from region_agent.partition.events import ConfigurePs
from sync.durable import write_durably
from sync.ps.config import PsConfig

__all__ = ["PsProcess", "free_ports"]

_READY_SECONDS = 30.0
_STOP_SECONDS = 5.0
_WATCH_AGAIN_SECONDS = 0.3
_PORTS_TOLD = 6
_ERROR_LINE = re.compile(r"^error\[([A-Z_]+)\]: (.*)$")


class PsProcess:
    """One run of the server. It ends with the agent, and is started again on its own state."""

    def __init__(self, config: PsConfig, config_file: Path, identity: Identity, log: Callable[[str], None]) -> None:
        self._config, self._config_file, self._identity, self._log = config, config_file, identity, log
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Future[None] | None = None
        self._told: GeofedError | None = None
        self.ports: dict[str, int] = {}

    async def start(self) -> None:
        """Start it and wait until it listens; raises ``GeofedError`` with what it said if it does not."""
        self._config.ready_file.unlink(missing_ok=True)
        write_durably(self._config_file, [self._config.model_dump_json().encode()])
        os.chmod(self._config_file, 0o600)
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "sync.ps", "--config", str(self._config_file),
            "--die-with-parent", str(os.getpid()),
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
            env=_environment(),
        )  # fmt: skip
        self._reading = asyncio.ensure_future(self._read_stderr())
        try:
            await self._until_ready(self._process)
        except BaseException:
            # Also when this start is cancelled, since nobody else knows of the process yet.
            await self.kill()
            raise
        self.ports = json.loads(self._config.ready_file.read_text())

    def _dial(self) -> grpc.aio.Channel:
        """A line of its own for each use, with the certificate of now: the agent renews it while the server runs."""
        return channel(
            f"{_reachable(self._config.exchange_listen)}:{self.ports['exchange']}",
            ca_pem=self._identity.ca_file.read_bytes(),
            name=region_name(self._config.region),
            certificate_pem=self._identity.certificate_file.read_bytes(),
            key_pem=self._identity.key_file.read_bytes(),
        )

    async def _until_ready(self, process: asyncio.subprocess.Process) -> None:
        deadline = asyncio.get_running_loop().time() + _READY_SECONDS
        while not self._config.ready_file.exists():
            if process.returncode is not None or asyncio.get_running_loop().time() > deadline:
                await self.kill()
                raise self._told or GeofedError("INTERNAL", "the parameter server did not come up")
            await asyncio.sleep(0.02)

    async def ended(self) -> GeofedError:
        """Wait until the process is gone; returns why."""
        if self._process is None:
            return GeofedError("INTERNAL", "the parameter server was never started")
        status = await self._process.wait()
        if self._reading is not None:
            await asyncio.wait({self._reading})
        if self._told is not None:
            return self._told
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
        return GeofedError("UNAVAILABLE", f"the parameter server ended with {how}")

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def configure(self, wanted: ConfigurePs) -> sync_pb2.PsStatus:
        """Returns how it stands then: nothing of an older attempt counts from there on."""
        ways = wanted.ways
        request = sync_pb2.PsConfig(
            epoch=wanted.epoch,
            attempt=wanted.attempt,
            peers=[sync_pb2.PsPeer(region=p.region, address=p.address, epoch=p.epoch) for p in wanted.peers],
            routes=ways.routes,
            neighbours=[sync_pb2.Neighbours(a=a, b=b) for a, b in ways.neighbours],
            former=[sync_pb2.Neighbours(a=a, b=b) for a, b in ways.former],
            finish=wanted.finish,
        )
        async with self._dial() as line:
            try:
                status: sync_pb2.PsStatus = await sync_pb2_grpc.PsAdminStub(line).Configure(request, timeout=10)
                return status
            except grpc.RpcError as error:
                raise error_of(error) from None

    async def watch(self) -> AsyncIterator[sync_pb2.PsStatus]:
        """Statuses as they change, for ever: a broken line is dialled again, since the process may still run."""
        while True:
            async with self._dial() as line:
                with contextlib.suppress(grpc.RpcError):
                    async for status in sync_pb2_grpc.PsAdminStub(line).Watch(sync_pb2.PsWatchRequest()):
                        yield status
            await asyncio.sleep(_WATCH_AGAIN_SECONDS)

    async def model(self) -> AsyncIterator[common_pb2.BlobChunk]:
        """The model as safetensors."""
        async with self._dial() as line:
            try:
                async for chunk in sync_pb2_grpc.PsAdminStub(line).GetModel(sync_pb2.PsModelRequest()):
                    yield chunk
            except grpc.RpcError as error:
                raise error_of(error) from None

    async def stop(self) -> None:
        """End it in order, by force if it does not."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_STOP_SECONDS):
                    await self._process.wait()
        await self.kill()

    async def kill(self) -> None:
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
                self._told = GeofedError(code, found[2])
            elif line.startswith("hint: ") and self._told is not None:
                self._told = GeofedError(self._told.code, self._told.message, hint=line.removeprefix("hint: "))
            self._log(line)


def free_ports(
    host: str, within: tuple[int, int] | None, kept: tuple[int, int, int], *, worker_host: str = ""
) -> tuple[int, int, int | None]:
    """Ports for a server's workers, its peers and their bulk streams: those that it had, else free ones in a range.

    Without a range they are 0 at first, and in place of one that somebody has taken since, which has the system choose.
    A range with two free ports leaves none, None, for bulk streams. Raises ``GeofedError("PORT_IN_USE")`` where it has
    fewer; a port that is taken between this look and the server's start is looked for anew by the next start.
    """

    def free(port: int) -> bool:
        return all(_is_free(each, port) for each in {host, worker_host or host})

    if within is None:
        worker, exchange, bulk = (port if free(port) else 0 for port in kept)
        return worker, exchange, bulk
    first, last = within
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
            f"of server.ports {first}-{last} somebody listens on {_listed(taken)}; "
            f"{len(found) or 'none'} {'is' if len(found) == 1 else 'are'} left, a parameter server takes two at least"
        )
        hint = "stop what listens there, or another job of the region, or widen server.ports in the region's file"
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
    return ", ".join(map(str, ports[:_PORTS_TOLD])) + (", …" if len(ports) > _PORTS_TOLD else "")


def _reachable(listen: str) -> str:
    host = listen.rpartition(":")[0]
    return "127.0.0.1" if host in ("0.0.0.0", "") else "[::1]" if host == "[::]" else host


def _environment() -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        # AWS_: where an SDK finds the credentials of the region's channel.
        if name in ("PATH", "LANG", "HOME", "TMPDIR", "PYTHONPATH") or name.startswith("AWS_")
    }
    # One thread is enough: the server waits far more than it computes.
    return kept | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
