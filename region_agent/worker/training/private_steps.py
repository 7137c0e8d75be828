"""Steps of differentially private SGD: the gradient of each sample is clipped, and their sum has Gaussian noise (Abadi
et al. 2016, arXiv 1607.00133, algorithm 1)."""

from __future__ import annotations

import contextlib
import io
import math
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from geofed_pb.errors import GeofedError
from region_agent.worker.invocation import PrivateSteps
from region_agent.worker.task import TaskModule
from sync.privacy import gaussian_noise

__all__ = ["PrivateGradients"]

_CHUNK_BYTES = 64 << 20
"""Memory of the gradients of samples that are computed together."""
_MOST_TOGETHER = 128
"""Samples that are computed together at most."""
_INSIDE = 1.0 - 1e-5
"""Part of the bound that a clipped gradient has, so that what float32 rounds does not exceed it."""
_Gradients = tuple[torch.Tensor, ...]


class _Loss(torch.nn.Module):
    """The task's loss as a module, whose parameters can be replaced for a call."""

    def __init__(self, task: TaskModule, module: torch.nn.Module) -> None:
        super().__init__()
        self.task, self.module = task, module

    def forward(self, batch: Any) -> torch.Tensor:
        return self.task.loss(self.module, batch).reshape(())


class PrivateGradients:
    """Computes the gradients of one worker's part of a step.

    A sample's loss is the task's for a batch of that sample alone. Samples are computed together by `torch.func.vmap`
    where the task's code allows it, and one by one where it does not. Raises ``GeofedError("TASK_INVALID")`` for a
    module in which a sample's output depends on the others.
    """

    def __init__(
        self, wanted: PrivateSteps, task: TaskModule, module: torch.nn.Module, workers: int, at_once: int = 0
    ) -> None:
        """``workers``: of the region; each adds a part of the noise's variance. ``at_once``: most samples whose
        gradients are computed together; 0: as many as fit into a fixed amount of memory."""
        for name, one in module.named_modules():
            _check(name, one)
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and parameter.is_complex():
                text = f"parameter {name} is complex, to which no noise can be added"
                raise GeofedError("TASK_INVALID", text, hint="use two real parameters")
        self._task, self._clip = task, wanted.clip
        self._std = wanted.noise * wanted.clip / math.sqrt(workers)
        self._loss = _Loss(task, module)
        self._named = {name: p for name, p in self._loss.named_parameters() if p.requires_grad}
        self._parameters = list(self._named.values())
        size = sum(parameter.numel() for parameter in self._parameters)
        self._together = max(1, min(at_once or _MOST_TOGETHER, _MOST_TOGETHER, _CHUNK_BYTES // (4 * size)))
        self._one_by_one = self._together == 1

    def set(self, samples: Iterable[Any], divisor: float) -> float:
        """Set the parameters' gradients to the noisy sum over samples, divided by ``divisor``; returns the mean loss.

        ``samples``: batches of one sample each, which are drawn as they are needed.
        """
        sums = [torch.zeros(one.shape, dtype=_wide(one), device=one.device) for one in self._parameters]
        loss, count, drawn = 0.0, 0, iter(samples)
        while chunk := list(islice(drawn, self._together)):
            for value, gradients in self._of(chunk):
                self._add(sums, gradients)
                loss += float(value.sum())
            count += len(chunk)
        noise = torch.from_numpy(gaussian_noise(sum(one.numel() for one in sums), self._std))
        at = 0
        for parameter, total in zip(self._parameters, sums, strict=True):
            part = noise[at : at + total.numel()].view_as(total)
            at += total.numel()
            # Rounded once, with the noise: where a narrow type rounded the sum alone, it would swallow the noise.
            whole = (total.double() + part.to(total.device)) / divisor
            parameter.grad = whole.to(parameter.dtype)
        return loss / count if count else 0.0

    def _of(self, chunk: list[Any]) -> Iterator[tuple[torch.Tensor, _Gradients]]:
        """Yield losses, and gradients with a first dimension of samples."""
        stacked = None if self._one_by_one else _stacked(chunk)
        if stacked is not None:
            try:
                # The trace of a task that cannot be computed so is no error of it.
                with contextlib.redirect_stderr(io.StringIO()):
                    made = self._vectorised(*stacked)
            except (GeofedError, RuntimeError, ValueError, NotImplementedError) as error:
                self._one_by_one = True
                print(f"gradients of samples are computed one by one: {error}", file=sys.stderr, flush=True)
            else:
                yield made
                return
        for batch in chunk:
            loss = self._loss(batch)
            with self._task.calling("the backward pass"):
                found = torch.autograd.grad(loss, self._parameters, allow_unused=True)
            gradients = tuple(
                (torch.zeros_like(p) if g is None else g.to_dense() if g.is_sparse else g).unsqueeze(0)
                for p, g in zip(self._parameters, found, strict=True)
            )
            yield loss.detach(), gradients

    def _vectorised(self, leaves: list[torch.Tensor], shape: Any) -> tuple[torch.Tensor, _Gradients]:
        def of_sample(parameters: dict[str, torch.Tensor], sample: list[torch.Tensor]) -> torch.Tensor:
            batch = tree_unflatten(sample, shape)
            value: torch.Tensor = torch.func.functional_call(self._loss, parameters, (batch,))
            return value

        both = torch.func.grad_and_value(of_sample)
        detached = {name: parameter.detach() for name, parameter in self._named.items()}
        gradients, losses = torch.func.vmap(both, in_dims=(None, 0), randomness="different")(detached, leaves)
        return losses, tuple(gradients[name] for name in self._named)

    def _add(self, sums: list[torch.Tensor], gradients: _Gradients) -> None:
        """Clip the gradient of each sample over all parameters, and add it."""
        wide = [one.detach().to(_wide(one)) for one in gradients]
        squares = sum(torch.linalg.vector_norm(one.reshape(len(one), -1), dim=1).double().square() for one in wide)
        norms = torch.as_tensor(squares).sqrt()
        if not bool(torch.isfinite(norms).all()):
            text = "the gradient of a sample is not finite"
            raise GeofedError("TASK_FAILED", text, hint="training diverged: lower the learning rate")
        factors = (self._clip * _INSIDE / norms.clamp(min=1e-30)).clamp(max=1.0)
        for total, one in zip(sums, wide, strict=True):
            total += torch.tensordot(factors.to(one), one, dims=1)


def _wide(tensor: torch.Tensor) -> torch.dtype:
    """Return the type in which gradients are clipped and summed: parameters may have half the precision."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _check(name: str, module: torch.nn.Module) -> None:
    kind = type(module).__name__
    instance = isinstance(module, torch.nn.modules.instancenorm._InstanceNorm)
    if isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and not instance:
        text = f"{name or 'the model'} is a {kind}, in which a sample's output depends on the others of its batch"
    elif instance and getattr(module, "track_running_stats", False):
        text = f"{name or 'the model'} is a {kind} with running statistics, to which no noise would be added"
    else:
        return
    hint = "use GroupNorm or LayerNorm, or privacy.differential.level: region with them"
    raise GeofedError("TASK_INVALID", f"{text}: it has no gradient of a sample", hint=hint)


def _stacked(chunk: list[Any]) -> tuple[list[torch.Tensor], Any] | None:
    """Return the tensors of batches, stacked, and the structure of a batch; None if batches are not all alike."""
    flat = [tree_flatten(batch) for batch in chunk]
    first, shape = flat[0]
    if not first or not all(isinstance(leaf, torch.Tensor) for leaf in first):
        return None
    for leaves, other in flat[1:]:
        if other != shape or [_kind(leaf) for leaf in leaves] != [_kind(leaf) for leaf in first]:
            return None
    return [torch.stack(column) for column in zip(*(leaves for leaves, _ in flat), strict=True)], shape


def _kind(leaf: Any) -> object:
    return (leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else None
