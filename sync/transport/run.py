"""What is still to be sent of one update, over whichever streams there are. No sockets, no clock."""

from __future__ import annotations

from typing import Protocol

from geofed_pb.errors import GeofedError
from geofed_pb.v1 import sync_pb2
from sync.transport.ranges import Ranges
from sync.transport.streams import chunk_bytes

__all__ = ["Content", "Run"]

_MOST_BAD_CHUNKS = 8


class Content(Protocol):
    """All bytes of an update: memory, or what reads them piece by piece."""

    def __len__(self) -> int: ...

    def __getitem__(self, piece: slice, /) -> memoryview: ...


class _Stream(Protocol):
    in_flight: dict[int, int]


class Run:
    """One update on its way to one peer."""

    def __init__(
        self,
        manifest: sync_pb2.UpdateManifest,
        view: Content,
        ticket: bytes,
        have: tuple[tuple[int, int], ...] | None,
        tag: int,
        bandwidth_delay_bytes: float,
    ) -> None:
        self.tag, self.view = tag, view
        self.offer = sync_pb2.BulkOffer(manifest=manifest, ticket=ticket).SerializeToString()
        self.question = 0
        """Number of the last question what the peer has."""
        self.streams = 1
        """That share the update."""
        self.cold = False
        """A stream was opened for it."""
        self.moved = 0
        """Changes while anything is sent or acknowledged."""
        self.started = False
        """A stream has been there."""
        self.reply: sync_pb2.OfferReply | None = None
        """The peer's last word, once there is nothing more to do."""
        self._bdp = bandwidth_delay_bytes
        self._gone = Ranges(have or ())
        """What needs not be taken by a stream any more."""
        self._lost = Ranges()
        self._lost_at = 0
        self._bad = 0
        self._may_send = have is not None
        self.lacked = len(view) - self._gone.total
        self._acknowledged = self._gone.total

    @property
    def waits_for_the_end(self) -> bool:
        """All is there; the peer makes it durable."""
        return self._acknowledged >= len(self.view)

    @property
    def all_sent(self) -> bool:
        """Or on its way; else the peer has found the rest elsewhere."""
        return self._gone.total >= len(self.view)

    @property
    def has_work(self) -> bool:
        return self._may_send and self._gone.total < len(self.view) and self.reply is None

    def take(self) -> tuple[int, int] | None:
        """(offset, length) of the next chunk, for a stream to send now."""
        if not self.has_work:
            return None
        begin, end = self._gone.missing(0, len(self.view))[0]
        left = len(self.view) - self._gone.total
        length = min(chunk_bytes(left, self.streams, self._bdp), end - begin)
        self._gone.add(begin, begin + length)
        return begin, length

    def acknowledged(self, length: int) -> None:
        self.moved += 1
        self._acknowledged += length

    def damaged(self, offset: int, length: int) -> None:
        """A chunk must be sent again; raises ``GeofedError`` when that happens too often."""
        self._bad += 1
        if self._bad > _MOST_BAD_CHUNKS:
            raise GeofedError("DIGEST_MISMATCH", f"{self._bad} chunks arrived damaged")
        self._gone.remove(offset, offset + length)

    def lose(self, stream: _Stream) -> None:
        """A stream has broken; what it had in flight waits for the answer to a new question."""
        for offset, length in stream.in_flight.items():
            self._lost.add(offset, offset + length)
        self.question += 1
        self._lost_at = self.question

    def answered(self, reply: sync_pb2.OfferReply, question: int) -> None:
        """The peer has said what it has."""
        self.moved += 1
        if reply.verdict != sync_pb2.OfferReply.VERDICT_WANT:
            self.reply = reply
            return
        there = Ranges((item.begin, item.end) for item in reply.have)
        if not self._may_send:
            self._may_send = True
            self.lacked = len(self.view) - there.total
            self._acknowledged = there.total
        for begin, end in there:
            self._gone.add(begin, end)
        if question >= self._lost_at:
            for begin, end in self._lost:
                for first, last in there.missing(begin, end):
                    self._gone.remove(first, last)
                self._acknowledged += (end - begin) - sum(b - a for a, b in there.missing(begin, end))
            self._lost = Ranges()
