"""Types of the job file. Keys are camelCase in the file; unknown keys are errors.

Docstrings of attributes are the descriptions in the JSON Schema.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    PlainSerializer,
    PlainValidator,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic.alias_generators import to_camel
from pydantic_core import CoreSchema, core_schema

from control_plane._durations import format_duration, parse_duration
from geofed_pb.errors import GeofedError
from scheduler.topology import topology_kinds
from sync.channel import channel_kinds
from sync.codec import codecs
from sync.collective import CollectiveMethod, collective_named, collectives
from sync.policy import DEFAULT, WanPolicy, policies, policy_named

LONGEST_SLICE = timedelta(minutes=10)
"""Limit of `function.slice`: workers' tokens are valid for 15 minutes."""
_FIRST_YEAR, _LAST_YEAR = 2000, 2199
"""Years of valid deadlines, which every system can represent in any time zone."""
_BELOW = 1 << 31
"""Integers must be smaller, so that they fit the protocol's messages."""


def _auto_or_count(value: Any) -> int | Literal["auto"]:
    if value == "auto":
        return "auto"
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value < _BELOW:
        return value
    raise ValueError("must be `auto` or a positive integer")


def _duration(value: Any) -> timedelta:
    if isinstance(value, timedelta):
        return value
    if not isinstance(value, str):
        raise ValueError("must be a duration like 30s, 10m or 1h30m")
    return parse_duration(value)


def _workers(value: Any) -> Any:
    counts = list(value.values()) if isinstance(value, dict) else [value]
    for count in counts:
        if count == "auto" and not isinstance(value, dict):
            continue
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count < _BELOW:
            raise ValueError("must be `auto`, a positive integer, or positive integers by region, like {frankfurt: 4}")
    return value


def _deadline(value: Any) -> Any:
    if value is None or not isinstance(value, str):
        return value
    if value[:1].isdigit() and "-" not in value:
        parse_duration(value)
        return value
    try:
        moment = datetime.fromisoformat(value)
    except ValueError:
        raise ValueError(f"{value!r} is neither a duration like 2h nor a time like 2030-01-31T18:00:00Z") from None
    if moment.tzinfo is None:
        raise ValueError(f"{value!r} has no time zone; append Z or an offset")
    if not _FIRST_YEAR <= moment.year <= _LAST_YEAR:
        raise ValueError(f"{value!r} is not between the years {_FIRST_YEAR} and {_LAST_YEAR}")
    return value


def _policies_with(trait: Callable[[WanPolicy], object]) -> str:
    """Return the names of the policies that have a trait, for an error message."""
    return " or ".join(f"`policy: {name}`" for name in policies() if trait(policy_named(name)))


def _collectives_with(trait: Callable[[CollectiveMethod], object]) -> str:
    """Return the names of the collectives that have a trait, for an error message."""
    return " or ".join(f"`collective: {name}`" for name in collectives(trait))


class _OneOf:
    """Annotation of a key with one of the given values, like `Literal` for values known only at run time."""

    def __init__(self, *names: str) -> None:
        self._names = names

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.literal_schema(list(self._names))


AutoOrCount = Annotated[
    int | Literal["auto"],
    PlainValidator(_auto_or_count),
    WithJsonSchema({"anyOf": [{"const": "auto"}, {"type": "integer", "minimum": 1}]}),
]
Workers = Annotated[
    int | Literal["auto"] | dict[str, int],
    PlainValidator(_workers),
    WithJsonSchema(
        {
            "anyOf": [
                {"const": "auto"},
                {"type": "integer", "minimum": 1},
                {"type": "object", "additionalProperties": {"type": "integer", "minimum": 1}},
            ]
        }
    ),
]
Duration = Annotated[
    timedelta,
    PlainValidator(_duration),
    PlainSerializer(format_duration, return_type=str),
    WithJsonSchema({"type": "string", "examples": ["30s", "10m", "1h30m"]}),
]
_LABEL = r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"
Name = Annotated[str, Field(pattern=_LABEL, description="a DNS label: lower-case letters, digits and hyphens")]


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
    """Name of the job; need not be unique."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Labels for the user's own purposes; not used for decisions."""


class Task(_Section):
    """The task module, and the configuration that its functions get."""

    module: str
    """Path of the task module, relative to the job file."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Passed to the module's functions as a dict."""

    @field_validator("module")
    @classmethod
    def _stays_inside(cls, value: str) -> str:
        path = PurePosixPath(value)
        if path.is_absolute() or ".." in path.parts or path.suffix != ".py":
            raise ValueError("give the path of a .py file in the job file's folder")
        return str(path)

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
    """Where raw data may be processed, if their owner allows it, too. `region`: only in their own region; `cloud`: in
    regions of the same cloud; `anywhere`; or a list of regions."""


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
    """Passes over the data."""
    steps: int | None = Field(default=None, ge=1, lt=_BELOW)
    """Number of steps of the region with the most steps."""
    goal: GoodEnough | None = None
    """The job ends early once all regions together measure this."""

    @model_validator(mode="after")
    def _exactly_one(self) -> End:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("give exactly one of `epochs` and `steps`")
        return self


class LearningRate(_Section):
    """Schedule of the learning rate over the job's planned steps, as a factor of the optimiser's rate."""

    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Decay after the warm-up, to `floor` at the end: linear, or half a cosine."""
    warmup: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Fraction of the steps over which the rate rises from 0."""
    floor: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Final rate, as a fraction of the optimiser's rate."""
    begin: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Where the schedule begins, as a fraction of its length; with `initialModel`, to continue another job's
    schedule."""


class InitialModel(_Section):
    """An earlier job whose model a job starts from."""

    job: str = Field(min_length=1)
    """ID of a job that has succeeded, or its name if it is unique; of a replanned job, the last successor counts."""


class Train(_Section):
    """How workers train: batch, learning rate, seed, number of workers and evaluation."""

    batch: int = Field(ge=1, lt=_BELOW)
    """Number of samples of one worker in one step."""
    learning_rate: LearningRate | None = None
    """Schedule of the optimiser's learning rate over the job's planned steps; default: constant."""
    initial_model: InitialModel | None = None
    """Model of an earlier job that all regions start from; default: the task's own."""
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    """Seed of the model, of the order of samples, and of all randomness in steps."""
    workers: Workers = "auto"
    """Number of workers in each region, or by region, like {frankfurt: 4, shanghai: 2}."""
    scaling: Literal["fixed", "tuned", "mlless"] = "fixed"
    """`fixed`: the global batch of a step stays constant, however many workers share it. `tuned`: each worker keeps its
    `batch`, and the number of workers is changed while the job trains, so that it reaches `end.goal` at the least cost
    or, if it minimises time, in hardly more time than with all workers. `mlless`: workers are removed by MLLess's rule.
    With the last two, `workers` is the maximum."""
    end: End
    balance: Literal["data", "speed"] = "data"
    """What a region's number of steps in a round is proportional to: `data`, so that all regions make the same number
    of epochs, or `speed`, so that their rounds take equally long and none waits; the total number of samples is the
    same."""
    eval_batch: int | None = Field(default=None, ge=1, lt=_BELOW)
    """Batch of an evaluation; default: `batch`, which the worker's memory is chosen for."""
    evaluate_every: int = Field(default=0, ge=0, lt=_BELOW)
    """Number of rounds between evaluations; 0: only at the end."""

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


def _with_other_spelling(schema: dict[str, Any]) -> None:
    """Accept `objective.minimize` in the JSON Schema, too."""
    properties = schema["properties"]
    properties["minimize"] = {**properties["minimise"], "description": "Other spelling of `minimise`."}


class SoftDeadline(_Section):
    """A later deadline of less value."""

    deadline: Annotated[str, BeforeValidator(_deadline)]
    """A deadline later than the one before it."""
    value: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Value of this deadline relative to `deadline`; if not all promises can be kept, those of least value are late."""


class Objective(_Section):
    """What the plan minimises, and the deadlines and the budget that limit it."""

    model_config = ConfigDict(json_schema_extra=_with_other_spelling)

    minimise: Literal["cost", "time"] = "cost"
    """What the plan minimises; of two plans that differ in it by less than a twentieth, the one that is better in the
    other is chosen. `minimize` is accepted, too."""
    deadline: Annotated[str | None, BeforeValidator(_deadline)] = None
    """Duration from the submission, like 2h, or time, like 2030-01-31T18:00:00Z; the job is declined if it cannot be
    promised."""
    soft: list[SoftDeadline] = Field(default_factory=list)
    """Later acceptable deadlines, each of less value than the one before. The first one that can be promised is; if
    none can, the job is admitted without a promise instead of being declined."""
    budget: float | None = Field(default=None, gt=0)
    """Limit of the cost, in USD."""

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

    use: list[Name] = Field(default_factory=list)
    """Regions to use; default: all that have data."""
    avoid: list[Name] = Field(default_factory=list)
    """Regions not to use."""
    replan: Literal["asked", "auto"] = "asked"
    """When the job is replanned to use regions that join while it runs: `asked`, by `control-plane replan` only;
    `auto`, also automatically if that pays."""


class Wan(_Section):
    """How the regions exchange updates over the WAN."""

    policy: Annotated[str, _OneOf("auto", *policies())] = "auto"
    """WAN policy. `ma`: model averaging every `interval` steps. `diloco`: the same with an outer optimiser. `bsp`: the
    exact mean after every step. `asgd`, `asgd-ga`: each region applies the steps of all regions. `asp`: Gaia's
    significance filter."""
    outer: dict[str, float] | None = None
    """Settings of the policy. `diloco`: those of its outer optimiser, `lr` (default 0.7) and `momentum` (0.9)."""
    exchange: Literal["auto", "synchronous", "background"] = "auto"
    """`synchronous`: a round ends when the updates of all regions have arrived. `background`: training continues during
    the exchange. `auto`: background, unless waiting costs less than a twentieth of the time; always background if
    settings for late updates are given."""
    interval: AutoOrCount = "auto"
    """Number of local steps between two WAN exchanges, of the region with the most steps."""
    codec: Annotated[str, _OneOf("auto", *codecs())] = "auto"
    """Codec of updates; the residual of a lossy one is added to the next update. `auto`: fp32, or int8 if that shortens
    the exchange; in the background also ternary, if neither keeps up."""
    topology: Annotated[str, _OneOf("auto", *topology_kinds())] = "auto"
    """Which regions exchange directly; updates of others are relayed. `auto`: the fastest by the regions' links, or a
    cheaper one that is about as fast."""
    fragments: Annotated[int, Field(ge=1, le=1024)] = 1
    """Number of parts of the model; one of them is sent in each round, in turn."""
    quorum: Annotated[int, Field(ge=1, lt=_BELOW)] | None = None
    """Number of regions, including the own one, whose new updates a merge in the background waits for within `grace`.
    Default: all that keep up, each with the same round; `asgd`, `asgd-ga` and `asp` merge the updates that have
    arrived."""
    grace: Duration | None = None
    """How long a merge waits for its quorum; default: not at all."""
    lead: Annotated[int, Field(ge=0, lt=_BELOW)] | None = None
    """Number of rounds that a region may be ahead of the slowest one that keeps up, with a `quorum` or a policy that
    merges the updates that have arrived. 0: unlimited; default: 8."""
    staleness: Literal["none", "damping", "compensation"] = "none"
    """Treatment of late updates: `damping` divides them by 1 + staleness, `compensation` is DC-ASGD's."""
    significance: Annotated[float, Field(gt=0, le=1)] | None = None
    """For `asp`: relative change below which a coordinate is not sent yet; default: 0.01."""
    guard: Annotated[float, Field(ge=0)] = 100.0
    """An update is refused if its norm exceeds its region's usual norm by more than this factor; 0: never."""

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
        if self.exchange == "synchronous" or self.traits.synchronous:
            late = {"quorum": self.quorum, "grace": self.grace, "lead": self.lead, "staleness": self.staleness}
            if odd := [name for name, value in late.items() if value not in (None, "none")]:
                raise ValueError(f"`{odd[0]}` requires `exchange: background`")
        if self.lead is not None and self.quorum is None and not self.traits.on_arrival:
            raise ValueError("`lead` requires `quorum`: without one a region is never more than a round ahead")
        return self

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


class PipelineStages(_Section):
    """How a model is cut into pipeline stages."""

    stages: AutoOrCount = "auto"
    """Number of stages that the model's layers are divided into; the plan chooses where."""
    activations: Literal["auto", "fp32", "bf16"] = "auto"
    """Precision in which stages exchange activations and their gradients. `auto`: bfloat16 if that makes a step at
    least 5 % shorter, or cheaper if the job minimises cost; else float32."""


class Parallelism(_Section):
    """How a model that does not fit one worker is divided among several."""

    pipeline: PipelineStages = Field(default_factory=PipelineStages)
    """Pipeline parallelism: each worker holds consecutive layers, and sends activations to the next."""


def _merge_codecs() -> tuple[str, ...]:
    """Return the codecs that any collective takes."""
    return tuple(dict.fromkeys(codec for name in collectives() for codec in collective_named(name).codecs))


class Merge(_Section):
    """Settings of the collective."""

    codec: Annotated[str, _OneOf(*_merge_codecs())] = "fp32"
    """Codec in both directions; the residual of a lossy one is added to the next step. `fp8` and `int4` omit zeros if
    that is smaller. `int8` cannot be used with `isp`."""
    staleness: Annotated[int, Field(ge=0, le=8)] = 0
    """For `k-reduce`: workers that merge no part continue with the mean from this many steps before (FasDL: 1)."""
    significance: Annotated[float, Field(ge=0)] | None = None
    """For `isp`: v in the filter |change / weight| > v / sqrt(t); default: 0.7."""


class Function(_Section):
    """Memory and time slice of the worker function."""

    memory_mb: AutoOrCount = "auto"
    """Memory of a worker, in MB."""
    slice: Duration = timedelta(seconds=30)
    """An invocation ends at the first step boundary after this time; at most 10 minutes, since workers' tokens are
    valid for 15."""

    @field_validator("slice")
    @classmethod
    def _within_a_tokens_life(cls, value: timedelta) -> timedelta:
        if not timedelta(0) < value <= LONGEST_SLICE:
            raise ValueError(f"give a duration of at most {format_duration(LONGEST_SLICE)}")
        return value


class Limits(_Section):
    """Limits of what a job waits for."""

    lost_region: Duration = timedelta(minutes=10)
    """How long the job waits for a lost region before it fails."""


class JobSpec(_Section):
    """One training job."""

    api_version: Literal["geofed/v1"]
    kind: Literal["TrainingJob"]
    metadata: Metadata
    task: Task
    data: Data
    train: Train
    objective: Objective = Field(default_factory=Objective)
    regions: Regions = Field(default_factory=Regions)
    collective: Annotated[str, _OneOf("auto", *collectives())] = "auto"
    """How the workers of a region merge. `auto`: each region uses the fastest one by its measurements of the
    channel."""
    parallelism: Literal["auto", "data"] | Parallelism = "auto"
    """`data`: each worker holds the whole model. `pipeline`: each worker holds a stage of its layers. `auto`: a
    pipeline if, by a profile, the model does not fit into a function's memory, else `data`."""
    k: AutoOrCount = "auto"
    """For `k-reduce` and `isp`: number of workers that merge a part each; limited to the number of workers."""
    channel: Annotated[str, _OneOf("auto", *channel_kinds())] = "auto"
    """Store through which the workers of a region exchange tensors. `auto`: the region's own."""
    merge: Merge = Field(default_factory=lambda: Merge())
    wan: Wan = Field(default_factory=Wan)
    function: Function = Field(default_factory=Function)
    limits: Limits = Field(default_factory=Limits)

    @model_validator(mode="after")
    def _scales(self) -> JobSpec:
        if self.train.scaling == "fixed":
            return self
        key = f"`train.scaling: {self.train.scaling}`"
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
        self._merges_together()
        return self

    def _merges_together(self) -> None:
        """Raise ``ValueError`` for a setting of the collective that it does not take."""
        method = None if self.collective == "auto" else collective_named(self.collective)
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
