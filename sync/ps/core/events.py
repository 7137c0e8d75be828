"""What happens to a parameter server: what its state machine is told, and what it tells of itself."""

from __future__ import annotations

from dataclasses import dataclass, field

from sync.ps.core.actions import Apply, Keep, Log
from sync.transfer.manifest import Manifest, Peer

__all__ = [
    "Applied",
    "Attached",
    "BoundaryArrived",
    "CallGone",
    "Configured",
    "Evaluated",
    "Event",
    "GraceOver",
    "Kept",
    "Logged",
    "Merged",
    "PatienceOver",
    "PauseOver",
    "PeerHas",
    "Prepared",
    "Progress",
    "ReduceArrived",
    "Restarted",
    "StateLost",
    "Stepped",
    "Stored",
    "SumGone",
    "Summed",
    "Tried",
    "Unreached",
]


@dataclass(frozen=True)
class Configured:
    """The agent says who the peers are and what is fenced."""

    epoch: int
    attempt: int
    """0: unchanged."""
    peers: tuple[Peer, ...]
    neighbours: tuple[tuple[str, str], ...] = ()
    """Pairs of regions that exchange directly; the others' updates are passed on. Empty: every pair does."""
    workers: int = 0
    """Of this attempt; 0: unchanged."""
    routes: int = 0
    """Number of these neighbours; what comes later with a lower one is old and counts for nothing."""
    former: tuple[tuple[str, str], ...] = ()
    """Pairs that still exchange directly as well, until every region knows of the present ones; empty: none."""
    finish: bool = False
    """The job is to end as soon as all regions can end together."""


@dataclass(frozen=True)
class Attached:
    """A worker asks where to continue."""

    call: int
    worker: int
    attempt: int
    initial_key: str
    differs: str = ""
    """In what its model is another one than the first region's, or than an earlier worker's; "": in nothing."""


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
class Merged:
    """The merged gradient of a step is in the channel."""

    attempt: int
    step: int
    key: str
    samples: float


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
    """Workers of one group hold the same: a stage of the model, or, all being in group 0, the model."""


@dataclass(frozen=True)
class Logged:
    """The end of a round is in the log."""

    log: Log


@dataclass(frozen=True)
class Prepared:
    """Our update of a round is durable here."""

    manifest: Manifest


@dataclass(frozen=True)
class Stored:
    """Another region's update is durable here."""

    manifest: Manifest


@dataclass(frozen=True)
class PeerHas:
    """A peer holds an update durably."""

    region: str
    sequence: int
    origin: str = ""
    """Whose update it is; empty: ours."""


@dataclass(frozen=True)
class Tried:
    """An update's bytes are about to be sent to a peer: from now on it may be there."""

    region: str
    manifest: Manifest


@dataclass(frozen=True)
class Unreached:
    """Nothing could be sent to a peer at the last try."""

    region: str


@dataclass(frozen=True)
class Summed:
    """Updates are summed up in one."""

    peer: str
    """Whom it is for; empty: for all."""
    manifest: Manifest | None
    """None: one of them was forgotten meanwhile."""


@dataclass(frozen=True)
class SumGone:
    """A sum's bytes are not here any more."""

    manifest: Manifest


@dataclass(frozen=True)
class StateLost:
    """Another region has lost its state: it has nothing of what it was known to have."""

    region: str


@dataclass(frozen=True)
class GraceOver:
    """The time to wait for a quorum has passed."""

    sequence: int


@dataclass(frozen=True)
class PatienceOver:
    """Workers have been held up for longer than these regions, which a merge waits for, usually take."""

    sequence: int
    regions: tuple[str, ...]


@dataclass(frozen=True)
class PauseOver:
    """The round may be begun although this region makes it alone."""

    sequence: int


@dataclass(frozen=True)
class Restarted:
    """The model that a new attempt begins with is in the channel."""

    attempt: int
    model_key: str
    state_key: str


@dataclass(frozen=True)
class Applied:
    """A round is over: the new model and the watermark are durable, and the model is in the channel."""

    apply: Apply
    digest: str
    """Of the flat model."""
    model_key: str
    state_key: str
    correction_key: str = ""
    """Channel key of what leads the workers to the model; empty: nothing does, they load it whole."""
    refused: tuple[tuple[str, str], ...] = ()
    """Regions whose update did not pass the guard, with the reason."""
    model_bytes: int = 0
    """Of the whole model in float32."""


@dataclass(frozen=True)
class Evaluated:
    """A worker has measured its part of the test data."""

    call: int
    worker: int
    attempt: int
    sequence: int
    samples: float
    metrics: dict[str, float]
    error: str = ""
    """Of the task, where it could not measure."""


@dataclass(frozen=True)
class Kept:
    """The metrics of a round are durable."""

    keep: Keep


@dataclass(frozen=True)
class Stepped:
    """A worker of the present attempt has made a step that needed nothing of this server."""

    step: int
    loss: float


@dataclass(frozen=True)
class CallGone:
    """Nobody waits for the answer to this call any more."""

    call: int


Event = (
    Configured
    | Attached
    | ReduceArrived
    | Merged
    | BoundaryArrived
    | Logged
    | Prepared
    | Stored
    | PeerHas
    | Tried
    | Unreached
    | Summed
    | SumGone
    | StateLost
    | GraceOver
    | PatienceOver
    | PauseOver
    | Restarted
    | Applied
    | Evaluated
    | Kept
    | Stepped
    | CallGone
)


@dataclass(frozen=True)
class Progress:
    """What the parameter server tells of itself."""

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
    """Why there are no metrics of that round."""
    samples_per_second: float = 0.0
    """Of one worker, computing, in the last round."""
    staleness: dict[str, float] = field(default_factory=dict)
    """Mean over each peer's last updates, in rounds of ours."""
    refused: dict[str, int] = field(default_factory=dict)
    """Updates that did not pass the guard, by region."""
    interval: int = 0
    """Steps of the open round."""
    routes: int = 0
    """Number of the neighbours that are known; 0: those that the job began with."""
    update_bytes: int = 0
    """Of our last update; 0: none yet."""
