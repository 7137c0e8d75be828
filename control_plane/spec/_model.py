"""The job file as types. Keys are camelCase in the file; what is not listed here is an error."""

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
from sync.codec import codecs
from sync.policy import DEFAULT, WanPolicy, policies, policy_named

LONGEST_SLICE = timedelta(minutes=10)
_FIRST_YEAR, _LAST_YEAR = 2000, 2199
"""Of a deadline: every system can write the date, in whatever time zone."""
_BELOW = 1 << 31
"""Whole numbers are smaller: what is counted with them must fit the messages that carry it."""


def _auto_or_count(value: Any) -> int | Literal["auto"]:
    if value == "auto":
        return "auto"
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value < _BELOW:
        return value
    raise ValueError("write `auto` or a whole number from 1 on")


def _duration(value: Any) -> timedelta:
    if isinstance(value, timedelta):
        return value
    if not isinstance(value, str):
        raise ValueError("write a duration like 30s, 10m or 1h30m")
    return parse_duration(value)


def _workers(value: Any) -> Any:
    counts = list(value.values()) if isinstance(value, dict) else [value]
    for count in counts:
        if count == "auto" and not isinstance(value, dict):
            continue
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count < _BELOW:
            raise ValueError("write `auto`, a whole number from 1 on, or such numbers by region, like {frankfurt: 4}")
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
        raise ValueError(f"{value!r} names no time zone; end it with Z or an offset")
    if not _FIRST_YEAR <= moment.year <= _LAST_YEAR:
        raise ValueError(f"{value!r} is not between the years {_FIRST_YEAR} and {_LAST_YEAR}")
    return value


def _those(trait: Callable[[WanPolicy], object]) -> str:
    """Names, for an error, of the policies that have a trait."""
    return " or ".join(f"`policy: {name}`" for name in policies() if trait(policy_named(name)))


class _OneOf:
    """Of a key that takes one of these names: as `Literal`, of names that are known only when this runs."""

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
    name: Name
    """What the job is called; need not be unique."""
    labels: dict[str, str] = Field(default_factory=dict)
    """For the user's own order; not used for decisions."""


class Task(_Section):
    module: str
    """Path of the task module, relative to the job file."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Handed to the module's functions as a dict."""

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
    dataset: str = Field(min_length=1)
    """Name in the catalogue of the regions."""
    residency: Literal["region", "cloud", "anywhere"] | list[str] = "region"
    """How far this job lets raw data go, where their owner allows it: `region`, they stay where they are; `cloud`, into
    regions of the same cloud; `anywhere`; or the names of the regions that they may go to."""


class GoodEnough(_Section):
    metric: str = Field(min_length=1)
    """One of those that the task's `metrics` gives; `loss` where it has none."""
    at_least: float | None = None
    at_most: float | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> GoodEnough:
        if (self.at_least is None) == (self.at_most is None):
            raise ValueError("give exactly one of `atLeast` and `atMost`")
        return self


class End(_Section):
    epochs: float | None = Field(default=None, gt=0)
    """Passes over the data."""
    steps: int | None = Field(default=None, ge=1, lt=_BELOW)
    """Steps of the region that makes the most."""
    goal: GoodEnough | None = None
    """The job ends before that once this is measured."""

    @model_validator(mode="after")
    def _exactly_one(self) -> End:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("give exactly one of `epochs` and `steps`")
        return self


class LearningRate(_Section):
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How it falls after the warm-up, to `floor` at the end: in a line, or along half a cosine."""
    warmup: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Part of the steps over which it rises from nothing."""
    floor: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Part of it that is left at the end."""
    begin: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Part of the way that another job has gone: with `initialModel` it continues from there."""


class InitialModel(_Section):
    job: str = Field(min_length=1)
    """Id of a job that has succeeded, or its name where only one job has it; of those replanned, the last one's."""


class Train(_Section):
    batch: int = Field(ge=1, lt=_BELOW)
    """Samples of one worker in one step."""
    learning_rate: LearningRate | None = None
    """How the learning rate of the task's optimiser goes over the job's planned steps; none: it stays."""
    initial_model: InitialModel | None = None
    """What all regions begin with: the model of an earlier job. None: what the task makes."""
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    workers: Workers = "auto"
    """Workers in each region, or by region, like {frankfurt: 4, shanghai: 2}."""
    scaling: Literal["fixed", "tuned", "mlless"] = "fixed"
    """`fixed`: a step has the same samples to the end, however many workers share them. `tuned`: each worker keeps its
    `batch`, and while the job trains workers leave and come as reaches `end.goal` for the least money, in hardly more
    time than all of them where it minimises time. `mlless`: they leave by the rule of MLLess. Then `workers` are as
    many as there will be at most."""
    end: End
    balance: Literal["data", "speed"] = "data"
    """What a region's steps in a round are in proportion to: `data`, so that all regions make the same epochs, or
    `speed`, so that all their rounds take equally long and none waits; together they make as many epochs."""
    eval_batch: int | None = Field(default=None, ge=1, lt=_BELOW)
    """Samples that an evaluation takes at a time; none: as many as a worker's step, which its memory was chosen for."""
    evaluate_every: int = Field(default=0, ge=0, lt=_BELOW)
    """Rounds between evaluations; 0: only at the end."""

    @model_validator(mode="after")
    def _measures_the_goal(self) -> Train:
        if self.end.goal is not None and not self.evaluate_every:
            raise ValueError("`end.goal` needs `evaluateEvery`: it is looked at after each evaluation")
        return self

    @model_validator(mode="after")
    def _has_a_loss_to_reach(self) -> Train:
        if self.scaling != "fixed" and (self.end.goal is None or self.end.goal.at_most is None):
            raise ValueError(f"`scaling: {self.scaling}` needs a loss to reach: an `end.goal` with `atMost`")
        return self


class SoftDeadline(_Section):
    deadline: Annotated[str, BeforeValidator(_deadline)]
    """Later than the one before it."""
    value: Annotated[float, Field(gt=0, le=1)] = 0.5
    """What this date is worth, of what `deadline` is; where not all promises can be kept, the least value waits."""


class Objective(_Section):
    minimise: Literal["cost", "time"] = "cost"
    deadline: Annotated[str | None, BeforeValidator(_deadline)] = None
    """A duration from the submission, like 2h, or a time, like 2030-01-31T18:00:00Z."""
    soft: list[SoftDeadline] = Field(default_factory=list)
    """Later dates that would do, each worth less than the one before. The first that can be promised is; where none
    can, the job is taken without a promise instead of being refused."""
    budget: float | None = Field(default=None, gt=0)
    """In USD."""

    @model_validator(mode="after")
    def _softens(self) -> Objective:
        if self.soft and self.deadline is None:
            raise ValueError("`soft` goes with a `deadline`")
        values = [1.0, *(step.value for step in self.soft)]
        if any(later >= sooner for sooner, later in pairwise(values)):
            raise ValueError("each step of `soft` is worth less than the one before it, the first less than 1")
        return self


class Regions(_Section):
    use: list[Name] = Field(default_factory=list)
    """Empty: all that hold data."""
    avoid: list[Name] = Field(default_factory=list)
    replan: Literal["asked", "auto"] = "asked"
    """When a region that comes while the job runs is taken up: where a user asks for it (`control-plane replan`), or by
    itself where that pays, too."""


class Wan(_Section):
    policy: Annotated[str, _OneOf("auto", *policies())] = "auto"
    """`ma`: model averaging every `interval` steps. `diloco`: the same, with an outer optimiser. `bsp`: the exact mean
    after every step. `asgd`, `asgd-ga`: every region's steps are made in every region. `asp`: Gaia's filter."""
    outer: dict[str, float] | None = None
    """The policy's own settings. Of `diloco`, its outer optimiser: `lr` 0.7, `momentum` 0.9."""
    exchange: Literal["auto", "synchronous", "background"] = "auto"
    """`synchronous`: a round ends when all updates are here. `background`: training continues while they travel.
    `auto`: in the background, unless waiting costs less than a twentieth of the time; always so with what is said of
    late updates."""
    interval: AutoOrCount = "auto"
    """Local steps between WAN exchanges of the region that makes the most."""
    codec: Annotated[str, _OneOf("auto", *codecs())] = "auto"
    """How an update becomes bytes; what a lossy one holds back is sent with the next update. `auto`: fp32, or int8
    where that shortens the exchange; in the background also ternary, where neither keeps up."""
    topology: Literal["auto", "mesh", "star", "tree", "ring", "two-level"] = "auto"
    """Which regions exchange directly; the others' updates are passed on. `auto`: the fastest by the link table, or a
    cheaper one that is as fast, give or take."""
    fragments: Annotated[int, Field(ge=1, le=1024)] = 1
    """Parts of the model of which one is sent in each round, in turn."""
    quorum: Annotated[int, Field(ge=1, lt=_BELOW)] | None = None
    """Regions, this one included, whose new updates a merge waits for within `grace`; in the background. None: all that
    keep up, each with the same round; `asgd`, `asgd-ga` and `asp` merge what there is."""
    grace: Duration | None = None
    """How long a merge waits for its quorum; none: it does not."""
    lead: Annotated[int, Field(ge=0, lt=_BELOW)] | None = None
    """Rounds that a region may be ahead of the slowest one that keeps up, where there is a `quorum` or the policy
    merges what there is; 0: any number; none: 8."""
    staleness: Literal["none", "damping", "compensation"] = "none"
    """What is done about late updates: `damping` divides by 1 + staleness, `compensation` is DC-ASGD."""
    significance: Annotated[float, Field(gt=0, le=1)] | None = None
    """Of `asp`: relative change below which a coordinate waits; none: 0.01."""
    guard: Annotated[float, Field(ge=0)] = 100.0
    """An update whose norm is more than this many times its region's usual one is refused; 0: none is."""

    @model_validator(mode="after")
    def _fits_together(self) -> Wan:
        if self.outer is not None:
            self._check_settings(self.outer)
        if self.traits.every_step and self.interval not in ("auto", 1):
            raise ValueError(f"`policy: {self.policy}` exchanges after every step: leave `interval` out")
        if self.traits.synchronous and self.exchange == "background":
            raise ValueError(f"`policy: {self.policy}` is synchronous")
        if self.significance is not None and not self.traits.significance:
            raise ValueError(f"`significance` goes with {_those(lambda policy: policy.significance)}")
        if self.exchange == "synchronous" or self.traits.synchronous:
            late = {"quorum": self.quorum, "grace": self.grace, "lead": self.lead, "staleness": self.staleness}
            if odd := [name for name, value in late.items() if value not in (None, "none")]:
                raise ValueError(f"`{odd[0]}` goes with `exchange: background`")
        if self.lead is not None and self.quorum is None and not self.traits.on_arrival:
            raise ValueError("`lead` goes with `quorum`: without one a region is never more than a round ahead")
        return self

    @property
    def traits(self) -> WanPolicy:
        """What there is to know of the policy."""
        return policy_named(DEFAULT if self.policy == "auto" else self.policy)

    def _check_settings(self, given: dict[str, float]) -> None:
        if not self.traits.settings:
            raise ValueError(f"`outer` goes with {_those(lambda policy: policy.settings)}")
        if unknown := sorted(set(given) - set(self.traits.settings)):
            raise ValueError(f"unknown key `{unknown[0]}` in wan.outer; it takes {', '.join(self.traits.settings)}")
        try:
            self.traits.make(**{**self.traits.settings, **given})
        except GeofedError as error:
            raise ValueError(error.message) from None


class PipelineStages(_Section):
    stages: AutoOrCount = "auto"
    """How many parts the model's layers are cut into; where, the plan says."""
    activations: Literal["auto", "fp32", "bf16"] = "auto"
    """What stages send each other activations and their gradients in. `auto`: bfloat16 where that makes a step at least
    5 % shorter, or cheaper where the job minimises cost, and float32 elsewhere."""


class Parallelism(_Section):
    pipeline: PipelineStages = Field(default_factory=PipelineStages)
    """Workers hold consecutive layers each, and pass activations on."""


class Merge(_Section):
    """How the workers of a region merge, beyond the collective's name."""

    codec: Literal["fp32", "bf16", "int8", "fp8", "int4"] = "fp32"
    """What they send each other in, both ways; what a lossy one holds back goes with the next step. `fp8` and `int4`
    send only what is not zero, where that is less. `int8`: not of `isp`."""
    staleness: Annotated[int, Field(ge=0, le=8)] = 0
    """Of `k-reduce`: workers that merge no part continue with the mean of so many steps before (FasDL: 1)."""
    significance: Annotated[float, Field(ge=0)] | None = None
    """Of `isp`: v of the filter |change / weight| > v / sqrt(t); none: 0.7."""


class Function(_Section):
    memory_mb: AutoOrCount = "auto"
    slice: Duration = timedelta(seconds=30)
    """An invocation ends at the first step boundary after this; at most 10 minutes, as the workers' tokens live 15."""

    @field_validator("slice")
    @classmethod
    def _within_a_tokens_life(cls, value: timedelta) -> timedelta:
        if not timedelta(0) < value <= LONGEST_SLICE:
            raise ValueError(f"give a duration of at most {format_duration(LONGEST_SLICE)}")
        return value


class Limits(_Section):
    lost_region: Duration = timedelta(minutes=10)
    """How long the job waits for a region whose lease is over."""


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
    collective: Literal[
        "auto", "server-reduce", "all-reduce", "scatter-reduce", "pipelined-scatter-reduce", "k-reduce", "isp"
    ] = "auto"
    """How the workers of a region merge. `auto`: each region takes the fastest, by what it measures of its channel."""
    parallelism: Literal["auto", "data"] | Parallelism = "auto"
    """`data`: every worker holds the whole model. `pipeline`: each holds a stage of its layers. `auto`: a pipeline
    where a profile says that the model does not fit a function's memory, else `data`."""
    k: AutoOrCount = "auto"
    """Of `k-reduce` and `isp`: how many workers merge a part each; never more than there are."""
    channel: Literal["auto", "file", "redis", "s3"] = "auto"
    """What the workers of a region exchange tensors through. `auto`: what the region has."""
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
            raise ValueError(f"{key} goes with whole models: the stages of a pipeline are not given up")
        if self.wan.exchange == "background" or self.wan.traits.on_arrival:
            raise ValueError(
                f"{key} goes with `wan.exchange: synchronous`, and with the policies `ma`, `diloco` and `bsp`: a batch "
                "changes between two rounds, and in the background there is no such moment"
            )
        return self

    @model_validator(mode="after")
    def _fits_together(self) -> JobSpec:
        if self.train.balance == "speed" and (self.wan.traits.every_step or self.wan.interval == 1):
            raise ValueError("`train.balance: speed` needs rounds of several steps")
        if self.k != "auto" and self.collective not in ("k-reduce", "isp"):
            raise ValueError("`k` goes with `collective: k-reduce` or `isp`")
        if self.merge.staleness and self.collective != "k-reduce":
            raise ValueError("`merge.staleness` goes with `collective: k-reduce`")
        if self.merge.significance is not None and self.collective != "isp":
            raise ValueError("`merge.significance` goes with `collective: isp`")
        if self.merge.codec != "fp32" and self.collective in ("auto", "server-reduce"):
            raise ValueError("`merge.codec` goes with a `collective` other than `server-reduce`; name one")
        if self.merge.codec == "int8" and self.collective == "isp":
            raise ValueError("`merge.codec: int8` does not go with `collective: isp`; `fp8` has eight bits as well")
        return self

    def to_json(self) -> str:
        """The normalised form: all defaults filled in, keys in the order of the model."""
        return self.model_dump_json(by_alias=True)


def _numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [number for held in value.values() for number in _numbers(held)]
    if isinstance(value, list):
        return [number for held in value for number in _numbers(held)]
    return [value] if isinstance(value, float) else []
