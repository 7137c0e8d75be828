"""Forward and backward passes of a step whose samples may be divided into several parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from region_agent.worker.task import TaskModule
from region_agent.worker.training.loss_scale import LossScale

__all__ = ["accumulate"]


def accumulate(
    task: TaskModule,
    module: torch.nn.Module,
    parts: Sequence[tuple[int, Any]],
    before_last: Callable[[float], object],
    scale: LossScale | None = None,
) -> float:
    """Add up the gradients of the mean loss over all parts; returns that loss.

    Args:
        parts: samples of each part, with its batch.
        before_last: called with the loss before the last backward pass.
    """
    samples = sum(size for size, _ in parts)
    value = 0.0
    for left, (size, batch) in zip(reversed(range(len(parts))), parts, strict=True):
        loss = task.training_loss(module, batch)
        with task.calling("the loss"):
            if len(parts) > 1:
                loss = loss * (size / samples)
            value += float(loss.detach())
        if not left:
            before_last(value)
        with task.calling("the backward pass"):
            (loss if scale is None else scale.scaled(loss)).backward()  # type: ignore[no-untyped-call]
    return value
