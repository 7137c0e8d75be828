"""The gateway's connection to the zygote: starts and restarts it, and has it fork and signal replicas."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from geofed_pb.tasks import awaited, background, end_process
from region_agent.gateway.embedded.replicas import isolation

__all__ = ["EnteredSandbox", "ZygoteEvents", "ZygoteLink"]

_PACKET_BYTES = 64 * 1024
"""Largest packet on the socket to the zygote."""
_PASSED_ON = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "VIRTUAL_ENV", "PYTHONPATH")
_log = structlog.get_logger("gateway.zygote")


@dataclass(frozen=True)
class ZygoteEvents:
    """Callbacks for events of the zygote."""

    spawned: Callable[[str, int], None]
    """A replica has a process: replica, pid."""
    exited: Callable[[str, int], None]
    """A replica's process has ended: replica, waitpid status."""
    lost: Callable[[], None]
    """The zygote has ended, and with it every replica."""
    sandboxes: Callable[[], Collection[int]]
    """Processes of sandboxes, which this process has started."""
    output: Callable[[str], None]
    """The zygote wrote a line, which it does only when something is wrong."""


@dataclass(frozen=True)
class EnteredSandbox:
    """The sandbox that a replica enters."""

    sandbox_fd: int
    """pidfd of a process in it."""
    own_network: bool
    """Whether it has a network of its own."""
    listen: list[tuple[str, int]]
    """Addresses in that network at which connections are accepted for the gateway."""
    processes: int
    """Largest number of processes and threads."""
    cgroup: str
    """File of a control group to which the process adds itself; empty: none."""


class ZygoteLink:
    """Runs one warm parent at a time."""

    def __init__(self, preload: tuple[str, ...], python_path: tuple[str, ...], events: ZygoteEvents) -> None:
        self._preload = preload
        self._python_path = python_path
        self._events = events
        self.python_path: list[str] = []
        """Folders from which the warm parent imports."""
        self._ready = asyncio.Event()
        self._link: socket.socket | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the warm parent and wait until its modules are loaded."""
        self._task = background(self._keep_running(), end_process, name="zygote")
        await self._ready.wait()

    async def stop(self) -> None:
        """End the warm parent and all that it forked."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    @property
    def pid(self) -> int | None:
        """Process ID of the warm parent; None while none is ready."""
        return self._process.pid if self._process is not None and self._ready.is_set() else None

    async def wait_ready(self) -> None:
        """Wait until the zygote is ready, as after a restart."""
        await self._ready.wait()

    def spawn(self, replica: str, control_fd: int, log_fd: int, place: EnteredSandbox | None) -> None:
        """Fork a replica, which gets copies of the two descriptors; raises ``OSError``.

        ``place``: the sandbox that it enters; None: it stays outside of any.
        """
        if self._link is None:
            raise OSError("the warm parent is not running")
        packet: dict[str, object] = {"op": "spawn", "id": replica, "sandbox": None}
        descriptors = [control_fd, log_fd]
        if place is not None:
            descriptors.append(place.sandbox_fd)
            packet["sandbox"] = {
                "listen": place.listen,
                "own_network": place.own_network,
                "processes": place.processes,
                "cgroup": place.cgroup,
            }
        socket.send_fds(self._link, [json.dumps(packet).encode()], descriptors)

    def kill(self, replica: str) -> None:
        """Kill a replica with its descendants; one that has ended already is left alone."""
        if self._link is not None and self._ready.is_set():
            packet = json.dumps({"op": "signal", "id": replica, "signal": int(signal.SIGKILL)})
            with contextlib.suppress(OSError):
                self._link.send(packet.encode())

    async def _keep_running(self) -> None:
        wait_s = 0.05
        while True:
            started = asyncio.get_running_loop().time()
            await self._run_once()
            self._events.lost()
            # A zygote that ran for a while is restarted immediately; one that dies at its start after growing pauses.
            lived_s = asyncio.get_running_loop().time() - started
            wait_s = 0.05 if lived_s > 10 else min(5.0, wait_s * 2)
            _log.warning("zygote ended; restarting", lived_s=round(lived_s, 1))
            await asyncio.sleep(wait_s)

    async def _run_once(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        command = [sys.executable, "-m", "region_agent.gateway.embedded.replicas.zygote"]
        command += ["--link-fd", str(theirs.fileno()), "--parent", str(os.getpid())]
        command += [part for name in self._preload for part in ("--preload", name)]
        command += [part for path in self._python_path for part in ("--python-path", path)]
        with theirs:
            self._process = await _execute(command, theirs.fileno())
        self._link = ours
        loop = asyncio.get_running_loop()
        loop.add_reader(ours, self._receive, ours)
        output = awaited(self._relay_output(self._process))
        try:
            await self._process.wait()
        finally:
            self._ready.clear()
            self._link = None
            loop.remove_reader(ours)
            ours.close()
            with contextlib.suppress(ProcessLookupError, TimeoutError):
                # After the socket is closed the zygote kills its replicas and exits; it is killed only after a timeout.
                await asyncio.wait_for(self._process.wait(), 2)
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
            await asyncio.to_thread(end_orphans, self._events.sandboxes)
            await output

    async def _relay_output(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        with contextlib.suppress(ValueError):
            async for line in process.stderr:
                self._events.output(line.decode("utf-8", "replace").rstrip())

    def _receive(self, link: socket.socket) -> None:
        while True:
            try:
                packet = link.recv(_PACKET_BYTES)
            except BlockingIOError:
                return
            except OSError:
                packet = b""
            if not packet:
                asyncio.get_running_loop().remove_reader(link)
                return
            self._take(json.loads(packet))

    def _take(self, event: dict[str, object]) -> None:
        match event:
            case {
                "event": "ready",
                "failed_preloads": list(failed),
                "threads": int(threads),
                "python_path": list(python_path),
            }:
                if failed:
                    _log.warning("modules could not be preloaded", modules=failed)
                if threads > 1:
                    _log.warning("a preloaded module has started threads; forks may hang", threads=threads)
                self.python_path = list(python_path)
                self._ready.set()
            case {"event": "spawned", "id": str(replica), "pid": int(pid)}:
                self._events.spawned(replica, pid)
            case {"event": "exited", "id": str(replica), "status": int(status)}:
                self._events.exited(replica, status)


async def _execute(command: Sequence[str], link: int) -> asyncio.subprocess.Process:
    """Start the zygote, which takes a descriptor of this process; a pipe takes its standard error."""
    return await asyncio.create_subprocess_exec(
        *command,
        pass_fds=[link],
        env=zygote_environment(),
        cwd="/",
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )


def end_orphans(kept: Callable[[], Collection[int]]) -> None:
    """Kill processes that a killed zygote has left; as a subreaper this process has inherited them.

    ``kept`` returns children of this process that are none of them.
    """
    while orphans := set(isolation.children()) - set(kept()):
        for pid in orphans:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        for pid in orphans:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def zygote_environment() -> dict[str, str]:
    """Return the environment that replicas inherit in memory: nothing secret of the daemon, one thread per library."""
    kept = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {**kept, **single, "PYTHONUNBUFFERED": "1", "HOME": str(Path("/"))}
