"""What an invocation is told and what it answers: the JSON bodies of the worker function."""

from __future__ import annotations

from datetime import timedelta
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from geofed_pb.errors import GeofedError

__all__ = ["CALL_GRACE", "Invocation", "Outcome", "Schedule", "ShardFile", "Stretch", "read_invocation"]

CALL_GRACE = timedelta(seconds=120)
"""Beyond its slice an invocation may finish the step it is in, and wait for the other workers or for the parameter
server."""


class ShardFile(BaseModel):
    """One file of a shard: a path that the worker can open, or an address it can get it from."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    """Relative to the split."""
    folder: bool = False
    """Whether the split is a folder, and this one of its files."""
    path: str = ""
    url: str = ""
    """Presigned: it is good for this object only, and for a short time."""
    size: int | None = None
    shard: str = ""
    """The region whose shard it is of; empty: this region's own."""


class Schedule(BaseModel):
    """The learning rate over the job's steps."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    shape: Literal["constant", "linear", "cosine"] = "constant"
    warmup: float = Field(default=0.0, ge=0, lt=1)
    """Part of the steps over which it rises."""
    floor: float = Field(default=0.0, ge=0, le=1)
    """Part of it that is left at the end."""
    begin: float = Field(default=0.0, ge=0, lt=1)
    """Part of the way that is behind it at the first step: another job has gone it."""


class Stretch(BaseModel):
    """From a step on, the region draws so many samples in each."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    first_step: int = Field(ge=1)
    """The first of a round."""
    batch: int = Field(ge=1)
    """Samples of all workers of the region."""
    rate: float = Field(default=1.0, gt=0)
    """What the learning rate is multiplied by."""


class Invocation(BaseModel):
    """One bounded call of the worker function."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    job: str
    region: str
    worker: int = Field(ge=0)
    workers: int = Field(ge=1)
    attempt: int = Field(ge=1)
    token: str
    """For the parameter server; bound to job, region, worker and attempt."""
    ps_address: str
    ps_name: str
    ca_pem: str
    channel: str
    channel_address: str
    bundle_key: str
    """Channel key of the packed task folder."""
    module: str
    config: dict[str, object]
    splits: dict[str, tuple[ShardFile, ...]]
    declared_samples: int | None = None
    """Of the training split, by the region's file: what the plan's epochs and shares rest on. None: not told."""
    region_batch: int = Field(ge=1)
    """Samples that all workers of the region draw in one step, together."""
    stretches: tuple[Stretch, ...] = ()
    """Where that changes, in order."""
    batch: int = Field(default=0, ge=0)
    """Samples that go through the model at a time, at most: what the memory was chosen for. 0: any number."""
    evaluation_batch: int = Field(default=0, ge=0)
    """Samples that an evaluation takes at a time; 0: as many as a step."""
    steps_per_round: int = Field(ge=1)
    rounds: int = Field(ge=1)
    seed: int
    schedule: Schedule | None = None
    """None: the learning rate is the optimiser's own."""
    slice_seconds: float = Field(gt=0)
    resume_key: str = ""
    """Channel key of what the last slice left, or, at the beginning of an attempt, a worker of the one before."""
    collective: str = "server-reduce"
    """Or "auto": the workers choose, all alike."""
    merging: dict[str, float] = {}
    """Of the collective: "k", "staleness", "significance"."""
    merging_codec: str = "fp32"
    channel_costs: dict[str, float] = {}
    """The fields of `ChannelCosts`, as the agent has measured them."""
    stages: tuple[tuple[int, int], ...] = ()
    """A pipeline: first and last layer of each stage, counted from 0, both included. Workers are numbered
    ``stage * degree + replica``. Empty: every worker holds the whole model."""
    degree: int = Field(default=1, ge=1)
    """Replicas of each stage."""
    micro_batch: int = Field(default=1, ge=1)
    """Samples."""
    order: Literal["gpipe", "1f1b"] = "1f1b"
    rematerialise: tuple[bool, ...] = ()
    """By stage: its activations are made again before each backward pass. Empty: none."""
    activation_codec: Literal["fp32", "bf16"] = "fp32"
    """Of what stages send each other; "fp32": as it is."""
    store_seconds: float = Field(default=5.0, ge=0)
    """Between two states that a stage stores for another attempt, at least."""


class Outcome(BaseModel):
    """How an invocation ended."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    status: Literal["continue", "done", "failed", "left"]
    """"left": the attempt was over, and what this worker had is under `resume_key`."""
    resume_key: str = ""
    step: int = 0
    """At which `resume_key` continues."""
    steps: int = 0
    """Made in this invocation."""
    samples: int = 0
    compute_seconds: float = 0.0
    merge_seconds: float = 0.0
    """Of its steps, beyond their compute."""
    steady_steps: int = 0
    """Those that came right after another one: not the first of the invocation, and none after a round's end."""
    steady_seconds: float = 0.0
    """Of as many steps that take the median of these, with all that they wait for: other stages, and merges. What held
    up a few of them, or what the first ones need new memory for, is not in it."""
    channel: dict[str, int] = {}
    """What this invocation asked of the channel, and bytes, by kind."""
    merged_by: str = ""
    """The collective that was used, for people."""
    code: str = ""
    """Of the error catalogue, where it failed."""
    message: str = ""
    hint: str = ""


def read_invocation(body: bytes) -> Invocation:
    """Parse a body; raises ``GeofedError("CONFIG_INVALID")``."""
    try:
        return Invocation.model_validate_json(body)
    except ValidationError as error:
        raise GeofedError(
            "CONFIG_INVALID", f"not an invocation: {error.error_count()} errors, {error.errors()[0]['loc']}"
        ) from None
