"""The exchange between parameter servers: senders to all peers, and the service that peers call (exchange port, mutual
TLS)."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from geofed_pb.errors import GeofedError
from geofed_pb.rpc import CHUNK_BYTES, answering, peer_region, streaming
from geofed_pb.tasks import awaited
from geofed_pb.v1 import common_pb2, sync_pb2
from sync.file_transfer.arrival import Tickets
from sync.file_transfer.file_receiver import FileReceiver
from sync.file_transfer.manifest import Manifest, PeerAddress, Verdict
from sync.file_transfer.peer_sender import PeerSender, SenderCallbacks
from sync.file_transfer.signing import sign
from sync.file_transfer.wire import manifest_to_proto
from sync.mapped_files import locked
from sync.ps.admission import MAX_WITNESSES, Admission
from sync.ps.config import PsConfig
from sync.ps.core.actions import SendUpdates
from sync.ps.core.events import PeerHas, PeerUnreachable, SendAttempted, StateLost, SumGone, UpdateStored
from sync.ps.core.ledger import NO_MODEL
from sync.ps.engine import Engine
from sync.ps.execution.own_updates import FramedUpdate
from sync.ps.mask_keys import MaskKeys
from sync.ps.rejoin import rejoin_reply
from sync.tcp_streams.receiver import BulkPort
from sync.tcp_streams.sockets import Tls
from sync.wan import LinkSample

__all__ = ["ExchangeService", "PeerLinks"]

_log = logging.getLogger("geofed.ps")
_MAX_WAITING_UPDATES = 64
"""Largest updates of one region whose bytes may wait here to be merged. More only wait if this region was stopped for
long, and then the other sends sums."""
_Context = grpc.aio.ServicerContext[Any, Any]


class PeerLinks:
    """The senders to all peers, and the counters of what has been received."""

    def __init__(self, engine: Engine, config: PsConfig, identity: Callable[[], Tls]) -> None:
        self._engine, self._config, self.identity = engine, config, identity
        self.peer_senders: dict[str, PeerSender] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self.received_bytes: dict[str, int] = {}
        """Bytes of updates received, by the region that sent them."""
        self._counting = threading.Lock()
        self._closing = False
        self.bulk: BulkPort | None = None
        self.store_fault = ""
        """Why other regions' updates cannot be stored here; empty: they can."""
        self.tickets = Tickets()
        self.admission = Admission(config, identity, engine.feed)
        engine.on_ship = self.ship
        engine.links = self._samples

    def ship(self, action: SendUpdates) -> None:
        """Pass the updates for a peer to its sender."""
        self._peer_sender(action.peer.region).ship(action.peer, action.manifests)

    def start(self) -> None:
        """Create senders for peers as they become known."""
        task = awaited(self._watch_peers(), name="watching for peers")
        task.add_done_callback(self._peer_sender_ended)
        self._tasks.append(task)

    async def _watch_peers(self) -> None:
        version = -1
        while True:
            version = await self._engine.changed_since(version)
            self.set_peers(_peers_of(self._engine))

    def set_peers(self, peers: Iterable[PeerAddress]) -> None:
        """Create a sender for each peer even if there is nothing to send yet: a peer that cannot connect to this region
        must be called."""
        for peer in peers:
            self._peer_sender(peer.region).set_peer(peer)

    def _peer_sender(self, region: str) -> PeerSender:
        peer_sender = self.peer_senders.get(region)
        if peer_sender is None:
            storage = self._engine.storage
            peer_sender = self.peer_senders[region] = PeerSender(
                self._config.job,
                self.identity,
                storage.path_of,
                self._arrived,
                self._config.stall_seconds,
                self._engine.notify,
                self._collect,
                lambda: self.bulk.port if self.bulk else 0,
                SenderCallbacks(
                    lambda peer, manifest: self._engine.feed(SendAttempted(peer, manifest)),
                    lambda peer: self._engine.feed(PeerUnreachable(peer)),
                    lambda peer, origin, sequence: self._engine.feed(PeerHas(peer, sequence, origin)),
                    lambda manifest: self._engine.feed(SumGone(manifest)),
                    signed=self._sign,
                ),
            )
            for name, work in (("sender to", peer_sender.run()), ("Collect call to", peer_sender.collect())):
                task = awaited(work, name=f"{name} {region}")
                task.add_done_callback(self._peer_sender_ended)
                self._tasks.append(task)
        return peer_sender

    def _sign(self, proto: sync_pb2.UpdateManifest) -> None:
        """Sign the manifest of our own update, and add those of the last updates that we have merged from others."""
        if proto.region != self._config.region:
            return
        sign(proto, self.identity())
        ledger = self._engine.machine.ledger
        others = [region for region in self._config.regions if region != proto.region]
        # In a large job they take turns.
        turn = proto.sequence * MAX_WITNESSES % max(1, len(others))
        for region in (others[turn:] + others[:turn])[:MAX_WITNESSES]:
            merged = ledger.kept.get((region, ledger.marks[region]))
            if merged is not None and merged.signature:
                proto.merged.append(manifest_to_proto(proto.job, replace(merged, certificate="")))

    def _samples(self) -> dict[str, LinkSample]:
        """Return the measurements of the links for the controller. Small updates don't measure a link's rate."""
        return {
            region: LinkSample(
                peer_sender.meter.mbps if peer_sender.meter.streams else None,
                max(peer_sender.meter.rtt_ms, 0.1),
                peer_sender.backlog_bytes,
            )
            for region, peer_sender in self.peer_senders.items()
        }

    def _arrived(self, peer: str, manifest: Manifest) -> None:
        self._engine.feed(PeerHas(peer, manifest.sequence, manifest.region))

    def _collect(self, region: str, address: tuple[str, int], streams: int) -> None:
        """Open streams to a peer that cannot connect to this region and has an update for it."""
        if self.bulk is not None:
            self.bulk.collect(address, region, streams, self.tickets.issue(region, None))

    def adopt(self, region: str, ticket: bytes, connection: ssl.SSLSocket) -> None:
        """Use a stream that a peer has opened, to send to it."""
        self._peer_sender(region).adopt(ticket, connection)

    def calls_to(self, region: str) -> AsyncIterator[sync_pb2.CollectCall]:
        """Yield requests to open streams, for a peer's Collect call."""
        return self._peer_sender(region).calls()

    def count_received(self, region: str, count: int) -> None:
        """Count bytes received from a region. Called by any thread."""
        with self._counting:
            self.received_bytes[region] = self.received_bytes.get(region, 0) + count

    def _peer_sender_ended(self, task: asyncio.Task[None]) -> None:
        """Fail the server if a sender ends: it should run until it is closed."""
        if self._closing:
            return
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        _log.error("%s failed", task.get_name(), exc_info=error)
        self._engine.fail(GeofedError("INTERNAL", f"{task.get_name()}: {type(error).__name__}: {error}"))

    async def close(self) -> None:
        """Stop all senders, and close all streams."""
        self._closing = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for peer_sender in self.peer_senders.values():
            await peer_sender.close()
        if self.bulk is not None:
            await asyncio.to_thread(self.bulk.close)


def _peers_of(engine: Engine) -> list[PeerAddress]:
    """Return the peers that the state machine knows."""
    return list(engine.machine.ledger.peers.values())


class ExchangeService(FileReceiver):
    """Serves the parameter servers of the other regions."""

    def __init__(self, engine: Engine, config: PsConfig, links: PeerLinks, keys: MaskKeys | None = None) -> None:
        """``keys``: with secure aggregation: the mask keys of all regions."""
        super().__init__(config.job, links.tickets)
        self._keys = keys
        self._engine, self._config, self._links = engine, config, links
        self._first: FramedUpdate | None = None
        """Our own copy of the initial model's update, until that update is stored."""
        self._first_is_stored = False
        engine.on_reproduced = self._reproduced
        engine.arriving = lambda: self._incoming

    # Admission

    def admit(self, caller: str | None, job: str | None = None) -> str:
        config = self._config
        if caller is None or caller not in config.regions or caller == config.region:
            raise GeofedError("FORBIDDEN", f"{caller} is not a peer of {config.region} in this job")
        if job is not None and job != config.job:
            raise GeofedError("FORBIDDEN", f"this parameter server does not run {job}")
        return caller

    def check(self, proto: sync_pb2.UpdateManifest, caller: str | None) -> Manifest:
        """Return the manifest of an offer. A peer may send its own updates and pass on those of the job's other
        regions, but not ours."""
        caller = self.admit(caller)
        layout, admission = self._engine.storage.layout, self._links.admission
        elements, layout_bytes = (None, 0) if layout is None else (layout.size, len(layout.to_json()))
        try:
            most = admission.limits.most_bytes_of(proto.sequence, elements, layout_bytes)
            return admission.checked(proto, caller, most, self._held)
        except GeofedError as error:
            admission.note(caller, error)
            raise

    def _held(self, manifest: Manifest) -> Manifest | None:
        """Return what is here, or is being received, under the number of a manifest."""
        key = manifest.region, manifest.sequence
        held, arrival = self._engine.machine.ledger.kept.get(key), self._incoming.get(key)
        held = arrival.manifest if held is None and arrival is not None else held
        return held if held is not None and held.first == manifest.first else None

    def judge(self, job: str, manifest: Manifest, via: str = "") -> Verdict:
        if job != self._config.job or not self._engine.storage.accepts(manifest.sequence):
            return Verdict.LATER
        verdict = self._engine.machine.verdict(manifest, via)
        if verdict is Verdict.WANT and self._stores_too_much(manifest):
            return Verdict.LATER
        return verdict

    def _stores_too_much(self, manifest: Manifest) -> bool:
        """Whether so many bytes of a region's updates may wait to be merged that it must send this one later. The next
        one to merge is always accepted, so the others become fewer."""
        layout, ledger = self._engine.storage.layout, self._engine.machine.ledger
        ahead = manifest.begins - ledger.marks[manifest.region]
        if layout is None or ahead <= 1:
            return False
        most = self._links.admission.limits.most_bytes_of(manifest.sequence, layout.size, 0)
        return ahead * manifest.total_bytes > _MAX_WAITING_UPDATES * most

    def knows_size(self, manifest: Manifest) -> bool:
        return self._engine.storage.layout is not None

    def inspect(self, manifest: Manifest, path: Path) -> None:
        self._engine.storage.inspect(manifest, path)

    def refused(self, manifest: Manifest, caller: str, error: GeofedError) -> None:
        admission = self._links.admission
        admission.note(caller, error)
        if manifest.signature or caller == manifest.region:
            text = f"update {manifest.sequence} of {manifest.region} cannot be merged: {error.message}"
            admission.blame(manifest, text)

    def path_for(self, manifest: Manifest) -> Path:
        return self._engine.storage.update_path(manifest.region, manifest.sequence, manifest.first)

    def local_copy(self, manifest: Manifest) -> Sequence[memoryview] | None:
        """Return the initial model if our own workers have initialised the same one, bit for bit."""
        ours = self._first
        if ours is None or manifest.sequence != 0:
            return None
        return ours.pieces if (ours.digest, ours.total_bytes) == (manifest.digest, manifest.total_bytes) else None

    def _reproduced(self, first: FramedUpdate) -> None:
        if self._engine.machine.sequence == NO_MODEL and not self._first_is_stored:
            self._first = first
            self.take_local_copies()

    def reuse(self, size: int, path: Path) -> None:
        self._engine.storage.buffer_pool.take(size, path)

    def begun(self, manifest: Manifest) -> None:
        self._engine.watch_times()

    def next_of(self, region: str) -> int:
        return self._engine.machine.ledger.newest(region) + 1

    def stored(self, manifest: Manifest) -> None:
        if manifest.sequence == 0:
            self._first, self._first_is_stored = None, True
        self._engine.feed(UpdateStored(manifest))

    def count_received(self, caller: str, count: int) -> None:
        self._links.count_received(caller, count)

    def store_fault_changed(self) -> None:
        self._links.store_fault = self.store_fault
        self._engine.notify()

    def adopt(self, caller: str, ticket: bytes, connection: ssl.SSLSocket) -> None:
        self._links.adopt(caller, ticket, connection)

    def open_bulk(self, host: str, port: int, identity: Callable[[], Tls]) -> int:
        found = super().open_bulk(host, port, identity)
        self._links.bulk = self.bulk
        return found

    # With secure aggregation

    @answering
    async def ExchangeKeys(self, request: sync_pb2.MaskKeys, context: _Context) -> sync_pb2.MaskKeys:
        caller = self.admit(peer_region(context), request.job)
        if self._keys is None:
            raise GeofedError("FORBIDDEN", f"{self._config.job} has no secure aggregation")
        return await self._keys.exchanged(caller, request)

    # For a region that has lost its state

    @answering
    async def Rejoin(self, request: sync_pb2.RejoinRequest, context: _Context) -> sync_pb2.RejoinReply:
        caller = self.admit(peer_region(context), request.job)
        # It may make these updates again, and differently; those that are stored here are part of the answer.
        self.drop_incoming(caller)
        self._engine.feed(StateLost(caller))
        layout = self._engine.storage.layout
        reply = rejoin_reply(self._engine.machine, request.job, "" if layout is None else layout.to_json())
        for proto in reply.kept:
            if proto.region == self._config.region:
                sign(proto, self._links.identity())
        return reply

    @streaming
    async def Fetch(self, request: sync_pb2.FetchRequest, context: _Context) -> AsyncIterator[common_pb2.BlobChunk]:
        self.admit(peer_region(context), request.job)
        storage, digest = self._engine.storage, ""
        if request.region not in self._config.regions and not request.checkpoint:
            raise GeofedError("FORBIDDEN", f"{request.region} is not a region of this job")
        path: Path | None = storage.update_path(request.region, request.sequence)
        if (request.region, request.sequence) not in self._engine.machine.ledger.kept:
            # Its file may be there, but an update that is not durable yet may be made again, and differently: with
            # secure aggregation two vectors under one mask.
            path = None
        if request.checkpoint:
            if self._engine.machine.setup.background:
                # The file is overwritten by a later checkpoint.
                raise GeofedError(
                    "MODEL_NOT_FOUND",
                    "checkpoints are not shared with background exchange",
                    hint="fetch updates instead",
                )
            path = storage.newest_checkpoint()
            digest = f"sha256:{path.stem.rpartition('-')[2]}" if path is not None else ""
        try:
            if path is None:
                raise FileNotFoundError
            # Once the file is open, it may be deleted without harm; and locked, it is not reused.
            file = path.open("rb")
            if not locked(file.fileno(), path):
                file.close()
                raise FileNotFoundError
        except FileNotFoundError:
            raise GeofedError("MODEL_NOT_FOUND", "no longer stored", hint="call Rejoin again") from None
        with file:
            total, offset = os.fstat(file.fileno()).st_size, 0
            while data := await asyncio.to_thread(file.read, CHUNK_BYTES):
                yield common_pb2.BlobChunk(digest=digest, total_bytes=total, offset=offset, data=data)
                offset += len(data)

    # For a region that cannot be reached from here

    @streaming
    async def Collect(self, request: sync_pb2.CollectRequest, context: _Context) -> AsyncIterator[sync_pb2.CollectCall]:
        caller = self.admit(peer_region(context), request.job)
        async for call in self._links.calls_to(caller):
            yield call
