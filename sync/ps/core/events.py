"""Events that the state machine of a parameter server handles, and the progress that it reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sync.file_transfer.manifest import Manifest, PeerAddress
from sync.histograms import Histogram
from sync.ps.core.actions import LogRoundEnd, MergeUpdates, StoreMetrics
from sync.wan import LinkSample

__all__ = [
    "NOTHING_MEASURED",
    "Attached",
    "BoundaryArrived",
    "CallGone",
    "Configured",
    "Evaluated",
    "Event",
    "GradientsMerged",
    "LoggedSums",
    "MaskKeyKnown",
    "Measured",
    "MetricsStored",
    "OwnUpdateStored",
    "PeerHas",
    "PeerMisbehaved",
    "PeerUnreachable",
    "Progress",
    "ReduceArrived",
    "ResourceUsage",
    "Restarted",
    "RoundEndLogged",
    "SendAttempted",
    "StateLost",
    "Stepped",
    "SumGone",
    "Summed",
    "TimerFired",
    "UpdateStored",
    "UpdatesMerged",
]


@dataclass(frozen=True)
class Configured:
    """The agent has reported the peers, and what is fenced."""

    epoch: int
    attempt: int
    """0: unchanged."""
    peers: tuple[PeerAddress, ...]
    neighbours: tuple[tuple[str, str], ...] = ()
    """Pairs of regions that exchange directly; other updates are passed on. Empty: all pairs do."""
    workers: int = 0
    """Workers of this attempt; 0: unchanged."""
    routes: int = 0
    """Version of these neighbours; a later event with a lower one is outdated and ignored."""
    former: tuple[tuple[str, str], ...] = ()
    """Pairs that still exchange directly as well, until every region knows the current ones; empty: none."""
    finish: bool = False
    """Whether the job is to end as soon as all regions can end together."""
    halt: bool = False
    """Whether it is to end at once, with the last merged round."""


@dataclass(frozen=True)
class Attached:
    """A worker has asked where to continue."""

    call: int
    worker: int
    attempt: int
    initial_key: str
    differs: str = ""
    """How its model's layout differs from the first region's, or from an earlier worker's; "": not at all."""


@dataclass(frozen=True)
class ReduceArrived:
    """A worker's gradient of a step is in the channel."""

    call: int
    worker: int
    attempt: int
    step: int
    key: str
    samples: float
    loss: float


@dataclass(frozen=True)
class GradientsMerged:
    """The merged gradient of a step is in the channel."""

    attempt: int
    step: int
    key: str
    samples: float


LoggedSums = Mapping[int, Mapping[str, tuple[float, int]]]
"""Sum and number of the values that the task's code has logged in a worker, by round and name. What a worker reports
of a round replaces what it has reported of it before."""


@dataclass(frozen=True)
class ResourceUsage:
    """What workers have used of their machines in a round."""

    cpu_cores: float = 0.0
    """Mean number of busy cores."""
    memory_bytes: int = 0
    """Peak."""
    gpu_memory_bytes: int = 0
    """Peak; 0: nothing is computed on a GPU."""


@dataclass(frozen=True)
class BoundaryArrived:
    """A worker has ended a round."""

    call: int
    worker: int
    attempt: int
    sequence: int
    step: int
    digest: str
    model_key: str
    """Empty from all workers but the first."""
    state_key: str
    samples: float
    loss: float
    compute_seconds: float = 0.0
    group: int = 0
    """Workers of one group have the same values: those of one stage of the model, or of the whole model (group 0)."""
    logged: LoggedSums = field(default_factory=dict)
    usage: ResourceUsage = ResourceUsage()
    merge_seconds: float = 0.0
    """Time of the round's steps beyond their compute."""
    evaluate_seconds: float = 0.0
    """Time of evaluations since the round before."""


@dataclass(frozen=True)
class RoundEndLogged:
    """The end of a round is in the log."""

    log: LogRoundEnd


@dataclass(frozen=True)
class OwnUpdateStored:
    """Our update of a round is durable in the outbox."""

    manifest: Manifest


@dataclass(frozen=True)
class UpdateStored:
    """Another region's update is durable in the inbox."""

    manifest: Manifest


@dataclass(frozen=True)
class PeerMisbehaved:
    """Another region has sent, as its own, what no region may send."""

    region: str
    text: str


@dataclass(frozen=True)
class PeerHas:
    """An update is durable at a peer."""

    region: str
    sequence: int
    origin: str = ""
    """The region that made the update; empty: this one."""


@dataclass(frozen=True)
class SendAttempted:
    """An update is about to be sent to a peer, which may have it from now on."""

    region: str
    manifest: Manifest


@dataclass(frozen=True)
class PeerUnreachable:
    """A peer could not be reached at the last attempt."""

    region: str


@dataclass(frozen=True)
class Summed:
    """Updates have been summed up."""

    peer: str
    """The peer that the sum is for; empty: all peers."""
    manifest: Manifest | None
    """The sum; None: one of the updates had been deleted."""


@dataclass(frozen=True)
class SumGone:
    """The file of a sum no longer exists."""

    manifest: Manifest


@dataclass(frozen=True)
class StateLost:
    """Another region has lost its state: it has none of the updates that it had acknowledged."""

    region: str


@dataclass(frozen=True)
class TimerFired:
    """The time of the last `SetTimer` has come."""


@dataclass(frozen=True)
class MaskKeyKnown:
    """With secure aggregation: the key from which another region's masks follow is known, and durable here."""

    region: str


@dataclass(frozen=True)
class Restarted:
    """The model that a new attempt begins with is in the channel."""

    attempt: int
    model_key: str
    state_key: str


@dataclass(frozen=True)
class UpdatesMerged:
    """A merge is done: the new model and the watermarks are durable, and the model is in the channel."""

    apply: MergeUpdates
    digest: str
    """Digest of the flat model."""
    model_key: str
    state_key: str
    correction_key: str = ""
    """Channel key of the correction for the workers; empty: they load the model."""
    refused: tuple[tuple[str, str], ...] = ()
    """Regions whose update the guard refused, or that are in quarantine, with the reason."""
    model_bytes: int = 0
    """Size of the model in float32."""


@dataclass(frozen=True)
class Evaluated:
    """A worker has evaluated the model on its part of the test data."""

    call: int
    worker: int
    attempt: int
    sequence: int
    samples: float
    metrics: dict[str, float]
    error: str = ""
    """The task's error if it could not evaluate."""
    logged: LoggedSums = field(default_factory=dict)
    histograms: dict[str, Histogram] = field(default_factory=dict)


@dataclass(frozen=True)
class MetricsStored:
    """The metrics of a round are durable."""

    keep: StoreMetrics


@dataclass(frozen=True)
class Stepped:
    """A worker of the current attempt has made a step without this server."""

    step: int
    loss: float


@dataclass(frozen=True)
class CallGone:
    """The caller no longer waits for the answer to this call."""

    call: int


Event = (
    Configured
    | Attached
    | ReduceArrived
    | GradientsMerged
    | BoundaryArrived
    | RoundEndLogged
    | OwnUpdateStored
    | UpdateStored
    | PeerMisbehaved
    | PeerHas
    | SendAttempted
    | PeerUnreachable
    | Summed
    | SumGone
    | StateLost
    | TimerFired
    | MaskKeyKnown
    | Restarted
    | UpdatesMerged
    | Evaluated
    | MetricsStored
    | Stepped
    | CallGone
)


@dataclass(frozen=True)
class Measured:
    """What the caller of the state machine has measured when an event happens."""

    now: float = 0.0
    """Seconds of a monotonic clock."""
    links: Mapping[str, LinkSample] = field(default_factory=dict)
    """The links to the peers, by region."""


NOTHING_MEASURED = Measured()
"""At no time and without links: for a caller that has no other regions."""


@dataclass(frozen=True)
class Progress:
    """The progress that a parameter server reports."""

    phase: str
    condition: str
    epoch: int
    attempt: int
    sequence: int
    step: int
    samples: float
    loss: float
    applied: int
    model_digest: str
    metrics: dict[str, float] = field(default_factory=dict)
    metrics_samples: float = 0.0
    metrics_sequence: int = 0
    metrics_error: str = ""
    """Why there are no metrics of that round; empty: there are."""
    histograms: dict[str, Histogram] = field(default_factory=dict)
    samples_per_second: float = 0.0
    """Speed of one worker in the last round, counting computing time only."""
    staleness: dict[str, float] = field(default_factory=dict)
    """Mean staleness of each peer's last updates, in rounds of this region."""
    refused: dict[str, int] = field(default_factory=dict)
    """Number of updates that were not merged, by region."""
    refusal_reasons: dict[str, str] = field(default_factory=dict)
    """Reason of the last one, by region."""
    interval: int = 0
    """Number of steps of the open round."""
    routes: int = 0
    """Version of the known neighbours; 0: those that the job began with."""
    update_bytes: int = 0
    """Size of our last update; 0: none yet."""
    round_loss: float | None = None
    """Mean loss of the last completed round; None: not known, as after a restart."""
    logged_sequence: int = 0
    """Last round whose logged values are complete; 0: none."""
    logged: dict[str, float] = field(default_factory=dict)
    usage: ResourceUsage = ResourceUsage()
    """Of the last completed round."""
