"""Use of a task's loss with a model that is divided into stages.

A task's ``loss(model, batch)`` calls ``model(x)`` once and computes the loss from the result. In the first stage it is
given a model that captures x and ends the call; in the last stage, a model that ignores x and returns the last layers'
output for the received activations. So the task needn't know about stages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import nn

from geofed_pb.errors import GeofedError
from sync.pipeline._shape import StagePosition
from sync.pipeline._stage_tensors import Carried

__all__ = ["ActivationCodec", "Answering", "Loss", "Taken", "model_input"]

Loss = Callable[[nn.Module, Any], Any]
"""Computes the mean loss over the batch's samples, a tensor of one element, from ``(model, batch)``."""


class ActivationCodec(Protocol):
    """A worker's place in the pipeline, and the form in which it sends and receives activations."""

    position: StagePosition
    is_first: bool
    is_last: bool

    def encoded(self, value: Carried | None, facts: dict[str, float] | None = None) -> list[memoryview]:
        """Encode an activation or a gradient, with optional facts, as buffers to send."""

    def decoded(self, value: memoryview) -> tuple[Carried | None, dict[str, float]]:
        """Decode a received buffer to a value on this worker's device, and its facts."""


class Taken(BaseException):
    """Raised to end a loss in the first stage. Not an Exception, because job code may catch those."""


class _Taking(nn.Module):
    """Captures the argument with which the model is called."""

    def __init__(self) -> None:
        super().__init__()
        self.given: Any = None

    def forward(self, *given: Any) -> Any:
        if len(given) != 1:
            text = f"the task calls the model with {len(given)} arguments; a model in stages takes one"
            raise GeofedError("TASK_INVALID", text, hint="pass one tensor, or a tuple of tensors")
        self.given = given[0]
        raise Taken


def model_input(loss: Loss, batch: Any, *, training: bool = True) -> Any:
    """Return the argument with which ``loss`` calls the model for a batch. Raises ``GeofedError("TASK_INVALID")`` if it
    does not."""
    model = _Taking().train(training)
    try:
        loss(model, batch)
    except Taken:
        return model.given
    raise GeofedError("TASK_INVALID", "the task does not call the model", hint="call model(x) once")


class Answering(nn.Module):
    """Replaces the whole model in the last stage."""

    def __init__(self, answer: Callable[[], Any]) -> None:
        super().__init__()
        self._answer = answer
        self.calls = 0

    def forward(self, *_: Any) -> Any:
        """Return the last stage's output, and count the call; the arguments are ignored."""
        self.calls += 1
        return self._answer()
