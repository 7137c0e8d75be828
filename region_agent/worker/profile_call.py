"""JSON bodies of a profiling invocation of the worker function: its request and its answer."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from geofed_pb.bounds import MOST_LABELS
from geofed_pb.errors import GeofedError
from region_agent.worker.data.spec import Stream
from region_agent.worker.invocation import ClientRounds, Gpus, Precision, ShardFile, Sharding

__all__ = [
    "LayerNumbers",
    "NormNumbers",
    "ProfileCall",
    "Profiled",
    "StepNumbers",
    "is_profile_call",
    "read_profile_call",
]

_PREFIX = b'{"kind":"profile",'
"""First bytes of the body of a `ProfileCall`."""

_Labels = Annotated[
    dict[Annotated[int, Field(ge=0, lt=MOST_LABELS)], Annotated[int, Field(ge=1)]], Field(max_length=MOST_LABELS)
]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ProfileCall(_Body):
    """One bounded call that measures a task and trains nothing."""

    kind: Literal["profile"] = "profile"
    """Must be the first field: the function recognises a profiling request by it."""
    job: str
    """Name under which values are stored in the channel; no job has this name."""
    region: str
    channel: str
    channel_address: str
    bundle_key: str
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
    """Samples of the training split by the region's file. None: unknown."""
    batch: int = Field(ge=1)
    """Batch of the job file, in samples."""
    at_once: int = Field(default=0, ge=0)
    """Largest number of samples in one forward pass of a step; 0: no limit."""
    local: tuple[str, ...] = ()
    """Patterns of the names of tensors that stay in the region."""
    evaluates_only: bool = False
    """Whether the job trains nothing."""
    precision: Precision = "fp32"
    """Precision of the passes, as in `Invocation`."""
    compile: bool = False
    """Whether calls of the model are compiled."""
    gpus: Gpus = 1
    """GPUs of a worker, as in `Invocation`; one is measured, with its part of the batch."""
    billed_gpus: int = Field(default=0, ge=0)
    """GPUs that the region bills for a worker, as in `Invocation`."""
    sharding: Sharding = "none"
    """How the devices of a worker divide the model; one is measured, with the whole model if it fits."""
    gpu: int = Field(default=0, ge=0)
    """Number of the GPU that is measured, of those that the function sees."""
    evaluation_batch: int = Field(default=0, ge=0)
    """Samples in one forward pass of an evaluation; 0: as in a step."""
    clients: ClientRounds | None = None
    """How the region's clients train; None: its samples belong to no clients."""
    seed: int
    limit_seconds: float = Field(gt=0)
    """Time after which only measurements that every profile needs are begun."""
    memory_mb: int = Field(default=0, ge=0)
    """Memory of the function; 0: unknown, and the model is assumed to fit."""
    measure: Literal["all", "nothing", "size", "pace", "labels"] = "all"
    """"nothing": only load task and data, to measure what an invocation costs in a warm replica; "size": size of the
    model, without reading data; "pace": a few steps, for at most `limit_seconds` after loading; "labels": labels
    alone, without a model."""

    labels: bool = False
    """Whether measures "all", "pace" and "labels" count labels."""


class StepNumbers(_Body):
    """Forward and backward pass of one batch. Of a job with clients: of a round of them, in local steps of that batch,
    the share of so many samples, the optimiser's steps and the mean included."""

    batch: int
    seconds: float
    peak_mb: float
    """Largest memory of the process; 0: unknown. Estimated for a model that is too large to be created whole."""
    device_bytes: int = 0
    """Most memory of the GPU that tensors took during steps of measure "pace"; 0: there is no GPU."""


class NormNumbers(_Body):
    """Squared norms of a mean gradient over many samples, and of the gradients of its parts (mean of the squares)."""

    small_batch: int
    small_norm2: float
    large_batch: int
    large_norm2: float


class LayerNumbers(_Body):
    """Measurements of a layer; fields as in `sync.pipeline.LayerMeasure`."""

    name: str
    kind: str
    parameter_bytes: int
    state_bytes: int
    activation_bytes: float
    output_bytes: float
    forward_alpha_seconds: float
    forward_beta_seconds: float
    backward_alpha_seconds: float
    backward_beta_seconds: float
    update_seconds: float = 0.0
    optimizer_bytes: int = 0
    make_seconds: float = 0.0


class Profiled(_Body):
    """Answer to a `ProfileCall`: numbers, names of layers, or an error message. Of the data only counts of labels."""

    status: Literal["done", "failed"]
    parameters: int = 0
    model_bytes: int = 0
    held_bytes: int = 0
    """Size of all tensors of the model, also of those that are not trained, of the gradients, and of the vectors that
    rounds of clients take."""
    batch_norms: tuple[str, ...] = ()
    """Names of the first layers with running statistics of batches, `MOST_BATCH_NORMS` at most."""
    samples: int = 0
    """Samples in the training split."""
    loaded_seconds: float = 0.0
    """Time until model and data were loaded."""
    seconds: float = 0.0
    """Duration of the whole invocation, measured in the function."""
    steps: tuple[StepNumbers, ...] = ()
    """Steps by batch. Those of measure "pace" include the optimiser's step, and have no peak memory."""
    update_seconds: float = 0.0
    """Duration of the optimiser's step; 0 with clients, whose steps are part of `steps`."""
    norms: tuple[NormNumbers, ...] = ()
    evaluation_peak_mb: float = 0.0
    """Largest memory of the process while it evaluated one batch; 0: unknown, or there is no test split."""
    layers: tuple[LayerNumbers, ...] = ()
    message_seconds: float = 0.0
    """Duration of a short message between two stages; 0: not measured, as the model has no layers to make stages of."""
    message_core_seconds: float = 0.0
    """CPU time of such a message."""
    layers_note: str = ""
    """Reason why ``layers`` is empty."""
    labels: _Labels = {}
    """How often each label occurs among some samples; empty: not counted. The agent withholds small numbers."""
    channel: dict[str, int] = {}
    """Requests to the channel and bytes, by kind."""
    code: str = ""
    """Error code from the catalogue, if the invocation failed."""
    message: str = ""
    hint: str = ""


def is_profile_call(body: bytes) -> bool:
    """Whether a body is a profiling request; only its first bytes are read."""
    return body.startswith(_PREFIX)


def read_profile_call(body: bytes) -> ProfileCall:
    """Parse a body; raises ``GeofedError("CONFIG_INVALID")``."""
    try:
        return ProfileCall.model_validate_json(body)
    except ValidationError as error:
        text = f"not a profiling invocation: {error.error_count()} errors, {error.errors()[0]['loc']}"
        raise GeofedError("CONFIG_INVALID", text) from None
