"""Who may run where tests run in several processes: all beside each other, but for those that measure the machine."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

__all__ = ["turn"]


@contextlib.contextmanager
def turn(folder: Path, *, alone: bool) -> Iterator[None]:
    """Wait until this process may run a test; ``alone``: until no other runs one, and none will. ``folder``: of all
    processes."""
    # Who wants to be alone holds the gate while it waits, so that nobody goes past it again and again.
    with (folder / "gate").open("w") as gate, (folder / "turn").open("w") as mine:
        fcntl.flock(gate, fcntl.LOCK_EX)
        try:
            fcntl.flock(mine, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        finally:
            fcntl.flock(gate, fcntl.LOCK_UN)
        try:
            yield
        finally:
            # Not left to the file's end: what a test has forked may have it open, too.
            fcntl.flock(mine, fcntl.LOCK_UN)
