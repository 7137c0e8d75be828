"""Connections between servers of two regions, and the protobuf form of a manifest."""

from __future__ import annotations

import sys

import grpc.aio

from geofed_pb.rpc import channel, region_name
from geofed_pb.v1 import sync_pb2
from sync.file_transfer.manifest import Manifest, PeerAddress
from sync.tcp_streams.sockets import Tls

__all__ = ["manifest_of", "manifest_to_proto", "open_channel"]


def manifest_to_proto(job: str, manifest: Manifest) -> sync_pb2.UpdateManifest:
    """Return the protobuf message of a manifest."""
    return sync_pb2.UpdateManifest(
        job=job,
        region=manifest.region,
        epoch=manifest.epoch,
        sequence=manifest.sequence,
        digest=manifest.digest,
        total_bytes=manifest.total_bytes,
        weight=manifest.weight,
        seen=dict(manifest.seen),
        last=manifest.last,
        stretch=manifest.stretch,
        settled=manifest.settled,
        ends=manifest.ends,
        first=manifest.first,
        takes_sums=manifest.takes_sums,
        round_seconds=manifest.round_seconds,
        signature=bytes.fromhex(manifest.signature),
        certificate_pem=manifest.certificate.encode(),
    )


def manifest_of(proto: sync_pb2.UpdateManifest) -> Manifest:
    """Return the manifest in a protobuf message of a peer, whose numbers the caller must check."""
    return Manifest(
        proto.region,
        proto.epoch,
        proto.sequence,
        proto.digest,
        proto.total_bytes,
        proto.weight,
        tuple(sorted(proto.seen.items())),
        proto.last,
        max(proto.stretch, 1),
        proto.settled,
        proto.ends,
        proto.first,
        proto.takes_sums,
        proto.round_seconds,
        proto.signature.hex(),
        # All updates of a region have the same certificate.
        sys.intern(proto.certificate_pem.decode("ascii", errors="replace")),
    )


def open_channel(peer: PeerAddress, tls: Tls) -> grpc.aio.Channel:
    """Open a channel to a peer's exchange port."""
    return channel(
        peer.address,
        ca_pem=tls.ca_pem,
        name=region_name(peer.region),
        certificate_pem=tls.certificate_pem,
        key_pem=tls.key_pem,
    )
