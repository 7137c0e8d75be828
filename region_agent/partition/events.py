"""Events that a partition's state machine receives, and actions that it returns."""

from __future__ import annotations

from dataclasses import dataclass, field

from geofed_pb.errors import GeofedError
from region_agent.worker.invocation import Stretch

__all__ = [
    "Action",
    "ActionFailed",
    "ConfigurePs",
    "Event",
    "IdleTick",
    "Invoke",
    "PartitionConfigured",
    "PartitionPrepared",
    "Preempted",
    "PreparePartition",
    "PsEnded",
    "PsPeer",
    "PsReady",
    "PsStatusChanged",
    "PsTopology",
    "Publish",
    "PublishAsked",
    "Published",
    "RecordEvent",
    "Retry",
    "RetryLater",
    "ScaleWorkers",
    "Scaled",
    "SendReport",
    "ShutDown",
    "ShutDownFinished",
    "StartPs",
    "Started",
    "Stopped",
    "StoreBatches",
    "WorkerEnded",
]


@dataclass(frozen=True)
class PsPeer:
    """Parameter server of another region."""

    region: str
    epoch: int
    address: str
    unsigned: bool = False
    """Whether the region's version signs no updates."""


@dataclass(frozen=True)
class PsTopology:
    """Regions that exchange directly, where the control plane has changed them since the plan."""

    routes: int = 0
    """Number of the topology; a higher one replaces a lower one. 0: the plan's topology."""
    neighbours: tuple[tuple[str, str], ...] = ()
    former: tuple[tuple[str, str], ...] = ()
    """Pairs of the previous topology; they still exchange until every region has the present one."""


@dataclass(frozen=True)
class PsView:
    """Fields of the parameter server's status that the state machine depends on."""

    phase: str = "starting"
    condition: str = ""
    round: int = 0
    error: GeofedError | None = None


# Events


@dataclass(frozen=True)
class Started:
    """The control plane has assigned the partition to this region, or has repeated that command."""

    epoch: int


@dataclass(frozen=True)
class PartitionPrepared:
    """Code, data and function are ready."""


@dataclass(frozen=True)
class PeersKnown:
    """The control plane has sent the addresses of the other parameter servers."""

    peers: tuple[PsPeer, ...]
    topology: PsTopology = field(default_factory=PsTopology)
    finish: bool = False
    """The job ends before its planned last round, as soon as all regions can end together."""
    halt: bool = False
    """It ends at once, with the last merged round."""


@dataclass(frozen=True)
class PsReady:
    """The parameter server is listening."""

    address: str


@dataclass(frozen=True)
class PartitionConfigured:
    """The parameter server has accepted an attempt and fences every earlier one."""

    attempt: int
    round: int
    """Rounds completed by then."""
    halt: bool = False
    """It has been told that the job ends with the last merged round."""


@dataclass(frozen=True)
class PsStatusChanged:
    """The parameter server has reported another status."""

    view: PsView


@dataclass(frozen=True)
class IdleTick:
    """Periodic report of the time without a step."""

    idle_seconds: float
    """Time since the last step, or since the last wait for other regions."""
    limit_seconds: float
    """Timeout of a call that does not answer."""


@dataclass(frozen=True)
class PsEnded:
    """The parameter server's process has exited."""

    error: GeofedError


@dataclass(frozen=True)
class WorkerEnded:
    """An invocation has ended: "continue", "done", "failed", or "left" (its attempt was fenced before its work was
    done)."""

    worker: int
    attempt: int
    status: str
    resume_key: str = ""
    error: GeofedError | None = None
    step: int = 0
    """First step that an invocation with ``resume_key`` makes."""
    waits_for: int = 0
    """Round whose end the worker waits for, with nothing else to do; 0: it has steps to make."""


@dataclass(frozen=True)
class ActionFailed:
    """An action could not be carried out."""

    error: GeofedError
    step: str = ""
    """The failed action: "prepare", "publish" and "scale" are retried; "configure" is retried while workers wait for
    it, or if the job ends at once. Other failures need no retry of their own."""


@dataclass(frozen=True)
class Retry:
    """The pause before a retry is over."""

    attempt: int


@dataclass(frozen=True)
class Scaled:
    """The control plane has set another number of workers."""

    workers: int
    """0: the partition pauses."""
    reason: str = ""
    batch: int = 0
    """Samples of all workers in a step; 0: unchanged."""
    rate: float = 1.0
    """Factor of the learning rate with that batch."""
    preemptible: bool = False
    """The workers run on preemptible capacity."""
    order: int = 0
    """Number of the command, as the control plane counts them."""


@dataclass(frozen=True)
class Preempted:
    """Preemptible workers are being taken away. The remaining ones continue until the control plane sets a number.

    The event comes when the preemption is decided, so that no later command of the control plane arrives before it.
    """

    workers: int
    """Workers that remain."""


@dataclass(frozen=True)
class Deployed:
    """The function platform has carried out a `ScaleWorkers` or a `RemoveReplicas`."""

    workers: int | None
    """Replicas that the platform holds; None: it has only ended some, and needs a `ScaleWorkers` with the number."""
    preemptible: bool = False
    """The replicas run on preemptible capacity."""


@dataclass(frozen=True)
class PublishAsked:
    """The control plane has asked this region for the final model."""


@dataclass(frozen=True)
class Published:
    """The control plane has stored the final model."""

    blob_digest: str


@dataclass(frozen=True)
class Stopped:
    """The control plane has ended the partition."""

    reason: str
    discard: bool


@dataclass(frozen=True)
class ShutDownFinished:
    """`ShutDown` is done: no process and no call runs any more, and everything they used is in the account."""


Event = (
    Started
    | PartitionPrepared
    | PeersKnown
    | PsReady
    | PartitionConfigured
    | PsStatusChanged
    | IdleTick
    | PsEnded
    | WorkerEnded
    | ActionFailed
    | Retry
    | Scaled
    | Preempted
    | Deployed
    | PublishAsked
    | Published
    | Stopped
    | ShutDownFinished
)


# Actions


@dataclass(frozen=True)
class PreparePartition:
    """Fetch the code, check the data and deploy the function. Answered by `PartitionPrepared` or `ActionFailed`."""


@dataclass(frozen=True)
class StartPs:
    """Start the parameter server's process. Answered by `PsReady`, and by `PsEnded` when it exits."""

    epoch: int
    attempt: int


@dataclass(frozen=True)
class ConfigurePs:
    """Send the parameter server its peers, and the epoch and attempt from which messages are valid."""

    epoch: int
    attempt: int
    peers: tuple[PsPeer, ...]
    topology: PsTopology = field(default_factory=PsTopology)
    finish: bool = False
    halt: bool = False


@dataclass(frozen=True)
class ScaleWorkers:
    """Set the function's number of replicas. Answered by `Deployed` or `ActionFailed`."""

    workers: int


@dataclass(frozen=True)
class RemoveReplicas:
    """End surplus replicas and leave the others running. Answered by `Deployed` or `ActionFailed`."""

    workers: int


@dataclass(frozen=True)
class StoreBatches:
    """Store the batch size of each step, before any worker makes such a step."""

    stretches: tuple[Stretch, ...]


@dataclass(frozen=True)
class Invoke:
    """Call the worker function. Answered by `WorkerEnded`."""

    worker: int
    attempt: int
    resume_key: str = ""
    workers: int = 1
    """Number of workers in the attempt."""
    stretches: tuple[Stretch, ...] = ()
    """Changes of the region's batch, in the order of steps."""
    preemptible: bool = False
    """The worker runs on preemptible capacity."""


@dataclass(frozen=True)
class RetryLater:
    """Feed `Retry` after a pause."""

    attempt: int
    seconds: float


@dataclass(frozen=True)
class Publish:
    """Upload the final model to the control plane. Answered by `Published` or `ActionFailed`."""


@dataclass(frozen=True)
class SendReport:
    """Report the partition's state to the control plane."""

    state: str
    condition: str = ""
    error: GeofedError | None = None
    blob_digest: str = ""


@dataclass(frozen=True)
class RecordEvent:
    """Add an event to the job's history."""

    kind: str
    text: str
    data: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class ShutDown:
    """End the processes and calls of the partition, feed `ShutDownFinished`, then remove the function."""

    discard: bool
    """Also delete the partition's files."""


Action = (
    PreparePartition
    | StartPs
    | ConfigurePs
    | ScaleWorkers
    | RemoveReplicas
    | StoreBatches
    | Invoke
    | RetryLater
    | Publish
    | SendReport
    | RecordEvent
    | ShutDown
)
