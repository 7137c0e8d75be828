"""Rank 0's side of a model that is divided among the ranks of a worker (`function.sharding: fsdp`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from geofed_pb.errors import GeofedError
from region_agent.worker.invocation import Invocation
from region_agent.worker.ps_client import PsClient
from region_agent.worker.ranks.group import Ranks
from region_agent.worker.ranks.messages import Begin, Evaluate, Gather, Piece, Scatter, Update
from region_agent.worker.ranks.passes import described
from region_agent.worker.ranks.sharding import ShardedPasses, check_shardable, is_part, without_values
from region_agent.worker.ranks.state import check_optimizer, check_state, pieces_of, restored
from region_agent.worker.ranks.steps import RankedSteps
from region_agent.worker.training.merging import Merging, SingleWorker
from region_agent.worker.training.optimizer_state import State, dump_state
from region_agent.worker.training.trainer import WholeModel
from region_agent.worker.training.update import OptimizerStep
from sync.base import frozen_parameters
from sync.flat import FlatModel
from sync.framing import Array
from sync.histograms import Histogram
from sync.module_tensors import Access

__all__ = ["ShardedModel"]


class _Parts(Access):
    """Tensors that the ranks hold parts of: one at a time is whole, on rank 0's device."""

    def __init__(self, ranks: Ranks, passes: ShardedPasses) -> None:
        self._ranks, self._passes = ranks, passes
        self._numbers = {id(one): number for number, one in enumerate(passes.parameters)}

    def is_whole(self, tensor: torch.Tensor) -> bool:
        return not is_part(tensor)

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.gathered(tensor, Piece(self._numbers[id(tensor)])) if is_part(tensor) else tensor.detach()

    def write(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        if is_part(tensor):
            with self._ranks.ordering(Scatter(Piece(self._numbers[id(tensor)])), answered=False):
                self._passes.scatter(tensor, values)
        else:
            tensor.copy_(values)

    def gathered(self, tensor: Any, piece: Piece) -> torch.Tensor:
        """Return all values of a tensor that the other ranks know as ``piece``."""
        with self._ranks.ordering(Gather(piece), answered=False):
            return self._passes.gather(tensor)


class _Steps(SingleWorker):
    """A partition with one worker, whose ranks all make the optimiser's step, each with its part."""

    def __init__(self, update: OptimizerStep, ranks: Ranks, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(update)
        self._ranks, self._optimizer, self._checked = ranks, optimizer, False

    def step(self, server: PsClient, step: int, samples: int, loss: float) -> None:
        """Make the optimiser's step on all ranks."""
        with self._ranks.ordering(Update(step)):
            self._update()
        if not self._checked:
            check_state(self._optimizer)
            self._checked = True


class ShardedModel(WholeModel):
    """A worker alone in its region, whose ranks hold a part of the model each.

    What leaves the worker is gathered tensor by tensor in the memory of its function; a device never holds more than
    its part and a unit of the model, or one tensor.
    """

    evaluation_may_fail = False
    """All ranks evaluate together, and end together."""
    _parts: _Parts

    def _constant(self, local: frozenset[str]) -> frozenset[str]:
        # A step that would tell which buffers never change needs the whole model on one device.
        return frozen_parameters(self._module) - local if self._call.keeps_base else frozenset()

    def _place(self, call: Invocation, ranks: Ranks | None) -> None:
        assert ranks is not None
        if call.workers > 1:
            text = f"`function.sharding: fsdp` needs one worker in a region, and {call.region} has {call.workers}"
            raise GeofedError("CONFIG_INVALID", text, hint="set `train.workers: 1`")
        check_shardable(self._task, self._module)
        never = frozenset(slot.name for slot in self.flat.layout.base)
        self._parameters = without_values(self._module)
        with ranks.beginning(Begin(call.model_dump_json(), described(self._module), never)):
            self._passes = ShardedPasses(self._task, self._module, self._device, ranks.mesh, never)
        self._ranks, self._parts = ranks, _Parts(ranks, self._passes)
        self.flat.use(self._parts)
        print(f"each of {len(ranks.devices)} devices holds a part of the model", flush=True)

    def _made_optimizer(self) -> torch.optim.Optimizer:
        made = super()._made_optimizer()
        check_optimizer(made)
        return made

    def _made_merging(self, merged: FlatModel, begun: float) -> Merging:
        update = OptimizerStep(self._optimizer, self._task, self._call.clip_norm)
        return _Steps(update, self._ranks, self._optimizer)

    def _with_ranks(self, ranks: Ranks) -> RankedSteps:
        never = frozenset(slot.name for slot in self.layout.base)
        steps = self._stream, self._loading, self._scale
        return RankedSteps(ranks, self._call, self._task, self._module, *steps, never, self._passes)

    def _evaluated(self, seeds: tuple[int, ...], at_once: int) -> tuple[int, Mapping[str, float | Histogram]]:
        # All ranks compute the same: each gathers what the others hold.
        with self._ranks.ordering(Evaluate(seeds, at_once)):
            return super()._evaluated(seeds, at_once)

    def _metrics(self, batches: Any, sizes: list[int]) -> dict[str, float | Histogram]:
        return self._passes.evaluate(lambda module: self._task.metrics(module, batches, sizes))

    def _dumped(self) -> State:
        def read(number: int, key: str, value: Any) -> Any:
            return self._parts.gathered(value, Piece(number, key)).cpu() if is_part(value) else value

        return dump_state(self._optimizer, read)

    def _load(self, tensors: Mapping[str, Array], numbers: Mapping[str, float]) -> None:
        request, values = pieces_of(self._optimizer, tensors)
        with self._ranks.ordering(request):
            for tensor, value in zip(restored(self._optimizer, request), values, strict=True):
                self._passes.scatter(tensor, value())
