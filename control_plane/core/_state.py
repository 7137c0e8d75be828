"""What a job is at one moment: frozen, and the same after a trip through JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

JobPhase = Literal[
    "queued", "planned", "starting", "running", "finishing", "succeeded", "failed", "cancelling", "cancelled"
]
Link = Literal["live", "unreachable", "lost"]
Pairs = tuple[tuple[str, str], ...]
TERMINAL: frozenset[str] = frozenset({"succeeded", "failed", "cancelled"})
ENDED_PARTITION: frozenset[str] = frozenset({"stopped", "failed", "refused"})


@dataclass(frozen=True)
class Failure:
    """Why something failed, in the words of the error catalogue."""

    code: str
    message: str
    hint: str = ""


@dataclass(frozen=True)
class Charge:
    """One item of a region's meter, cumulative."""

    item: str
    quantity: float
    unit: str
    usd: float
    source: str


@dataclass(frozen=True)
class Report:
    """How an agent says its partition stands; the fields of the wire's PartitionReport."""

    epoch: int
    state: str
    condition: str = ""
    ps_address: str = ""
    round: int = 0
    step: int = 0
    samples: int = 0
    loss: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    metrics_samples: int = 0
    metrics_round: int = 0
    metrics_error: str = ""
    """Why the last evaluation found nothing; empty: it did."""
    sent_bytes: dict[str, int] = field(default_factory=dict)
    received_bytes: dict[str, int] = field(default_factory=dict)
    money: tuple[Charge, ...] = ()
    model_digest: str = ""
    blob_digest: str = ""
    error: Failure | None = None
    workers: int = 0
    attempt: int = 0
    samples_per_second: float = 0.0
    round_samples_per_second: float = 0.0
    """Of one worker, in the last round; `samples_per_second` is the mean of all invocations that have ended."""
    merge_seconds: float = 0.0
    """Of one step of one worker, mean, beyond its compute."""
    step_seconds: float = 0.0
    """Of steps that came right after another one, the usual; 0: none did."""
    merged_by: str = ""
    """The collective that its workers used, with its K."""
    compute_seconds: float = 0.0
    wait_seconds: float = 0.0
    applied_updates: int = 0
    link_rtt_ms: dict[str, float] = field(default_factory=dict)
    link_mbps: dict[str, float] = field(default_factory=dict)
    link_streams: dict[str, int] = field(default_factory=dict)
    links_down: tuple[str, ...] = ()
    staleness: dict[str, float] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)
    interval: int = 0
    codec: str = ""
    routes: int = 0
    """Number of the ways that its parameter server knows."""
    update_bytes: int = 0
    """Of its last update; 0: not known."""
    preempted: bool = False
    """It has fewer workers than it was told to have, because some were taken away."""
    scale_order: int = 0
    """The last order about its number of workers that it obeys; 0: not told."""
    meter: int = 0
    """Which meter has counted money and bytes; 0: not told."""
    shard_address: str = ""
    """Where its agent takes other regions' shards; empty: it waits for none."""
    shards_here: bool = False
    """All shards that it is trained on."""


@dataclass(frozen=True)
class Counted:
    """Money and bytes of meters that are no more: an agent that loses its disk counts from nothing again."""

    money: tuple[Charge, ...] = ()
    sent_bytes: dict[str, int] = field(default_factory=dict)
    received_bytes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Peer:
    """A parameter server that others exchange with."""

    region: str
    epoch: int
    address: str


@dataclass(frozen=True)
class Partition:
    """One region's part of a job."""

    region: str
    epoch: int = 1
    """Fences what an older holder of this partition still says."""
    state: str = "pending"
    """"pending", "assigned", then what the reports of this epoch say."""
    report: Report | None = None
    """The last one, of this or an earlier epoch: its figures are cumulative."""
    address: str = ""
    """Of the parameter server of this epoch."""
    ran: bool = False
    """A parameter server had an address, in this or an earlier epoch: others may have something of this region. Before,
    nothing can be lost there."""
    told: tuple[Peer, ...] = ()
    """The peers that this region was last sent."""
    told_routes: int = 0
    """Number of the ways that it was last sent."""
    told_to_finish: bool = False
    counted_before: Counted = field(default_factory=Counted)
    """By earlier meters of this region."""
    link: Link = "live"
    since: float = 0.0
    """When `link` became what it is."""
    workers: int | None = None
    """That were asked for last, or are left after some were taken away; None: as planned."""
    preemptible: bool = False
    """They are of those that may be taken away."""
    preempted: bool = False
    """Some were, since then."""
    scale_order: int = 0
    """Number of the order by which they were asked for."""


@dataclass(frozen=True)
class Copy:
    """A region's shard that another region processes."""

    source: str
    destination: str
    bytes: int
    """As the source has told."""
    epoch: int = 1
    state: str = "pending"
    """"pending", then what the source's reports say: "sending", "sent", "refused", "failed", "stopped"."""
    report: Report | None = None
    """The last one of the source; its figures are cumulative."""
    counted_before: Counted = field(default_factory=Counted)
    """By earlier meters of the source."""
    told: str = ""
    """The address that the source was told last."""
    link: Link = "live"
    """Of the source."""
    since: float = 0.0
    """When `link` became what it is."""


@dataclass(frozen=True)
class Goal:
    """A metric that is good enough to end with."""

    metric: str
    bound: float
    at_least: bool
    """Else: at most."""
    every: int
    """Rounds between evaluations."""


@dataclass(frozen=True)
class InitialModel:
    """What a job begins with: the model of another one."""

    job: str
    digest: str
    """Of the safetensors file."""
    bytes: int


@dataclass(frozen=True)
class JobState:
    """All that the job machine knows."""

    job: str
    lost_limit_seconds: float
    """How long a region may stay lost before the job fails."""
    created_at: float
    phase: JobPhase = "queued"
    partitions: tuple[Partition, ...] = ()
    """Sorted by region."""
    copies: tuple[Copy, ...] = ()
    """Sorted by source; no source has a partition."""
    copied: bool = False
    """All shards that are processed elsewhere have come."""
    begun_at: float = 0.0
    """It had waited for workers until then; 0: it waits, or began before this was kept."""
    started_at: float = 0.0
    """A region's workers were called; 0: not yet."""
    stepped_at: float = 0.0
    """It was heard that every region has made a step; 0: not yet."""
    stepped_region: str = ""
    """The last of which that was heard,"""
    stepped_steps: int = 0
    """and how many it had made by then."""
    finished_at: float = 0.0
    exact: bool = True
    """All regions must end with the same bits. In the background they merge the same updates in another order, so that
    the last bits differ."""
    model_digest: str = ""
    """Of the flat final model: the regions', or where they need not agree to the bit, the publisher's."""
    publisher: str = ""
    """The region that was asked to hand the model in."""
    publish_epoch: int = 0
    publishes: int = 0
    """How often a region was asked to."""
    blob_digest: str = ""
    blob_bytes: int = 0
    flat_bytes: int = 0
    """Of the model as one float32 vector, as it travels; 0: not known."""
    error: Failure | None = None
    reason: str = ""
    """Why it is being cancelled."""
    gave_way: bool = False
    """It pauses for another job."""
    waits_for: str = ""
    """While it is queued, in words."""
    topology: str = ""
    """Of the present ways; empty: as planned."""
    neighbours: Pairs = ()
    """Regions that exchange directly, sorted pairs; empty: as planned."""
    former: Pairs = ()
    """Those that still do as well, until every region knows the present ones; empty: none."""
    routes: int = 0
    """Number of these ways: each change of `neighbours` or `former` has the next one."""
    deadline_at: float | None = None
    """Unix seconds; promised when the job was admitted."""
    goal: Goal | None = None
    budget_usd: float | None = None
    """What it may cost."""
    ends_early: str = ""
    """Why it was told to end before its plan; empty: it was not."""
    initial_model: InitialModel | None = None
    """None: what its task makes."""
    replanned: bool = False
    """It was told to end so that another job continues with its model, over other regions."""
    successor: str = ""
    """That job."""
    goal_unknown: bool = False
    """No region measures the goal's metric."""

    def partition(self, region: str) -> Partition | None:
        """The partition of a region, if it takes part."""
        return next((part for part in self.partitions if part.region == region), None)

    def copy_from(self, region: str) -> Copy | None:
        """The shard that a region hands over, if it does."""
        return next((copy for copy in self.copies if copy.source == region), None)

    @property
    def awaits_successor(self) -> bool:
        """True where its model is here, and the job that continues with it is still to be planned."""
        return self.replanned and bool(self.blob_digest) and not self.terminal

    @property
    def terminal(self) -> bool:
        """True once nothing can change any more."""
        return self.phase in TERMINAL
