"""TLS sockets between parameter servers: identities, buffers for long fat links, and what the kernel knows of them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import ssl
import struct
import termios
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from geofed_pb.rpc import region_name

__all__ = [
    "KernelView",
    "Tls",
    "buffer_bytes",
    "common_name",
    "dial",
    "kernel_view",
    "listen",
    "tune",
    "unacknowledged_bytes",
    "welcome",
]

_KEEPALIVE_SECONDS = 10
_LEAST_BUFFER_BYTES, _MOST_BUFFER_BYTES = 4 << 20, 64 << 20
_UNSENT_SECONDS, _LEAST_UNSENT_BYTES, _MOST_UNSENT_BYTES = 0.03, 256 << 10, 4 << 20
"""A chunk is bound to a stream only shortly before it can leave, so that the faster streams take more of them; but no
later than the sending thread may be kept from its work."""
_TCP_INFO = struct.Struct("=68xI28xI44xI4xI8xQQQ")
"""Of Linux's struct tcp_info: rtt, total_retrans, min_rtt, data_segs_out, busy_time, rwnd_limited, sndbuf_limited."""
_SO_SNDBUFFORCE = 32


@dataclass(frozen=True)
class Tls:
    """The identity a parameter server shows and trusts."""

    ca_pem: bytes
    certificate_pem: bytes
    key_pem: bytes


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
    """A path to bytes in memory, since the library reads certificates from files only."""
    file = os.memfd_create("pem", os.MFD_CLOEXEC)
    try:
        os.write(file, content)
        yield f"/proc/self/fd/{file}"
    finally:
        os.close(file)


def dial(address: tuple[str, int], region: str, tls: Tls, timeout: float) -> ssl.SSLSocket:
    """Connect to a region's bulk port; raises OSError, of which ssl.SSLError is one."""
    plain = socket.create_connection(address, timeout)
    try:
        tune(plain)
        return _context(tls, server=False).wrap_socket(plain, server_hostname=region_name(region))
    except BaseException:
        plain.close()
        raise


def listen(host: str, port: int) -> socket.socket:
    """Raises OSError where the port is taken."""
    bare = host.strip("[]")
    family = socket.AF_INET6 if ":" in bare else socket.AF_INET
    return socket.create_server((bare, port), family=family, backlog=64)


def welcome(plain: socket.socket, tls: Tls, timeout: float) -> ssl.SSLSocket:
    """The server's side of `dial`; raises OSError, and lets nobody in without a certificate."""
    plain.settimeout(timeout)
    tune(plain)
    return _context(tls, server=True).wrap_socket(plain, server_side=True)


def common_name(line: ssl.SSLSocket) -> str:
    """Common name of the other side's certificate."""
    subject: Any = (line.getpeercert() or {}).get("subject", ())
    for part in subject:
        for name, value in part:
            if name == "commonName":
                return str(value)
    return ""


def tune(line: socket.socket, send_buffer_bytes: int = 0, bytes_per_second: float = 0.0) -> None:
    """Keep the connection alive through NATs, and let it hold what is in flight and what leaves next.

    The receive buffer is left to the kernel, whose autotuning goes further than what a process may ask for.
    """
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", _KEEPALIVE_SECONDS), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):
            line.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        unsent = min(max(int(bytes_per_second * _UNSENT_SECONDS), _LEAST_UNSENT_BYTES), _MOST_UNSENT_BYTES)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, unsent)
    if send_buffer_bytes:
        # The kernel doubles what it is asked for, for its own records.
        send_buffer_bytes //= 2
        try:
            # Past the host's limit for unprivileged processes, where we may.
            line.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, send_buffer_bytes)
        except OSError:
            if _setting("core/wmem_max") >= min(send_buffer_bytes, _setting("ipv4/tcp_wmem") // 2):
                line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
            # Else the kernel's own tuning, which a size would end, goes further.


def _setting(name: str) -> int:
    """A number of the host's network stack, the last one where it has several; 0 where it does not tell."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/sys/net", name).read_text().split()[-1])
    return 0


def buffer_bytes(bandwidth_delay_bytes: float, streams: int) -> int:
    """A stream's send buffer: its share of twice what the link has in flight, between 4 and 64 MiB.

    More than that only fills the queue in front of the link, until it drops packets.
    """
    return int(min(max(2 * bandwidth_delay_bytes / streams, _LEAST_BUFFER_BYTES), _MOST_BUFFER_BYTES))


@dataclass(frozen=True)
class KernelView:
    """What the kernel has seen on a connection since it was opened."""

    rtt_seconds: float
    """Smoothed, queues included."""
    least_rtt_seconds: float
    """The path's own."""
    segments: int
    """Sent with data, those sent again included."""
    resent: int
    busy_seconds: float
    """With data to send."""
    window_seconds: float
    """Of these, held back by the other side's window."""
    buffer_seconds: float
    """The same, with nothing more in the send buffer."""
    buffer_bytes: int
    """Size of the send buffer."""


def kernel_view(line: socket.socket) -> KernelView | None:
    """None where the kernel does not tell, or no round trip has been measured."""
    with contextlib.suppress(OSError, AttributeError):
        info = line.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        if len(info) >= _TCP_INFO.size:
            rtt, resent, least, segments, busy, window, buffer = _TCP_INFO.unpack_from(info)
            if 0 < least < 1 << 31:
                size = line.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
                spent = busy / 1e6, window / 1e6, buffer / 1e6
                return KernelView(rtt / 1e6, least / 1e6, segments, resent, *spent, size)
    return None


def unacknowledged_bytes(line: socket.socket) -> int:
    """Bytes that the kernel holds for the other side; 0 where it does not tell."""
    with contextlib.suppress(OSError):
        return int(struct.unpack("i", fcntl.ioctl(line, termios.TIOCOUTQ, b"\0\0\0\0"))[0])
    return 0
