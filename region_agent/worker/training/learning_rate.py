"""Learning rate over a job: the rate of the task's optimiser, times a factor that depends only on the step.

So every worker, every slice and every attempt makes a step, also a repeated one, with the same rate.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import torch
from torch.optim.lr_scheduler import LRScheduler

from geofed_pb.errors import GeofedError
from region_agent.worker.data.batches import Batches
from region_agent.worker.invocation import Schedule

__all__ = ["LearningRateSchedule", "OwnSchedule", "copy_scheduled", "factor"]


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
        own: Callable[[], LRScheduler | None] = lambda: None,
    ) -> None:
        """Create the schedule.

        Args:
            steps: planned steps of the whole job in this region.
            batches: the region's batch by step, with a factor of the rate.
            own: creates the task's own scheduler, with an optimiser of its own; None: the task has none.

        Raises ``GeofedError("TASK_INVALID")`` if a factor is needed and the optimiser has no ``lr``, or if there are
        both a schedule and one of the task's own.
        """
        self._own = OwnSchedule(optimizer, own) if own() is not None else None
        if self._own is not None and schedule is not None:
            text = "the task has a `schedule` of its own, and the job file another one, `train.learningRate`"
            raise GeofedError("TASK_INVALID", text, hint="remove one of them")
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
        if self._own is not None:
            self._own.set(step)
            if self._batches is not None:
                for group in self._optimizer.param_groups:
                    group["lr"] = group["lr"] * self._batches.rate(step)
            return
        if not self._first:
            return
        schedule = self._schedule
        scale = factor(schedule, step, self._steps) * schedule.scale if schedule is not None else 1.0
        if self._batches is not None:
            scale *= self._batches.rate(step)
        for group, first in zip(self._optimizer.param_groups, self._first, strict=True):
            group["lr"] = first * scale


class OwnSchedule:
    """The task's own scheduler, which runs over an optimiser without values, so that a step's rates depend on the step
    alone, wherever the invocation has begun."""

    def __init__(self, optimizer: torch.optim.Optimizer, made: Callable[[], LRScheduler | None]) -> None:
        self._optimizer, self._made = optimizer, made
        self._begin()

    def set(self, step: int) -> None:
        """Set what the scheduler changes, such as rates and momenta, to the values of a step; steps count from 1."""
        if step <= self._step:
            self._begin()
        with warnings.catch_warnings():
            # No step of the optimiser without values comes before the scheduler's.
            warnings.simplefilter("ignore")
            while self._step < step - 1:
                self._scheduler.step()
                self._step += 1
        copy_scheduled(self._scheduler.optimizer, self._optimizer)

    def _begin(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made, self._step = self._made(), 0
            assert made is not None
            self._scheduler: LRScheduler = made


_SCHEDULED = ("lr", "momentum", "betas", "weight_decay")
"""Values of a group of parameters that schedulers change."""


def copy_scheduled(source: torch.optim.Optimizer, to: torch.optim.Optimizer) -> None:
    """Copy what schedules change, such as rates and momenta, from one optimiser to another over groups alike."""
    for group, like in zip(to.param_groups, source.param_groups, strict=True):
        group.update({name: like[name] for name in _SCHEDULED if name in group and name in like})
