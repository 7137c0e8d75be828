"""The sweep file, read as strictly as a job file."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from control_plane.cli._job_file import read_job
from control_plane.spec import JobSpec, key_path
from control_plane.spec.sections import Section
from geofed_pb.errors import GeofedError
from geofed_pb.files import strict_yaml

MAX_TRIALS = 1000
"""Limit of the trials of a sweep: each is a job that the control plane keeps."""
_MAX_FILE_BYTES = 1 << 20
"""Largest sweep file; that of a job file."""
_MAX_PARAMETERS = 32
"""Most keys that vary; no search covers more within `MAX_TRIALS`."""
_HINT = "correct the sweep file; docs/sweeps.md describes it"


class ParameterRange(Section):
    """Numbers from `min` to `max`, of which trials draw one."""

    min: float | int
    max: float | int
    scale: Literal["linear", "log"] = "linear"
    """`log`: each factor of ten is drawn equally often."""
    integer: bool = False
    """Only whole numbers."""

    @model_validator(mode="after")
    def _is_a_range(self) -> ParameterRange:
        if not self.min < self.max:
            raise ValueError("`min` must be less than `max`")
        if self.scale == "log" and self.min <= 0:
            raise ValueError("`scale: log` requires `min` greater than 0")
        if self.integer and not (float(self.min).is_integer() and float(self.max).is_integer()):
            raise ValueError("`integer` requires whole `min` and `max`")
        return self


class SweepMetadata(Section):
    """Name of a sweep."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$")]
    """Lower-case letters, digits and hyphens, 40 at most. Its trials are called `NAME-1`, `NAME-2`, …"""


class SweepFile(Section):
    """Parameters of a job, and how their values are searched."""

    api_version: Literal["geofed/v1"]
    kind: Literal["Sweep"]
    metadata: SweepMetadata
    job: str
    """Path of the job file, relative to the sweep file."""
    parameters: dict[str, list[Any] | ParameterRange] = Field(min_length=1, max_length=_MAX_PARAMETERS)
    """By the key of the job file, such as `task.config.lr`: a list of values, or a range."""
    search: Literal["grid", "random", "optuna"] = "grid"
    """`grid`: every combination of the values. `random`: independent draws. `optuna`: the next values by what earlier
    trials gave, with Optuna's tree-structured Parzen estimator; needs the extra `optuna`."""
    trials: int | None = Field(default=None, ge=1, le=MAX_TRIALS)
    """Number of trials, for `random` and `optuna`; a grid has as many as it has combinations."""
    parallel: Literal["auto"] | Annotated[int, Field(ge=1, le=MAX_TRIALS)] = "auto"
    """Trials at a time. `auto`: as many as the regions have workers for."""
    metric: str | None = None
    """What is compared: `loss`, or a metric of the task. Default: `train.best.metric` of the job file."""
    mode: Literal["min", "max"] | None = None
    """Whether less or more of it is better. Default: `train.best.mode` of the job file."""
    budget: float | None = Field(default=None, gt=0)
    """USD for all trials together. A trial starts only if the upper end of its predicted cost is left, with a quarter
    more, and gets that as its own budget."""
    seed: int = Field(default=0, ge=0, lt=1 << 31)
    """Of `random` and `optuna`."""

    @model_validator(mode="after")
    def _fits_together(self) -> SweepFile:
        places: dict[tuple[str, ...], str] = {}
        for key, values in self.parameters.items():
            if (other := places.setdefault(key_path(key), key)) != key:
                raise ValueError(f"`{key}` and `{other}` are the same key of the job file; keep one")
            if isinstance(values, ParameterRange):
                if self.search == "grid":
                    raise ValueError(f"`{key}`: a grid requires a list of values; or use `search: random`")
            elif not values:
                raise ValueError(f"`{key}` has no values")
        if self.search == "grid":
            if self.trials is not None:
                raise ValueError("`trials` cannot be used with a grid, which tries every combination")
            count = math.prod(len(values) for values in self.parameters.values() if isinstance(values, list))
            if count > MAX_TRIALS:
                raise ValueError(f"the grid has {count:,} combinations; the limit is {MAX_TRIALS}")
        elif self.trials is None:
            raise ValueError(f"`search: {self.search}` requires `trials`")
        if (self.metric is None) != (self.mode is None):
            raise ValueError("give `metric` and `mode` together")
        return self


@dataclass(frozen=True)
class LoadedSweep:
    """A sweep file whose job file is valid with the sweep's keys."""

    file: SweepFile
    job_file: Path
    spec: JobSpec
    """The job as it is without the sweep's values."""
    metric: str
    maximise: bool
    id: str
    """Name and a digest of the sweep, the job and the code: another file is another sweep."""


def load_sweep(path: Path) -> LoadedSweep:
    """Read and validate a sweep file and its job file.

    Raises ``GeofedError``: SPEC_NOT_FOUND; SPEC_INVALID with one line for each error.
    """
    try:
        file = strict_yaml.validate(SweepFile, strict_yaml.parse(_read(path), str(path)))
    except strict_yaml.InvalidYaml as error:
        raise GeofedError("SPEC_INVALID", str(error), hint=_HINT) from None
    job_file = path.parent / file.job
    loaded, packed = read_job(job_file, None)
    best = loaded.spec.train.compared
    facts = json.dumps([file.model_dump(mode="json"), loaded.json, packed.digest], sort_keys=True)
    digest = hashlib.sha256(facts.encode()).hexdigest()[:12]
    metric, mode = file.metric or best.metric, file.mode or best.mode
    return LoadedSweep(file, job_file, loaded.spec, metric, mode == "max", f"{file.metadata.name}-{digest}")


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise GeofedError("SPEC_INVALID", f"{path} is larger than {_MAX_FILE_BYTES} bytes; is it a sweep file?")
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise GeofedError("SPEC_INVALID", f"{path} is not UTF-8 text") from None
    except OSError as error:
        raise GeofedError("SPEC_NOT_FOUND", f"cannot read the sweep file {path}: {error.strerror}") from None
