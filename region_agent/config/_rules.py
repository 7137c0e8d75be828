"""Sections of the region file about what jobs may do: policy, secrets, packages, retention, functions' network."""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from geofed_pb.address import bracketed
from geofed_pb.bounds import SECRET_NAME
from geofed_pb.user_code.images import is_image_entry
from region_agent.config._section import Section
from region_agent.config._types import Float, Int, NotNegative, Port, RoleName


def _network(text: str) -> str:
    return str(ipaddress.ip_network(text))


def _image(text: str) -> str:
    if not is_image_entry(text):
        raise ValueError(f"{text!r} is no image, and no beginning of images that ends with `/`, `:` or `@`")
    return text


class PolicyConfig(Section):
    """What the federation may do in the region."""

    accept_jobs: bool = True
    """Whether the region takes jobs."""
    max_workers_per_job: Annotated[Int, Field(ge=1)] | None = None
    """Largest number of workers of one job. Default: all that the region has. `acceptJobs: false` takes no jobs."""
    max_disk_mb_per_job: Annotated[Int, Field(ge=1)] | None = None
    """Most disk space of one job, in MB: state of its parameter server, shards of other regions, files of its workers,
    and its channel if that is a folder on the disk. A job that takes more fails with `LIMIT_EXCEEDED`. Default: what
    the disk has, except for a reserve."""
    ship_logs: bool | None = None
    """Whether log lines of job code may leave the region. Default: yes, but not of jobs with differential privacy, nor
    on datasets with `privacy` or `minimumCount`."""
    accept_shards: bool = True
    """Whether shards of other regions may be processed here, if their residency allows it."""
    allow_users: dict[str, Annotated[str, Field(pattern=r"^ed25519:[A-Za-z0-9+/]{43}=$")]] | None = None
    """Users whose code may run here, each with the public key that `geofed user key` prints; `operator` is the
    federation's operator. The agent checks their signatures, whatever the control plane says. Default: all users of
    the federation, signed or not."""
    roles: dict[RoleName, tuple[str, ...]] = {}
    """Roles in this region, by name, each with its users, of `allowUsers`: for `datasets.NAME.allow`. They are the
    region's own, whatever roles the control plane gives."""
    approve: Literal["none", "first-run", "every"] = "none"
    """What waits for `geofed agent approve JOB`. `first-run`: a user's code the first time that it runs on a dataset.
    `every`: every job, profile and probe."""
    allow_images: Annotated[tuple[Annotated[str, AfterValidator(_image)], ...], Field(max_length=64)] = ()
    """Container images that jobs may name in `task.image`: `REGISTRY/NAME@sha256:DIGEST`, `REGISTRY/NAME:TAG`, or the
    beginning of images, which ends with `/`, `:` or `@`. Not for the embedded gateway. Default: none, jobs run in
    `gateway.image`."""
    secure_regions: Annotated[Int, Field(ge=3)] | None = None
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
    seconds: Annotated[Float, Field(gt=0, le=3600)] = 600.0
    """Limit of the time that one installation takes."""
    max_mb: Annotated[Int, Field(ge=1)] = 2048
    """Most disk space of the packages of one task, in MB."""
    keep_mb: Annotated[Int, Field(ge=1)] = 8192
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
    indexes_days: NotNegative = 30.0
    """Indexes of datasets with a format, with the categories and clients that they name, since they were last used. A
    missing one is made again."""
    channel_days: NotNegative = 1.0
    """What a job left in a channel of files, for an hour at least. Its end removes it, so this is for crashes."""
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
