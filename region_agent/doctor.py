"""Checks of `geofed agent doctor`: each requirement of an agent, with a hint where it is not met."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import math
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import grpc.aio

from geofed_pb.address import addresses_of, joined, split
from geofed_pb.errors import OUTAGE, GeofedError, install_hint
from geofed_pb.rpc import CONTROL_PLANE_NAME, channel, clock_of, error_of
from geofed_pb.v1 import agent_pb2_grpc, common_pb2
from region_agent.config import (
    DatasetConfig,
    DockerGateway,
    EmbeddedGateway,
    FileChannelConfig,
    KubernetesGateway,
    LambdaGateway,
    OpenFaasGateway,
    RedisChannelConfig,
    RegionConfig,
    ScfGateway,
)
from region_agent.embedded_gateway import EmbeddedGatewayProcess, openfaas_client
from region_agent.isolation import CONTAINER, isolation_of
from region_agent.link.identity import Identity
from region_agent.partition.channel import RegionChannel, channel_text
from region_agent.partition.server.process import free_ports
from region_agent.policy import check_isolation
from region_agent.shards.indexing import INDEXES, Indexes
from region_agent.shards.reading import shard_files

__all__ = ["Finding", "examine"]

_MIN_FREE_BYTES = 1 << 30
"""Least free space in the state directory."""
_CONNECT_SECONDS = 10.0
"""Timeout of a request to the control plane, and of a connection to the address that other regions use."""
_MAX_SKEW_SECONDS = 60.0
"""Largest difference of the clocks. Certificates are valid from five minutes before they are made; deadlines and
records use the clocks."""


@dataclass(frozen=True)
class Finding:
    """Result of one check."""

    name: str
    ok: bool
    text: str
    hint: str = ""


async def examine(config: RegionConfig, state_dir: Path) -> list[Finding]:
    """Run all checks; a failed check is a finding, not an exception."""
    identity = Identity(state_dir, config)

    async def dataset(name: str) -> str:
        _check_visible(config, config.datasets[name])
        files = await asyncio.to_thread(shard_files, config.datasets[name], config.stores)
        told = ", ".join(f"{split}: {len(found)} file{'s' * (len(found) != 1)}" for split, found in files.items())
        if (spec := config.datasets[name].format) is None or "train" not in files:
            return told
        index = await asyncio.to_thread(Indexes(state_dir / INDEXES).of, spec, files["train"])
        parts = ", ".join(f"{part}: {kind}" for part, kind in index.schema.items())
        whose = "" if index.client_count is None else f" from {index.client_count:,} clients"
        return f"{told}; {index.total:,} training samples{whose} of {parts[:500]}"

    checks: list[tuple[str, Callable[[], Awaitable[str]]]] = [
        ("identity", lambda: _identity(identity, config)),
        ("control plane", lambda: _control_plane(identity)),
        ("clock", lambda: _clock(identity)),
        ("gateway", lambda: _gateway(config)),
        ("isolation", lambda: _isolation(config)),
        ("prices", lambda: _prices(config)),
        ("channel", lambda: _channel(config, state_dir)),
        ("ports", lambda: _ports(config)),
        ("exchange", lambda: _exchange(config, identity)),
        ("disk", lambda: _disk(state_dir)),
        ("shared memory", _shared_memory),
        *((f"data {name}", lambda name=name: dataset(name)) for name in sorted(config.datasets)),
    ]
    return [await _run_check(name, check) for name, check in checks]


async def _run_check(name: str, check: Callable[[], Awaitable[str]]) -> Finding:
    try:
        return Finding(name, True, await check())
    except GeofedError as error:
        return Finding(name, False, error.message, error.hint)
    except OSError as error:
        return Finding(name, False, str(error), "see the message of the operating system")


async def _identity(identity: Identity, config: RegionConfig) -> str:
    identity.check()
    region = identity.federation.region
    if region != config.name:
        raise GeofedError("CONFIG_INVALID", f"the certificate is for {region}, the configuration for {config.name}")
    days = (identity.certificate.not_valid_after_utc.timestamp() - time.time()) / 86_400
    return f"{region}, certificate valid for {days:.1f} days"


async def _control_plane(identity: Identity) -> str:
    seconds, _ = await _ask_control_plane(identity)
    return f"{identity.federation.address} answers in {seconds * 1e3:.0f} ms"


async def _clock(identity: Identity) -> str:
    identity.check()
    _, ahead = await _ask_control_plane(identity)
    if ahead is None:
        return "unknown: the control plane is of an older version, which does not report its clock"
    if abs(ahead) > _MAX_SKEW_SECONDS:
        text = f"this machine's clock is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} the control plane's"
        raise GeofedError("CERTIFICATE_INVALID", text, hint="correct the wrong clock, best with NTP")
    return f"within {max(1.0, math.ceil(abs(ahead))):.0f} s of the control plane's"


async def _ask_control_plane(identity: Identity) -> tuple[float, float | None]:
    """Measure a request to the control plane that leads; returns its seconds, and those that this clock is ahead."""
    addresses = addresses_of(identity.federation.address)
    for address in addresses[:-1]:
        try:
            return await _ask(address, identity)
        except GeofedError as error:
            if error.code not in OUTAGE:
                raise
    return await _ask(addresses[-1], identity)


async def _ask(address: str, identity: Identity) -> tuple[float, float | None]:
    connection = channel(
        address,
        ca_pem=identity.ca_file.read_bytes(),
        name=CONTROL_PLANE_NAME,
        certificate_pem=identity.certificate_file.read_bytes(),
        key_pem=identity.key_file.read_bytes(),
    )
    async with connection:
        begun, at = time.monotonic(), time.time()
        # The blob need not exist: only the time of the answer matters.
        request = common_pb2.BlobRequest(digest=f"sha256:{'0' * 64}")
        call = agent_pb2_grpc.AgentHubStub(connection).StatBlob(request, timeout=_CONNECT_SECONDS)
        try:
            await call
        except grpc.aio.AioRpcError as error:
            raise error_of(error) from None
        seconds = time.monotonic() - begun
        clock = clock_of(await call.trailing_metadata())
    return seconds, None if clock is None else at + seconds / 2 - clock


async def _gateway(config: RegionConfig) -> str:
    gateway = config.gateway
    if isinstance(gateway, DockerGateway):
        return await asyncio.to_thread(_docker, gateway)
    if isinstance(gateway, KubernetesGateway):
        return await _kubernetes(config, gateway)
    if isinstance(gateway, LambdaGateway | ScfGateway):
        from region_agent.gateway.embedded.serverless.examine import examine_functions

        return await examine_functions(config, gateway)
    if not isinstance(gateway, OpenFaasGateway):
        return "embedded; it starts with the agent"
    async with openfaas_client(gateway) as client:
        info, edition = await client.info(), await client.edition()
    capacity = config.capacity.workers + config.capacity.preemptible
    if edition.workers is not None and capacity > edition.workers:
        raise GeofedError(
            "LIMIT_EXCEEDED",
            f"capacity states {capacity} workers; {edition.title} runs {edition.workers} at most: "
            f"{edition.functions} functions with {edition.replicas} replicas each",
            hint="lower `capacity`, or set `gateway.edition: pro` if the installation has no such limit",
        )
    limit = f", {edition.replicas} replica{'s' * (edition.replicas != 1)} a function" if edition.replicas else ""
    return f"{gateway.url}: {info.get('provider', {}).get('orchestration', 'OpenFaaS')}, as {edition.title}{limit}"


def _docker(gateway: DockerGateway) -> str:
    """Ask the engine for its version and for the image. Blocks."""
    try:
        import docker
    except ImportError:
        raise GeofedError(
            "CONFIG_INVALID", "the package docker is not installed", hint=install_hint("docker")
        ) from None
    try:
        with contextlib.closing(docker.DockerClient(base_url=gateway.engine, timeout=_CONNECT_SECONDS)) as engine:
            version = engine.version()["Version"]
            images = engine.images.list(name=gateway.image)
    except Exception as error:
        text = f"no Docker engine answers at {gateway.engine}: {error}"
        hint = "start it, and let the agent's user use its socket"
        raise GeofedError("GATEWAY_UNAVAILABLE", text, hint=hint) from error
    if not images:
        text = f"the engine has no image {gateway.image}"
        raise GeofedError("CONFIG_INVALID", text, hint="build or pull it; docs/containers.md has the commands")
    return f"Docker {version} at {gateway.engine}, image {gateway.image}"


async def _kubernetes(config: RegionConfig, gateway: KubernetesGateway) -> str:
    """Ask the cluster for the account's rights, have it check a worker's Job, and compare quotas with the capacity."""
    try:
        from region_agent.gateway.embedded.cluster.examine import examine_cluster
    except ImportError:
        raise GeofedError(
            "CONFIG_INVALID", "the package lightkube is not installed", hint=install_hint("kubernetes")
        ) from None
    return await examine_cluster(config, gateway)


def _check_visible(config: RegionConfig, dataset: DatasetConfig) -> None:
    """Check that functions can read a dataset where its region file says it is: containers elsewhere see no local file.

    Raises ``GeofedError("SHARD_UNREADABLE")``.
    """
    local = [part.uri for part in dataset.splits.values() if not part.uri.startswith("s3://")]
    if local and not config.platform.local_files:
        text = f"{local[0]} is a path of this machine, which functions of {config.platform.title} do not see"
        hint = "put the shards into an object store of the region, and write s3://BUCKET/PATH"
        raise GeofedError("SHARD_UNREADABLE", text, hint=hint)


async def _isolation(config: RegionConfig) -> str:
    """Try how functions are isolated, with a gateway of its own."""
    if not config.platform.sandboxed:
        return CONTAINER.text
    with tempfile.TemporaryDirectory(prefix="geofed-doctor-") as folder:
        gateway = EmbeddedGatewayProcess(Path(folder), EmbeddedGateway(), isolation=config.policy.isolation, warm=False)
        client = await gateway.start()
        try:
            isolation = await isolation_of(config, client)
        finally:
            await client.aclose()
            await gateway.stop()
    check_isolation(config, isolation)
    return isolation.text


async def _prices(config: RegionConfig) -> str:
    if config.prices is None:
        raise GeofedError("PRICE_UNKNOWN", "the region file has no prices")
    return f"{config.prices.source}, as of {config.prices.as_of}"


async def _channel(config: RegionConfig, state_dir: Path) -> str:
    if isinstance(config.channel, FileChannelConfig):
        if not config.platform.local_files:
            text = f"the channel is a folder of this machine, which functions of {config.platform.title} do not see"
            raise GeofedError("CONFIG_INVALID", text, hint="set `channel` to a Redis server or a bucket of the region")
        return "files on this machine"
    channel = RegionChannel(config.channel, state_dir / "channel", config.name)
    own = [place for place in channel.endpoints() if _is_own(split(place)[0])]
    unix = isinstance(config.channel, RedisChannelConfig) and config.channel.url.startswith("unix:")
    if not config.platform.sandboxed and (own or unix):
        text = f"the channel's address {[*own, 'a socket file'][0]} is of this machine only; functions do not reach it"
        raise GeofedError("CONFIG_INVALID", text, hint="write an address at which other machines reach the channel")
    channel.worker_env(config.platform)
    measured = await asyncio.to_thread(channel.check)
    times = ", ".join(f"{request} {seconds * 1e3:.0f} ms" for request, seconds in measured.items())
    return f"{channel_text(config)}: {times} (as a worker, with connecting)"


def _is_own(host: str) -> bool:
    """Whether an address means this machine, wherever it is used, or nothing."""
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(host.strip("[]"))
        return address.is_loopback or address.is_unspecified
    return host in ("localhost", "")


async def _ports(config: RegionConfig) -> str:
    server = config.server
    if not config.platform.local_files and _is_own(server.worker_host):
        text = f"`server.workerHost` is {server.worker_host}, at which functions do not reach parameter servers"
        hint = "set it to this machine's address in the network of the functions"
        raise GeofedError("CONFIG_INVALID", text, hint=hint)
    if server.ports is None:
        return "any free ports"
    # Ports of running jobs count as used, since the next job cannot have them.
    found = free_ports(server.exchange_host, server.ports, (0, 0, 0), worker_host=server.worker_host)
    first, last = server.ports
    if found[2] is None:
        return f"{first}-{last}: two free; large updates will use the exchange port, which is slower"
    return f"{first}-{last}: at least three free"


async def _exchange(config: RegionConfig, identity: Identity) -> str:
    """Listen where a parameter server would, and connect as other regions do: to the address that they are told."""
    host, server = config.advertise, config.server
    if _is_own(host):
        if identity.joined and not all(_is_own(split(one)[0]) for one in addresses_of(identity.federation.address)):
            text = f"`advertise` is {host}, at which regions on other machines do not reach this one"
            hint = "set it in the region file to a name or address of this machine that they reach"
            raise GeofedError("CONFIG_INVALID", text, hint=hint)
        return f"{host}, which only regions on this machine reach"
    try:
        port = free_ports(server.exchange_host, server.ports, (0, 0, 0), worker_host=server.worker_host)[1]
    except GeofedError:
        return "not tried, since no port is free"
    arrived = asyncio.Event()

    def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        arrived.set()
        writer.close()

    async with await asyncio.start_server(accept, server.exchange_host, port) as listening:
        port = listening.sockets[0].getsockname()[1]
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                _, writer = await asyncio.open_connection(host, port)
                writer.close()
                await arrived.wait()
        except socket.gaierror as error:
            text, hint = (
                f"`advertise` is {host}, which has no address: {error.strerror}",
                "correct it in the region file",
            )
            raise GeofedError("CONFIG_INVALID", text, hint=hint) from None
        except (OSError, TimeoutError) as error:
            text = f"{joined(host, port)} does not lead to this machine: {error or 'no answer'}"
            hint = (
                "correct `advertise`, or open the ports; where this machine's own network translates addresses, see if"
            )
            raise GeofedError("UNAVAILABLE", text, hint=f"{hint} another region reaches it") from None
    return f"{joined(host, port)} leads to this machine, tried from here"


async def _disk(state_dir: Path) -> str:
    folder = state_dir if state_dir.exists() else Path()
    free = shutil.disk_usage(folder).free
    if free < _MIN_FREE_BYTES:
        raise GeofedError("DISK_FULL", f"{free >> 20} MiB free in {folder}")
    return f"{free / 1e9:.0f} GB free in {folder}"


async def _shared_memory() -> str:
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK):
        return "none; tensors are exchanged in the state directory, which is slower"
    return f"{shutil.disk_usage(shared).free / 1e9:.1f} GB free in {shared}"
