"""The receiving side of transfers between regions, over gRPC and over bulk streams: transfers resume where they were
interrupted, are verified, and are made durable before they are acknowledged."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import grpc
import grpc.aio

from geofed_pb.errors import GeofedError
from geofed_pb.rpc import answering, peer_region
from geofed_pb.tasks import awaited, background, log_only
from geofed_pb.v1 import sync_pb2, sync_pb2_grpc
from sync.file_transfer.arrival import Arrival, Tickets, key_of
from sync.file_transfer.manifest import Manifest, Verdict
from sync.file_transfer.quotas import CallQuotas
from sync.tcp_streams.partial_file import PartialFile
from sync.tcp_streams.receiver import BulkPort
from sync.tcp_streams.sockets import Tls

__all__ = ["MAX_UPDATE_BYTES", "FileReceiver"]

_log = logging.getLogger("geofed.ps")
_Context = grpc.aio.ServicerContext[Any, Any]
_Result = TypeVar("_Result")

MAX_UPDATE_BYTES = 64 << 30
"""Largest update that is accepted."""
_VERDICTS = {
    Verdict.WANT: sync_pb2.OfferReply.VERDICT_WANT,
    Verdict.HAVE: sync_pb2.OfferReply.VERDICT_HAVE,
    Verdict.FENCED: sync_pb2.OfferReply.VERDICT_FENCED,
    Verdict.LATER: sync_pb2.OfferReply.VERDICT_UNKNOWN,
}


class FileReceiver(sync_pb2_grpc.ExchangeServicer):
    """The receiving side of the exchange. Subclasses decide which callers are admitted, which updates are wanted, where
    they are stored, and what follows."""

    def __init__(self, job: str, tickets: Tickets) -> None:
        self._job, self._tickets = job, tickets
        self.bulk: BulkPort | None = None
        self._incoming: dict[tuple[str, int], Arrival] = {}
        self._completing: set[asyncio.Future[None]] = set()
        self._quotas = CallQuotas()
        self.store_fault = ""
        """Why the last update could not be stored here, with the error's code; empty: it could."""

    # To be implemented by subclasses

    def admit(self, caller: str | None, job: str | None = None) -> str:
        """Return the caller. Raises ``GeofedError("FORBIDDEN")`` if it may not send here, or not for this job."""
        raise NotImplementedError

    def check(self, proto: sync_pb2.UpdateManifest, caller: str | None) -> Manifest:
        """Return the manifest of an offer. Raises ``GeofedError`` if it is invalid, or the caller may not offer it."""
        raise NotImplementedError

    def judge(self, job: str, manifest: Manifest, via: str = "") -> Verdict:
        """Return whether an update is wanted. ``via`` is the region that offers it."""
        raise NotImplementedError

    def path_for(self, manifest: Manifest) -> Path:
        """Return the path that an update's file gets once it is durable."""
        raise NotImplementedError

    def reuse(self, size: int, path: Path) -> None:
        """Give a path to an old file of about so many bytes, if there is one, to be overwritten."""

    def inspect(self, manifest: Manifest, path: Path) -> None:
        """Check the file of a received update before it is acknowledged; called in a thread. Raises ``GeofedError``."""

    def refused(self, manifest: Manifest, caller: str, error: GeofedError) -> None:
        """Called if `inspect` has raised."""

    def knows_size(self, manifest: Manifest) -> bool:
        """Whether the size of an update has been compared with what it must be."""
        return True

    def local_copy(self, manifest: Manifest) -> Sequence[memoryview] | None:
        """Return the bytes of an update, as consecutive pieces, if this region has them anyway; else None."""
        return None

    def next_of(self, region: str) -> int:
        """Return the sequence of the first missing update of a region; 0: not reported."""
        return 0

    def begun(self, manifest: Manifest) -> None:
        """Called once an update begins to arrive."""

    def stored(self, manifest: Manifest) -> None:
        """Called once an update is durable."""
        raise NotImplementedError

    def count_received(self, caller: str, count: int) -> None:
        """Count bytes received from a caller. Called by any thread."""
        raise NotImplementedError

    def store_fault_changed(self) -> None:
        """Called once updates cannot be stored, and once they can again."""

    def adopt(self, caller: str, ticket: bytes, connection: ssl.SSLSocket) -> None:
        """Take a stream that a peer has opened to receive updates over it."""
        raise GeofedError("FORBIDDEN", f"this side sends nothing to {caller}")

    # Replies

    def _answer(self, job: str, manifest: Manifest, caller: str) -> sync_pb2.OfferReply:
        verdict = self.judge(job, manifest, caller)
        reply = sync_pb2.OfferReply(verdict=_VERDICTS[verdict], unchecked=True)
        if self.bulk is not None:
            reply.bulk_port = self.bulk.port
        if verdict is Verdict.WANT:
            file = self._arrival(manifest).file
            reply.have_bytes = file.prefix
            reply.have.extend(sync_pb2.Range(begin=begin, end=end) for begin, end in file.have)
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
            if arrival is not None:
                arrival.drop()
            reserve = self.knows_size(manifest)
            arrival = self._incoming[key] = Arrival(manifest, self.path_for(manifest), reserve, self.reuse)
            self.begun(manifest)
        elif manifest.epoch > arrival.manifest.epoch:
            # The bytes are the same, but an update of the older epoch would be refused.
            arrival.manifest = manifest
        return arrival

    def drop_incoming(self, region: str) -> None:
        """Drop what has been received of a region's incomplete updates."""
        for key in [key for key in self._incoming if key[0] == region]:
            self._incoming.pop(key).drop()

    # Updates that this region has a copy of

    async def take_local_copy(self, job: str, manifest: Manifest, caller: str) -> None:
        """Store this region's own copy of an update, if the update is wanted and there is a copy."""
        if self.judge(job, manifest, caller) is not Verdict.WANT or (pieces := self.local_copy(manifest)) is None:
            return
        arrival = self._arrival(manifest)
        if arrival.filling is None:
            # The work is shared by concurrent callers, and continues when a caller disconnects.
            arrival.filling = awaited(self._filled(job, arrival, pieces, caller))
            self._keep(arrival.filling)
        await asyncio.shield(arrival.filling)

    async def _filled(self, job: str, arrival: Arrival, pieces: Sequence[memoryview], caller: str) -> None:
        try:
            await asyncio.to_thread(arrival.fill, pieces)
            await self._complete(job, arrival, caller)
        except (GeofedError, OSError) as error:
            _log.warning("cannot store this region's copy of an update; it will be received instead: %s", error)

    def take_local_copies(self) -> None:
        """Complete updates that are being received from a copy that has become available."""
        self._keep(background(self._take_local_copies(), log_only))

    async def _take_local_copies(self) -> None:
        for arrival in list(self._incoming.values()):
            await self.take_local_copy(self._job, arrival.manifest, arrival.manifest.region)

    # Over gRPC

    @answering
    async def Offer(self, request: sync_pb2.UpdateManifest, context: _Context) -> sync_pb2.OfferReply:
        """RPC: say whether an offered update is wanted, and from which byte.

        A local copy is used where the region already has one.
        """
        caller = self.admit(peer_region(context))
        async with self._quotas.call(caller):
            manifest = self.check(request, caller)
            await self.take_local_copy(request.job, manifest, caller)
            return self._answer(request.job, manifest, caller)

    @answering
    async def Send(self, request: AsyncIterator[sync_pb2.UpdateChunk], context: _Context) -> sync_pb2.OfferReply:
        """RPC: receive an update's chunks until it is complete or no longer wanted.

        Raises `GeofedError`: ``FENCED`` where a newer stream sends the same update, and what `check` raises for
        its manifest.
        """
        caller = self.admit(peer_region(context))
        async with self._quotas.call(caller):
            try:
                return await self._received(request, caller)
            except GeofedError as error:
                self.note_failure(error)
                raise

    async def _received(self, request: AsyncIterator[sync_pb2.UpdateChunk], caller: str) -> sync_pb2.OfferReply:
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
                    raise GeofedError("FENCED", "a newer stream sends this update")
                if self.judge(job, manifest, caller) is not Verdict.WANT:
                    break
                await asyncio.to_thread(arrival.append, chunk.offset, chunk.data)
            self.count_received(caller, len(chunk.data))
        if arrival is None or manifest is None:
            raise GeofedError("FRAME_INVALID", "the stream has no manifest")
        if arrival.file.whole:
            await self._complete(job, arrival, caller)
        return self._answer(job, manifest, caller)

    async def _complete(self, job: str, arrival: Arrival, caller: str) -> None:
        """Make a complete update durable and report it, even if the sender disconnects meanwhile."""
        work = awaited(self._completed(job, arrival, caller))
        self._keep(work)
        await asyncio.shield(work)

    def _keep(self, work: asyncio.Future[None]) -> None:
        self._completing.add(work)
        work.add_done_callback(self._completing.discard)

    async def _completed(self, job: str, arrival: Arrival, caller: str) -> None:
        manifest = arrival.manifest
        async with arrival.writing:
            # Another stream may have completed it while this one waited.
            held = self._incoming.get((manifest.region, manifest.sequence)) is arrival
            if held and self.judge(job, manifest, caller) is Verdict.WANT and arrival.file.whole:
                try:
                    await asyncio.to_thread(arrival.complete, self.inspect)
                except GeofedError as error:
                    if error.code == "FRAME_INVALID":
                        self.refused(manifest, caller, error)
                    raise
                self._incoming.pop((manifest.region, manifest.sequence), None)
                self._tickets.revoke(key_of(manifest))
                self._set_store_fault("")
                self.stored(manifest)

    def note_failure(self, error: GeofedError) -> None:
        """Take note of why an update was not received, if the cause is here. The sender, which tries again, is told as
        well; but those who can mend it are here."""
        if error.code == "DISK_FULL":
            self._set_store_fault(f"{error.code}: {error.message}")

    def _set_store_fault(self, text: str) -> None:
        if text != self.store_fault:
            self.store_fault = text
            self.store_fault_changed()

    # Over bulk streams

    def open_bulk(self, host: str, port: int, identity: Callable[[], Tls]) -> int:
        """Listen for bulk streams; return the port. Raises OSError if the port is in use."""
        self.bulk = BulkPort(host, port, self._job, identity, _BulkHandler(self, asyncio.get_running_loop()))
        self.bulk.start()
        return self.bulk.port

    async def offer_bulk(
        self, caller: str, offer: sync_pb2.BulkOffer
    ) -> tuple[sync_pb2.OfferReply, PartialFile | None]:
        """Answer an offer on a bulk stream: the reply, and the file to write to if the update is wanted."""
        proto = offer.manifest
        if (delay := self._quotas.delay_seconds(caller)) > 0:
            await asyncio.sleep(delay)
        manifest = self.check(proto, caller)
        await self.take_local_copy(proto.job, manifest, caller)
        if self.judge(proto.job, manifest, caller) is not Verdict.WANT:
            return self._answer(proto.job, manifest, caller), None
        self._tickets.redeem(caller, offer.ticket, key_of(manifest))
        arrival = self._arrival(manifest)
        if arrival.file.whole:
            # All bytes were received in an earlier attempt that could not make them durable.
            await self._complete(proto.job, arrival, caller)
        return self._answer(proto.job, manifest, caller), arrival.file

    async def landed_bulk(self, caller: str, offer: sync_pb2.BulkOffer) -> sync_pb2.OfferReply:
        """Make an update durable whose bytes have all been received, and return the reply."""
        proto = offer.manifest
        manifest = self.check(proto, caller)
        if self.judge(proto.job, manifest, caller) is Verdict.WANT:
            await self._complete(proto.job, self._arrival(manifest), caller)
        return self._answer(proto.job, manifest, caller)

    async def adopt_bulk(self, caller: str, greeting: sync_pb2.BulkHello, connection: ssl.SSLSocket) -> None:
        """Pass on a stream that a peer has opened to receive updates over it."""
        self.adopt(caller, greeting.ticket, connection)


class _BulkHandler:
    """Forwards the calls of the bulk streams' threads to the event loop."""

    def __init__(self, receiver: FileReceiver, loop: asyncio.AbstractEventLoop) -> None:
        self._receiver, self._loop = receiver, loop

    def _ask(self, question: Coroutine[Any, Any, _Result]) -> _Result:
        try:
            future = asyncio.run_coroutine_threadsafe(question, self._loop)
        except RuntimeError:
            question.close()
            raise EOFError("the receiver is stopping") from None
        return future.result()

    def greeted(self, caller: str, greeting: sync_pb2.BulkHello) -> None:
        self._receiver.admit(caller, greeting.job)

    def adopted(self, caller: str, greeting: sync_pb2.BulkHello, connection: ssl.SSLSocket) -> None:
        self._ask(self._receiver.adopt_bulk(caller, greeting, connection))

    def offered(self, caller: str, offer: sync_pb2.BulkOffer) -> tuple[sync_pb2.OfferReply, PartialFile | None]:
        return self._ask(self._receiver.offer_bulk(caller, offer))

    def received(self, caller: str, count: int) -> None:
        self._receiver.count_received(caller, count)

    def landed(self, caller: str, offer: sync_pb2.BulkOffer) -> sync_pb2.OfferReply:
        return self._ask(self._receiver.landed_bulk(caller, offer))

    def failed(self, error: GeofedError) -> None:
        # If the loop is closed, the receiver has ended.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._receiver.note_failure, error)
