"""Learning rate over a job: the rate of the task's optimiser, times a factor that depends only on the step.

So every worker, every slice and every attempt makes a step, also a repeated one, with the same rate.
"""

from __future__ import annotations

import math

import torch

from geofed_pb.errors import GeofedError
from region_agent.worker.data.batches import Batches
from region_agent.worker.invocation import Schedule

__all__ = ["LearningRateSchedule", "factor"]


def factor(schedule: Schedule, step: int, steps: int) -> float:
    """Return the factor of the learning rate in a step, above 0 and at most 1; steps count from 1 to ``steps``.

    The factor rises linearly over the warm-up's steps. From 1 at the first step after them it falls to the floor, which
    it would reach one step after the last: linearly, or along half a cosine (SGDR, Loshchilov and Hutter,
    arXiv 1608.03983, without its restarts). With ``schedule.begin`` above 0 the steps are those of the schedule's rest.
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


class LearningRateSchedule:
    """Sets the learning rates of an optimiser; the factor is the same for all groups of parameters."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        schedule: Schedule | None,
        steps: int,
        batches: Batches | None = None,
    ) -> None:
        """``steps``: planned steps of the whole job in this region. ``batches``: the region's batch by step, with a
        factor of the rate.

        Raises ``GeofedError("TASK_INVALID")`` if a factor is needed and the optimiser has no ``lr``.
        """
        self._optimizer, self._schedule, self._steps = optimizer, schedule, steps
        self._batches = batches if batches is not None and batches.change else None
        self._first: list[float] = []
        if schedule is not None or self._batches is not None:
            if not all("lr" in group for group in optimizer.param_groups):
                key = "train.learningRate" if schedule is not None else "train.scaling"
                raise GeofedError("TASK_INVALID", f"`{key}` needs an optimiser with a learning rate, `lr`")
            self._first = [group["lr"] for group in optimizer.param_groups]

    def set(self, step: int) -> None:
        """Set the rates for a step. Without a schedule, and with one batch size, the task's own rates stay."""
        if not self._first:
            return
        scale = factor(self._schedule, step, self._steps) if self._schedule is not None else 1.0
        if self._batches is not None:
            scale *= self._batches.rate(step)
        for group, first in zip(self._optimizer.param_groups, self._first, strict=True):
            group["lr"] = first * scale
