"""Manifests of updates, peers, and replies to offers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

__all__ = [
    "Manifest",
    "PeerAddress",
    "Verdict",
]


@dataclass(frozen=True)
class Manifest:
    """One region's update of one round, without its bytes."""

    region: str
    epoch: int
    sequence: int
    """The region's WAN round; 0 is the initial model."""
    digest: str
    total_bytes: int
    weight: float
    """Samples that the update was computed from."""
    seen: tuple[tuple[str, int], ...] = ()
    """The last round of every other region that was in the model that this update was made from, sorted; regions
    without one are left out."""
    last: bool = False
    """Whether it is the region's last update."""
    stretch: int = 1
    """Multiple of the planned interval that the region wants its coming rounds to last."""
    settled: int = 0
    """All regions have the region's updates before this sequence, as far as the region knew when it sent this one."""
    ends: int = 0
    """If the job ends before its planned end: the last round of all regions, or, with background exchange, of this one;
    else 0."""
    first: int = 0
    """The first round of a sum of updates, whose last round is ``sequence``; 0: the update is of one round."""
    takes_sums: bool = False
    """Whether its region accepts sums of updates."""
    round_seconds: float = 0.0
    """Duration of the round in the region, without the time that it waited for other regions; 0: not reported."""
    signature: str = ""
    """The region's signature of another region's manifest (`sync.file_transfer.signing`), in hex; empty: it is our own,
    which is signed when it is sent, or its region signs nothing."""
    certificate: str = ""
    """The certificate of the key that it was signed with, in PEM."""

    @property
    def begins(self) -> int:
        """The first round that it covers."""
        return self.first or self.sequence

    @property
    def rounds(self) -> int:
        """Number of rounds that it covers."""
        return self.sequence - self.begins + 1

    @property
    def content(self) -> Manifest:
        """What its region never changes: everything but the epoch and what others have."""
        return replace(self, epoch=0, settled=0, signature="", certificate="")

    @property
    def saw(self) -> dict[str, int]:
        """`seen` by region."""
        return dict(self.seen)


@dataclass(frozen=True)
class PeerAddress:
    """Another region's parameter server."""

    region: str
    epoch: int
    address: str


class Verdict(Enum):
    """Reply to the offer of an update."""

    WANT = "send it"
    HAVE = "it is durable here, or was applied already"
    FENCED = "your epoch is over"
    LATER = "it does not belong to a round that this server can be in now"
