"""Input and output of the planner of pipelines. Units are in the names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Literal

Order = Literal["gpipe", "1f1b"]
ORDERS: tuple[Order, ...] = ("gpipe", "1f1b")
MIB = 1 << 20
"""Bytes of a mebibyte."""


@dataclass(frozen=True)
class LinearCost:
    """Seconds by samples: what a micro-batch costs at all, and what each of its samples adds."""

    base_s: float
    sample_s: float

    def seconds(self, samples: float) -> float:
        """Return the seconds of one micro-batch."""
        return self.base_s + self.sample_s * samples


@dataclass(frozen=True)
class Layer:
    """One layer, or a run of layers that is not worth cutting, as measured on a function of speed 1."""

    name: str
    parameter_bytes: int
    activation_bytes: int
    """Bytes per sample that the forward pass keeps for the backward pass."""
    output_bytes: int
    """Per sample; the gradient that comes back is as large."""
    forward: LinearCost
    backward: LinearCost
    update_s: float = 0.0
    """The optimiser's step, once an iteration."""


@dataclass(frozen=True)
class PrefixSums:
    """Sums over the first layers of a chain, by their number: from none to all."""

    parameter_bytes: tuple[int, ...]
    activation_bytes: tuple[int, ...]
    forward: tuple[LinearCost, ...]
    backward: tuple[LinearCost, ...]
    update_s: tuple[float, ...]


@dataclass(frozen=True)
class LayerProfile:
    """A model as a chain of layers."""

    layers: tuple[Layer, ...]
    input_bytes: int
    """Bytes of one sample, as the first layer gets it."""
    state_factor: float = 1.0
    """The optimiser's state, in sizes of the parameters: 0 for plain SGD, 1 with momentum, 2 for Adam."""
    base_mb: float = 200.0
    """Memory of a worker without a layer, and what is left free (FuncPipe leaves 200 MB)."""

    @cached_property
    def sums(self) -> PrefixSums:
        """Prefix sums: the sum over a stage's layers is the difference of two, however many they are."""
        return PrefixSums(
            tuple(accumulate((layer.parameter_bytes for layer in self.layers), initial=0)),
            tuple(accumulate((layer.activation_bytes for layer in self.layers), initial=0)),
            _lines(layer.forward for layer in self.layers),
            _lines(layer.backward for layer in self.layers),
            tuple(accumulate((layer.update_s for layer in self.layers), initial=0.0)),
        )


def _lines(lines: Iterable[LinearCost]) -> tuple[LinearCost, ...]:
    def added(a: LinearCost, b: LinearCost) -> LinearCost:
        return LinearCost(a.base_s + b.base_s, a.sample_s + b.sample_s)

    return tuple(accumulate(lines, added, initial=LinearCost(0.0, 0.0)))


@dataclass(frozen=True)
class FunctionSize:
    """One memory option of a function."""

    memory_mb: int
    speed: float
    """Relative to the function that the profile was measured on."""
    usd_per_gb_second: float
    bandwidth: float = 1.0
    """Bandwidth relative to what the channel gives one function: small functions may get less."""


@dataclass(frozen=True)
class StageChannel:
    """One function's use of the store through which stages exchange tensors."""

    put_s: float
    """Latency of a request."""
    get_s: float
    up_bytes_per_s: float
    down_bytes_per_s: float
    parallel: int = 8
    """Requests of one function that may be in flight at a time, in each direction, while gradients are merged.
    Activations are sent one by one: each lane is one thread."""
    put_usd: float = 0.0
    get_usd: float = 0.0
    request_core_s: float = 0.0
    """Seconds for which a request keeps one of the function's cores busy; it counts where functions share them."""
    byte_core_s: float = 0.0
    """The same, of each byte."""


@dataclass(frozen=True)
class StageRegion:
    """A region that stages may run in."""

    name: str
    sizes: tuple[FunctionSize, ...]
    channel: StageChannel
    cores: float = 0.0
    """Cores that all functions here share; 0: each has its own."""


@dataclass(frozen=True)
class Hop:
    """A directed link between regions, as a cut uses it."""

    latency_s: float
    bytes_per_s: float
    """Rate of the link, which the replicas of a stage share."""
    usd_per_gb: float


@dataclass(frozen=True)
class PipelineProblem:
    """The input of the planner."""

    profile: LayerProfile
    batch: int
    """Samples of one iteration, over all replicas."""
    places: tuple[StageRegion, ...]
    """Places in the order of the data flow: a stage never runs in an earlier place than the one before it. The first
    stage is in the first place, where the data are. A region may occur twice, so that a model can begin and end in
    it."""
    hops: Mapping[tuple[str, str], Hop] = field(default_factory=dict)
    """Hops by (from, to), by name. Where one direction of a pair is missing, no cut crosses it."""
    ends_last: bool = False
    """Whether the last stage must be in the last place, if labels may not leave it."""
    degrees: tuple[int, ...] = (1, 2, 4, 8)
    """Replicas of every stage that are tried; more than `batch` are not."""
    micro_batches: tuple[int, ...] | None = None
    """Samples of one micro-batch that are tried; None: the divisors of a replica's share of the batch."""
    orders: tuple[Order, ...] = ORDERS
    rematerialise: bool = True
    """Whether stages may compute their forward pass again, where they would not fit otherwise."""
    stages: int | None = None
    """Exact number of stages; None: any number."""
    most_workers: int | None = None
    """Stages times replicas; None: any number."""
    sent_share: float = 1.0
    """Share of a layer's output, and of its gradient, that crosses a cut: 0.5 where stages send each other bfloat16."""
    merged_share: float = 1.0
    """The same, of the gradients that replicas merge."""
    merges_early: bool = False
    """Whether gradients leave while the last backward pass of an iteration still runs, the last layers' first, as in
    `sync.pipeline`; False: after it, as in FuncPipe."""
    merges_apart: bool = False
    """Whether the first layers' gradients of a stage, which are complete when that pass ends, are merged as a vector of
    their own, as `sync.pipeline` does over channels whose requests cost nothing. It takes twice the requests."""
    merge_copies: float = 2.0
    """Additional memory of a stage with replicas, in sizes of its gradient: what it sends and what it gets
    (FuncPipe)."""


@dataclass(frozen=True)
class PipelineOptions:
    """What all stages of a pipeline have in common."""

    degree: int
    micro_batch: int
    order: Order

    def micro_batches(self, batch: int) -> int:
        """Return the micro-batches of one replica in one iteration; the last may be smaller, and counts as a whole
        one."""
        share = -(-batch // self.degree)
        return -(-share // self.micro_batch)


@dataclass(frozen=True)
class Cut:
    """The decisions on one stage, without what follows from them."""

    first: int
    last: int
    """Inclusive."""
    place: int
    """Index into the problem's places."""
    size: int
    """Index into the place's sizes."""
    rematerialise: bool = False


@dataclass(frozen=True)
class PlannedStage:
    """Consecutive layers in functions of one size."""

    first: int
    last: int
    """Inclusive."""
    place: str
    memory_mb: int
    rematerialise: bool
    """Whether the forward pass is computed again before the backward pass; only the stage's input is kept until
    then."""
    needed_mb: float
    """Largest memory at any time, a worker's base included."""
    forward_s: float
    """Compute of one micro-batch."""
    backward_s: float
    """The same, with what is computed again."""
    merge_s: float
    """Seconds per iteration to merge the gradients of its replicas, as far as no backward pass hides them."""
    update_s: float
    """The optimiser's step."""
    core_s: float
    """Seconds for which a replica keeps a core busy in an iteration."""


@dataclass(frozen=True)
class PlannedPipeline:
    """One way to run the model, with the time and cost of an iteration."""

    stages: tuple[PlannedStage, ...]
    way: PipelineOptions
    micro_batches: int
    """Micro-batches of one replica in one iteration."""
    seconds: float
    usd: float
    """Functions, requests and bytes between regions of one iteration."""
    function_usd: float
    """The part of it for functions."""

    @property
    def workers(self) -> int:
        """Functions that run at one time."""
        return len(self.stages) * self.way.degree


class NothingFitsError(ValueError):
    """No pipeline fits into the memory; the text names the layer that is too large."""
