"""What the scheduler knows and what it answers. Plain frozen dataclasses; units are in the names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sync.channel import DEFAULT as DEFAULT_CHANNEL

if TYPE_CHECKING:
    from scheduler.tuning import MergePoint, TaskProfile


@dataclass(frozen=True)
class Prices:
    """What a region charges. A price that is not known is an error of the catalogue, never zero."""

    source: str
    """Where the figures come from: an address, a contract, "operator"."""
    as_of: str
    """ISO date of the source."""
    function_usd_per_gb_second: float
    function_usd_per_request: float
    server_usd_per_hour: float
    """The machine that runs the parameter server."""
    egress_usd_per_gb: float
    """To any other region, unless `egress_to` names it."""
    egress_to: dict[str, float] = field(default_factory=dict)
    """USD/GB by destination region."""

    def egress(self, destination: str) -> float:
        """USD per GB (1e9 bytes) sent to another region."""
        return self.egress_to.get(destination, self.egress_usd_per_gb)


@dataclass(frozen=True)
class Capacity:
    """What a region can run at one time."""

    workers: int
    memory_mb: int
    """Largest memory of one function."""
    samples_per_second: float | None = None
    """Of one worker, as the operator states it; None: unknown, a prior is used."""
    preemptible: int = 0
    """Workers besides, that may be taken away at any time; so many are there now."""
    cores: float = 0.0
    """That all workers share; 0: each has its own."""


@dataclass(frozen=True)
class Split:
    """One part of a dataset in one region."""

    samples: int
    bytes: int | None = None
    """None: not told, so that it cannot be processed elsewhere."""


@dataclass(frozen=True)
class Dataset:
    """The shard of a dataset that a region holds."""

    name: str
    splits: dict[str, Split]
    """By split name; "train" must be there for a region to train on it."""
    residency: str | tuple[str, ...] = "region"
    """"region": the data never leaves; "cloud", "anywhere", or the names of the regions that may have it too."""


@dataclass(frozen=True)
class Link:
    """One directed region pair."""

    source: str
    destination: str
    rtt_ms: float
    mbps: float
    """0: there is no direct path."""


@dataclass(frozen=True)
class Region:
    """One place with capacity, prices, datasets and one agent."""

    name: str
    cloud: str
    capacity: Capacity
    prices: Prices | None
    datasets: tuple[Dataset, ...] = ()
    links: tuple[Link, ...] = ()
    """The links that begin here, as the operator states or the agent measured them."""
    channel: str = DEFAULT_CHANNEL
    """Name of the channel through which its workers exchange tensors."""
    takes_shards: bool = False
    """Whether it processes shards of other regions."""


@dataclass(frozen=True)
class Snapshot:
    """The federation at one moment, as far as planning needs it."""

    regions: tuple[Region, ...]
    """Regions that are live."""
    absent: tuple[str, ...] = ()
    """Regions that are known, but cannot be used now."""
    busy_workers: dict[str, int] = field(default_factory=dict)
    """Workers that other jobs hold, by region."""
    speeds: dict[str, float] = field(default_factory=dict)
    """Samples/s of one worker measured in earlier runs of the same task, by region."""
    other_batch: frozenset[str] = frozenset()
    """Regions whose speed was measured with another batch, from which it does not follow exactly."""
    model_bytes: int | None = None
    """Size of the task's flat model, if an earlier run told it, or an agent has counted it."""
    start_seconds: float | None = None
    """From submission to the first step, measured in earlier runs, or by a probe."""
    first_model_given: bool = False
    """The job begins with what another one has left, handed on by its first region; else each makes the same."""
    counted: bool = False
    """No run of this code has told `model_bytes`: an agent has counted it."""
    start_probed: bool = False
    probed: Mapping[str, float] = field(default_factory=dict)
    """Samples/s of one worker in a probe, a few steps of the task without any run, by region."""
    start_of_run: bool = True
    """Whether a run has told `start_seconds`, so that the first model's way is in it; in a profile's there is none."""
    profiles: Mapping[str, TaskProfile] = field(default_factory=dict)
    """What `control-plane profile` has measured of the task, by region."""
    merges: Mapping[str, tuple[MergePoint, ...]] = field(default_factory=dict)
    """What runs of it have measured of merges, by region."""
    stage_paces: Mapping[str, float] = field(default_factory=dict)
    """Of models in stages, by region: how many times as long as its profile alone says runs have found a step to be."""


@dataclass(frozen=True)
class Demand:
    """What a job asks for."""

    job: str
    dataset: str
    batch: int
    """Samples of one worker in one step."""
    epochs: float | None
    """Passes over the data; exactly one of `epochs` and `steps` is given."""
    steps: int | None
    """Steps of the region that makes the most."""
    seed: int
    use: tuple[str, ...] = ()
    """Regions to use; empty: all that hold data."""
    avoid: tuple[str, ...] = ()
    residency: str | tuple[str, ...] = "region"
    """How far the job lets raw data go, where their owner does: as of a dataset."""
    parallelism: str = "auto"
    """"data": every worker holds the whole model; "pipeline"; "auto": data, unless no function is large enough."""
    stages: int | None = None
    """Of a pipeline; None: the plan says."""
    activations: str | None = None
    """What stages send each other activations and their gradients in: "fp32" or "bf16"; None: the plan says."""
    workers: int | Mapping[str, int] | None = None
    """Workers in each region, or by region; None: the plan says."""
    memory_mb: int | None = None
    slice_seconds: float = 30.0
    balance: str = "data"
    """What a region's steps in a round are in proportion to: its "data", so that all make the same epochs, or its
    "speed", so that all rounds take equally long."""
    interval: int | None = None
    """Steps between WAN exchanges; None: the plan says."""
    collective: str | None = None
    channel: str | None = None
    merging: dict[str, float] = field(default_factory=dict)
    """Of the collective, where the job file sets them: "k", "staleness", "significance"."""
    merging_codec: str = "fp32"
    wan_policy: str | None = None
    wan_settings: dict[str, float] = field(default_factory=dict)
    """Of the policy, where the job file sets them."""
    exchange: str | None = None
    """"synchronous" or "background"; None: the plan says."""
    codec: str | None = None
    topology: str | None = None
    """Name of its kind; None: the plan says."""
    evaluate_every: int = 0
    """Rounds between evaluations; 0: only after the last."""
    evaluation_batch: int = 0
    """Samples that an evaluation takes at a time; 0: as many as a step."""
    minimise: str = "cost"
    deadline_seconds: float | None = None
    """From now."""
    budget_usd: float | None = None


@dataclass(frozen=True)
class PipelineStage:
    """Consecutive layers of a model, which some workers hold and no others."""

    first: int
    """Layer, counted from 0."""
    last: int
    """Inclusive."""
    memory_mb: int
    needed_mb: float
    """What it is expected to hold at most."""
    rematerialise: bool = False
    """Its forward pass is computed again before each backward pass."""


@dataclass(frozen=True)
class PipelineShape:
    """How a partition runs a model that its workers hold in stages. They are numbered stage * degree + replica."""

    stages: tuple[PipelineStage, ...]
    degree: int
    """Replicas of each stage."""
    micro_batch: int
    """Samples."""
    order: str
    """"gpipe" or "1f1b"."""
    step_seconds: float
    """Expected of one step, the merge of gradients included."""
    pace: float = 1.0
    """How many times as long that is as the profile alone says: earlier runs have found it so."""
    activation_codec: str = "fp32"
    """Of what stages send each other: "fp32", which is as it is, or "bf16"."""
    why: tuple[str, ...] = ()
    """Sentences for people: what each stage holds, and why it ends where it does."""


@dataclass(frozen=True)
class PlannedPartition:
    """The part of a plan that runs in one region."""

    region: str
    samples: int
    """In the region's training split."""
    workers: int
    batch: int
    """Samples of one replica of the model in one step: of one worker, but in a pipeline."""
    memory_mb: int
    steps_per_round: int
    """Local steps between two WAN exchanges; see `Demand.balance`."""
    samples_per_second: float
    """Of one worker, of a pipeline on the mean; the figure the estimate was made with."""
    merge_seconds: float | None = None
    """Of one step, as a profile of the task predicts it; None: a prior is used."""
    pipeline: PipelineShape | None = None
    """None: every worker holds the whole model."""
    shards: tuple[str, ...] = ()
    """Regions whose shards are trained on here, sorted; empty: its own only."""

    @property
    def replicas(self) -> int:
        """Of the model; each takes `batch` samples in a step."""
        return self.pipeline.degree if self.pipeline else self.workers


@dataclass(frozen=True)
class Range:
    """A prediction: what is expected, and the bounds it should fall in."""

    low: float
    expected: float
    high: float


@dataclass(frozen=True)
class Cost:
    """One item of a predicted bill."""

    region: str
    item: str
    quantity: float
    unit: str
    usd: float
    source: str


@dataclass(frozen=True)
class Phase:
    """A part of a plan's predicted time."""

    name: str
    """For people."""
    times: int
    seconds: float
    """Of all of them."""


@dataclass(frozen=True)
class Estimate:
    """What a plan is expected to take."""

    seconds: Range
    wan_bytes: Range
    usd: Range
    items: tuple[Cost, ...]
    link_bytes: dict[str, int]
    """Expected bytes by directed link, "source>destination"."""
    basis: str
    """What the time rests on most weakly. "measured": earlier runs of the task; "other batch": such with another batch;
    "probed": a few steps of the task; "likened": such in another region; "stated": the operators' figures; "prior": a
    guess."""
    model_bytes: int = 0
    """Of the flat model, as it was taken; 0: of a plan of before this was told."""
    model_basis: str = ""
    """"measured": an earlier run; "counted": an agent has counted it; "prior": nobody knows."""
    start_basis: str = ""
    """"measured": earlier runs; "probed": an agent has made the task ready; "prior": a guess."""
    phases: tuple[Phase, ...] = ()
    """What the expected seconds are the sum of, in order."""


@dataclass(frozen=True)
class Copy:
    """A region's shard that another one processes; it travels once, whole, before training begins."""

    source: str
    destination: str
    bytes: int
    """Of all splits."""
    seconds: float
    """Expected, over the link as stated."""
    usd: float
    """Expected, for egress."""


@dataclass(frozen=True)
class Alternative:
    """A plan that was evaluated and not taken."""

    text: str
    why_not: str


@dataclass(frozen=True)
class Plan:
    """The scheduler's answer to an admissible demand."""

    partitions: tuple[PlannedPartition, ...]
    """Sorted by region."""
    rounds: int
    interval: int
    """Local steps between WAN exchanges of the region that makes the most."""
    collective: str
    """"auto": each region chooses, by what it measures of its channel."""
    channel: str
    """"auto": each region's own."""
    wan_policy: str
    codec: str
    topology: str
    """As `Topology.name`: "mesh", "star via HUB", "two-level via HUB, HUB"."""
    slice_seconds: float
    seed: int
    evaluate_every: int
    estimate: Estimate
    residency: dict[str, str]
    """The verdict for each shard, by region."""
    alternatives: tuple[Alternative, ...] = ()
    evaluation_batch: int = 0
    """Samples that an evaluation takes at a time; 0: as many as a step."""
    wan_settings: dict[str, float] = field(default_factory=dict)
    """Of policy and exchange."""
    merging: dict[str, float] = field(default_factory=dict)
    """Of the collective."""
    merging_codec: str = "fp32"
    """Of what the workers of a region send each other."""
    warnings: tuple[str, ...] = ()
    """What is done otherwise than it was asked for, in sentences."""

    @property
    def background(self) -> bool:
        """Whether training continues while updates travel."""
        return bool(self.wan_settings.get("background"))

    @property
    def shares(self) -> dict[str, float]:
        """What each region contributes to the mean of a round, by its samples; their sum is 1."""
        samples = {part.region: part.replicas * part.batch * part.steps_per_round for part in self.partitions}
        total = sum(samples.values())
        return {region: count / total for region, count in samples.items()}

    neighbours: tuple[tuple[str, str], ...] = ()
    """Regions that exchange directly, as sorted pairs; what the others need is passed on. Empty: all pairs."""
    exchange_seconds: float = 0.0
    """Expected, of one round: from the end of its compute until every region has every update, coding included."""

    copies: tuple[Copy, ...] = ()
    """Shards that are processed elsewhere, sorted by source; their regions have no partition."""

    def neighbours_of(self, region: str) -> tuple[str, ...]:
        """The regions that one exchanges with directly, sorted."""
        pairs = self.neighbours or tuple((region, part.region) for part in self.partitions)
        return tuple(sorted({name for pair in pairs if region in pair for name in pair} - {region}))


@dataclass(frozen=True)
class Reason:
    """Why there is no plan."""

    code: str
    """Of the error catalogue."""
    text: str
    remedy: str
    """What would make the demand admissible."""
    earliest_seconds: float | None = None
    """Where it is the deadline that cannot be kept: the earliest from now that might be; infinite: none is known."""


@dataclass(frozen=True)
class Declined:
    """The scheduler's answer to a demand that it does not admit."""

    reasons: tuple[Reason, ...]
