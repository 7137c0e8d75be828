"""What a rank above 0 holds with `function.sharding: fsdp`: a part of the model, and of the optimiser's state."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any

import torch

from region_agent.worker.data.batches import Batches
from region_agent.worker.data.loading import Loading
from region_agent.worker.data.shard import move
from region_agent.worker.invocation import Invocation
from region_agent.worker.ranks.messages import Evaluate, Gather, Restore, Scatter, Update
from region_agent.worker.ranks.sharding import ShardedPasses, without_values
from region_agent.worker.ranks.state import restored, tensor_of
from region_agent.worker.task import TaskModule
from region_agent.worker.training.learning_rate import LearningRateSchedule
from region_agent.worker.training.trainer import test_batches
from region_agent.worker.training.update import OptimizerStep
from sync.seeding import reseed

__all__ = ["RankPart"]


class RankPart:
    """One rank's part of a model; it follows rank 0's orders, in the same order."""

    def __init__(
        self,
        call: Invocation,
        task: TaskModule,
        module: torch.nn.Module,
        device: torch.device,
        mesh: Any,
        base: Collection[str],
    ) -> None:
        """``mesh``: the ranks, see `mesh_on`. ``base``: names of the tensors that never change."""
        self._call, self._task, self._module, self._device = call, task, module, device
        like = without_values(module)
        self.passes = ShardedPasses(task, module, device, mesh, base)
        self._optimizer = task.optimizer(module.parameters())
        batches = Batches(call.region_batch, call.stretches)
        with task.calling("optimizer"):
            steps, own = call.rounds * call.steps_per_round, partial(task.schedule, like)
            self._rate = LearningRateSchedule(self._optimizer, call.schedule, steps, batches, own)
        self._update = OptimizerStep(self._optimizer, task, call.clip_norm)

    def exchange(self, request: Gather | Scatter) -> None:
        """Send this rank's part of a tensor, or receive it."""
        piece = request.piece
        tensor = tensor_of(self._optimizer, piece) if piece.key else self.passes.parameters[piece.number]
        with torch.no_grad():
            if isinstance(request, Gather):
                self.passes.gather(tensor)
            else:
                self.passes.scatter(tensor, None)

    def update(self, request: Update) -> None:
        """Make the optimiser's step."""
        with self._task.calling("the optimiser's groups"):
            self._rate.set(request.step)
        self._update()

    def restore(self, request: Restore) -> None:
        """Load this rank's part of the optimiser's state."""
        with torch.no_grad():
            for tensor in restored(self._optimizer, request):
                self.passes.scatter(tensor, None)

    def evaluate(self, request: Evaluate, data: Any, loading: Loading) -> None:
        """Evaluate as rank 0 does."""
        with self._task.calling("dataset"):
            sizes, batches = test_batches(self._call, data, loading, request.seeds, request.at_once)
        reseed(*request.seeds)
        with self._task.calling("the model's eval()"):
            self._module.eval()
        if not sizes:
            return
        with torch.no_grad():
            moved = (move(batch, self._device) for batch in batches)
            self.passes.evaluate(lambda module: self._task.metrics(module, moved, sizes))
