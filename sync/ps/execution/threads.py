"""Threads that encode, merge and store beside training on the same machine."""

from __future__ import annotations

import contextlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor

__all__ = ["background_thread", "lower_priority"]

_NICE = 10
"""Niceness of the threads that encode, merge and store, so that training on the same machine has priority."""


def background_thread() -> ThreadPoolExecutor:
    """Return a pool of one low-priority thread, for work that changes nothing that the calling thread uses."""
    return ThreadPoolExecutor(1, thread_name_prefix="ps-background", initializer=lower_priority)


def lower_priority() -> None:
    """Lower the scheduling priority of the calling thread, so that training has priority."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
