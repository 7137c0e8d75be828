"""The choices of published systems, over the same model: what they miss is then the search's alone."""

from __future__ import annotations

from dataclasses import replace

from scheduler.tuning import Prediction, Space, TaskModel, TuningLimits, fasdl_heuristic

SATURATION = 0.8
"""FasDL's gamma: the share of the saturated throughput that its batch reaches."""


def fasdl_batch(task: TaskModel, space: Space) -> int:
    """FasDL's B = round(b / (1 / gamma - 1)), b = fixed / per-sample seconds; of the batches that may be chosen, the
    nearest (§1.5 of the notes in its code)."""
    compute = task.compute
    wanted = compute.fixed_seconds / max(1e-12, compute.seconds_per_sample) / (1 / SATURATION - 1)
    return min(space.batches, key=lambda batch: (abs(batch - wanted), batch))


def fasdl(task: TaskModel, space: Space, limits: TuningLimits, channel: str) -> Prediction | None:
    """FasDL's search (`fasdl_heuristic`) with its choice of the batch."""
    return fasdl_heuristic(task, space, limits, channel, fasdl_batch(task, space))


def as_published(task: TaskModel) -> TaskModel:
    """The task with collectives that make one request after the other and find values by listing."""
    return replace(task, faithful=True)
