"""Input and output of the scheduler. Plain frozen dataclasses; units are in the names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from sync.channel import DEFAULT as DEFAULT_CHANNEL

if TYPE_CHECKING:
    from scheduler.tuning import MergePoint, TaskProfile


@dataclass(frozen=True)
class Prices:
    """The prices of a region. An unknown price is an error of the catalogue, never zero."""

    source: str
    """Source of the figures: an address, a contract, "operator"."""
    as_of: str
    """ISO date of the source."""
    function_usd_per_gb_second: float
    function_usd_per_request: float
    server_usd_per_hour: float
    """The machine that runs the parameter server."""
    egress_usd_per_gb: float
    """Price of traffic to any region that `egress_to` does not name."""
    egress_to: dict[str, float] = field(default_factory=dict)
    """USD/GB by destination region."""
    device_usd_per_second: float = 0.0
    """Price of one of the region's devices while a function holds it."""

    def worker_usd_per_second(self, memory_mb: float, devices: int) -> float:
        """USD of one running worker with so much memory and so many devices."""
        return memory_mb / 1024 * self.function_usd_per_gb_second + devices * self.device_usd_per_second

    def egress(self, destination: str) -> float:
        """USD per GB (1e9 bytes) sent to another region."""
        return self.egress_to.get(destination, self.egress_usd_per_gb)


@dataclass(frozen=True)
class Devices:
    """Accelerators of a region, such as GPUs."""

    kind: str
    count: int
    """Of all functions together."""
    memory_mb: int | None = None
    """Memory of one device; None: not stated."""
    of_function: int | None = None
    """Those that the platform gives each function; None: a function sees all."""
    kept: int | None = None
    """Those kept for preemptible workers: one for each that the region has at most, since a worker that is taken away
    may take its device along. None: an earlier agent has not told."""


@dataclass(frozen=True)
class Capacity:
    """What a region can run at one time."""

    workers: int
    memory_mb: int
    """Largest memory of one function."""
    samples_per_second: float | None = None
    """Speed of one worker, as the operator states it; None: unknown, a prior is used."""
    preemptible: int = 0
    """Number of additional workers that may be taken away at any time, as available now."""
    cores: float = 0.0
    """Cores that all workers share; 0: each has its own."""
    slice_seconds: float | None = None
    """Longest slice of an invocation, since the platform ends its function; None: any."""
    least_memory_mb: int = 1
    """Smallest memory of one function."""
    memory_step_mb: int = 1
    """The memory of a function, and the largest one, is a multiple of this."""
    devices: Devices | None = None
    """Accelerators, of which each worker has its own; None: workers have none that are billed."""

    def function_mb(self, memory_mb: int) -> int:
        """Return the memory of a function that needs so much, as the platform gives and bills it."""
        return -(-max(memory_mb, self.least_memory_mb) // self.memory_step_mb) * self.memory_step_mb

    @property
    def shared_devices(self) -> int | None:
        """Devices that regular workers share, one or several each; those kept for preemptible workers are no part of
        them. None: a worker is sure to find its devices."""
        devices = self.devices
        if devices is None or devices.of_function:
            return None
        return max(0, devices.count - (self.preemptible if devices.kept is None else devices.kept))

    @property
    def function_devices(self) -> int | None:
        """Most devices of one regular worker; None: workers have none that are billed."""
        devices = self.devices
        return devices.of_function if devices is not None and devices.of_function else self.shared_devices


@dataclass(frozen=True)
class Split:
    """One part of a dataset in one region."""

    samples: int
    bytes: int | None = None
    """Size in bytes; None: not stated, so that the split cannot be processed elsewhere."""
    clients: int | None = None
    """Clients whose samples the split has; None: not known."""


@dataclass(frozen=True)
class Dataset:
    """The shard of a dataset that a region holds."""

    name: str
    splits: dict[str, Split]
    """Splits by name; a region needs "train" to train on the shard."""
    residency: str | tuple[str, ...] = "region"
    """Where the data may be processed: "region": only there; "cloud", "anywhere", or the names of further regions."""
    schema: str = ""
    """Digest of what a sample consists of, which must be the same in all regions of a job; empty: the task reads the
    data."""


@dataclass(frozen=True)
class Link:
    """A directed link between two regions."""

    source: str
    destination: str
    rtt_ms: float
    mbps: float
    """Rate; 0: there is no direct path."""


@dataclass(frozen=True)
class Region:
    """A region: capacity, prices, datasets and one agent."""

    name: str
    cloud: str
    capacity: Capacity
    prices: Prices | None
    datasets: tuple[Dataset, ...] = ()
    links: tuple[Link, ...] = ()
    """The links that begin here, as the operator states or the agent measured them."""
    channel: str = DEFAULT_CHANNEL
    """Name of the channel through which its workers exchange tensors."""
    channel_plaintext: bool = False
    """Whether that channel is reached over a network without encryption."""
    loopback: bool = False
    """Whether other regions reach its parameter servers on its own machine only."""
    takes_shards: bool = False
    """Whether it processes shards of other regions."""
    isolation: str = ""
    """How it isolates job code, from what it has tried: "bubblewrap", "container" or "none"; empty: unknown."""
    secrets: tuple[str, ...] = ()
    """Names of the secrets that it holds for tasks."""
    installs: bool = False
    """Whether it installs packages that tasks require."""
    images: tuple[str, ...] = ()
    """Images, and beginnings of images, that tasks may run in."""

    def worker_devices(self, gpus: int | None) -> int:
        """Return the devices of one worker that are billed. ``gpus``: those that the job asks for; None: all that a
        function may have."""
        devices = self.capacity.devices
        if devices is None:
            return 0
        # A platform that gives a function its own devices bills them, whatever the job uses.
        return devices.of_function or gpus or max(1, self.capacity.shared_devices or 0)


@dataclass(frozen=True)
class StartBilled:
    """Seconds that a run is billed besides those from the first step to its end: its start, without the waits before
    the function and the parameter server run, less what passes after these have ended."""

    function: float
    """Of one worker's function."""
    server: float
    """Of the parameter server."""


@dataclass(frozen=True)
class Snapshot:
    """The state of the federation that planning needs."""

    regions: tuple[Region, ...]
    """Available regions."""
    absent: tuple[str, ...] = ()
    """Known regions that cannot be used now."""
    busy_workers: dict[str, int] = field(default_factory=dict)
    """Workers that other jobs hold, by region."""
    busy_devices: dict[str, int] = field(default_factory=dict)
    """Devices of these workers, by region."""
    speeds: dict[str, float] = field(default_factory=dict)
    """Samples/s of one worker measured in earlier runs of the same task, by region."""
    other_batch: frozenset[str] = frozenset()
    """Regions whose speed was measured with another batch, from which it can be derived only roughly."""
    profiled: frozenset[str] = frozenset()
    """Regions whose speed was measured by a profile only."""
    model_bytes: int | None = None
    """Size of the task's flat model, as measured by an earlier run or counted by an agent."""
    held_bytes: int | None = None
    """Size of all tensors of the model, also of those that are not trained, and of the gradients, as counted by an
    agent."""
    start_seconds: float | None = None
    """Seconds from submission to the first step, as measured in earlier runs or by a probe."""
    counted: bool = False
    """Whether `model_bytes` was counted by an agent, since no run of this code has reported it."""
    start_probed: bool = False
    probed: Mapping[str, float] = field(default_factory=dict)
    """Samples/s of one worker in a probe, a few steps of the task without any run, by region."""
    fixed_shares: Mapping[str, float] = field(default_factory=dict)
    """Part of the seconds of a worker's step that does not depend on its samples, at the batch of the speeds, by
    region."""
    normalises_by_batches: bool = False
    """Whether the model has layers that do (BatchNorm), as counted by an agent: what they learn depends on the samples
    of a worker."""
    gpu_bytes: Mapping[int, int] = field(default_factory=dict)
    """Memory of a GPU that tensors took at most in the steps of a probe, by batch; empty: not known."""
    gpu_lacks: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    """Regions in which a probe did not fit into the GPU's memory: its batch, and a text on it."""
    start_of_run: bool = True
    """Whether `start_seconds` was measured in a run, so that it includes contact and the transfer of the first model; a
    profile's does not."""
    started: Mapping[str, StartBilled] = field(default_factory=dict)
    """What a run has been billed besides its training, by region; where none tells, a
    probe's whole start, else nothing."""
    profiles: Mapping[str, TaskProfile] = field(default_factory=dict)
    """Results of `geofed profile` for the task, by region."""
    merges: Mapping[str, tuple[MergePoint, ...]] = field(default_factory=dict)
    """Merges measured in runs of the task, by region."""
    round_end_seconds: float | None = None
    """Seconds of a round for which workers stand still beyond what the cost model has, as measured in a run whose
    regions waited for each other; below 0: so much less; None: no run has told."""
    background_end_seconds: float | None = None
    """The same where they exchange in the background."""
    rest_seconds: float = 0.0
    """Seconds from the end of a run's training to that of the job: its model is handed in."""
    round_work_seconds: float = 0.0
    """Seconds of a round besides its steps and its end, as measured in a run: evaluations, what a single worker's steps
    take besides compute, and what is in no other phase."""
    sent_share: float | None = None
    """Part of the updates that has passed a policy's filter of significant changes in runs of the task; None: none has
    told."""
    stage_paces: Mapping[str, float] = field(default_factory=dict)
    """For models in stages, by region: ratio of the step time measured in runs to the one that the profile alone
    predicts."""

    def free_workers(self, region: Region, gpus: int | None) -> int:
        """Return how many workers with so many devices (`Demand.gpus`) a region has free."""
        free = region.capacity.workers - self.busy_workers.get(region.name, 0)
        there = region.capacity.shared_devices
        if there is None:
            return free
        left = max(0, there - self.busy_devices.get(region.name, 0))
        return min(free, left // region.worker_devices(gpus))

    def gpu_mb(self, batch: int, ranks: int = 1) -> float:
        """Return the memory of a GPU in MB that a step of a batch takes at least: on a line through the batches of a
        probe, or what its only one took, if that is no larger; 0: not known.

        ``ranks``: GPUs that hold a part of the model each. What no sample takes is divided by their number.
        """
        if not self.gpu_bytes:
            return 0.0
        (small, least), (large, most) = min(self.gpu_bytes.items()), max(self.gpu_bytes.items())
        if small == large:
            return most / ranks / 2**20 if batch >= large else 0.0
        each = max(0.0, (most - least) / (large - small))
        held = max(0.0, most - each * large)
        return max(0.0, most + each * (batch - large) - held * (1 - 1 / ranks)) / 2**20

    @cached_property
    def by_name(self) -> Mapping[str, Region]:
        """Available regions by name."""
        return {region.name: region for region in self.regions}


@dataclass(frozen=True)
class ClientDemand:
    """Federated averaging over the clients that regions hold: a step of a region is a round of its clients."""

    fraction: float
    """Part of the clients that train in a round."""
    least: int = 1
    """Fewest clients of a round."""
    epochs: int = 1
    """Passes of a client over its samples in a round."""
    steps: int = 0
    """Local steps of a client in a round, in place of `epochs`; 0: none are stated."""


@dataclass(frozen=True)
class Demand:
    """The requirements of a job."""

    job: str
    dataset: str
    batch: int
    """Samples of one worker in one step; where the plan chooses them, those that a probe measures."""
    epochs: float | None
    """Passes over the data; exactly one of `epochs` and `steps` is given."""
    steps: int | None
    """Steps of the region that makes the most."""
    seed: int
    use: tuple[str, ...] = ()
    """Regions to use; empty: all that hold data."""
    avoid: tuple[str, ...] = ()
    residency: str | tuple[str, ...] = "region"
    """Where the job allows its raw data to be processed, within what their owner allows; values as of a dataset."""
    parallelism: str = "auto"
    """"data": every worker holds the whole model, even if no function seems large enough; "whole": the same, but then
    the job is refused; "pipeline"; "auto": whole, unless no function is large enough."""
    stages: int | None = None
    """Number of pipeline stages; None: the plan chooses."""
    activations: str | None = None
    """Type in which stages send activations and their gradients: "fp32" or "bf16"; None: the plan chooses."""
    workers: int | Mapping[str, int] | None = None
    """Workers in each region, or by region; None: the plan chooses."""
    memory_mb: int | None = None
    gpus: int | None = 1
    """Devices of one worker; None: all that its function may have."""
    sharded: bool = False
    """Whether the devices of a worker hold a part of the model each."""
    slice_seconds: float | None = 30.0
    """Time slice of an invocation; None: the plan chooses."""
    most_slice_seconds: float = 600.0
    """Longest slice that the plan may choose."""
    balance: str = "data"
    """What a region's steps in a round are proportional to: "data", so that all regions make the same number of epochs,
    or "speed", so that all rounds take equally long."""
    interval: int | None = None
    """Steps between WAN exchanges; None: the plan chooses."""
    collective: str | None = None
    channel: str | None = None
    merging: dict[str, float] = field(default_factory=dict)
    """Settings of the collective in the job file: "k", "staleness", "ratio", "significance", "mean" (1: `merge.step:
    mean`)."""
    merging_codec: str = "fp32"
    wan_policy: str | None = None
    wan_settings: dict[str, float] = field(default_factory=dict)
    """Settings of the WAN policy in the job file."""
    exchange: str | None = None
    """"synchronous" or "background"; None: the plan chooses."""
    codec: str | None = None
    topology: str | None = None
    """Name of the topology's kind; None: the plan chooses."""
    evaluate_every: int = 0
    """Rounds between evaluations; 0: only after the last."""
    evaluation_batch: int = 0
    """Samples that an evaluation takes at a time; 0: as many as a step."""
    minimise: str = "cost"
    to_goal: bool = False
    """Whether the job ends when it reaches a goal, at `epochs` or `steps` at the latest."""
    clients: ClientDemand | None = None
    """None: samples belong to no clients."""
    local: bool = False
    """Whether part of the model stays in its region, so that regions exchange less than they train."""
    tolerance: float = 0.3
    """Points of the metric that the plan may give up by its exchange and, for money, by its global batch."""
    method: str | None = None
    """Name of a published rule that chooses the workers (`_published`); None: they are searched."""
    deadline_seconds: float | None = None
    """Seconds from now."""
    budget_usd: float | None = None
    chooses_batch: bool = False
    """Whether the plan chooses the batch; plans are then compared for the same progress."""
    divides_batch: bool = False
    """Whether the workers of a region may divide `batch` among themselves instead of taking as many samples each, where
    the plan chooses how many there are."""
    least_batch: int | None = None
    """Smallest batch that the plan may choose, with which its batch is compared; None: the batch is given."""
    explained: bool = True
    """Whether the plan tells its alternatives."""

    def longest_slice(self, regions: Iterable[Region]) -> float:
        """Return the slice that is asked for, or the longest that the plan may choose in these regions."""
        if self.slice_seconds is not None:
            return self.slice_seconds
        limits = (region.capacity.slice_seconds for region in regions)
        return min(limit for limit in (self.most_slice_seconds, *limits) if limit is not None)


@dataclass(frozen=True)
class PipelineStage:
    """Consecutive layers of a model, held by some of the workers."""

    first: int
    """Layer, counted from 0."""
    last: int
    """Inclusive."""
    memory_mb: int
    needed_mb: float
    """Largest memory that a worker of the stage is expected to need."""
    rematerialise: bool = False
    """Whether the forward pass is computed again before each backward pass."""


@dataclass(frozen=True)
class PipelineShape:
    """How a partition runs a model in pipeline stages. Its workers are numbered stage * degree + replica."""

    stages: tuple[PipelineStage, ...]
    degree: int
    """Replicas of each stage."""
    micro_batch: int
    """Samples."""
    order: str
    """"gpipe" or "1f1b"."""
    step_seconds: float
    """Expected seconds of one step, the merge of gradients included."""
    pace: float = 1.0
    """Ratio of that time to the one that the profile alone predicts, as earlier runs have measured it."""
    activation_codec: str = "fp32"
    """Codec of what stages send each other: "fp32", which changes nothing, or "bf16"."""
    why: tuple[str, ...] = ()
    """Sentences for users: what each stage holds, and why it ends where it does."""


@dataclass(frozen=True)
class PlannedPartition:
    """The part of a plan that runs in one region."""

    region: str
    samples: int
    """Samples of the region's training split."""
    workers: int
    batch: int
    """Samples of one replica of the model in one step: of one worker, but in a pipeline."""
    memory_mb: int
    steps_per_round: int
    """Local steps between two WAN exchanges; see `Demand.balance`."""
    samples_per_second: float
    """Speed of one worker that the estimate was made with; of a pipeline the mean over its workers."""
    divided: int = 1
    """Workers that divide one batch of the job file among themselves: `batch` is the part of each."""
    merge_seconds: float | None = None
    """Seconds that merging one step takes, as a profile of the task predicts it, or as runs have measured it; None: a
    prior is used."""
    merge_usd: float = 0.0
    """USD of the channel's requests that merge one step, as a profile predicts them; 0 without a profile."""
    pipeline: PipelineShape | None = None
    """Stages of the model; None: every worker holds the whole model."""
    shards: tuple[str, ...] = ()
    """Regions whose shards are trained on here, sorted; empty: its own only."""
    clients: int = 0
    """Clients of the region; 0: samples belong to none."""
    clients_per_round: int = 0
    """Clients that train in a step, which is a round of clients."""
    clients_samples: float = 0.0
    """Samples that they are expected to process, which do not depend on the workers; `batch` is a worker's part,
    rounded up."""
    largest_share: float = 1.0
    """Samples of a step that the worker with most of them processes, as a multiple of `batch`: above 1 where workers
    that merge no chunk process more than those that do (FasDL's unequal partition, `merge.ratio`)."""
    devices: int = 0
    """Devices of one worker that are billed."""

    @property
    def replicas(self) -> int:
        """Replicas of the model; each takes `batch` samples in a step."""
        return self.pipeline.degree if self.pipeline else self.workers

    @property
    def step_samples(self) -> float:
        """Samples of all replicas in one step."""
        return self.clients_samples if self.clients else float(self.replicas * self.batch)

    @property
    def most_workers(self) -> int:
        """Workers that can share a step of so many samples, or the clients of a round."""
        return self.clients_per_round if self.clients else self.replicas * self.batch


@dataclass(frozen=True)
class Range:
    """A prediction: the expected value and its bounds."""

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
    """Text for users."""
    times: int
    seconds: float
    """Seconds of all repetitions together."""


@dataclass(frozen=True)
class PlanEstimate:
    """The predicted time, bytes and cost of a plan."""

    seconds: Range
    wan_bytes: Range
    usd: Range
    items: tuple[Cost, ...]
    link_bytes: Mapping[str, int]
    """Expected bytes by directed link, "source>destination"."""
    basis: str
    """Least reliable basis of the time. "measured": earlier runs of the task; "profiled": `geofed profile`;
    "other batch": such runs with another batch; "probed": a few steps of the task; "likened": such steps in another
    region; "stated": the operators' figures; "prior": a guess."""
    model_bytes: int = 0
    """Size of the flat model that the estimate used; 0: in plans of versions without this field."""
    model_basis: str = ""
    """Basis of the size. "measured": an earlier run; "counted": an agent has counted it; "prior": unknown."""
    start_basis: str = ""
    """"measured": earlier runs; "probed": an agent has made the task ready; "prior": a guess."""
    phases: tuple[Phase, ...] = ()
    """The phases whose sum is the expected time, in order."""


@dataclass(frozen=True)
class PlannedCopy:
    """A region's shard that another one processes; it is transferred once, as a whole, before training begins."""

    source: str
    destination: str
    bytes: int
    """Bytes of all splits."""
    seconds: float
    """Expected seconds, over the link as stated."""
    usd: float
    """Expected cost of egress."""


@dataclass(frozen=True)
class Alternative:
    """A plan that was evaluated but not chosen."""

    text: str
    why_not: str
    decision: str = ""
    """What the plan decided instead, "codec ternary"; empty: the plan as a whole."""


@dataclass(frozen=True)
class Learning:
    """What a plan is expected to give up in learning, against the most careful choices that the demand allows."""

    samples_factor: float = 1.0
    """Samples for the same progress with the plan's global batch, as a multiple of those with the smallest one."""
    points: float = 0.0
    """Points of the metric that exchange and global batch give up; rather too many."""
    noise_samples: float = 0.0
    """Gradient noise scale."""
    basis: str = "prior"
    """Basis of the noise scale: "measured" by a profile, or "prior". The points always rest on priors."""
    score: float = 0.0
    """What the plan was chosen by, the smaller the better: the logarithm of money or time, for the same progress where
    that counts, with what is given up."""
    tolerated: bool = True
    """Whether the points that the global batch gives up for money are within the tolerance, too."""


@dataclass(frozen=True)
class Plan:
    """The scheduler's answer to an admissible demand."""

    partitions: tuple[PlannedPartition, ...]
    """Sorted by region."""
    rounds: int
    interval: int
    """Local steps between WAN exchanges of the region that makes the most."""
    collective: str
    """Collective; "auto": each region chooses, by its measurements of its channel."""
    channel: str
    """Channel; "auto": each region's own."""
    wan_policy: str
    codec: str
    topology: str
    """As `Topology.name`: "mesh", "star via HUB", "two-level via HUB, HUB"."""
    slice_seconds: float
    seed: int
    evaluate_every: int
    estimate: PlanEstimate
    residency: dict[str, str]
    """The verdict for each shard, by region; of those that are not used, for the first ones."""
    alternatives: tuple[Alternative, ...] = ()
    evaluation_batch: int = 0
    """Samples that an evaluation takes at a time; 0: as many as a step."""
    wan_settings: dict[str, float] = field(default_factory=dict)
    """Settings of policy and exchange."""
    merging: dict[str, float] = field(default_factory=dict)
    """Settings of the collective."""
    merging_codec: str = "fp32"
    """Codec of what the workers of a region send each other."""
    warnings: tuple[str, ...] = ()
    """Deviations from what was asked for, as sentences."""

    @property
    def background(self) -> bool:
        """Whether training continues while updates travel."""
        return bool(self.wan_settings.get("background"))

    @property
    def shares(self) -> dict[str, float]:
        """Share of each region in the mean of a round, by the round's samples; they add up to 1. A region with clients
        has its share of the data, whichever of them train."""
        samples = {
            part.region: part.samples if part.clients else part.replicas * part.batch * part.steps_per_round
            for part in self.partitions
        }
        total = sum(samples.values())
        return {region: count / total for region, count in samples.items()}

    neighbours: tuple[tuple[str, str], ...] = ()
    """Regions that exchange directly, as sorted pairs; other updates are relayed. Empty: all pairs."""
    exchange_seconds: float = 0.0
    """Expected seconds of one round's exchange: from the end of its compute until every region has every update, coding
    included."""

    copies: tuple[PlannedCopy, ...] = ()
    """Shards that are processed elsewhere, sorted by source; their regions have no partition."""
    isolation: dict[str, str] = field(default_factory=dict)
    """How each region isolates job code; empty for one that has not told."""
    learning: Learning = Learning()
    sent_share: float = 1.0
    """Part of each update that is expected to pass the policy's filter."""
    batches: tuple[int, ...] = ()
    """Batches from which the plan has chosen that of its partitions; empty: the job file states it."""

    @property
    def batch(self) -> int:
        """Samples of one worker in one step, where the job file leaves them to the plan."""
        return self.partitions[0].batch


@dataclass(frozen=True)
class Reason:
    """A reason for which there is no plan."""

    code: str
    """Code of the error catalogue."""
    text: str
    remedy: str
    """What would make the demand admissible."""
    earliest_seconds: float | None = None
    """If the deadline is the reason: the earliest deadline, in seconds from now, that might be possible; infinite: none
    is known."""
    least_usd: float | None = None
    """If the budget is the reason: the least budget that would do."""


@dataclass(frozen=True)
class Declined:
    """The scheduler's answer to a demand that it does not admit."""

    reasons: tuple[Reason, ...]
