"""What every WAN policy decides; pure, without sockets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from sync.layout import Vector

__all__ = ["Contribution", "Outer", "Policy"]


@dataclass(frozen=True)
class Contribution:
    """One region's update."""

    region: str
    weight: float
    """Samples behind it."""
    delta: Vector
    """Model after the round's local steps minus the model before them, shape (n,)."""
    staleness: int = 0
    """Rounds that the receiving region has completed since the last one of its own that the sender had seen."""
    drift: Vector | None = None
    """How far the receiving region's model has moved in that time, shape (n,); None where nobody asks for it."""
    rounds: int = 1
    """Rounds whose changes it sums up."""
    whole: bool = False
    """The delta is the model itself: of a region that trains alone."""


@dataclass(frozen=True)
class Outer:
    """What a policy makes of the updates that it was given."""

    model: Vector
    memory: Mapping[str, Vector] = field(default_factory=dict)
    """What it must remember until the next time; stored with the model, in one piece."""


class Policy(Protocol):
    """How updates become the next model.

    With synchronous exchange every region computes the same for itself, so it must depend neither on the order of the
    contributions nor on the machine: elementwise float32 and float64 operations only, bit for bit the same everywhere.
    """

    @property
    def averages(self) -> bool:
        """Whether the weights of a round's updates add up to one."""

    @property
    def keeps_own(self) -> bool:
        """Whether a region that trains alone goes on from where it has ended each round."""

    def merge(
        self,
        base: Vector,
        contributions: Sequence[Contribution],
        memory: Mapping[str, Vector],
        total: float | None = None,
    ) -> Outer:
        """The next model; ``memory`` is what the time before left, empty in the first.

        ``total``: the samples that a round of the whole federation has, where only some of its updates are here; None:
        they are all here.
        """
