"""The learning rate over a job: what the task's optimiser begins with, times a factor that follows from the step alone.

So every worker, every slice and every attempt that makes a step, or makes it again, makes it with the same rate.
"""

from __future__ import annotations

import math

import torch

from geofed_pb.errors import GeofedError
from region_agent.worker.data.batches import Batches
from region_agent.worker.invocation import Schedule

__all__ = ["LearningRate", "factor"]


def factor(schedule: Schedule, step: int, steps: int) -> float:
    """What a step's learning rate is multiplied by, above 0 and at most 1; steps count from 1 to ``steps``.

    It rises in a line over the warm-up's steps, and then falls, from 1 at the first step after them, to the floor one
    step after the last: in a line, or along half a cosine (SGDR, Loshchilov and Hutter, arXiv 1608.03983, without its
    restarts). Where a part of the way is behind it at the first step, these are the steps of what is left.
    """
    before = round(steps / (1 - schedule.begin)) - steps
    step, steps = step + before, steps + before
    rise = min(round(schedule.warmup * steps), steps - 1)
    if step <= rise:
        return step / (rise + 1)
    if schedule.shape == "constant":
        return 1.0
    done = min(1.0, (step - 1 - rise) / (steps - rise))
    left = 1.0 - done if schedule.shape == "linear" else (1.0 + math.cos(math.pi * done)) / 2
    return schedule.floor + (1.0 - schedule.floor) * left


class LearningRate:
    """Sets the rates of an optimiser, of all its groups of parameters alike."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        schedule: Schedule | None,
        steps: int,
        batches: Batches | None = None,
    ) -> None:
        """``steps``: of the whole job in this region, as planned. ``batches``: what goes with the region's batch."""
        self._optimizer, self._schedule, self._steps = optimizer, schedule, steps
        self._batches = batches if batches is not None and batches.change else None
        self._first: list[float] = []
        if schedule is not None or self._batches is not None:
            if not all("lr" in group for group in optimizer.param_groups):
                key = "train.learningRate" if schedule is not None else "train.scaling"
                raise GeofedError("TASK_INVALID", f"`{key}` needs an optimiser with a learning rate, `lr`")
            self._first = [group["lr"] for group in optimizer.param_groups]

    def set(self, step: int) -> None:
        """Before a step is made; where nothing is said of them the task's own rates stay."""
        if not self._first:
            return
        by = factor(self._schedule, step, self._steps) if self._schedule is not None else 1.0
        if self._batches is not None:
            by *= self._batches.rate(step)
        for group, first in zip(self._optimizer.param_groups, self._first, strict=True):
            group["lr"] = first * by
