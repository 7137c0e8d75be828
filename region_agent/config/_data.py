"""Sections of the region file about data: datasets and object stores."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from region_agent.config._section import Section
from region_agent.config._types import Float, Int, RegionName, RoleName
from region_agent.worker.data.formats import check_format
from region_agent.worker.data.spec import FormatSpec


class SplitConfig(Section):
    """One split of a shard."""

    uri: str
    """Address of the data: a path, `file://`, or `s3://bucket/key`. One that ends with `/` is a folder."""
    samples: Annotated[Int, Field(ge=0)] | None = None
    """Length of the task's dataset of this split; required unless the dataset has a `format`, whose samples are
    counted."""
    clients: Annotated[Int, Field(ge=1)] | None = None
    """Number of clients whose samples the split has, for jobs with `clients` (docs/clients.md). Where the `format` has
    `clients`, they are counted."""

    @field_validator("uri")
    @classmethod
    def _check_uri(cls, value: str) -> str:
        scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://", value)
        if scheme and scheme[1] not in ("s3", "file"):
            raise ValueError(f"{scheme[0]} is not supported; use s3:// for COS and others, with an entry in `stores`")
        if scheme and scheme[1] == "s3" and not re.fullmatch(r"s3://[^/]+/.*", value, re.DOTALL):
            raise ValueError("write it like s3://bucket/key, or s3://bucket/folder/")
        return value


class PrivacyBudget(Section):
    """How much of a shard may be told by what is trained on it (docs/privacy.md)."""

    epsilon: Annotated[Float, Field(gt=0, le=1000)]
    """Most that all jobs together may spend, for ever."""
    delta: Annotated[Float, Field(gt=0, lt=1)]
    """Probability with which epsilon may not hold; less than one by the number of samples."""
    honest_regions: Annotated[Int, Field(ge=1)] | None = None
    """With `level: region` and secure aggregation: regions, this one included, whose noise counts, since their
    operators neither leave it out nor tell it. Default: `privacy.minRegions` - 1 of the job, whichever regions the
    control plane has chosen. 1: only the noise that this region adds itself."""


class AllowedConfig(Section):
    """Whose code may run on a dataset (docs/region-file.md#whose-code-runs-here)."""

    users: tuple[str, ...] = ()
    """Users of `policy.allowUsers`."""
    roles: tuple[RoleName, ...] = ()
    """Roles of `policy.roles`: all users that have one of them."""


class DatasetConfig(Section):
    """A shard that this region holds."""

    residency: Literal["region", "cloud", "anywhere"] | tuple[RegionName, ...] = "region"
    """Regions that may process the shard. `region`: this one only. `cloud`: all of its cloud. `anywhere`: all. A list:
    this one and those listed."""
    store: str = ""
    """Name of the object store in `stores`, for `s3://` addresses."""
    format: Annotated[FormatSpec, AfterValidator(check_format)] | None = None
    """Format of the files, whose samples geofed reads and counts itself (docs/data.md). Default: the task's `dataset`
    reads them."""
    splits: dict[str, SplitConfig]
    """Splits of the shard, by name: `train`, `test` and others that the task's `dataset` knows."""
    privacy: PrivacyBudget | None = None
    """Budget of differential privacy of the `train` split. With it the region takes only jobs with
    `privacy.differential` that keep within it, whatever the control plane says. Metrics of its `test` split, which have
    no noise, leave only with `minimumCount`. Default: any job."""

    minimum_count: Annotated[Int, Field(ge=2, le=1_000_000)] | None = None
    """Fewest test samples of which metrics leave the region, and fewest in a bin of a histogram, or with a label that a
    profile counts (docs/privacy.md). Default: any number; 10 with a label."""

    allow: AllowedConfig | None = None
    """Whose code may run on the shard, in jobs, profiles and probes. Default: all whose code runs in the region."""

    digest: Literal["keyed", "plain", "none"] = "keyed"
    """What leaves the region of each split's digest, for the statement of where a model comes from (docs/audit.md).
    `keyed`: a digest that only the region's key can make. `plain`: one that whoever has the data, or guesses them, can
    make. `none`: nothing."""

    @model_validator(mode="after")
    def _stays_here(self) -> DatasetConfig:
        if self.residency != "region":
            if self.privacy is not None:
                raise ValueError("`privacy` requires `residency: region`: another region accounts for none of its data")
            if self.minimum_count is not None:
                raise ValueError("`minimumCount` requires `residency: region`: other regions do not keep to it")
            if self.allow is not None:
                raise ValueError("`allow` requires `residency: region`: other regions do not know whose code may run")
        return self

    @property
    def counted(self) -> bool:
        """Whether the samples of all splits are known."""
        return all(part.samples is not None for part in self.splits.values())


class ModelsConfig(Section):
    """A folder of files that jobs may start from."""

    uri: Annotated[str, Field(pattern=r"^(s3://[^/\s]+/(.*/)?|file:///(.*/)?)$")]
    """Address of the folder, which ends with `/`: `s3://bucket/folder/`, or `file:///folder/` on this machine."""
    store: str = ""
    """Name of the object store in `stores`, for `s3://` addresses."""


class StoreConfig(Section):
    """An S3-compatible object store; its credentials come from the SDK's credential chain."""

    endpoint_url: str | None = None
    """Address of the store. Default: the SDK's."""
    region: str | None = None
    """Region of the store. Default: the SDK's."""
    profile: str | None = None
    """Profile of the SDK's configuration. Default: the SDK's."""
