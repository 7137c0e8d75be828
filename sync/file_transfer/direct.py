"""A sender's gRPC connection to a peer's exchange port: it carries offers, and updates in a single stream."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from geofed_pb.errors import GeofedError
from geofed_pb.rpc import CHUNK_BYTES
from geofed_pb.tasks import awaited
from geofed_pb.v1 import sync_pb2, sync_pb2_grpc
from sync.file_transfer.manifest import PeerAddress
from sync.file_transfer.wire import open_channel
from sync.tcp_streams.outgoing import Content
from sync.tcp_streams.ranges import Ranges, pieces
from sync.tcp_streams.sockets import Tls, require_unrevoked

__all__ = ["ConnectionReplaced", "DirectConnection", "LinkMeter"]

_SLOW_SECONDS = 5.0
"""After this time an unfinished first update bounds the rate of a link that has carried none before."""
_TOLD_UPDATES = 8
"""Last updates that tell a link's rate: as many as are sent concurrently, of which some may have a few bytes only."""
_MIN_OVERDUE_SECONDS = 1.0
"""A transfer is not overdue before this time."""
_OVERDUE_FACTOR = 4.0
"""A transfer is overdue after this multiple of the time that it should take."""
_RECONNECT_FACTOR = 2.0
"""A connection without progress is replaced after this multiple of the time after which its transfer is overdue: after
several interruptions of a link the kernel may wait 10 s and more before it retransmits. The time doubles each time that
this happens in a row, because the link may only have become slower."""
_LAST_CHANCE_SECONDS = 0.1
"""An old connection may still make progress for this long after the new one is open."""


@dataclass
class LinkMeter:
    """What one link has carried in one direction."""

    sent_bytes: int = 0
    """Bytes of chunks and offers, including those sent again."""
    payload_bytes: int = 0
    """Bytes of updates that are durable at the peer."""
    rtt_ms: float = 0.0
    """Round-trip time: the kernel's for bulk streams, otherwise the duration of the last offer, or of a shorter
    transfer since."""
    mbps: float = 0.0
    """Payload rate of the last update in Mbit/s, its acknowledgement included."""
    streams: int = 0
    """Bulk streams that carried the last update; 0: it was sent through the exchange port."""
    failures: int = 0
    up: bool = True
    """Whether the last attempt to reach the peer succeeded; a connection that was replaced early does not count."""
    fault: str = ""
    """Why the last attempt failed, if ``up`` is false; for operators alone."""
    slow_path: str = ""
    """Why large updates take a slower path than bulk streams that this side opens; empty: they do not."""
    _told: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_TOLD_UPDATES))
    """Bytes and seconds of the last updates that passed the exchange port."""

    def carried(self, lacked_bytes: int, seconds: float) -> None:
        """Record that an update has passed the exchange port."""
        self.rtt_ms = min(self.rtt_ms, seconds * 1e3)
        self._told.append((lacked_bytes, max(seconds, 1e-6)))
        self.mbps = lacked_bytes * 8 / 1e6 / max(seconds, 1e-6)

    def mbps_of(self, update_bytes: int) -> float:
        """Return the payload rate of updates of a size in Mbit/s: that of the last one of half the size or more.

        Smaller ones take a round trip however fast the link is: from them follows what it is at most.
        """
        if self.streams or not self._told:
            return self.mbps
        fit = (one for one in reversed(self._told) if 2 * one[0] >= update_bytes)
        size, seconds = next(fit, (update_bytes, self._told[-1][1]))
        return size * 8 / 1e6 / seconds


class ConnectionReplaced(GeofedError):
    """Raised when a stalled connection is abandoned before the stall timeout, because a new one is open."""


class DirectConnection:
    """The connection to one peer's exchange port, and the timeouts of transfers to that peer."""

    def __init__(self, identity: Callable[[], Tls], stall_seconds: float, meter: LinkMeter) -> None:
        """``meter`` counts what is sent here."""
        self._identity, self._stall_seconds, self._meter = identity, stall_seconds, meter
        self._peer: PeerAddress | None = None
        self.reached = False
        """Whether the peer has answered on this connection, and nothing has failed there since."""
        self._channel: grpc.aio.Channel | None = None
        self._opened_with: tuple[str, Tls] | None = None
        """Address and TLS identity that the connection was opened with."""
        self._opening = asyncio.Lock()
        self._replacement: grpc.aio.Channel | None = None
        """An open connection that is to replace the current one, which has stalled."""
        self._dialling = asyncio.Lock()
        self._carrying: tuple[float, int] | None = None
        """When the current transfer began (monotonic clock), and its bytes."""
        self._stalls_in_row = 0
        """Number of connections in a row that stalled and were replaced."""
        self._stalled_mbps = math.inf
        """Upper bound of the rate, in Mbit/s, at which the last stalled connection can have carried bytes."""

    def set_peer(self, peer: PeerAddress) -> None:
        """Set the peer. A new address is used from the next attempt on."""
        self._peer = peer

    def require_peer(self) -> PeerAddress:
        """Return the peer. Raises ``GeofedError("INTERNAL")`` if none is known."""
        if self._peer is None:
            raise GeofedError("INTERNAL", "a sender without a peer")
        return self._peer

    # Timeouts

    @contextlib.contextmanager
    def carrying(self, total_bytes: int) -> Iterator[None]:
        """Mark a transfer as being under way, over this connection or over bulk streams."""
        self._carrying = time.monotonic(), total_bytes
        try:
            yield
        finally:
            self._carrying = None

    def mbps_of(self, update_bytes: int) -> float:
        """Return the payload rate in Mbit/s (`LinkMeter.mbps_of`); less if the current transfer already takes longer
        than that rate explains."""
        begun, total = self._carrying or (math.inf, 0)
        seconds = time.monotonic() - begun
        last = min(self._meter.mbps_of(update_bytes), self._stalled_mbps)
        usual = max(_MIN_OVERDUE_SECONDS, self._usual_seconds(total)) if last else _SLOW_SECONDS
        if seconds <= usual:
            return last
        at_most = max(total, update_bytes) * 8 / 1e6 / seconds
        return min(last or at_most, at_most)

    def overdue_seconds(self, total_bytes: int) -> float:
        """Return after how many seconds a transfer of so many bytes is overdue. The rate of the link must be known."""
        return max(_MIN_OVERDUE_SECONDS, _OVERDUE_FACTOR * self._usual_seconds(total_bytes))

    def _usual_seconds(self, total_bytes: int) -> float:
        """Return the seconds that so many bytes take at the known rate, at most."""
        return total_bytes * 8 / 1e6 / self._meter.mbps_of(total_bytes) + 2 * self._meter.rtt_ms / 1e3

    def quiet_seconds(self) -> float:
        """Return for how many seconds the current transfer may make no progress before a new connection is opened."""
        if not self._meter.mbps or self._carrying is None:
            return self._stall_seconds
        limit = _RECONNECT_FACTOR * self.overdue_seconds(self._carrying[1])
        return min(limit * 2.0**self._stalls_in_row, self._stall_seconds)

    def arrived(self) -> None:
        """Record that an update has become durable at the peer."""
        self._stalls_in_row, self._stalled_mbps = 0, math.inf

    def note_stall(self) -> None:
        """Record that the connection of the current transfer stalled and is to be replaced."""
        begun, total = self._carrying or (math.inf, 0)
        self._stalls_in_row, self._stalled_mbps = self._stalls_in_row + 1, total * 8 / 1e6 / (time.monotonic() - begun)

    # Requests

    async def offer(self, proto: sync_pb2.UpdateManifest) -> sync_pb2.OfferReply:
        """Offer an update and return the peer's reply. Measures the round-trip time of the link."""
        stub = await self.stub()
        for again in (False, True):
            dials = self._channel is None or self._channel.get_state() is not grpc.ChannelConnectivity.READY
            begun = time.monotonic()
            reply = await self._watched(stub.Offer(proto, timeout=self._stall_seconds), _Progress())
            self._meter.sent_bytes += proto.ByteSize()
            found = reply.verdict == sync_pb2.OfferReply.VERDICT_HAVE and not again
            if not dials and not self._stalls_in_row and not found:
                # The reply is delayed by bytes that are still in transit on a replaced connection, and by a peer that
                # first makes its own copy of the update durable.
                self._meter.rtt_ms = (time.monotonic() - begun) * 1e3
            if self._meter.rtt_ms:
                break
            # This reply had to wait for the connection, so the offer is repeated once to measure the round trip: small
            # updates may never be offered again.
        self._meter.up = self.reached = True
        return reply

    async def send(
        self, proto: sync_pb2.UpdateManifest, view: Content, have: tuple[tuple[int, int], ...]
    ) -> sync_pb2.OfferReply:
        """Send what the peer lacks of an update; return the peer's reply once the update is durable there, or refused.

        Raises gRPC's errors, ``GeofedError("TRANSFER_STALLED")``, and ``ConnectionReplaced`` if a new connection is
        open.
        """
        progress = _Progress()
        missing = Ranges(have).missing(0, proto.total_bytes)
        begun = time.monotonic()
        call = (await self.stub()).Send(self._chunks(view, proto, missing, progress))
        reply = await self._watched(call, progress)
        seconds, lacked = time.monotonic() - begun, sum(end - begin for begin, end in missing)
        if progress.sent_bytes >= lacked:  # else the peer got the rest elsewhere, and the duration says nothing
            self._meter.carried(lacked, seconds)
        self._meter.streams = 0
        self.reached = True
        return reply

    async def stub(self) -> sync_pb2_grpc.ExchangeStub:
        """Return the stub of the current connection, or of a new one if address or identity have changed. Raises
        ``GeofedError("FORBIDDEN")`` if the peer's certificate is revoked."""
        async with self._opening:
            current = self.require_peer().address, self._identity()
            if self._channel is None or self._opened_with != current:
                await self.close()
                self._channel, self._opened_with = await self._open(), current
            return sync_pb2_grpc.ExchangeStub(self._channel)

    async def _open(self) -> grpc.aio.Channel:
        peer, tls = self.require_peer(), self._identity()
        if tls.revoked.serials:
            # gRPC tells a client nothing of the server's certificate.
            await asyncio.to_thread(require_unrevoked, peer.address, peer.region, tls, self._stall_seconds)
        return open_channel(peer, tls)

    @property
    def has_replacement(self) -> bool:
        """Whether a new connection is open that is to replace the current, stalled one."""
        return self._replacement is not None

    async def use_replacement(self) -> None:
        """Close the current connection, and use the replacement if there is one."""
        old, self._channel, self._replacement = self._channel, self._replacement, None
        if old is not None:
            await old.close(None)

    async def close(self) -> None:
        """Close all connections."""
        channels, self._channel, self._replacement = (self._channel, self._replacement), None, None
        for channel in channels:
            if channel is not None:
                await channel.close(None)

    async def _watched(self, call: Any, progress: _Progress) -> sync_pb2.OfferReply:
        """Return the peer's reply to a call, unless `_watch` raises first."""
        watch = awaited(self._watch(progress))
        try:
            await asyncio.wait({watch, awaited(call.code())}, return_when=asyncio.FIRST_COMPLETED)
            if watch.done():
                watch.result()
            reply: sync_pb2.OfferReply = await call
            return reply
        finally:
            watch.cancel()
            call.cancel()

    async def _watch(self, progress: _Progress) -> None:
        """Raise ``GeofedError("TRANSFER_STALLED")`` after the stall timeout without progress, or ``ConnectionReplaced``
        earlier if a new connection could be opened; that is then the replacement."""
        quiet = self.quiet_seconds()
        while True:
            await progress.stalled(quiet)
            seen = progress.last
            left = seen + self._stall_seconds - time.monotonic()
            if left <= 0:
                raise GeofedError("TRANSFER_STALLED", f"no progress for {self._stall_seconds:.0f} s")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left), self._dialling:
                    unused: grpc.aio.Channel | None = (fresh := await self._open())
                    try:
                        await fresh.channel_ready()
                        # The link may have recovered at this moment, and the old connection with it.
                        await asyncio.sleep(max(_LAST_CHANCE_SECONDS, 2 * self._meter.rtt_ms / 1e3))
                        if progress.last == seen:
                            # Each of several concurrent updates may replace the connection.
                            unused, self._replacement = self._replacement, fresh
                            raise ConnectionReplaced("TRANSFER_STALLED", f"no progress for {quiet:.0f} s")
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
            # Flow control paces this: the stream takes the next chunk only when the previous one has left.
            self._meter.sent_bytes += length
            progress.made(length)
            head = None


class _Progress:
    """Tracks progress, to distinguish a slow transfer from a dead one."""

    def __init__(self) -> None:
        self.last = time.monotonic()
        self.sent_bytes = 0

    def made(self, sent_bytes: int) -> None:
        """Record progress."""
        self.last = time.monotonic()
        self.sent_bytes += sent_bytes

    async def stalled(self, seconds: float) -> None:
        """Return once there has been no progress for that long."""
        while (left := self.last + seconds - time.monotonic()) > 0:  # noqa: ASYNC110 - time passing is the event
            await asyncio.sleep(left)
