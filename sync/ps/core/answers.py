"""Answers to the workers' calls."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "Answer",
    "AttachAnswer",
    "BoundaryAnswer",
    "EvaluatedAnswer",
    "ReduceAnswer",
]


@dataclass(frozen=True)
class AttachAnswer:
    """Where a worker continues."""

    sequence: int
    """Rounds completed."""
    step: int
    model_key: str
    state_key: str
    """Channel key of the optimiser's state; empty: it starts without one, or the worker makes no step from here."""
    boundary: bool
    """Whether the update of the open round is being made already: the worker waits for the end of the round and trains
    nothing."""
    finished: bool
    evaluate: bool
    until_step: int = 0
    """The step at which the open round ends."""
    correction_key: str = ""
    """Channel key of the correction, for a worker that ended the last round and missed the answer."""
    background: bool = False
    """Whether only a worker that still has its model can continue within this attempt, because the stored model is not
    the one that the workers have."""


@dataclass(frozen=True)
class ReduceAnswer:
    """The merged gradient."""

    key: str
    samples: float


@dataclass(frozen=True)
class BoundaryAnswer:
    """How a worker continues after the end of a round."""

    sequence: int
    model_key: str
    """Channel key of the model to load; empty: the worker keeps its own."""
    state_key: str
    evaluate: bool
    finished: bool
    until_step: int = 0
    """The step at which the next round ends."""
    correction_key: str = ""
    """Channel key of the correction to add to its model; empty: none."""


@dataclass(frozen=True)
class EvaluatedAnswer:
    """The round's metrics are durable."""


Answer = AttachAnswer | ReduceAnswer | BoundaryAnswer | EvaluatedAnswer
