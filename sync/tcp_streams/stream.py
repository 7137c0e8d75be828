"""One non-blocking TLS connection that updates are sent over."""

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
from sync.tcp_streams.outgoing import Transfer
from sync.tcp_streams.sockets import TcpInfo
from sync.tcp_streams.wire import HEAD_BYTES, FrameHead, FrameKind, decoded, frame, parse

__all__ = ["FrameStream", "StreamEnded", "hello"]

_RECORDS_A_TURN = 32
"""TLS records of 16 KiB that one stream sends before it is the next stream's turn."""


class StreamEnded(Exception):
    """Raised when the peer has closed the connection."""


class FrameStream:
    """Queues frames, sends as much as the connection accepts, and reads the replies."""

    def __init__(self, connection: ssl.SSLSocket) -> None:
        self.connection = connection
        connection.setblocking(False)
        self.in_flight: dict[int, int] = {}
        """Chunks of the current transfer that are not acknowledged: offset and length."""
        self.watched = 0
        """Events that the selector waits for."""
        self.seen: TcpInfo | None = None
        """TCP statistics when they were last read."""
        self._outgoing: deque[memoryview] = deque()
        self._incoming = bytearray()
        self._tag = -1

    @property
    def busy(self) -> bool:
        """Whether a frame is partly sent: whatever is sent next would be taken for the rest of it."""
        return bool(self._outgoing)

    def offer(self, transfer: Transfer) -> None:
        """Send the offer of a transfer's update, which asks the peer what it has of it."""
        if self._tag != transfer.tag:
            self._tag = transfer.tag
            self.in_flight = {}
        head = FrameHead(FrameKind.OFFER, transfer.tag, len(transfer.offer), transfer.question)
        self._outgoing.append(memoryview(head.pack() + transfer.offer))
        transfer.started = True

    def interest(self, transfer: Transfer) -> int:
        """Return the events to wait for."""
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outgoing or transfer.has_work else 0)

    def push(self, transfer: Transfer, count_sent: Callable[[int], None]) -> None:
        """Send as much as the connection accepts. Raises OSError."""
        for _ in range(_RECORDS_A_TURN):
            if not self._outgoing and not self._load(transfer):
                break
            view = self._outgoing[0]
            try:
                count = self.connection.send(view)
            except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
                break
            count_sent(count)
            transfer.moved += count
            if count < len(view):
                self._outgoing[0] = view[count:]
            else:
                self._outgoing.popleft()

    def _load(self, transfer: Transfer) -> bool:
        chunk = transfer.take()
        if chunk is None:
            return False
        offset, length = chunk
        view = transfer.view[offset : offset + length]
        self.in_flight[offset] = length
        crc = 0 if transfer.unchecked else zlib.crc32(view)
        self._outgoing.append(memoryview(FrameHead(FrameKind.CHUNK, transfer.tag, length, offset, crc).pack()))
        self._outgoing.append(view)
        return True

    def receive(self, transfer: Transfer) -> None:
        """Process what has been received. Raises OSError, ``StreamEnded``, or the ``GeofedError`` that the peer
        reports."""
        with contextlib.suppress(ssl.SSLWantReadError, ssl.SSLWantWriteError):
            while data := self.connection.recv(1 << 16):
                self._incoming += data
            self._digest(transfer)
            raise StreamEnded("the peer has closed the stream")
        self._digest(transfer)

    def _digest(self, transfer: Transfer) -> None:
        while len(self._incoming) >= HEAD_BYTES:
            head = parse(self._incoming[:HEAD_BYTES])
            end = HEAD_BYTES + head.payload_bytes
            if len(self._incoming) < end:
                return
            payload = bytes(self._incoming[HEAD_BYTES:end])
            del self._incoming[:end]
            self._take(head, payload, transfer)

    def _take(self, head: FrameHead, payload: bytes, transfer: Transfer) -> None:
        if head.kind is FrameKind.FAULT:
            raise error_of(decoded(common_pb2.Error, payload))
        if head.tag != transfer.tag:
            return
        match head.kind:
            case FrameKind.REPLY:
                transfer.answered(decoded(sync_pb2.OfferReply, payload), head.offset)
            case FrameKind.ACK:
                transfer.acknowledged(self.in_flight.pop(head.offset, 0))
            case FrameKind.BAD:
                transfer.damaged(head.offset, self.in_flight.pop(head.offset, 0))
            case _:
                raise GeofedError("FRAME_INVALID", f"unexpected frame from a receiver: {head.kind.name}")

    def close(self) -> None:
        """Close the connection; errors of the socket are ignored."""
        with contextlib.suppress(OSError):
            self.connection.close()


def hello(job: str, *, collects: bool, ticket: bytes = b"") -> bytes:
    """Return the first frame on a stream, sent by the side that opened it."""
    message = sync_pb2.BulkHello(job=job, collects=collects, ticket=ticket)
    return frame(FrameKind.HELLO, 0, message.SerializeToString())
