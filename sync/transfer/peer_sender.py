"""The sending side of the WAN: one sender for each peer, which carries updates there until they are durable."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import mmap
import random
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

import grpc
import grpc.aio

from geofed_pb.errors import GeofedError
from geofed_pb.rpc import CHUNK_BYTES, error_of
from geofed_pb.v1 import sync_pb2
from sync.transfer.bulk import BulkWay, Unreached
from sync.transfer.direct import DirectWay, GivenUp, LinkMeter
from sync.transfer.manifest import Manifest, Peer
from sync.transfer.wire import manifest_to_proto
from sync.transport.run import Content
from sync.transport.sockets import Tls

__all__ = ["Notices", "PeerSender"]

_log = logging.getLogger("geofed.ps.link")
_UNASKED_BYTES = CHUNK_BYTES
_TRAIN, _TRAIN_BYTES = 8, 2 * CHUNK_BYTES
"""Small updates on their way at once, and how much of them where the link itself does not hold more. What has been
tried is not summed up when the link falls."""
_BACKOFF_FIRST_SECONDS = 0.2
_BACKOFF_MOST_SECONDS = 1.0
_COLLECT_AGAIN_SECONDS = 5.0
_BULK_AGAIN_SECONDS = 60.0
"""How long large updates go through the exchange port after the bulk port could not be reached."""


@dataclass(frozen=True)
class Notices:
    """What a sender tells as it goes."""

    trying: Callable[[str, Manifest], None] = lambda peer, manifest: None
    """An update's bytes are about to be sent."""
    failed: Callable[[str], None] = lambda peer: None
    """The peer could not be reached, or broke off, or what it is sent is overdue."""
    has: Callable[[str, str, int], None] = lambda peer, region, sequence: None
    """The peer wants another update of that region first: it has all up to this one."""
    missing: Callable[[Manifest], None] = lambda manifest: None
    """An update's bytes are not here any more."""
    refused: Callable[[GeofedError], None] = lambda error: None
    """An update met an error of which its code says that trying again does not mend it; it is tried again."""


class _Replaced(Exception):
    """What was about to be sent is not to be sent any more."""


class PeerSender:
    """Carries updates of any region to one peer, one after the other, and tells when each is durable there.

    A cut link is tried again for ever, with back-off; a transfer is given up only after ``stall`` seconds without
    progress, or where a new connection stands sooner, and then continues with what the peer lacks. Large updates take
    the bulk streams, those that the peer has dialled where it cannot be reached from here.
    """

    def __init__(
        self,
        job: str,
        identity: Callable[[], Tls],
        path_of: Callable[[Manifest], Path | Content],
        arrived: Callable[[str, Manifest], None],
        stall: float,
        broke: Callable[[], None] = lambda: None,
        dial_back: Callable[[str, tuple[str, int], int], None] = lambda region, address, streams: None,
        bulk_port: Callable[[], int] = lambda: 0,
        notices: Notices = Notices(),
    ) -> None:
        """``dial_back`` has streams dialled to a peer that asks for it; ``bulk_port`` is ours, for the peer to dial.

        A file that ``path_of`` names is mapped, and must not change: one that gets shorter would end the process.
        """
        self._job, self._path_of, self._arrived = job, path_of, arrived
        self._broke = broke
        self._dial_back, self._notices = dial_back, notices
        self.meter = LinkMeter()
        self._direct = DirectWay(identity, stall, self.meter)
        self._bulk = BulkWay(job, identity, stall, self._count_sent, bulk_port)
        self._bulk_refused_until = 0.0
        self._met = asyncio.Event()
        self._waiting: dict[tuple[int, str], Manifest] = {}
        """In the order in which they go."""
        self._news = asyncio.Event()
        self._trusted = False
        """The last update went through at its first try."""

    def meet(self, peer: Peer) -> None:
        """Know the peer; a new address or epoch is used from the next try on."""
        self._direct.meet(peer)
        self._bulk.meet(peer)
        self._met.set()

    def ship(self, peer: Peer, manifests: tuple[Manifest, ...]) -> None:
        """Take over updates to carry, in place of those before."""
        self.meet(peer)
        # Sorted once: there may be hundreds of thousands.
        self._waiting = dict(sorted((((item.sequence, item.region), item) for item in manifests), key=itemgetter(0)))
        if not manifests:
            # Nothing goes this way any more: whether it could is not known from now on.
            self.meter.up, self.meter.fault = True, ""
        self._news.set()

    @property
    def backlog_bytes(self) -> int:
        """Of updates that are not durable at the peer yet."""
        return sum(manifest.total_bytes for manifest in self._waiting.values())

    def use_streams(self, count: int | None) -> None:
        """Carry large updates over so many streams; None: as many as pay."""
        self._bulk.streams.fix(count)

    @property
    def mbps(self) -> float:
        """Payload rate of the last update; less where the one on its way has taken longer than that rate explains."""
        return self._direct.mbps

    async def run(self) -> None:
        """Work until cancelled."""
        backoff = _BACKOFF_FIRST_SECONDS
        while True:
            await self._news.wait()
            if not self._waiting:
                self._news.clear()
                continue
            manifest = next(iter(self._waiting.values()))
            settled, train = False, self._train()
            total = sum(item.total_bytes for item in train or [manifest])
            try:
                with self._direct.carrying(total):
                    settled = await self._carry_all(train or [manifest], total)
            except FileNotFoundError:
                # Forgotten: the peer's own updates have told that it has this one, whose acknowledgement was lost.
                # Which one of a train it was, the next tries will tell, one by one.
                if len(train) <= 1:
                    self._waiting.pop((manifest.sequence, manifest.region), None)
                    if manifest.first:
                        self._notices.missing(manifest)
                await asyncio.sleep(_BACKOFF_FIRST_SECONDS)
                continue
            except _Replaced:
                continue
            if settled:
                backoff = _BACKOFF_FIRST_SECONDS
            else:
                await asyncio.sleep(backoff * random.uniform(0.5, 1.0))
                backoff = min(backoff * 2, _BACKOFF_MOST_SECONDS)

    async def _carry_all(self, train: list[Manifest], total_bytes: int) -> bool:
        """Whether they are durable at the peer; what stands in the way is noted."""
        try:
            with _moved_peer(), self._overdue_is_told(total_bytes):
                if len(train) > 1:
                    return await self._carry_train(train)
                if await self._carry(train[0]):
                    self._settled(train[0])
                    return True
        except FileNotFoundError:
            raise
        except (grpc.RpcError, GeofedError, OSError) as error:
            await self._note_failure(error)
        return False

    @contextlib.contextmanager
    def _overdue_is_told(self, total_bytes: int) -> Iterator[None]:
        """Links that come and go, and servers that stand still, break nothing for a while; what piles up behind them
        can be summed up nevertheless."""
        if not self.meter.mbps:
            yield
            return
        overdue = self._direct.overdue_seconds(total_bytes)
        timer = asyncio.get_running_loop().call_later(overdue, self._notices.failed, self._region)
        try:
            yield
        finally:
            timer.cancel()

    def _begin_to_send(self, manifest: Manifest) -> None:
        """Tell that an update's bytes are about to leave; raises ``_Replaced`` where others have taken its place since
        it was picked: a peer must not get a part of what it is sent summed up."""
        waiting = self._waiting.get((manifest.sequence, manifest.region))
        if waiting is None or waiting.digest != manifest.digest:
            raise _Replaced
        self._notices.trying(self._region, manifest)

    def _settled(self, manifest: Manifest) -> None:
        self._direct.arrived()
        self._waiting.pop((manifest.sequence, manifest.region), None)
        self.meter.payload_bytes += manifest.total_bytes
        self._arrived(self._region, manifest)

    async def close(self) -> None:
        """Once `run` and `collect` are cancelled."""
        await self._bulk.close()
        await self._direct.close()

    @property
    def _region(self) -> str:
        """The peer's."""
        return self._direct.require_peer().region

    def _count_sent(self, count: int) -> None:
        self.meter.sent_bytes += count

    async def _note_failure(self, error: Exception) -> None:
        told = error_of(error) if isinstance(error, grpc.RpcError) else error
        if isinstance(told, GivenUp):
            _log.info("a new connection to %s takes the place of one with %s", self._region, told)
            self._direct.note_given_up()
        elif self._waiting:
            if self.meter.up:
                _log.warning("link to %s is down: %s", self._region, told)
            self.meter.up, self.meter.fault = False, str(told) or type(told).__name__
        self.meter.failures += 1
        self._trusted = False
        self._notices.failed(self._region)
        if isinstance(told, GeofedError) and not told.retryable:
            self._notices.refused(told)
        if self._direct.stands_anew or not isinstance(error, grpc.RpcError):
            # After a cut a new connection is there sooner than an old one comes to itself.
            await self._direct.change_channel()
        self._broke()

    # One update

    async def _carry(self, manifest: Manifest) -> bool:
        """Carry one update; True once it is durable at the peer.

        While the link is good an update is sent unasked: the round trip of the offer would cost more than the bytes
        that a peer may have already.
        """
        try:
            reply = await self._carry_directly(manifest)
        except (grpc.RpcError, Unreached, GeofedError) as error:
            if not (self._bulk.is_collected and _is_unavailable(error)):
                raise
            if self._direct.reached and isinstance(error, grpc.RpcError):
                # It was there: the connection may only not have come to itself since the peer began anew.
                self._direct.reached = False
                await self._direct.close()
                raise
            with self._mapped(manifest) as view:
                self._begin_to_send(manifest)
                reply = await self._bulk.send_collected(manifest_to_proto(self._job, manifest), view)
            self.meter.slow_way = "the peer dials, since it cannot be reached from here"
            self._note_bulk()
        if reply.verdict == sync_pb2.OfferReply.VERDICT_FENCED:
            raise GeofedError("FENCED", f"{self._region} knows a newer epoch of {manifest.region}")
        self._bulk.learn(reply)
        self.meter.up = True
        if reply.verdict == sync_pb2.OfferReply.VERDICT_UNKNOWN and reply.next:
            self._notices.has(self._region, manifest.region, reply.next - 1)
        self._trusted = bool(reply.verdict == sync_pb2.OfferReply.VERDICT_HAVE)
        return self._trusted

    def _train(self) -> list[Manifest]:
        """Small updates that wait one behind the other, while the link is good."""
        train: list[Manifest] = []
        if self._trusted and not self._bulk.by_collecting:
            room = max(_TRAIN_BYTES, 2 * self.meter.mbps * 1e6 / 8 * self.meter.rtt_ms / 1e3)
            for manifest in itertools.islice(self._waiting.values(), _TRAIN):
                room -= manifest.total_bytes
                if manifest.total_bytes > _UNASKED_BYTES or (train and room < 0):
                    break
                train.append(manifest)
        return train

    async def _carry_train(self, train: list[Manifest]) -> bool:
        """Send several at once: one after the other each would take a round trip. True if all are durable there.

        They are acknowledged in order, since an acknowledgement stands for all before it.
        """
        self._trusted = False
        sends = [asyncio.ensure_future(self._send_whole(manifest)) for manifest in train]
        try:
            for manifest, send in zip(train, sends, strict=True):
                verdict = (await send).verdict
                if verdict == sync_pb2.OfferReply.VERDICT_FENCED:
                    raise GeofedError("FENCED", f"{self._region} knows a newer epoch of {manifest.region}")
                if verdict != sync_pb2.OfferReply.VERDICT_HAVE:
                    return False
                self._settled(manifest)
        finally:
            for send in sends:
                send.cancel()
            await asyncio.gather(*sends, return_exceptions=True)
        self.meter.up = self._trusted = True
        return True

    async def _send_whole(self, manifest: Manifest) -> sync_pb2.OfferReply:
        with self._mapped(manifest) as view:
            self._begin_to_send(manifest)
            return await self._direct.send(manifest_to_proto(self._job, manifest), view, ())

    async def _carry_directly(self, manifest: Manifest) -> sync_pb2.OfferReply:
        proto = manifest_to_proto(self._job, manifest)
        large = manifest.total_bytes > _UNASKED_BYTES
        trusted, self._trusted = self._trusted, False
        if self._bulk.by_collecting:
            # A path that was cut one way stays so; it is tried again when the peer's streams end.
            raise Unreached("the peer could not be reached the last time")
        bulk = large and time.monotonic() >= self._bulk_refused_until
        with self._mapped(manifest) as view:
            if trusted and bulk and self._bulk.knows_the_way:
                self._begin_to_send(manifest)
                reply = await self._bulk.send(proto, view, have=())
                self._note_bulk()
                return reply
            if trusted and not large:
                self._begin_to_send(manifest)
                return await self._direct.send(proto, view, ())
            reply = await self._direct.offer(proto)
            if reply.verdict != sync_pb2.OfferReply.VERDICT_WANT:
                return reply
            self._bulk.learn(reply)
            have = tuple((item.begin, item.end) for item in reply.have)
            self._begin_to_send(manifest)
            if bulk and self._bulk.knows_the_way:
                try:
                    reply = await self._bulk.send(proto, view, have)
                except Unreached as error:
                    self._fall_back(error)
                else:
                    self._note_bulk()
                    return reply
            return await self._direct.send(proto, view, have)

    def _note_bulk(self) -> None:
        self.meter.mbps, self.meter.streams = self._bulk.mbps, self._bulk.used_streams
        self.meter.rtt_ms = self._bulk.rtt_seconds * 1e3 or self.meter.rtt_ms
        if not self._bulk.by_collecting:
            self.meter.slow_way = ""

    def _fall_back(self, error: Exception) -> None:
        """Large updates go through the exchange port for a while."""
        self._bulk_refused_until = time.monotonic() + _BULK_AGAIN_SECONDS
        self.meter.slow_way = f"one stream, since the bulk port cannot be reached: {error}"
        _log.warning("large updates to %s take %s", self._region, self.meter.slow_way)
        self._broke()

    @contextlib.contextmanager
    def _mapped(self, manifest: Manifest) -> Iterator[Content]:
        found = self._path_of(manifest)
        if not isinstance(found, Path):
            yield found
            return
        with found.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), manifest.total_bytes, prot=mmap.PROT_READ)
        # Not closed here: a connection may still hold a piece of it; the last one to let go frees it.
        yield memoryview(mapped)

    # Where one side cannot reach the other

    async def collect(self) -> None:
        """Hold a call open at the peer, by which it can ask us to dial; works until cancelled."""
        await self._met.wait()
        while True:
            with contextlib.suppress(grpc.RpcError), _moved_peer():
                calls = (await self._direct.stub()).Collect(sync_pb2.CollectRequest(job=self._job))
                async for call in calls:
                    peer = self._direct.require_peer()
                    if 0 < call.bulk_port < 1 << 16 and 0 < call.streams <= 16:
                        self._dial_back(peer.region, (_host(peer.address), call.bulk_port), call.streams)
            await asyncio.sleep(_COLLECT_AGAIN_SECONDS)

    async def calls(self) -> AsyncIterator[sync_pb2.CollectCall]:
        """For the peer that collects from us: what it is to dial."""
        async for call in self._bulk.calls():
            yield call

    def adopt(self, ticket: bytes, line: ssl.SSLSocket) -> None:
        """Take over a stream that the peer has dialled."""
        self._bulk.adopt(ticket, line)


def _host(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")


def _is_cancelled() -> bool:
    """Whether this task itself is to end."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


@contextlib.contextmanager
def _moved_peer() -> Iterator[None]:
    """A call that ends because its channel is closed is no reason to end as well."""
    try:
        yield
    except asyncio.CancelledError:
        if _is_cancelled():
            raise


def _is_unavailable(error: Exception) -> bool:
    told = error_of(error) if isinstance(error, grpc.RpcError) else error
    return isinstance(told, Unreached) or (isinstance(told, GeofedError) and told.code == "UNAVAILABLE")
