"""Sections of the job file on what is trained: the task, its data, how it is trained and when it ends.

Docstrings of attributes are the descriptions in the JSON Schema, and in the reference in `docs`.
"""

from __future__ import annotations

import math
import re
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    field_validator,
    model_validator,
)

from control_plane.spec._types import BELOW, AutoOrCount, Duration, Name, Workers
from control_plane.spec.sections._base import Section
from geofed_pb.bounds import MOST_SECRETS, SECRET_NAME
from geofed_pb.user_code.images import IMAGE, LONGEST_IMAGE

__all__ = [
    "MOST_KEPT",
    "PROBED_BATCH",
    "Best",
    "Clients",
    "Data",
    "End",
    "GoodEnough",
    "LearningRate",
    "Metadata",
    "StartsFrom",
    "Task",
    "Train",
]


_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
"""Names of environment variables."""

PROBED_BATCH = 64
"""Batch with which the task of a job is measured whose file leaves it to the plan. A probe then makes steps of 64 and
16 samples, a profile of 16 to 128; most tasks have memory for that, and learn well with a batch near it."""

MOST_KEPT = 100
"""Limit of the models of a job's rounds that the control plane keeps; `train.keep: all` keeps as many."""


class Metadata(Section):
    """Name and labels of a job."""

    name: Name
    """Name of the job: lower-case letters, digits and hyphens, 63 at most. It need not be unique."""
    labels: dict[str, str] = {}
    """Labels for the user's own purposes; not used for decisions."""


class Task(Section):
    """The task module, and the configuration that its functions get."""

    module: str
    """Path of the task module, a `.py` file, relative to the job file. The job file's folder is sent as code: 512
    MiB at most, without hidden files, caches and virtual environments."""
    config: dict[str, Any] = {}
    """Passed to the module's functions as a dict."""
    env: dict[str, str] = {}
    """Environment variables of the workers, such as `{TOKENIZERS_PARALLELISM: "false"}`; set before the module is
    loaded, in every region. Everybody who may read the job sees them: nothing secret belongs there."""
    requirements: str | None = None
    """Path of a requirements file in the job file's folder, such as `requirements.txt`: packages that each region
    installs for the job, if its operator allows it. One package on a line, by name; packages that the workers have stay
    at their versions. Default: what the workers have suffices."""
    image: Annotated[str, Field(pattern=IMAGE, max_length=LONGEST_IMAGE)] | None = None
    """Container image of the workers, such as `registry.example.org/team/worker@sha256:…`, made from geofed's own
    (docs/containers.md). Each region of the job must allow it (`policy.allowImages` in its file), and run functions in
    containers. Default: the image in the region's file."""
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

    @model_validator(mode="after")
    def _has_one_source_of_packages(self) -> Task:
        if self.image is not None and self.requirements is not None:
            raise ValueError("`image` and `requirements` exclude each other: an image has its own packages")
        return self

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


class Data(Section):
    """The dataset to train on, and where its raw data may be processed."""

    dataset: str = Field(min_length=1)
    """Name of the dataset in the region files."""
    residency: Literal["region", "cloud", "anywhere"] | list[str] = "region"
    """Where raw data may be processed, if their owner allows it, too. `region`: only in their own region. `cloud`: in
    regions of the same cloud. `anywhere`: in all regions. A list: in the named regions. Shards are moved only if
    necessary, or to save at least a tenth (docs/placement.md)."""


class GoodEnough(Section):
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


class End(Section):
    """When a job ends: after a number of epochs or steps, or earlier at a goal."""

    epochs: float | None = Field(default=None, gt=0)
    """Number of passes over the data. Give either `epochs` or `steps`."""
    steps: int | None = Field(default=None, ge=0, lt=BELOW)
    """Number of steps of the region with the most steps. 0: the job trains nothing, and measures
    (docs/job-file.md#evaluation-only)."""
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
        if self.steps == 0 and (self.goal or self.patience or self.time):
            raise ValueError("`steps: 0` trains nothing: it has no `goal`, `patience` or `time`")
        return self


class LearningRate(Section):
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
    batch: Annotated[int, Field(ge=1, lt=BELOW)] | None = None
    """Samples of a region's step, of all its workers, that the optimiser's rate is meant for. A region multiplies the
    rate by the square root of the ratio of its own samples to them, as its plan has them. Not with `clients`. Default:
    the rate stays, whatever the plan chooses."""


class Best(Section):
    """What makes a model better than another one."""

    metric: str = Field(min_length=1)
    """A metric that the task's `metrics` returns; `loss` if the task has no `metrics`. It is the mean over all regions'
    test samples."""
    mode: Literal["min", "max"]
    """Whether the lowest or the highest value is the best."""


class Adapter(Section):
    """A file with a part of a model, such as `geofed export --as trained` or `--as peft` writes."""

    file: str = Field(min_length=1)
    """Path of a safetensors file, relative to the job file. It is uploaded once, as `initialModel.file` is, and every
    region verifies its digest."""
    digest: str | None = Field(default=None, pattern=r"^sha256:[0-9a-f]{64}$")
    """Digest that the file must have. Default: that of the file as it is."""


class StartsFrom(Section):
    """What a job starts from: the model of an earlier job, or a file with weights, here or in the regions."""

    job: str | None = Field(default=None, min_length=1)
    """ID of an ended job that the user may read, or its name if it is unique. Of replanned jobs the last successor
    counts. Exactly one of `job`, `file` and `uri` is given."""
    round: Annotated[int, Field(ge=1, lt=BELOW)] | Literal["best"] | None = None
    """Which of its models: that of a kept round (`train.keep`), or the best one by its `train.best`. Default: the final
    one or, of a job that has not succeeded, that of its last kept round."""
    file: str | None = Field(default=None, min_length=1)
    """Path of a safetensors file with pretrained weights, relative to the job file, of 64 GiB at most. It is uploaded
    once, and is not sent as code. What is submitted has only its name and digest."""
    uri: str | None = Field(default=None, pattern=r"^(s3://[^/\s]+/|file:///).*[^/]$", max_length=2048)
    """Address of such a file that each region reads itself, `s3://bucket/key` or `file:///path` on the region's
    machine, in a folder that its region file lists in `models`. It is not uploaded. Requires `digest`."""
    digest: str | None = Field(default=None, pattern=r"^sha256:[0-9a-f]{64}$")
    """Digest that the file must have. Default, for a `file`: that of the file as it is."""
    partial: bool = False
    """Whether the file may lack tensors of the model, which keep the task's own first values, and have others, which
    are ignored. Otherwise both are refused."""
    adapter: Adapter | None = None
    """What an earlier job has trained of the model in `file` or `uri`: its tensors replace those of that file. All of
    them must be tensors of the model, also with `partial` (docs/job-file.md#an-adapter-of-pretrained-weights)."""

    @model_validator(mode="after")
    def _is_one(self) -> StartsFrom:
        if [self.job, self.file, self.uri].count(None) != 2:
            raise ValueError("give exactly one of `job`, `file` and `uri`")
        if self.job is not None and (self.digest is not None or self.partial):
            raise ValueError("`digest` and `partial` are for a `file` or `uri`; a job's model is whole")
        if self.job is not None and self.adapter is not None:
            raise ValueError("`adapter` is for a `file` or `uri`; a job's model has its own")
        if self.job is None and self.round is not None:
            raise ValueError("`round` is for a `job`; a file holds one model")
        if self.uri is not None and self.digest is None:
            raise ValueError("`uri` requires `digest`, so that all regions begin with the same file")
        if self.uri is not None and not {"", ".", ".."}.isdisjoint(
            self.uri.partition("://")[2].removeprefix("/").split("/")
        ):
            raise ValueError("`uri` must have no empty, `.` or `..` part")
        return self


class Train(Section):
    """How workers train: batch, learning rate, seed, number of workers and evaluation."""

    batch: AutoOrCount
    """Number of samples of one worker in one step; with a pipeline, of one replica. With `workers: auto` several
    workers may divide them where a larger step would learn less (docs/planning.md#workers-that-divide-a-batch). If a
    region's step is larger than its shard, the plan shows the real number of epochs. `auto`: the batch with which the
    same progress costs least within the deadline, or takes least time within the budget, chosen once, before the job
    starts. The learning rate stays as the task sets it, but for `learningRate.batch` (docs/planning.md#the-batch)."""
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
    compile: bool = False
    """Whether the workers compile calls of the model by `torch.compile`. Its parameters keep their names. A region's
    workers need a C++ compiler. Not with pipelines (docs/job-file.md#compiled-models)."""
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
    """Batch of an evaluation; a larger one is faster, and needs more memory. Default: the worker's samples in a
    step, which its memory is chosen for."""
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
    def probed_batch(self) -> int:
        """Batch with which the task is measured before a plan."""
        return self.batch if isinstance(self.batch, int) else PROBED_BATCH

    @property
    def compared(self) -> Best:
        """What makes a model the best one, with the default."""
        goal = self.end.goal
        if self.best is not None or goal is None:
            return self.best or Best(metric="loss", mode="min")
        return Best(metric=goal.metric, mode="max" if goal.at_least is not None else "min")

    @model_validator(mode="after")
    def _accumulates_samples(self) -> Train:
        if isinstance(self.batch, int) and self.accumulate > self.batch:
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


class Clients(Section):
    """Federated averaging over the clients that regions hold (docs/clients.md): a step of a region is a round of its
    clients. Each sampled client starts from the region's model, and makes local steps of `train.batch` samples; the
    mean of their changes, weighted by samples, is the change of the round."""

    fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Part of a region's clients that train in a round, rounded up; drawn again in each round by `train.seed`."""
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


def _numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [number for held in value.values() for number in _numbers(held)]
    if isinstance(value, list):
        return [number for held in value for number in _numbers(held)]
    return [value] if isinstance(value, float) else []


def _path_inside(value: str, suffix: str) -> str:
    path = PurePosixPath(value)
    if "\0" in value or path.is_absolute() or ".." in path.parts or path.suffix != suffix:
        raise ValueError(f"give the path of a {suffix} file in the job file's folder")
    return str(path)
