"""Where a process computes: a GPU, if it sees one, else the CPU."""

from __future__ import annotations

import torch

__all__ = ["device", "finish"]


def device(worker: int = 0) -> torch.device:
    """Where a worker computes; workers of one machine are spread over its GPUs by their numbers.

    What job code puts on "cuda" then comes to the same one.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    chosen = torch.device("cuda", worker % torch.cuda.device_count())
    torch.cuda.set_device(chosen)
    return chosen


def finish(where: torch.device) -> None:
    """Wait until all that this process has asked for has been computed: a GPU is asked, and answers later. Whoever
    measures seconds calls it on both sides."""
    if where.type == "cuda":
        torch.cuda.synchronize(where)
