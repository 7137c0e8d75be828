"""Functions of a platform's double that are forked from a process that has loaded what they need: an image is two
processes there, which take a second of processor time to load it, and seconds where torch is part of it."""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import setproctitle
from support.processes import Start
from support.warm_servers import WarmServers

from geofed_pb import linux
from region_agent.gateway import handler_process

__all__ = ["forked_from", "main"]

_POLL_SECONDS = 0.005
_MOST_BYTES = 1 << 17
"""Of what a handler's process is told to be."""


def forked_from(parent: Callable[[], WarmServers]) -> Start:
    """What starts a function as `support.processes.execute` does, for a command that runs a module."""
    return functools.partial(_fork, parent)


def _fork(
    parent: Callable[[], WarmServers], command: list[str], env: Mapping[str, str], folder: Path
) -> subprocess.Popen[bytes]:
    at = command.index("-m")
    module, *arguments = command[at + 1 :]
    set_before = dict(word.split("=", 1) for word in command[:at] if "=" in word)
    argv = [module, str(folder), *arguments]
    process = parent().run(__name__, argv, folder / "log", {**env, **set_before})
    # A platform ends the process group.
    with contextlib.suppress(ProcessLookupError):
        while process.poll() is None and os.getpgid(process.pid) != process.pid:
            time.sleep(_POLL_SECONDS)
    return cast("subprocess.Popen[bytes]", process)


def main() -> int:
    """In the forked process: be the function. Its handler's process is forked from another one, which has no threads:
    one that is forked while a thread holds a lock never gets that."""
    os.setsid()
    module, folder, *arguments = sys.argv
    os.chdir(folder)
    sys.path[1:1] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    _write_at_once()
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    supervisor = os.getpid()
    if os.fork() == 0:
        mine.close()
        _serve(its, supervisor)
    its.close()
    handler_process._execute = _Handlers(mine).start
    return int(importlib.import_module(module).main(arguments) or 0)


def _write_at_once() -> None:
    for stream in (sys.stdout, sys.stderr):
        cast("Any", stream).reconfigure(write_through=True)


class _Handlers:
    """In the function's process: what starts its handler's process, one after the other."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link

    def start(
        self, arguments: list[str], link: int, env: Mapping[str, str] | None, output: int | None
    ) -> subprocess.Popen[bytes]:
        """In the place of `handler_process._execute`."""
        told = {"arguments": arguments, "env": dict(os.environ if env is None else env)}
        socket.send_fds(self._link, [json.dumps(told).encode()], [link, *(() if output is None else (output,))])
        return cast("subprocess.Popen[bytes]", _Handler(int(self._link.recv(64)), self._link))


class _Handler:
    """What is used of a `subprocess.Popen`."""

    def __init__(self, pid: int, link: socket.socket) -> None:
        self.pid, self._link, self._lock = pid, link, threading.Lock()
        self._status: int | None = None

    def poll(self) -> int | None:
        with self._lock:
            if self._status is None and select.select([self._link], [], [], 0)[0]:
                self._status = int(self._link.recv(64))
            return self._status

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a handler", timeout or 0.0)
            time.sleep(_POLL_SECONDS)
        return status


def _serve(link: socket.socket, supervisor: int) -> None:
    """In the process without threads: fork a handler's process for each request, and tell how it has ended."""
    with contextlib.suppress(OSError):
        linux.die_with_parent(supervisor)
        while True:
            told, descriptors, _, _ = socket.recv_fds(link, _MOST_BYTES, 2)
            if not told:
                break
            pid = os.fork()
            if pid == 0:
                _become(json.loads(told), *descriptors)
            with contextlib.suppress(OSError):
                os.setpgid(pid, pid)
            for descriptor in descriptors:
                os.close(descriptor)
            link.send(str(pid).encode())
            link.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
    os._exit(0)


def _become(told: dict[str, Any], link: int, output: int | None = None) -> None:
    """In the handler's process: what executing it would do."""
    status = 1
    try:
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        for descriptor in () if output is None else (1, 2):
            os.dup2(output or 0, descriptor)
        os.closerange(3, link)
        os.closerange(link + 1, 1 << 16)
        os.environ.clear()
        os.environ.update(told["env"])
        arguments = told["arguments"]
        for option, value in (("--link-fd", link), ("--parent", os.getppid())):
            arguments[arguments.index(option) + 1] = str(value)
        setproctitle.setproctitle(f"{handler_process.__name__} {' '.join(arguments)}")
        handler_process.main(arguments)
        status = 0
    except BaseException:  # a forked child must never return into its parent's code
        with contextlib.suppress(Exception):
            traceback.print_exc()
    finally:
        os._exit(status)
