"""A sender's way through a peer's exchange port: offers, and updates that go as one stream of a gRPC connection."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from geofed_pb.errors import GeofedError
from geofed_pb.rpc import CHUNK_BYTES
from geofed_pb.v1 import sync_pb2, sync_pb2_grpc
from sync.transfer.manifest import Peer
from sync.transfer.wire import line_to
from sync.transport.ranges import Ranges, pieces
from sync.transport.run import Content
from sync.transport.sockets import Tls

__all__ = ["DirectWay", "GivenUp", "LinkMeter"]

_SURELY_SLOW_SECONDS = 5.0
"""An update that takes longer tells something of a link that has carried none before."""
_OVERDUE_SECONDS, _OVERDUE_TIMES = 1.0, 4.0
"""A transfer is overdue after these seconds and this multiple of what it should take."""
_DIAL_AGAIN_TIMES = 2.0
"""Of when it is overdue, a connection that shows no progress is given up for a new one: after several cuts the kernel
may wait for 10 s and more before it sends anything anew. Each time that this happens in a row it is twice as long, for
the link may only have become slower."""
_LAST_CHANCE_SECONDS = 0.1


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


class GivenUp(GeofedError):
    """A connection was given up sooner than a link may stand still, since a new one stands."""


class DirectWay:
    """The connection to one peer's exchange port, and how long what is on its way there may take."""

    def __init__(self, identity: Callable[[], Tls], stall_seconds: float, meter: LinkMeter) -> None:
        """``meter``: of the link; what goes this way is counted there."""
        self._identity, self._stall_seconds, self._meter = identity, stall_seconds, meter
        self._peer: Peer | None = None
        self.reached = False
        """The peer has answered over a connection that we dialled, and nothing has failed there since."""
        self._channel: grpc.aio.Channel | None = None
        self._shown: tuple[str, Tls] | None = None
        """Address and identity that the channel was opened with."""
        self._beside: grpc.aio.Channel | None = None
        """Stands already, and takes the channel's place, which has just been given up."""
        self._dialling = asyncio.Lock()
        self._carrying: tuple[float, int] | None = None
        """When the transfer under way began, and its bytes."""
        self._given_up = 0
        """Connections in a row."""
        self._given_up_mbps = math.inf
        """The most that the last of them can have carried."""

    def meet(self, peer: Peer) -> None:
        """A new address is used from the next try on."""
        self._peer = peer

    def require_peer(self) -> Peer:
        if self._peer is None:
            raise GeofedError("INTERNAL", "a sender without a peer")
        return self._peer

    # How long it may take

    @contextlib.contextmanager
    def carrying(self, total_bytes: int) -> Iterator[None]:
        """A transfer continues, by whatever way."""
        self._carrying = time.monotonic(), total_bytes
        try:
            yield
        finally:
            self._carrying = None

    @property
    def mbps(self) -> float:
        """Payload rate of the last update; less where the one on its way has taken longer than that rate explains."""
        begun, total = self._carrying or (math.inf, 0)
        seconds = time.monotonic() - begun
        last = min(self._meter.mbps, self._given_up_mbps)
        if seconds <= 0 or (not last and seconds < _SURELY_SLOW_SECONDS):
            return last
        at_most = total * 8 / 1e6 / seconds
        return min(last or at_most, at_most)

    def overdue_seconds(self, total_bytes: int) -> float:
        """After which a transfer of so many bytes is overdue; the link must have carried something."""
        usual = total_bytes * 8 / 1e6 / self._meter.mbps + 2 * self._meter.rtt_ms / 1e3
        return max(_OVERDUE_SECONDS, _OVERDUE_TIMES * usual)

    def quiet_seconds(self) -> float:
        """How long what goes this way may show no progress."""
        if not self._meter.mbps or self._carrying is None:
            return self._stall_seconds
        dialled = _DIAL_AGAIN_TIMES * self.overdue_seconds(self._carrying[1])
        return min(dialled * 2.0**self._given_up, self._stall_seconds)

    def arrived(self) -> None:
        """Something has become durable at the peer."""
        self._given_up, self._given_up_mbps = 0, math.inf

    def note_given_up(self) -> None:
        """What is being carried has met `GivenUp`."""
        begun, total = self._carrying or (math.inf, 0)
        self._given_up, self._given_up_mbps = self._given_up + 1, total * 8 / 1e6 / (time.monotonic() - begun)

    # What is said and sent

    async def offer(self, proto: sync_pb2.UpdateManifest) -> sync_pb2.OfferReply:
        """Offer an update; the answer's round trip is the link's."""
        stub = await self.stub()
        for again in (False, True):
            dials = self._channel is None or self._channel.get_state() is not grpc.ChannelConnectivity.READY
            begun = time.monotonic()
            reply = await self._unless_given_up(stub.Offer(proto, timeout=self._stall_seconds), _Progress())
            self._meter.sent_bytes += proto.ByteSize()
            found = reply.verdict == sync_pb2.OfferReply.VERDICT_HAVE and not again
            if not dials and not self._given_up and not found:
                # Of what was given up some may still be on its way, and the answer comes behind it. What the peer has
                # found at hand it may have made durable first.
                self._meter.rtt_ms = (time.monotonic() - begun) * 1e3
            if self._meter.rtt_ms:
                break
            # Of small updates perhaps no other is ever offered, and this one's answer had to wait for the dialling.
        self._meter.up = self.reached = True
        return reply

    async def send(
        self, proto: sync_pb2.UpdateManifest, view: Content, have: tuple[tuple[int, int], ...]
    ) -> sync_pb2.OfferReply:
        """Send what the peer lacks of an update; returns once it is durable there, or refused.

        Raises what gRPC does, ``GeofedError("TRANSFER_STALLED")``, and ``GivenUp`` where a new connection stands.
        """
        progress = _Progress()
        missing = Ranges(have).missing(0, proto.total_bytes)
        begun = time.monotonic()
        call = (await self.stub()).Send(self._chunks(view, proto, missing, progress))
        reply = await self._unless_given_up(call, progress)
        seconds, lacked = time.monotonic() - begun, sum(end - begin for begin, end in missing)
        if progress.sent_bytes >= lacked:  # else the peer has found the rest elsewhere
            self._meter.rtt_ms = min(self._meter.rtt_ms, seconds * 1e3)
            self._meter.mbps = lacked * 8 / 1e6 / max(seconds, 1e-6)
        self._meter.streams = 0
        self.reached = True
        return reply

    async def stub(self) -> sync_pb2_grpc.ExchangeStub:
        """Of the connection that stands, or of a new one."""
        shown = self.require_peer().address, self._identity()
        if self._channel is None or self._shown != shown:
            await self.close()
            self._channel, self._shown = line_to(self.require_peer(), shown[1]), shown
        return sync_pb2_grpc.ExchangeStub(self._channel)

    @property
    def stands_anew(self) -> bool:
        """There is a new connection beside the one that was given up."""
        return self._beside is not None

    async def change_channel(self) -> None:
        """Take the new connection, if there is one, in place of the present one."""
        gone, self._channel, self._beside = self._channel, self._beside, None
        if gone is not None:
            await gone.close(None)

    async def close(self) -> None:
        gone, self._channel, self._beside = (self._channel, self._beside), None, None
        for one in gone:
            if one is not None:
                await one.close(None)

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
        """Raises ``GeofedError("TRANSFER_STALLED")`` after ``stall`` seconds without progress, and ``GivenUp`` sooner
        where a new connection came about in the meantime, which is then this way's."""
        quiet = self.quiet_seconds()
        while True:
            await progress.stalled(quiet)
            seen = progress.last
            left = seen + self._stall_seconds - time.monotonic()
            if left <= 0:
                raise GeofedError("TRANSFER_STALLED", f"no progress for {self._stall_seconds:.0f} s")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left), self._dialling:
                    unused: grpc.aio.Channel | None = (fresh := line_to(self.require_peer(), self._identity()))
                    try:
                        await fresh.channel_ready()
                        # The link may have come to itself this moment, and what is on its way with it.
                        await asyncio.sleep(max(_LAST_CHANCE_SECONDS, 2 * self._meter.rtt_ms / 1e3))
                        if progress.last == seen:
                            # Of a train each update may come to this.
                            unused, self._beside = self._beside, fresh
                            raise GivenUp("TRANSFER_STALLED", f"no progress for {quiet:.0f} s")
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
            self._meter.sent_bytes += length
            progress.made(length)
            head = None


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
