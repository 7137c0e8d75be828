"""JSON bodies of the worker function: the request that starts an invocation, and its answer."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from geofed_pb.errors import GeofedError
from region_agent.worker.data.spec import Stream
from sync.collective import DEFAULT

__all__ = [
    "CALL_GRACE",
    "MOST_DEVICES",
    "MOST_GPUS",
    "ClientRounds",
    "Gpus",
    "Invocation",
    "Outcome",
    "Precision",
    "PrivateSteps",
    "Schedule",
    "ShardFile",
    "Sharding",
    "Stretch",
    "read_invocation",
]

Precision = Literal["fp32", "bf16", "fp16"]
"""Type that matrix products and convolutions are computed in; "fp32": that of the tensors."""

Sharding = Literal["none", "fsdp"]
"""How the devices of a worker divide the model: "none": each holds it whole; "fsdp": each holds a part of parameters,
gradients and optimiser state."""
MOST_GPUS = 64
"""Most devices of a worker: more than one machine has."""
MOST_DEVICES = 1024
"""Most devices of a machine: `capacity.devices.count` is no larger."""
Gpus = Annotated[int, Field(ge=1, le=MOST_GPUS)] | Literal["auto"]
"""GPUs of a worker; "auto": all that its function sees."""
CALL_GRACE = timedelta(seconds=120)
"""Time that an invocation may take beyond its slice: to finish the step that it is in, and to wait for the other
workers or for the parameter server."""


class ShardFile(BaseModel):
    """One file of a shard: a path that the worker can open, or a URL that it can download."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    """Path relative to the split."""
    folder: bool = False
    """The split is a folder, and this is one of its files."""
    path: str = ""
    url: str = ""
    """Presigned URL: it is valid for this object only, and for a short time."""
    size: int | None = None
    """Bytes; None: unknown."""
    shard: str = ""
    """Region that the shard comes from; empty: this region."""
    version: str = ""
    """What changes with the file's content; empty: unknown."""


class Schedule(BaseModel):
    """Schedule of the learning rate over the job's steps."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    shape: Literal["constant", "linear", "cosine"] = "constant"
    warmup: float = Field(default=0.0, ge=0, lt=1)
    """Fraction of the steps over which the rate rises linearly."""
    floor: float = Field(default=0.0, ge=0, le=1)
    """Fraction of the full rate that is left at the last step."""
    begin: float = Field(default=0.0, ge=0, lt=1)
    """Fraction of the schedule that an earlier job has completed, whose model this job continues."""
    scale: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Factor of the optimiser's rate, as the region's batch is another than the rate is meant for."""


class Stretch(BaseModel):
    """A stretch of steps with one batch size. It ends where the next one begins."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    first_step: int = Field(ge=1)
    """First step of a round; steps are counted from 1."""
    batch: int = Field(ge=1)
    """Samples of all workers of the region in a step."""
    rate: float = Field(default=1.0, gt=0)
    """Factor of the learning rate."""


class PrivateSteps(BaseModel):
    """Differential privacy of samples."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    clip: float = Field(gt=0)
    """Largest norm of a sample's gradient."""
    noise: float = Field(gt=0)
    """Standard deviation of the noise of the region's sum, as a multiple of it."""
    rate: float = Field(gt=0, le=1)
    """Probability with which each sample is in a step."""
    key: str = Field(pattern=r"^[0-9a-f]{64}$")
    """Key that samples are drawn by. Nobody outside of the region may know who is in a step."""


class ClientRounds(BaseModel):
    """Federated averaging over the region's clients: a step is a round of them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    fraction: float = Field(gt=0, le=1)
    """Part of the clients that train in a round."""
    least: int = Field(default=1, ge=1)
    """Fewest clients of a round, if there are so many."""
    epochs: int = Field(default=0, ge=0)
    """Passes of a client over its samples in a round."""
    steps: int = Field(default=0, ge=0)
    """Local steps of a client in a round, in place of `epochs`."""
    batch: int = Field(ge=1)
    """Samples of a local step."""
    stated: int = Field(default=0, ge=0)
    """Clients of the training split by the region's file; 0: not known."""

    @model_validator(mode="after")
    def _trains(self) -> ClientRounds:
        if (self.epochs > 0) == (self.steps > 0):
            raise ValueError("give either epochs or steps")
        return self


class Invocation(BaseModel):
    """One bounded call of the worker function."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    job: str
    region: str
    worker: int = Field(ge=0)
    workers: int = Field(ge=1)
    attempt: int = Field(ge=1)
    token: str
    """Token for the parameter server, bound to job, region, worker and attempt."""
    ps_address: str
    ps_name: str
    ca_pem: str
    channel: str
    channel_address: str
    bundle_key: str
    """Channel key of the packed task folder."""
    module: str
    config: dict[str, object]
    env: dict[str, str] = {}
    """Environment variables, which are set before the task is loaded."""
    packages: str = ""
    """Folder with the packages that the task requires; empty: it requires none."""
    splits: dict[str, tuple[ShardFile, ...]]
    streams: dict[str, Stream] = {}
    """Splits that are read block by block."""
    declared_samples: int | None = None
    """Samples of the training split by the region's file, on which the plan's epochs and shares are based. None:
    unknown."""
    region_batch: int = Field(ge=1)
    """Samples of all workers of the region in one step."""
    stretches: tuple[Stretch, ...] = ()
    """Changes of that number, in the order of steps."""
    batch: int = Field(default=0, ge=0)
    """Largest number of samples in one forward pass, for which the memory was chosen; a step with more adds up the
    gradients of several passes. 0: no limit."""
    evaluation_batch: int = Field(default=0, ge=0)
    """Samples in one forward pass of an evaluation; 0: as in a step."""
    steps_per_round: int = Field(ge=1)
    rounds: int = Field(ge=1)
    seed: int
    schedule: Schedule | None = None
    """None: the optimiser's learning rate is not changed."""
    clip_norm: float = Field(default=0.0, ge=0)
    """Largest norm of a step's merged gradient; 0: any."""
    gpus: Gpus = 1
    """GPUs of this worker, which share its batch; "auto": all that the function sees. Without one it is the CPU."""
    billed_gpus: int = Field(default=0, ge=0)
    """GPUs that the region bills for this worker: where the function sees fewer, nothing is computed."""
    gpu_numbers: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(max_length=MOST_DEVICES)] = ()
    """Numbers of the GPUs that the agent gives this worker, of those that its function sees; empty: those from its
    number times `gpus` on."""
    devices: Annotated[
        tuple[Annotated[str, Field(pattern=r"^(cpu|cuda:[0-9]+)$")], ...], Field(max_length=MOST_GPUS)
    ] = ()
    """Devices in place of those that `gpus` stands for, such as ("cpu", "cpu"); empty: those."""
    sharding: Sharding = "none"
    """"fsdp": with several devices, each of them holds a part of the model."""
    evaluates_only: bool = False
    """Whether nothing is trained: the job's step leaves the model as it is."""
    precision: Precision = "fp32"
    """Precision of the passes, by autocast; parameters keep their types."""
    compile: bool = False
    """Whether calls of the model are compiled."""
    local: tuple[str, ...] = ()
    """Patterns of the names of tensors that stay in the region."""
    proximal: float = Field(default=0.0, ge=0)
    """mu of the term mu / 2 * |w - w_round|^2, whose gradient is added to the loss's; 0: none."""
    slice_seconds: float = Field(gt=0)
    """Time after which the invocation ends at the next step."""
    resume_key: str = ""
    """Channel key of the state stored by this worker's previous invocation or, at the beginning of an attempt, by a
    worker of the previous attempt. Empty: start from the parameter server's model."""
    collective: str = DEFAULT
    """Collective that merges the workers' steps; "auto": the workers choose one, and all choose the same."""
    merging: dict[str, float] = {}
    """Settings of the collective: "k", "staleness", "ratio", "significance", "mean" (1: `merge.step: mean`)."""
    merging_codec: str = "fp32"
    channel_costs: dict[str, float] = {}
    """Fields of `ChannelCosts` that the agent has measured."""
    stages: tuple[tuple[int, int], ...] = ()
    """Pipeline: first and last layer of each stage, counted from 0, both included. Workers are numbered
    ``stage * degree + replica``. Empty: every worker holds the whole model."""
    degree: int = Field(default=1, ge=1)
    """Replicas of each stage."""
    micro_batch: int = Field(default=1, ge=1)
    """Samples in a micro-batch."""
    order: Literal["gpipe", "1f1b"] = "1f1b"
    """Pipeline schedule."""
    rematerialise: tuple[bool, ...] = ()
    """For each stage: recompute its activations in the backward pass instead of storing them. Empty: no stage does."""
    activation_codec: Literal["fp32", "bf16"] = "fp32"
    """Codec of activations and their gradients between stages; "fp32": unchanged."""
    private: PrivateSteps | None = None
    """None: without differential privacy of samples."""
    clients: ClientRounds | None = None
    """How the region's clients train; None: its samples belong to no clients."""
    keeps_base: bool = False
    """Whether tensors that never change are left out of what is exchanged; the same for all workers of the job."""
    base_given: bool = False
    """Whether the region's server has a file that may hold them."""
    store_seconds: float = Field(default=5.0, ge=0)
    """Shortest time between two states that a stage stores for a later attempt."""

    @model_validator(mode="after")
    def _adds_noise(self) -> Invocation:
        # Clients and stages make steps of their own, which know nothing of noise.
        if self.private is not None and (self.clients is not None or self.stages):
            raise ValueError("differential privacy of samples with clients or stages")
        return self

    @model_validator(mode="after")
    def _divides(self) -> Invocation:
        if self.sharding == "none":
            return self
        refused = (
            (self.private is not None, "differential privacy of samples"),
            (self.clients is not None, "clients"),
            (bool(self.stages), "stages"),
            (self.compile, "compiled calls"),
            (self.precision == "fp16", "a scaled loss"),
            (self.proximal > 0, "a proximal term"),
            (self.evaluates_only, "a job that trains nothing"),
        )
        for is_refused, text in refused:
            if is_refused:
                raise ValueError(f"parts of the model with {text}")
        return self


class Outcome(BaseModel):
    """BoundaryAnswer of an invocation: how it ended, and what it used."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    status: Literal["continue", "done", "failed", "left"]
    """"left": the attempt was fenced, and this worker's state is stored under `resume_key`."""
    resume_key: str = ""
    """Channel key of the stored state."""
    step: int = 0
    """First step that an invocation with `resume_key` makes."""
    waits_for: int = 0
    """Round whose end the worker waits for, with nothing else to do; 0: it has steps to make."""
    steps: int = 0
    """Steps made in this invocation."""
    samples: int = 0
    compute_seconds: float = 0.0
    merge_seconds: float = 0.0
    """Time of the steps beyond their compute."""
    steady_steps: int = 0
    """Steps that directly follow another one: neither the first of the invocation, nor the first of a round."""
    steady_seconds: float = 0.0
    """``steady_steps`` times their median duration, which includes waits for other stages and merges. With the median,
    a few slow steps do not count, nor the first ones, which allocate memory."""
    channel: dict[str, int] = {}
    """Requests to the channel and bytes, by kind."""
    merged_by: str = ""
    """Collective that was used, as text for users."""
    code: str = ""
    """Error code from the catalogue, if the invocation failed."""
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
