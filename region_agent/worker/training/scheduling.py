"""Requests low scheduling latency for training threads, also where servers keep all cores busy."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import threading

__all__ = ["request_low_latency"]

_CALLS = {"x86_64": 314, "aarch64": 274, "riscv64": 274}
"""Numbers of the system call sched_setattr by machine; few C libraries have a function for it."""
_SLICE_NS = 500_000
"""Requested scheduler slice in nanoseconds. It is shorter than the kernel's own slice on any machine (0.7 ms with one
core), and long enough for most of a step's work on the CPU; a thread that uses it up queues with the others."""


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
    """Request a short scheduler slice for the calling thread, and for threads that it starts from now on.

    A thread that has waited for an accelerator or for other workers then runs immediately; otherwise it waits for up to
    3 ms until another thread's slice ends. (Since Linux 6.12 a task with a shorter slice preempts when it wakes; older
    kernels ignore it.) The thread's share of the CPU does not change. A thread with a scheduling policy other than
    SCHED_OTHER keeps it. Returns whether the kernel has accepted the request.
    """
    number = _CALLS.get(platform.machine())
    if number is None or platform.system() != "Linux" or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return False
    with contextlib.suppress(OSError, AttributeError):
        nice = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        wanted = _Attributes(ctypes.sizeof(_Attributes), os.SCHED_OTHER, 0, nice, 0, _SLICE_NS, 0, 0)
        return bool(ctypes.CDLL(None).syscall(number, 0, ctypes.byref(wanted), 0) == 0)
    return False
