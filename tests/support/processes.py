"""What runs beside a test, looked at while it comes and goes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    # Benchmarks use this, too, and have no pytest.
    import pytest

__all__ = ["alive", "are_wanted", "family", "running_as"]


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
