"""Events that the state machines of jobs and regions take, and actions that they return. Times are Unix seconds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from control_plane.core._state import Pairs, Peer, Report

# --- events of a job


@dataclass(frozen=True)
class Planned:
    """The scheduler has admitted the job with a plan."""

    at: float


@dataclass(frozen=True)
class StartDelayed:
    """The job cannot start yet; it is queued."""

    at: float
    what_for: str
    """What the job waits for: "for workers in frankfurt"."""


@dataclass(frozen=True)
class StartAllowed:
    """The job's workers are free; it may start now."""

    at: float


@dataclass(frozen=True)
class Reported:
    """An agent reports the state of its partition or of its shard."""

    at: float
    region: str
    report: Report
    blob_bytes: int | None = None
    """Size of the uploaded model file, with state "published"; None: the file is missing, or its digest is wrong."""
    flat_bytes: int = 0
    """Size of the model's tensors as one float32 vector; 0: unknown."""
    kept_bytes: int | None = None
    """Size of the model file that `Report.kept` names; None: it is missing, or not of this job and round."""


@dataclass(frozen=True)
class CancelRequested:
    """A user cancels the job."""

    at: float
    reason: str


@dataclass(frozen=True)
class FinishRequested:
    """A user ends the job early and keeps its model."""

    at: float
    reason: str


@dataclass(frozen=True)
class ReplanRequested:
    """The job is to end early, and a new job with other regions is to continue its model."""

    at: float
    text: str
    """Reason, for the job's history."""
    data: dict[str, Any]
    """Data of the recorded event."""
    without: tuple[str, ...] = ()
    """Lost regions that the end does not wait for."""


@dataclass(frozen=True)
class SuccessorDecided:
    """The job that continues the model of a replanned job was created, or none can be."""

    at: float
    successor: str
    """ID of the new job; empty: no job continues the model."""
    text: str
    data: dict[str, Any]
    fails: bool = False
    """Whether this job fails, since it has lost a region, and none continues without it."""


@dataclass(frozen=True)
class ScaleRequested:
    """Regions are to continue with other numbers of workers."""

    at: float
    workers: dict[str, int]
    """Number of workers by region; 0 pauses the region."""
    reason: str = ""
    gives_way: bool = False
    """The job pauses in favour of another one, and is to continue once workers are free again."""
    preemptible: bool = False
    """Whether the workers are preemptible."""


@dataclass(frozen=True)
class Rerouted:
    """Updates are to take other routes from now on."""

    at: float
    topology: str
    """Name of the new topology."""
    neighbours: Pairs
    """Regions that exchange directly in the new topology, as sorted pairs."""
    present: Pairs
    """Regions that exchange directly in the current topology, as sorted pairs."""
    text: str
    data: dict[str, Any]


@dataclass(frozen=True)
class RegionLive:
    """A region's agent is connected."""

    at: float
    region: str
    restarted: bool
    """Whether the agent is a new process, which may have lost state that was not durable."""


@dataclass(frozen=True)
class RegionUnreachable:
    """Nothing arrives from a region; its lease has not expired yet."""

    at: float
    region: str


@dataclass(frozen=True)
class RegionLost:
    """A region's lease has expired, or the region was shut out."""

    at: float
    region: str
    final: bool = False
    """Whether the operator has shut the region out, so that it does not come back."""


@dataclass(frozen=True)
class Tick:
    """Time has passed."""

    at: float


JobEvent = (
    Planned
    | StartDelayed
    | StartAllowed
    | Reported
    | CancelRequested
    | FinishRequested
    | ReplanRequested
    | SuccessorDecided
    | ScaleRequested
    | Rerouted
    | RegionLive
    | RegionUnreachable
    | RegionLost
    | Tick
)

# --- events of a region


@dataclass(frozen=True)
class Connected:
    """An agent has opened a session."""

    at: float
    boot_id: str
    """Identifies the agent's process."""
    lease_seconds: float
    fault: str = ""
    """First fault of the region's catalogue; empty: it has none."""
    address: str = ""
    """IP address that the agent connects from; empty: not known."""
    features: tuple[str, ...] = ()
    """What the agent can do that agents of earlier versions cannot."""


@dataclass(frozen=True)
class Heartbeat:
    """Any message arrived in an agent's session."""

    at: float
    session: int
    lease_seconds: float


@dataclass(frozen=True)
class Disconnected:
    """The stream of a session has ended."""

    at: float
    session: int


@dataclass(frozen=True)
class ControlPlaneRestarted:
    """The control plane was restarted. Every region gets a new lease, since the silence was its own fault."""

    at: float
    lease_seconds: float


@dataclass(frozen=True)
class ClockJumped:
    """The control plane was suspended, or its clock was set; the time that passed says nothing about regions."""

    at: float
    lease_seconds: float


@dataclass(frozen=True)
class CatalogueChecked:
    """A region's catalogue has changed within a session."""

    at: float
    fault: str
    """First fault of the catalogue; empty: it has none."""


@dataclass(frozen=True)
class Drained:
    """The operator lets a region have no new jobs, or have them again."""

    at: float
    draining: bool


@dataclass(frozen=True)
class Revoked:
    """The operator has revoked the region's certificates."""

    at: float
    reason: str = ""


@dataclass(frozen=True)
class Enrolled:
    """A region has joined and received a certificate."""

    at: float


@dataclass(frozen=True)
class MeasuredLink:
    """A region's link to another one, as its jobs have measured it."""

    destination: str
    rtt_ms: float
    mbps: float


@dataclass(frozen=True)
class LinksMeasured:
    """A job that has ended has measured links of the region."""

    links: tuple[MeasuredLink, ...]


RegionEvent = (
    Connected
    | Heartbeat
    | Disconnected
    | ControlPlaneRestarted
    | ClockJumped
    | CatalogueChecked
    | Drained
    | Revoked
    | Enrolled
    | LinksMeasured
    | Tick
)

# --- actions


@dataclass(frozen=True)
class SendStart:
    """Send the region its partition, to run under this epoch."""

    region: str
    epoch: int
    resumed: bool = False
    """Whether its parameter server has run there before."""
    initial_model: str = ""
    """Digest of the model that the job starts from; empty: the task's own."""
    initial_job: str = ""
    """Job that the initial model is of."""
    initial_holds: str = ""
    """See `InitialModel.holds`."""
    initial_uri: str = ""
    """See `InitialModel.uri`."""
    initial_adapter: str = ""
    """See `InitialModel.adapter`."""


@dataclass(frozen=True)
class SendPeers:
    """Send the region its peers."""

    region: str
    epoch: int
    peers: tuple[Peer, ...]
    routes: int = 0
    """`JobState.routes`."""
    neighbours: Pairs = ()
    """`JobState.neighbours`."""
    former: Pairs = ()
    """`JobState.former`."""
    finish: bool = False
    """Whether the job is to end early, as soon as all regions can end with the same round."""
    halt: bool = False
    """Whether it is to end at once, with the last merged round."""


@dataclass(frozen=True)
class SendScale:
    """Have the region continue with another number of workers."""

    region: str
    epoch: int
    workers: int
    reason: str
    preemptible: bool = False
    order: int = 0
    """Sequence number of the command within its partition."""


@dataclass(frozen=True)
class SendStop:
    """Have the region stop its partition."""

    region: str
    epoch: int
    reason: str
    discard: bool


@dataclass(frozen=True)
class SendPublish:
    """Have the region upload the final model."""

    region: str
    epoch: int


@dataclass(frozen=True)
class SendKeep:
    """Have the region upload the model of an evaluated round."""

    region: str
    epoch: int
    round: int


@dataclass(frozen=True)
class SendShard:
    """Have the region send its shard to another one."""

    region: str
    epoch: int
    destination: str
    address: str


@dataclass(frozen=True)
class Record:
    """Write an event to the history."""

    kind: str
    text: str
    region: str = ""
    data: dict[str, Any] = field(default_factory=dict)
    terminal: bool = False


@dataclass(frozen=True)
class EndSession:
    """Close the stream of a session that a later one has replaced, or whose lease has expired."""

    session: int


@dataclass(frozen=True)
class NotifyJobs:
    """Forward an event to the jobs of the region."""

    event: RegionLive | RegionUnreachable | RegionLost


JobAction = SendStart | SendPeers | SendScale | SendStop | SendPublish | SendKeep | SendShard | Record
RegionAction = EndSession | NotifyJobs | Record
