"""Listening ports of a region's servers, with TLS that follows the renewal of the certificate."""

from __future__ import annotations

from collections.abc import Callable

import grpc
import grpc.aio

from geofed_pb.errors import GeofedError
from sync.transport.sockets import Tls

__all__ = ["credentials", "listen"]


def credentials(identity: Callable[[], Tls], *, mutual: bool) -> grpc.ServerCredentials:
    """Return server credentials that use a renewed certificate for all connections made after the renewal.

    ``mutual``: clients must show a certificate of the same CA.
    """
    current: list[Tls] = []

    def load() -> grpc.ServerCertificateConfiguration:
        current[:] = [identity()]
        pair = (current[0].key_pem, current[0].certificate_pem)
        return grpc.ssl_server_certificate_configuration([pair], current[0].ca_pem if mutual else None)

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        return load() if identity() != current[0] else None

    # The type stubs don't know that None means "unchanged".
    return grpc.dynamic_ssl_server_credentials(load(), fetch, require_client_authentication=mutual)  # type: ignore[arg-type]


def listen(server: grpc.aio.Server, address: str, current: grpc.ServerCredentials) -> int:
    """Listen on an address; return the port. Raises ``GeofedError("PORT_IN_USE")`` if it is in use."""
    try:
        return server.add_secure_port(address, current)
    except RuntimeError:
        raise GeofedError("PORT_IN_USE", f"cannot listen on {address}") from None
