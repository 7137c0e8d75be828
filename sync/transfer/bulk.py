"""A sender's bulk streams: when they are dialled, by whom, how many, and what is sent over them."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor

from geofed_pb.errors import GeofedError
from geofed_pb.v1 import sync_pb2
from sync.transfer.manifest import Peer
from sync.transport.run import Content
from sync.transport.sender import Carried, Outbound, Parcel
from sync.transport.sockets import Tls, dial
from sync.transport.stream import hello
from sync.transport.streams import StreamCount

__all__ = ["BulkWay", "Unreached"]

_log = logging.getLogger("geofed.ps.bulk")
_DIAL_SECONDS = 2.5
"""Before the kernel's third SYN: a new try finds a healed link sooner."""
_DIALLED_SECONDS = 2.0
"""For a peer that was called to dial: the call may be lost in a cut that is over, and then the direct way is there."""
_QUIET_SECONDS = 5.0
"""Without any progress on the way: new streams may get through where the old ones wait for their timers."""


class Unreached(OSError):
    """No bulk stream could be opened."""


class BulkWay:
    """The bulk streams to one peer. One update at a time."""

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
        self._peer: Peer | None = None
        self._port, self._ticket = 0, b""
        self._outbound = Outbound(count_sent)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="bulk-send")
        self._calls: asyncio.Queue[sync_pb2.CollectCall | None] | None = None
        self.streams = StreamCount()
        self.by_collecting = False
        """The last large update went over streams that the peer had dialled."""
        self.mbps, self.used_streams = 0.0, 0

    @property
    def knows_the_way(self) -> bool:
        """There is a port to dial and a ticket to show."""
        return bool(self._port and self._ticket)

    @property
    def is_collected(self) -> bool:
        """The peer holds a call open, to be told when to dial."""
        return self._calls is not None and bool(self._bulk_port())

    @property
    def rtt_seconds(self) -> float:
        """The shortest round trip that the kernel has seen; 0: not known yet."""
        return self._outbound.rtt_seconds

    def meet(self, peer: Peer) -> None:
        if self._peer is not None and self._peer.address != peer.address:
            self._port = 0
            self.by_collecting = False
        self._peer = peer

    def learn(self, reply: sync_pb2.OfferReply) -> None:
        """Where the peer takes bulk streams, and what lets us in."""
        self._port, self._ticket = reply.bulk_port, reply.ticket or self._ticket

    async def send(
        self, proto: sync_pb2.UpdateManifest, view: Content, have: tuple[tuple[int, int], ...]
    ) -> sync_pb2.OfferReply:
        """Send what the peer lacks over streams that we dial.

        Raises ``Unreached`` where none could be opened, another OSError where all have broken, ``GeofedError`` for
        what the peer says and for a stall.
        """
        return await self._carry(Parcel(proto, view, self._ticket, have), self._dial)

    async def send_collected(self, proto: sync_pb2.UpdateManifest, view: Content) -> sync_pb2.OfferReply:
        """The same over streams that the peer dials when we call for them."""
        calls = self._calls
        if calls is None:
            raise Unreached("the peer does not collect")
        if not self.by_collecting:
            self._outbound.drop()
            self._ticket = b""
        self.by_collecting = True
        if not self._outbound.warm:
            calls.put_nowait(sync_pb2.CollectCall(bulk_port=self._bulk_port(), streams=self.streams.count))
        await self._until_dialled()
        try:
            return await self._carry(Parcel(proto, view, self._ticket, None), None)
        except BaseException:
            self.by_collecting = False
            raise

    async def _until_dialled(self) -> None:
        try:
            async with asyncio.timeout(min(_DIALLED_SECONDS, self._stall_seconds)):
                while not self._outbound.warm:  # noqa: ASYNC110 - a thread brings them
                    await asyncio.sleep(0.02)
        except TimeoutError:
            self.by_collecting = False
            raise Unreached("the peer was called, and has not dialled") from None

    async def _carry(self, parcel: Parcel, dialler: Callable[[], ssl.SSLSocket] | None) -> sync_pb2.OfferReply:
        quiet = min(_QUIET_SECONDS, self._stall_seconds)
        try:
            carried: Carried = await asyncio.get_running_loop().run_in_executor(
                self._thread, self._outbound.carry, parcel, self.streams, dialler, quiet, self._stall_seconds
            )
        except asyncio.CancelledError:
            self._outbound.abort()
            raise
        except GeofedError as error:
            if error.code == "FORBIDDEN":
                # The ticket is worth nothing any more: the peer has been started anew.
                self._ticket = b""
            raise
        self._measure(carried)
        return carried.reply

    def _measure(self, carried: Carried) -> None:
        self.used_streams = carried.streams
        durable = carried.reply.verdict == sync_pb2.OfferReply.VERDICT_HAVE
        if not (durable and carried.payload_bytes and carried.all_sent):
            return
        self.mbps = carried.payload_bytes * 8 / 1e6 / max(carried.seconds, 1e-6)
        self._outbound.mbps = max(self.mbps, self._outbound.mbps * 0.8)
        if not carried.cold:
            self.streams.measured(self.mbps, carried.seconds, carried.streams)

    def _dial(self) -> ssl.SSLSocket:
        """Runs in a thread."""
        peer = self._peer
        if peer is None:
            raise Unreached("no peer is known")
        address = (peer.address.rpartition(":")[0].strip("[]"), self._port)
        try:
            line = dial(address, peer.region, self._identity(), _DIAL_SECONDS)
            try:
                line.sendall(hello(self._job, collects=False))
            except OSError:
                line.close()
                raise
        except OSError as error:
            raise Unreached(f"{address[0]}:{address[1]}: {error}") from error
        return line

    # The peer dials

    async def calls(self) -> AsyncIterator[sync_pb2.CollectCall]:
        """What the peer is to dial, as long as it listens; a newer listener takes the place of this one."""
        if self._calls is not None:
            self._calls.put_nowait(None)
        mine = self._calls = asyncio.Queue()
        try:
            while (call := await mine.get()) is not None:
                yield call
        finally:
            if self._calls is mine:
                self._calls = None

    def adopt(self, ticket: bytes, line: ssl.SSLSocket) -> None:
        if self.by_collecting:
            self._ticket = ticket
            self._outbound.adopt(line)
        else:
            line.close()

    async def close(self) -> None:
        """Close all streams, and let go of those who collect."""
        if self._calls is not None:
            self._calls.put_nowait(None)
        self._outbound.abort()
        await asyncio.to_thread(self._thread.shutdown)
        await asyncio.to_thread(self._outbound.close)
