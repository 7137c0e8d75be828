"""Which bytes of an update are still to be sent, and by which stream. Uses no sockets and no clock."""

from __future__ import annotations

from typing import Protocol

from geofed_pb.errors import GeofedError
from geofed_pb.v1 import sync_pb2
from sync.tcp_streams.ranges import Ranges
from sync.tcp_streams.stream_count import chunk_bytes

__all__ = ["Content", "Transfer", "ranges_of"]

_MAX_DAMAGED_CHUNKS = 8
"""A transfer fails when more chunks than this arrive damaged."""


class Content(Protocol):
    """The bytes of an update: memory, or an object that reads them piece by piece."""

    def __len__(self) -> int: ...

    def __getitem__(self, piece: slice, /) -> memoryview: ...


def ranges_of(reply: sync_pb2.OfferReply, size: int) -> tuple[tuple[int, int], ...]:
    """Return the ranges of an update of ``size`` bytes that a peer has. Raises ``GeofedError("FRAME_INVALID")``."""
    found = tuple((item.begin, item.end) for item in reply.have)
    if any(end > size for _, end in found):
        raise GeofedError("FRAME_INVALID", f"the peer states that it has bytes beyond the {size} of an update")
    return found


class _Stream(Protocol):
    in_flight: dict[int, int]


class Transfer:
    """The transfer of one update to one peer."""

    def __init__(
        self,
        manifest: sync_pb2.UpdateManifest,
        view: Content,
        ticket: bytes,
        have: tuple[tuple[int, int], ...] | None,
        tag: int,
        bandwidth_delay_bytes: float,
        unchecked: bool = False,
    ) -> None:
        self.tag, self.view = tag, view
        self.unchecked = unchecked
        """Whether the peer needs no CRC of a chunk."""
        self.offer = sync_pb2.BulkOffer(manifest=manifest, ticket=ticket).SerializeToString()
        self.question = 0
        """Number of the last request that asked which bytes the peer has."""
        self.streams = 1
        """Streams among which the update is divided."""
        self.cold = False
        """Whether a stream was opened for this update."""
        self.moved = 0
        """Counter that increases whenever anything is sent or acknowledged."""
        self.started = False
        """Whether the update was offered on any stream."""
        self.reply: sync_pb2.OfferReply | None = None
        """The peer's last reply, once nothing is left to do."""
        self._bdp = bandwidth_delay_bytes
        self._assigned = Ranges(have or ())
        """Ranges that the peer has or that a stream has taken."""
        self._lost = Ranges()
        """Ranges that were in flight on broken streams."""
        self._lost_at = 0
        """Number of the first request whose answer tells which of these have arrived."""
        self._bad = 0
        self._may_send = have is not None
        self.lacked = len(view) - self._assigned.total
        self._acknowledged = self._assigned.total

    @property
    def waits_for_the_end(self) -> bool:
        """Whether all bytes are acknowledged, and only the peer's last reply is missing."""
        return self._acknowledged >= len(self.view)

    @property
    def all_sent(self) -> bool:
        """Whether all bytes have been sent or are in flight; if not, the peer got the rest elsewhere."""
        return self._assigned.total >= len(self.view)

    @property
    def has_work(self) -> bool:
        """Whether there are bytes for a stream to take."""
        return self._may_send and self._assigned.total < len(self.view) and self.reply is None

    def take(self) -> tuple[int, int] | None:
        """Assign the next chunk to a stream: (offset, length), or None if there is none."""
        if not self.has_work:
            return None
        begin, end = self._assigned.missing(0, len(self.view))[0]
        left = len(self.view) - self._assigned.total
        length = min(chunk_bytes(left, self.streams, self._bdp), end - begin)
        self._assigned.add(begin, begin + length)
        return begin, length

    def acknowledged(self, length: int) -> None:
        """Record that the peer has written a chunk."""
        self.moved += 1
        self._acknowledged += length

    def damaged(self, offset: int, length: int) -> None:
        """Record that a chunk must be sent again. Raises ``GeofedError("DIGEST_MISMATCH")`` if this happens too
        often."""
        self._bad += 1
        if self._bad > _MAX_DAMAGED_CHUNKS:
            raise GeofedError("DIGEST_MISMATCH", f"{self._bad} chunks arrived damaged")
        self._assigned.remove(offset, offset + length)

    def lose(self, stream: _Stream) -> None:
        """Record that a stream has broken. What it had in flight is sent again only after the peer has told what it
        has."""
        for offset, length in stream.in_flight.items():
            self._lost.add(offset, offset + length)
        self.question += 1
        self._lost_at = self.question

    def answered(self, reply: sync_pb2.OfferReply, question: int) -> None:
        """Process the peer's answer to the request number ``question``. Raises ``GeofedError("FRAME_INVALID")``."""
        self.moved += 1
        self.unchecked = reply.unchecked
        if reply.verdict != sync_pb2.OfferReply.VERDICT_WANT:
            self.reply = reply
            return
        present = Ranges(ranges_of(reply, len(self.view)))
        if not self._may_send:
            self._may_send = True
            self.lacked = len(self.view) - present.total
            self._acknowledged = present.total
        for begin, end in present:
            self._assigned.add(begin, end)
        if question >= self._lost_at:
            for begin, end in self._lost:
                for first, last in present.missing(begin, end):
                    self._assigned.remove(first, last)
                self._acknowledged += (end - begin) - sum(b - a for a, b in present.missing(begin, end))
            self._lost = Ranges()
