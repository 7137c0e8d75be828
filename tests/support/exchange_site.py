"""One region's real sending and receiving code, without a machine: it wants every update that it does not have."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio

from geofed_pb.errors import GeofedError
from geofed_pb.rpc import server_options
from geofed_pb.v1 import sync_pb2_grpc
from sync import framing
from sync.file_transfer.manifest import Manifest, PeerAddress, Verdict
from sync.ps.core.actions import SendUpdates
from sync.ps.core.events import Event, PeerHas, UpdateStored
from sync.ps.exchange import ExchangeService, PeerLinks
from sync.tcp_streams.sockets import Tls

__all__ = ["JOB", "Site"]

JOB = "job-1"


@dataclass
class Site:
    """Stands in for the engine: keeps files, and answers offers."""

    region: str
    regions: tuple[str, ...]
    folder: Path
    identity: Tls
    stall_seconds: float = 5.0
    stored: list[Manifest] = field(default_factory=list)
    arrived: list[tuple[str, int]] = field(default_factory=list)
    relayed: list[tuple[str, str, int]] = field(default_factory=list)
    failed: GeofedError | None = None

    def __post_init__(self) -> None:
        self.on_ship: Callable[[SendUpdates], None] = lambda _: None
        self.machine = SimpleNamespace(verdict=self._verdict, ledger=self._ledger())
        self.storage = SimpleNamespace(
            update_path=self.path, path_of=lambda m: self.path(m.region, m.sequence), layout=None,
            accepts=lambda sequence: True, inspect=lambda manifest, path: None,
            buffer_pool=SimpleNamespace(take=lambda size, path: False),
        )  # fmt: skip
        self.version = 0
        self.changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()
        config: Any = SimpleNamespace(
            job=JOB, region=self.region, regions=self.regions, stall_seconds=self.stall_seconds, codec="fp32",
            wan_settings={}, rounds=1 << 20, round_samples={}, state_dir=self.folder,
        )  # fmt: skip
        engine: Any = self
        self.links = PeerLinks(engine, config, lambda: self.identity)
        self.links.on_relayed = self._relayed
        # What is passed on here is made up by the test.
        self.links.admission.unsigned = frozenset(self.regions)
        self.service = ExchangeService(engine, config, self.links)
        self.port = self.bulk_port = 0
        self._server: grpc.aio.Server | None = None

    def _ledger(self) -> SimpleNamespace:
        return SimpleNamespace(peers={}, kept={}, marks=dict.fromkeys(self.regions, -1), newest=lambda region: -1)

    def path(self, region: str, sequence: int, first: int = 0) -> Path:
        kind = "outbox" if region == self.region else "inbox"
        return self.folder / kind / region / f"{sequence}.frame"

    def _verdict(self, manifest: Manifest, *_: object) -> Verdict:
        # What was stored in an earlier life counts.
        kept = self.path(manifest.region, manifest.sequence).with_suffix(".json")
        try:
            return Verdict.HAVE if json.loads(kept.read_text())["digest"] == manifest.digest else Verdict.WANT
        except FileNotFoundError:
            return Verdict.WANT

    def feed(self, event: Event) -> None:
        if isinstance(event, UpdateStored):
            self.stored.append(event.manifest)
        elif isinstance(event, PeerHas):
            origin = getattr(event, "origin", "") or self.region
            if origin == self.region:
                self.arrived.append((event.region, event.sequence))
            else:
                self.relayed.append((event.region, origin, event.sequence))
        self.notify()

    def watch_times(self) -> None:
        """As if nothing stood still."""

    def _relayed(self, peer: str, manifest: Manifest) -> None:
        self.relayed.append((peer, manifest.region, manifest.sequence))
        self.notify()

    def notify(self) -> None:
        self.version += 1
        task = asyncio.ensure_future(self._wake())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _wake(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    async def changed_since(self, version: int) -> int:
        async with self.changed:
            await self.changed.wait_for(lambda: self.version != version)
            return self.version

    async def until(self, condition: Callable[[], object], seconds: float = 30.0) -> None:
        """Wait for something that an event makes true."""
        async with asyncio.timeout(seconds):
            while not condition():
                await self.changed_since(self.version)

    def fail(self, error: GeofedError) -> None:
        self.failed = error

    async def start(self, host: str = "127.0.0.1", port: int = 0, bulk_port: int | None = 0) -> None:
        self._server = grpc.aio.server(options=server_options())
        sync_pb2_grpc.add_ExchangeServicer_to_server(self.service, self._server)
        pair = (self.identity.key_pem, self.identity.certificate_pem)
        credentials = grpc.ssl_server_credentials([pair], self.identity.ca_pem, require_client_auth=True)
        self.port = self._server.add_secure_port(f"{host}:{port}", credentials)
        if bulk_port is not None:
            self.bulk_port = self.service.open_bulk(host, bulk_port, lambda: self.identity)
        await self._server.start()
        self.links.start()

    async def stop(self) -> None:
        await self.links.close()
        if self._server is not None:
            await self._server.stop(0)

    def peer(self, host: str = "127.0.0.1", port: int = 0) -> PeerAddress:
        return PeerAddress(self.region, 1, f"{host}:{port or self.port}")

    def make(self, sequence: int, data: bytes, region: str = "") -> Manifest:
        """An update of ours, or one of another region's that we pass on."""
        region = region or self.region
        path = self.path(region, sequence)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return Manifest(region, 1, sequence, framing.digest_of([data]), len(data), 1.0)

    async def carry(self, to: PeerAddress, manifest: Manifest, seconds: float = 30.0) -> None:
        """Ship an update, and wait until it is durable there."""
        self.links.ship(SendUpdates(to, (manifest,)))
        has = functools.partial(self._has, to.region, manifest)
        await self.until(has, seconds)

    def _has(self, peer: str, manifest: Manifest) -> bool:
        if manifest.region == self.region:
            return (peer, manifest.sequence) in self.arrived
        return (peer, manifest.region, manifest.sequence) in self.relayed
