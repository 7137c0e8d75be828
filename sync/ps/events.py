"""What happens to a parameter server, and what it then does: the vocabulary of its state machine."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

__all__ = [
    "Action",
    "Answer",
    "Applied",
    "Apply",
    "AttachAnswer",
    "Attached",
    "BoundaryAnswer",
    "BoundaryArrived",
    "CallGone",
    "Configured",
    "Evaluated",
    "EvaluatedAnswer",
    "Event",
    "Failed",
    "Forget",
    "GraceOver",
    "Keep",
    "Kept",
    "Lapsed",
    "Log",
    "Logged",
    "Manifest",
    "Merge",
    "Merged",
    "PatienceOver",
    "Peer",
    "PeerHas",
    "Prepare",
    "Prepared",
    "Progress",
    "ReduceAnswer",
    "ReduceArrived",
    "Refuse",
    "Reply",
    "Restart",
    "Restarted",
    "Ship",
    "StartGrace",
    "StartPatience",
    "Stepped",
    "Stored",
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


# Events


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
    """A worker asks where to go on."""

    call: int
    worker: int
    attempt: int
    layout_digest: str
    initial_key: str


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
class Lapsed:
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
    | Lapsed
    | GraceOver
    | PatienceOver
    | Restarted
    | Applied
    | Evaluated
    | Kept
    | Stepped
    | CallGone
)


# Answers to workers


@dataclass(frozen=True)
class AttachAnswer:
    """Where a worker goes on."""

    sequence: int
    """Rounds completed."""
    step: int
    model_key: str
    state_key: str
    boundary: bool
    """This round's update is on its way already: wait for its end, train nothing."""
    finished: bool
    evaluate: bool
    until_step: int = 0
    """Where the open round ends."""
    correction_key: str = ""
    """What a worker adds that ended the last round and missed the answer."""
    background: bool = False
    """Only a worker that has kept its place can go on within an attempt: the model is not where the others are."""


@dataclass(frozen=True)
class ReduceAnswer:
    """The merged gradient."""

    key: str
    samples: float


@dataclass(frozen=True)
class BoundaryAnswer:
    """How a worker goes on after a round."""

    sequence: int
    model_key: str
    """The model to load; empty: it keeps its own."""
    state_key: str
    evaluate: bool
    finished: bool
    until_step: int = 0
    """Where the next round ends."""
    correction_key: str = ""
    """What it adds to its own model; empty: nothing."""


@dataclass(frozen=True)
class EvaluatedAnswer:
    """The round's metrics are durable."""


Answer = AttachAnswer | ReduceAnswer | BoundaryAnswer | EvaluatedAnswer


# Actions


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
class Merge:
    """Merge the gradients of a step and put the result into the channel; then say `Merged`."""

    attempt: int
    step: int
    parts: tuple[tuple[str, float], ...]
    """(key, samples), by worker."""
    loss: float
    """Mean over the samples."""


@dataclass(frozen=True)
class Log:
    """Make durable that a round has ended, and with which model; then say `Logged`."""

    sequence: int
    model_key: str
    state_key: str
    weight: float
    step: int
    correction_key: str
    """What the workers add to it before they go on."""
    until_step: int
    """Where the round ends that they then begin."""
    last: bool = False
    """The region makes no more."""


@dataclass(frozen=True)
class Prepare:
    """Make our update of a round durable in the outbox; then say `Prepared`."""

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
    """As the manifest tells it."""


@dataclass(frozen=True)
class Ship:
    """See that a peer gets these updates, until it has them, and no others; say `PeerHas` for each."""

    peer: Peer
    manifests: tuple[Manifest, ...]
    """In place of what was said before."""


@dataclass(frozen=True)
class SumUp:
    """Make one update of several of a region, for a peer that has been away; then say `Summed`."""

    peer: str
    """Empty: for all."""
    manifests: tuple[Manifest, ...]
    """In order, without a gap; the first may be a sum itself."""


@dataclass(frozen=True)
class Apply:
    """Merge updates into the model, make model and watermarks durable; then say `Applied`."""

    sequence: int
    """Rounds of ours in the model once this is done."""
    manifests: tuple[Manifest, ...]
    """Sorted by region and sequence."""
    step: int
    samples: float
    applied: int
    """Remote updates in the model once this is done."""
    version: int = 0
    """Merges made once this is done; with synchronous exchange the same as the sequence."""
    watermarks: tuple[tuple[str, int], ...] = ()
    """The last update of every other region in the model once this is done, sorted."""
    staleness: tuple[int, ...] = ()
    """Of each of the manifests: rounds that we have made since the last one of ours that it saw; empty: none."""
    lasts: tuple[str, ...] = ()
    """Other regions whose last update is in the model once this is done, sorted."""
    whole: bool = True
    """The workers load the model; otherwise they are given a correction."""
    complete: bool = False
    """Nothing more will come."""
    ends: int = 0
    """Synchronous exchange, where the job ends before its plan: its last round, as far as merged once this is done."""


@dataclass(frozen=True)
class Restart:
    """A new attempt begins the open round from the model: put it into the channel; then say `Restarted`."""

    attempt: int


@dataclass(frozen=True)
class StartGrace:
    """Say `GraceOver` for the round after the grace window."""

    sequence: int


@dataclass(frozen=True)
class StartPatience:
    """Say `PatienceOver` for the round once these regions' updates are later than they usually are."""

    sequence: int
    regions: tuple[str, ...]
    alone: bool = False
    """Whether this region would go on alone."""


@dataclass(frozen=True)
class Keep:
    """Make the metrics of a round durable; then say `Kept`."""

    sequence: int
    samples: float
    metrics: dict[str, float]


@dataclass(frozen=True)
class Forget:
    """Updates up to these, by region, are needed by nobody any more."""

    up_to: tuple[tuple[str, int], ...]
    """Sorted; ours are those of the outbox."""
    sums: tuple[str, ...] = ()
    """Digests of sums that are not sent any more."""


@dataclass(frozen=True)
class Failed:
    """An invariant is broken; the partition cannot go on."""

    code: str
    text: str


Action = (
    Reply
    | Refuse
    | Merge
    | Log
    | Prepare
    | Ship
    | SumUp
    | Apply
    | Restart
    | StartGrace
    | StartPatience
    | Keep
    | Forget
    | Failed
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
