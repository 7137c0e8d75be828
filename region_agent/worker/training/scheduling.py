"""When a training thread gets a core: as soon as it has something to do, also where servers keep all cores busy."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import threading

__all__ = ["request_low_latency"]

_CALLS = {"x86_64": 314, "aarch64": 274, "riscv64": 274}
"""Numbers of the system call sched_setattr, for which few C libraries have a function."""
_SLICE_NS = 500_000
"""Less than the kernel's own slice on any machine (0.7 ms with one core), and enough for most of what a step does on
the processor: a thread that has used it up is in line with the others."""


class _Attributes(ctypes.Structure):
    """``struct sched_attr`` of linux/sched/types.h, in its first version."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime", ctypes.c_uint64),
        ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    )


def request_low_latency() -> bool:
    """Ask the kernel for a short slice for the calling thread, and those that it starts from now on.

    A thread that has waited for an accelerator, or for others, then runs at once where it would wait for up to three
    milliseconds until another's slice ends (Linux 6.12 and newer: a task with a shorter slice preempts on waking; older
    kernels take no notice). It gets no more of the processor than before, only sooner. A thread whose policy somebody
    has chosen keeps it. Returns whether the kernel has taken it.
    """
    number = _CALLS.get(platform.machine())
    if number is None or platform.system() != "Linux" or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return False
    with contextlib.suppress(OSError, AttributeError):
        nice = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        wanted = _Attributes(ctypes.sizeof(_Attributes), os.SCHED_OTHER, 0, nice, 0, _SLICE_NS, 0, 0)
        return bool(ctypes.CDLL(None).syscall(number, 0, ctypes.byref(wanted), 0) == 0)
    return False
