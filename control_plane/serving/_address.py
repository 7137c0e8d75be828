"""Parse and bind listen addresses."""

from __future__ import annotations

import errno
import socket

from geofed_pb.address import bracketed, joined
from geofed_pb.errors import GeofedError


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of "host:port". Raises ``GeofedError("CONFIG_INVALID")``."""
    host, colon, port = address.rpartition(":")
    invalid = f"{address!r} is not a valid address; write it like 127.0.0.1:7443 or [::1]:7443"
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise GeofedError("CONFIG_INVALID", invalid)
    try:
        return bracketed(host).strip("[]"), int(port)
    except ValueError:
        raise GeofedError("CONFIG_INVALID", invalid) from None


def bound_socket(host: str, port: int) -> socket.socket:
    """Return a bound TCP socket. Raises ``GeofedError``: PORT_IN_USE, CONFIG_INVALID."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
    except socket.gaierror as error:
        raise GeofedError("CONFIG_INVALID", f"cannot listen on {joined(host, port)}: {error.strerror}") from None
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(target)
    except OSError as error:
        bound.close()
        code = "PORT_IN_USE" if error.errno == errno.EADDRINUSE else "CONFIG_INVALID"
        raise GeofedError(code, f"cannot listen on {joined(host, port)}: {error.strerror}") from None
    return bound


def advertised_host(advertised: str) -> str:
    """Return the host of "host" or "host:port"."""
    if advertised.count(":") == 1 or "]:" in advertised:
        return split_address(advertised)[0]
    return advertised.strip("[]")
