"""TLS sockets between parameter servers: identities, socket buffers for links with a large bandwidth-delay product, and
the kernel's TCP statistics."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import ssl
import struct
import termios
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from geofed_pb.errors import GeofedError
from geofed_pb.rpc import region_in, region_name
from sync.tcp_streams.revoked import RevokedSerials

__all__ = [
    "DIAL_FAULT",
    "TcpInfo",
    "Tls",
    "accept_tls",
    "buffer_bytes",
    "dial",
    "listen",
    "region_of",
    "require_unrevoked",
    "serial_of",
    "tcp_info",
    "tune",
    "unacknowledged_bytes",
]

DIAL_FAULT = "dial fault"
"""Begins log lines that say what a connection to another region met. They are for operators alone: a region that gives
the address of a third machine must not learn from a job's log what answers there."""
_KEEPALIVE_SECONDS = 10
"""Idle time before TCP keepalive probes are sent."""
_MIN_BUFFER_BYTES = 4 << 20
"""Smallest send buffer of a stream."""
_MAX_BUFFER_BYTES = 64 << 20
"""Largest send buffer of a stream."""
_UNSENT_SECONDS = 0.03
"""The kernel holds unsent data for about this time. Little of it means that a chunk is assigned to a stream only
shortly before it can be sent, so that faster streams take more chunks; but there must be enough for as long as the
sending thread may be delayed."""
_MIN_UNSENT_BYTES = 256 << 10
"""Lower bound of the unsent data that the kernel holds."""
_MAX_UNSENT_BYTES = 4 << 20
"""Upper bound of the unsent data that the kernel holds."""
_TCP_INFO = struct.Struct("=68xI28xI44xI4xI8xQQQ")
"""Fields of Linux's struct tcp_info: rtt, total_retrans, min_rtt, data_segs_out, busy_time, rwnd_limited,
sndbuf_limited."""
_SO_SNDBUFFORCE = 32
"""Socket option that Python's socket module lacks: set the send buffer beyond the host's limit."""


@dataclass(frozen=True)
class Tls:
    """The TLS identity of a parameter server, and the CA that it trusts."""

    ca_pem: bytes
    certificate_pem: bytes
    key_pem: bytes
    revoked: RevokedSerials = field(default_factory=RevokedSerials, compare=False)
    """Certificates that are refused although the CA has signed them."""


@lru_cache(maxsize=8)
def _context(tls: Tls, *, server: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=tls.ca_pem.decode())
    with _unnamed_file(tls.certificate_pem) as certificate, _unnamed_file(tls.key_pem) as key:
        context.load_cert_chain(certificate, key)
    if server:
        context.num_tickets = 0
    return context


@contextlib.contextmanager
def _unnamed_file(content: bytes) -> Iterator[str]:
    """Provide bytes in memory as a file path, since the ssl module reads certificates from files only."""
    file = os.memfd_create("pem", os.MFD_CLOEXEC)
    try:
        os.write(file, content)
        yield f"/proc/self/fd/{file}"
    finally:
        os.close(file)


def dial(address: tuple[str, int], region: str, tls: Tls, timeout: float) -> ssl.SSLSocket:
    """Connect to a region's bulk port. Raises OSError, of which ssl.SSLError is a subclass; ``GeofedError`` if its
    certificate is revoked."""
    if not 0 < address[1] < 1 << 16:
        raise OSError(errno.EADDRNOTAVAIL, f"{address[1]} is no port")
    # Wrapping takes the connection out of `plain`, which then closes nothing.
    with socket.create_connection(address, timeout) as plain:
        tune(plain)
        return _valid(_context(tls, server=False).wrap_socket(plain, server_hostname=region_name(region)), tls)


def require_unrevoked(address: str, region: str, tls: Tls, timeout: float) -> None:
    """Raise ``GeofedError("FORBIDDEN")`` if what a region shows at a host:port is a revoked certificate. An address
    that cannot be reached shows none."""
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError):
        dial((host.strip("[]"), int(port)), region, tls, timeout).close()


def _valid(connection: ssl.SSLSocket, tls: Tls) -> ssl.SSLSocket:
    try:
        tls.revoked.require(serial_of(connection), region_of(connection))
    except GeofedError:
        connection.close()
        raise
    return connection


def listen(host: str, port: int) -> socket.socket:
    """Listen on an address. Raises OSError if the port is in use."""
    bare = host.strip("[]")
    family = socket.AF_INET6 if ":" in bare else socket.AF_INET
    return socket.create_server((bare, port), family=family, backlog=64)


def accept_tls(plain: socket.socket, tls: Tls, timeout: float) -> ssl.SSLSocket:
    """Accept a TLS connection, as the server's side of `dial`. Raises OSError, also if the client shows no valid
    certificate; ``GeofedError`` if the certificate is revoked."""
    plain.settimeout(timeout)
    tune(plain)
    return _valid(_context(tls, server=True).wrap_socket(plain, server_side=True), tls)


def region_of(connection: ssl.SSLSocket) -> str:
    """Return the region that the peer's certificate is for, or ""."""
    names: Any = (connection.getpeercert() or {}).get("subjectAltName", ())
    return region_in(value for kind, value in names if kind == "DNS") or ""


def serial_of(connection: ssl.SSLSocket) -> str:
    """Return the serial number of the peer's certificate in hexadecimal."""
    return f"{int(str((connection.getpeercert() or {}).get('serialNumber', '0')), 16):x}"


def tune(connection: socket.socket, send_buffer_bytes: int = 0, bytes_per_second: float = 0.0) -> None:
    """Set socket options: keepalive for NATs, a send buffer for what is in flight, and a limit of unsent data.

    The receive buffer is left to the kernel, whose autotuning allows larger sizes than a process may set.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", _KEEPALIVE_SECONDS), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        unsent = min(max(int(bytes_per_second * _UNSENT_SECONDS), _MIN_UNSENT_BYTES), _MAX_UNSENT_BYTES)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, unsent)
    if send_buffer_bytes:
        # The kernel doubles the requested size, for its own bookkeeping.
        send_buffer_bytes //= 2
        try:
            # This may exceed the host's limit for unprivileged processes, if we have the capability.
            connection.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, send_buffer_bytes)
        except OSError:
            if _setting("core/wmem_max") >= min(send_buffer_bytes, _setting("ipv4/tcp_wmem") // 2):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
            # Otherwise no size is set: the kernel's autotuning, which a fixed size would disable, allows more.


def _setting(name: str) -> int:
    """Return a setting of the host's network stack, its last number if there are several; 0 if it cannot be read."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/sys/net", name).read_text().split()[-1])
    return 0


def buffer_bytes(bandwidth_delay_bytes: float, streams: int) -> int:
    """Return the size in bytes of a stream's send buffer: its share of twice the bandwidth-delay product, 4 to 64 MiB.

    A larger one would only fill the queue in front of the link, until it drops packets.
    """
    return int(min(max(2 * bandwidth_delay_bytes / streams, _MIN_BUFFER_BYTES), _MAX_BUFFER_BYTES))


@dataclass(frozen=True)
class TcpInfo:
    """The kernel's TCP statistics of a connection since it was opened."""

    rtt_seconds: float
    """Smoothed round-trip time, including queues."""
    min_rtt_seconds: float
    """Shortest round-trip time: that of the path without queues."""
    segments: int
    """Segments with data that were sent, including retransmissions."""
    resent: int
    busy_seconds: float
    """Time with data to send."""
    window_seconds: float
    """Part of it in which the peer's receive window limited the connection."""
    buffer_seconds: float
    """Part of it in which the send buffer limited the connection."""
    buffer_bytes: int
    """Size of the send buffer."""


def tcp_info(connection: socket.socket) -> TcpInfo | None:
    """Return the kernel's statistics of a connection, or None if there are none or no round trip has been measured."""
    with contextlib.suppress(OSError, AttributeError):
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        if len(info) >= _TCP_INFO.size:
            rtt, resent, least, segments, busy, window, buffer = _TCP_INFO.unpack_from(info)
            if 0 < least < 1 << 31:
                size = connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
                spent = busy / 1e6, window / 1e6, buffer / 1e6
                return TcpInfo(rtt / 1e6, least / 1e6, segments, resent, *spent, size)
    return None


def unacknowledged_bytes(connection: socket.socket) -> int:
    """Return the number of bytes that the peer has not acknowledged; 0 if the kernel does not report it."""
    with contextlib.suppress(OSError):
        return int(struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, b"\0\0\0\0"))[0])
    return 0
