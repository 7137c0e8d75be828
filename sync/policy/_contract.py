"""The interface of a WAN policy, and what a planner must know about one. No sockets, no side effects."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from sync.layout import Vector

__all__ = [
    "HIDDEN_FRACTION",
    "HIDING_MARGIN",
    "LONGEST_ROUNDS",
    "MAX_CODEC_RATIO",
    "Contribution",
    "Outer",
    "Policy",
    "Values",
    "WanPolicy",
]

# The rule of when computing hides an exchange in the background: by it settings are changed while a job runs, and plans
# choose them.
HIDDEN_FRACTION = 0.8
"""Communication over computing time up to which communication counts as hidden. A choice: the rest is for what varies
from round to round."""
HIDING_MARGIN = 0.85
"""A change must reduce the communication at least to this fraction of what it was; and a setting is chosen only if its
communication is at most this fraction of what counts as hidden."""
LONGEST_ROUNDS = 16
"""Rounds that a job must still have with the longest interval. A choice."""
MAX_CODEC_RATIO = 0.9
"""A codec is chosen only if its communication takes at most this fraction of that of every less lossy codec."""


class Values(Protocol):
    """A vector that is computed range by range when it is read."""

    @property
    def size(self) -> int:
        """Number of elements."""

    def __getitem__(self, part: slice, /) -> Vector:
        """Return some of the elements."""

    def release(self) -> None:
        """Free the memory of what has been read."""


@dataclass(frozen=True)
class Contribution:
    """One region's update."""

    region: str
    weight: float
    """Samples that the update was computed from."""
    delta: Vector
    """The model after the round's local steps minus the model before them, shape (n,)."""
    staleness: int = 0
    """Rounds that the receiving region has completed since its last update that the sender had seen."""
    drift: Vector | None = None
    """Change of the receiving region's model in that time, shape (n,); None if no policy uses it."""
    rounds: int = 1
    """Number of rounds whose changes it sums up."""
    whole: bool = False
    """Whether ``delta`` is the model itself, from a region that trains alone."""
    later: Values | None = None
    """Takes the place of an empty ``delta`` until the merge reads it, block by block. Policies see None."""
    steps: float = 0.0
    """Local steps of the region in the round, by the plan, for a policy that `normalises`; else 0."""
    data_share: float = 0.0
    """The region's share of the data, by the plan, for a policy that `normalises`; else 0."""


@dataclass(frozen=True)
class Outer:
    """The result of a merge."""

    model: Vector
    memory: Mapping[str, Vector] = field(default_factory=dict)
    """State of the policy for the next merge; stored atomically with the model."""


class Policy(Protocol):
    """Merges updates into the next model.

    With synchronous exchange every region computes the same merge by itself. So the result must depend neither on the
    order of the contributions nor on the machine: only elementwise float32 and float64 operations are allowed, which
    give the same bits everywhere.
    """

    @property
    def averages(self) -> bool:
        """Whether the weights of a round's updates add up to one."""

    @property
    def keeps_own(self) -> bool:
        """Whether a region that trains alone continues from the model with which it ended the round."""

    def merge(
        self,
        base: Vector,
        contributions: Sequence[Contribution],
        memory: Mapping[str, Vector],
        total: float | None = None,
    ) -> Outer:
        """Return the next model, shape (n,). ``memory`` is the state that the last merge returned, empty at first.

        ``total`` is the weight of a whole round of all regions, if only some of its updates are merged; None: all of
        them are.
        """


@dataclass(frozen=True)
class WanPolicy:
    """A WAN policy as a job file names it: how to create it, and what a planner must know about it."""

    name: str
    make: Callable[..., Policy]
    """Creates the policy from its settings by name. Raises ``GeofedError("CONFIG_INVALID")`` for an invalid one."""
    settings: Mapping[str, float] = field(default_factory=dict)
    """Its own settings, as `wan.outer` gives them, with their defaults."""
    interval_steps: int | None = None
    """Local steps of a round if the job file gives no interval; None: the planner's default."""
    every_step: bool = False
    """Whether it exchanges after each step, and allows no other interval."""
    adapts_interval: bool = False
    """Whether the interval may be lengthened while the job runs, if links don't keep up; with background exchange."""
    synchronous: bool = False
    """Whether it works only with synchronous exchange."""
    proximal: str = ""
    """Name of the setting mu, for a policy whose workers add the gradient of mu / 2 * |w - w_round|^2 to the loss's,
    where w_round is the model with which the round began; empty: they do not."""
    normalises: bool = False
    """Whether a merge needs the local steps and the share of the data of each region, as planned."""
    sums: bool = False
    """Whether a merge needs no more than the weighted mean of the changes, so that secure aggregation can give it."""
    on_arrival: bool = False
    """Whether updates are added as they arrive, in the background, instead of being averaged over a round."""
    significance: float = 0.0
    """Initial threshold of Gaia's filter of what is sent (`wan.significance`); 0: no filter."""
