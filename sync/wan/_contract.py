"""What every WAN policy decides; pure, without sockets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from sync.layout import Vector

__all__ = ["Contribution", "Outer", "Policy"]


@dataclass(frozen=True)
class Contribution:
    """One region's update of one round."""

    region: str
    weight: float
    """Samples behind it."""
    delta: Vector
    """Model after the round's local steps minus the model before them, shape (n,)."""


@dataclass(frozen=True)
class Outer:
    """What a policy makes of a round."""

    model: Vector
    memory: Mapping[str, Vector] = field(default_factory=dict)
    """What it must remember until the next round; stored with the model, in one piece."""


class Policy(Protocol):
    """How the updates of a round become the next model.

    Every region computes it for itself, so it must depend neither on the order of the contributions nor on the
    machine: elementwise float32 and float64 operations only, bit for bit the same everywhere.
    """

    def merge(self, base: Vector, contributions: Sequence[Contribution], memory: Mapping[str, Vector]) -> Outer:
        """The model after the round; ``memory`` is what the round before left, empty in the first."""
