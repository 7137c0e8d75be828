"""Actions that the state machine of a parameter server requests; they are executed in a thread or over the network."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from sync.file_transfer.manifest import Manifest, PeerAddress
from sync.histograms import Histogram
from sync.ps.core.answers import Answer

__all__ = [
    "Action",
    "CheckInitialModel",
    "Failed",
    "Forget",
    "LogRoundEnd",
    "MergeGradients",
    "MergeUpdates",
    "Refuse",
    "Reply",
    "Restart",
    "SendUpdates",
    "SetTimer",
    "StoreMetrics",
    "StoreOwnUpdate",
    "SumUp",
    "WaitReason",
]


@dataclass(frozen=True)
class Reply:
    """Answer a waiting call."""

    call: int
    answer: Answer


@dataclass(frozen=True)
class Refuse:
    """Answer a call with an error."""

    call: int
    code: str
    text: str


@dataclass(frozen=True)
class MergeGradients:
    """Merge the gradients of a step and put the result into the channel; answered by `GradientsMerged`."""

    attempt: int
    step: int
    parts: tuple[tuple[str, float], ...]
    """(channel key, samples) of each worker."""
    loss: float
    """Mean loss over the samples."""


@dataclass(frozen=True)
class LogRoundEnd:
    """Log durably that a round has ended, and with which model; answered by `RoundEndLogged`."""

    sequence: int
    model_key: str
    state_key: str
    weight: float
    step: int
    correction_key: str
    """Channel key of the correction that the workers add to that model before they continue."""
    until_step: int
    """The step at which their next round ends."""
    last: bool = False
    """Whether it is the region's last round."""


@dataclass(frozen=True)
class StoreOwnUpdate:
    """Make our update of a round, and make it durable in the outbox; answered by `OwnUpdateStored`."""

    sequence: int
    epoch: int
    model_key: str
    state_key: str
    weight: float
    step: int
    correction_key: str = ""
    seen: tuple[tuple[str, int], ...] = ()
    last: bool = False
    stretch: int = 1
    ends: int = 0
    """As in the manifest."""
    round_seconds: float = 0.0


@dataclass(frozen=True)
class CheckInitialModel:
    """Check whether our own workers have initialised the same model as the first region's, which then needn't be
    received."""

    model_key: str


@dataclass(frozen=True)
class SendUpdates:
    """Send a peer these updates until it has them; `PeerHas` reports each."""

    peer: PeerAddress
    manifests: tuple[Manifest, ...]
    """The updates, in place of those of the last `SendUpdates`."""


@dataclass(frozen=True)
class SumUp:
    """Sum up several updates of a region, for a peer that was unreachable; answered by `Summed`."""

    peer: str
    """The peer; empty: all peers."""
    manifests: tuple[Manifest, ...]
    """The updates, in order and without a gap; the first may be a sum itself."""


@dataclass(frozen=True)
class MergeUpdates:
    """Merge updates into the model, and make model and watermarks durable; answered by `UpdatesMerged`."""

    sequence: int
    """Our rounds that are in the model after this merge."""
    manifests: tuple[Manifest, ...]
    """The updates, sorted by region and sequence."""
    step: int
    samples: float
    applied: int
    """Other regions' updates that are in the model after this merge."""
    version: int = 0
    """Number of this merge; with synchronous exchange the same as the sequence."""
    watermarks: tuple[tuple[str, int], ...] = ()
    """The last update of every other region that is in the model after this merge, sorted."""
    staleness: tuple[int, ...] = ()
    """Staleness of each update: rounds that we have made since the last one of ours that it saw; empty: all 0."""
    lasts: tuple[str, ...] = ()
    """Other regions whose last update is in the model after this merge, sorted."""
    whole: bool = True
    """Whether the workers load the model; if not, they are given a correction."""
    complete: bool = False
    """Whether it is the last merge."""
    ends: int = 0
    """With synchronous exchange, if the job ends before its planned end: its last round, as far as the merged updates
    state; else 0."""


@dataclass(frozen=True)
class Restart:
    """Put the model into the channel that a new attempt begins the open round from; answered by `Restarted`."""

    attempt: int


class WaitReason(enum.Enum):
    """What a region with background exchange waits for."""

    QUORUM = "a quorum of updates"
    ROUND = "a round of another region, without a limit"
    GRACE = "a region that lacks two rounds or more, for the grace time"
    LATE = "a region that lacks more rounds, until it is late"
    IN_STEP = "slower regions to end the round too"
    ALONE = "the usual gap since the last round, with no other region"


@dataclass(frozen=True)
class SetTimer:
    """Feed `TimerFired` at a time, and not at the time of an earlier `SetTimer` any more."""

    at: float
    """Seconds of the clock that the machine is told (`Measured.now`)."""
    reason: WaitReason


@dataclass(frozen=True)
class StoreMetrics:
    """Make the metrics of a round durable; answered by `MetricsStored`."""

    sequence: int
    samples: float
    metrics: dict[str, float]
    error: str = ""
    """The task's error if a worker could not measure; there are no metrics then."""
    histograms: dict[str, Histogram] = field(default_factory=dict)


@dataclass(frozen=True)
class Forget:
    """Delete updates that no region needs any more."""

    up_to: tuple[tuple[str, int], ...]
    """The last such update of each region, sorted; our own are in the outbox."""
    sums: tuple[str, ...] = ()
    """Digests of sums that are no longer sent."""


@dataclass(frozen=True)
class Failed:
    """Stop: an invariant is violated, and the partition cannot continue."""

    code: str
    text: str


Action = (
    Reply
    | Refuse
    | MergeGradients
    | LogRoundEnd
    | StoreOwnUpdate
    | CheckInitialModel
    | SendUpdates
    | SumUp
    | MergeUpdates
    | Restart
    | SetTimer
    | StoreMetrics
    | Forget
    | Failed
)
