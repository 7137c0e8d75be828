"""The gateway's view of one replica: its directory, pipes, HTTP connection and exit reason."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import shutil
import signal
import socket
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx2

from region_agent.gateway.embedded.config import Config
from region_agent.gateway.embedded.logs import LinePipe
from region_agent.gateway.embedded.replicas.replica import SOCKET_NAME, ReplicaSpec
from region_agent.gateway.embedded.table import Refused
from region_agent.gateway.functions import SHARE_ANNOTATION, FunctionSpec, is_dns_label
from region_agent.gateway.quantities import parse_cpu, parse_duration, parse_memory_bytes
from region_agent.gateway.unix_sockets import UnixTransport

__all__ = ["FunctionLimits", "Running", "replica_spec"]

_WATCHDOG_TIMEOUT = "30s"
"""Default of the watchdog's timeouts."""


@dataclass(frozen=True)
class FunctionLimits:
    """Limits of one replica by its function's specification."""

    read_timeout: timedelta
    """Longest time for the body to arrive."""
    call_timeout: timedelta
    """Longest time of a call."""
    max_inflight: int
    """Calls at the same time."""
    memory_bytes: int | None
    """Memory beyond what it shares with the warm parent."""
    threads: int
    """Threads for operators."""

    @classmethod
    def of(cls, spec: FunctionSpec, config: Config) -> FunctionLimits:
        """Compute the limits of a function in this gateway; raises ``Refused`` 400 for an invalid one.

        The watchdog's three timeouts default to 30 s, and the gateway's three bound all of them, as in OpenFaaS. So a
        function that forgets to set a timeout fails here as it would there.
        """
        try:
            read, write, execute = (
                parse_duration(spec.env_vars.get(name) or _WATCHDOG_TIMEOUT)
                for name in ("read_timeout", "write_timeout", "exec_timeout")
            )
            bounds = [config.upstream_timeout, config.write_timeout, write, *([execute] if execute else [])]
            memory = spec.limits.get("memory")
            return cls(
                read_timeout=min(config.read_timeout, read),
                call_timeout=min(bounds),
                max_inflight=int(spec.env_vars.get("max_inflight") or config.max_inflight) or 2**31,
                memory_bytes=parse_memory_bytes(memory) if memory else None,
                threads=max(1, int(parse_cpu(spec.limits.get("cpu") or "1"))),
            )
        except ValueError as error:
            raise Refused(400, f"function {spec.service}: {error}") from error


@dataclass
class Running:
    """A replica between the request to fork it and the end of its process."""

    name: str
    spec: FunctionSpec
    directory: Path
    temporary: Path
    """Link to the folder ``tmp`` in it, with a path that is short enough for sockets."""
    http: httpx2.AsyncClient
    exited: asyncio.Future[str]
    limits: FunctionLimits
    pid: int | None = None
    isolation: str = "none"
    output: LinePipe | None = None
    kill_reason: str = ""
    kill_text: str = ""
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    created_at: datetime = field(default_factory=lambda: datetime.now(UTC))

    @classmethod
    def create(cls, name: str, spec: FunctionSpec, runtime_fd: int, config: Config, links: Path) -> Running:
        """Create a replica with a directory but without a process yet. ``links``: a folder with a short path."""
        directory = config.state_dir / "r" / name
        directory.mkdir(mode=0o700)
        (directory / "tmp").mkdir(mode=0o700)
        temporary = links / name.rpartition("-")[2]
        temporary.symlink_to(directory / "tmp")
        # Through the descriptor the socket's path is shorter than AF_UNIX's 108 bytes, wherever the state directory is.
        path = f"/proc/self/fd/{runtime_fd}/{name}/{SOCKET_NAME}"
        transport = UnixTransport(path, httpx2.Limits(max_connections=None))
        return cls(
            name=name,
            spec=spec,
            directory=directory,
            temporary=temporary,
            http=httpx2.AsyncClient(transport=transport, base_url=f"http://{name}", timeout=None, trust_env=False),
            exited=asyncio.get_running_loop().create_future(),
            limits=FunctionLimits.of(spec, config),
        )

    async def send_spec(self, control: socket.socket, spec: ReplicaSpec) -> bool:
        """Send the forked process its specification and wait until it is ready; False if it ends before."""
        reader, writer = await asyncio.open_connection(sock=control)
        try:
            writer.write(json.dumps(dataclasses.asdict(spec)).encode())
            writer.write_eof()
            line = await reader.readline()
            if not line:
                return False
            self.isolation = json.loads(line)["isolation"]
            return True
        except (ConnectionError, BrokenPipeError):
            return False
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError, BrokenPipeError):
                await writer.wait_closed()

    def end_text(self, status: int | None) -> str:
        """Return the reason for which the process ended, as a sentence."""
        if self.kill_text:
            return self.kill_text
        if status is None:
            return f"replica {self.name} died with its warm parent"
        if os.WIFSIGNALED(status):
            return f"replica {self.name} was killed by {signal.Signals(os.WTERMSIG(status)).name}"
        return f"replica {self.name} exited with status {os.waitstatus_to_exitcode(status)} during its work"

    async def clean(self) -> None:
        """Release everything once the process has ended."""
        for task in self.tasks:
            task.cancel()
        if self.output is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self.output.ended), 1)
            self.output.transport.close()
        await self.http.aclose()
        self.temporary.unlink(missing_ok=True)
        await asyncio.to_thread(shutil.rmtree, self.directory, ignore_errors=True)


def replica_spec(running: Running, handler: str, config: Config) -> ReplicaSpec:
    """Build the specification for the forked process."""
    home = str(running.directory)
    env = {
        "PATH": os.environ.get("PATH", os.defpath),
        "LANG": os.environ.get("LANG", "C.UTF-8"),
        "HOME": home,
        "TMPDIR": str(running.temporary),
        "OPENFAAS_SECRETS": str(running.directory / "secrets"),
        "OPENFAAS_NAME": running.spec.service,
        **running.spec.env_vars,
    }
    covered = (config.state_dir, config.share_dir, running.temporary.parent, *config.hide_paths)
    hidden = [str(path) for path in covered if path is not None]
    share = running.spec.annotations.get(SHARE_ANNOTATION, "")
    return ReplicaSpec(
        name=running.name,
        handler=handler,
        directory=home,
        env=env,
        python_path=list(config.python_path),
        hidden=hidden if config.isolate else [],
        kept=[*config.keep_paths, str(running.temporary)],
        # A name that could lead out of the folder is ignored.
        read_only=[str(config.share_dir / share)] if config.share_dir is not None and is_dns_label(share) else [],
        threads=running.limits.threads,
        max_inflight=min(running.limits.max_inflight, 256),
        cold_start_s=config.cold_start.total_seconds(),
    )
