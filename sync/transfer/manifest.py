"""What parameter servers tell each other of their updates."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = [
    "Manifest",
    "Peer",
    "Verdict",
]


@dataclass(frozen=True)
class Manifest:
    """One region's update of one round, without its bytes."""

    region: str
    epoch: int
    sequence: int
    """The region's WAN round; 0 is the model that the job begins with."""
    digest: str
    total_bytes: int
    weight: float
    """Samples behind it."""
    seen: tuple[tuple[str, int], ...] = ()
    """The last round of every other region that was in the model when this one was made, sorted; unseen: left out."""
    last: bool = False
    """The region makes no more."""
    stretch: int = 1
    """Times the planned interval that the region would have the rounds to come last."""
    settled: int = 0
    """Every region has the region's updates before this sequence, as far as it knew when it sent this one."""
    ends: int = 0
    """Where the job ends before its plan: the last round of all regions, or, with background exchange, of this one."""
    first: int = 0
    """The first of the rounds whose changes it sums up, up to its sequence; 0: it is that of one round."""
    takes_sums: bool = False
    """Its region understands updates that sum up several rounds."""
    round_seconds: float = 0.0
    """What the round took the region, without what it was held up for others; 0: it does not say."""

    @property
    def begins(self) -> int:
        """The first round that it is of."""
        return self.first or self.sequence

    @property
    def rounds(self) -> int:
        """How many rounds it is of."""
        return self.sequence - self.begins + 1

    @property
    def saw(self) -> dict[str, int]:
        """`seen` by region."""
        return dict(self.seen)


@dataclass(frozen=True)
class Peer:
    """Another region's parameter server."""

    region: str
    epoch: int
    address: str


class Verdict(Enum):
    """What a parameter server says of an update that a peer offers."""

    WANT = "send it"
    HAVE = "it is durable here, or was applied already"
    FENCED = "your epoch is over"
    LATER = "it does not belong to a round that this server can be in now"
