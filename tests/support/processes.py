"""What runs beside a test, looked at while it comes and goes."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from region_agent.gateway.embedded.replicas import isolation

if TYPE_CHECKING:
    # Benchmarks use this, too, and have no pytest.
    import pytest

__all__ = ["Start", "alive", "are_wanted", "execute", "family", "largest_over", "running_as"]

Start = Callable[[list[str], Mapping[str, str], Path], subprocess.Popen[bytes]]
"""What starts a command, with its environment and its folder."""


def execute(command: list[str], env: Mapping[str, str], folder: Path) -> subprocess.Popen[bytes]:
    """Start a command in a session of its own, with its output in the file ``log`` of its folder."""
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            command, env=env, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )


def are_wanted(session: pytest.Session, folder: Path) -> bool:
    """Whether a test of a folder that is to run has the mark `processes`."""
    return any(item.get_closest_marker("processes") and folder in item.path.parents for item in session.items)


def running_as(having: str, processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that live and whose command line holds a text."""
    return [process for process in processes if having in _command_line(process)]


def _command_line(process: psutil.Process) -> str:
    """Empty of a process that is gone, or dead and not yet reaped."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def alive(process: psutil.Process) -> bool:
    """Neither gone nor dead and not yet reaped."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE and process.is_running()
    except psutil.NoSuchProcess:
        return False


def family(pid: int) -> list[psutil.Process]:
    """A process, its children and theirs; nobody where it is gone."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def largest_over(pid: int, limit_bytes: float) -> int | None:
    """Return the largest of a process and its descendants if they use more unshared memory than a limit, else None.

    For those who look again and again: what `family` does takes a look at all processes there are.
    """
    members = [pid]
    for one in members:
        members += isolation.children(one)
    with contextlib.suppress(psutil.Error):
        processes = [psutil.Process(one) for one in members]
        if sum(one.memory_info().rss for one in processes) > limit_bytes:
            used = {one.pid: one.memory_full_info().uss for one in processes}
            if sum(used.values()) > limit_bytes:
                return max(used, key=lambda one: used[one])
    return None
