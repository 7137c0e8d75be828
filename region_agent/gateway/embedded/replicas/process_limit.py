"""Limits of the number of a replica's processes, by control groups where this process may create them."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

__all__ = ["MOST_PROCESSES", "ProcessLimit", "remove_old_groups"]

MOST_PROCESSES = 1024
"""Largest number of processes and threads of a replica: enough for loaders of data and threads of libraries, few enough
that a fork bomb does not harm the machine. A choice."""
_ROOT = Path("/sys/fs/cgroup")
_PREFIX = "geofed-"
"""Prefix of the groups' names."""


class ProcessLimit:
    """A control group; without the right to create one it does nothing, and the kernel's limit for users remains."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    @classmethod
    def create(cls, name: str) -> ProcessLimit:
        """Create a group below this process's own."""
        folder = None if (parent := _parent()) is None else parent / f"{_PREFIX}{os.getpid()}-{name}"
        try:
            if folder is not None:
                folder.mkdir()
                (folder / "pids.max").write_text(str(MOST_PROCESSES))
        except OSError:
            folder = None
        return cls(folder)

    @property
    def file(self) -> str:
        """File to which a process writes its ID to be in the group; empty: there is no group."""
        return "" if self._folder is None else str(self._folder / "cgroup.procs")

    def remove(self) -> None:
        """Remove the group, whose processes have ended."""
        if self._folder is not None:
            with contextlib.suppress(OSError):
                self._folder.rmdir()


def remove_old_groups() -> None:
    """Remove groups that a gateway which was killed has left; the kernel refuses it for those with processes.

    Those of a gateway that runs beside this one stay: a group has no process until its replica enters it.
    """
    if (parent := _parent()) is not None:
        for folder in parent.glob(f"{_PREFIX}*"):
            owner = folder.name.removeprefix(_PREFIX).partition("-")[0]
            if owner == str(os.getpid()) or not Path("/proc", owner).exists():
                with contextlib.suppress(OSError):
                    folder.rmdir()


def _parent() -> Path | None:
    """Return the folder in which groups with a limit of processes can be created, if there is one."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            folder = _ROOT / ("pids" if controllers else "") / path.lstrip("/")
            limits = controllers == "pids" or (not controllers and _delegates(folder))
            if limits and os.access(folder, os.W_OK):
                return folder
    return None


def _delegates(folder: Path) -> bool:
    """Whether groups below a folder of version 2 can limit processes."""
    try:
        return "pids" in (folder / "cgroup.subtree_control").read_text().split()
    except OSError:
        return False
