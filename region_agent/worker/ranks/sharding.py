"""Passes of a rank that holds a part of each parameter, of its gradient, and of the optimiser's state.

torch's `fully_shard` (ZeRO stage 3, Rajbhandari et al. 2020, arXiv 1910.02054): a unit, such as a block of the model,
is gathered before it is computed, and its gradients are divided among the ranks, each averaged over them. As in
`RankPasses`, each rank weighs its loss by its samples.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_map_only

from geofed_pb.errors import GeofedError
from geofed_pb.user_code.recording import Recorder, recording
from region_agent.worker.ranks.empty_model import attributes_of
from region_agent.worker.ranks.passes import broadcast, exchanged, numbers_of_all
from region_agent.worker.task import TaskModule
from sync.module_tensors import memory_of, refused, tensors_of

__all__ = ["ShardedPasses", "check_shardable", "is_part", "units_of", "without_values"]

_Result = TypeVar("_Result")
_NO_SHARDS = "leave out `function.sharding`"


class _Calls(torch.nn.Module):
    """Computes what is asked for with the module, so that parameters outside of its blocks are there meanwhile."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, call: Callable[[torch.nn.Module], Any]) -> Any:
        return call(self.module)


def check_shardable(task: TaskModule, module: torch.nn.Module) -> None:
    """Raise ``GeofedError("TASK_INVALID")`` for what cannot be computed in shards."""
    if "on_round" in task.functions:
        text = "`function.sharding: fsdp` with a task that defines on_round, which would see a part of the model"
        raise GeofedError("TASK_INVALID", text, hint=f"remove on_round, or {_NO_SHARDS}")
    for name, one in module.named_modules():
        if isinstance(one, torch.nn.Embedding | torch.nn.EmbeddingBag) and one.sparse:
            text = f"`function.sharding: fsdp` with {name or 'the model'}, an embedding whose gradients are sparse"
            raise GeofedError("TASK_INVALID", text, hint=f"make it with sparse=False, or {_NO_SHARDS}")
    for place, tensor, trained in tensors_of(module):
        if place.kind == "extra state":
            raise refused(place, "cannot be sharded", _NO_SHARDS)
        if place.kind != "parameter":
            continue
        if not tensor.dim():
            hint = f"make it of shape [1], or {_NO_SHARDS}"
            raise refused(place, "is of no dimension, which cannot be sharded", hint)
        if not tensor.is_contiguous():
            raise refused(place, "is not contiguous, so that it cannot be sharded", "make it with .contiguous()")
        if trained and not tensor.is_floating_point():
            raise refused(place, f"is {tensor.dtype}, which cannot be sharded", _NO_SHARDS)
    _check_references(module)
    for unit in (*units_of(module), module):
        kinds = sorted({str(one.dtype) for one in unit.parameters() if one.requires_grad})
        if len(kinds) > 1:
            text = f"`function.sharding: fsdp` with trained parameters of {' and '.join(kinds)}"
            raise GeofedError("TASK_INVALID", text, hint=f"make all of one type, or {_NO_SHARDS}")


def _check_references(module: torch.nn.Module) -> None:
    """Raise for a parameter that is found at another place than those where it is replaced by a part of it."""
    names = {id(place.owner._parameters[place.attribute]): place for place, _, _ in tensors_of(module)
             if place.kind == "parameter"}  # fmt: skip
    memory: dict[object, str] = {}
    for place, tensor, _ in tensors_of(module):
        found = memory_of(tensor)
        if found is not None and place.kind == "parameter" and memory.setdefault(found, place.name) != place.name:
            raise refused(place, f"is {memory[found]}'s memory, which cannot be sharded", "make them one parameter")
    for owner in module.modules():
        # Recurrent modules of torch renew the list that they keep.
        if isinstance(owner, torch.nn.RNNBase):
            continue
        for one in attributes_of(owner):
            if id(one) in names:
                text = "is kept in an attribute of a module, too, which sharding would not replace"
                raise refused(names[id(one)], text, "read it from the module that has it as a parameter")
    for name, buffer in module.named_buffers():
        if memory_of(buffer) in memory:
            text = f"buffer {name} of the model is a parameter's memory, which cannot be sharded"
            raise GeofedError("TASK_INVALID", text, hint="make it the parameter itself, or a copy")


def units_of(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the blocks that are gathered each by itself: the outermost elements of lists and sequences of modules.

    Those that share a parameter with the rest of the model are gathered with that.
    """
    found = list(dict.fromkeys(_blocks(module)))
    holders: dict[int, set[int]] = {}
    inside = {id(one): number for number, block in enumerate(found) for one in block.modules()}
    for one in module.modules():
        for parameter in one._parameters.values():
            if parameter is not None:
                holders.setdefault(id(parameter), set()).add(inside.get(id(one), -1))
    shared = {number for numbers in holders.values() if len(numbers) > 1 for number in numbers}
    return [block for number, block in enumerate(found) if number not in shared]


def _blocks(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    for child in module.children():
        listed = isinstance(module, torch.nn.ModuleList | torch.nn.Sequential)
        # A list has no forward pass, which a block is gathered for.
        called = not isinstance(child, torch.nn.ModuleList | torch.nn.ModuleDict | torch.nn.ParameterList)
        if listed and called:
            if next(child.parameters(), None) is not None:
                yield child
        else:
            yield from _blocks(child)


class ShardedPasses:
    """`Passes` of ranks that hold a part of the model each."""

    def __init__(
        self, task: TaskModule, module: torch.nn.Module, device: torch.device, mesh: Any, base: Collection[str]
    ) -> None:
        """Divide the model among the ranks, unit by unit, so that a device never holds more than its part and a unit.

        Args:
            module: rank 0's with values, in any memory; others' with or without.
            device: this rank's.
            mesh: the ranks, see `mesh_on`.
            base: names of the tensors that never change.
        """
        self._task, self._device, self._ranks = task, device, dist.get_world_size()
        for unit in units_of(module):
            self._place(unit)
            unit.register_forward_hook(_owned)
            fully_shard(unit, mesh=mesh)
        self._place(module)
        self._root: Any = fully_shard(_Calls(module), mesh=mesh)
        self._buffers = [
            place for place, _, _ in exchanged(module) if place.kind == "buffer" and place.name not in base
        ]
        self.parameters: list[Any] = list(module.parameters())

    def counts(self, own: int) -> list[int]:
        """Exchange a number; returns that of each rank."""
        return numbers_of_all(own)

    def passes(self, own: int) -> int:
        """Return the most passes of a rank: all gather each unit in each pass."""
        return max(self.counts(own))

    def share(self) -> None:
        """Give all ranks rank 0's buffers; parameters are the same wherever they are gathered."""
        broadcast(self._buffers)

    def run(self, parts: Sequence[tuple[int, Any]], samples: int, ready: Callable[[float], object]) -> float:
        """Make the passes; gradients are averaged in each of them, so that no rank holds them whole."""
        value = 0.0
        for left, (size, batch) in zip(reversed(range(len(parts))), parts, strict=True):
            # What a batch logs that does not count is logged by the pass that counts it.
            with nullcontext() if size else recording(Recorder()):
                loss: torch.Tensor = self._root(partial(self._task.training_loss, batch=batch))
            with self._task.calling("the loss"):
                value += float(loss.detach()) * size / samples
                loss = loss * (size * self._ranks / samples)
            if not left:
                ready(value)
            with self._task.calling("the backward pass"):
                loss.backward()  # type: ignore[no-untyped-call]
            self._root.reshard()
        return value

    def evaluate(self, call: Callable[[torch.nn.Module], _Result]) -> _Result:
        """Return what a call makes of the module, which all ranks must make."""
        found: _Result = self._root(call)
        self._root.reshard()
        return found

    def gather(self, tensor: Any) -> torch.Tensor:
        """Return all values of a tensor, on this rank's device."""
        found: torch.Tensor = tensor.detach().full_tensor()
        return found

    def scatter(self, tensor: Any, values: torch.Tensor | None) -> None:
        """Write all values of a tensor, ``values`` of rank 0; None: this is another rank."""
        if not tensor.numel():
            return
        mine: torch.Tensor = tensor.detach().to_local()
        rows = -(-tensor.shape[0] // self._ranks)
        each = rows * (tensor.numel() // tensor.shape[0])
        held, parts = torch.empty(each, dtype=tensor.dtype, device=self._device), None
        if values is not None:
            flat = values.detach().reshape(-1).to(self._device, tensor.dtype)
            padded = torch.nn.functional.pad(flat, (0, each * self._ranks - flat.numel()))
            parts = list(padded.reshape(self._ranks, each).unbind())
        dist.scatter(held, parts, src=0)
        mine.copy_(held[: mine.numel()].reshape(mine.shape))

    def _place(self, unit: torch.nn.Module) -> None:
        """Move what is not sharded yet of a unit to the device, with rank 0's values."""
        moved: dict[int, torch.nn.Parameter] = {}
        for owner in unit.modules():
            for name, parameter in owner._parameters.items():
                if parameter is None or isinstance(parameter, DTensor):
                    continue
                if id(parameter) not in moved:
                    moved[id(parameter)] = self._placed(parameter)
                owner._parameters[name] = moved[id(parameter)]
            for name, buffer in owner._buffers.items():
                if buffer is not None:
                    owner._buffers[name] = self._with_values(buffer)

    def _placed(self, parameter: torch.nn.Parameter) -> torch.nn.Parameter:
        values = self._with_values(parameter.detach())
        if parameter.device.type != "meta":
            parameter.data = values
            return parameter
        made = torch.nn.Parameter(values, parameter.requires_grad)
        # Such as marks that the task's optimiser reads.
        vars(made).update(vars(parameter))
        return made

    def _with_values(self, tensor: torch.Tensor) -> torch.Tensor:
        empty = tensor.device.type == "meta"
        here = torch.empty_like(tensor, device=self._device) if empty else tensor.detach().to(self._device)
        here = here.contiguous()
        dist.broadcast(here, 0)
        return here


def _owned(_: torch.nn.Module, __: Any, output: Any) -> Any:
    """Copy a unit's output that is a view: a write to it in place would keep the unit from being gathered again in the
    backward pass."""

    def copied(one: torch.Tensor) -> torch.Tensor:
        return one.clone() if one.requires_grad and one._is_view() else one

    return tree_map_only(torch.Tensor, copied, output)


def is_part(tensor: object) -> bool:
    """Whether a rank holds a part of a tensor, by rows."""
    return isinstance(tensor, DTensor) and tuple(tensor.placements) == (Shard(0),)


def without_values(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return parameters of the shapes that the module's have before they are divided."""
    return [torch.nn.Parameter(torch.empty_like(one, device="meta"), one.requires_grad) for one in module.parameters()]
