"""What passes over a bulk stream, inside TLS: frames of a fixed head and a payload.

::

    kind   u8     what it is
    (3 bytes, zero)
    tag    u32    the sender's number of the transfer; answers repeat it, so that late ones are told apart
    length u32    bytes of payload; in an ACK: of the chunk
    offset u64    of a chunk in its update
    crc    u32    CRC-32 of a chunk

The side that sends updates says HELLO or hears it, then OFFER on each stream, then CHUNKs; the other side answers
REPLY to each OFFER, ACK or BAD to each CHUNK, and REPLY once more when the update is durable. FAULT ends a stream.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

from geofed_pb.errors import GeofedError

__all__ = ["HEAD_BYTES", "LARGEST_CHUNK_BYTES", "Frame", "Kind", "frame", "parse"]

_HEAD = struct.Struct(">B3xIIQI")
HEAD_BYTES = _HEAD.size
LARGEST_CHUNK_BYTES = 16 << 20
"""A receiver refuses longer ones."""
_LARGEST_MESSAGE_BYTES = 1 << 20


class Kind(IntEnum):
    """What a frame is."""

    HELLO = 1
    """A `BulkHello`."""
    OFFER = 2
    """A `BulkOffer`."""
    CHUNK = 3
    REPLY = 4
    """An `OfferReply`."""
    ACK = 5
    """The chunk is written."""
    BAD = 6
    """The chunk was damaged: send it again."""
    FAULT = 7
    """An `Error`; nothing follows."""


@dataclass(frozen=True)
class Frame:
    """The head of a frame."""

    kind: Kind
    tag: int
    length: int
    offset: int = 0
    crc: int = 0

    @property
    def payload_bytes(self) -> int:
        """How many bytes follow the head."""
        return 0 if self.kind in (Kind.ACK, Kind.BAD) else self.length

    def pack(self) -> bytes:
        return _HEAD.pack(self.kind, self.tag, self.length, self.offset, self.crc)


def frame(kind: Kind, tag: int, payload: bytes) -> bytes:
    """A whole frame that carries a message."""
    return Frame(kind, tag, len(payload)).pack() + payload


def parse(head: bytes | bytearray | memoryview) -> Frame:
    """Read a head; raises ``GeofedError("FRAME_INVALID")`` where it is none, before memory is taken for its payload."""
    kind, tag, length, offset, crc = _HEAD.unpack(head)
    largest = LARGEST_CHUNK_BYTES if kind in (Kind.CHUNK, Kind.ACK, Kind.BAD) else _LARGEST_MESSAGE_BYTES
    if not 1 <= kind <= len(Kind) or length > largest:
        raise GeofedError("FRAME_INVALID", f"a bulk stream carries a frame of kind {kind} and {length} bytes")
    return Frame(Kind(kind), tag, length, offset, crc)
