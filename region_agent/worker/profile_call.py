"""What a profiling invocation is told and what it answers: JSON bodies of the worker function, as `invocation.py`'s."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from geofed_pb.errors import GeofedError
from region_agent.worker.invocation import ShardFile

__all__ = [
    "LayerNumbers",
    "NormNumbers",
    "ProfileCall",
    "Profiled",
    "StepNumbers",
    "is_profile_call",
    "read_profile_call",
]

_MARK = b'{"kind":"profile",'


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ProfileCall(_Body):
    """One bounded call that measures a task and trains nothing."""

    kind: Literal["profile"] = "profile"
    """First in the body: by it the function knows what is asked."""
    job: str
    """What keeps its values in the channel apart; no job has this name."""
    region: str
    channel: str
    channel_address: str
    bundle_key: str
    module: str
    config: dict[str, object]
    splits: dict[str, tuple[ShardFile, ...]]
    declared_samples: int | None = None
    """Of the training split, by the region's file. None: not told."""
    batch: int = Field(ge=1)
    """Of the job file."""
    evaluation_batch: int = Field(default=0, ge=0)
    """Samples that an evaluation takes at a time; 0: as many as a step."""
    seed: int
    limit_seconds: float = Field(gt=0)
    """After it no new measurement begins, beyond what must be known."""
    memory_mb: int = Field(default=0, ge=0)
    """Of the function; 0: not known, and the model is taken to fit."""
    measure: Literal["all", "nothing", "size", "pace"] = "all"
    """"nothing": it only makes ready, which tells what an invocation of a worker that is there takes; "size": of the
    model, without looking at data; "pace": a few steps, for `limit_seconds` once data and model are there."""


class StepNumbers(_Body):
    """Forward and backward pass of one batch."""

    batch: int
    seconds: float
    peak_mb: float
    """Of the process; 0: the system does not tell. Of a model that is too large to be made whole: what it would be."""


class NormNumbers(_Body):
    """Squared norms of a gradient from many samples, and of the parts that it is the mean of."""

    small_batch: int
    small_norm2: float
    large_batch: int
    large_norm2: float


class LayerNumbers(_Body):
    """`sync.pipeline.LayerMeasure`."""

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
    """What came of it. Numbers, the names of layers, and of a failure its sentence: nothing of the data."""

    status: Literal["done", "failed"]
    parameters: int = 0
    model_bytes: int = 0
    samples: int = 0
    """In the training split."""
    loaded_seconds: float = 0.0
    """Until model and data were there."""
    seconds: float = 0.0
    """Of the whole invocation, as the function saw it."""
    steps: tuple[StepNumbers, ...] = ()
    """Of a pace the optimiser's step is in them, and no peak."""
    update_seconds: float = 0.0
    """Of the optimiser's step."""
    norms: tuple[NormNumbers, ...] = ()
    evaluation_peak_mb: float = 0.0
    """Of the process, while it evaluated one batch; 0: the system does not tell, or there is no test split."""
    layers: tuple[LayerNumbers, ...] = ()
    message_seconds: float = 0.0
    """Of a short message from stage to stage; 0: not measured, as there are no layers to make stages of."""
    message_core_seconds: float = 0.0
    layers_note: str = ""
    """Why there are none."""
    channel: dict[str, int] = {}
    code: str = ""
    """Of the error catalogue, where it failed."""
    message: str = ""
    hint: str = ""


def is_profile_call(body: bytes) -> bool:
    """Whether a body asks for a profile; of any other nothing else is looked at."""
    return body.startswith(_MARK)


def read_profile_call(body: bytes) -> ProfileCall:
    """Parse a body; raises ``GeofedError("CONFIG_INVALID")``."""
    try:
        return ProfileCall.model_validate_json(body)
    except ValidationError as error:
        text = f"not a profiling invocation: {error.error_count()} errors, {error.errors()[0]['loc']}"
        raise GeofedError("CONFIG_INVALID", text) from None
