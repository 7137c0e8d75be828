"""A member of a job that sends whatever it likes: its identity is real, and its manifests are signed by its key."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
from support.server_process import JOB, LAYOUT, Server

from geofed_pb.rpc import CHUNK_BYTES
from geofed_pb.v1 import sync_pb2, sync_pb2_grpc
from sync import framing
from sync.codec import codec_named
from sync.file_transfer.signing import sign
from sync.layout import Vector
from sync.tcp_streams.sockets import Tls

__all__ = ["HostilePeer", "frame_of"]


def frame_of(change: Vector, codec: str = "fp32", **facts: float) -> bytes:
    """Encode a change as an honest region does; ``facts`` are added to the frame."""
    method = codec_named(codec)
    return b"".join(framing.encode(method.encode(change), {"codec": method.mark, **facts}))


class HostilePeer:
    """Makes and sends updates of one region."""

    def __init__(self, region: str, identity: Tls) -> None:
        self.region, self.identity = region, identity

    def manifest(self, data: bytes, sequence: int = 1, *, signer: Tls | None = None, **changed: Any) -> Any:
        """Return a signed manifest; ``signer`` signs in place of this region, and ``changed`` replaces fields."""
        fields = {
            "job": JOB, "region": self.region, "epoch": 1, "sequence": sequence, "digest": framing.digest_of([data]),
            "total_bytes": len(data), "weight": 10.0, "stretch": 1,
        } | changed  # fmt: skip
        proto = sync_pb2.UpdateManifest(**fields)
        sign(proto, signer or self.identity)
        return proto

    def offer(self, server: Server, proto: Any) -> sync_pb2.OfferReply:
        """Offer an update. Raises grpc.RpcError."""
        with server.exchange(self.identity) as line:
            return sync_pb2_grpc.ExchangeStub(line).Offer(proto, timeout=10)

    def send(self, server: Server, proto: Any, data: bytes) -> sync_pb2.OfferReply:
        """Send an update without an offer. Raises grpc.RpcError."""
        with server.exchange(self.identity) as line:
            return self.send_over(line, proto, data)

    def send_over(self, line: grpc.Channel, proto: Any, data: bytes) -> sync_pb2.OfferReply:
        """The same over an open connection."""
        return sync_pb2_grpc.ExchangeStub(line).Send(_chunks(proto, data), timeout=10)

    def update(self, push: float, codec: str = "fp32") -> bytes:
        """Return the frame of an update that adds ``push`` to all coordinates."""
        return frame_of(np.full(LAYOUT.size, push, np.float32), codec)


def _chunks(proto: Any, data: bytes) -> Iterator[sync_pb2.UpdateChunk]:
    for offset in range(0, max(1, len(data)), CHUNK_BYTES):
        head = None if offset else proto
        yield sync_pb2.UpdateChunk(manifest=head, offset=offset, data=data[offset : offset + CHUNK_BYTES])
