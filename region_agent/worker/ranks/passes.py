"""Forward and backward passes of one rank: torch's DistributedDataParallel over the task's loss.

Li et al. 2020 (arXiv 2006.15704): gradients are averaged over the ranks during the backward pass. Here each rank
weighs its loss by its samples, so that the mean is the gradient of the mean loss over all samples of the worker.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from region_agent.worker.task import TaskModule
from region_agent.worker.training.loss_scale import LossScale
from sync.module_tensors import Place, tensors_of

__all__ = ["Passes", "RankPasses", "broadcast", "described", "exchanged", "numbers_of_all"]

_BROADCAST_BYTES = 1 << 28
"""Bytes of tensors that are sent as one; the same as of DistributedDataParallel's first broadcast."""


class _Losses(torch.nn.Module):
    """Computes the task's loss, so that hooks of DistributedDataParallel see it."""

    def __init__(self, task: TaskModule, module: torch.nn.Module) -> None:
        super().__init__()
        self.module, self._task = module, task

    def forward(self, batch: Any) -> torch.Tensor:
        return self._task.training_loss(self.module, batch)


def described(module: torch.nn.Module) -> list[tuple[str, str, tuple[int, ...], bool]]:
    """Return name, type and shape of what ranks exchange of a module, and whether it is trained."""
    return [(place.name, str(one.dtype), tuple(one.shape), trained) for place, one, trained in exchanged(module)]


def exchanged(module: torch.nn.Module) -> list[tuple[Place, torch.Tensor, bool]]:
    """Return the parameters and buffers that ranks exchange."""
    return [found for found in tensors_of(module) if found[0].kind in ("parameter", "buffer")]


class Passes(Protocol):
    """One rank's side; all ranks of a worker must make the same calls, in the default process group.

    Creating it makes the modules of all ranks that of rank 0.
    """

    def counts(self, own: int) -> list[int]:
        """Exchange a number; returns that of each rank."""

    def passes(self, own: int) -> int:
        """Return how many passes this rank has to make that has so many parts of a batch."""

    def share(self) -> None:
        """Give all ranks what only rank 0 has of the model, before a step."""

    def run(self, parts: Sequence[tuple[int, Any]], samples: int, ready: Callable[[float], object]) -> float:
        """Add up the gradients of the mean loss over the samples of all ranks, and average them; returns this rank's
        part of that loss.

        Args:
            parts: samples of each part of this rank's batch, with the batch; 0: it does not count.
            samples: those of all ranks.
            ready: called with this rank's part of the loss before the last backward pass.
        """


class RankPasses:
    """`Passes` of ranks that hold the whole model each."""

    def __init__(
        self, task: TaskModule, module: torch.nn.Module, scale: LossScale | None, base: Collection[str]
    ) -> None:
        """``base``: names of the tensors that never change."""
        self._task, self._scale, self._ranks = task, scale, dist.get_world_size()
        places = [place for place, _, _ in exchanged(module)]
        self._changing = [place for place in places if place.name not in base]
        broadcast(places)
        with warnings.catch_warnings():
            # Later versions have another name for `broadcast_buffers`, which earlier ones do not know.
            warnings.simplefilter("ignore", FutureWarning)
            self._losses = DistributedDataParallel(
                _Losses(task, module), broadcast_buffers=False, init_sync=False, find_unused_parameters=True
            )

    def counts(self, own: int) -> list[int]:
        """Exchange a number; returns that of each rank."""
        return numbers_of_all(own)

    def passes(self, own: int) -> int:
        """Return ``own``: without a gradient to add up, passes of a rank do not concern the others."""
        return own

    def share(self) -> None:
        """Give all ranks rank 0's parameters and buffers: with the step that it has made, or as it has loaded them."""
        broadcast(self._changing)

    def run(self, parts: Sequence[tuple[int, Any]], samples: int, ready: Callable[[float], object]) -> float:
        """Make the passes; gradients are averaged in the last one."""
        value = 0.0
        for left, (size, batch) in zip(reversed(range(len(parts))), parts, strict=True):
            with self._losses.no_sync() if left else contextlib.nullcontext():
                loss = self._losses(batch)
                with self._task.calling("the loss"):
                    value += float(loss.detach()) * size / samples
                    # The ranks' gradients are added up, and divided by their number.
                    loss = loss * (size * self._ranks / samples)
                if not left:
                    ready(value)
                with self._task.calling("the backward pass"):
                    (loss if self._scale is None else self._scale.scaled(loss)).backward()
        return value


def numbers_of_all(own: int) -> list[int]:
    """Exchange a number; returns that of each rank."""
    mine = torch.tensor([own])
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    return [int(one) for one in found]


def broadcast(places: Sequence[Place]) -> None:
    """Give all ranks rank 0's values."""
    tensors = [place.tensor().detach() for place in places]
    if tensors:
        group: Any = dist.group.WORLD
        # As DistributedDataParallel does it; one call for each tensor would take longer for many small ones.
        dist._broadcast_coalesced(group, tensors, _BROADCAST_BYTES, 0)  # type: ignore[attr-defined]
