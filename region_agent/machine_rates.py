"""Measures this machine's rates of durable writes and of memory allocation, which bound servers and workers."""

from __future__ import annotations

import contextlib
import math
import mmap
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

from geofed_pb.files.durable import write_durably
from sync.framing import digest_of

__all__ = ["durable_write_rate", "fresh_memory_rate"]

_TRIAL = "storing"
"""Name of the file that is written, next to the parameter servers' folders."""
_TRIAL_BYTES = 128 << 20
"""Size of that file."""
_FRESH_BYTES = 4 << 30
"""Most memory that is allocated for a measurement."""
_FRESH_BLOCK_BYTES = 64 << 20
"""Memory that is allocated at a time."""
_FRESH_SECONDS = 2.0
"""CPU time after which no more memory is allocated."""


def durable_write_rate(folder: Path) -> float:
    """Measure durable writes with their digest, as a parameter server stores a model, in bytes/s. Blocks."""
    path, piece = folder / _TRIAL, bytes(_TRIAL_BYTES)
    try:
        begun = time.perf_counter()
        digest_of([piece])
        write_durably(path, [piece])
        return _TRIAL_BYTES / (time.perf_counter() - begun)
    finally:
        path.unlink(missing_ok=True)


def fresh_memory_rate() -> float:
    """Measure the first use of new memory, whose pages the kernel clears, in bytes/s. Blocks.

    On a virtual machine the host may have to allocate it first. Recently freed memory comes first and is twenty times
    as fast, so a small amount would not show what a job of several gigabytes gets.
    """
    limit, held = min(_available_bytes() // 4, _FRESH_BYTES), list[npt.NDArray[np.uint8]]()
    begun, seconds = time.thread_time(), 0.0
    while not held or (seconds < _FRESH_SECONDS and (len(held) + 1) * _FRESH_BLOCK_BYTES <= limit):
        held.append(np.empty(_FRESH_BLOCK_BYTES, np.uint8))
        held[-1][:: mmap.PAGESIZE] = 1
        seconds = time.thread_time() - begun
    return len(held) * _FRESH_BLOCK_BYTES / max(1e-6, seconds)


def _available_bytes() -> int:
    """Return the available memory, also within this process's control group; 0 if unknown."""
    found = 0
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found = 1024 * int(next(line.split()[1] for line in lines if line.startswith("MemAvailable:")))
    return int(min(found, max(0.0, _left_in_group())))


def _left_in_group() -> float:
    """Return the bytes left in this process's control groups; infinite without a known limit."""
    left = math.inf
    with contextlib.suppress(OSError, StopIteration, ValueError):
        own = next(line for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
        for folder in (Path(f"/sys/fs/cgroup{own.removeprefix('0::')}"), Path("/sys/fs/cgroup")):
            most = folder / "memory.max"
            if most.exists() and (limit := most.read_text().strip()) != "max":
                left = min(left, int(limit) - int((folder / "memory.current").read_text()))
    return left
