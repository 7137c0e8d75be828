"""Sections of the job file on what a job is to achieve, where, and within which limits.

Docstrings of attributes are the descriptions in the JSON Schema, and in the reference in `docs`.
"""

from __future__ import annotations

from datetime import timedelta
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import (
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

from control_plane._durations import format_duration
from control_plane.spec._types import AutoOrCount, Deadline, Duration, Name
from control_plane.spec.sections._base import Section

__all__ = ["LONGEST_SLICE", "Function", "Limits", "Objective", "Regions", "SoftDeadline"]


LONGEST_SLICE = timedelta(minutes=10)
"""Limit of `function.slice`: workers' tokens are valid for 15 minutes."""
MOST_GPUS = 64
"""Limit of `function.gpus`: more than one machine has."""


def _with_other_spelling(schema: dict[str, Any]) -> None:
    """Accept `objective.minimize` in the JSON Schema, too."""
    minimise = schema["properties"].pop("minimise")
    minimize = {**minimise, "description": "Other spelling of `minimise`."}
    schema["properties"] = {"minimise": minimise, "minimize": minimize, **schema["properties"]}


class SoftDeadline(Section):
    """A later deadline of less value."""

    deadline: Deadline
    """A deadline later than the one before it."""
    value: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Value of this deadline relative to that of `objective.deadline`. If not all promises can be kept, those of least
    value are late."""


class Objective(Section):
    """What the plan minimises, and the deadlines and the budget that limit it."""

    model_config = ConfigDict(json_schema_extra=_with_other_spelling)

    minimise: Literal["cost", "time"] = "cost"
    """What the plan minimises: money for the same progress, or the time of the samples that are asked for. Half the
    other measure is worth 2 % of it."""
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


class Regions(Section):
    """Which regions a job uses, when it is replanned to use others, and what happens when one stays away."""

    use: list[Name] = []
    """Names of the regions to use; with a wider `data.residency` also regions without data. Empty: all that have
    data."""
    avoid: list[Name] = []
    """Names of regions not to use, connected or not. Unknown ones are refused, so that a typing error does not disable
    the rule."""
    replan: Literal["asked", "auto"] = "asked"
    """When the job is replanned to use regions that join while it runs. `asked`: on request only (`geofed replan`).
    `auto`: also automatically if that pays (docs/planning.md#a-region-that-comes-later)."""
    lost: Literal["fail", "continue"] = "fail"
    """What happens when a region is lost for longer than `limits.lostRegion`. `fail`: the job fails. `continue`: a new
    job continues its model without that region (docs/planning.md#a-region-that-stays-lost); exchange is then
    synchronous."""


class Function(Section):
    """Memory, GPUs and time slice of the worker function."""

    memory_mb: AutoOrCount = "auto"
    """Memory of a worker, in MB. `auto`: the cheapest sufficient size by a profile (docs/tuning.md), else 1024, or more
    for a larger model."""
    gpus: Annotated[int, Field(ge=1, le=MOST_GPUS)] | Literal["auto"] = 1
    """GPUs of a worker, which divide its `train.batch` and compute its steps together. `auto`: all that its function
    sees; without one, the CPU. With more than one, and `auto`, set `memoryMb`, which holds a process for each
    (docs/job-file.md#several-gpus-in-a-worker)."""
    sharding: Literal["none", "fsdp"] = "none"
    """Whether the GPUs of a worker hold the whole model each (`none`), or a part of parameters, gradients and optimiser
    state each (`fsdp`), for a model that one cannot hold. `fsdp` needs `gpus` above 1, or `auto`, and one worker in a
    region, `train.workers: 1` (docs/job-file.md#a-model-that-one-gpu-cannot-hold)."""
    slice: Literal["auto"] | Duration = "auto"
    """An invocation ends at the first step boundary after this time, and the next one continues; `10m` at most, since
    workers' tokens are valid for 15 minutes. `auto`: `30s`, or less where a platform ends functions sooner; more only
    if that saves over 0.5 % of what `objective` minimises, or keeps a limit. An invocation that has not answered 120 s
    later is ended and called again; the third in a row fails the job: a step must not take longer."""

    @field_validator("slice")
    @classmethod
    def _within_a_tokens_life(cls, value: timedelta | str) -> timedelta | str:
        if isinstance(value, timedelta) and not timedelta(0) < value <= LONGEST_SLICE:
            raise ValueError(f"give a duration of at most {format_duration(LONGEST_SLICE)}")
        return value


class Limits(Section):
    """Limits of what a job waits for."""

    lost_region: Duration = timedelta(minutes=10)
    """How long the job waits for a lost region before it fails, or continues without it (`regions.lost`). Meanwhile the
    other regions pay for their parameter servers only, once their workers' slices are over; in the background they
    train on as far as they can."""
