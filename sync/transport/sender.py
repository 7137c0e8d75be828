"""The sending side of bulk streams: one thread carries one update over all of a link's streams."""

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
from sync.transport.run import Content, Run
from sync.transport.sockets import buffer_bytes, kernel_view, tune, unacknowledged_bytes
from sync.transport.stream import Stream, StreamEnded
from sync.transport.streams import Look, StreamCount

__all__ = ["Carried", "Outbound", "Parcel"]

_LOOK_SECONDS = 0.25
_MOST_DIALLING = 16
_REDIALS = 4


@dataclass(frozen=True)
class Parcel:
    """An update to carry."""

    manifest: sync_pb2.UpdateManifest
    view: Content
    """All its bytes."""
    ticket: bytes
    have: tuple[tuple[int, int], ...] | None
    """What the peer has of it; None: ask before anything is sent."""


@dataclass(frozen=True)
class Carried:
    """How it went."""

    reply: sync_pb2.OfferReply
    seconds: float
    payload_bytes: int
    """What the peer lacked."""
    all_sent: bool
    """All of that; else it has found the rest elsewhere."""
    streams: int
    cold: bool
    """A stream was opened for it."""


class Outbound:
    """The warm streams to one peer. One update at a time; `adopt` and `abort` may be called by any thread."""

    def __init__(self, count_sent: Callable[[int], None]) -> None:
        self._count_sent = count_sent
        self._warm: list[Stream] = []
        self._coming: queue.SimpleQueue[ssl.SSLSocket | OSError] = queue.SimpleQueue()
        self._dialling = 0
        self._tag = 0
        self._aborted = False
        self._dialler = ThreadPoolExecutor(_MOST_DIALLING, thread_name_prefix="bulk-dial")
        self._waker, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._lock = threading.Lock()
        self.mbps, self.rtt_seconds = 0.0, 0.0
        """Of the updates so far; they size the buffers and chunks."""

    @property
    def warm(self) -> int:
        """Streams that are open, those that the peer has dialled for us included."""
        return len(self._warm) + self._coming.qsize()

    @property
    def bandwidth_delay_bytes(self) -> float:
        return self.mbps / 8 * 1e6 * self.rtt_seconds

    def adopt(self, line: ssl.SSLSocket) -> None:
        """Take over a stream that the peer has dialled."""
        self._coming.put(line)
        self._wake()

    def abort(self) -> None:
        """Let the update under way fail, and carry no other."""
        self._aborted = True
        self._wake()

    def close(self) -> None:
        """Close all streams; nothing may be under way."""
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
        parcel: Parcel,
        count: StreamCount,
        dial: Callable[[], ssl.SSLSocket] | None,
        quiet_seconds: float,
        stall_seconds: float,
    ) -> Carried:
        """Send what the peer lacks; returns its last word on the update.

        `count` learns from what the kernel sees, and may want more streams while the update is under way.
        Without `dial` the streams are those that the peer dials. Raises ``GeofedError("TRANSFER_STALLED")`` after
        `quiet_seconds` without progress on the way (`stall_seconds` once all is there and only its being made durable
        is waited for), another one that the peer has told, or OSError when the last stream has broken.
        """
        self._tag = (self._tag + 1) & 0xFFFFFFFF
        self._take_coming()
        while len(self._warm) > count.count and dial is not None:
            self._warm.pop().close()
        run = Run(parcel.manifest, parcel.view, parcel.ticket, parcel.have, self._tag, self.bandwidth_delay_bytes)
        run.streams = count.count
        begun = time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ)
            for stream in list(self._warm):
                self._attach(stream, run, selector)
            run.cold = self._top_up(run.streams - len(self._warm), dial)
            try:
                self._pump(run, selector, count, dial, _Patience(quiet_seconds, stall_seconds))
                self._look(run, count, None)
            except BaseException:
                self._drop_all()
                raise
        seconds = time.monotonic() - begun
        used = len(self._warm)
        for stream in list(self._warm):
            if stream.busy:
                self._discard(stream)
        assert run.reply is not None
        return Carried(run.reply, seconds, run.lacked, run.all_sent, used, run.cold)

    # The loop

    def _pump(
        self,
        run: Run,
        selector: selectors.BaseSelector,
        count: StreamCount,
        dial: Callable[[], ssl.SSLSocket] | None,
        patience: _Patience,
    ) -> None:
        redials, error = _REDIALS, OSError("no stream could be opened")
        looked = time.monotonic()
        while run.reply is None:
            for key, events in selector.select(_LOOK_SECONDS):
                stream = key.data
                if stream is None:
                    error = self._welcome_coming(run, selector) or error
                    continue
                try:
                    self._serve(stream, run, events)
                except (OSError, StreamEnded) as broken:
                    error = broken if isinstance(broken, OSError) else OSError(str(broken))
                    selector.unregister(stream.line)
                    self._discard(stream)
                    self._ask_again(run, stream)
                    if dial is not None and redials and self._warm:
                        redials -= 1
                        self._dial(dial)
            for stream in self._warm:
                # An answer on one stream can give all of them work.
                if stream.watched != (interest := stream.interest(run)):
                    selector.modify(stream.line, interest, stream)
                    stream.watched = interest
            if self._aborted:
                raise GeofedError("UNAVAILABLE", "the parameter server is stopping")
            if not self._warm and not self._dialling and (dial is not None or run.started):
                # What the peer has is another now, if a stream was there: the caller must ask before it sends again.
                raise OSError(f"all streams have broken: {error}") if run.started else error
            patience.look(self._marks(run), last=run.waits_for_the_end)
            if time.monotonic() - looked >= _LOOK_SECONDS:
                looked = time.monotonic()
                self._look(run, count, dial)

    def _look(self, run: Run, count: StreamCount, dial: Callable[[], ssl.SSLSocket] | None) -> None:
        """Let the count of streams learn from what the kernel has seen, and open those that it wants more of."""
        look, wanted = Look(), buffer_bytes(self.bandwidth_delay_bytes, run.streams)
        for stream in self._warm:
            view = kernel_view(stream.line)
            if view is not None and stream.seen is not None:
                look.add(stream.seen, view, wanted)
            stream.seen = view
        self._note_rtt()
        if self.rtt_seconds:
            count.path(self.rtt_seconds)
        count.saw(look)
        if dial is not None and run.has_work and count.count > run.streams:
            run.cold = self._top_up(count.count - run.streams, dial)
            run.streams = count.count

    def _serve(self, stream: Stream, run: Run, events: int) -> None:
        if events & selectors.EVENT_READ:
            stream.receive(run)
        if events & selectors.EVENT_WRITE and run.reply is None:
            stream.push(run, self._count_sent)

    def _ask_again(self, run: Run, dead: Stream) -> None:
        """What was in flight on a broken stream may have arrived: another stream asks before it is sent again."""
        run.lose(dead)
        if self._warm:
            self._warm[0].offer(run)

    def _marks(self, run: Run) -> tuple[int, ...]:
        """Changes while anything moves, be it only inside the kernel."""
        return (run.moved, len(self._warm), *(unacknowledged_bytes(stream.line) for stream in self._warm))

    # Streams come and go

    def _top_up(self, lacking: int, dial: Callable[[], ssl.SSLSocket] | None) -> bool:
        if dial is not None:
            for _ in range(lacking):
                self._dial(dial)
        return lacking > 0

    def _dial(self, dial: Callable[[], ssl.SSLSocket]) -> None:
        def work() -> None:
            try:
                self._coming.put(dial())
            except (OSError, ValueError) as error:
                self._coming.put(error if isinstance(error, OSError) else OSError(str(error)))
            self._wake()

        self._dialling += 1
        self._dialler.submit(work)

    def _welcome_coming(self, run: Run, selector: selectors.BaseSelector) -> OSError | None:
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(1 << 10)
        known = len(self._warm)
        error = self._take_coming()
        for stream in self._warm[known:]:
            self._attach(stream, run, selector)
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
                self._warm.append(Stream(coming))
            self._dialling = max(0, self._dialling - 1)

    def _attach(self, stream: Stream, run: Run, selector: selectors.BaseSelector) -> None:
        stream.seen = kernel_view(stream.line)
        self._note_rtt()
        with contextlib.suppress(OSError):
            share = self.mbps / 8 * 1e6 / max(1, run.streams)
            tune(stream.line, buffer_bytes(self.bandwidth_delay_bytes, max(1, run.streams)), share)
        stream.offer(run)
        stream.watched = stream.interest(run)
        selector.register(stream.line, stream.watched, stream)

    def _note_rtt(self) -> None:
        """A stream that was opened while others filled the link has never seen the path's own round trip."""
        self.rtt_seconds = min(
            (stream.seen.least_rtt_seconds for stream in self._warm if stream.seen is not None),
            default=self.rtt_seconds,
        )

    def _discard(self, stream: Stream) -> None:
        self._warm.remove(stream)
        stream.close()

    def _drop_all(self) -> None:
        while self._warm:
            self._warm.pop().close()

    def _wake(self) -> None:
        with self._lock, contextlib.suppress(OSError):
            self._waker.send(b"!")


class _Patience:
    """Tells a slow transfer from a dead one."""

    def __init__(self, quiet_seconds: float, stall_seconds: float) -> None:
        self._quiet, self._stall = quiet_seconds, stall_seconds
        self._marks: tuple[int, ...] = ()
        self._since = time.monotonic()

    def look(self, marks: tuple[int, ...], *, last: bool) -> None:
        now = time.monotonic()
        if marks != self._marks:
            self._marks, self._since = marks, now
        elif now - self._since > (limit := self._stall if last else self._quiet):
            raise GeofedError("TRANSFER_STALLED", f"no progress for {limit:.0f} s")
