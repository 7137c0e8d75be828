"""What a WAN policy decides, and what a planner must know of it; pure, without sockets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from sync.layout import Vector

__all__ = ["Contribution", "Outer", "Policy", "WanPolicy"]


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
        """Whether a region that trains alone continues from where it has ended each round."""

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


@dataclass(frozen=True)
class WanPolicy:
    """A policy as job files name it: how it is made, and what a planner must know of it."""

    name: str
    make: Callable[..., Policy]
    """Takes its settings by name; raises ``GeofedError("CONFIG_INVALID")`` for one that cannot be."""
    settings: Mapping[str, float] = field(default_factory=dict)
    """Its own, as `wan.outer` gives them, with their defaults."""
    interval_steps: int | None = None
    """Local steps of a round where the job file says nothing; None: the planner's default."""
    every_step: bool = False
    """It exchanges after each step, and has no other interval."""
    adapts_interval: bool = False
    """In the background, a longer interval may be taken while the job runs, where links don't keep up."""
    synchronous: bool = False
    """It has a meaning only where every region waits for all."""
    on_arrival: bool = False
    """Updates are summed up as they come, in the background, instead of being averaged over a round."""
    significance: float = 0.0
    """First threshold of Gaia's filter on what is sent (`wan.significance`); 0: there is no filter."""
