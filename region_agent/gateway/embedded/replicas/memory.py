"""Measures the memory of replicas, without the memory that they share with the warm parent."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterable

import psutil

from region_agent.gateway.embedded.replicas import isolation
from region_agent.gateway.quantities import format_bytes

__all__ = ["PrivateMemory", "over_limit_text", "usage"]

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_WALK_SECONDS = 1.0
"""Time for which the page tables are not walked again while the resident size tells enough. A walk over the 500 MB of a
worker takes 4 ms of processor time."""


class PrivateMemory:
    """Watches the unshared memory of processes and their descendants.

    A limit of the address space would not work, since torch maps far more memory than it uses.
    """

    def __init__(self) -> None:
        self._walked = -math.inf
        """When the page tables were walked last."""
        self._resident = self._private = 0
        """Resident and unshared size at that time, in bytes."""

    def used(self, pids: Iterable[int], limit: int) -> int:
        """Return the unshared memory in bytes, or more than that if it is at most ``limit``; 0 if a process has ended.

        The resident size is cheap to read and never smaller than the unshared size: only above the limit the page
        tables are walked. For a second after that, what the resident size has grown by counts as unshared. This misses
        shared pages that are written meanwhile, which are no more than the warm parent has.
        """
        with contextlib.suppress(psutil.Error, OSError):
            family = _family(pids)
            resident, now = sum(_resident_bytes(member) for member in family), time.monotonic()
            if resident <= limit:
                return resident
            grown = self._private + max(0, resident - self._resident)
            if grown <= limit and now - self._walked < _WALK_SECONDS:
                return grown
            self._private = _private_bytes(family)
            self._walked, self._resident = now, resident
            return self._private
        return 0


def _family(pids: Iterable[int]) -> list[int]:
    return [member for pid in pids for member in (pid, *_descendants(pid))]


def _private_bytes(family: Iterable[int]) -> int:
    return sum(psutil.Process(member).memory_full_info().uss for member in family)


def _descendants(pid: int) -> list[int]:
    found = isolation.children(pid)
    return found + [descendant for child in found for descendant in _descendants(child)]


def _resident_bytes(pid: int) -> int:
    return int(isolation.read_proc(f"{pid}/statm").split()[1]) * _PAGE_BYTES


def usage(pids: Iterable[int]) -> dict[str, float]:
    """CPU time per second of life, in thousandths of a core, and private memory in bytes."""
    cpu_milli, memory_bytes = 0.0, 0
    for pid in pids:
        family = _family([pid])
        with contextlib.suppress(psutil.Error):
            memory_bytes += _private_bytes(family)
        for member in family:
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
