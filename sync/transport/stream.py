"""One TLS connection that updates leave through, without blocking."""

from __future__ import annotations

import contextlib
import selectors
import ssl
import zlib
from collections import deque
from collections.abc import Callable

from geofed_pb.errors import GeofedError
from geofed_pb.rpc import error_of
from geofed_pb.v1 import common_pb2, sync_pb2
from sync.transport.run import Run
from sync.transport.sockets import KernelView
from sync.transport.wire import HEAD_BYTES, Frame, Kind, frame, parse

__all__ = ["Stream", "StreamEnded", "hello"]

_RECORDS_A_TURN = 32
"""16 KiB each: after so many it is the next stream's turn."""


class StreamEnded(Exception):
    """The peer has closed the connection."""


class Stream:
    """Queues frames, sends them as the connection takes them, and reads the answers."""

    def __init__(self, line: ssl.SSLSocket) -> None:
        self.line = line
        line.setblocking(False)
        self.in_flight: dict[int, int] = {}
        """Chunks of the present run that are not acknowledged: offset and length."""
        self.watched = 0
        """Events that a selector looks for on it."""
        self.seen: KernelView | None = None
        """At the last look."""
        self._outgoing: deque[memoryview] = deque()
        self._incoming = bytearray()
        self._tag = -1

    @property
    def busy(self) -> bool:
        """In the middle of a frame: what comes next would be taken for its rest."""
        return bool(self._outgoing)

    def offer(self, run: Run) -> None:
        """Tell of the run's update, and ask what the peer has of it."""
        if self._tag != run.tag:
            self._tag = run.tag
            self.in_flight = {}
        head = Frame(Kind.OFFER, run.tag, len(run.offer), run.question)
        self._outgoing.append(memoryview(head.pack() + run.offer))
        run.started = True

    def interest(self, run: Run) -> int:
        """What to wait for."""
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outgoing or run.has_work else 0)

    def push(self, run: Run, count_sent: Callable[[int], None]) -> None:
        """Send what the connection takes. Raises OSError."""
        for _ in range(_RECORDS_A_TURN):
            if not self._outgoing and not self._load(run):
                break
            view = self._outgoing[0]
            try:
                count = self.line.send(view)
            except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
                break
            count_sent(count)
            run.moved += count
            if count < len(view):
                self._outgoing[0] = view[count:]
            else:
                self._outgoing.popleft()

    def _load(self, run: Run) -> bool:
        chunk = run.take()
        if chunk is None:
            return False
        offset, length = chunk
        view = run.view[offset : offset + length]
        self.in_flight[offset] = length
        self._outgoing.append(memoryview(Frame(Kind.CHUNK, run.tag, length, offset, zlib.crc32(view)).pack()))
        self._outgoing.append(view)
        return True

    def receive(self, run: Run) -> None:
        """Read what is there; raises OSError, StreamEnded, or the ``GeofedError`` that the peer has told."""
        with contextlib.suppress(ssl.SSLWantReadError, ssl.SSLWantWriteError):
            while data := self.line.recv(1 << 16):
                self._incoming += data
            self._digest(run)
            raise StreamEnded("the peer has closed the stream")
        self._digest(run)

    def _digest(self, run: Run) -> None:
        while len(self._incoming) >= HEAD_BYTES:
            head = parse(self._incoming[:HEAD_BYTES])
            end = HEAD_BYTES + head.payload_bytes
            if len(self._incoming) < end:
                return
            payload = bytes(self._incoming[HEAD_BYTES:end])
            del self._incoming[:end]
            self._take(head, payload, run)

    def _take(self, head: Frame, payload: bytes, run: Run) -> None:
        if head.kind is Kind.FAULT:
            raise error_of(common_pb2.Error.FromString(payload))
        if head.tag != run.tag:
            return
        match head.kind:
            case Kind.REPLY:
                run.answered(sync_pb2.OfferReply.FromString(payload), head.offset)
            case Kind.ACK:
                run.acknowledged(self.in_flight.pop(head.offset, 0))
            case Kind.BAD:
                run.damaged(head.offset, self.in_flight.pop(head.offset, 0))
            case _:
                raise GeofedError("FRAME_INVALID", f"a receiver sent {head.kind.name}")

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.line.close()


def hello(job: str, *, collects: bool, ticket: bytes = b"") -> bytes:
    """What the side that dialled says first."""
    message = sync_pb2.BulkHello(job=job, collects=collects, ticket=ticket)
    return frame(Kind.HELLO, 0, message.SerializeToString())
