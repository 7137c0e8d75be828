"""Replay: one stage repeats steps without the other stages, from the values that these had sent for them.

Values between stages are stored in the channel, since functions cannot connect to each other. If they stay there, they
form a log: from the state of a stage before a step, the activations and gradients that it received since, and the
samples, which are determined by the step, all its computations can be repeated without any other stage.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from geofed_pb.errors import GeofedError
from sync.pipeline._contract import ActivationCodec
from sync.pipeline._order import Operation, operations
from sync.pipeline._shape import Pipeline
from sync.pipeline._stage import Stage
from sync.pipeline._stage_tensors import as_tuple
from sync.pipeline._stage_transfers import StageTransfers

__all__ = ["ReplayLog", "logged_keys", "replay", "value_key"]


@dataclass(frozen=True)
class ReplayLog:
    """The values that an attempt's stages have sent, and the shape of its pipeline."""

    place: str
    """Prefix of its keys."""
    shape: Pipeline
    """Shape of the pipeline, with its number of replicas."""
    samples: tuple[int, ...]
    """Samples of each replica in a step."""


def value_key(place: str, step: int, kind: str, into: int, replica: int, number: int) -> str:
    """Return the key of a value between stages.

    ``kind``: "a" for activations, "g" for gradients; ``into``: the stage that they are for; ``number``: the
    micro-batch. Each replica of a stage has its own key prefix: if a channel is a folder, a waiting process is notified
    of everything that appears in the same folder.
    """
    return f"{place}/s{into}-{replica}/{step}-{kind}{number}"


def logged_keys(logged: ReplayLog, stage: int, step: int) -> list[str]:
    """Return the keys of all values that a stage receives in a step, for all its replicas."""
    return [key for replica in range(logged.shape.degree) for _, key in _received(logged, stage, step, replica) if key]


def replay(
    runner: ActivationCodec,
    stage: Stage,
    transfers: StageTransfers,
    logged: ReplayLog,
    step: int,
    parts: Sequence[Sequence[Any]],
    seed: tuple[int, ...],
    computing: Callable[[str], AbstractContextManager[None]],
) -> float:
    """Replay a step, see `StageRunner.replay`; return the computing time in seconds."""
    number, whole, seconds = runner.position.stage, sum(logged.samples), 0.0
    transfers.expect(logged_keys(logged, number, step))
    # Replicas begin a step with the same running statistics, and end it with the mean of theirs.
    before = [buffer.clone() for buffer in stage.layers.buffers()]
    mean = [torch.zeros_like(buffer, dtype=torch.float64) for buffer in before]
    for replica, samples in enumerate(logged.samples):
        with torch.no_grad():
            for buffer, value in zip(stage.layers.buffers(), before, strict=True):
                buffer.copy_(value)
        stage.begin((*seed, replica, step), add=replica > 0)
        sizes = logged.shape.sizes(samples)
        for operation, key in _received(logged, number, step, replica):
            given = runner.decoded(transfers.take(key, keep=True))[0] if key else None
            begun = time.monotonic()
            if operation.kind == "forward":
                batch = parts[replica][operation.micro_batch] if parts else None
                with computing("the forward pass"):
                    stage.forward(operation.micro_batch, given, batch)
            else:
                came = () if given is None else as_tuple(given, "the gradient of a stage's output")
                # The gradients are those of the mean over the replica's samples.
                back = tuple(one * (samples / whole) for one in came)
                with computing("the backward pass"):
                    stage.backward(operation.micro_batch, back, sizes[operation.micro_batch] / whole)
            seconds += time.monotonic() - begun
        for total, buffer in zip(mean, stage.layers.buffers(), strict=True):
            total += buffer.double() * (samples / whole)
    with torch.no_grad():
        for buffer, total in zip(stage.layers.buffers(), mean, strict=True):
            buffer.copy_(total if buffer.is_floating_point() else total.round())
    return seconds


def _received(logged: ReplayLog, stage: int, step: int, replica: int) -> list[tuple[Operation, str]]:
    """Return the passes of a replica in a step, each with the key that it needs first ("": none)."""
    shape, last = logged.shape, len(logged.shape.stages) - 1
    if not 0 <= stage <= last:
        raise GeofedError("CONFIG_INVALID", f"stage {stage} of {last + 1}")
    found = []
    for operation in operations(shape.order, stage, last + 1, len(shape.sizes(logged.samples[replica]))):
        forward = operation.kind == "forward"
        comes = stage > 0 if forward else stage < last
        key = value_key(logged.place, step, "a" if forward else "g", stage, replica, operation.micro_batch)
        found.append((operation, key if comes else ""))
    return found
