"""The order of a stage's passes in a step. Pure functions; no clock, no tensors.

A step's samples are divided into micro-batches. Each runs forward through all stages and then backward through them.
GPipe (Huang et al. 2019, section 2.2) does all forward passes first and then the backward passes in reverse order. 1F1B
(PipeDream, Narayanan et al. 2019, section 3.2; flushed at the end of a step as in Megatron-LM, 2021, section 2.2) does
each backward pass as soon as possible, so that a stage stores the activations of fewer micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from geofed_pb.errors import GeofedError

__all__ = ["Kind", "Operation", "Order", "operations"]

Kind = Literal["forward", "backward"]
Order = Literal["gpipe", "1f1b"]


@dataclass(frozen=True)
class Operation:
    """The pass of one micro-batch through one stage."""

    kind: Kind
    micro_batch: int
    """From 0, within the step."""


def operations(order: str, stage: int, stages: int, micro_batches: int) -> tuple[Operation, ...]:
    """Return a stage's passes in a step, in order. Raises ``GeofedError("CONFIG_INVALID")``."""
    if not 0 <= stage < stages or micro_batches < 1:
        raise GeofedError("CONFIG_INVALID", f"stage {stage} of {stages} with {micro_batches} micro-batches")
    forwards = [Operation("forward", number) for number in range(micro_batches)]
    if order == "gpipe":
        return (*forwards, *(Operation("backward", number) for number in reversed(range(micro_batches))))
    if order != "1f1b":
        raise GeofedError("CONFIG_INVALID", f"unknown order {order!r}", hint="known: gpipe, 1f1b")
    ahead = min(stages - stage - 1, micro_batches)
    done = forwards[:ahead]
    for number in range(micro_batches):
        done += forwards[ahead + number : ahead + number + 1]
        done.append(Operation("backward", number))
    return tuple(done)
