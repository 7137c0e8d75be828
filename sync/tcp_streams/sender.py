"""The sending side of bulk streams: one thread sends an update over all streams of a link."""

from __future__ import annotations

import contextlib
import queue
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from geofed_pb.errors import GeofedError
from geofed_pb.v1 import sync_pb2
from sync.tcp_streams.outgoing import Content, Transfer
from sync.tcp_streams.sockets import buffer_bytes, serial_of, tcp_info, tune, unacknowledged_bytes
from sync.tcp_streams.stream import FrameStream, StreamEnded
from sync.tcp_streams.stream_count import KernelStatistics, StreamCount

__all__ = ["OutboundStreams", "OutgoingUpdate", "TransferResult"]

_POLL_SECONDS = 0.25
"""Interval at which TCP statistics are read and stalls are checked."""
_MAX_DIALLERS = 16
"""Streams that are opened concurrently."""
_REDIALS = 4
"""Broken streams that are replaced during one update."""


@dataclass(frozen=True)
class OutgoingUpdate:
    """An update to send."""

    manifest: sync_pb2.UpdateManifest
    view: Content
    """The bytes of the update."""
    ticket: bytes
    have: tuple[tuple[int, int], ...] | None
    """The (begin, end) ranges that the peer has; None: ask before anything is sent."""
    unchecked: bool = False
    """Whether the peer needs no CRC of a chunk, as it has said before."""


@dataclass(frozen=True)
class TransferResult:
    """The result of sending an update."""

    reply: sync_pb2.OfferReply
    seconds: float
    payload_bytes: int
    """Bytes that the peer lacked."""
    all_sent: bool
    """Whether all of them were sent; if not, the peer got the rest elsewhere."""
    streams: int
    cold: bool
    """Whether a stream was opened for the update."""


class OutboundStreams:
    """The open streams to one peer. Sends one update at a time; `adopt`, `abort` and
    `end_revoked` may be called by any thread."""

    def __init__(self, count_sent: Callable[[int], None]) -> None:
        self._count_sent = count_sent
        self._warm: list[FrameStream] = []
        self._coming: queue.SimpleQueue[ssl.SSLSocket | OSError] = queue.SimpleQueue()
        self._dialling = 0
        self._tag = 0
        self._aborted = False
        self._dialler = ThreadPoolExecutor(_MAX_DIALLERS, thread_name_prefix="bulk-dial")
        self._waker, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._lock = threading.Lock()
        self.mbps, self.rtt_seconds = 0.0, 0.0
        """Rate of the updates so far in Mbit/s, and round-trip time; they determine the sizes of buffers and chunks."""

    @property
    def warm(self) -> int:
        """Number of open streams, including those that the peer has opened."""
        return len(self._warm) + self._coming.qsize()

    @property
    def bandwidth_delay_bytes(self) -> float:
        """Bytes that the link has in flight at full rate; 0: not known yet."""
        return self.mbps / 8 * 1e6 * self.rtt_seconds

    def adopt(self, connection: ssl.SSLSocket) -> None:
        """Use a stream that the peer has opened."""
        self._coming.put(connection)
        self._wake()

    def abort(self) -> None:
        """Make the current update fail, and send no other."""
        self._aborted = True
        self._wake()

    def end_revoked(self, serials: frozenset[str]) -> None:
        """End the streams to a peer whose certificate is revoked."""
        for stream in list(self._warm):
            if serial_of(stream.connection) in serials:
                with contextlib.suppress(OSError):
                    # The thread that sends finds it broken.
                    socket.socket.shutdown(stream.connection, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close all streams. No update may be under way."""
        self.abort()
        self._dialler.shutdown(wait=True, cancel_futures=True)
        self._take_coming()
        self._drop_all()
        self._waker.close()
        self._woken.close()

    def drop(self) -> None:
        """Close all streams; the next update opens new ones."""
        self._take_coming()
        self._drop_all()

    def carry(
        self,
        update: OutgoingUpdate,
        count: StreamCount,
        dial: Callable[[], ssl.SSLSocket] | None,
        quiet_seconds: float,
        stall_seconds: float,
    ) -> TransferResult:
        """Send what the peer lacks; return the peer's last reply and measurements.

        ``count`` learns from the kernel's TCP statistics, and may ask for more streams while the update is under way.
        Without ``dial`` only streams that the peer opens are used. Raises ``GeofedError("TRANSFER_STALLED")`` after
        ``quiet_seconds`` without progress (``stall_seconds`` once the peer has all bytes and only makes them durable),
        the ``GeofedError`` that the peer reports, or OSError when the last stream has broken.
        """
        self._tag = (self._tag + 1) & 0xFFFFFFFF
        self._take_coming()
        while len(self._warm) > count.count and dial is not None:
            self._warm.pop().close()
        about_link = self._tag, self.bandwidth_delay_bytes, update.unchecked
        transfer = Transfer(update.manifest, update.view, update.ticket, update.have, *about_link)
        transfer.streams = count.count
        begun = time.monotonic()
        with selectors.DefaultSelector() as selector, contextlib.ExitStack() as undo:
            selector.register(self._woken, selectors.EVENT_READ)
            for stream in list(self._warm):
                self._attach(stream, transfer, selector)
            transfer.cold = self._top_up(transfer.streams - len(self._warm), dial)
            undo.callback(self._drop_all)
            self._pump(transfer, selector, count, dial, _StallDetector(quiet_seconds, stall_seconds))
            self._read_statistics(transfer, count, None)
            undo.pop_all()
        seconds = time.monotonic() - begun
        used = len(self._warm)
        for stream in list(self._warm):
            if stream.busy:
                self._discard(stream)
        assert transfer.reply is not None
        return TransferResult(transfer.reply, seconds, transfer.lacked, transfer.all_sent, used, transfer.cold)

    # The loop

    def _pump(
        self,
        transfer: Transfer,
        selector: selectors.BaseSelector,
        count: StreamCount,
        dial: Callable[[], ssl.SSLSocket] | None,
        stall: _StallDetector,
    ) -> None:
        redials, error = _REDIALS, OSError("no stream could be opened")
        read_at = time.monotonic()
        while transfer.reply is None:
            for key, events in selector.select(_POLL_SECONDS):
                stream = key.data
                if stream is None:
                    error = self._welcome_coming(transfer, selector) or error
                    continue
                try:
                    self._serve(stream, transfer, events)
                except (OSError, StreamEnded) as broken:
                    error = broken if isinstance(broken, OSError) else OSError(str(broken))
                    selector.unregister(stream.connection)
                    self._discard(stream)
                    self._ask_again(transfer, stream)
                    if dial is not None and redials and self._warm:
                        redials -= 1
                        self._dial(dial)
            for stream in self._warm:
                # A reply on one stream can give all streams work.
                if stream.watched != (interest := stream.interest(transfer)):
                    selector.modify(stream.connection, interest, stream)
                    stream.watched = interest
            if self._aborted:
                raise GeofedError("UNAVAILABLE", "the parameter server is stopping")
            if not self._warm and not self._dialling and (dial is not None or transfer.started):
                # What the peer has may have changed if there was a stream: the caller must ask before it sends again.
                raise OSError(f"all streams have broken: {error}") if transfer.started else error
            stall.check(self._marks(transfer), last=transfer.waits_for_the_end)
            if time.monotonic() - read_at >= _POLL_SECONDS:
                read_at = time.monotonic()
                self._read_statistics(transfer, count, dial)

    def _read_statistics(
        self, transfer: Transfer, count: StreamCount, dial: Callable[[], ssl.SSLSocket] | None
    ) -> None:
        """Pass the kernel's TCP statistics to `StreamCount`, and open more streams if it asks for them."""
        period, wanted = KernelStatistics(), buffer_bytes(self.bandwidth_delay_bytes, transfer.streams)
        for stream in self._warm:
            view = tcp_info(stream.connection)
            if view is not None and stream.seen is not None:
                period.add(stream.seen, view, wanted)
            stream.seen = view
        self._note_rtt()
        if self.rtt_seconds:
            count.set_rtt(self.rtt_seconds)
        count.observe(period)
        if dial is not None and transfer.has_work and count.count > transfer.streams:
            transfer.cold = self._top_up(count.count - transfer.streams, dial)
            transfer.streams = count.count

    def _serve(self, stream: FrameStream, transfer: Transfer, events: int) -> None:
        if events & selectors.EVENT_READ:
            stream.receive(transfer)
        if events & selectors.EVENT_WRITE and transfer.reply is None:
            stream.push(transfer, self._count_sent)

    def _ask_again(self, transfer: Transfer, dead: FrameStream) -> None:
        """Ask the peer, over another stream, which of the bytes have arrived that were in flight on a broken one."""
        transfer.lose(dead)
        if self._warm:
            self._warm[0].offer(transfer)

    def _marks(self, transfer: Transfer) -> tuple[int, ...]:
        """Return numbers that change whenever there is progress, be it only inside the kernel."""
        return (transfer.moved, len(self._warm), *(unacknowledged_bytes(stream.connection) for stream in self._warm))

    # Opening and closing streams

    def _top_up(self, lacking: int, dial: Callable[[], ssl.SSLSocket] | None) -> bool:
        if dial is not None:
            for _ in range(lacking):
                self._dial(dial)
        return lacking > 0

    def _dial(self, dial: Callable[[], ssl.SSLSocket]) -> None:
        def work() -> None:
            try:
                self._coming.put(dial())
            except (OSError, ValueError, GeofedError) as error:
                self._coming.put(error if isinstance(error, OSError) else OSError(str(error)))
            self._wake()

        self._dialling += 1
        self._dialler.submit(work)

    def _welcome_coming(self, transfer: Transfer, selector: selectors.BaseSelector) -> OSError | None:
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(1 << 10)
        known = len(self._warm)
        error = self._take_coming()
        for stream in self._warm[known:]:
            self._attach(stream, transfer, selector)
        return error

    def _take_coming(self) -> OSError | None:
        error = None
        while True:
            try:
                coming = self._coming.get_nowait()
            except queue.Empty:
                return error
            if isinstance(coming, OSError):
                error = coming
            else:
                self._warm.append(FrameStream(coming))
            self._dialling = max(0, self._dialling - 1)

    def _attach(self, stream: FrameStream, transfer: Transfer, selector: selectors.BaseSelector) -> None:
        stream.seen = tcp_info(stream.connection)
        self._note_rtt()
        with contextlib.suppress(OSError):
            share = self.mbps / 8 * 1e6 / max(1, transfer.streams)
            tune(stream.connection, buffer_bytes(self.bandwidth_delay_bytes, max(1, transfer.streams)), share)
        stream.offer(transfer)
        stream.watched = stream.interest(transfer)
        selector.register(stream.connection, stream.watched, stream)

    def _note_rtt(self) -> None:
        """Update the round-trip time. The minimum over the streams counts, since a stream that was opened while others
        filled the link has measured the queue as well."""
        self.rtt_seconds = min(
            (stream.seen.min_rtt_seconds for stream in self._warm if stream.seen is not None),
            default=self.rtt_seconds,
        )

    def _discard(self, stream: FrameStream) -> None:
        self._warm.remove(stream)
        stream.close()

    def _drop_all(self) -> None:
        while self._warm:
            self._warm.pop().close()

    def _wake(self) -> None:
        with self._lock, contextlib.suppress(OSError):
            self._waker.send(b"!")


class _StallDetector:
    """Raises an error when a transfer makes no progress."""

    def __init__(self, quiet_seconds: float, stall_seconds: float) -> None:
        self._quiet, self._stall = quiet_seconds, stall_seconds
        self._marks: tuple[int, ...] = ()
        self._since = time.monotonic()

    def check(self, marks: tuple[int, ...], *, last: bool) -> None:
        """Compare the marks of progress with the last ones. Raises ``GeofedError("TRANSFER_STALLED")`` after too long
        without a change."""
        now = time.monotonic()
        if marks != self._marks:
            self._marks, self._since = marks, now
        elif now - self._since > (limit := self._stall if last else self._quiet):
            raise GeofedError("TRANSFER_STALLED", f"no progress for {limit:.0f} s")
