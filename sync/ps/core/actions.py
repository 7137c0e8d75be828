"""What the state machine of a parameter server has done, in a thread or over the network."""

from __future__ import annotations

from dataclasses import dataclass

from sync.ps.core.answers import Answer
from sync.transfer.manifest import Manifest, Peer

__all__ = [
    "Action",
    "Apply",
    "Failed",
    "Forget",
    "Keep",
    "Log",
    "Merge",
    "Prepare",
    "Refuse",
    "Reply",
    "Reproduce",
    "Restart",
    "Ship",
    "StartGrace",
    "StartPatience",
    "StartPause",
    "SumUp",
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
    """What the workers add to it before they continue."""
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
    round_seconds: float = 0.0


@dataclass(frozen=True)
class Reproduce:
    """See whether our own workers begin with the model that the first region's do: then it need not travel."""

    model_key: str


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
    """Whether this region would continue alone."""
    elsewhere: tuple[str, ...] = ()
    """Those of them whose updates others have already: it is their link to here that is slow, not they."""


@dataclass(frozen=True)
class StartPause:
    """Say `PauseOver` for the round once other regions end it, too."""

    sequence: int
    slower: tuple[tuple[str, float], ...] = ()
    """Those that are slower than this region, and how many seconds their rounds take; none: this region makes the round
    alone, and ends it once it would usually have come to it."""


@dataclass(frozen=True)
class Keep:
    """Make the metrics of a round durable; then say `Kept`."""

    sequence: int
    samples: float
    metrics: dict[str, float]
    error: str = ""
    """Of the task, where a worker could not measure: then there are none."""


@dataclass(frozen=True)
class Forget:
    """Updates up to these, by region, are needed by nobody any more."""

    up_to: tuple[tuple[str, int], ...]
    """Sorted; ours are those of the outbox."""
    sums: tuple[str, ...] = ()
    """Digests of sums that are not sent any more."""


@dataclass(frozen=True)
class Failed:
    """An invariant is broken; the partition cannot continue."""

    code: str
    text: str


Action = (
    Reply
    | Refuse
    | Merge
    | Log
    | Prepare
    | Reproduce
    | Ship
    | SumUp
    | Apply
    | Restart
    | StartGrace
    | StartPatience
    | StartPause
    | Keep
    | Forget
    | Failed
)
