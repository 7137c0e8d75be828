"""The bulk streams of a sender: who opens them and when, how many there are, and what is sent over them."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor

from geofed_pb.errors import GeofedError
from geofed_pb.v1 import sync_pb2
from sync.file_transfer.manifest import PeerAddress
from sync.tcp_streams.outgoing import Content
from sync.tcp_streams.sender import OutboundStreams, OutgoingUpdate, TransferResult
from sync.tcp_streams.sockets import Tls, dial
from sync.tcp_streams.stream import hello
from sync.tcp_streams.stream_count import StreamCount

__all__ = ["BulkConnection", "BulkUnreachable"]

_log = logging.getLogger("geofed.ps.bulk")
_DIAL_SECONDS = 2.5
"""Timeout of opening a stream. It ends before the kernel's third SYN, because a new attempt finds out sooner that a
broken link works again."""
_WAIT_FOR_PEER_SECONDS = 2.0
"""Timeout for a peer that was asked to open streams. The request may be lost while the link was broken; by now the link
may work again, and the peer be reachable directly."""
_QUIET_SECONDS = 5.0
"""Time without any progress after which streams are given up: new ones may get through while the old ones wait for the
kernel's retransmission timers."""


class BulkUnreachable(OSError):
    """Raised when no bulk stream could be opened."""


class BulkConnection:
    """The bulk streams to one peer. Sends one update at a time."""

    def __init__(
        self,
        job: str,
        identity: Callable[[], Tls],
        stall_seconds: float,
        count_sent: Callable[[int], None],
        bulk_port: Callable[[], int],
    ) -> None:
        self._job, self._identity, self._bulk_port = job, identity, bulk_port
        self._stall_seconds = stall_seconds
        self._peer: PeerAddress | None = None
        self._port, self._ticket, self._unchecked = 0, b"", False
        self._outbound = OutboundStreams(count_sent)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="bulk-send")
        self._calls: asyncio.Queue[sync_pb2.CollectCall | None] | None = None
        self.streams = StreamCount()
        self.peer_dials = False
        """Whether the last large update was sent over streams that the peer opened."""
        self.mbps, self.used_streams = 0.0, 0
        """Payload rate in Mbit/s, and number of streams, of the last update."""

    @property
    def can_dial(self) -> bool:
        """Whether the peer's bulk port and a ticket are known."""
        return bool(self._port and self._ticket)

    @property
    def can_call_peer(self) -> bool:
        """Whether the peer holds a call open over which it can be asked to open streams."""
        return self._calls is not None and bool(self._bulk_port())

    @property
    def rtt_seconds(self) -> float:
        """Shortest round-trip time that the kernel has measured, in seconds; 0: not known yet."""
        return self._outbound.rtt_seconds

    def set_peer(self, peer: PeerAddress) -> None:
        """Set the peer. A new address is used from the next update on."""
        if self._peer is not None and self._peer.address != peer.address:
            self._port = 0
            self.peer_dials = False
        self._peer = peer

    def learn(self, reply: sync_pb2.OfferReply) -> None:
        """Remember what the peer's reply to an offer says of bulk streams."""
        self._port, self._ticket, self._unchecked = reply.bulk_port, reply.ticket or self._ticket, reply.unchecked

    async def send(
        self, proto: sync_pb2.UpdateManifest, view: Content, have: tuple[tuple[int, int], ...]
    ) -> sync_pb2.OfferReply:
        """Send what the peer lacks over streams that this side opens, and return the peer's last reply.

        ``have`` are the (begin, end) ranges that the peer has. Raises ``BulkUnreachable`` if no stream could be opened,
        another OSError if all streams broke, and ``GeofedError`` for an error that the peer reports and for a stall.
        """
        return await self._carry(OutgoingUpdate(proto, view, self._ticket, have, self._unchecked), self._dial)

    async def send_collected(self, proto: sync_pb2.UpdateManifest, view: Content) -> sync_pb2.OfferReply:
        """Send what the peer lacks over streams that the peer opens on request; raises like `send`."""
        calls = self._calls
        if calls is None:
            raise BulkUnreachable("the peer has no call open to be asked for streams")
        if not self.peer_dials:
            self._outbound.drop()
            self._ticket = b""
        self.peer_dials = True
        if not self._outbound.warm:
            calls.put_nowait(sync_pb2.CollectCall(bulk_port=self._bulk_port(), streams=self.streams.count))
        await self._until_dialled()
        reply = None
        try:
            reply = await self._carry(OutgoingUpdate(proto, view, self._ticket, None), None)
        finally:
            if reply is None:
                self.peer_dials = False
        return reply

    async def _until_dialled(self) -> None:
        try:
            async with asyncio.timeout(min(_WAIT_FOR_PEER_SECONDS, self._stall_seconds)):
                while not self._outbound.warm:  # noqa: ASYNC110 - a thread opens them
                    await asyncio.sleep(0.02)
        except TimeoutError:
            self.peer_dials = False
            raise BulkUnreachable("the peer was asked to open streams and did not") from None

    async def _carry(self, update: OutgoingUpdate, dialler: Callable[[], ssl.SSLSocket] | None) -> sync_pb2.OfferReply:
        quiet = min(_QUIET_SECONDS, self._stall_seconds)
        try:
            carried: TransferResult = await asyncio.get_running_loop().run_in_executor(
                self._thread, self._outbound.carry, update, self.streams, dialler, quiet, self._stall_seconds
            )
        except asyncio.CancelledError:
            self._outbound.abort()
            raise
        except GeofedError as error:
            if error.code == "FORBIDDEN":
                # The ticket is no longer valid: the peer has restarted.
                self._ticket = b""
            raise
        self._measure(carried)
        return carried.reply

    def _measure(self, carried: TransferResult) -> None:
        self.used_streams = carried.streams
        durable = carried.reply.verdict == sync_pb2.OfferReply.VERDICT_HAVE
        if not (durable and carried.payload_bytes and carried.all_sent):
            return
        self.mbps = carried.payload_bytes * 8 / 1e6 / max(carried.seconds, 1e-6)
        self._outbound.mbps = max(self.mbps, self._outbound.mbps * 0.8)
        if not carried.cold:
            self.streams.add_goodput(self.mbps, carried.seconds, carried.streams)

    def _dial(self) -> ssl.SSLSocket:
        """Open a stream to the peer's bulk port; runs in a thread. Raises ``BulkUnreachable``."""
        peer = self._peer
        if peer is None:
            raise BulkUnreachable("no peer is known")
        address = (peer.address.rpartition(":")[0].strip("[]"), self._port)
        try:
            connection = dial(address, peer.region, self._identity(), _DIAL_SECONDS)
            try:
                connection.sendall(hello(self._job, collects=False))
            except OSError:
                connection.close()
                raise
        except OSError as error:
            raise BulkUnreachable(f"{address[0]}:{address[1]}: {error}") from error
        return connection

    # Streams that the peer opens

    async def calls(self) -> AsyncIterator[sync_pb2.CollectCall]:
        """Yield requests to open streams, for the peer that holds this call open. A newer call ends an older one."""
        if self._calls is not None:
            self._calls.put_nowait(None)
        mine = self._calls = asyncio.Queue()
        try:
            while (call := await mine.get()) is not None:
                yield call
        finally:
            if self._calls is mine:
                self._calls = None

    def adopt(self, ticket: bytes, connection: ssl.SSLSocket) -> None:
        """Use a stream that the peer has opened, or close it if none was requested."""
        if self.peer_dials:
            self._ticket = ticket
            self._outbound.adopt(connection)
        else:
            connection.close()

    def end_revoked(self, serials: frozenset[str]) -> None:
        """End the streams to a peer whose certificate is revoked."""
        self._outbound.end_revoked(serials)

    async def close(self) -> None:
        """Close all streams, and end the peer's open call."""
        if self._calls is not None:
            self._calls.put_nowait(None)
        self._outbound.abort()
        await asyncio.to_thread(self._thread.shutdown)
        await asyncio.to_thread(self._outbound.close)
