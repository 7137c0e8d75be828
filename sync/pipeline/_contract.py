"""How a task's loss meets a model that is not here as a whole.

A task's ``loss(model, batch)`` calls ``model(x)`` once and makes the loss of what comes back. In the first stage it is
given a model that takes x away and ends the call there; in the last stage one that does not look at x, and answers with
what the last layers make of the activations that have come. So the task need not know of stages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import nn

from geofed_pb.errors import GeofedError
from sync.pipeline._carried import Carried
from sync.pipeline._shape import Position

__all__ = ["Answering", "Coding", "Loss", "Taken", "model_input"]

Loss = Callable[[nn.Module, Any], Any]
"""``(model, batch)`` to a tensor of one element: the mean over the batch's samples."""


class Coding(Protocol):
    """A worker's place in the pipeline, and the form in which it sends and receives activations."""

    position: Position
    is_first: bool
    is_last: bool

    def encoded(self, value: Carried | None, facts: dict[str, float] | None = None) -> list[memoryview]: ...

    def decoded(self, value: memoryview) -> tuple[Carried | None, dict[str, float]]: ...


class Taken(BaseException):
    """Ends a loss in the first stage. Not an Exception: job code may catch those."""


class _Taking(nn.Module):
    """Takes what the model is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.given: Any = None

    def forward(self, *given: Any) -> Any:
        if len(given) != 1:
            text = f"the task calls the model with {len(given)} arguments; a model in stages takes one"
            raise GeofedError("TASK_INVALID", text, hint="hand over one tensor, or a tuple of tensors")
        self.given = given[0]
        raise Taken


def model_input(loss: Loss, batch: Any, *, training: bool = True) -> Any:
    """What ``loss`` calls the model with for this batch; raises ``GeofedError("TASK_INVALID")`` if it does not."""
    model = _Taking().train(training)
    try:
        loss(model, batch)
    except Taken:
        return model.given
    raise GeofedError("TASK_INVALID", "the task does not call the model", hint="call model(x) once")


class Answering(nn.Module):
    """Stands for the whole model in the last stage."""

    def __init__(self, answer: Callable[[], Any]) -> None:
        super().__init__()
        self._answer = answer
        self.calls = 0

    def forward(self, *_: Any) -> Any:
        self.calls += 1
        return self._answer()
