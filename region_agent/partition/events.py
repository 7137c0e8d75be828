"""What happens to a partition in its region, and what its agent then does."""

from __future__ import annotations

from dataclasses import dataclass, field

from geofed_pb.errors import GeofedError
from region_agent.worker.invocation import Stretch

__all__ = [
    "Action",
    "Begin",
    "ConfigurePs",
    "Configured",
    "Ended",
    "Event",
    "Happened",
    "Invoke",
    "KeepBatches",
    "Preempted",
    "Prepared",
    "Progress",
    "PsEnded",
    "PsPeer",
    "PsReady",
    "PsSaid",
    "PsWays",
    "Publish",
    "PublishAsked",
    "Published",
    "Quit",
    "Report",
    "Restart",
    "Retry",
    "Scale",
    "Scaled",
    "Setback",
    "StartPs",
    "Started",
    "Stopped",
    "WorkerEnded",
]


@dataclass(frozen=True)
class PsPeer:
    """Another region's parameter server."""

    region: str
    epoch: int
    address: str


@dataclass(frozen=True)
class PsWays:
    """Which regions exchange directly, chosen anew while the job runs."""

    routes: int = 0
    """Their number; 0: as the plan has them."""
    neighbours: tuple[tuple[str, str], ...] = ()
    former: tuple[tuple[str, str], ...] = ()
    """Pairs that still do as well, until every region knows the present ones."""


@dataclass(frozen=True)
class PsView:
    """What the parameter server says of itself, as far as the partition's life depends on it."""

    phase: str = "starting"
    condition: str = ""
    round: int = 0
    error: GeofedError | None = None


# Events


@dataclass(frozen=True)
class Started:
    """The control plane has given the partition to this region, or said again that it has."""

    epoch: int


@dataclass(frozen=True)
class Prepared:
    """Code, data and function are there."""


@dataclass(frozen=True)
class PeersKnown:
    """Where the other parameter servers are."""

    peers: tuple[PsPeer, ...]
    ways: PsWays = field(default_factory=PsWays)
    finish: bool = False
    """The job is to end before its plan."""


@dataclass(frozen=True)
class PsReady:
    """The parameter server listens."""

    address: str


@dataclass(frozen=True)
class Configured:
    """The parameter server knows of an attempt: nothing of an older one counts any more."""

    attempt: int
    round: int
    """Completed by then."""


@dataclass(frozen=True)
class PsSaid:
    """The parameter server's state has changed."""

    view: PsView


@dataclass(frozen=True)
class Progress:
    """Told from time to time, by the clock."""

    idle_seconds: float
    """Since the last step, or the last wait for others."""
    limit_seconds: float
    """After which a call that has not answered is ended."""


@dataclass(frozen=True)
class PsEnded:
    """The parameter server's process is gone."""

    error: GeofedError


@dataclass(frozen=True)
class WorkerEnded:
    """An invocation is over: "continue", "done", "failed", or "left": its attempt was over, but not its work."""

    worker: int
    attempt: int
    status: str
    resume_key: str = ""
    error: GeofedError | None = None
    step: int = 0
    """At which ``resume_key`` continues."""


@dataclass(frozen=True)
class Setback:
    """Something that an action asked for could not be done."""

    error: GeofedError
    step: str = ""
    """"prepare", "publish" and "scale" are done again, and "configure" where workers are not called before; what else
    there is does not matter by itself."""


@dataclass(frozen=True)
class Retry:
    """The pause after a setback is over."""

    attempt: int


@dataclass(frozen=True)
class Scaled:
    """The control plane wants another number of workers."""

    workers: int
    """0: the partition pauses."""
    reason: str = ""
    batch: int = 0
    """Samples of all of them in a step; 0: as it is."""
    rate: float = 1.0
    """What the learning rate is multiplied by with that batch."""
    preemptible: bool = False
    """On capacity that may be taken away."""
    order: int = 0
    """As the control plane counts these."""


@dataclass(frozen=True)
class Preempted:
    """Preemptible workers are taken away; so many are left, and continue until the control plane says otherwise. It is
    said when it is decided, so that no later order can be crossed by it."""

    workers: int


@dataclass(frozen=True)
class Deployed:
    """The function platform has done what it was asked for."""

    workers: int | None
    """Replicas that it holds; None: it only ended some, and is to be told anew how many it shall hold."""
    preemptible: bool = False
    """On capacity that may be taken away."""


@dataclass(frozen=True)
class PublishAsked:
    """The control plane wants the final model from here."""


@dataclass(frozen=True)
class Published:
    """The control plane has the final model."""

    blob_digest: str


@dataclass(frozen=True)
class Stopped:
    """The control plane ends the partition."""

    reason: str
    discard: bool


@dataclass(frozen=True)
class Ended:
    """What `Quit` asked for is done: no process and no call runs any more, and all that they took is counted."""


Event = (
    Started
    | Prepared
    | PeersKnown
    | PsReady
    | Configured
    | PsSaid
    | Progress
    | PsEnded
    | WorkerEnded
    | Setback
    | Retry
    | Scaled
    | Preempted
    | Deployed
    | PublishAsked
    | Published
    | Stopped
    | Ended
)


# Actions


@dataclass(frozen=True)
class Begin:
    """Fetch the code, look at the data, deploy the function; then say `Prepared`, or `Setback`."""


@dataclass(frozen=True)
class StartPs:
    """Start the parameter server's process; then say `PsReady`, and `PsEnded` when it is gone."""

    epoch: int
    attempt: int


@dataclass(frozen=True)
class ConfigurePs:
    """Tell the parameter server who its peers are and what counts."""

    epoch: int
    attempt: int
    peers: tuple[PsPeer, ...]
    ways: PsWays = field(default_factory=PsWays)
    finish: bool = False


@dataclass(frozen=True)
class Scale:
    """Have the function platform hold so many replicas; then say `Deployed`, or `Setback`."""

    workers: int


@dataclass(frozen=True)
class TakeAway:
    """End the replicas that are too many, and leave the others alone; then say `Deployed`, or `Setback`."""

    workers: int


@dataclass(frozen=True)
class KeepBatches:
    """Store which batch each step has, before anybody makes one by it."""

    stretches: tuple[Stretch, ...]


@dataclass(frozen=True)
class Invoke:
    """Call the worker function; then say `WorkerEnded`."""

    worker: int
    attempt: int
    resume_key: str = ""
    workers: int = 1
    """Of the attempt."""
    stretches: tuple[Stretch, ...] = ()
    """Of the region's batch."""
    preemptible: bool = False
    """It runs on capacity that may be taken away."""


@dataclass(frozen=True)
class Restart:
    """Say `Retry` after a pause."""

    attempt: int
    seconds: float


@dataclass(frozen=True)
class Publish:
    """Hand the final model to the control plane; then say `Published`, or `Setback`."""


@dataclass(frozen=True)
class Report:
    """Tell the control plane how the partition stands."""

    state: str
    condition: str = ""
    error: GeofedError | None = None
    blob_digest: str = ""


@dataclass(frozen=True)
class Happened:
    """Add a line to the job's history."""

    kind: str
    text: str
    data: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Quit:
    """End the processes and calls of the partition; then say `Ended`, and remove its function."""

    discard: bool


Action = (
    Begin
    | StartPs
    | ConfigurePs
    | Scale
    | TakeAway
    | KeepBatches
    | Invoke
    | Restart
    | Publish
    | Report
    | Happened
    | Quit
)
