"""The region's configuration: one YAML file, written by its operator."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic.alias_generators import to_camel

from geofed_pb import strict_yaml
from geofed_pb.address import bracketed
from geofed_pb.errors import GeofedError
from sync.channel import channel_kind

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


def _check_port_range(ports: tuple[int, int]) -> tuple[int, int]:
    if ports[0] >= ports[1]:
        raise ValueError(f"{ports[0]} to {ports[1]} has fewer than two ports; write the first and the last of a range")
    return ports


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, alias_generator=to_camel, populate_by_name=True)


class Metadata(_Section):
    """Name of the region."""

    name: RegionName


class CapacityConfig(_Section):
    """Capacity of the region for all jobs together."""

    workers: Annotated[int, Field(ge=0, le=1024)]
    """0: the region only holds data, which other regions may process if its residency allows it."""
    memory_mb: Annotated[int, Field(ge=128)] = 2048
    samples_per_second: Positive | None = None
    """Rate of one worker, if the operator knows it."""
    preemptible: Annotated[int, Field(ge=0, le=1024)] = 0
    """Additional workers that the cloud may take away at any time."""
    cores: NotNegative | None = None
    """Cores that all functions share; 0: each function has its own. None: the cores of this machine with the embedded
    gateway, otherwise 0."""


def _date(text: str) -> str:
    try:
        date.fromisoformat(text if len(text) > len("2026-01") else f"{text}-01")
    except ValueError:
        raise ValueError(f"{text!r} is not a date") from None
    return text


DateText = Annotated[str, Field(pattern=r"^[0-9]{4}-[0-9]{2}(-[0-9]{2})?$"), AfterValidator(_date)]
"""A day or a month: YYYY-MM-DD or YYYY-MM."""


class PricesConfig(_Section):
    """Prices of the region. All must be stated, with their source."""

    source: Annotated[str, Field(min_length=1)]
    as_of: DateText
    function_usd_per_gb_second: NotNegative
    function_usd_per_request: NotNegative
    server_usd_per_hour: NotNegative
    egress_usd_per_gb: NotNegative
    egress_to: dict[str, NotNegative] = {}
    preemptible_usd_per_gb_second: NotNegative | None = None
    """Price of functions on preemptible capacity; required if there is any."""


class SplitConfig(_Section):
    """One split of a shard."""

    uri: str
    """A path (relative to this file), `file://`, or `s3://bucket/key`; one that ends with `/` is a folder."""
    samples: Annotated[int, Field(ge=0)]

    @field_validator("uri")
    @classmethod
    def _check_uri(cls, value: str) -> str:
        scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://", value)
        if scheme and scheme[1] not in ("s3", "file"):
            raise ValueError(f"{scheme[0]} is not supported; use s3:// for COS and others, with an entry in `stores`")
        if scheme and scheme[1] == "s3" and not re.fullmatch(r"s3://[^/]+/.*", value, re.DOTALL):
            raise ValueError("write it like s3://bucket/key, or s3://bucket/folder/")
        return value


class DatasetConfig(_Section):
    """A shard that this region holds."""

    residency: Literal["region", "cloud", "anywhere"] | tuple[RegionName, ...] = "region"
    """Regions that may process the shard: this one, all of its cloud, all, or this one and those listed."""
    store: str = ""
    """Name in `stores`, for s3:// URIs."""
    splits: dict[str, SplitConfig]


class LinkConfig(_Section):
    """Link to another region, as the operator knows it."""

    rtt_ms: NotNegative
    mbps: NotNegative
    """0: there is no direct path, so other regions pass updates on."""


class StoreConfig(_Section):
    """An S3-compatible object store; its credentials come from the SDK's credential chain."""

    endpoint_url: str | None = None
    region: str | None = None
    profile: str | None = None
    """Profile of the SDK's configuration."""


class EmbeddedGateway(_Section):
    """Functions as processes of this machine."""

    kind: Literal["embedded"] = "embedded"
    profile: Literal["none", "ce"] = "none"


class OpenFaasGateway(_Section):
    """An OpenFaaS installation."""

    kind: Literal["openfaas"]
    url: str
    user_file: Path | None = None
    password_file: Path | None = None
    ca_file: Path | None = None
    image: str
    namespace: str = ""
    preemptible_constraints: tuple[str, ...] = ()
    """Placement constraints of functions on preemptible capacity."""


class ChannelPricesConfig(_Section):
    """Prices of the channel: its server by the hour, and requests by kind. 0: not billed."""

    source: Annotated[str, Field(min_length=1)]
    as_of: DateText
    usd_per_hour: NotNegative = 0.0
    usd_per_put: NotNegative = 0.0
    """Also the price of a list request."""
    usd_per_get: NotNegative = 0.0
    """Also the price of a request that finds nothing."""
    usd_per_delete: NotNegative = 0.0


class FileChannelConfig(_Section):
    """A channel in a folder."""

    kind: Literal["file"] = "file"
    path: Path | None = None
    """Default: shared memory, or the state directory if there is no shared memory."""
    prices: None = None


class RedisChannelConfig(_Section):
    """A channel in a Redis server."""

    kind: Literal["redis"]
    url: Annotated[str, Field(pattern=r"^(redis|rediss)://[^@?]+$|^unix://[^@?]+$")]
    """URL without credentials."""
    user: str = "default"
    password_file: Path | None = None
    """With a password each job's workers get a Redis user of their own, which can access that job's keys only."""
    prices: ChannelPricesConfig | None = None


class S3ChannelConfig(_Section):
    """A channel in a bucket of an S3-compatible object store; credentials come from the SDK's credential chain."""

    kind: Literal["s3"]
    bucket: Annotated[str, Field(min_length=3)]
    prefix: str = ""
    endpoint_url: str | None = None
    region: str | None = None
    path_style: bool = False
    worker_credentials_file: Path | None = None
    """Path, in the workers' file system, of a credentials file for this bucket only; None: the workers have a role."""
    prices: ChannelPricesConfig | None = None


class PolicyConfig(_Section):
    """What the federation may do in the region."""

    accept_jobs: bool = True
    max_workers_per_job: int | None = None
    ship_logs: bool = True
    """Whether log lines of job code may leave the region."""
    accept_shards: bool = True
    """Whether shards of other regions may be processed here, if their residency allows it."""


Host = Annotated[str, AfterValidator(bracketed)]
"""Host name or address, with an IPv6 address in brackets, as before a port."""


class ServerConfig(_Section):
    """Addresses and ports of parameter servers."""

    exchange_host: Host = "0.0.0.0"
    """Address for other regions' parameter servers, and for this agent."""
    worker_host: Host = "127.0.0.1"
    """Address for this region's workers."""
    ports: Annotated[tuple[Port, Port], AfterValidator(_check_port_range)] | None = None
    """First and last port for parameter servers, each of which uses three, or two if there are not more; default:
    any."""


class RegionConfig(_Section):
    """A region file."""

    api_version: Literal["geofed/v1"]
    kind: Literal["Region"]
    metadata: Metadata
    cloud: Annotated[str, Field(min_length=1)]
    advertise: Host = "127.0.0.1"
    """Host or address at which other regions reach this region's parameter servers."""
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
    def _default_to_file(cls, value: Any) -> Any:
        return {"kind": "file", **value} if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _check_prices(self) -> RegionConfig:
        if self.prices is not None and not channel_kind(self.channel.kind).in_memory and self.channel.prices is None:
            raise ValueError("`channel.prices` is missing: without it the channel would be counted as free")
        if self.capacity.preemptible:
            if self.prices is not None and self.prices.preemptible_usd_per_gb_second is None:
                raise ValueError(
                    "`prices.preemptibleUsdPerGbSecond` is missing: an unknown price is never assumed to be zero"
                )
            if isinstance(self.gateway, OpenFaasGateway) and not self.gateway.preemptible_constraints:
                raise ValueError(
                    "`gateway.preemptibleConstraints` is missing: it places preemptible workers on their nodes"
                )
        return self

    @property
    def name(self) -> str:
        """Name of the region."""
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
        """Return the region's description for the control plane, as its scheduler reads it; it contains no paths.

        ``preemptible``: present number of preemptible workers; None: all. ``sizes``: bytes of splits by dataset, for
        datasets that may be processed elsewhere. ``withheld``: datasets that are not offered.
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
    """Read a region file; relative paths in it are relative to its folder.

    Raises ``GeofedError("CONFIG_INVALID")`` with every invalid key and its line.
    """
    try:
        document = strict_yaml.parse(path.read_text(encoding="utf-8"), str(path))
        config = strict_yaml.validate(RegionConfig, document)
    except FileNotFoundError:
        raise GeofedError("CONFIG_INVALID", f"there is no {path}", hint="give the file with --config") from None
    except (OSError, UnicodeDecodeError) as error:
        raise GeofedError("CONFIG_INVALID", f"{path}: {error}") from None
    except strict_yaml.InvalidYaml as error:
        raise GeofedError("CONFIG_INVALID", str(error)) from None
    _check_stores(config, document)
    return _resolved(config, path.parent.resolve())


def _check_stores(config: RegionConfig, document: strict_yaml.Document) -> None:
    for name, held in config.datasets.items():
        if held.store and held.store not in config.stores:
            text = f"`datasets.{name}.store`: {held.store!r} is not in stores"
            raise GeofedError("CONFIG_INVALID", document.error(("datasets", name, "store"), text))


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
