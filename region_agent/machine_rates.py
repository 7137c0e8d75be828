"""How fast this machine gives what parameter servers and workers take of it: durable storage, and memory."""

from __future__ import annotations

import contextlib
import math
import mmap
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

from sync.durable import write_durably
from sync.framing import digest_of

__all__ = ["durable_write_rate", "fresh_memory_rate"]

_TRIAL, _TRIAL_BYTES = "storing", 128 << 20
"""A file beside the parameter servers' folders, which tells how fast the disk takes what they store."""
_FRESH_BYTES, _FRESH_BLOCK_BYTES, _FRESH_SECONDS = 4 << 30, 64 << 20, 2.0
"""Of memory that is taken to see how fast it comes: at most so much, in such pieces, for about so long."""


def durable_write_rate(folder: Path) -> float:
    """Bytes/s that become durable here, with their digest, as a parameter server keeps a model. Blocking."""
    place, piece = folder / _TRIAL, bytes(_TRIAL_BYTES)
    try:
        begun = time.perf_counter()
        digest_of([piece])
        write_durably(place, [piece])
        return _TRIAL_BYTES / (time.perf_counter() - begun)
    finally:
        place.unlink(missing_ok=True)


def fresh_memory_rate() -> float:
    """Bytes/s at which memory comes that a process has not had before: the kernel clears each page. Blocking.

    On a virtual machine the host may have to find it first. What somebody used a moment ago comes first and twenty
    times as fast, so that a little of it would say nothing of what a job of several gigabytes meets.
    """
    room, held = _available_bytes() // 4, list[npt.NDArray[np.uint8]]()
    begun, took = time.thread_time(), 0.0
    while not held or (took < _FRESH_SECONDS and (len(held) + 1) * _FRESH_BLOCK_BYTES <= min(room, _FRESH_BYTES)):
        held.append(np.empty(_FRESH_BLOCK_BYTES, np.uint8))
        held[-1][:: mmap.PAGESIZE] = 1
        took = time.thread_time() - begun
    return len(held) * _FRESH_BLOCK_BYTES / max(1e-6, took)


def _available_bytes() -> int:
    """Of memory, to this process's control group too; 0 where the system does not tell."""
    found = 0
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found = 1024 * int(next(line.split()[1] for line in lines if line.startswith("MemAvailable:")))
    return int(min(found, max(0.0, _left_in_group())))


def _left_in_group() -> float:
    """Bytes; infinite where there is no limit, or none that the system tells of."""
    left = math.inf
    with contextlib.suppress(OSError, StopIteration, ValueError):
        own = next(line for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
        for folder in (Path(f"/sys/fs/cgroup{own.removeprefix('0::')}"), Path("/sys/fs/cgroup")):
            most = folder / "memory.max"
            if most.exists() and (limit := most.read_text().strip()) != "max":
                left = min(left, int(limit) - int((folder / "memory.current").read_text()))
    return left
