"""The choices of published systems, over the same model: what they miss is then the search's alone."""

from __future__ import annotations

from dataclasses import replace

from scheduler.tuning._model import Configuration, Prediction, Space, TaskModel, TuningLimits
from scheduler.tuning._predict import predict

SATURATION = 0.8
"""FasDL's gamma: the share of the saturated throughput that its batch reaches."""


def fasdl_batch(task: TaskModel, space: Space) -> int:
    """FasDL's B = round(b / (1 / gamma - 1)), b = fixed / per-sample seconds; of the batches that may be chosen, the
    nearest (§1.5 of the notes in its code)."""
    compute = task.compute
    wanted = compute.fixed_seconds / max(1e-12, compute.seconds_per_sample) / (1 / SATURATION - 1)
    return min(space.batches, key=lambda batch: (abs(batch - wanted), batch))


def fasdl_heuristic(task: TaskModel, space: Space, limits: TuningLimits, channel: str) -> Prediction | None:
    """FasDL's pruning search (10.1109/TC.2024.3485202), as in its code: the cheapest under a deadline, or None.

    The batch is fixed first. Then for every number of workers, with K = W: a number that misses the deadline with the
    most memory is left out; else memory goes up to the first that keeps it and is cheaper than all before. Only at
    the workers and the memory that this leaves, K goes down while time decreases.
    """
    batch, best = fasdl_batch(task, space), None
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


def as_published(task: TaskModel) -> TaskModel:
    """The task with collectives that make one request after the other and find values by listing."""
    return replace(task, faithful=True)


def _at(task: TaskModel, memory_mb: int, workers: int, batch: int, chunks: int, channel: str) -> Prediction | None:
    return predict(task, [Configuration(memory_mb, workers, batch, "k-reduce", chunks, channel)])[0]
