"""What workers are answered."""

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
    """Of the optimiser; empty: it begins afresh, or makes no step from here."""
    boundary: bool
    """This round's update is on its way already: wait for its end, train nothing."""
    finished: bool
    evaluate: bool
    until_step: int = 0
    """Where the open round ends."""
    correction_key: str = ""
    """What a worker adds that ended the last round and missed the answer."""
    background: bool = False
    """Only a worker that has kept its place can continue within an attempt: the model is not where the others are."""


@dataclass(frozen=True)
class ReduceAnswer:
    """The merged gradient."""

    key: str
    samples: float


@dataclass(frozen=True)
class BoundaryAnswer:
    """How a worker continues after a round."""

    sequence: int
    model_key: str
    """The model to load; empty: it keeps its own."""
    state_key: str
    evaluate: bool
    finished: bool
    until_step: int = 0
    """Where the next round ends."""
    correction_key: str = ""
    """What it adds to its own model; empty: nothing."""


@dataclass(frozen=True)
class EvaluatedAnswer:
    """The round's metrics are durable."""


Answer = AttachAnswer | ReduceAnswer | BoundaryAnswer | EvaluatedAnswer
