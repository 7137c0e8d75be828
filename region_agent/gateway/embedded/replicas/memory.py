"""Measures the memory of replicas, without the memory that they share with the warm parent."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

from region_agent.gateway.embedded.replicas import isolation
from region_agent.gateway.quantities import format_bytes

__all__ = ["over_limit_text", "private_bytes", "usage"]

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def private_bytes(pids: Iterable[int], enough: int) -> int:
    """Return the unshared memory of processes and their descendants in bytes; 0 if one of them has ended.

    The resident size is cheap to read and never smaller than the unshared size, so it is returned if it is at most
    ``enough``; only above that the page tables are walked. A limit of the address space would not work, since torch
    maps far more memory than it uses.
    """
    total = 0
    with contextlib.suppress(psutil.Error, OSError):
        family = [member for pid in pids for member in (pid, *_descendants(pid))]
        resident = sum(_resident_bytes(member) for member in family)
        if resident <= enough:
            total = resident
        else:
            total = sum(psutil.Process(member).memory_full_info().uss for member in family)
    return total


def _descendants(pid: int) -> list[int]:
    found = isolation.children(pid)
    return found + [descendant for child in found for descendant in _descendants(child)]


def _resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES


def usage(pids: Iterable[int]) -> dict[str, float]:
    """CPU time per second of life, in thousandths of a core, and private memory in bytes."""
    cpu_milli, memory_bytes = 0.0, 0
    for pid in pids:
        memory_bytes += private_bytes([pid], 0)
        for member in (pid, *_descendants(pid)):
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(member)
                times = process.cpu_times()
                lived_s = max(1.0, time.time() - process.create_time())
                cpu_milli += 1000 * (times.user + times.system) / lived_s
    return {"cpu": round(cpu_milli, 1), "totalMemoryBytes": memory_bytes}


def over_limit_text(replica: str, used_bytes: int, limit_bytes: int) -> str:
    """Return the message about a replica that was killed over its memory."""
    return (
        f"replica {replica} was killed: it used {format_bytes(used_bytes)} of memory, "
        f"more than its limit of {format_bytes(limit_bytes)}"
    )
