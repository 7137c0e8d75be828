"""Sections of the region file about the channel between workers."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from region_agent.config._section import Section
from region_agent.config._types import DateText, NotNegative


def is_loopback(url: str) -> bool:
    """Whether an address is of this machine, by its text."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


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
        return self.url.startswith("redis://") and not is_loopback(self.url)

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
        return url.startswith("http://") and not is_loopback(url)

    @model_validator(mode="after")
    def _check_encryption(self) -> S3ChannelConfig:
        if self.plaintext and not self.insecure:
            raise ValueError(
                "`endpointUrl` is unencrypted and not of this machine: use https://, or state `insecure: true`"
            )
        return self
