"""Where a worker puts what it unpacks and fetches: a folder that lasts as long as its process."""

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


def scratch_folder(parent: Path) -> Path:
    """A new folder below ``parent``, this process's own until it ends, however it ends; those of ended ones go.

    A function that was killed can remove nothing, and where its container starts again its temporary files may still
    be there. A lock, which the kernel takes from a process that has ended, tells whose folders are in use.
    """
    for left in parent.glob(f"{_PREFIX}*"):
        # Another process may remove it at the same time, or it may be somebody else's.
        with contextlib.suppress(OSError):
            if (lock := _locked(left)) is not None:
                shutil.rmtree(left, ignore_errors=True)
                os.close(lock)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        # Until it is locked another process may take it for one that was left.
        with contextlib.suppress(FileNotFoundError):
            if _kept(folder) and folder.exists():
                atexit.register(_remove, folder, os.getpid())
                return folder


def _kept(folder: Path) -> bool:
    """Whether it is ours now; where the file system knows no locks, nobody takes it for one that was left either."""
    try:
        return _locked(folder) is not None
    except FileNotFoundError:
        raise
    except OSError:
        return True


def _remove(folder: Path, owner: int) -> None:
    """Not at the end of a process that the owner has forked."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


def _locked(folder: Path) -> int | None:
    """A descriptor that holds the folder's lock; None: another process does."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            return None
        raise
    return descriptor
