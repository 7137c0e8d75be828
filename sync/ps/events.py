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
    "Keep",
    "Kept",
    "Manifest",
    "Merge",
    "Merged",
    "Peer",
    "PeerHas",
    "Prepare",
    "Prepared",
    "Progress",
    "ReduceAnswer",
    "ReduceArrived",
    "Refuse",
    "Reply",
    "Ship",
    "Stored",
    "Verdict",
]


@dataclass(frozen=True)
class Manifest:
    """One region's update of one round, without its bytes."""

    region: str
    epoch: int
    sequence: int
    """The WAN round; 0 is the model that the job begins with."""
    digest: str
    total_bytes: int
    weight: float
    """Samples behind it."""


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
    """A peer holds our update durably."""

    region: str
    sequence: int


@dataclass(frozen=True)
class Applied:
    """A round is over: the new model and the watermark are durable, and the model is in the channel."""

    apply: Apply
    digest: str
    """Of the flat model."""
    model_key: str
    state_key: str


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
class CallGone:
    """Nobody waits for the answer to this call any more."""

    call: int


Event = (
    Configured
    | Attached
    | ReduceArrived
    | Merged
    | BoundaryArrived
    | Prepared
    | Stored
    | PeerHas
    | Applied
    | Evaluated
    | Kept
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


@dataclass(frozen=True)
class ReduceAnswer:
    """The merged gradient."""

    key: str
    samples: float


@dataclass(frozen=True)
class BoundaryAnswer:
    """The federation's model after a round."""

    sequence: int
    model_key: str
    state_key: str
    evaluate: bool
    finished: bool


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
class Prepare:
    """Make our update of a round durable in the outbox; then say `Prepared`."""

    sequence: int
    epoch: int
    model_key: str
    state_key: str
    weight: float
    step: int


@dataclass(frozen=True)
class Ship:
    """See that a peer gets our updates, from this one on, until it has them; say `PeerHas` for each."""

    peer: Peer
    manifests: tuple[Manifest, ...]


@dataclass(frozen=True)
class Apply:
    """Merge the round's updates into the model, make model and watermark durable; then say `Applied`."""

    sequence: int
    manifests: tuple[Manifest, ...]
    """Ours included, sorted by region."""
    step: int
    samples: float
    applied: int
    """Remote updates in the model once this is done."""


@dataclass(frozen=True)
class Keep:
    """Make the metrics of a round durable; then say `Kept`."""

    sequence: int
    samples: float
    metrics: dict[str, float]


@dataclass(frozen=True)
class Forget:
    """Updates up to here are in the model before the last, and ours (outbox) are durable at every peer too."""

    inbox_up_to: int
    outbox_up_to: int


@dataclass(frozen=True)
class Failed:
    """An invariant is broken; the partition cannot go on."""

    code: str
    text: str


Action = Reply | Refuse | Merge | Prepare | Ship | Apply | Keep | Forget | Failed


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
