"""Zygotes that are forked from their gateways, which have torch in memory: to load it takes seconds of every region's
start. Gateways that tests start by themselves execute theirs, and those for which Python is to start otherwise."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import signal
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import setproctitle

from region_agent.gateway.embedded.replicas import zygote, zygote_link

__all__ = ["EXECUTED", "fork_zygotes"]

EXECUTED = "GEOFED_TEST_ZYGOTES_EXECUTED"
"""Variable of daemons whose zygotes are executed: for tests of how long parts of a step take, in a process that is like
that of a user."""

_PRELOAD = ("numpy", "torch", "region_agent.worker.handler")
"""What zygotes of agents load."""


def fork_zygotes() -> None:
    """Load what they need, and have all gateways that are forked from this process fork their zygotes."""
    for module in _PRELOAD:
        importlib.import_module(module)
    zygote_link._execute = _fork


_execute = zygote_link._execute


async def _fork(command: Sequence[str], link: int) -> Any:
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if EXECUTED in os.environ or any(folder and Path(folder, "sitecustomize.py").exists() for folder in folders):
        return await _execute(command, link)
    reading, writing = os.pipe()
    loop = asyncio.get_running_loop()
    pid = os.fork()
    if pid == 0:
        _become(command, link, writing)
    os.close(writing)
    process = _Forked(pid)
    await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(process.stderr), os.fdopen(reading, "rb", buffering=0)
    )
    return process


class _Forked:
    """What is used of an `asyncio.subprocess.Process`."""

    def __init__(self, pid: int) -> None:
        loop = asyncio.get_running_loop()
        self.pid, self.stderr = pid, asyncio.StreamReader()
        self._status: asyncio.Future[int] = loop.create_future()
        self._pidfd = os.pidfd_open(pid)
        loop.add_reader(self._pidfd, self._reap)

    def _reap(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._status.set_result(os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]))

    async def wait(self) -> int:
        return await asyncio.shield(self._status)

    def kill(self) -> None:
        if not self._status.done():
            os.kill(self.pid, signal.SIGKILL)


def _become(command: Sequence[str], link: int, stderr: int) -> None:
    """In the forked process: what executing the command would do."""
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        os.setsid()
        os.chdir("/")
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor, to in enumerate((nothing, nothing, stderr)):
            os.dup2(to, descriptor)
        os.closerange(3, link)
        os.closerange(link + 1, 1 << 16)
        environment = zygote_link.zygote_environment()
        os.environ.clear()
        os.environ.update(environment)
        setproctitle.setproctitle(" ".join(command))
        zygote.main(list(command[command.index("-m") + 2 :]))
        status = 0
    except BaseException:  # a forked child must never return into its parent's code
        with contextlib.suppress(Exception):
            traceback.print_exc()
    finally:
        os._exit(status)
