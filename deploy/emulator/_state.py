"""The state directory: who is up there, how to reach it, and what a dead one left behind."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

from deploy.emulator import _namespaces as ns


def lock(state_dir: Path) -> int:
    """Take the state directory for the life of this process. Raises BlockingIOError where another has it."""
    handle = os.open(state_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise
    return handle


def sweep(state_dir: Path) -> int:
    """End what a dead emulator of this directory left running; returns how many processes. Needs the lock."""
    file = state_dir / "state.json"
    ended = 0
    if file.exists():
        state = json.loads(file.read_text())
        ended = ns.end_processes(set(state["inodes"]), mark=state["id"])
    for name in ("state.json", "control.sock"):
        (state_dir / name).unlink(missing_ok=True)
    return ended


def socket_path(directory: int) -> str:
    """Path of the control socket through an open directory: socket paths may only be 107 bytes long."""
    return f"/proc/self/fd/{directory}/control.sock"
