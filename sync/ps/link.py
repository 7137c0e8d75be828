"""The sending side of the WAN: one courier for each peer, which carries updates there until they are durable."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import mmap
import random
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from geofed_pb.errors import GeofedError
from geofed_pb.rpc import CHUNK_BYTES, channel, error_of, region_name
from geofed_pb.v1 import sync_pb2, sync_pb2_grpc
from sync.ps.bulk import BulkWay, Unreached
from sync.ps.manifest import Manifest, Peer
from sync.transport.ranges import Ranges, pieces
from sync.transport.run import Content
from sync.transport.sockets import Tls

__all__ = ["Courier", "LinkMeter", "Notices", "Tls", "line_to", "manifest_of", "manifest_to_proto"]

_log = logging.getLogger("geofed.ps.link")
_UNASKED_BYTES = CHUNK_BYTES
_TRAIN, _TRAIN_BYTES = 8, 2 * CHUNK_BYTES
"""Small updates on their way at once, and how much of them where the link itself does not hold more. What has been
tried is not summed up when the link falls."""
_BACKOFF_FIRST_SECONDS = 0.2
_BACKOFF_MOST_SECONDS = 1.0
_COLLECT_AGAIN_SECONDS = 5.0
_LONGEST_STRETCH = 64
_SURELY_SLOW_SECONDS = 5.0
"""An update that takes longer tells something of a link that has carried none before."""
_OVERDUE_SECONDS, _OVERDUE_TIMES = 1.0, 4.0
"""A transfer is overdue after these seconds and this multiple of what it should take."""
_DIAL_AGAIN_TIMES = 2.0
"""Of when it is overdue, a connection that shows no progress is given up for a new one: after several cuts the kernel
may wait for 10 s and more before it sends anything anew. Each time that this happens in a row it is twice as long, for
the link may only have become slower."""
_LAST_CHANCE_SECONDS = 0.1
_BULK_AGAIN_SECONDS = 60.0
"""How long large updates go through the exchange port after the bulk port could not be reached."""


@dataclass
class LinkMeter:
    """What one directed link has carried, counted where it is written."""

    sent_bytes: int = 0
    """Chunks and offers, those sent again included."""
    payload_bytes: int = 0
    """Of updates that are durable at the peer."""
    rtt_ms: float = 0.0
    """Of the kernel for the bulk streams, else at most this: what the last offer, or a quicker update since, took."""
    mbps: float = 0.0
    """Payload rate of the last update."""
    streams: int = 0
    """That carried the last update; 0: it went through the exchange port."""
    failures: int = 0
    up: bool = True
    """Whether the last attempt to speak to the peer succeeded, if it was not given up early."""
    fault: str = ""
    """Why the last attempt did not succeed, where ``up`` is false."""
    slow_way: str = ""
    """Why large updates take a slower way than they could; empty: they do not."""


def manifest_to_proto(job: str, manifest: Manifest) -> sync_pb2.UpdateManifest:
    return sync_pb2.UpdateManifest(
        job=job,
        region=manifest.region,
        epoch=manifest.epoch,
        sequence=manifest.sequence,
        digest=manifest.digest,
        total_bytes=manifest.total_bytes,
        weight=manifest.weight,
        seen=dict(manifest.seen),
        last=manifest.last,
        stretch=manifest.stretch,
        settled=manifest.settled,
        ends=manifest.ends,
        first=manifest.first,
        takes_sums=manifest.takes_sums,
        round_seconds=manifest.round_seconds,
    )


def manifest_of(proto: sync_pb2.UpdateManifest) -> Manifest:
    """What `manifest_to_proto` was made from; the stretch is bounded, whatever it says."""
    return Manifest(
        proto.region,
        proto.epoch,
        proto.sequence,
        proto.digest,
        proto.total_bytes,
        proto.weight,
        tuple(sorted(proto.seen.items())),
        proto.last,
        min(max(proto.stretch, 1), _LONGEST_STRETCH),
        proto.settled,
        proto.ends,
        proto.first,
        proto.takes_sums,
        proto.round_seconds if math.isfinite(proto.round_seconds) else 0.0,
    )


@dataclass(frozen=True)
class Notices:
    """What a courier tells as it goes."""

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


class _GivenUp(GeofedError):
    """A connection was given up sooner than a link may stand still, since a new one stands."""


class _Replaced(Exception):
    """What was about to be sent is not to be sent any more."""


class Courier:
    """Carries updates of any region to one peer, one after the other, and tells when each is durable there.

    A cut link is tried again for ever, with back-off; a transfer is given up only after ``stall`` seconds without
    progress, or where a new connection stands sooner, and then goes on with what the peer lacks. Large updates take the
    bulk streams, those that the peer has dialled where it cannot be reached from here.
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
        self._job, self._identity, self._path_of, self._arrived = job, identity, path_of, arrived
        self._stall_seconds, self._broke = stall, broke
        self._dial_back, self._notices = dial_back, notices
        self.meter = LinkMeter()
        self._bulk = BulkWay(job, identity, stall, self._count_sent, bulk_port)
        self._bulk_refused_until = 0.0
        self._peer: Peer | None = None
        self._met = asyncio.Event()
        self._waiting: dict[tuple[int, str], Manifest] = {}
        """In the order in which they go."""
        self._news = asyncio.Event()
        self._trusted = False
        """The last update went through at its first try."""
        self._reached = False
        """The peer has answered over a connection that we dialled, and nothing has failed there since."""
        self._channel: grpc.aio.Channel | None = None
        self._shown: tuple[str, Tls] | None = None
        """Address and identity that the channel was opened with."""
        self._beside: grpc.aio.Channel | None = None
        """Stands already, and takes the channel's place, which has just been given up."""
        self._dialling = asyncio.Lock()
        self._carrying: tuple[float, int] | None = None
        """When the transfer that is going on began, and its bytes."""
        self._given_up = 0
        """Connections in a row."""
        self._given_up_mbps = math.inf
        """The most that the last of them can have carried."""

    def meet(self, peer: Peer) -> None:
        """Know the peer; a new address or epoch is used from the next try on."""
        self._peer = peer
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
        begun, total = self._carrying or (math.inf, 0)
        seconds = time.monotonic() - begun
        last = min(self.meter.mbps, self._given_up_mbps)
        if seconds <= 0 or (not last and seconds < _SURELY_SLOW_SECONDS):
            return last
        at_most = total * 8 / 1e6 / seconds
        return min(last or at_most, at_most)

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
            self._carrying = time.monotonic(), total
            try:
                with _moved_peer(), self._overdue_is_told(total):
                    if len(train) > 1:
                        settled = await self._carry_train(train)
                    elif settled := await self._carry(manifest):
                        self._settled(manifest)
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
            except (grpc.RpcError, GeofedError, OSError) as error:
                await self._note_failure(error)
            finally:
                self._carrying = None
            if settled:
                backoff = _BACKOFF_FIRST_SECONDS
            else:
                await asyncio.sleep(backoff * random.uniform(0.5, 1.0))
                backoff = min(backoff * 2, _BACKOFF_MOST_SECONDS)

    @contextlib.contextmanager
    def _overdue_is_told(self, total_bytes: int) -> Iterator[None]:
        """Links that come and go, and servers that stand still, break nothing for a while; what piles up behind them
        can be summed up nevertheless."""
        if not self.meter.mbps:
            yield
            return
        peer = self._require_peer().region
        overdue = self._overdue_seconds(total_bytes)
        timer = asyncio.get_running_loop().call_later(overdue, self._notices.failed, peer)
        try:
            yield
        finally:
            timer.cancel()

    def _overdue_seconds(self, total_bytes: int) -> float:
        usual = total_bytes * 8 / 1e6 / self.meter.mbps + 2 * self.meter.rtt_ms / 1e3
        return max(_OVERDUE_SECONDS, _OVERDUE_TIMES * usual)

    def _quiet_seconds(self) -> float:
        """How long what goes through the exchange port may show no progress."""
        if not self.meter.mbps or self._carrying is None:
            return self._stall_seconds
        dialled = _DIAL_AGAIN_TIMES * self._overdue_seconds(self._carrying[1])
        return min(dialled * 2.0**self._given_up, self._stall_seconds)

    def _begin_to_send(self, manifest: Manifest) -> None:
        """Tell that an update's bytes are about to leave; raises ``_Replaced`` where others have taken its place since
        it was picked: a peer must not get a part of what it is sent summed up."""
        waiting = self._waiting.get((manifest.sequence, manifest.region))
        if waiting is None or waiting.digest != manifest.digest:
            raise _Replaced
        self._notices.trying(self._require_peer().region, manifest)

    def _settled(self, manifest: Manifest) -> None:
        self._given_up, self._given_up_mbps = 0, math.inf
        self._waiting.pop((manifest.sequence, manifest.region), None)
        self.meter.payload_bytes += manifest.total_bytes
        self._arrived(self._require_peer().region, manifest)

    async def close(self) -> None:
        """Once `run` and `collect` are cancelled."""
        await self._bulk.close()
        await self._close_channels()

    def _require_peer(self) -> Peer:
        if self._peer is None:
            raise GeofedError("INTERNAL", "a courier without a peer")
        return self._peer

    def _count_sent(self, count: int) -> None:
        self.meter.sent_bytes += count

    async def _note_failure(self, error: Exception) -> None:
        peer = self._require_peer()
        told = error_of(error) if isinstance(error, grpc.RpcError) else error
        if isinstance(told, _GivenUp):
            _log.info("a new connection to %s takes the place of one with %s", peer.region, told)
            begun, total = self._carrying or (math.inf, 0)
            self._given_up, self._given_up_mbps = self._given_up + 1, total * 8 / 1e6 / (time.monotonic() - begun)
        elif self._waiting:
            if self.meter.up:
                _log.warning("link to %s is down: %s", peer.region, told)
            self.meter.up, self.meter.fault = False, str(told) or type(told).__name__
        self.meter.failures += 1
        self._trusted = False
        self._notices.failed(peer.region)
        if isinstance(told, GeofedError) and not told.retryable:
            self._notices.refused(told)
        if self._beside is not None or not isinstance(error, grpc.RpcError):
            # After a cut a new connection is there sooner than an old one comes to itself.
            await self._change_channel()
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
            if self._reached and isinstance(error, grpc.RpcError):
                # It was there: the connection may only not have come to itself since the peer began anew.
                self._reached = False
                await self._close_channels()
                raise
            with self._mapped(manifest) as view:
                self._begin_to_send(manifest)
                reply = await self._bulk.send_collected(manifest_to_proto(self._job, manifest), view)
            self.meter.slow_way = "the peer dials, since it cannot be reached from here"
            self._note_bulk()
        if reply.verdict == sync_pb2.OfferReply.VERDICT_FENCED:
            raise GeofedError("FENCED", f"{self._require_peer().region} knows a newer epoch of {manifest.region}")
        self._bulk.learn(reply)
        self.meter.up = True
        if reply.verdict == sync_pb2.OfferReply.VERDICT_UNKNOWN and reply.next:
            self._notices.has(self._require_peer().region, manifest.region, reply.next - 1)
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
                    raise GeofedError(
                        "FENCED", f"{self._require_peer().region} knows a newer epoch of {manifest.region}"
                    )
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
            return await self._send(manifest, manifest_to_proto(self._job, manifest), view, ())

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
                return await self._send(manifest, proto, view, ())
            reply = await self._offer(proto)
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
            return await self._send(manifest, proto, view, have)

    async def _offer(self, proto: sync_pb2.UpdateManifest) -> sync_pb2.OfferReply:
        stub = await self._stub()
        for again in (False, True):
            dials = self._channel is None or self._channel.get_state() is not grpc.ChannelConnectivity.READY
            begun = time.monotonic()
            reply = await self._unless_given_up(stub.Offer(proto, timeout=self._stall_seconds), _Progress())
            self.meter.sent_bytes += proto.ByteSize()
            found = reply.verdict == sync_pb2.OfferReply.VERDICT_HAVE and not again
            if not dials and not self._given_up and not found:
                # Of what was given up some may still be on its way, and the answer comes behind it. What the peer has
                # found at hand it may have made durable first.
                self.meter.rtt_ms = (time.monotonic() - begun) * 1e3
            if self.meter.rtt_ms:
                break
            # Of small updates perhaps no other is ever offered, and this one's answer had to wait for the dialling.
        self.meter.up = self._reached = True
        return reply

    def _note_bulk(self) -> None:
        self.meter.mbps, self.meter.streams = self._bulk.mbps, self._bulk.used_streams
        self.meter.rtt_ms = self._bulk.rtt_seconds * 1e3 or self.meter.rtt_ms
        if not self._bulk.by_collecting:
            self.meter.slow_way = ""

    def _fall_back(self, error: Exception) -> None:
        """Large updates go through the exchange port for a while."""
        peer = self._require_peer()
        self._bulk_refused_until = time.monotonic() + _BULK_AGAIN_SECONDS
        self.meter.slow_way = f"one stream, since the bulk port cannot be reached: {error}"
        _log.warning("large updates to %s take %s", peer.region, self.meter.slow_way)
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

    # Through the exchange port

    async def _send(
        self,
        manifest: Manifest,
        proto: sync_pb2.UpdateManifest,
        view: Content,
        have: tuple[tuple[int, int], ...],
    ) -> sync_pb2.OfferReply:
        progress = _Progress()
        missing = Ranges(have).missing(0, manifest.total_bytes)
        begun = time.monotonic()
        call = (await self._stub()).Send(self._chunks(view, proto, missing, progress))
        reply = await self._unless_given_up(call, progress)
        seconds, lacked = time.monotonic() - begun, sum(end - begin for begin, end in missing)
        if progress.sent_bytes >= lacked:  # else the peer has found the rest elsewhere
            self.meter.rtt_ms = min(self.meter.rtt_ms, seconds * 1e3)
            self.meter.mbps = lacked * 8 / 1e6 / max(seconds, 1e-6)
        self.meter.streams = 0
        self._reached = True
        return reply

    async def _unless_given_up(self, call: Any, progress: _Progress) -> sync_pb2.OfferReply:
        """What the peer answers; raises as `_give_up` does where that comes first."""
        watch = asyncio.ensure_future(self._give_up(progress))
        try:
            await asyncio.wait({watch, asyncio.ensure_future(call.code())}, return_when=asyncio.FIRST_COMPLETED)
            if watch.done():
                watch.result()
            reply: sync_pb2.OfferReply = await call
            return reply
        finally:
            watch.cancel()
            call.cancel()

    async def _give_up(self, progress: _Progress) -> None:
        """Raises ``GeofedError("TRANSFER_STALLED")`` after ``stall`` seconds without progress, and ``_GivenUp`` sooner
        where a new connection came about in the meantime, which is then the courier's."""
        quiet = self._quiet_seconds()
        while True:
            await progress.stalled(quiet)
            seen = progress.last
            left = seen + self._stall_seconds - time.monotonic()
            if left <= 0:
                raise GeofedError("TRANSFER_STALLED", f"no progress for {self._stall_seconds:.0f} s")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left), self._dialling:
                    unused: grpc.aio.Channel | None = (fresh := line_to(self._require_peer(), self._identity()))
                    try:
                        await fresh.channel_ready()
                        # The link may have come to itself this moment, and what is on its way with it.
                        await asyncio.sleep(max(_LAST_CHANCE_SECONDS, 2 * self.meter.rtt_ms / 1e3))
                        if progress.last == seen:
                            # Of a train each update may come to this.
                            unused, self._beside = self._beside, fresh
                            raise _GivenUp("TRANSFER_STALLED", f"no progress for {quiet:.0f} s")
                    finally:
                        if unused is not None:
                            await unused.close(None)

    async def _chunks(
        self,
        view: Content,
        proto: sync_pb2.UpdateManifest,
        missing: list[tuple[int, int]],
        progress: _Progress,
    ) -> AsyncIterator[sync_pb2.UpdateChunk]:
        head: sync_pb2.UpdateManifest | None = proto
        for offset, length in list(pieces(missing, CHUNK_BYTES)) or [(0, 0)]:
            yield sync_pb2.UpdateChunk(manifest=head, offset=offset, data=bytes(view[offset : offset + length]))
            # The stream takes the next chunk only when the one before has left: flow control is the progress.
            self.meter.sent_bytes += length
            progress.made(length)
            head = None

    async def _stub(self) -> sync_pb2_grpc.ExchangeStub:
        shown = self._require_peer().address, self._identity()
        if self._channel is None or self._shown != shown:
            await self._close_channels()
            self._channel, self._shown = line_to(self._require_peer(), shown[1]), shown
        return sync_pb2_grpc.ExchangeStub(self._channel)

    async def _change_channel(self) -> None:
        gone, self._channel, self._beside = self._channel, self._beside, None
        if gone is not None:
            await gone.close(None)

    async def _close_channels(self) -> None:
        gone, self._channel, self._beside = (self._channel, self._beside), None, None
        for one in gone:
            if one is not None:
                await one.close(None)

    # Where one side cannot reach the other

    async def collect(self) -> None:
        """Hold a call open at the peer, by which it can ask us to dial; works until cancelled."""
        await self._met.wait()
        while True:
            with contextlib.suppress(grpc.RpcError), _moved_peer():
                calls = (await self._stub()).Collect(sync_pb2.CollectRequest(job=self._job))
                async for call in calls:
                    peer = self._require_peer()
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


def line_to(peer: Peer, tls: Tls) -> grpc.aio.Channel:
    """Open a channel to a peer's exchange port."""
    return channel(
        peer.address,
        ca_pem=tls.ca_pem,
        name=region_name(peer.region),
        certificate_pem=tls.certificate_pem,
        key_pem=tls.key_pem,
    )


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


class _Progress:
    """Tells a slow transfer from a dead one."""

    def __init__(self) -> None:
        self.last = time.monotonic()
        self.sent_bytes = 0

    def made(self, sent_bytes: int) -> None:
        self.last = time.monotonic()
        self.sent_bytes += sent_bytes

    async def stalled(self, seconds: float) -> None:
        """Returns once nothing has moved for that long."""
        while (left := self.last + seconds - time.monotonic()) > 0:  # noqa: ASYNC110 - time passing is the event
            await asyncio.sleep(left)
