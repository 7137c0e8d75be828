"""What can happen to a job or a region, and what they ask for in answer. Times are Unix seconds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from control_plane.core._state import Pairs, Peer, Report

# --- what happens to a job


@dataclass(frozen=True)
class Planned:
    """The scheduler has answered."""

    at: float


@dataclass(frozen=True)
class Waits:
    """The job cannot start yet."""

    at: float
    what_for: str
    """In words: "for workers in frankfurt"."""


@dataclass(frozen=True)
class Begun:
    """The job may start now."""

    at: float


@dataclass(frozen=True)
class Reported:
    """An agent says how its partition stands."""

    at: float
    region: str
    report: Report
    blob_bytes: int | None = None
    """With state "published": size of the blob that was handed in; None: it is not here, or its digest is wrong."""
    flat_bytes: int = 0
    """Of its tensors as one float32 vector; 0: not known."""


@dataclass(frozen=True)
class CancelAsked:
    """A user wants the job to end."""

    at: float
    reason: str


@dataclass(frozen=True)
class FinishAsked:
    """A user wants the job to end with the model that it has."""

    at: float
    reason: str


@dataclass(frozen=True)
class ReplanAsked:
    """It is to end with the model that it has, and another job to continue with that, over other regions."""

    at: float
    text: str
    data: dict[str, Any]


@dataclass(frozen=True)
class Continued:
    """The job that continues with its model is there, or there will be none."""

    at: float
    successor: str
    """Empty: there is none."""
    text: str
    data: dict[str, Any]


@dataclass(frozen=True)
class ScaleAsked:
    """Regions are to continue with other numbers of workers."""

    at: float
    workers: dict[str, int]
    """By region; 0: pause."""
    reason: str = ""
    gives_way: bool = False
    """It pauses for another job, and is to continue once there is room again."""
    preemptible: bool = False
    """On workers that may be taken away."""


@dataclass(frozen=True)
class Rerouted:
    """Updates are to take other ways from now on."""

    at: float
    topology: str
    """What they are called."""
    neighbours: Pairs
    """Regions that exchange directly, sorted pairs."""
    present: Pairs
    """Those that do now."""
    text: str
    data: dict[str, Any]


@dataclass(frozen=True)
class RegionLive:
    """A region holds a session."""

    at: float
    region: str
    restarted: bool
    """True where the agent is another process than before: it may have lost what was not durable."""


@dataclass(frozen=True)
class RegionUnreachable:
    """A region is silent; its lease still runs."""

    at: float
    region: str


@dataclass(frozen=True)
class RegionLost:
    """A region's lease is over."""

    at: float
    region: str


@dataclass(frozen=True)
class Tick:
    """Time has passed."""

    at: float


JobEvent = (
    Planned
    | Waits
    | Begun
    | Reported
    | CancelAsked
    | FinishAsked
    | ReplanAsked
    | Continued
    | ScaleAsked
    | Rerouted
    | RegionLive
    | RegionUnreachable
    | RegionLost
    | Tick
)

# --- what happens to a region


@dataclass(frozen=True)
class Connected:
    """An agent said hello."""

    at: float
    boot_id: str
    lease_seconds: float


@dataclass(frozen=True)
class Heard:
    """Anything came from the agent of a session."""

    at: float
    session: int
    lease_seconds: float


@dataclass(frozen=True)
class Disconnected:
    """The stream of a session broke."""

    at: float
    session: int


@dataclass(frozen=True)
class Reloaded:
    """The control plane was restarted. Its own absence ends no lease: all get a new one."""

    at: float
    lease_seconds: float


@dataclass(frozen=True)
class Overslept:
    """The control plane itself stood still, or its clock was set: the silence meanwhile says nothing."""

    at: float
    lease_seconds: float


RegionEvent = Connected | Heard | Disconnected | Reloaded | Overslept | Tick

# --- what they ask for


@dataclass(frozen=True)
class SendStart:
    """Have the region run its partition under this epoch."""

    region: str
    epoch: int
    resumed: bool = False
    """Its parameter server has run there before."""
    initial_model: str = ""
    """Digest of what the job begins with, for the region whose first model counts; empty: what the task makes."""


@dataclass(frozen=True)
class SendPeers:
    """Tell the region whom to exchange with."""

    region: str
    epoch: int
    peers: tuple[Peer, ...]
    routes: int = 0
    neighbours: Pairs = ()
    former: Pairs = ()
    """As the job's state has them."""
    finish: bool = False
    """The job is to end as soon as all regions can end together."""


@dataclass(frozen=True)
class SendScale:
    """Have the region continue with so many workers."""

    region: str
    epoch: int
    workers: int
    reason: str
    preemptible: bool = False
    order: int = 0
    """Counts these commands for a partition."""


@dataclass(frozen=True)
class SendStop:
    """Have the region end its partition."""

    region: str
    epoch: int
    reason: str
    discard: bool


@dataclass(frozen=True)
class SendPublish:
    """Have the region hand the final model in."""

    region: str
    epoch: int


@dataclass(frozen=True)
class SendShard:
    """Have the region hand its shard to another one."""

    region: str
    epoch: int
    destination: str
    address: str


@dataclass(frozen=True)
class Record:
    """Write an event into the job's history."""

    kind: str
    text: str
    region: str = ""
    data: dict[str, Any] = field(default_factory=dict)
    terminal: bool = False


@dataclass(frozen=True)
class EndSession:
    """Close the stream of a session: a later one has taken over, or its lease is over."""

    session: int


@dataclass(frozen=True)
class TellJobs:
    """Pass this on to the jobs of the region."""

    event: RegionLive | RegionUnreachable | RegionLost


JobAction = SendStart | SendPeers | SendScale | SendStop | SendPublish | SendShard | Record
RegionAction = EndSession | TellJobs | Record
