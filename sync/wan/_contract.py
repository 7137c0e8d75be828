"""What every WAN policy decides; pure, without sockets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from sync.layout import Vector

__all__ = ["Contribution", "Policy"]


@dataclass(frozen=True)
class Contribution:
    """One region's update of one round."""

    region: str
    weight: float
    """Samples behind it."""
    delta: Vector
    """Model after the round's local steps minus the model before them, shape (n,)."""


class Policy(Protocol):
    """How the updates of a round become the next model."""

    def merge(self, base: Vector, contributions: Sequence[Contribution]) -> Vector:
        """The model after the round. Must not depend on the order of the contributions, bit for bit."""
