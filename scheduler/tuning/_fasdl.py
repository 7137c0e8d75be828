"""FasDL's own search for the configuration of one region (10.1109/TC.2024.3485202), as in its code: a baseline."""

from __future__ import annotations

from scheduler.tuning._model import Configuration, Prediction, Space, TaskModel, TuningLimits
from scheduler.tuning._predict import predict

__all__ = ["fasdl_heuristic"]


def fasdl_heuristic(task: TaskModel, space: Space, limits: TuningLimits, channel: str, batch: int) -> Prediction | None:
    """Return the cheapest configuration of k-reduce under a deadline that FasDL's pruning finds; None: it finds none.

    For every number of workers, with K = W: a number that misses the deadline with the most memory is left out; else
    memory goes up to the first that keeps it and is cheaper than all before. Only at the workers and the memory that
    this leaves, K goes down while time decreases.
    """
    best = None
    for workers in space.workers:
        if (most := _at(task, space.memories_mb[-1], workers, batch, workers, channel)) is None:
            continue
        if most.seconds > limits.deadline_seconds:
            continue
        for memory_mb in space.memories_mb:
            found = _at(task, memory_mb, workers, batch, workers, channel)
            in_time = found is not None and found.seconds <= limits.deadline_seconds
            if found is not None and in_time and (best is None or found.usd < best.usd):
                best = found
                break
    if best is None:
        return None
    chosen = best.configuration
    for chunks in range(chosen.workers - 1, 0, -1):
        fewer = _at(task, chosen.memory_mb, chosen.workers, batch, chunks, channel)
        if fewer is None or fewer.seconds >= best.seconds:
            break
        best = fewer
    return best


def _at(task: TaskModel, memory_mb: int, workers: int, batch: int, chunks: int, channel: str) -> Prediction | None:
    return predict(task, [Configuration(memory_mb, workers, batch, "k-reduce", chunks, channel)])[0]
