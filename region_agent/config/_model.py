"""Types of the region file. Keys are camelCase in the file; unknown keys are errors.

Docstrings of attributes are the descriptions in the JSON Schema, and in the reference in `docs`.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Collection, Mapping
from datetime import date
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, field_validator, model_validator

from geofed_pb.address import bracketed
from geofed_pb.bounds import SECRET_NAME
from geofed_pb.platforms import PLATFORMS, Platform
from geofed_pb.task_secrets import OWN_PREFIX
from region_agent.config._gateways import (
    DockerGateway,
    EmbeddedGateway,
    KubernetesGateway,
    LambdaGateway,
    OpenFaasGateway,
    ScfGateway,
)
from region_agent.config._section import Section
from region_agent.worker.data.formats import check_format
from region_agent.worker.data.spec import FormatSpec
from sync.channel import channel_kind

Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Port = Annotated[int, Field(ge=1, le=65535)]
RegionName = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?$")]


def _check_port_range(ports: tuple[int, int]) -> tuple[int, int]:
    if ports[0] >= ports[1]:
        raise ValueError(f"{ports[0]} to {ports[1]} has fewer than two ports; write the first and the last of a range")
    return ports


def _network(text: str) -> str:
    return str(ipaddress.ip_network(text))


def _is_loopback(url: str) -> bool:
    """Whether an address is of this machine, by its text."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Metadata(Section):
    """Name of the region."""

    name: RegionName
    """Name of the region, as in its invitation: lower-case letters, digits and hyphens, 32 at most."""


class CapacityConfig(Section):
    """Capacity of the region for all jobs together."""

    workers: Annotated[int, Field(ge=0, le=1024)]
    """Number of workers that run at the same time. 0: the region only holds data, which other regions may process if
    its residency allows it."""
    memory_mb: Annotated[int, Field(ge=128)] = 2048
    """Largest memory of one function, in MB."""
    samples_per_second: Positive | None = None
    """Rate of one worker, if the operator knows it. Default: measured."""
    preemptible: Annotated[int, Field(ge=0, le=1024)] = 0
    """Number of additional workers that the cloud may take away at any time."""
    cores: NotNegative | None = None
    """Cores that all functions share, for plans of pipelines. 0: each function has its own. Default: the cores of this
    machine with the embedded gateway, otherwise 0."""


def _date(text: str) -> str:
    try:
        date.fromisoformat(text if len(text) > len("2026-01") else f"{text}-01")
    except ValueError:
        raise ValueError(f"{text!r} is not a date") from None
    return text


DateText = Annotated[str, Field(pattern=r"^[0-9]{4}-[0-9]{2}(-[0-9]{2})?$"), AfterValidator(_date)]
"""A day or a month: YYYY-MM-DD or YYYY-MM."""


class PricesConfig(Section):
    """Prices of the region in USD."""

    source: Annotated[str, Field(min_length=1)]
    """Where the prices are from, such as `AWS list, eu-central-1`."""
    as_of: DateText
    """Day or month of the prices: `2026-11-05` or `2026-11`."""
    function_usd_per_gb_second: NotNegative
    """Price of a function's memory; time is rounded up to a millisecond."""
    function_usd_per_request: NotNegative
    """Price of a call of a function."""
    server_usd_per_hour: NotNegative
    """Price of a parameter server while its job runs."""
    egress_usd_per_gb: NotNegative
    """Price of data sent to another region."""
    egress_to: dict[str, NotNegative] = {}
    """Exceptions from `egressUsdPerGb`, by destination region."""
    preemptible_usd_per_gb_second: NotNegative | None = None
    """Price of a function's memory on preemptible capacity; required with `capacity.preemptible`."""


class SplitConfig(Section):
    """One split of a shard."""

    uri: str
    """Address of the data: a path, `file://`, or `s3://bucket/key`. One that ends with `/` is a folder."""
    samples: Annotated[int, Field(ge=0)] | None = None
    """Length of the task's dataset of this split; required unless the dataset has a `format`, whose samples are
    counted."""
    clients: Annotated[int, Field(ge=1)] | None = None
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

    epsilon: Annotated[float, Field(gt=0, le=1000)]
    """Most that all jobs together may spend, for ever."""
    delta: Annotated[float, Field(gt=0, lt=1)]
    """Probability with which epsilon may not hold; less than one by the number of samples."""


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
    `privacy.differential` that keep within it, whatever the control plane says. Default: any job."""

    @model_validator(mode="after")
    def _stays_here(self) -> DatasetConfig:
        if self.privacy is not None and self.residency != "region":
            raise ValueError("`privacy` requires `residency: region`: another region accounts for none of its data")
        return self

    @property
    def counted(self) -> bool:
        """Whether the samples of all splits are known."""
        return all(part.samples is not None for part in self.splits.values())


class LinkConfig(Section):
    """Link to another region, as the operator knows it."""

    rtt_ms: NotNegative
    """Round-trip time, in milliseconds."""
    mbps: NotNegative
    """Rate, in Mbit/s. 0: there is no direct path, so other regions pass updates on."""


class StoreConfig(Section):
    """An S3-compatible object store; its credentials come from the SDK's credential chain."""

    endpoint_url: str | None = None
    """Address of the store. Default: the SDK's."""
    region: str | None = None
    """Region of the store. Default: the SDK's."""
    profile: str | None = None
    """Profile of the SDK's configuration. Default: the SDK's."""


class ChannelPricesConfig(Section):
    """Prices of the channel in USD: its server by the hour, and requests by kind. 0: not billed."""

    source: Annotated[str, Field(min_length=1)]
    """Where the prices are from."""
    as_of: DateText
    """Day or month of the prices: `2026-11-05` or `2026-11`."""
    usd_per_hour: NotNegative = 0.0
    """Price of the channel's server while a job's parameter server runs."""
    usd_per_put: NotNegative = 0.0
    """Price of a put or a list request."""
    usd_per_get: NotNegative = 0.0
    """Price of a get request, and of one that finds nothing."""
    usd_per_delete: NotNegative = 0.0
    """Price of a delete request."""


class FileChannelConfig(Section):
    """The channel is a folder. It costs nothing."""

    kind: Literal["file"] = "file"
    """Kind of the channel."""
    path: Path | None = None
    """The folder. Default: in shared memory, or in the state directory if there is no shared memory."""
    prices: ClassVar[None] = None
    plaintext: ClassVar[bool] = False


class RedisChannelConfig(Section):
    """The channel is a Redis server."""

    kind: Literal["redis"]
    """Kind of the channel."""
    url: Annotated[str, Field(pattern=r"^(redis|rediss)://[^@?]+$|^unix://[^@?]+$")]
    """Address of the server without credentials: `redis://`, `rediss://` (TLS) or `unix://`."""
    user: str = "default"
    """User of the agent; it needs the right to `ACL SETUSER` and `ACL DELUSER`."""
    password_file: Path | None = None
    """File with the user's password. With it, each job's workers get a Redis user of their own, which can access that
    job's keys only."""
    insecure: bool = False
    """Whether the connection may be unencrypted (`redis://`) to another machine."""
    prices: ChannelPricesConfig | None = None
    """Prices of the channel; required if the region has `prices`."""

    @property
    def plaintext(self) -> bool:
        """Whether tensors and passwords cross a network unencrypted."""
        return self.url.startswith("redis://") and not _is_loopback(self.url)

    @model_validator(mode="after")
    def _check_encryption(self) -> RedisChannelConfig:
        if self.plaintext and not self.insecure:
            raise ValueError("`url` is unencrypted and not of this machine: use rediss://, or state `insecure: true`")
        return self


class S3ChannelConfig(Section):
    """The channel is a bucket of an S3-compatible object store; credentials come from the SDK's credential chain."""

    kind: Literal["s3"]
    """Kind of the channel."""
    bucket: Annotated[str, Field(min_length=3)]
    """Name of the bucket."""
    prefix: str = ""
    """Beginning of all keys in the bucket."""
    endpoint_url: str | None = None
    """Address of the store. Default: the SDK's."""
    region: str | None = None
    """Region of the store. Default: the SDK's."""
    path_style: bool = False
    """Whether the bucket is named in the path of an address instead of its host."""
    worker_credentials_file: Path | None = None
    """Path, in the workers' file system, of a file with credentials for this bucket only. Workers on Kubernetes, Lambda
    and SCF get what a file of the agent's machine with this path holds, as a secret; at Lambda and SCF it has to be
    there. Default: the workers have a role of their own."""
    insecure: bool = False
    """Whether the connection may be unencrypted (`http://`) to another machine."""
    prices: ChannelPricesConfig | None = None
    """Prices of the channel; required if the region has `prices`."""

    @property
    def plaintext(self) -> bool:
        """Whether tensors cross a network unencrypted."""
        url = self.endpoint_url or ""
        return url.startswith("http://") and not _is_loopback(url)

    @model_validator(mode="after")
    def _check_encryption(self) -> S3ChannelConfig:
        if self.plaintext and not self.insecure:
            raise ValueError(
                "`endpointUrl` is unencrypted and not of this machine: use https://, or state `insecure: true`"
            )
        return self


class PolicyConfig(Section):
    """What the federation may do in the region."""

    accept_jobs: bool = True
    """Whether the region takes jobs."""
    max_workers_per_job: Annotated[int, Field(ge=1)] | None = None
    """Largest number of workers of one job. Default: all that the region has. `acceptJobs: false` takes no jobs."""
    max_disk_mb_per_job: Annotated[int, Field(ge=1)] | None = None
    """Most disk space of one job, in MB: state of its parameter server, shards of other regions, files of its workers,
    and its channel if that is a folder on the disk. A job that takes more fails with `LIMIT_EXCEEDED`. Default: what
    the disk has, except for a reserve."""
    ship_logs: bool = True
    """Whether log lines of job code may leave the region."""
    accept_shards: bool = True
    """Whether shards of other regions may be processed here, if their residency allows it."""
    allow_users: dict[str, Annotated[str, Field(pattern=r"^ed25519:[A-Za-z0-9+/]{43}=$")]] | None = None
    """Users whose code may run here, each with the public key that `geofed user key` prints; `operator` is the
    federation's operator. The agent checks their signatures, whatever the control plane says. Default: all users of
    the federation, signed or not."""
    approve: Literal["none", "first-run", "every"] = "none"
    """What waits for `geofed agent approve JOB`. `first-run`: a user's code the first time that it runs on a dataset.
    `every`: every job, profile and probe."""
    secure_regions: Annotated[int, Field(ge=3)] | None = None
    """Fewest regions over which updates of this region may be summed up: the region takes only jobs with
    `privacy.secureAggregation` and at least so many regions, whatever the control plane says. Default: any job."""
    peer_networks: tuple[Annotated[str, AfterValidator(_network)], ...] | None = None
    """Networks in which this region connects to other regions' servers: `203.0.113.0/24`, `2001:db8::/32`. Default: the
    address that the other region's agent connects from; and private addresses and the loopback interface, if that
    agent, too, connects from such an address."""
    isolation: Literal["require", "prefer", "none"] = "require"
    """Whether job code runs in sandboxes. `require`: the region refuses jobs where there can be none. `prefer`: where
    there can be none, job code can read and change what the agent can. `none`: without sandboxes. Functions of OpenFaaS
    run in its containers in any case."""


def _secret_name(text: str) -> str:
    if not re.fullmatch(SECRET_NAME, text):
        raise ValueError(f"{text!r} is no name of a secret: lower-case letters, digits and hyphens, 63 at most")
    return text


SecretName = Annotated[str, AfterValidator(_secret_name)]


class SecretConfig(Section):
    """A secret of the region that tasks may read."""

    file: Path | None = None
    """File with the value, 64 KiB at most; read when a job's functions are deployed. Default: OpenFaaS has a secret of
    this name."""
    users: tuple[str, ...] | None = None
    """Users whose jobs may read it, of `policy.allowUsers`. Default: all whose code runs in the region."""


class TaskPackagesConfig(Section):
    """Packages that the region installs for tasks with `task.requirements`, for the embedded gateway. Only wheels are
    installed, by pip."""

    index: Annotated[str, Field(pattern=r"^(https|http|file)://[^@]+$")] | None = None
    """Address of a package index, without credentials: these are in `~/.netrc` of the agent's user. Default: none is
    asked."""
    wheels: Path | None = None
    """Folder with wheels."""
    allow: tuple[str, ...] | None = None
    """Names of the packages that tasks may install, with all that these require. Default: all."""
    seconds: Annotated[float, Field(gt=0, le=3600)] = 600.0
    """Limit of the time that one installation takes."""
    max_mb: Annotated[int, Field(ge=1)] = 2048
    """Most disk space of the packages of one task, in MB."""
    keep_mb: Annotated[int, Field(ge=1)] = 8192
    """Disk space from which on packages that no job uses are removed, the least recently used ones first."""

    @model_validator(mode="after")
    def _check_sources(self) -> TaskPackagesConfig:
        if self.index is None and self.wheels is None:
            raise ValueError("state `index`, `wheels` or both: where packages come from")
        return self


class RetentionConfig(Section):
    """For how many days the agent keeps, in its state directory, what no job here needs any more. It looks every hour;
    `geofed agent storage` shows what it finds."""

    jobs_days: NotNegative = 7.0
    """State of parameter servers whose job the agent does not know any more, as after the loss of its database. The
    state of a job that has ended is deleted at once, but for the region's own model (docs/personal.md)."""
    bundles_days: NotNegative = 7.0
    """Code, since it was last used."""
    logs_days: NotNegative = 30.0
    """Logs of functions, since their last line."""
    approvals_days: NotNegative = 30.0
    """Approvals of profiles and probes, and requests that nobody has answered. What `approve: first-run` has approved
    stays approved."""
    unfinished_days: NotNegative = 1.0
    """Files that were being written when the agent ended."""


class EgressRule(Section):
    """An address to which functions may connect."""

    host: Annotated[str, AfterValidator(bracketed), Field(min_length=1, pattern=r"^[A-Za-z0-9._\[\]:-]+$")]
    """Name or address of the host."""
    port: Port
    """TCP port."""

    @property
    def address(self) -> str:
        """``host:port``."""
        return f"{self.host}:{self.port}"


class FunctionNetworkConfig(Section):
    """Network of the embedded gateway's functions."""

    egress: Annotated[tuple[EgressRule, ...], Field(max_length=64)] = ()
    """Addresses to which functions may connect, besides those of their parameter server, channel and shard."""
    host_network: bool = False
    """Whether functions use the machine's network without restriction: then they reach every port that it reaches."""


class FunctionsConfig(Section):
    """Functions of the embedded gateway."""

    network: FunctionNetworkConfig = FunctionNetworkConfig()


class IdentityConfig(Section):
    """Certificate and key by the operator's own CA. They are read again when the files change."""

    ca_file: Path
    """File with the certificates of the trusted CAs."""
    certificate_file: Path
    """File with the region's certificate, for the DNS name `NAME.region.geofed`, for clients and servers."""
    key_file: Path
    """File with its key."""
    control_plane: str
    """host:port of the control plane's agent port."""


Host = Annotated[str, AfterValidator(bracketed)]
"""Host name or address, with an IPv6 address in brackets, as before a port."""


class ServerConfig(Section):
    """Addresses and ports of parameter servers."""

    exchange_host: Host = "0.0.0.0"
    """Address on which they serve other regions' parameter servers and this agent."""
    worker_host: Host = "127.0.0.1"
    """Address on which they serve this region's workers."""
    ports: Annotated[tuple[Port, Port], AfterValidator(_check_port_range)] | None = None
    """First and last port. Each parameter server uses three, or two if there are not more. Default: any free ones."""


class RegionConfig(Section):
    """A region file."""

    api_version: Literal["geofed/v1"]
    """Version of the file's format."""
    kind: Literal["Region"]
    """Kind of the file."""
    metadata: Metadata
    cloud: Annotated[str, Field(min_length=1)]
    """Name of the region's cloud, for rules of residency."""
    advertise: Host = "127.0.0.1"
    """Host name or address, also IPv6, at which other regions reach this region's parameter servers."""
    capacity: CapacityConfig
    prices: PricesConfig | None = None
    """Prices of the region in USD. A region without them takes no part in jobs: no price is assumed."""
    datasets: dict[str, DatasetConfig] = {}
    """Shards that the region holds, by name of the dataset."""
    links: dict[str, LinkConfig] = {}
    """Links to other regions, by name, as the operator knows them. A link that is not listed counts as 100 Mbit/s at
    150 ms."""
    stores: dict[str, StoreConfig] = {}
    """S3-compatible object stores, by name; their credentials come from the SDK's credential chain."""
    gateway: Annotated[
        EmbeddedGateway | DockerGateway | OpenFaasGateway | KubernetesGateway | LambdaGateway | ScfGateway,
        Field(discriminator="kind"),
    ] = EmbeddedGateway()
    """Where functions run. Default: `kind: embedded`."""
    channel: Annotated[FileChannelConfig | RedisChannelConfig | S3ChannelConfig, Field(discriminator="kind")] = (
        FileChannelConfig()
    )
    """Where the workers of a job exchange tensors (docs/channels.md). Default: `kind: file`."""
    identity: IdentityConfig | None = None
    """The region's identity, if the operator's own CA signs it. Default: `geofed agent join` receives it."""
    secrets: dict[SecretName, SecretConfig] = {}
    """Secrets that tasks may read, by the names that jobs state in `task.secrets`. The control plane knows only the
    names."""
    task_packages: TaskPackagesConfig | None = None
    """Packages that tasks may have the region install. Default: it installs none."""
    policy: PolicyConfig = PolicyConfig()
    retention: RetentionConfig = RetentionConfig()
    functions: FunctionsConfig = FunctionsConfig()
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
            if not self.platform.has_preemptible:
                raise ValueError(f"`capacity.preemptible` must be 0: {self.platform.title} has no preemptible capacity")
            if self.prices is not None and self.prices.preemptible_usd_per_gb_second is None:
                raise ValueError(
                    "`prices.preemptibleUsdPerGbSecond` is missing: an unknown price is never assumed to be zero"
                )
            if self.platform.places_preemptible and not self._preemptible_placement:
                key = "preemptible" if isinstance(self.gateway, KubernetesGateway) else "preemptibleConstraints"
                raise ValueError(f"`gateway.{key}` is missing: it places preemptible workers on their nodes")
        return self

    @model_validator(mode="after")
    def _check_concurrency(self) -> RegionConfig:
        reserved = getattr(self.gateway, "reserved_concurrency", None)
        workers = min(self.capacity.workers, self.policy.max_workers_per_job or self.capacity.workers)
        if reserved is not None and reserved <= workers:
            text = f"a job may have {workers} workers, and one more runs while one is replaced"
            raise ValueError(f"`gateway.reservedConcurrency` must be at least {workers + 1}: {text}")
        return self

    @model_validator(mode="after")
    def _check_channel(self) -> RegionConfig:
        channel = self.channel
        alone = isinstance(channel, S3ChannelConfig) and channel.worker_credentials_file is None
        if alone and not self.platform.own_role:
            text = f"job code in functions of {self.platform.title} is given no role"
            raise ValueError(f"`channel.workerCredentialsFile` is missing: {text}")
        return self

    @model_validator(mode="after")
    def _check_memory(self) -> RegionConfig:
        limits = self.platform.memory_mb
        if limits is not None and not limits[0] <= self.capacity.memory_mb <= limits[1]:
            text = f"{self.platform.title} gives a function {limits[0]} to {limits[1]} MB"
            raise ValueError(f"`capacity.memoryMb` is {self.capacity.memory_mb}: {text}")
        return self

    @model_validator(mode="after")
    def _check_secrets(self) -> RegionConfig:
        known = self.policy.allow_users
        for name, secret in self.secrets.items():
            if name.startswith(OWN_PREFIX):
                raise ValueError(
                    f"`secrets.{name}`: names that begin with {OWN_PREFIX} are those of geofed's own secrets"
                )
            if secret.file is None and not self.platform.own_secrets:
                raise ValueError(f"`secrets.{name}.file` is missing: {self.platform.title} has no secrets of its own")
            if secret.users is not None and not set(secret.users) <= set(known or {}):
                raise ValueError(f"`secrets.{name}.users`: whose keys are not in `policy.allowUsers` is not known here")
        return self

    @property
    def name(self) -> str:
        """Name of the region."""
        return self.metadata.name

    @property
    def platform(self) -> Platform:
        """What holds for the platform of the region's functions."""
        return PLATFORMS[self.gateway.kind]

    @property
    def start_seconds(self) -> float:
        """Longest time until the first replicas of a function are ready."""
        return float(getattr(self.gateway, "start_seconds", self.platform.start_seconds))

    @property
    def life_seconds(self) -> float | None:
        """Longest life of a replica; None: there is no limit."""
        limit: float | None = getattr(self.gateway, "life_seconds", self.platform.life_seconds)
        return limit

    @property
    def _preemptible_placement(self) -> object:
        gateway = self.gateway
        if isinstance(gateway, KubernetesGateway):
            return gateway.preemptible
        return isinstance(gateway, OpenFaasGateway) and gateway.preemptible_constraints

    @property
    def takes_shards(self) -> bool:
        """Whether other regions' shards can be processed here: functions must be able to read the agent's files."""
        policy = self.policy
        return policy.accept_jobs and policy.accept_shards and self.platform.local_files

    @property
    def installs(self) -> bool:
        """Whether packages are installed for tasks: functions must be able to read the agent's files."""
        return self.task_packages is not None and self.platform.sandboxed

    def catalogue(
        self,
        preemptible: int | None = None,
        sizes: Mapping[str, Mapping[str, int]] | None = None,
        withheld: Collection[str] = (),
        isolation: str = "",
        schemas: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """Return the region's description for the control plane, as its scheduler reads it; it contains no paths.

        ``preemptible``: present number of preemptible workers; None: all. ``sizes``: bytes of splits by dataset, for
        datasets that may be processed elsewhere. ``withheld``: datasets that are not offered. ``isolation``: kind
        of the isolation of job code that is in force; empty: unknown. ``schemas``: digests of what samples consist of.
        """
        sizes = sizes or {}
        prices = self.prices.model_dump(exclude={"preemptible_usd_per_gb_second"}) if self.prices else None
        capacity = self.capacity.model_dump()
        if preemptible is not None:
            capacity["preemptible"] = preemptible
        if self.capacity.cores is None:
            capacity["cores"] = float(len(os.sched_getaffinity(0))) if self.platform.local_files else 0.0
        return {
            "name": self.name,
            "cloud": self.cloud,
            "capacity": capacity,
            "channel": self.channel.kind,
            "channel_plaintext": self.channel.plaintext,
            "loopback": _is_loopback(f"//{self.advertise}"),
            "prices": prices,
            "takes_shards": self.takes_shards,
            "isolation": isolation,
            "secrets": sorted(self.secrets),
            "installs": self.installs,
            "datasets": [
                {
                    "name": name,
                    "residency": held.residency,
                    **({"schema": schemas[name]} if schemas and name in schemas else {}),
                    "splits": {
                        split: {
                            "samples": part.samples,
                            "bytes": sizes.get(name, {}).get(split),
                            **({} if part.clients is None else {"clients": part.clients}),
                        }
                        for split, part in held.splits.items()
                    },
                }
                for name, held in sorted(self.datasets.items())
                if name not in withheld and held.counted
            ],
            "links": [
                {"source": self.name, "destination": other, "rtt_ms": link.rtt_ms, "mbps": link.mbps}
                for other, link in sorted(self.links.items())
            ],
        }
