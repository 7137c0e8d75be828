"""The region's configuration: one YAML file, written by its operator."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic.alias_generators import to_camel
from ruamel.yaml import YAML
from ruamel.yaml.constructor import RoundTripConstructor
from ruamel.yaml.error import YAMLError

from geofed_pb.address import bracketed
from geofed_pb.errors import GeofedError

__all__ = [
    "ChannelPricesConfig",
    "DatasetConfig",
    "FileChannelConfig",
    "PricesConfig",
    "RedisChannelConfig",
    "RegionConfig",
    "S3ChannelConfig",
    "StoreConfig",
    "load_config",
]

Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Port = Annotated[int, Field(ge=1, le=65535)]
RegionName = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?$")]


_Resolved = TypeVar("_Resolved", bound="_Section")


def _two_or_more(ports: tuple[int, int]) -> tuple[int, int]:
    if ports[0] >= ports[1]:
        raise ValueError(f"{ports[0]} to {ports[1]} holds no two ports; write the first and the last of a range")
    return ports


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, alias_generator=to_camel, populate_by_name=True)


class Metadata(_Section):
    """Who the region is."""

    name: RegionName


class CapacityConfig(_Section):
    """What may run here at one time."""

    workers: Annotated[int, Field(ge=0, le=1024)]
    """0: the region only holds data, which others may process where its residency allows that."""
    memory_mb: Annotated[int, Field(ge=128)] = 2048
    samples_per_second: Positive | None = None
    """Of one worker, if the operator knows it."""
    preemptible: Annotated[int, Field(ge=0, le=1024)] = 0
    """Workers besides, that the cloud may take away at any time."""
    cores: NotNegative | None = None
    """That all functions share; 0: each has its own. None: those of this machine where the embedded gateway runs the
    functions, else 0."""


def _date(text: str) -> str:
    try:
        date.fromisoformat(text if len(text) > len("2026-01") else f"{text}-01")
    except ValueError:
        raise ValueError(f"{text!r} is no date") from None
    return text


DateText = Annotated[str, Field(pattern=r"^[0-9]{4}-[0-9]{2}(-[0-9]{2})?$"), AfterValidator(_date)]
"""A day, or a month."""


class PricesConfig(_Section):
    """What the region costs; all must be stated, and where they come from."""

    source: Annotated[str, Field(min_length=1)]
    as_of: DateText
    function_usd_per_gb_second: NotNegative
    function_usd_per_request: NotNegative
    server_usd_per_hour: NotNegative
    egress_usd_per_gb: NotNegative
    egress_to: dict[str, NotNegative] = {}
    preemptible_usd_per_gb_second: NotNegative | None = None
    """Of functions on capacity that may be taken away; stated where there is such capacity."""


class SplitConfig(_Section):
    """One part of a shard."""

    uri: str
    """A path (relative to this file), `file://`, or `s3://bucket/key`; one that ends in `/` is a folder."""
    samples: Annotated[int, Field(ge=0)]

    @field_validator("uri")
    @classmethod
    def _can_be_read(cls, value: str) -> str:
        scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://", value)
        if scheme and scheme[1] not in ("s3", "file"):
            raise ValueError(f"{scheme[0]} cannot be read; COS and others are read as s3://, with a store of their own")
        if scheme and scheme[1] == "s3" and not re.fullmatch(r"s3://[^/]+/.*", value, re.DOTALL):
            raise ValueError("write it like s3://bucket/key, or s3://bucket/folder/")
        return value


class DatasetConfig(_Section):
    """A shard that this region holds."""

    residency: Literal["region", "cloud", "anywhere"] | tuple[RegionName, ...] = "region"
    """Where the shard may be processed: in this region, in any region of its cloud, anywhere, or in those named too."""
    store: str = ""
    """Name in `stores`, for s3:// addresses."""
    splits: dict[str, SplitConfig]


class LinkConfig(_Section):
    """What the operator knows of the way to another region."""

    rtt_ms: NotNegative
    mbps: NotNegative
    """0: there is no direct path; the regions' updates are passed on by others."""


class StoreConfig(_Section):
    """An S3-compatible object store; its credentials come from the SDK's own chain."""

    endpoint_url: str | None = None
    region: str | None = None
    profile: str | None = None
    """Of the SDK's configuration."""


class EmbeddedGateway(_Section):
    """Functions as processes of this machine."""

    kind: Literal["embedded"] = "embedded"
    profile: Literal["none", "ce"] = "none"


class OpenFaasGateway(_Section):
    """A real OpenFaaS."""

    kind: Literal["openfaas"]
    url: str
    user_file: Path | None = None
    password_file: Path | None = None
    ca_file: Path | None = None
    image: str
    namespace: str = ""
    preemptible_constraints: tuple[str, ...] = ()
    """Placement constraints of functions on capacity that may be taken away."""


class ChannelPricesConfig(_Section):
    """What the channel costs: its server by the hour, requests by kind. What is not billed is 0, and said to be."""

    source: Annotated[str, Field(min_length=1)]
    as_of: DateText
    usd_per_hour: NotNegative = 0.0
    usd_per_put: NotNegative = 0.0
    """Also of a request that lists."""
    usd_per_get: NotNegative = 0.0
    """Also of one that finds nothing."""
    usd_per_delete: NotNegative = 0.0


class FileChannelConfig(_Section):
    """A folder."""

    kind: Literal["file"] = "file"
    path: Path | None = None
    """Default: shared memory, or the state directory where there is none."""
    prices: None = None


class RedisChannelConfig(_Section):
    """A Redis server."""

    kind: Literal["redis"]
    url: Annotated[str, Field(pattern=r"^(redis|rediss)://[^@?]+$|^unix://[^@?]+$")]
    """Without credentials."""
    user: str = "default"
    password_file: Path | None = None
    """With it, each job's workers get a Redis user of their own, which sees that job's keys only."""
    prices: ChannelPricesConfig | None = None


class S3ChannelConfig(_Section):
    """A bucket of an S3-compatible object store; credentials come from the SDK's own chain."""

    kind: Literal["s3"]
    bucket: Annotated[str, Field(min_length=3)]
    prefix: str = ""
    endpoint_url: str | None = None
    region: str | None = None
    path_style: bool = False
    worker_credentials_file: Path | None = None
    """An SDK's credentials file as workers see it, good for this bucket and no more; none: they have a role."""
    prices: ChannelPricesConfig | None = None


class PolicyConfig(_Section):
    """What the region lets the federation do here."""

    accept_jobs: bool = True
    max_workers_per_job: int | None = None
    ship_logs: bool = True
    """Whether lines that job code writes may leave the region."""
    accept_shards: bool = True
    """Whether other regions' shards may be processed here, where their own residency allows it."""


Host = Annotated[str, AfterValidator(bracketed)]
"""As it stands before a port."""


class ServerConfig(_Section):
    """Where parameter servers listen."""

    exchange_host: Host = "0.0.0.0"
    """For other regions' parameter servers, and this agent."""
    worker_host: Host = "127.0.0.1"
    """For this region's workers."""
    ports: Annotated[tuple[Port, Port], AfterValidator(_two_or_more)] | None = None
    """First and last port for parameter servers, each of which takes three, or two if need be; default: any."""


class RegionConfig(_Section):
    """The whole file."""

    api_version: Literal["geofed/v1"]
    kind: Literal["Region"]
    metadata: Metadata
    cloud: Annotated[str, Field(min_length=1)]
    advertise: Host = "127.0.0.1"
    """Host or address under which other regions reach this one's parameter servers."""
    capacity: CapacityConfig
    prices: PricesConfig | None = None
    datasets: dict[str, DatasetConfig] = {}
    links: dict[str, LinkConfig] = {}
    stores: dict[str, StoreConfig] = {}
    gateway: Annotated[EmbeddedGateway | OpenFaasGateway, Field(discriminator="kind")] = EmbeddedGateway()
    channel: Annotated[FileChannelConfig | RedisChannelConfig | S3ChannelConfig, Field(discriminator="kind")] = (
        FileChannelConfig()
    )
    """Where the workers of a partition exchange tensors."""
    policy: PolicyConfig = PolicyConfig()
    server: ServerConfig = ServerConfig()

    @field_validator("channel", mode="before")
    @classmethod
    def _a_folder_unless_it_says_otherwise(cls, value: Any) -> Any:
        return {"kind": "file", **value} if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _every_price_is_stated(self) -> RegionConfig:
        if self.prices is not None and self.channel.kind != "file" and self.channel.prices is None:
            raise ValueError("`channel.prices` is missing: what the account leaves out would be counted as free")
        if self.capacity.preemptible:
            if self.prices is not None and self.prices.preemptible_usd_per_gb_second is None:
                raise ValueError(
                    "`prices.preemptibleUsdPerGbSecond` is missing: an unknown price is never taken for zero"
                )
            if isinstance(self.gateway, OpenFaasGateway) and not self.gateway.preemptible_constraints:
                raise ValueError(
                    "`gateway.preemptibleConstraints` is missing: it says where preemptible workers are to run"
                )
        return self

    @property
    def name(self) -> str:
        return self.metadata.name

    @property
    def takes_shards(self) -> bool:
        """Whether other regions' shards can be processed here: functions must be able to read the agent's files."""
        policy = self.policy
        return policy.accept_jobs and policy.accept_shards and isinstance(self.gateway, EmbeddedGateway)

    def catalogue(
        self,
        preemptible: int | None = None,
        sizes: Mapping[str, Mapping[str, int]] | None = None,
        withheld: Collection[str] = (),
    ) -> dict[str, Any]:
        """What the control plane is told, in the form that its scheduler reads; paths stay here.

        ``preemptible``: workers that are there now of those that may be taken away; None: all. ``sizes``: bytes of
        splits by dataset, of those that may be processed elsewhere. ``withheld``: datasets that are not offered.
        """
        sizes = sizes or {}
        prices = self.prices.model_dump(exclude={"preemptible_usd_per_gb_second"}) if self.prices else None
        capacity = self.capacity.model_dump()
        if preemptible is not None:
            capacity["preemptible"] = preemptible
        if self.capacity.cores is None:
            shared = isinstance(self.gateway, EmbeddedGateway)
            capacity["cores"] = float(len(os.sched_getaffinity(0))) if shared else 0.0
        return {
            "name": self.name,
            "cloud": self.cloud,
            "capacity": capacity,
            "channel": self.channel.kind,
            "prices": prices,
            "takes_shards": self.takes_shards,
            "datasets": [
                {
                    "name": name,
                    "residency": held.residency,
                    "splits": {
                        split: {"samples": part.samples, "bytes": sizes.get(name, {}).get(split)}
                        for split, part in held.splits.items()
                    },
                }
                for name, held in sorted(self.datasets.items())
                if name not in withheld
            ],
            "links": [
                {"source": self.name, "destination": other, "rtt_ms": link.rtt_ms, "mbps": link.mbps}
                for other, link in sorted(self.links.items())
            ],
        }


def load_config(path: Path) -> RegionConfig:
    """Read a region's configuration; relative paths in it are taken from its folder.

    Raises ``GeofedError("CONFIG_INVALID")`` with every wrong key and its line.
    """
    try:
        raw = _yaml().load(path.read_text())
    except FileNotFoundError:
        raise GeofedError("CONFIG_INVALID", f"there is no {path}", hint="give the file with --config") from None
    except (OSError, UnicodeDecodeError, YAMLError) as error:
        raise GeofedError("CONFIG_INVALID", f"{path}: {error}") from None
    if not isinstance(raw, dict):
        raise GeofedError("CONFIG_INVALID", f"{path}: not a mapping")
    try:
        config = RegionConfig.model_validate(raw)
    except ValidationError as error:
        problems = [
            f"{path}:{_line(raw, e['loc'])}: {'.'.join(map(str, e['loc']))}: {_told(e)}" for e in error.errors()
        ]
        raise GeofedError("CONFIG_INVALID", "\n".join(problems)) from None
    _check_stores(config, raw, path)
    return _resolved(config, path.parent.resolve())


def _told(error: Any) -> str:
    if error["type"] == "string_type" and isinstance(error["input"], int | float):
        return f"{error['msg']}: put {error['input']} in quotes"
    return str(error["msg"])


def _yaml() -> YAML:
    """Where a date stands without quotes it is text as any, as in YAML 1.2."""
    yaml = YAML(typ="rt")
    yaml.Constructor = _Constructor
    return yaml


class _Constructor(RoundTripConstructor):
    pass


_Constructor.add_constructor("tag:yaml.org,2002:timestamp", RoundTripConstructor.construct_yaml_str)


def _check_stores(config: RegionConfig, raw: Any, path: Path) -> None:
    for name, held in config.datasets.items():
        if held.store and held.store not in config.stores:
            where = f"{path}:{_line(raw, ('datasets', name, 'store'))}: datasets.{name}.store"
            raise GeofedError("CONFIG_INVALID", f"{where}: {held.store!r} is not in stores")


def _line(raw: Any, location: tuple[int | str, ...]) -> int:
    """Line of the deepest part of a location that the file has."""
    line = 1
    for part in location:
        if not isinstance(raw, dict) or part not in raw:
            # A key that is missing, or the name of a variant, which has no line of its own.
            continue
        line = raw.lc.key(part)[0] + 1  # type: ignore[attr-defined]  # a CommentedMap knows its lines
        raw = raw[part]
    return line


def _resolved(config: RegionConfig, folder: Path) -> RegionConfig:
    datasets = {}
    for name, held in config.datasets.items():
        splits = {
            split: part.model_copy(update={"uri": _absolute(part.uri, folder)}) for split, part in held.splits.items()
        }
        datasets[name] = held.model_copy(update={"splits": splits})
    channel = _files_resolved(config.channel, ("path", "password_file"), folder)
    gateway = _files_resolved(config.gateway, ("user_file", "password_file", "ca_file"), folder)
    return config.model_copy(update={"datasets": datasets, "channel": channel, "gateway": gateway})


def _files_resolved(section: _Resolved, names: tuple[str, ...], folder: Path) -> _Resolved:
    given = {name: value for name in names if (value := getattr(section, name, None)) is not None}
    return section.model_copy(update={name: folder / value for name, value in given.items()})


def _absolute(uri: str, folder: Path) -> str:
    if uri.startswith("s3://"):
        return uri
    plain = uri.removeprefix("file://")
    path = str(folder / plain)
    return path + "/" if plain.endswith("/") and not path.endswith("/") else path
