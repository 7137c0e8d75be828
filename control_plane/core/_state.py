"""State of a job: frozen dataclasses that survive a round trip through JSON unchanged."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from sync.histograms import Histogram

JobPhase = Literal[
    "queued", "planned", "starting", "running", "finishing", "succeeded", "failed", "cancelling", "cancelled"
]
Link = Literal["live", "unreachable", "lost"]
Pairs = tuple[tuple[str, str], ...]
"""Pairs of regions' names, or of other strings."""
TERMINAL: frozenset[str] = frozenset({"succeeded", "failed", "cancelled"})
"""Phases of an ended job."""
ENDED_PARTITION: frozenset[str] = frozenset({"stopped", "failed", "refused"})
"""States of a partition or a copy in which nothing runs any more."""


@dataclass(frozen=True)
class Failure:
    """Why something failed, with a code of the error catalogue (docs/errors.md)."""

    code: str
    message: str
    hint: str = ""


@dataclass(frozen=True)
class Charge:
    """One cost item of a region's meter, cumulative."""

    item: str
    quantity: float
    unit: str
    usd: float
    source: str


@dataclass(frozen=True)
class MeterTotals:
    """Cumulative totals of a meter."""

    money: tuple[Charge, ...] = ()
    sent_bytes: dict[str, int] = field(default_factory=dict)
    """By region, as ``received_bytes``."""
    received_bytes: dict[str, int] = field(default_factory=dict)

    @property
    def usd(self) -> float:
        """Sum of the charges."""
        return sum(charge.usd for charge in self.money)


@dataclass(frozen=True)
class Evaluation:
    """A region's last evaluation."""

    metrics: dict[str, float] = field(default_factory=dict)
    samples: int = 0
    round: int = 0
    error: str = ""
    """Why it returned no or not all metrics; empty: it succeeded."""
    histograms: dict[str, Histogram] = field(default_factory=dict)


@dataclass(frozen=True)
class Speed:
    """Measured speed of a region's workers."""

    samples_per_second: float = 0.0
    """Mean of all ended invocations."""
    round_samples_per_second: float = 0.0
    """Speed of one worker in the last round."""
    step_seconds: float = 0.0
    """Typical time of a step that directly followed another one; 0: none did."""
    merge_seconds: float = 0.0
    """Mean time of a worker's step beyond its compute."""
    compute_seconds: float = 0.0
    wait_seconds: float = 0.0
    merged_by: str = ""
    """Collective that the workers used, with its K."""


@dataclass(frozen=True)
class WanExchange:
    """A region's exchange of updates with the others."""

    applied_updates: int = 0
    staleness: dict[str, float] = field(default_factory=dict)
    """Mean age of the updates merged from each region, in rounds."""
    refused: dict[str, int] = field(default_factory=dict)
    """Number of each region's updates that the guard refused."""
    interval: int = 0
    """Steps of the open round."""
    codec: str = ""
    update_bytes: int = 0
    """Size of the last update; 0: unknown."""
    routes: int = 0
    """Number of the latest routes that the parameter server knows, as in `JobState.routes`."""
    suspicion: dict[str, int] = field(default_factory=dict)
    """Rounds in which each region's update was suspect to the robust rule, less those in which it was not."""


@dataclass(frozen=True)
class LinkReport:
    """The link from a region to another one."""

    rtt_ms: float = 0.0
    mbps: float = 0.0
    streams: int = 0
    """Streams of the last update; 0: it was sent through the exchange port."""
    down: bool = False
    """Whether the region could not be reached at the last attempt."""


@dataclass(frozen=True)
class Uploaded:
    """Answer of an agent that was commanded to upload the model of a round."""

    round: int = 0
    """0: it was never commanded to."""
    digest: str = ""
    """Digest of the safetensors file; empty: it could not be uploaded."""
    error: str = ""


@dataclass(frozen=True)
class Logged:
    """What the task's code has logged in a region."""

    round: int = 0
    """Last round whose values are complete; 0: none."""
    values: dict[str, float] = field(default_factory=dict)
    """Means over all values of that round, by name."""


@dataclass(frozen=True)
class ResourceUsage:
    """What a region's workers have used of their machines in the last reported round."""

    cpu_cores: float = 0.0
    """Mean number of busy cores, of all workers together."""
    memory_bytes: int = 0
    """Peak of the largest worker; 0: not reported."""
    gpu_memory_bytes: int = 0
    """Peak of the largest worker; 0: none computes on a GPU."""


@dataclass(frozen=True)
class RoundTime:
    """What a region's rounds have taken so far, in seconds, the mean of its workers."""

    compute: float = 0.0
    merge: float = 0.0
    """Merging the workers' steps with each other."""
    exchange: float = 0.0
    """Standing still while updates move between regions or are merged."""
    wait: float = 0.0
    """Standing still until other regions have something to send."""
    evaluate: float = 0.0


@dataclass(frozen=True)
class PrivacySpent:
    """What a job with differential privacy has spent of a region's dataset, by the region's ledger."""

    epsilon: float = 0.0
    delta: float = 0.0
    releases: int = 0


@dataclass(frozen=True)
class Report:
    """An agent's report on its partition; the fields of the protocol's PartitionReport."""

    epoch: int
    state: str
    condition: str = ""
    ps_address: str = ""
    ps_signs: bool = False
    """Whether its parameter server signs its updates; older versions do not."""
    round: int = 0
    step: int = 0
    samples: int = 0
    loss: float = 0.0
    """Of the last steps, which may be in a later round."""
    round_loss: float | None = None
    """Mean loss of the last completed round; None: not reported."""
    model_digest: str = ""
    blob_digest: str = ""
    error: Failure | None = None
    workers: int = 0
    attempt: int = 0
    preempted: bool = False
    """Whether it has fewer workers than commanded because some were preempted."""
    scale_order: int = 0
    """Sequence number of the latest scaling command that it obeys; 0: not reported."""
    shard_address: str = ""
    """Address at which its agent receives shards of other regions; empty: it waits for none."""
    shards_here: bool = False
    """Whether all shards that it trains on have arrived."""
    meter: int = 0
    """Identifies the meter that has counted the totals: an agent that loses its disk counts from zero again. 0: not
    reported."""
    totals: MeterTotals = MeterTotals()
    evaluation: Evaluation = Evaluation()
    speed: Speed = Speed()
    exchange: WanExchange = WanExchange()
    links: dict[str, LinkReport] = field(default_factory=dict)
    """To the other regions, as its parameter server has reported them last."""
    keeps_models: bool = False
    """Whether it uploads models of evaluated rounds; older versions do not."""
    kept: Uploaded = Uploaded()
    """Answer to the last command to upload one."""
    logged: Logged = Logged()
    usage: ResourceUsage = ResourceUsage()
    time: RoundTime | None = None
    """Of all rounds up to `round`; None: not reported."""
    privacy: PrivacySpent | None = None
    """None: the job has no differential privacy. Otherwise its loss is not told."""
    data: dict[str, str] = field(default_factory=dict)
    """Digest of each split of the region's own shard, as ALGORITHM:HEX; empty: not told."""


@dataclass(frozen=True)
class Peer:
    """A parameter server and its address, as sent to the other regions."""

    region: str
    epoch: int
    address: str
    unsigned: bool = False
    """Whether it is of a version that signs no updates."""


@dataclass(frozen=True)
class Partition:
    """One region's part of a job."""

    region: str
    epoch: int = 1
    """Fences reports of earlier runs of the partition."""
    state: str = "pending"
    """"pending", "assigned", then the state in the latest report of this epoch."""
    report: Report | None = None
    """The latest report, of this or an earlier epoch; its figures are cumulative."""
    address: str = ""
    """Address of the parameter server of this epoch; empty: not started."""
    ran: bool = False
    """Whether a parameter server has run, in this or an earlier epoch, so that it may hold progress to resume."""
    evaluations: tuple[Evaluation, ...] = ()
    """Its last evaluations, by round."""
    told: tuple[Peer, ...] = ()
    """Peers that were last sent to this region."""
    told_routes: int = 0
    """Number of the routes that were last sent to this region."""
    told_to_finish: bool = False
    """Whether the region was commanded to end early."""
    told_to_halt: bool = False
    """Whether the region was commanded to end at once."""
    counted_before: MeterTotals = field(default_factory=MeterTotals)
    """Totals of earlier meters of this region."""
    link: Link = "live"
    since: float = 0.0
    """When `link` last changed."""
    workers: int | None = None
    """Number commanded last, or left after a preemption; None: as planned."""
    preemptible: bool = False
    """Whether the workers are preemptible."""
    preempted: bool = False
    """Whether some workers were preempted since the last scaling command."""
    scale_order: int = 0
    """Sequence number of the last scaling command."""


@dataclass(frozen=True)
class Copy:
    """A region's shard that another region processes."""

    source: str
    destination: str
    bytes: int
    """Size of the shard, as reported by the source."""
    epoch: int = 1
    state: str = "pending"
    """"pending", then the state in the source's reports: "sending", "sent", "refused", "failed", "stopped"."""
    report: Report | None = None
    """The latest report of the source; its figures are cumulative."""
    counted_before: MeterTotals = field(default_factory=MeterTotals)
    """Totals of earlier meters of the source."""
    told: str = ""
    """Address that was last sent to the source; empty: the transfer is not commanded."""
    link: Link = "live"
    """Link to the source."""
    since: float = 0.0
    """When `link` last changed."""


@dataclass(frozen=True)
class Goal:
    """A bound of a metric at which the job ends early."""

    metric: str
    bound: float
    at_least: bool
    """True: the metric must be at least `bound`; False: at most."""
    every: int
    """Number of rounds between evaluations."""


@dataclass(frozen=True)
class Keep:
    """Which models of evaluated rounds are kept, and what makes one the best (`train.keep`, `train.best`)."""

    models: int = 1
    """Number of the last ones that are kept."""
    best: bool = False
    """Instead, the best one is kept."""
    metric: str = "loss"
    highest: bool = False
    """Whether a model is better the higher the metric is, else the lower."""


@dataclass(frozen=True)
class KeptModel:
    """The model of a round, with the metrics of all regions together."""

    round: int
    metrics: dict[str, float] = field(default_factory=dict)
    digest: str = ""
    """Digest of the safetensors file; empty: it is not uploaded yet."""
    bytes: int = 0


@dataclass(frozen=True)
class Models:
    """Models of a job's evaluated rounds."""

    kept: tuple[KeptModel, ...] = ()
    """Models at the control plane, by round; of a job that has succeeded, the final one is the last."""
    awaited: tuple[KeptModel, ...] = ()
    """Models to be uploaded, one after another."""
    region: str = ""
    """Region that was commanded to upload the first of them; empty: none."""
    evaluated: int = 0
    """Last round that all regions have evaluated."""
    best_round: int = 0
    """Round of the best evaluation so far; 0: none has the metric."""
    best_value: float = 0.0
    not_improved: int = 0
    """Number of evaluations since the best one."""


@dataclass(frozen=True)
class InitialModel:
    """What a job starts from: the model of another job, or a file of the user."""

    job: str
    """Empty: it is a file."""
    digest: str
    """Digest of the safetensors file."""
    bytes: int
    round: int = 0
    """Round of that job; 0: a file, or submitted under an older version."""
    file: str = ""
    """Name of the user's file."""
    partial: bool = False
    """Whether the file may hold some of the model's tensors only, and others."""
    uri: str = ""
    """Address at which the regions read the file; empty: the control plane has it."""
    adapter: str = ""
    """Digest of the user's file whose tensors replace those of the first one; empty: none."""
    adapter_bytes: int = 0
    adapter_file: str = ""
    """Its name."""

    @property
    def uploaded(self) -> tuple[str, ...]:
        """Digests of its files that the control plane has."""
        first = () if self.uri else (self.digest,)
        return (*first, self.adapter) if self.adapter else first

    @property
    def holds(self) -> str:
        """What the file must hold of the model's tensors: "all" or "some"; "" for a job's model."""
        return "" if not self.file else "some" if self.partial else "all"

    @property
    def text(self) -> str:
        """The model for users."""
        adapter = f" with the adapter {self.adapter_file}" if self.adapter else ""
        return f"the file {self.uri or self.file}{adapter}" if self.file else f"the model of {self.job}"


@dataclass(frozen=True)
class JobState:
    """State of a job."""

    job: str
    lost_limit_seconds: float
    """How long a region may stay lost before the job fails, or continues without it (`limits.lostRegion`)."""
    created_at: float
    phase: JobPhase = "queued"
    partitions: tuple[Partition, ...] = ()
    """Sorted by region."""
    copies: tuple[Copy, ...] = ()
    """Shards that other regions process, sorted by source; no source has a partition."""
    copied: bool = False
    """Whether all these shards have arrived."""
    begun_at: float = 0.0
    """When the job had its workers and started; 0: not yet, or started under an older version."""
    started_at: float = 0.0
    """When the first region began to train; 0: not yet."""
    stepped_at: float = 0.0
    """When the last region had reported its first step; 0: not yet."""
    stepped_region: str = ""
    """That last region."""
    stepped_steps: int = 0
    """Number of steps that it had made by then."""
    trained_at: float = 0.0
    """When all regions had finished their training; 0: not yet, or under an older version."""
    finished_at: float = 0.0
    exact: bool = True
    """Whether all regions must end with a bit-identical model. With exchange in the background regions merge the same
    updates in different orders, so that the last bits differ."""
    model_digest: str = ""
    """Digest of the flat final model; the publisher's if the regions' models may differ in the last bits."""
    publisher: str = ""
    """Region that was commanded to upload the model; empty: none."""
    publishes: int = 0
    """Number of uploads commanded so far."""
    blob_digest: str = ""
    blob_bytes: int = 0
    flat_bytes: int = 0
    """Size of the model as one float32 vector, as workers exchange it; 0: unknown."""
    error: Failure | None = None
    reason: str = ""
    """Why the job is being cancelled."""
    gave_way: bool = False
    """Whether the job is paused in favour of another one, or for lack of workers."""
    waits_for: str = ""
    """What the queued job waits for: "for workers in frankfurt"."""
    topology: str = ""
    """Present topology; empty: as planned."""
    neighbours: Pairs = ()
    """Regions that exchange directly, as sorted pairs; empty: as planned."""
    former: Pairs = ()
    """Pairs of the former topology, which stay in use until every region knows the present one; else empty."""
    routes: int = 0
    """Number of the present routes; it grows with each change of `neighbours` or `former`."""
    deadline_at: float | None = None
    """Deadline promised when the job was admitted, in Unix seconds."""
    goal: Goal | None = None
    evaluate_every: int = 0
    """Number of rounds between evaluations; 0: only at the end."""
    keep: Keep = Keep()
    models: Models = Models()
    patience: int = 0
    """Number of evaluations without an improvement after which the job ends early; 0: any."""
    time_limit_seconds: float | None = None
    """Training time after which the job ends early."""
    budget_usd: float | None = None
    """Cost at which the job ends early."""
    ends_early: str = ""
    """Why the job ends before its plan; empty: it does not."""
    initial_model: InitialModel | None = None
    """None: the model that the task creates."""
    replanned: bool = False
    """Whether the job ends early so that another job continues its model with other regions."""
    successor: str = ""
    """ID of the job that continues the model; empty: none."""
    continues: bool = False
    """Whether a job continues the model without a region that stays lost (`regions.lost`); else this job fails."""
    most_left_out: int = 0
    """Most regions that can be left out together, so that the others end at once and another job continues."""
    left_out: tuple[str, ...] = ()
    """Regions without which the others have been told to end."""
    left_out_at: float = 0.0
    """When they were told to."""
    goal_unknown: bool = False
    """Whether it was recorded that no region measures the goal's metric."""

    def partition(self, region: str) -> Partition | None:
        """Return the partition of a region, or None."""
        return next((part for part in self.partitions if part.region == region), None)

    def copy_from(self, region: str) -> Copy | None:
        """Return the copy whose source is a region, or None."""
        return next((copy for copy in self.copies if copy.source == region), None)

    @property
    def remaining(self) -> tuple[Partition, ...]:
        """The partitions without those of regions that are left out."""
        return tuple(part for part in self.partitions if part.region not in self.left_out)

    @property
    def usd(self) -> float:
        """US dollars that the job has cost so far, by the reports of its regions."""
        reports = [*(part.report for part in self.partitions), *(copy.report for copy in self.copies)]
        return sum(report.totals.usd for report in reports if report is not None)

    @property
    def rounds_done(self) -> int:
        """Rounds that all regions have completed; where one is left out, those of the furthest of the others, whose
        model is the job's."""
        rounds = [part.report.round if part.report else 0 for part in self.remaining]
        return (max if self.left_out else min)(rounds, default=0)

    @property
    def awaits_successor(self) -> bool:
        """Whether the job is replanned and its model is uploaded, but its successor is not planned yet."""
        return self.replanned and bool(self.blob_digest) and not self.terminal

    @property
    def terminal(self) -> bool:
        """Whether the job has ended."""
        return self.phase in TERMINAL
