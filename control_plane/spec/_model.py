"""Types of the job file. Keys are camelCase in the file; unknown keys are errors.

Docstrings of attributes are the descriptions in the JSON Schema, and in the reference in `docs`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic.alias_generators import to_camel

from control_plane._durations import format_duration
from control_plane.spec._types import BELOW, TRACKING_KINDS, AutoOrCount, Deadline, Duration, Name, OneOf, Workers
from geofed_pb.bounds import MOST_SECRETS, SECRET_NAME
from geofed_pb.errors import GeofedError
from scheduler.topology import topology_kinds
from sync.channel import channel_kinds
from sync.codec import codec_named, codecs
from sync.collective import CollectiveMethod, collective_named, collectives
from sync.policy import DEFAULT, WanPolicy, policies, policy_named
from sync.robust import robust_rules
from sync.secure import FEWEST_REGIONS

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
"""Names of environment variables."""
MOST_KEPT = 100
"""Limit of the models of a job's rounds that the control plane keeps; `train.keep: all` keeps as many."""
LONGEST_SLICE = timedelta(minutes=10)
"""Limit of `function.slice`: workers' tokens are valid for 15 minutes."""


def _policies_with(trait: Callable[[WanPolicy], object]) -> str:
    """Return the names of the policies that have a trait, for an error message."""
    return " or ".join(f"`policy: {name}`" for name in policies() if trait(policy_named(name)))


def _collectives_with(trait: Callable[[CollectiveMethod], object]) -> str:
    """Return the names of the collectives that have a trait, for an error message."""
    return " or ".join(f"`collective: {name}`" for name in collectives(trait))


_GUARD = 100.0
"""Default of `wan.guard`."""


class _Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        alias_generator=to_camel,
        use_attribute_docstrings=True,
    )


class Metadata(_Section):
    """Name and labels of a job."""

    name: Name
    """Name of the job: lower-case letters, digits and hyphens, 63 at most. It need not be unique."""
    labels: dict[str, str] = {}
    """Labels for the user's own purposes; not used for decisions."""


class Task(_Section):
    """The task module, and the configuration that its functions get."""

    module: str
    """Path of the task module, a `.py` file, relative to the job file. The job file's folder is sent as code: 3 MiB
    packed at most, without hidden files, caches and virtual environments."""
    config: dict[str, Any] = {}
    """Passed to the module's functions as a dict."""
    env: dict[str, str] = {}
    """Environment variables of the workers, such as `{TOKENIZERS_PARALLELISM: "false"}`; set before the module is
    loaded, in every region. Everybody who may read the job sees them: nothing secret belongs there."""
    requirements: str | None = None
    """Path of a requirements file in the job file's folder, such as `requirements.txt`: packages that each region
    installs for the job, if its operator allows it. One package on a line, by name; packages that the workers have stay
    at their versions. Default: what the workers have suffices."""
    secrets: list[Annotated[str, Field(pattern=SECRET_NAME)]] = Field(default=[], max_length=MOST_SECRETS)
    """Names of secrets that the regions hold (`secrets` in their files); `geofed.secret(NAME)` reads one. Each region
    of the job must hold them and let its user read them."""

    @field_validator("env")
    @classmethod
    def _are_variables(cls, value: dict[str, str]) -> dict[str, str]:
        for name, text in value.items():
            if not _VARIABLE.fullmatch(name):
                raise ValueError(f"{name!r} is no name of an environment variable: letters, digits and _")
            if "\0" in text:
                raise ValueError(f"the value of {name} holds a null character")
        return value

    @field_validator("requirements")
    @classmethod
    def _is_inside(cls, value: str | None) -> str | None:
        return None if value is None else _path_inside(value, ".txt")

    @field_validator("secrets")
    @classmethod
    def _are_named_once(cls, value: list[str]) -> list[str]:
        if len(set(value)) < len(value):
            raise ValueError("a name is listed twice")
        return value

    @field_validator("module")
    @classmethod
    def _stays_inside(cls, value: str) -> str:
        return _path_inside(value, ".py")

    @field_validator("config")
    @classmethod
    def _is_plain(cls, value: dict[str, Any]) -> dict[str, Any]:
        for number in _numbers(value):
            if not math.isfinite(number):
                raise ValueError("numbers must be finite")
        return value


class Data(_Section):
    """The dataset to train on, and where its raw data may be processed."""

    dataset: str = Field(min_length=1)
    """Name of the dataset in the region files."""
    residency: Literal["region", "cloud", "anywhere"] | list[str] = "region"
    """Where raw data may be processed, if their owner allows it, too. `region`: only in their own region. `cloud`: in
    regions of the same cloud. `anywhere`: in all regions. A list: in the named regions. Shards are moved only if
    necessary, or to save at least a tenth (docs/placement.md)."""


class GoodEnough(_Section):
    """Value of a metric at which a job ends early."""

    metric: str = Field(min_length=1)
    """A metric that the task's `metrics` returns; `loss` if the task has no `metrics`."""
    at_least: float | None = None
    """The goal is reached once the metric is at least this."""
    at_most: float | None = None
    """The goal is reached once the metric is at most this."""

    @model_validator(mode="after")
    def _exactly_one(self) -> GoodEnough:
        if (self.at_least is None) == (self.at_most is None):
            raise ValueError("give exactly one of `atLeast` and `atMost`")
        return self


class End(_Section):
    """When a job ends: after a number of epochs or steps, or earlier at a goal."""

    epochs: float | None = Field(default=None, gt=0)
    """Number of passes over the data. Give either `epochs` or `steps`."""
    steps: int | None = Field(default=None, ge=1, lt=BELOW)
    """Number of steps of the region with the most steps."""
    goal: GoodEnough | None = None
    """The job ends early once a metric, as a mean over all regions' test samples, reaches this bound. `epochs` or
    `steps` is then the maximum, on which plans and promises are based. It is checked after each evaluation, so
    `train.evaluateEvery` must be set. The regions' last evaluations are combined if they are at most one evaluation,
    or 16 rounds, apart."""
    patience: int | None = Field(default=None, ge=1, lt=BELOW)
    """The job ends early after this many evaluations without an improvement of `train.best.metric`; requires
    `train.evaluateEvery`. Its result is the model of the end; `train.keep: best` keeps the best one, too."""
    time: Duration | None = None
    """The job ends early, with its current model, once it has trained this long."""

    @model_validator(mode="after")
    def _exactly_one(self) -> End:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("give exactly one of `epochs` and `steps`")
        return self


class LearningRate(_Section):
    """Schedule of the learning rate over the job's planned steps, as a factor of the optimiser's rate."""

    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Decay after the warm-up, to `floor` at the end. `linear`: linearly. `cosine`: along half a cosine. `constant`:
    not at all."""
    warmup: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Fraction of the steps over which the rate rises from 0."""
    floor: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Final rate, as a fraction of the optimiser's rate."""
    begin: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Where the schedule begins, as a fraction of its length; with `train.initialModel`, to continue another job's
    schedule."""


class Best(_Section):
    """What makes a model better than another one."""

    metric: str = Field(min_length=1)
    """A metric that the task's `metrics` returns; `loss` if the task has no `metrics`. It is the mean over all regions'
    test samples."""
    mode: Literal["min", "max"]
    """Whether the lowest or the highest value is the best."""


class StartsFrom(_Section):
    """What a job starts from: the model of an earlier job, or a file with weights."""

    job: str | None = Field(default=None, min_length=1)
    """ID of an ended job that the user may read, or its name if it is unique. Of replanned jobs the last successor
    counts. Either `job` or `file` is given."""
    round: Annotated[int, Field(ge=1, lt=BELOW)] | Literal["best"] | None = None
    """Which of its models: that of a kept round (`train.keep`), or the best one by its `train.best`. Default: the final
    one or, of a job that has not succeeded, that of its last kept round."""
    file: str | None = Field(default=None, min_length=1)
    """Path of a safetensors file with pretrained weights, relative to the job file, of 64 GiB at most. It is uploaded
    once, and is not sent as code. What is submitted has only its name and digest."""
    digest: str | None = Field(default=None, pattern=r"^sha256:[0-9a-f]{64}$")
    """Digest that the file must have. Default: that of the file as it is."""
    partial: bool = False
    """Whether the file may lack tensors of the model, which keep the task's own first values, and have others, which
    are ignored. Otherwise both are refused."""

    @model_validator(mode="after")
    def _is_one(self) -> StartsFrom:
        if (self.job is None) == (self.file is None):
            raise ValueError("give exactly one of `job` and `file`")
        if self.file is None and (self.digest is not None or self.partial):
            raise ValueError("`digest` and `partial` are for a `file`; a job's model is whole")
        if self.file is not None and self.round is not None:
            raise ValueError("`round` is for a `job`; a file holds one model")
        return self


class Train(_Section):
    """How workers train: batch, learning rate, seed, number of workers and evaluation."""

    batch: int = Field(ge=1, lt=BELOW)
    """Number of samples of one worker in one step; with a pipeline, of one replica. If a region's step is larger than
    its shard, the plan shows the real number of epochs."""
    learning_rate: LearningRate | None = None
    """Schedule of the optimiser's learning rate over the job's planned steps. Default: the optimiser's own rate,
    constant."""
    clip_norm: float | None = Field(default=None, gt=0, lt=float("inf"))
    """Largest Euclidean norm of a step's gradient, merged over the region's workers; a longer one is scaled down to it.
    Not with pipelines, whose stages do not know each other's gradients. Default: any."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Precision in which `loss` and `metrics` compute matrix products and convolutions, by torch's autocast.
    Parameters, gradients and what is exchanged keep their types. `fp16`: the loss is scaled, and steps whose
    gradients overflow are left out in all workers. Not with pipelines (docs/job-file.md#precision-and-accumulation)."""
    accumulate: int = Field(default=1, ge=1, lt=BELOW)
    """Number of parts that a worker divides its `batch` into. Their gradients are added up before the merge and the
    optimiser's step, so that the activations of one part are in memory at a time. Not with pipelines, which have
    micro-batches."""
    local: list[Annotated[str, Field(min_length=1, max_length=200)]] = Field(default_factory=list, max_length=64)
    """Tensors of the model that stay in their region, such as `["*.bn.*", "head.*"]`: patterns of the names in its
    `state_dict()`. Each region trains its own, and `geofed export --region` writes a region's own model. Not
    with pipelines (docs/personal.md)."""
    initial_model: StartsFrom | None = None
    """Model that all regions start from: an earlier job's, or a file's. Its tensors must have the names and shapes of
    the task's (docs/planning.md#starting-from-a-model). Default: the task's own model."""
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    """Seed of the model, of the order of samples, and of all randomness in steps."""
    workers: Workers = "auto"
    """Number of workers in each region, or by region, like `{frankfurt: 4, shanghai: 2}`; unknown regions are refused.
    `auto`: as many as let all regions end a round together, at the speed that costs least within the deadline, or is
    fastest within the budget (docs/planning.md)."""
    scaling: Literal["fixed", "tuned", "mlless"] = "fixed"
    """`fixed`: the global batch of a region's step stays constant, however many workers share it. `tuned`: each worker
    keeps its `batch`, and the number of workers is changed while the job trains, so that it reaches `train.end.goal`
    at the least cost or, with `objective.minimise: time`, in hardly more time than with all workers. `mlless`: workers
    are removed by MLLess's rule. With the last two the goal must be an `atMost`, and `train.workers` is the maximum and
    the initial number; `auto` is then as many as make the epochs fastest, beginning with as many as are certain to pay.
    They cannot be used with pipelines or with exchange in the background (docs/scaling.md#in-a-job)."""
    end: End
    """When the job ends."""
    balance: Literal["data", "speed"] = "data"
    """What a region's number of steps in a round is proportional to. `data`: all regions make equally many epochs.
    `speed`: rounds take equally long in all regions, so that none waits. The total number of samples is then the same,
    fast regions process more of them, and regions are weighted by their samples. Speeds are those known when the job is
    planned; the plan shows each region's epochs."""
    eval_batch: int | None = Field(default=None, ge=1, lt=BELOW)
    """Batch of an evaluation; a larger one is faster, and needs more memory. Default: `train.batch`, which the worker's
    memory is chosen for."""
    evaluate_every: int = Field(default=0, ge=0, lt=BELOW)
    """Number of rounds between evaluations; 0: only at the end."""
    keep: Literal["last", "best", "all"] | Annotated[int, Field(ge=1, le=MOST_KEPT)] = "last"
    """Which models of evaluated rounds stay at the control plane, whatever becomes of the job. `last`: that of the last
    one. `best`: the best one by `best`. A number: the last ones. `all`: the last 100. The final model is kept in any
    case. With `last`, it replaces that of the last evaluated round (docs/planning.md#models-of-rounds)."""
    best: Best | None = None
    """What makes a model the best one, for `keep`, `end.patience` and `export --round best`. Default: the metric of
    `end.goal`, else the lowest `loss`."""

    @property
    def compared(self) -> Best:
        """What makes a model the best one, with the default."""
        goal = self.end.goal
        if self.best is not None or goal is None:
            return self.best or Best(metric="loss", mode="min")
        return Best(metric=goal.metric, mode="max" if goal.at_least is not None else "min")

    @model_validator(mode="after")
    def _accumulates_samples(self) -> Train:
        if self.accumulate > self.batch:
            raise ValueError(f"`accumulate: {self.accumulate}` is more than the `batch` of {self.batch} samples")
        return self

    @model_validator(mode="after")
    def _measures_what_it_keeps(self) -> Train:
        if self.keep != "last" and not self.evaluate_every:
            raise ValueError("`keep` requires `evaluateEvery`, since models of evaluated rounds are kept")
        if self.end.patience is not None and not self.evaluate_every:
            raise ValueError("`end.patience` requires `evaluateEvery`, since it counts evaluations")
        return self

    @model_validator(mode="after")
    def _measures_the_goal(self) -> Train:
        if self.end.goal is not None and not self.evaluate_every:
            raise ValueError("`end.goal` requires `evaluateEvery`, since it is checked after each evaluation")
        return self

    @model_validator(mode="after")
    def _has_a_loss_to_reach(self) -> Train:
        if self.scaling != "fixed" and (self.end.goal is None or self.end.goal.at_most is None):
            raise ValueError(f"`scaling: {self.scaling}` requires a loss to reach: an `end.goal` with `atMost`")
        return self


class Clients(_Section):
    """Federated averaging over the clients that regions hold (docs/clients.md): a step of a region is a round of its
    clients. Each sampled client starts from the region's model, and makes local steps of `train.batch` samples; the
    mean of their changes, weighted by samples, is the change of the round."""

    fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Part of a region's clients that train in a round, rounded up; drawn anew in each round by `train.seed`."""
    min: Annotated[int, Field(ge=1, lt=BELOW)] = 1
    """Fewest clients of a region in a round; all, if it has no more."""
    epochs: Annotated[int, Field(ge=1, lt=BELOW)] | None = None
    """Passes of a client over its samples in a round. Default: 1, without `steps`."""
    steps: Annotated[int, Field(ge=1, lt=BELOW)] | None = None
    """Local steps of a client in a round, in place of `epochs`."""

    @model_validator(mode="after")
    def _either(self) -> Clients:
        if self.epochs is not None and self.steps is not None:
            raise ValueError("give either `epochs` or `steps`")
        return self


def _with_other_spelling(schema: dict[str, Any]) -> None:
    """Accept `objective.minimize` in the JSON Schema, too."""
    minimise = schema["properties"].pop("minimise")
    minimize = {**minimise, "description": "Other spelling of `minimise`."}
    schema["properties"] = {"minimise": minimise, "minimize": minimize, **schema["properties"]}


class SoftDeadline(_Section):
    """A later deadline of less value."""

    deadline: Deadline
    """A deadline later than the one before it."""
    value: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Value of this deadline relative to that of `objective.deadline`. If not all promises can be kept, those of least
    value are late."""


class Objective(_Section):
    """What the plan minimises, and the deadlines and the budget that limit it."""

    model_config = ConfigDict(json_schema_extra=_with_other_spelling)

    minimise: Literal["cost", "time"] = "cost"
    """What the plan minimises: money for the same progress, or the time of the samples that are asked for."""
    tolerance: float = Field(default=0.3, ge=0, le=100)
    """Points of the metric that the plan may give up: by the exchange between regions, against float32 every 20 steps
    (in a short job 20 times); and, to save money, by a larger global batch, if the number of epochs is fixed. What the
    plan expects to give up is part of it."""
    method: Literal["auto", "load-power", "fasdl", "greedy"] = "auto"
    """What chooses the workers: a search, or for comparison a published rule
    ([planning.md](planning.md#published-rules)). Such a job's workers are not changed while it runs."""
    deadline: Deadline | None = None
    """Duration from the submission, `3650d` at most, or time with a time zone. The job is declined if it cannot be
    promised."""
    soft: list[SoftDeadline] = []
    """Later acceptable deadlines, each of less value than the one before. The first one that can be promised is; if
    none can, the job is admitted without a promise instead of being declined."""
    budget: float | None = Field(default=None, gt=0)
    """Limit of the cost, in USD. A plan that would exceed it is declined. A job that costs more than planned ends early
    with its current model before the round that the budget does not suffice for, so that it exceeds the budget by one
    round's cost at most."""

    @model_validator(mode="before")
    @classmethod
    def _normalise_spelling(cls, given: Any) -> Any:
        if not isinstance(given, dict) or "minimize" not in given:
            return given
        if "minimise" in given:
            raise ValueError("give only one of `minimise` and `minimize`")
        return {"minimise" if key == "minimize" else key: value for key, value in given.items()}

    @model_validator(mode="after")
    def _softens(self) -> Objective:
        if self.soft and self.deadline is None:
            raise ValueError("`soft` requires a `deadline`")
        values = [1.0, *(step.value for step in self.soft)]
        if any(later >= sooner for sooner, later in pairwise(values)):
            raise ValueError("the values of `soft` must decrease, beginning below 1")
        return self


class Regions(_Section):
    """Which regions a job uses, and when it is replanned to use others."""

    use: list[Name] = []
    """Names of the regions to use; with a wider `data.residency` also regions without data. Empty: all that have
    data."""
    avoid: list[Name] = []
    """Names of regions not to use, connected or not. Unknown ones are refused, so that a typing error does not disable
    the rule."""
    replan: Literal["asked", "auto"] = "asked"
    """When the job is replanned to use regions that join while it runs. `asked`: on request only (`geofed replan`).
    `auto`: also automatically if that pays (docs/planning.md#a-region-that-comes-later)."""


class Wan(_Section):
    """How the regions exchange updates over the WAN."""

    policy: Annotated[str, OneOf("auto", *policies())] = "auto"
    """WAN policy (docs/wan.md#policies-wanpolicy). `ma`: the regions' models are averaged, weighted by samples, after
    each round. `diloco`: the same, with an outer optimiser. `bsp`: the exact mean after every step. `asgd`, `asgd-ga`:
    each region applies the steps of all regions. `asp`: the same with Gaia's significance filter. `fedprox`: `ma`, and
    a proximal term in the workers. `fednova`: `ma` for regions with different numbers of local steps. `fedavgm`,
    `fedadagrad`, `fedadam`, `fedyogi`: server optimisers over the mean change. `auto`: `ma`."""
    outer: dict[str, float] | None = None
    """Settings of the policy. `diloco`: those of its outer optimiser, `lr` (default: 0.7) and `momentum` (default:
    0.9). `fedprox`: `mu` (0.01). `fedavgm`: `lr` (1) and `momentum` (0.9). `fedadam`, `fedyogi`, `fedadagrad`: `lr`
    (0.01), `beta1` (0.9), `beta2` (0.99; not `fedadagrad`) and `tau` (0.001)."""
    exchange: Literal["auto", "synchronous", "background"] = "auto"
    """`synchronous`: a round ends when the updates of all regions have arrived. `background`: training continues during
    the exchange. `auto`: what `objective` is better with; always background with `quorum`, `grace` or `staleness`,
    which have no effect otherwise."""
    interval: AutoOrCount = "auto"
    """Number of local steps in a round, of the region with the most steps. A plan has shorter rounds, and says so, if
    this one would change the number of steps by more than 2 %. `auto`: what `objective` is best with; longer than 20,
    or in a short job a twentieth of it, only within `objective.tolerance`."""
    codec: Annotated[str, OneOf("auto", *codecs())] = "auto"
    """Codec of updates (docs/wan.md#codecs-wancodec); the residual of a lossy one is added to the next update. `auto`:
    what `objective` is best with among `fp32`, `int8`, `ternary` and `topk`, within `objective.tolerance`; in the
    background more lossy ones while links are slower than planned."""
    topology: Annotated[str, OneOf("auto", *topology_kinds())] = "auto"
    """Which regions exchange directly; updates of others are relayed (docs/wan.md#topology-wantopology). `auto`: what
    `objective` is best with, by the regions' links."""
    fragments: Annotated[int, Field(ge=1, le=1024)] = 1
    """Number of parts of the model; one of them is sent in each round, in turn."""
    quorum: Annotated[int, Field(ge=1, lt=BELOW)] | None = None
    """Number of regions, including the own one, whose new updates a merge in the background waits for within `grace`.
    Default: all that keep up, each with the same round; `asgd`, `asgd-ga` and `asp` merge the updates that have
    arrived."""
    grace: Duration | None = None
    """How long a merge waits for its quorum. Default: not at all."""
    lead: Annotated[int, Field(ge=0, lt=BELOW)] | None = None
    """Number of rounds that a region may be ahead of the slowest one that keeps up, with a `quorum` or a policy that
    merges the updates that have arrived. 0: unlimited. Default: 8."""
    staleness: Literal["none", "damping", "compensation"] = "none"
    """Treatment of late updates. `damping`: they count less. `compensation`: they are corrected as in DC-ASGD."""
    significance: Annotated[float, Field(gt=0, le=1)] | None = None
    """For `asp`: relative change below which a coordinate is not sent yet. Default: 0.01."""
    guard: Annotated[float, Field(ge=0)] = _GUARD
    """An update is refused if its norm exceeds its region's usual norm by more than this factor; 0: never."""
    robust: Annotated[str, OneOf("none", *robust_rules())] = "none"
    """Rule that replaces the mean of the regions' changes, so that a minority of wrong updates cannot lead the model
    (docs/wan.md#robust-aggregation-wanrobust). With synchronous exchange and a policy that averages."""
    byzantine: AutoOrCount = "auto"
    """For `robust`: number of regions whose updates may be arbitrarily wrong. `auto`: as many as the rule withstands
    with the job's regions."""

    @model_validator(mode="after")
    def _fits_together(self) -> Wan:
        if self.outer is not None:
            self._check_settings(self.outer)
        if self.traits.every_step and self.interval not in ("auto", 1):
            raise ValueError(f"`policy: {self.policy}` exchanges after every step: omit `interval`")
        if self.traits.synchronous and self.exchange == "background":
            raise ValueError(f"`policy: {self.policy}` is synchronous")
        if self.significance is not None and not self.traits.significance:
            raise ValueError(f"`significance` requires {_policies_with(lambda policy: policy.significance)}")
        if self.waits:
            late = {"quorum": self.quorum, "grace": self.grace, "lead": self.lead, "staleness": self.staleness}
            if odd := [name for name, value in late.items() if value not in (None, "none")]:
                raise ValueError(f"`{odd[0]}` requires `exchange: background`")
        if self.robust != "none":
            if self.exchange == "background" or self.traits.on_arrival:
                raise ValueError("`robust` requires synchronous exchange, and a policy that averages")
            if self.traits.normalises:
                raise ValueError(f"`robust` cannot be used with `policy: {self.policy}`, which needs each change")
        elif self.byzantine != "auto":
            raise ValueError("`byzantine` requires `robust`")
        if self.lead is not None and self.quorum is None and not self.traits.on_arrival:
            raise ValueError("`lead` requires `quorum`: without one a region is never more than a round ahead")
        return self

    @property
    def waits(self) -> bool:
        """Whether the job file demands synchronous exchange."""
        return self.exchange == "synchronous" or self.traits.synchronous or self.robust != "none"

    @property
    def traits(self) -> WanPolicy:
        """Properties of the policy."""
        return policy_named(DEFAULT if self.policy == "auto" else self.policy)

    def _check_settings(self, given: dict[str, float]) -> None:
        if not self.traits.settings:
            raise ValueError(f"`outer` requires {_policies_with(lambda policy: policy.settings)}")
        if unknown := sorted(set(given) - set(self.traits.settings)):
            raise ValueError(f"unknown key `{unknown[0]}` in wan.outer; valid keys: {', '.join(self.traits.settings)}")
        try:
            self.traits.make(**{**self.traits.settings, **given})
        except GeofedError as error:
            raise ValueError(error.message) from None


class Differential(_Section):
    """Differential privacy (docs/privacy.md): a bound of what a single region's data, or a single sample, can change in
    what leaves its region."""

    level: Literal["region", "sample"]
    """What is protected. `region`: all data of a region; its update is clipped and has noise. `sample`: each sample; so
    has the sum of the gradients of each step (DP-SGD)."""
    epsilon: Annotated[float, Field(gt=0, le=1000)] | None = None
    """Bound of the whole job, from which the plan computes the noise. Give this or `noiseMultiplier`."""
    noise_multiplier: Annotated[float, Field(ge=1e-3, le=1e6)] | None = None
    """Standard deviation of the noise as a multiple of `clipNorm`."""
    delta: Annotated[float, Field(gt=0, lt=1)]
    """Probability with which epsilon may not hold; less than one by the number of samples."""
    clip_norm: Annotated[float, Field(gt=0, le=1e6)]
    """Largest Euclidean norm of a region's update, or of a sample's gradient; what is larger is scaled down to it."""

    @model_validator(mode="after")
    def _exactly_one(self) -> Differential:
        if (self.epsilon is None) == (self.noise_multiplier is None):
            raise ValueError("give exactly one of `epsilon` and `noiseMultiplier`")
        return self


class Privacy(_Section):
    """What other regions, and those who run the federation, learn of a region's updates."""

    secure_aggregation: bool = False
    """Whether updates are masked, so that only their sum over all regions can be read (docs/privacy.md). With
    synchronous exchange, and a policy that needs no more than the mean of the changes."""
    min_regions: Annotated[int, Field(ge=FEWEST_REGIONS, lt=BELOW)] = FEWEST_REGIONS
    """For `secureAggregation`: fewest regions of which a sum may be readable; with fewer the job is declined."""
    differential: Differential | None = None
    """Noise, so that what leaves a region tells little of a single sample or region. With synchronous exchange, and a
    policy that needs no more than the mean of the changes. Default: none."""

    @model_validator(mode="after")
    def _is_used(self) -> Privacy:
        if self.min_regions != FEWEST_REGIONS and not self.secure_aggregation:
            raise ValueError("`minRegions` requires `secureAggregation: true`")
        return self


class PipelineStages(_Section):
    """How a model is cut into pipeline stages."""

    stages: AutoOrCount = "auto"
    """Number of stages that the model's layers are divided into; the plan chooses where. `auto`: the plan chooses the
    number, too."""
    activations: Literal["auto", "fp32", "bf16"] = "auto"
    """Precision in which stages exchange activations and their gradients. `auto`: `bf16` if that makes a step at least
    5 % shorter, or cheaper if the job minimises cost; else `fp32`."""


class Parallelism(_Section):
    """Whether each worker holds the whole model, or the model is divided among several workers."""

    pipeline: PipelineStages = Field(default_factory=PipelineStages)
    """Each worker holds a stage of consecutive layers, and sends activations to the next (docs/pipelines.md)."""


def _merge_codecs() -> tuple[str, ...]:
    """Return the codecs that any collective takes."""
    return tuple(dict.fromkeys(codec for name in collectives() for codec in collective_named(name).codecs))


class Merge(_Section):
    """Settings of the collective."""

    codec: Annotated[str, OneOf(*_merge_codecs())] = "fp32"
    """Codec between workers, in both directions; the residual of a lossy one is added to the next step. `fp8` and
    `int4` omit zeros if that is smaller, for sparse models. `int8` cannot be used with `isp`. Others than `fp32`
    require an explicit `collective` other than `server-reduce`."""
    staleness: Annotated[int, Field(ge=0, le=8)] = 0
    """For `k-reduce`: workers that merge no part continue with the mean from this many steps before (FasDL: 1)."""
    significance: Annotated[float, Field(ge=0)] | None = None
    """For `isp`: v in the filter abs(change / weight) > v / sqrt(step + 1), step = 0, 1, ... Default: 0.7."""


class Function(_Section):
    """Memory and time slice of the worker function."""

    memory_mb: AutoOrCount = "auto"
    """Memory of a worker, in MB. `auto`: the cheapest sufficient size by a profile (docs/tuning.md), else 1024."""
    slice: Duration = timedelta(seconds=30)
    """An invocation ends at the first step boundary after this time, and the next one continues; `10m` at most, since
    workers' tokens are valid for 15 minutes. An invocation that has not answered 120 s later is ended and called again;
    the third in a row fails the job: a step must not take longer."""

    @field_validator("slice")
    @classmethod
    def _within_a_tokens_life(cls, value: timedelta) -> timedelta:
        if not timedelta(0) < value <= LONGEST_SLICE:
            raise ValueError(f"give a duration of at most {format_duration(LONGEST_SLICE)}")
        return value


class Limits(_Section):
    """Limits of what a job waits for."""

    lost_region: Duration = timedelta(minutes=10)
    """How long the job waits for a lost region before it fails. Meanwhile the other regions pay for their parameter
    servers only, once their workers' slices are over; in the background they train on as far as they can."""


class JobSpec(_Section):
    """One training job."""

    api_version: Literal["geofed/v1"]
    """Version of the file's format."""
    kind: Literal["TrainingJob"]
    """Kind of the file."""
    metadata: Metadata
    task: Task
    data: Data
    train: Train
    clients: Clients | None = None
    """Samples belong to clients of the regions, which train one by one. `train.end.steps` and `wan.interval` then count
    rounds of clients; the interval is 1 by default. Default: samples belong to no clients."""
    objective: Objective = Field(default_factory=Objective)
    regions: Regions = Field(default_factory=Regions)
    collective: Annotated[str, OneOf("auto", *collectives())] = "auto"
    """How the workers of a region merge: `server-reduce` at its parameter server, the others among themselves
    (docs/collectives.md). `auto`: each region uses the fastest one by the measured constants of its channel, in shared
    memory `server-reduce`; for a profiled task, the choice of its profiles if all regions agree."""
    parallelism: Literal["auto", "data"] | Parallelism = "auto"
    """`data`: each worker holds the whole model. `pipeline`: each worker holds a stage of its layers. `auto`: a
    pipeline if, by a profile (docs/tuning.md), the model does not fit into a function's memory, else `data`."""
    k: AutoOrCount = "auto"
    """For `k-reduce` and `isp`: number of workers that merge a part each; limited to the number of workers."""
    channel: Annotated[str, OneOf("auto", *channel_kinds())] = "auto"
    """Store through which the workers of a region exchange tensors (docs/channels.md). `auto`: the region's own.
    Regions with another one are not used."""
    merge: Merge = Field(default_factory=Merge)
    wan: Wan = Field(default_factory=Wan)
    privacy: Privacy = Field(default_factory=Privacy)
    function: Function = Field(default_factory=Function)
    limits: Limits = Field(default_factory=Limits)
    tracking: Literal["all"] | list[Annotated[str, OneOf(*TRACKING_KINDS)]] = "all"
    """Kinds of places that the job's metrics are written to, of those that the control plane has (`serve --track`;
    docs/tracking.md). `[]`: none."""

    @model_validator(mode="after")
    def _scales(self) -> JobSpec:
        if self.train.scaling == "fixed":
            return self
        key = f"`train.scaling: {self.train.scaling}`"
        if self.objective.method != "auto":
            raise ValueError(f"{key} chooses workers while the job runs, and `objective.method` before: give only one")
        if isinstance(self.parallelism, Parallelism):
            raise ValueError(f"{key} cannot be used with a pipeline, whose stages all need a worker")
        if self.wan.exchange == "background" or self.wan.traits.on_arrival:
            raise ValueError(
                f"{key} requires `wan.exchange: synchronous` and the policy `ma`, `diloco` or `bsp`: its batch "
                "changes between two rounds, which overlap in the background"
            )
        return self

    @model_validator(mode="after")
    def _fits_together(self) -> JobSpec:
        if self.train.balance == "speed" and (self.wan.traits.every_step or self.wan.interval == 1):
            raise ValueError("`train.balance: speed` requires rounds of several steps")
        if self.objective.method != "auto" and (isinstance(self.parallelism, Parallelism) or self.clients is not None):
            raise ValueError("`objective.method` knows neither pipelines nor `clients`: set it to `auto`")
        if isinstance(self.parallelism, Parallelism) and (keys := self.keys_without_pipeline):
            raise ValueError(f"{keys[0]} cannot be used with a pipeline, whose stages hold parts of model and gradient")
        self._merges_together()
        return self

    @model_validator(mode="after")
    def _can_be_summed(self) -> JobSpec:
        if not self.privacy.secure_aggregation:
            return self
        wan, key = self.wan, "`privacy.secureAggregation` cannot be used with"
        codecs_known = ", ".join(name for name in codecs() if codec_named(name).masked)
        refused = (
            (not wan.traits.sums, f"`wan.policy: {wan.policy}`, which needs each region's update"),
            (wan.exchange == "background", "`wan.exchange: background`: a sum holds the same round of all regions"),
            (wan.quorum is not None, "`wan.quorum`: a sum holds the updates of all regions"),
            (bool(wan.grace), "`wan.grace`: a sum holds the updates of all regions"),
            (wan.lead is not None, "`wan.lead`: a sum holds the same round of all regions"),
            (wan.staleness != "none", f"`wan.staleness: {wan.staleness}`, which looks at each update"),
            (wan.robust != "none", f"`wan.robust: {wan.robust}`, which looks at each update"),
            (wan.guard not in (0, _GUARD), "`wan.guard`, which looks at each update"),
            (wan.fragments > 1, "`wan.fragments`"),
            (
                wan.codec != "auto" and not codec_named(wan.codec).masked,
                f"`wan.codec: {wan.codec}`: what it sends tells which coordinates change; use {codecs_known}",
            ),
            (self.train.scaling != "fixed", f"`train.scaling: {self.train.scaling}`: regions' weights must be fixed"),
            (
                bool(self.regions.use) and len(set(self.regions.use)) < self.privacy.min_regions,
                f"{len(set(self.regions.use))} regions in `regions.use`: `privacy.minRegions` is "
                f"{self.privacy.min_regions}",
            ),
        )
        for is_refused, text in refused:
            if is_refused:
                raise ValueError(f"{key} {text}")
        return self

    @model_validator(mode="after")
    def _can_be_private(self) -> JobSpec:
        wanted = self.privacy.differential
        if wanted is None:
            return self
        wan, merge, key = self.wan, self.merge, "`privacy.differential` cannot be used with"
        method = None if self.collective == "auto" else collective_named(self.collective)
        refused = (
            (not wan.traits.sums, f"`wan.policy: {wan.policy}`, which gives out changes under way"),
            (wan.exchange == "background", "`wan.exchange: background`: workers go on from a model without noise"),
            (wan.quorum is not None, "`wan.quorum`, which is for exchange in the background"),
            (wan.lead is not None, "`wan.lead`, which is for exchange in the background"),
            (bool(wan.grace), "`wan.grace`, which is for exchange in the background"),
            (wan.staleness != "none", f"`wan.staleness: {wan.staleness}`, which is for exchange in the background"),
            (self.train.scaling != "fixed", f"`train.scaling: {self.train.scaling}`: what is released must be planned"),
            (isinstance(self.parallelism, Parallelism), "a pipeline"),
            (
                self.data.residency != "region",
                "`data.residency` other than `region`: only the data's own region accounts for them",
            ),
            (
                self.privacy.secure_aggregation and wan.codec not in ("auto", "fp32"),
                f"`secureAggregation` and `wan.codec: {wan.codec}`, whose rounding would add to the noise; use fp32",
            ),
        )
        of_samples = (
            (self.train.precision != "fp32", f"`train.precision: {self.train.precision}`"),
            (merge.codec != "fp32", f"`merge.codec: {merge.codec}`"),
            (bool(merge.staleness), "`merge.staleness`"),
            (method is not None and method.shares != "mean", f"`collective: {self.collective}`"),
        )
        for is_refused, text in refused:
            if is_refused:
                raise ValueError(f"{key} {text}")
        for is_refused, text in of_samples if wanted.level == "sample" else ():
            if is_refused:
                raise ValueError(f"`privacy.differential.level: sample` cannot be used with {text}")
        return self

    @model_validator(mode="after")
    def _has_clients(self) -> JobSpec:
        if self.clients is None:
            return self
        train, wan, differential = self.train, self.wan, self.privacy.differential
        method = None if self.collective == "auto" else collective_named(self.collective)
        refused = (
            (isinstance(self.parallelism, Parallelism), "a pipeline, whose stages share every step"),
            (train.precision == "fp16", "`train.precision: fp16`, whose scale is of one optimiser; use bf16"),
            (train.scaling != "fixed", f"`train.scaling: {train.scaling}`, which changes the batch of a step"),
            (train.balance != "data", "`train.balance: speed`: all regions make the same rounds of clients"),
            (
                method is not None and method.shares != "mean",
                f"`collective: {self.collective}`, which sends parts of each step's change",
            ),
            (bool(self.merge.staleness), "`merge.staleness`: clients start from the region's present model"),
            (wan.exchange == "background", "`wan.exchange: background`: clients start from the federation's model"),
            (wan.quorum is not None, "`wan.quorum`, which is for exchange in the background"),
            (bool(wan.grace), "`wan.grace`, which is for exchange in the background"),
            (wan.staleness != "none", f"`wan.staleness: {wan.staleness}`, which is for exchange in the background"),
            (wan.traits.on_arrival, f"`wan.policy: {wan.policy}`, which merges updates as they arrive"),
            (wan.traits.normalises, f"`wan.policy: {wan.policy}`: all regions make the same rounds of clients"),
            (
                differential is not None and differential.level == "sample",
                "`privacy.differential.level: sample`; `region` hides all clients of a region",
            ),
        )
        for is_refused, text in refused:
            if is_refused:
                raise ValueError(f"`clients` cannot be used with {text}")
        return self

    @property
    def keys_without_pipeline(self) -> list[str]:
        """Settings of this job that cannot be used with a pipeline, as text for users."""
        return [
            key
            for key, used in (
                ("`train.clipNorm`", self.train.clip_norm is not None),
                (f"`train.precision: {self.train.precision}`", self.train.precision != "fp32"),
                ("`train.accumulate`", self.train.accumulate > 1),
                ("`train.local`", bool(self.train.local)),
                (f"`wan.policy: {self.wan.policy}`", bool(self.wan.traits.proximal)),
            )
            if used
        ]

    def _lets_overflows_through(self, method: CollectiveMethod | None) -> None:
        """Raise ``ValueError`` for a setting with which workers would not all see an overflow in one of them."""
        if self.train.precision != "fp16":
            return
        if self.merge.codec != "fp32":
            text = f"`train.precision: fp16` cannot be used with `merge.codec: {self.merge.codec}`"
            raise ValueError(f"{text}; use `precision: bf16`")
        if self.merge.staleness or (method is not None and method.shares == "changes"):
            key = "merge.staleness" if self.merge.staleness else f"collective: {self.collective}"
            raise ValueError(f"`train.precision: fp16` cannot be used with `{key}`; use `precision: bf16`")

    def _merges_together(self) -> None:
        """Raise ``ValueError`` for a setting of the collective that it does not take."""
        method = None if self.collective == "auto" else collective_named(self.collective)
        self._lets_overflows_through(method)
        if self.k != "auto" and not (method and method.takes_k):
            raise ValueError(f"`k` requires {_collectives_with(lambda one: one.takes_k)}")
        if self.merge.staleness and not (method and method.takes_staleness):
            raise ValueError(f"`merge.staleness` requires {_collectives_with(lambda one: one.takes_staleness)}")
        if self.merge.significance is not None and (method is None or method.significance is None):
            filtering = _collectives_with(lambda one: one.significance is not None)
            raise ValueError(f"`merge.significance` requires {filtering}")
        if self.merge.codec != "fp32" and method is None:
            raise ValueError("`merge.codec` requires an explicit `collective`")
        if method is not None and self.merge.codec not in method.codecs:
            raise ValueError(
                f"`merge.codec: {self.merge.codec}` cannot be used with `collective: {method.name}`; it takes "
                + ", ".join(method.codecs)
            )

    def to_json(self) -> str:
        """Return the normalised form: with all defaults, and keys in the order of the model."""
        return self.model_dump_json(by_alias=True)


def _numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [number for held in value.values() for number in _numbers(held)]
    if isinstance(value, list):
        return [number for held in value for number in _numbers(held)]
    return [value] if isinstance(value, float) else []


def _path_inside(value: str, suffix: str) -> str:
    path = PurePosixPath(value)
    if path.is_absolute() or ".." in path.parts or path.suffix != suffix:
        raise ValueError(f"give the path of a {suffix} file in the job file's folder")
    return str(path)
