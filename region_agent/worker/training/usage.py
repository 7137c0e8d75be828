"""What a worker uses of its machine: CPU and memory."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from pathlib import Path

import torch

from geofed_pb.v1 import common_pb2

__all__ = ["UsageMeter", "peak_bytes"]


def peak_bytes() -> int:
    """Return the largest resident memory of this process, without that of a process that has become it."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        lines = []
    told = (int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    return next(told, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


class UsageMeter:
    """Measures the worker's process between the ends of two rounds, or from its start."""

    def __init__(self, device: torch.device, helpers: Callable[[], tuple[float, int]] = lambda: (0.0, 0)) -> None:
        """``helpers``: returns the CPU seconds of the worker's own processes so far, and the bytes of their memory."""
        self._device, self._helpers = device, helpers
        self._since, self._cpu_seconds = time.monotonic(), time.process_time() + helpers()[0]

    def of_round(self) -> common_pb2.Usage:
        """Return what was used since the last call. The memory is the peak of the process so far."""
        helping, held_bytes = self._helpers()
        now, cpu_seconds = time.monotonic(), time.process_time() + helping
        cores = (cpu_seconds - self._cpu_seconds) / max(now - self._since, 1e-9)
        self._since, self._cpu_seconds = now, cpu_seconds
        on_gpu = self._device.type == "cuda"
        return common_pb2.Usage(
            cpu_cores=cores,
            memory_bytes=peak_bytes() + held_bytes,
            gpu_memory_bytes=torch.cuda.max_memory_allocated(self._device) if on_gpu else 0,
        )
