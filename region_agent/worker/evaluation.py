"""A task of a job that trains nothing (`train.end.steps: 0`): its model is measured as it is."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from geofed_pb.errors import GeofedError
from region_agent.worker.task import TaskModule, load_task

__all__ = ["EvaluatedTask", "load_evaluated"]


class _NoModel(torch.nn.Module):
    """Stands for the model of a task that has none, and measures its data alone; a job has a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = torch.nn.Parameter(torch.zeros(1))


class EvaluatedTask(TaskModule):
    """The functions of a task module, of which neither `loss` nor `optimizer` trains.

    The job's one step leaves every parameter as it is, bit for bit: its gradient is zero, and so is the rate of its
    optimiser, which has no momentum and no weight decay. `loss` still measures a task that has no `metrics`.
    """

    def model(self, seed: int = 0) -> torch.nn.Module:
        """Create the model; one without use if the task has none."""
        if not {"model", "layers"} & self.functions.keys():
            return _NoModel()
        made = super().model(seed)
        parameters = list(made.parameters())
        if not any(one.requires_grad for one in parameters):
            # A job has a trained parameter; here none is changed.
            for one in parameters:
                one.requires_grad_(one.is_floating_point())
        if not any(one.requires_grad for one in parameters):
            text = "the model has no parameter of floating-point numbers"
            raise GeofedError("TASK_INVALID", text, hint="keep what it computes with in a parameter of any float type")
        return made

    def loss(self, module: torch.nn.Module, batch: Any) -> torch.Tensor:
        """Return zero, whose gradient is zero whatever the parameters are."""
        parts = [one.flatten()[:0].sum().float() for one in module.parameters() if one.requires_grad]
        return torch.stack([torch.zeros(()), *(part.cpu() for part in parts)]).sum()

    def training_loss(self, module: torch.nn.Module, batch: Any) -> torch.Tensor:
        """Return the same."""
        return self.loss(module, batch)

    def optimizer(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """Create an optimiser whose steps have no length."""
        return torch.optim.SGD(parameters, lr=0.0)

    def schedule(self, parameters: Iterable[torch.nn.Parameter]) -> LRScheduler | None:
        """Return None: the rate stays zero."""
        return None

    def on_round(self, module: torch.nn.Module, completed: int) -> None:
        """Do nothing: no round is trained."""


def load_evaluated(folder: Path, module: str, config: dict[str, Any]) -> TaskModule:
    """Import a task module, as `load_task` does, of a job that trains nothing. It may define `metrics` alone.

    Raises ``GeofedError("TASK_INVALID")`` for one with neither `metrics` nor `loss`.
    """
    task = load_task(folder, module, config, EvaluatedTask, needs=())
    if not {"metrics", "loss"} & task.functions.keys():
        raise GeofedError("TASK_INVALID", f"{module} defines neither metrics nor loss: there is nothing to measure")
    return task
