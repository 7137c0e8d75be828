"""Frames of a bulk stream, inside TLS: a fixed head and a payload.

::

    kind   u8     kind of the frame
    (3 bytes, zero)
    tag    u32    the sender's number of the transfer; replies repeat it, so that late ones can be recognised
    length u32    payload bytes; in an ACK: bytes of the chunk
    offset u64    offset of a chunk in its update
    crc    u32    CRC-32 of a chunk for a receiver that asks for it (`OfferReply.unchecked`), else 0

The side that opened the stream sends HELLO. The side that sends updates sends OFFER on each stream, then CHUNKs. The
receiver answers each OFFER with REPLY and each CHUNK with ACK or BAD, and sends one more REPLY when the update is
durable. FAULT ends a stream.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeVar

from google.protobuf.message import Message

from geofed_pb.errors import GeofedError
from geofed_pb.files.decoding import Undecodable, decoding

__all__ = ["HEAD_BYTES", "MAX_CHUNK_BYTES", "FrameHead", "FrameKind", "decoded", "frame", "parse"]

_Kind = TypeVar("_Kind", bound=Message)

_HEAD = struct.Struct(">B3xIIQI")
HEAD_BYTES = _HEAD.size
MAX_CHUNK_BYTES = 16 << 20
"""Largest chunk that a receiver accepts."""
_MAX_MESSAGE_BYTES = 1 << 20
"""Largest other payload that is accepted."""


class FrameKind(IntEnum):
    """Kind of a frame."""

    HELLO = 1
    """Carries a `BulkHello`."""
    OFFER = 2
    """Carries a `BulkOffer`."""
    CHUNK = 3
    REPLY = 4
    """Carries an `OfferReply`."""
    ACK = 5
    """The receiver has written the chunk."""
    BAD = 6
    """The chunk arrived damaged and must be sent again."""
    FAULT = 7
    """Carries an `Error`; it is the last frame."""


@dataclass(frozen=True)
class FrameHead:
    """The head of a frame."""

    kind: FrameKind
    tag: int
    length: int
    offset: int = 0
    crc: int = 0

    @property
    def payload_bytes(self) -> int:
        """Number of payload bytes after the head."""
        return 0 if self.kind in (FrameKind.ACK, FrameKind.BAD) else self.length

    def pack(self) -> bytes:
        """Return the bytes of the head."""
        return _HEAD.pack(self.kind, self.tag, self.length, self.offset, self.crc)


def frame(kind: FrameKind, tag: int, payload: bytes) -> bytes:
    """Return the bytes of a frame that carries a message."""
    return FrameHead(kind, tag, len(payload)).pack() + payload


def parse(head: bytes | bytearray | memoryview) -> FrameHead:
    """Read a head. Raises ``GeofedError("FRAME_INVALID")`` if it is invalid, before memory for its payload is
    allocated."""
    kind, tag, length, offset, crc = _HEAD.unpack(head)
    largest = MAX_CHUNK_BYTES if kind in (FrameKind.CHUNK, FrameKind.ACK, FrameKind.BAD) else _MAX_MESSAGE_BYTES
    if not 1 <= kind <= len(FrameKind) or length > largest:
        raise GeofedError("FRAME_INVALID", f"a bulk stream carries a frame of kind {kind} and {length} bytes")
    return FrameHead(FrameKind(kind), tag, length, offset, crc)


def decoded(kind: type[_Kind], payload: bytes) -> _Kind:
    """Read the message that a frame carries. Raises ``GeofedError("FRAME_INVALID")``."""
    message: _Kind | Undecodable = decoding(kind.FromString)(payload)
    if isinstance(message, Undecodable):
        raise GeofedError("FRAME_INVALID", f"a bulk stream carries an invalid {kind.__name__}: {message.reason}")
    return message
