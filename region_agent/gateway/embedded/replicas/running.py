"""The gateway's view of one replica: its directory, pipes, HTTP connection and exit reason."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import json
import os
import shutil
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx2

from region_agent.gateway.embedded.config import Config
from region_agent.gateway.embedded.logs import LinePipe
from region_agent.gateway.embedded.replica_table import Refused
from region_agent.gateway.embedded.replicas.memory import PrivateMemory
from region_agent.gateway.embedded.replicas.process_limit import MOST_PROCESSES, ProcessLimit
from region_agent.gateway.embedded.replicas.relay import Relay
from region_agent.gateway.embedded.replicas.replica import READY, SOCKET_NAME, ReplicaSpec
from region_agent.gateway.embedded.replicas.sandbox import HOME, Sandbox, SandboxView
from region_agent.gateway.embedded.replicas.seccomp import filter_program
from region_agent.gateway.embedded.replicas.zygote_link import EnteredSandbox
from region_agent.gateway.functions import MOST_EGRESS, FunctionSpec
from region_agent.gateway.quantities import parse_cpu, parse_duration, parse_memory_bytes
from region_agent.gateway.unix_sockets import UnixTransport

__all__ = ["FunctionLimits", "Running", "replica_spec"]

_WATCHDOG_TIMEOUT = "30s"
"""Default of the watchdog's timeouts."""
_ANSWER_BYTES = 4096
"""Bytes that are read at a time from a process that starts; it sends fewer."""


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
    temporary: Path | None
    """Link to the folder ``tmp`` in it, with a path that is short enough for sockets; None: it has a sandbox."""
    exited: asyncio.Future[str]
    limits: FunctionLimits
    pid: int | None = None
    socket_fd: int = -1
    """The socket on which it listens; -1 until it is ready."""
    http: httpx2.AsyncClient | None = None
    """Client of its calls; None until it is ready."""
    sandbox: Sandbox | None = None
    relay: Relay | None = None
    process_limit: ProcessLimit = field(default_factory=lambda: ProcessLimit(None))
    memory: PrivateMemory = field(default_factory=PrivateMemory)
    output: LinePipe | None = None
    kill_reason: str = ""
    kill_text: str = ""
    kill_code: str = "FUNCTION_FAILED"
    """Code of the error of a start that failed."""
    kill_hint: str = ""
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    created_at: datetime = field(default_factory=lambda: datetime.now(UTC))

    @classmethod
    def create(cls, name: str, spec: FunctionSpec, config: Config, links: Path | None) -> Running:
        """Create a replica with a directory but without a process yet. ``links``: a folder with a short path; None: it
        will have a sandbox."""
        directory = config.state_dir / "r" / name
        directory.mkdir(mode=0o700)
        (directory / "tmp").mkdir(mode=0o700)
        temporary = None
        if links is not None:
            temporary = links / name.rpartition("-")[2]
            temporary.symlink_to(directory / "tmp")
        return cls(
            name=name,
            spec=spec,
            directory=directory,
            temporary=temporary,
            exited=asyncio.get_running_loop().create_future(),
            limits=FunctionLimits.of(spec, config),
        )

    async def enter(self, view: SandboxView) -> EnteredSandbox:
        """Create its sandbox; returns where its process is to go. Raises ``OSError``."""
        self.sandbox = await Sandbox.start(view)
        self.process_limit = ProcessLimit.create(self.name)
        listen = [(view.hosts.get(host, host), port) for host, port in view.egress] if view.hosts is not None else []
        return EnteredSandbox(self.sandbox.fd, view.hosts is not None, listen, MOST_PROCESSES, self.process_limit.file)

    async def begin(
        self, control: socket.socket, spec: ReplicaSpec, egress: Sequence[str], target_of: Callable[[str], str | None]
    ) -> bool:
        """Send the forked process its specification and wait until it is ready; False if it ends before.

        ``egress``: the addresses that its sandbox has, for each of which ``target_of`` returns the one outside.
        """
        loop = asyncio.get_running_loop()
        with control:
            try:
                await loop.sock_sendall(control, json.dumps(dataclasses.asdict(spec)).encode())
                control.shutdown(socket.SHUT_WR)
                answer, descriptors = await _answer(control)
            except (ConnectionError, BrokenPipeError):
                return False
        listeners = [socket.socket(fileno=descriptor) for descriptor in descriptors]
        if listeners:
            self.relay = Relay(dict(zip(egress, listeners, strict=True)), target_of)
        if not answer.endswith(READY):
            return False
        # Opened before any code of the function runs, which could put a link in its place.
        self.socket_fd = os.open(self.directory / SOCKET_NAME, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        transport = UnixTransport(f"/proc/self/fd/{self.socket_fd}", httpx2.Limits(max_connections=None))
        self.http = httpx2.AsyncClient(
            transport=transport, base_url=f"http://{self.name}", timeout=None, trust_env=False
        )
        return True

    @property
    def pids(self) -> list[int]:
        """Processes whose descendants belong to the replica."""
        return [pid for pid in (self.pid, self.sandbox.pid if self.sandbox else None) if pid is not None]

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
        if self.sandbox is not None:
            await self.sandbox.close()
        self.process_limit.remove()
        if self.output is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self.output.ended), 1)
            self.output.transport.close()
        if self.http is not None:
            await self.http.aclose()
        if self.socket_fd >= 0:
            os.close(self.socket_fd)
        if self.relay is not None:
            self.relay.close()
        if self.temporary is not None:
            self.temporary.unlink(missing_ok=True)
        await asyncio.to_thread(shutil.rmtree, self.directory, ignore_errors=True)


async def _answer(control: socket.socket) -> tuple[bytes, list[int]]:
    """Return what a forked process sends until it is ready or has ended, with descriptors."""
    loop = asyncio.get_running_loop()
    received, descriptors = b"", list[int]()
    while not received.endswith(READY):
        readable = asyncio.Event()
        loop.add_reader(control, readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(control)
        data, found, _, _ = socket.recv_fds(control, _ANSWER_BYTES, MOST_EGRESS)
        descriptors += found
        received += data
        if not data:
            break
    return received, descriptors


def replica_spec(running: Running, handler: str, config: Config) -> ReplicaSpec:
    """Build the specification for the forked process."""
    if running.temporary is None:
        home, temporary, program = HOME, "/tmp", filter_program()
    else:
        home, temporary, program = str(running.directory), str(running.temporary), b""
    env = {
        "PATH": os.environ.get("PATH", os.defpath),
        "LANG": os.environ.get("LANG", "C.UTF-8"),
        "HOME": home,
        "TMPDIR": temporary,
        "OPENFAAS_SECRETS": f"{home}/secrets",
        "OPENFAAS_NAME": running.spec.service,
        **running.spec.env_vars,
    }
    return ReplicaSpec(
        name=running.name,
        handler=handler,
        directory=home,
        env=env,
        python_path=list(config.python_path),
        filter=base64.b64encode(program).decode(),
        threads=running.limits.threads,
        max_inflight=min(running.limits.max_inflight, 256),
        cold_start_s=config.cold_start.total_seconds(),
    )
