"""Which tensors of a model never change while it is trained."""

from __future__ import annotations

import json
import zlib
from typing import Any

import torch

from region_agent.worker.data.shard import BatchStream, move
from region_agent.worker.invocation import Invocation
from region_agent.worker.ranks.devices import devices_of, own_device, per_device
from region_agent.worker.task import TaskModule
from sync.base import possibly_constant, written
from sync.channel import Channel
from sync.seeding import reseed

__all__ = ["constant_tensors"]

_KEY = "base/names"
"""Channel key of the names, for later invocations."""


def constant_tensors(
    call: Invocation,
    task: TaskModule,
    module: torch.nn.Module,
    stream: BatchStream,
    channel: Channel,
    local: frozenset[str] = frozenset(),
) -> tuple[frozenset[str], bool]:
    """Return the names of the tensors that never change, and whether the module was used to find out, so that it must
    be created again.

    The first invocation makes a step of the task's and compares: frozen parameters may be changed by it nevertheless
    (the average of another model), and buffers need not be. It leaves no trace but the names. ``local``: names of
    tensors that do not count.
    """
    names = possibly_constant(module) - local if call.keeps_base else frozenset[str]()
    if not names:
        return names, False
    if (stored := channel.get(_KEY)) is not None:
        return names.intersection(json.loads(bytes(stored))), False
    module.to(own_device(call))
    constant = names - written(module, names, lambda: _step(call, task, module, stream))
    channel.put(_KEY, [json.dumps(sorted(constant)).encode()])
    return constant, True


def _step(call: Invocation, task: TaskModule, module: torch.nn.Module, stream: BatchStream) -> None:
    """Make the first step of this worker alone."""
    optimizer: Any = task.optimizer(module.parameters())
    reseed(call.seed, zlib.crc32(call.region.encode()), call.worker, 1)
    # As many as its device has in a step.
    samples = per_device(min(call.batch or stream.count(1), stream.count(1)), devices_of(call))
    with task.calling("the model's train() and the optimiser's zero_grad()"):
        module.train()
        optimizer.zero_grad(set_to_none=True)
    with task.calling("dataset"):
        batch = move(stream.parts(1, [samples])[0][1], own_device(call))
    loss = task.loss(module, batch)
    with task.calling("the backward pass"):
        loss.backward()  # type: ignore[no-untyped-call]
    with task.calling("the optimiser's step"):
        optimizer.step()
