"""The interface of a robust rule: how a merge withstands updates that are arbitrarily wrong. No sockets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from sync.layout import Vector

__all__ = ["Combined", "RobustRule"]


@dataclass(frozen=True)
class Combined:
    """The change that a rule has made of the regions' changes."""

    delta: Vector
    """Shape (n,)."""
    memory: Mapping[str, Vector] = field(default_factory=dict)
    """State of the rule for the next merge; stored atomically with the model."""


@dataclass(frozen=True)
class RobustRule:
    """A robust rule as a job file names it.

    Every region makes the same merge by itself, so a rule may use only elementwise operations, Python's floats, and
    `squared_distance`, which give the same bits everywhere. Regions count alike, whatever number of samples they have.
    """

    name: str
    combine: Callable[[Sequence[Vector], int, Mapping[str, Vector]], Combined]
    """Takes the regions' changes in the order of their names, each of shape (n,); the number of them that may be wrong;
    and the state that it returned last. There are enough changes for that number."""
    fewest: Callable[[int], int]
    """Returns the number of regions that are needed for a number of wrong ones."""
    from_last: bool = False
    """Whether its result starts from that of the last round, so that all rounds must be of the same coordinates."""

    def most(self, regions: int) -> int:
        """Return how many of the regions may be wrong; 0: too few regions for any."""
        return max((wrong for wrong in range(1, regions) if self.fewest(wrong) <= regions), default=0)
