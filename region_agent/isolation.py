"""How a region isolates job code, and what the functions of a job may use outside of their sandboxes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from geofed_pb import address
from region_agent.config import DatasetConfig, RegionConfig
from region_agent.gateway import GatewayClient
from region_agent.gateway.functions import Grants, Isolation
from region_agent.partition.channel import RegionChannel
from region_agent.worker.invocation import ShardFile

__all__ = [
    "CONTAINER",
    "NOT_ISOLATED",
    "SERVER_ADDRESS",
    "egress_of",
    "grants_of",
    "isolation_of",
    "with_server",
]

SERVER_ADDRESS = "127.0.0.100:7000"
"""Address of the job's parameter server in the sandbox of a worker. The server's own may change while the job runs."""
_PORTS = {"http": 80, "https": 443}


CONTAINER = Isolation("container")
NOT_ISOLATED = Isolation("none")


async def isolation_of(config: RegionConfig, client: GatewayClient) -> Isolation:
    """Ask the gateway how it isolates functions."""
    if not config.platform.sandboxed:
        return CONTAINER
    told: Mapping[str, Any] = (await client.info())["provider"]["isolation"]
    # A user other than root has a limit of its own.
    limited = bool(told["limits_processes"]) or os.geteuid() != 0
    return Isolation(str(told["kind"]), str(told["reason"]), limited)


def grants_of(
    config: RegionConfig,
    channel: RegionChannel,
    job: str,
    dataset: DatasetConfig | None,
    shards: Path | None = None,
    splits: Mapping[str, tuple[ShardFile, ...]] | None = None,
    packages: Path | None = None,
) -> Grants:
    """Return what the functions of a job need: its shard, its part of the channel, and what the region file allows.

    ``shards``: folder of other regions' shards for this job. ``splits``: files whose URLs the functions download.
    ``packages``: folder of packages for the task. Reads the folders of shards for links; blocks.
    """
    network = config.functions.network
    read = [path for held in [dataset] if held is not None for path in _paths(held)]
    read += [str(folder) for folder in (shards, packages) if folder is not None]
    files = [file for of_split in (splits or {}).values() for file in of_split]
    targets = {*channel.endpoints(), *_hosts(files), *(rule.address for rule in network.egress)}
    found, written = channel.files(job)
    return Grants(
        read=tuple(dict.fromkeys([*read, *found])),
        write=tuple(written),
        egress={} if network.host_network else {target: target for target in sorted(targets)},
        host_network=network.host_network,
        identity=_identity(written),
    )


def with_server(grants: Grants, server: str) -> Grants:
    """Return grants with the present address of the job's parameter server; empty: it has none."""
    return replace(grants, egress={**grants.egress, SERVER_ADDRESS: server})


def _identity(folders: Iterable[str]) -> str:
    found = [os.stat(folder) for folder in folders if os.path.exists(folder)]
    return ",".join(f"{status.st_dev}:{status.st_ino}" for status in found)


def _paths(dataset: DatasetConfig) -> list[str]:
    """Return the files and folders of a shard on this machine, and the targets of links that lead out of them."""
    found: list[str] = []
    for part in dataset.splits.values():
        if part.uri.startswith("s3://"):
            continue
        path = os.path.abspath(part.uri)
        if os.path.exists(path):
            found.append(path)
            found += [target for target in _targets(path) if target != path]
    return found


def _targets(path: str) -> list[str]:
    """Return the targets of the links in a folder that lie outside of it."""
    inside = f"{os.path.realpath(path)}{os.sep}"
    links = (
        os.path.join(folder, name)
        for folder, folders, names in os.walk(path)
        for name in (*folders, *names)
        if os.path.islink(os.path.join(folder, name))
    )
    targets = {os.path.realpath(link) for link in links}
    return sorted(target for target in targets if os.path.exists(target) and not target.startswith(inside))


def _hosts(files: Iterable[ShardFile]) -> set[str]:
    return {egress_of(file.url) for file in files if file.url}


def egress_of(url: str) -> str:
    """Return ``host:port`` of a URL."""
    parts = urlsplit(url)
    return address.joined(parts.hostname or "", parts.port or _PORTS[parts.scheme])
