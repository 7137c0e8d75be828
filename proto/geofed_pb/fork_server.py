"""Processes of this installation that start without importing anything: a fork server has imported their modules.

To import what a parameter server needs takes a second of CPU time, and 60 MB that forked processes share. The server
is forked itself, by a process that has no thread yet, and is single-threaded for all its life. Each request is one
packet of a SOCK_SEQPACKET socket, as JSON:

    owner -> server   {"id": n, "module": ..., "arguments": [...], "environment": {...} or null,
                      "own_output": whether it takes standard output, too} with a descriptor for standard error
    server -> owner   {"id": n, "pid": ...} with a pidfd
                      {"id": n, "errno": ...}, where it cannot fork
                      {"id": n, "status": <exit status, below 0 for a signal>}

The server ends with its owner, and what it has forked ends with the server, if it sets its parent-death signal
(`linux.die_with_parent`).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import importlib
import json
import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO, Protocol, Self

import setproctitle

from geofed_pb import linux

__all__ = ["ExecStarter", "ForkServer", "Process", "Starter", "end"]

_PACKET_BYTES = 128 * 1024
"""Largest packet; a request has the arguments and the environment of one process. Half of a socket's usual buffer."""
_log = logging.getLogger("geofed.processes")


class Process(Protocol):
    """What is used of an `asyncio.subprocess.Process`."""

    @property
    def pid(self) -> int: ...
    @property
    def returncode(self) -> int | None: ...
    @property
    def stderr(self) -> asyncio.StreamReader | None: ...
    async def wait(self) -> int: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


async def end(process: Process, seconds: float) -> None:
    """End a process with SIGTERM, and with SIGKILL after some seconds; returns once it has exited."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await process.wait()
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


class Starter(Protocol):
    """Starts modules of this installation as processes."""

    async def start(
        self, module: str, *arguments: str, environment: Mapping[str, str] | None = None, stderr: BinaryIO | None = None
    ) -> Process:
        """Run ``python -m MODULE ARGUMENTS --die-with-parent PID``, where PID is the process that forks it.

        ``environment``: None: this process's. ``stderr``: takes the process's standard output and error; None: a pipe
        takes its standard error. Standard input is empty. Raises ``OSError``.
        """


class ExecStarter:
    """Starts each process by executing Python."""

    async def start(
        self, module: str, *arguments: str, environment: Mapping[str, str] | None = None, stderr: BinaryIO | None = None
    ) -> Process:
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", module, *_with_parent(os.getpid(), arguments),
            stdin=subprocess.DEVNULL, stdout=stderr or subprocess.DEVNULL, stderr=stderr or subprocess.PIPE,
            env=None if environment is None else dict(environment),
        )  # fmt: skip


class ForkServer:
    """The owner's side, and a context that ends the server. Once it has ended, processes are started by executing
    Python."""

    def __init__(self, pid: int, link: socket.socket) -> None:
        self.pid, self._link = pid, link
        self._processes: dict[int, _Forked] = {}
        self._next = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End the server, and with it what it has forked. No event loop may run."""
        if not self._ended:
            self._ended = True
            self._link.close()
            # It may be importing, and would see the end of the socket later.
            os.kill(self.pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, 0)

    @classmethod
    def fork(cls, modules: Sequence[str]) -> ForkServer:
        """Fork the server, which then imports ``modules``. No other thread may run in this process, nor an event
        loop."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        owner = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            ours.close()
            _run_here(lambda: _serve(theirs, owner, modules))
        theirs.close()
        ours.setblocking(False)
        return cls(pid, ours)

    async def start(
        self, module: str, *arguments: str, environment: Mapping[str, str] | None = None, stderr: BinaryIO | None = None
    ) -> Process:
        loop = asyncio.get_running_loop()
        if self._loop is None and not self._ended:
            self._loop = loop
            loop.add_reader(self._link, self._receive)
        if self._ended:
            return await ExecStarter().start(module, *arguments, environment=environment, stderr=stderr)
        self._next += 1
        process = self._processes[self._next] = _Forked()
        request = {
            "id": self._next, "module": module, "arguments": _with_parent(self.pid, arguments),
            "environment": None if environment is None else dict(environment), "own_output": stderr is not None,
        }  # fmt: skip
        packet = json.dumps(request).encode()
        with contextlib.ExitStack() as given:
            if stderr is None:
                reading, writing = os.pipe()
                given.callback(os.close, writing)
                process.stderr = asyncio.StreamReader()
                protocol = asyncio.StreamReaderProtocol(process.stderr)
                await loop.connect_read_pipe(lambda: protocol, os.fdopen(reading, "rb", 0))
            try:
                if len(packet) > _PACKET_BYTES:
                    raise OSError(errno.EMSGSIZE, os.strerror(errno.EMSGSIZE))
                descriptor = writing if stderr is None else stderr.fileno()
                socket.send_fds(self._link, [packet], [descriptor])
            except OSError:
                # The server has ended, or has not taken the requests before this one: none waits for the other.
                del self._processes[self._next]
                return await ExecStarter().start(module, *arguments, environment=environment, stderr=stderr)
        try:
            forked = await process.started
        except asyncio.CancelledError:
            # Nobody has it. One that is not forked yet is killed when it is.
            process.abandon()
            raise
        if not forked:
            return await ExecStarter().start(module, *arguments, environment=environment, stderr=stderr)
        return process

    def _receive(self) -> None:
        while True:
            try:
                packet, descriptors, _, _ = socket.recv_fds(self._link, _PACKET_BYTES, 1)
            except BlockingIOError:
                return
            except OSError:
                packet = b""
            if not packet:
                self._end()
                return
            told = json.loads(packet)
            if "pid" in told:
                self._processes[told["id"]].begin(told["pid"], descriptors[0])
            elif "errno" in told:
                self._processes.pop(told["id"]).fail(told["errno"])
            else:
                self._processes.pop(told["id"]).end(told["status"])

    def _end(self) -> None:
        """The server has ended, and with it all that it has forked."""
        self._ended = True
        if self._loop is not None:
            self._loop.remove_reader(self._link)
        self._link.close()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        _log.warning("the fork server ended; processes start slower from now on")
        for process in self._processes.values():
            process.end(-signal.SIGKILL)
        self._processes.clear()


class _Forked:
    """A process that the server has forked, as a `Process`."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.started: asyncio.Future[bool] = loop.create_future()
        """False: the server ended before it forked it."""
        self._status: asyncio.Future[int] = loop.create_future()
        self._pidfd, self.pid = -1, 0
        self.stderr: asyncio.StreamReader | None = None

    def begin(self, pid: int, pidfd: int) -> None:
        self.pid, self._pidfd = pid, pidfd
        if not self.started.done():
            self.started.set_result(True)
        else:
            # Whoever asked for it was cancelled.
            self.abandon()

    def abandon(self) -> None:
        """Kill it, if it runs."""
        with contextlib.suppress(ProcessLookupError):
            self.kill()

    def fail(self, number: int) -> None:
        """The server could not fork it."""
        if not self.started.done():
            self.started.set_exception(OSError(number, os.strerror(number)))

    def end(self, status: int) -> None:
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
        if not self.started.done():
            self.started.set_result(False)
        self._status.set_result(status)

    @property
    def returncode(self) -> int | None:
        return self._status.result() if self._status.done() else None

    async def wait(self) -> int:
        return await asyncio.shield(self._status)

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self._pidfd < 0:
            raise ProcessLookupError
        signal.pidfd_send_signal(self._pidfd, number)


def _with_parent(pid: int, arguments: Sequence[str]) -> list[str]:
    return [*arguments, "--die-with-parent", str(pid)]


def _run_here(work: Any) -> None:
    """Run something in a forked process and end it: a child never returns into its parent's code."""
    status = 70
    try:
        status = int(work() or 0)
    except SystemExit as asked:
        status = asked.code if isinstance(asked.code, int) else int(asked.code is not None)
    except BaseException:  # noqa: BLE001 - see above
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _serve(link: socket.socket, owner: int, modules: Sequence[str]) -> None:
    """In the server: fork whenever the owner asks for it, until the socket closes."""
    linux.die_with_parent(owner)
    setproctitle.setproctitle("geofed fork-server")
    # A terminal or a service manager may signal all processes of a group. This one ends after what it has forked.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # Objects of modules stay, so collecting garbage during imports is useless.
    gc.disable()
    for module in modules:
        importlib.import_module(module)
    gc.freeze()
    gc.enable()
    forked: dict[int, tuple[int, int]] = {}
    """By pidfd: number of the request, process ID."""
    with selectors.DefaultSelector() as selector:
        selector.register(link, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is not link:
                    selector.unregister(key.fileobj)
                    _report_end(link, *forked.pop(key.fd))
                    os.close(key.fd)
                    continue
                packet, descriptors, _, _ = socket.recv_fds(link, _PACKET_BYTES, 1)
                if not packet:
                    return
                request, (stderr,) = json.loads(packet), descriptors
                try:
                    pid = os.fork()
                except OSError as error:
                    # No room for more processes, which ends none of those that there are.
                    os.close(stderr)
                    link.send(json.dumps({"id": request["id"], "errno": error.errno}).encode())
                    continue
                if pid == 0:
                    link.close()
                    selector.close()
                    # pidfds of its siblings
                    for descriptor in forked:
                        os.close(descriptor)
                    _run_here(lambda: _become(request, stderr))  # noqa: B023 - called at once
                os.close(stderr)
                pidfd = os.pidfd_open(pid)
                forked[pidfd] = request["id"], pid
                selector.register(pidfd, selectors.EVENT_READ)
                socket.send_fds(link, [json.dumps({"id": request["id"], "pid": pid}).encode()], [pidfd])


def _report_end(link: socket.socket, request: int, pid: int) -> None:
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    link.send(json.dumps({"id": request, "status": status}).encode())


def _become(request: dict[str, Any], stderr: int) -> int:
    """In a forked process: run the module as ``python -m`` would."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor, number in ((nothing, 0), (stderr if request["own_output"] else nothing, 1), (stderr, 2)):
        os.dup2(descriptor, number)
    os.close(nothing)
    os.close(stderr)
    if request["environment"] is not None:
        os.environ.clear()
        os.environ.update(request["environment"])
    sys.argv = [request["module"], *request["arguments"]]
    setproctitle.setproctitle(" ".join(["python", "-m", *sys.argv]))
    return int(importlib.import_module(f"{request['module']}.__main__").main())
