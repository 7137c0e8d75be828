"""Between parameter servers: the couriers to all peers, and what comes from them (mutual TLS, exchange port)."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import re
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import grpc
import grpc.aio

from geofed_pb.errors import GeofedError
from geofed_pb.rpc import CHUNK_BYTES, answering, peer_common_name, streaming
from geofed_pb.v1 import common_pb2, sync_pb2, sync_pb2_grpc
from sync.ps.arrival import Arrival, Tickets, key_of
from sync.ps.config import PsConfig
from sync.ps.engine import Engine
from sync.ps.events import Lapsed, Manifest, Peer, PeerHas, Ship, Stored, Verdict
from sync.ps.link import Courier, Tls, manifest_of
from sync.ps.rejoin import answer_of
from sync.transport.landing import Landing
from sync.transport.receiver import BulkPort
from sync.wan import LinkSample

__all__ = ["ExchangeService", "Links"]

_log = logging.getLogger("geofed.ps")
_Context = grpc.aio.ServicerContext[Any, Any]
_Result = TypeVar("_Result")

LARGEST_UPDATE_BYTES = 64 << 30
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_WANT = sync_pb2.OfferReply.VERDICT_WANT
_HAVE = sync_pb2.OfferReply.VERDICT_HAVE
_VERDICTS = {
    Verdict.WANT: _WANT,
    Verdict.HAVE: _HAVE,
    Verdict.FENCED: sync_pb2.OfferReply.VERDICT_FENCED,
    Verdict.LATER: sync_pb2.OfferReply.VERDICT_UNKNOWN,
}


class Links:
    """The couriers to all peers, and what has come from them."""

    def __init__(self, engine: Engine, config: PsConfig, identity: Callable[[], Tls]) -> None:
        self._engine, self._config, self._identity = engine, config, identity
        self.couriers: dict[str, Courier] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self.received_bytes: dict[str, int] = {}
        """Of updates, by the region that sent them here."""
        self._counting = threading.Lock()
        self._closing = False
        self.bulk: BulkPort | None = None
        self.tickets = Tickets()
        engine.on_ship = self.ship
        engine.links = self._samples

    def ship(self, action: Ship) -> None:
        self._courier(action.peer.region).ship(action.peer, action.manifests)

    def start(self) -> None:
        """Watch for peers that have become known."""
        task = asyncio.create_task(self._watch_peers(), name="the watch for peers")
        task.add_done_callback(self._courier_ended)
        self._tasks.append(task)

    async def _watch_peers(self) -> None:
        version = -1
        while True:
            version = await self._engine.changed_since(version)
            self.meet(_peers_of(self._engine))

    def meet(self, peers: Iterable[Peer]) -> None:
        """Know of peers although there is nothing to send yet: one that cannot reach us must be called for."""
        for peer in peers:
            self._courier(peer.region).meet(peer)

    def _courier(self, region: str) -> Courier:
        courier = self.couriers.get(region)
        if courier is None:
            storage = self._engine.storage
            courier = self.couriers[region] = Courier(
                self._config.job,
                self._identity,
                lambda manifest: storage.update_path(manifest.region, manifest.sequence),
                self._arrived,
                self._config.stall_seconds,
                self._engine.notify,
                self._collect,
                lambda: self.bulk.port if self.bulk else 0,
            )
            for name, work in (("courier to", courier.run()), ("calls from", courier.collect())):
                task = asyncio.create_task(work, name=f"{name} {region}")
                task.add_done_callback(self._courier_ended)
                self._tasks.append(task)
        return courier

    def _samples(self) -> dict[str, LinkSample]:
        """What the controller sees of the links; small updates do not tell how fast one is."""
        return {
            region: LinkSample(
                courier.meter.mbps if courier.meter.streams else None,
                max(courier.meter.rtt_ms, 0.1),
                courier.backlog_bytes,
            )
            for region, courier in self.couriers.items()
        }

    def _arrived(self, peer: str, manifest: Manifest) -> None:
        self._engine.feed(PeerHas(peer, manifest.sequence, manifest.region))

    def _collect(self, region: str, address: tuple[str, int], streams: int) -> None:
        """A peer that cannot reach us has something for us: dial it."""
        if self.bulk is not None:
            self.bulk.collect(address, region, streams, self.tickets.issue(region, None))

    def adopt(self, region: str, ticket: bytes, line: ssl.SSLSocket) -> None:
        """A peer has dialled, so that we can send to it."""
        self._courier(region).adopt(ticket, line)

    def calls_to(self, region: str) -> AsyncIterator[sync_pb2.CollectCall]:
        """What a peer that collects from us is to be told."""
        return self._courier(region).calls()

    def count_received(self, region: str, count: int) -> None:
        """Called by any thread."""
        with self._counting:
            self.received_bytes[region] = self.received_bytes.get(region, 0) + count

    def _courier_ended(self, task: asyncio.Task[None]) -> None:
        """A courier works for ever; should it break, the process must not go on without it."""
        if self._closing:
            return
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        _log.error("%s broke", task.get_name(), exc_info=error)
        self._engine.fail(GeofedError("INTERNAL", f"{task.get_name()}: {type(error).__name__}: {error}"))

    async def close(self) -> None:
        self._closing = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for courier in self.couriers.values():
            await courier.close()
        if self.bulk is not None:
            await asyncio.to_thread(self.bulk.close)


def _peers_of(engine: Engine) -> list[Peer]:
    """The peers that the machine knows."""
    return list(engine.machine.ledger.peers.values())


class ExchangeService(sync_pb2_grpc.ExchangeServicer):
    """Parameter server → parameter server."""

    def __init__(self, engine: Engine, config: PsConfig, links: Links) -> None:
        self._engine, self._config, self._links = engine, config, links
        self._incoming: dict[tuple[str, int], Arrival] = {}
        self._completing: set[asyncio.Future[None]] = set()

    # What is let in

    def _admit(self, caller: str | None, job: str | None = None) -> str:
        config = self._config
        if caller is None or caller not in config.regions or caller == config.region:
            raise GeofedError("FORBIDDEN", f"{caller} is no peer of {config.region} in this job")
        if job is not None and job != config.job:
            raise GeofedError("FORBIDDEN", f"this parameter server does not run {job}")
        return caller

    def _check(self, proto: sync_pb2.UpdateManifest, caller: str | None) -> Manifest:
        """A peer sends its own updates and passes on those of other members; never ours, never a stranger's."""
        config = self._config
        self._admit(caller)
        if proto.region not in config.regions or proto.region == config.region:
            raise GeofedError("FORBIDDEN", f"{caller} may not send updates of {proto.region}")
        if not 0 < proto.total_bytes <= LARGEST_UPDATE_BYTES:
            raise GeofedError("LIMIT_EXCEEDED", f"an update of {proto.total_bytes} bytes")
        if not (math.isfinite(proto.weight) and proto.weight >= 0 and _DIGEST.fullmatch(proto.digest)):
            raise GeofedError("FRAME_INVALID", "an update whose weight or digest is none")
        manifest = manifest_of(proto)
        return replace(manifest, seen=tuple(one for one in manifest.seen if one[0] in config.regions))

    def _judge(self, job: str, manifest: Manifest, via: str = "") -> Verdict:
        return self._engine.machine.verdict(manifest, via) if job == self._config.job else Verdict.LATER

    def _answer(self, job: str, manifest: Manifest, caller: str) -> sync_pb2.OfferReply:
        verdict = self._judge(job, manifest, caller)
        reply = sync_pb2.OfferReply(verdict=_VERDICTS[verdict])
        if self._links.bulk is not None:
            reply.bulk_port = self._links.bulk.port
        if verdict is Verdict.WANT:
            landing = self._arrival(manifest).landing
            reply.have_bytes = landing.prefix
            reply.have.extend(sync_pb2.Range(begin=begin, end=end) for begin, end in landing.have)
            reply.ticket = self._links.tickets.issue(caller, key_of(manifest))
        elif verdict is Verdict.HAVE:
            self._incoming.pop((manifest.region, manifest.sequence), None)
            reply.have_bytes = manifest.total_bytes
            reply.ticket = self._links.tickets.issue(caller, None)
        return reply

    def _arrival(self, manifest: Manifest) -> Arrival:
        key = (manifest.region, manifest.sequence)
        arrival = self._incoming.get(key)
        if arrival is None or arrival.manifest.digest != manifest.digest:
            path = self._engine.storage.update_path(*key)
            arrival = self._incoming[key] = Arrival(manifest, path)
        return arrival

    # To a region that has lost its state

    @answering
    async def Rejoin(self, request: sync_pb2.RejoinRequest, context: _Context) -> sync_pb2.RejoinReply:
        caller = self._admit(peer_common_name(context), request.job)
        self._engine.feed(Lapsed(caller))
        layout = self._engine.storage.layout
        return answer_of(self._engine.machine, request.job, "" if layout is None else layout.to_json())

    @streaming
    async def Fetch(self, request: sync_pb2.FetchRequest, context: _Context) -> AsyncIterator[common_pb2.BlobChunk]:
        self._admit(peer_common_name(context), request.job)
        storage, digest = self._engine.storage, ""
        if request.region not in self._config.regions and not request.checkpoint:
            raise GeofedError("FORBIDDEN", f"{request.region} is no region of this job")
        path: Path | None = storage.update_path(request.region, request.sequence)
        if request.checkpoint:
            path = storage.newest_checkpoint()
            digest = f"sha256:{path.stem.rpartition('-')[2]}" if path is not None else ""
        try:
            if path is None:
                raise FileNotFoundError
            # Once it is open, it may be forgotten meanwhile.
            file = path.open("rb")
        except FileNotFoundError:
            raise GeofedError("MODEL_NOT_FOUND", "there is none any more", hint="ask again") from None
        with file:
            total, offset = os.fstat(file.fileno()).st_size, 0
            while data := await asyncio.to_thread(file.read, CHUNK_BYTES):
                yield common_pb2.BlobChunk(digest=digest, total_bytes=total, offset=offset, data=data)
                offset += len(data)

    # Over gRPC

    @answering
    async def Offer(self, request: sync_pb2.UpdateManifest, context: _Context) -> sync_pb2.OfferReply:
        caller = peer_common_name(context)
        manifest = self._check(request, caller)
        return self._answer(request.job, manifest, caller or "")

    @answering
    async def Send(self, request: AsyncIterator[sync_pb2.UpdateChunk], context: _Context) -> sync_pb2.OfferReply:
        caller = peer_common_name(context) or ""
        arrival: Arrival | None = None
        stream, manifest, job = 0, None, ""
        async for chunk in request:
            if arrival is None or manifest is None:
                job, manifest = chunk.manifest.job, self._check(chunk.manifest, caller)
                if self._judge(job, manifest, caller) is not Verdict.WANT:
                    return self._answer(job, manifest, caller)
                arrival = self._arrival(manifest)
                arrival.stream += 1
                stream = arrival.stream
            async with arrival.writing:
                if arrival.stream != stream:
                    raise GeofedError("FENCED", "another stream brings this update now")
                await asyncio.to_thread(arrival.append, chunk.offset, chunk.data)
            self._links.count_received(caller, len(chunk.data))
        if arrival is None or manifest is None:
            raise GeofedError("FRAME_INVALID", "a stream without a manifest")
        if arrival.landing.whole:
            await self._complete(job, arrival, caller)
        return self._answer(job, manifest, caller)

    async def _complete(self, job: str, arrival: Arrival, caller: str) -> None:
        """Make a whole update durable and tell the machine of it, also when the one who sent it hangs up meanwhile."""
        work = asyncio.ensure_future(self._completed(job, arrival, caller))
        self._completing.add(work)
        work.add_done_callback(self._completing.discard)
        await asyncio.shield(work)

    async def _completed(self, job: str, arrival: Arrival, caller: str) -> None:
        manifest = arrival.manifest
        async with arrival.writing:
            # Another stream may have completed it while this one waited.
            if self._judge(job, manifest, caller) is Verdict.WANT and arrival.landing.whole:
                await asyncio.to_thread(arrival.complete)
                self._incoming.pop((manifest.region, manifest.sequence), None)
                self._links.tickets.spent(key_of(manifest))
                self._engine.feed(Stored(manifest))

    @streaming
    async def Collect(self, request: sync_pb2.CollectRequest, context: _Context) -> AsyncIterator[sync_pb2.CollectCall]:
        caller = self._admit(peer_common_name(context), request.job)
        async for call in self._links.calls_to(caller):
            yield call

    # Over bulk streams

    def open_bulk(self, host: str, port: int, identity: Callable[[], Tls]) -> int:
        """Listen for bulk streams; returns the port. Raises OSError where it is taken."""
        desk = _Desk(self, asyncio.get_running_loop())
        self._links.bulk = BulkPort(host, port, self._config.job, identity, desk)
        self._links.bulk.start()
        return self._links.bulk.port

    def admit_bulk(self, caller: str, greeting: sync_pb2.BulkHello) -> None:
        self._admit(caller, greeting.job)

    async def adopt_bulk(self, caller: str, greeting: sync_pb2.BulkHello, line: ssl.SSLSocket) -> None:
        self._links.adopt(caller, greeting.ticket, line)

    async def offer_bulk(self, caller: str, offer: sync_pb2.BulkOffer) -> tuple[sync_pb2.OfferReply, Landing | None]:
        proto = offer.manifest
        manifest = self._check(proto, caller)
        if self._judge(proto.job, manifest, caller) is not Verdict.WANT:
            return self._answer(proto.job, manifest, caller), None
        self._links.tickets.redeem(caller, offer.ticket, key_of(manifest))
        arrival = self._arrival(manifest)
        if arrival.landing.whole:
            # All bytes came in an earlier try that could not make them durable.
            await self._complete(proto.job, arrival, caller)
        return self._answer(proto.job, manifest, caller), arrival.landing

    async def landed_bulk(self, caller: str, offer: sync_pb2.BulkOffer) -> sync_pb2.OfferReply:
        proto = offer.manifest
        manifest = self._check(proto, caller)
        if self._judge(proto.job, manifest, caller) is Verdict.WANT:
            await self._complete(proto.job, self._arrival(manifest), caller)
        return self._answer(proto.job, manifest, caller)

    def count_bulk(self, caller: str, count: int) -> None:
        self._links.count_received(caller, count)


class _Desk:
    """Takes the bulk streams' questions from their threads to the event loop."""

    def __init__(self, service: ExchangeService, loop: asyncio.AbstractEventLoop) -> None:
        self._service, self._loop = service, loop

    def _ask(self, question: Coroutine[Any, Any, _Result]) -> _Result:
        try:
            future = asyncio.run_coroutine_threadsafe(question, self._loop)
        except RuntimeError:
            question.close()
            raise EOFError("the parameter server is stopping") from None
        return future.result()

    def greeted(self, caller: str, greeting: sync_pb2.BulkHello) -> None:
        self._service.admit_bulk(caller, greeting)

    def adopted(self, caller: str, greeting: sync_pb2.BulkHello, line: ssl.SSLSocket) -> None:
        self._ask(self._service.adopt_bulk(caller, greeting, line))

    def offered(self, caller: str, offer: sync_pb2.BulkOffer) -> tuple[sync_pb2.OfferReply, Landing | None]:
        return self._ask(self._service.offer_bulk(caller, offer))

    def received(self, caller: str, count: int) -> None:
        self._service.count_bulk(caller, count)

    def landed(self, caller: str, offer: sync_pb2.BulkOffer) -> sync_pb2.OfferReply:
        return self._ask(self._service.landed_bulk(caller, offer))
