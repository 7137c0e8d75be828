"""A federation for many tests, one after the other: to start one takes as long as many a test."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import psutil
import pytest
from support.processes import family, running_as
from support.running import Running, eventually, warm_daemons

from deploy.local import LocalFederation
from geofed_pb.errors import GeofedError

__all__ = ["Lasting", "daemons", "parents"]

_SETTLE_SECONDS = 20.0
"""For a job that a test has cancelled, and for an agent that it has killed and started again."""
_GRACE_SECONDS = 5.0
_federations: dict[LocalFederation, set[int]] = {}
"""With the processes that were there once it had started, an emulator's among them."""


def daemons() -> set[int]:
    """Processes that no test has to end, also those that one has started again."""
    again = {process.pid for federation in _federations for process in federation.processes.values()}
    return again.union(*_federations.values())


def parents() -> set[int]:
    """Processes from which daemons of any test are forked; they last as long as this process."""
    return {warm_daemons().pid} if warm_daemons.cache_info().currsize else set()


class Lasting:
    """Starts the federation for the first test that asks for it, and another one for the test after one that failed
    or that did not leave it in order. Only one lasts at a time: the next one to start ends it. A context manager;
    leaving it ends the federation."""

    _now: Lasting | None = None
    """Whose federation runs."""

    def __init__(
        self, start: Callable[[Path], AbstractContextManager[LocalFederation]], folders: pytest.TempPathFactory
    ) -> None:
        """``start`` makes a federation in an empty folder."""
        self._start, self._folders = start, folders
        self._stack = ExitStack()
        self._federation: LocalFederation | None = None
        """None before the first test."""
        self._failures = 0

    def __enter__(self) -> Lasting:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    @staticmethod
    def end_now() -> None:
        """End the federation that runs, where there is one."""
        if Lasting._now is not None:
            Lasting._now._end()

    def running(self, request: pytest.FixtureRequest, folder: Path) -> Running:
        """For one test: with all regions connected and no job at work. Its job folder is made in ``folder``."""
        failures = request.session.testsfailed
        if self._federation is None or failures != self._failures or not _in_order(self._federation):
            self._end()
            Lasting.end_now()
            Lasting._now = self
            before = _children()
            self._federation = self._stack.enter_context(self._start(self._folders.mktemp("lasting")))
            _federations[self._federation] = _children() - before
        self._failures = failures
        return Running(self._federation, folder)

    def _end(self) -> None:
        """Fails where a process of the federation outlives it."""
        if self._federation is None:
            return
        alive = [process for pid in daemons() for process in family(pid)]
        self._stack.close()
        del _federations[self._federation]
        self._federation, Lasting._now = None, None
        left = psutil.wait_procs(alive, _GRACE_SECONDS)[1]
        assert not left, f"left behind: {left}"


def _children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)} - parents()


def _in_order(federation: LocalFederation) -> bool:
    if any(process.poll() is not None for process in federation.processes.values()):
        return False
    try:
        federation.wait_connected([name for name in federation.processes if name != "control-plane"])
        eventually(lambda: not _has_jobs(federation), "no job", _SETTLE_SECONDS)
        eventually(lambda: not _servers(federation), "no parameter server", _SETTLE_SECONDS)
    except (GeofedError, AssertionError):
        return False
    return True


def _has_jobs(federation: LocalFederation) -> bool:
    if federation.emulator is None:
        return bool(federation.ask(lambda client: client.jobs()))
    return bool(federation.control_plane("list", "-o", "name").stdout.strip())


def _servers(federation: LocalFederation) -> list[psutil.Process]:
    """Parameter servers, which end a moment after their job: a test that looks for its own must find no other."""
    there = [found for daemon in federation.processes.values() for found in family(daemon.pid)]
    return running_as("sync.ps", there)
