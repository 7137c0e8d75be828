"""Types of the region file. Keys are camelCase in the file; unknown keys are errors.

Docstrings of attributes are the descriptions in the JSON Schema, and in the reference in `docs`.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from geofed_pb.platforms import PLATFORMS, Platform
from geofed_pb.user_code.secrets import OWN_PREFIX
from region_agent.config._channels import FileChannelConfig, RedisChannelConfig, S3ChannelConfig, is_loopback
from region_agent.config._data import DatasetConfig, ModelsConfig, StoreConfig
from region_agent.config._gateways import (
    DockerGateway,
    EmbeddedGateway,
    KubernetesGateway,
    LambdaGateway,
    OpenFaasGateway,
    ScfGateway,
)
from region_agent.config._prices import PricesConfig
from region_agent.config._resources import CapacityConfig, LinkConfig
from region_agent.config._rules import (
    FunctionsConfig,
    PolicyConfig,
    RetentionConfig,
    SecretConfig,
    SecretName,
    TaskPackagesConfig,
)
from region_agent.config._section import Section
from region_agent.config._types import Host, Port, RegionName
from sync.channel import channel_kind


def _check_port_range(ports: tuple[int, int]) -> tuple[int, int]:
    if ports[0] >= ports[1]:
        raise ValueError(f"{ports[0]} to {ports[1]} has fewer than two ports; write the first and the last of a range")
    return ports


class Metadata(Section):
    """Name of the region."""

    name: RegionName
    """Name of the region, as in its invitation: lower-case letters, digits and hyphens, 32 at most."""


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


class ServerConfig(Section):
    """Addresses and ports of parameter servers."""

    exchange_host: Host = "0.0.0.0"
    """Address on which they serve other regions' parameter servers and this agent."""
    worker_host: Host = "127.0.0.1"
    """Address on which they serve this region's workers."""
    ports: Annotated[tuple[Port, Port], AfterValidator(_check_port_range)] | None = None
    """First and last port. Each parameter server uses three, or two if there are not more. Default: any free ones."""


_OWN_PRICES = {"preemptible_usd_per_gb_second"}
"""Prices that the control plane does not plan with."""


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
    models: tuple[ModelsConfig, ...] = ()
    """Folders of safetensors files that jobs may start from by `train.initialModel.uri`. Default: none."""
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
    def _check_images(self) -> RegionConfig:
        if self.policy.allow_images and isinstance(self.gateway, EmbeddedGateway):
            raise ValueError(f"`policy.allowImages`: functions of {self.platform.title} have no image")
        return self

    @model_validator(mode="after")
    def _check_devices(self) -> RegionConfig:
        devices = self.capacity.devices
        if devices is None:
            return self
        if not self.platform.gpus:
            raise ValueError(f"`capacity.devices` must be left out: functions of {self.platform.title} have no GPU")
        workers, each = self.capacity.workers + self.capacity.preemptible, self._devices_of_function
        if isinstance(self.gateway, KubernetesGateway) and not each:
            raise ValueError("`gateway.gpus` is 0: functions have none of `capacity.devices`")
        if workers * max(1, each) > devices.count:
            text = f"each worker has {each} devices" if each > 1 else "each worker has a device of its own"
            raise ValueError(f"`capacity.devices.count` is {devices.count} for {workers} workers: {text}")
        if self.prices is not None and self.prices.device_usd_per_second is None:
            raise ValueError("`prices.deviceUsdPerSecond` is missing: `capacity.devices` are billed")
        return self

    @model_validator(mode="after")
    def _check_memory(self) -> RegionConfig:
        limits = self.platform.memory_mb
        if limits is not None and not limits[0] <= self.capacity.memory_mb <= limits[1]:
            text = f"{self.platform.title} gives a function {limits[0]} to {limits[1]} MB"
            raise ValueError(f"`capacity.memoryMb` is {self.capacity.memory_mb}: {text}")
        step = self.platform.memory_step_mb
        if self.capacity.memory_mb % step:
            text = f"{self.platform.title} gives a function a multiple of {step} MB"
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

    @model_validator(mode="after")
    def _check_users(self) -> RegionConfig:
        known, roles = self.policy.allow_users or {}, self.policy.roles
        named = {f"policy.roles.{name}": users for name, users in roles.items()}
        for name, held in self.datasets.items():
            if held.allow is not None:
                named[f"datasets.{name}.allow.users"] = held.allow.users
                if lacking := [role for role in held.allow.roles if role not in roles]:
                    raise ValueError(f"`datasets.{name}.allow.roles`: {lacking[0]} is not in `policy.roles`")
        for key, users in named.items():
            if not set(users) <= set(known):
                raise ValueError(f"`{key}`: whose keys are not in `policy.allowUsers` is not known here")
        return self

    def users_of(self, dataset: str) -> frozenset[str] | None:
        """Return the users whose code may run on a dataset; None: all whose code runs in the region."""
        held = self.datasets.get(dataset)
        if held is None or held.allow is None:
            return None
        of_roles = [user for role in held.allow.roles for user in self.policy.roles.get(role, ())]
        return frozenset([*held.allow.users, *of_roles])

    @property
    def name(self) -> str:
        """Name of the region."""
        return self.metadata.name

    def worker_devices(self, gpus: int | Literal["auto"] = 1) -> int:
        """Return the devices of a worker that are billed. ``gpus``: those that the job asks for; "auto": all that a
        function may have, without those kept for preemptible workers."""
        devices = self.capacity.devices
        if devices is None:
            return 0
        # A platform that gives a function its own devices bills them, whatever the job uses.
        return self._devices_of_function or (devices.count - self.capacity.preemptible if gpus == "auto" else gpus)

    @property
    def machine_devices(self) -> int:
        """Devices of the agent's machine, of which the agent says which a worker has, since every function sees all.

        0: none are stated, or the platform gives each function its own.
        """
        devices = self.capacity.devices
        return devices.count if devices is not None and self.platform.local_files else 0

    def _capacity(self, preemptible: int | None, slice_seconds: float | None) -> dict[str, Any]:
        capacity = self.capacity.model_dump()
        capacity["slice_seconds"], capacity["memory_step_mb"] = slice_seconds, self.platform.memory_step_mb
        capacity["least_memory_mb"] = (self.platform.memory_mb or (1, 0))[0]
        if self.capacity.devices is not None:
            capacity["devices"]["of_function"] = self._devices_of_function or None
            capacity["devices"]["kept"] = self.capacity.preemptible
        if preemptible is not None:
            capacity["preemptible"] = preemptible
        if self.capacity.cores is None:
            capacity["cores"] = float(len(os.sched_getaffinity(0))) if self.platform.local_files else 0.0
        return capacity

    @property
    def _devices_of_function(self) -> int:
        """Devices that the platform gives a function; 0: it sees all of the machine's."""
        return self.gateway.gpus if isinstance(self.gateway, KubernetesGateway) else 0

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
        slice_seconds: float | None = None,
    ) -> dict[str, Any]:
        """Return the region's description for the control plane, as its scheduler reads it; it contains no paths.

        ``preemptible``: present number of preemptible workers; None: all. ``sizes``: bytes of splits by dataset, for
        datasets that may be processed elsewhere. ``withheld``: datasets that are not offered. ``isolation``: kind
        of the isolation of job code that is in force; empty: unknown. ``schemas``: digests of what samples consist of.
        ``slice_seconds``: longest slice; None: any.
        """
        sizes = sizes or {}
        prices = self.prices.model_dump(exclude=_OWN_PRICES, exclude_none=True) if self.prices else None
        return {
            "name": self.name,
            "cloud": self.cloud,
            "capacity": self._capacity(preemptible, slice_seconds),
            "channel": self.channel.kind,
            "channel_plaintext": self.channel.plaintext,
            "loopback": is_loopback(f"//{self.advertise}"),
            "prices": prices,
            "takes_shards": self.takes_shards,
            "isolation": isolation,
            "secrets": sorted(self.secrets),
            "installs": self.installs,
            "images": list(self.policy.allow_images),
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
