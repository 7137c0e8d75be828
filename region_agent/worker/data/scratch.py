"""Temporary folder of a worker process for unpacked and downloaded files."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

__all__ = ["scratch_folder"]

_PREFIX = "geofed-worker-"
"""Prefix of the folders' names."""


def scratch_folder(parent: Path) -> Path:
    """Create a folder below ``parent`` for this process, and delete the folders of processes that have ended.

    A function that is killed cannot delete its files, which may still exist when its container restarts. Each process
    holds a lock on its folder, which the kernel releases when the process ends, so unlocked folders can be deleted.
    """
    for left in parent.glob(f"{_PREFIX}*"):
        # Another process may delete it at the same time, or another user may own it.
        with contextlib.suppress(OSError):
            if (lock := _lock(left)) is not None:
                shutil.rmtree(left, ignore_errors=True)
                os.close(lock)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        # Until it is locked another process may consider it left behind, and delete it.
        with contextlib.suppress(FileNotFoundError):
            if _is_locked(folder) and folder.exists():
                atexit.register(_remove, folder, os.getpid())
                return folder


def _is_locked(folder: Path) -> bool:
    """Lock a folder; True if this process may use it, also where the file system has no locks."""
    try:
        return _lock(folder) is not None
    except FileNotFoundError:
        raise
    except OSError:
        return True


def _remove(folder: Path, owner: int) -> None:
    """Delete the folder, unless this is the end of a process that the owner has forked."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


def _lock(folder: Path) -> int | None:
    """Lock a folder; returns the descriptor that holds the lock, or None if another process holds it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            return None
        raise
    return descriptor
