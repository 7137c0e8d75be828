"""How a server of this region listens: its port, and TLS that follows the renewal of its certificate."""

from __future__ import annotations

from collections.abc import Callable

import grpc
import grpc.aio

from geofed_pb.errors import GeofedError
from sync.transport.sockets import Tls

__all__ = ["credentials", "listen"]


def credentials(identity: Callable[[], Tls], *, mutual: bool) -> grpc.ServerCredentials:
    """TLS that shows the renewed certificate to everyone who connects after the renewal."""
    shown: list[Tls] = []

    def load() -> grpc.ServerCertificateConfiguration:
        shown[:] = [identity()]
        pair = (shown[0].key_pem, shown[0].certificate_pem)
        return grpc.ssl_server_certificate_configuration([pair], shown[0].ca_pem if mutual else None)

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        return load() if identity() != shown[0] else None

    # The stubs leave out that None means "as before".
    return grpc.dynamic_ssl_server_credentials(load(), fetch, require_client_authentication=mutual)  # type: ignore[arg-type]


def listen(server: grpc.aio.Server, address: str, shown: grpc.ServerCredentials) -> int:
    """Returns the port; raises ``GeofedError("PORT_IN_USE")``."""
    try:
        return server.add_secure_port(address, shown)
    except RuntimeError:
        raise GeofedError("PORT_IN_USE", f"cannot listen on {address}") from None
