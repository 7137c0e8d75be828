"""Listening ports of a region's servers, with TLS that follows the renewal of the certificate."""

from __future__ import annotations

from collections.abc import Callable

import grpc
import grpc.aio

from geofed_pb.errors import GeofedError
from geofed_pb.rpc import reloading_credentials
from sync.tcp_streams.sockets import Tls

__all__ = ["credentials", "listen"]


def credentials(identity: Callable[[], Tls], *, mutual: bool) -> grpc.ServerCredentials:
    """Return server credentials that use a renewed certificate for all connections made after the renewal.

    ``mutual``: clients must show a certificate of the same CA.
    """

    def load() -> tuple[bytes, bytes, bytes | None]:
        tls = identity()
        return tls.key_pem, tls.certificate_pem, tls.ca_pem if mutual else None

    return reloading_credentials(load)


def listen(server: grpc.aio.Server, address: str, current: grpc.ServerCredentials) -> int:
    """Listen on an address; return the port. Raises ``GeofedError("PORT_IN_USE")`` if it is in use."""
    try:
        return server.add_secure_port(address, current)
    except RuntimeError:
        raise GeofedError("PORT_IN_USE", f"cannot listen on {address}") from None
