"""State directory of an emulator: its lock, its control socket, and the cleanup after one that was killed."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

from deploy.emulator import _namespaces as ns


def lock(state_dir: Path) -> int:
    """Lock the state directory until this process ends. Raises BlockingIOError if another process holds the lock."""
    handle = os.open(state_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise
    return handle


def sweep(state_dir: Path) -> int:
    """End processes that a killed emulator of this directory has left; returns their number. The caller holds the
    lock."""
    file = state_dir / "state.json"
    ended = 0
    if file.exists():
        state = json.loads(file.read_text())
        ended = ns.end_processes(set(state["inodes"]), mark=state["id"])
    for name in ("state.json", "control.sock"):
        (state_dir / name).unlink(missing_ok=True)
    return ended


def socket_path(directory: int) -> str:
    """Return the control socket's path through an open directory, since socket paths may have only 107 bytes."""
    return f"/proc/self/fd/{directory}/control.sock"
