"""The optimiser's step of one worker, and what is done with the merged gradients before it."""

from __future__ import annotations

import torch

from region_agent.worker.task import TaskModule
from region_agent.worker.training.loss_scale import LossScale
from region_agent.worker.training.proximal import ProximalTerm

__all__ = ["OptimizerStep"]


class OptimizerStep:
    """Makes the step with the gradients in the parameters' ``.grad``."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        task: TaskModule,
        clip_norm: float = 0.0,
        proximal: ProximalTerm | None = None,
        scale: LossScale | None = None,
    ) -> None:
        """``clip_norm``: largest norm of the gradient; 0: any. ``scale``: the step is left out where gradients have
        overflowed."""
        self._optimizer, self._task, self._clip_norm = optimizer, task, clip_norm
        self._proximal, self._scale = proximal, scale

    def __call__(self) -> None:
        """Make the step."""
        if self._scale is not None and not self._scale.accepts():
            return
        if self._proximal is not None:
            self._proximal.add()
        if self._clip_norm:
            parameters = [one for group in self._optimizer.param_groups for one in group["params"]]
            with self._task.calling("the clipping of gradients"):
                torch.nn.utils.clip_grad_norm_(parameters, self._clip_norm)
        with self._task.calling("the optimiser's step"):
            self._optimizer.step()
