"""What is taken from other regions, over gRPC and over bulk streams: resumed where it broke off, verified, and made
durable before it is acknowledged."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import grpc
import grpc.aio

from geofed_pb.errors import GeofedError
from geofed_pb.rpc import answering, peer_common_name
from geofed_pb.v1 import sync_pb2, sync_pb2_grpc
from sync.transfer.arrival import Arrival, Tickets, key_of
from sync.transfer.manifest import Manifest, Verdict
from sync.transport.landing import Landing
from sync.transport.receiver import BulkPort
from sync.transport.sockets import Tls

__all__ = ["LARGEST_UPDATE_BYTES", "Intake"]

_log = logging.getLogger("geofed.ps")
_Context = grpc.aio.ServicerContext[Any, Any]
_Result = TypeVar("_Result")

LARGEST_UPDATE_BYTES = 64 << 30
_VERDICTS = {
    Verdict.WANT: sync_pb2.OfferReply.VERDICT_WANT,
    Verdict.HAVE: sync_pb2.OfferReply.VERDICT_HAVE,
    Verdict.FENCED: sync_pb2.OfferReply.VERDICT_FENCED,
    Verdict.LATER: sync_pb2.OfferReply.VERDICT_UNKNOWN,
}


class Intake(sync_pb2_grpc.ExchangeServicer):
    """The receiving side of the exchange. Whom it lets in, what is wanted, where that goes and what then follows, a
    subclass says."""

    def __init__(self, job: str, tickets: Tickets) -> None:
        self._job, self._tickets = job, tickets
        self.bulk: BulkPort | None = None
        self._incoming: dict[tuple[str, int], Arrival] = {}
        self._completing: set[asyncio.Future[None]] = set()

    # What a subclass says

    def admit(self, caller: str | None, job: str | None = None) -> str:
        """The caller, or ``GeofedError("FORBIDDEN")``."""
        raise NotImplementedError

    def check(self, proto: sync_pb2.UpdateManifest, caller: str | None) -> Manifest:
        """What is offered, if the caller may offer it; else ``GeofedError``."""
        raise NotImplementedError

    def judge(self, job: str, manifest: Manifest, via: str = "") -> Verdict:
        """Whether it is wanted."""
        raise NotImplementedError

    def place_of(self, manifest: Manifest) -> Path:
        """Where it is to be, once it is durable."""
        raise NotImplementedError

    def at_hand(self, manifest: Manifest) -> Sequence[memoryview] | None:
        """All its bytes, one piece after the other, where they need not come; None: they are not here."""
        return None

    def next_of(self, region: str) -> int:
        """The first of a region's updates that is not here; 0: that is not told."""
        return 0

    def stored(self, manifest: Manifest) -> None:
        """It is durable."""
        raise NotImplementedError

    def count_received(self, caller: str, count: int) -> None:
        """So many bytes have come. Called by any thread."""
        raise NotImplementedError

    def adopt(self, caller: str, ticket: bytes, line: ssl.SSLSocket) -> None:
        """A peer has dialled to collect."""
        raise GeofedError("FORBIDDEN", f"there is nothing here for {caller} to collect")

    # Answers

    def _answer(self, job: str, manifest: Manifest, caller: str) -> sync_pb2.OfferReply:
        verdict = self.judge(job, manifest, caller)
        reply = sync_pb2.OfferReply(verdict=_VERDICTS[verdict])
        if self.bulk is not None:
            reply.bulk_port = self.bulk.port
        if verdict is Verdict.WANT:
            landing = self._arrival(manifest).landing
            reply.have_bytes = landing.prefix
            reply.have.extend(sync_pb2.Range(begin=begin, end=end) for begin, end in landing.have)
            reply.ticket = self._tickets.issue(caller, key_of(manifest))
        elif verdict is Verdict.HAVE:
            self._incoming.pop((manifest.region, manifest.sequence), None)
            reply.have_bytes = manifest.total_bytes
            reply.ticket = self._tickets.issue(caller, None)
        elif verdict is Verdict.LATER and job == self._job:
            reply.next = self.next_of(manifest.region)
        return reply

    def _arrival(self, manifest: Manifest) -> Arrival:
        key = (manifest.region, manifest.sequence)
        arrival = self._incoming.get(key)
        if arrival is None or arrival.manifest.digest != manifest.digest:
            arrival = self._incoming[key] = Arrival(manifest, self.place_of(manifest))
        elif manifest.epoch > arrival.manifest.epoch:
            # The same bytes; under the older epoch nobody would take them any more.
            arrival.manifest = manifest
        return arrival

    # What need not come

    async def supply(self, job: str, manifest: Manifest, caller: str) -> None:
        """Take an update from what is at hand, if it is wanted and all of it is."""
        if self.judge(job, manifest, caller) is not Verdict.WANT or (pieces := self.at_hand(manifest)) is None:
            return
        arrival = self._arrival(manifest)
        if arrival.filling is None:
            # Whoever asks may hang up, and several may ask at once.
            arrival.filling = asyncio.ensure_future(self._filled(job, arrival, pieces, caller))
            self._keep(arrival.filling)
        await asyncio.shield(arrival.filling)

    async def _filled(self, job: str, arrival: Arrival, pieces: Sequence[memoryview], caller: str) -> None:
        try:
            await asyncio.to_thread(arrival.fill, pieces)
            await self._complete(job, arrival, caller)
        except (GeofedError, OSError) as error:
            _log.warning("what is at hand cannot be kept, so it has to come: %s", error)

    def supply_all(self) -> None:
        """Something new is at hand: take what is on its way in from there."""
        self._keep(asyncio.ensure_future(self._supply_all()))

    async def _supply_all(self) -> None:
        for arrival in list(self._incoming.values()):
            await self.supply(self._job, arrival.manifest, arrival.manifest.region)

    # Over gRPC

    @answering
    async def Offer(self, request: sync_pb2.UpdateManifest, context: _Context) -> sync_pb2.OfferReply:
        caller = peer_common_name(context) or ""
        manifest = self.check(request, caller)
        await self.supply(request.job, manifest, caller)
        return self._answer(request.job, manifest, caller)

    @answering
    async def Send(self, request: AsyncIterator[sync_pb2.UpdateChunk], context: _Context) -> sync_pb2.OfferReply:
        caller = peer_common_name(context) or ""
        arrival: Arrival | None = None
        stream, manifest, job = 0, None, ""
        async for chunk in request:
            if arrival is None or manifest is None:
                job, manifest = chunk.manifest.job, self.check(chunk.manifest, caller)
                if self.judge(job, manifest, caller) is not Verdict.WANT:
                    return self._answer(job, manifest, caller)
                arrival = self._arrival(manifest)
                arrival.stream += 1
                stream = arrival.stream
            async with arrival.writing:
                if arrival.stream != stream:
                    raise GeofedError("FENCED", "another stream brings this update now")
                if self.judge(job, manifest, caller) is not Verdict.WANT:
                    break
                await asyncio.to_thread(arrival.append, chunk.offset, chunk.data)
            self.count_received(caller, len(chunk.data))
        if arrival is None or manifest is None:
            raise GeofedError("FRAME_INVALID", "a stream without a manifest")
        if arrival.landing.whole:
            await self._complete(job, arrival, caller)
        return self._answer(job, manifest, caller)

    async def _complete(self, job: str, arrival: Arrival, caller: str) -> None:
        """Make a whole update durable and tell of it, also when the one who sent it hangs up meanwhile."""
        work = asyncio.ensure_future(self._completed(job, arrival, caller))
        self._keep(work)
        await asyncio.shield(work)

    def _keep(self, work: asyncio.Future[None]) -> None:
        self._completing.add(work)
        work.add_done_callback(self._completing.discard)

    async def _completed(self, job: str, arrival: Arrival, caller: str) -> None:
        manifest = arrival.manifest
        async with arrival.writing:
            # Another stream may have completed it while this one waited.
            if self.judge(job, manifest, caller) is Verdict.WANT and arrival.landing.whole:
                await asyncio.to_thread(arrival.complete)
                self._incoming.pop((manifest.region, manifest.sequence), None)
                self._tickets.spent(key_of(manifest))
                self.stored(manifest)

    # Over bulk streams

    def open_bulk(self, host: str, port: int, identity: Callable[[], Tls]) -> int:
        """Listen for bulk streams; returns the port. Raises OSError where it is taken."""
        self.bulk = BulkPort(host, port, self._job, identity, _Desk(self, asyncio.get_running_loop()))
        self.bulk.start()
        return self.bulk.port

    async def offer_bulk(self, caller: str, offer: sync_pb2.BulkOffer) -> tuple[sync_pb2.OfferReply, Landing | None]:
        proto = offer.manifest
        manifest = self.check(proto, caller)
        await self.supply(proto.job, manifest, caller)
        if self.judge(proto.job, manifest, caller) is not Verdict.WANT:
            return self._answer(proto.job, manifest, caller), None
        self._tickets.redeem(caller, offer.ticket, key_of(manifest))
        arrival = self._arrival(manifest)
        if arrival.landing.whole:
            # All bytes came in an earlier try that could not make them durable.
            await self._complete(proto.job, arrival, caller)
        return self._answer(proto.job, manifest, caller), arrival.landing

    async def landed_bulk(self, caller: str, offer: sync_pb2.BulkOffer) -> sync_pb2.OfferReply:
        proto = offer.manifest
        manifest = self.check(proto, caller)
        if self.judge(proto.job, manifest, caller) is Verdict.WANT:
            await self._complete(proto.job, self._arrival(manifest), caller)
        return self._answer(proto.job, manifest, caller)

    async def adopt_bulk(self, caller: str, greeting: sync_pb2.BulkHello, line: ssl.SSLSocket) -> None:
        self.adopt(caller, greeting.ticket, line)


class _Desk:
    """Takes the bulk streams' questions from their threads to the event loop."""

    def __init__(self, intake: Intake, loop: asyncio.AbstractEventLoop) -> None:
        self._intake, self._loop = intake, loop

    def _ask(self, question: Coroutine[Any, Any, _Result]) -> _Result:
        try:
            future = asyncio.run_coroutine_threadsafe(question, self._loop)
        except RuntimeError:
            question.close()
            raise EOFError("the receiver is stopping") from None
        return future.result()

    def greeted(self, caller: str, greeting: sync_pb2.BulkHello) -> None:
        self._intake.admit(caller, greeting.job)

    def adopted(self, caller: str, greeting: sync_pb2.BulkHello, line: ssl.SSLSocket) -> None:
        self._ask(self._intake.adopt_bulk(caller, greeting, line))

    def offered(self, caller: str, offer: sync_pb2.BulkOffer) -> tuple[sync_pb2.OfferReply, Landing | None]:
        return self._ask(self._intake.offer_bulk(caller, offer))

    def received(self, caller: str, count: int) -> None:
        self._intake.count_received(caller, count)

    def landed(self, caller: str, offer: sync_pb2.BulkOffer) -> sync_pb2.OfferReply:
        return self._ask(self._intake.landed_bulk(caller, offer))
