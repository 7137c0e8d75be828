"""That a training thread asks for a short slice, and for nothing else."""

from __future__ import annotations

import os
import platform
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from geofed_pb.linux import _SCHED_SETATTR, request_low_latency

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="Linux's scheduler"),
    pytest.mark.skipif(platform.machine() not in _SCHED_SETATTR, reason="its number of the call is unknown"),
]


def _in_a_thread(say: Callable[[], tuple[bool, int, int]]) -> tuple[bool, int, int]:
    """What is set for a thread would stay with it."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(say).result(timeout=10)


def _asked() -> tuple[bool, int, int]:
    taken = request_low_latency()
    return taken, os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_the_kernel_takes_it_and_the_thread_stays_as_nice_as_it_was() -> None:
    def nicer() -> tuple[bool, int, int]:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 7)
        return _asked()

    assert _in_a_thread(_asked) == (True, os.SCHED_OTHER, os.getpriority(os.PRIO_PROCESS, 0))
    assert _in_a_thread(nicer) == (True, os.SCHED_OTHER, 7)


def test_a_policy_that_somebody_has_chosen_stays() -> None:
    def batch() -> tuple[bool, int, int]:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        return _asked()

    taken, policy, _ = _in_a_thread(batch)
    assert (taken, policy) == (False, os.SCHED_BATCH)
