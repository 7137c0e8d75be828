"""The device on which a process computes: a GPU if it sees one, else the CPU."""

from __future__ import annotations

import torch

__all__ = ["device", "device_peak_bytes", "finish", "reset_device_peak"]


def device(worker: int = 0) -> torch.device:
    """Return the device of a worker; workers of one machine are distributed over its GPUs by their numbers.

    Tensors that job code puts on "cuda" are then on the same GPU.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    chosen = torch.device("cuda", worker % torch.cuda.device_count())
    torch.cuda.set_device(chosen)
    return chosen


def finish(where: torch.device) -> None:
    """Wait until all submitted computations are done, since a GPU computes asynchronously. Call it before and after a
    part whose time is measured."""
    if where.type == "cuda":
        torch.cuda.synchronize(where)


def reset_device_peak(where: torch.device) -> None:
    """Reset the peak of a GPU's memory that tensors take."""
    if where.type == "cuda":
        torch.cuda.reset_peak_memory_stats(where)


def device_peak_bytes(where: torch.device) -> int:
    """Return the most memory of a GPU, in bytes, that tensors of this process took since the last reset; 0: a CPU."""
    return torch.cuda.max_memory_allocated(where) if where.type == "cuda" else 0
