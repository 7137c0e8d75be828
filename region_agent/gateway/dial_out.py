"""A function that its gateway cannot reach connects to it instead, and serves calls over these connections.

The function connects with TLS, sends one line with the name and token of its replica, and waits for a line that accepts
it. From then on it is the HTTP server of that connection. The gateway's certificate is the only one that it trusts.
Where the platform tells nobody what a function prints and how it ends, the function sends that over connections, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from geofed_pb import address
from geofed_pb.errors import GeofedError
from region_agent.gateway.embedded.replicas.replica_http import ReplicaServer

__all__ = [
    "ACCEPTED", "CALLS", "CERTIFICATE_NAME", "END", "GONE_SECONDS", "MOST_HELLO_BYTES", "OUTPUT", "REFUSED", "DialOut",
    "ReplicaRefused", "connections_for", "is_open", "keep_alive",
]  # fmt: skip

ACCEPTED = b"ok\n"
"""Line with which the gateway accepts a connection."""
REFUSED = b"no\n"
"""Line with which the gateway says that it does not expect the replica, or no longer. As long as `ACCEPTED`."""
CALLS, OUTPUT, END = "calls", "output", "end"
"""Uses of a connection: calls over it, what the function prints, or how it has ended (all in its first line)."""
CERTIFICATE_NAME = "gateway.geofed"
"""Name in the gateway's certificate."""
MOST_HELLO_BYTES = 1024
"""Longest first line."""
_ADDRESS, _REPLICA, _TOKEN, _CERTIFICATE = (
    "GEOFED_DIAL", "GEOFED_DIAL_REPLICA", "GEOFED_DIAL_TOKEN", "GEOFED_DIAL_CERTIFICATE",
)  # fmt: skip
_MOST_CONNECTIONS = 64
"""Most connections that a function keeps open for its calls, but for one."""
_CONNECT_SECONDS = 10.0
"""Timeout of a connection, until it is accepted."""
_LONGEST_PAUSE_SECONDS = 5.0
"""Longest pause between attempts to connect."""
_KEEPALIVE = (15, 5, 4)
"""Seconds without traffic until the other side is asked, seconds between questions, and their number."""
GONE_SECONDS = 35
"""Time after which a connection ends whose other side acknowledges nothing any more."""
_GIVE_UP_SECONDS = 300.0
"""Time without any connection after which the function ends: its agent is gone for good, and it costs money."""


class ReplicaRefused(ConnectionError):
    """The gateway does not expect this replica: it has ended it, or is another one."""


@dataclass(frozen=True)
class DialOut:
    """Where a function connects to, and as which replica."""

    address: str
    """``host:port`` of the gateway."""
    replica: str
    """Name of the replica."""
    token: str = field(repr=False)
    """Token of the replica."""
    certificate: str = field(repr=False)
    """The gateway's certificate, PEM."""

    @classmethod
    def taken(cls) -> DialOut | None:
        """Remove this container's settings from the environment, which the handler inherits, and return them.

        None: the function is to listen.
        """
        names = (_ADDRESS, _REPLICA, _TOKEN, _CERTIFICATE)
        given = [os.environ.pop(name, "") for name in names]
        if not any(given):
            return None
        if not all(given):
            missing = ", ".join(name for name, value in zip(names, given, strict=True) if not value)
            raise GeofedError("CONFIG_INVALID", f"{missing} is missing in the environment", hint="set all or none")
        return cls(*given)

    @property
    def env(self) -> dict[str, str]:
        """Environment variables of the function."""
        return {
            _ADDRESS: self.address, _REPLICA: self.replica, _TOKEN: self.token, _CERTIFICATE: self.certificate,
        }  # fmt: skip

    @property
    def context(self) -> ssl.SSLContext:
        """TLS that trusts the gateway alone."""
        context = ssl.create_default_context(cadata=self.certificate)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        return context

    def serve(
        self,
        server: ReplicaServer,
        connections: int,
        gave_up: Callable[[], object],
        *,
        alone_seconds: float = _GIVE_UP_SECONDS,
        refused: Callable[[], object] | None = None,
        instance: str = "",
        left: Callable[[], float] | None = None,
    ) -> Callable[[], None]:
        """Keep this many connections open in threads, and serve each; returns what closes them.

        ``gave_up`` is called when none could be made for ``alone_seconds``. ``refused``: called when the gateway does
        not expect the replica; None: it is asked again. ``instance``: differs between processes of the same replica, of
        which the gateway takes the first. ``left``: returns the seconds after which the platform ends the process.
        """
        keeper = _Keeper(self, server, self.context, gave_up, alone_seconds, refused, instance, left)
        for number in range(connections):
            threading.Thread(target=keeper.keep, name=f"connection {number}", daemon=True).start()
        return keeper.close

    def connect(self, context: ssl.SSLContext, **more: str) -> ssl.SSLSocket:
        """Connect and be accepted. Raises ``OSError``: `ReplicaRefused` if the gateway does not expect this replica.

        ``more``: further members of the first line.
        """
        raw = socket.create_connection(address.split(self.address), _CONNECT_SECONDS)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keep_alive(raw)
        connection = context.wrap_socket(raw, server_hostname=CERTIFICATE_NAME)
        try:
            hello = json.dumps({"replica": self.replica, "token": self.token, **more})
            connection.sendall(hello.encode() + b"\n")
            answer = b""
            while len(answer) < len(ACCEPTED) and (part := connection.recv(len(ACCEPTED) - len(answer))):
                answer += part
            if answer == REFUSED:
                raise ReplicaRefused(f"the gateway at {self.address} does not expect this replica")
            if answer != ACCEPTED:
                raise ConnectionRefusedError(f"the gateway at {self.address} does not accept this replica")
            connection.settimeout(None)
        except BaseException:
            connection.close()
            raise
        return connection


@dataclass
class _Keeper:
    """Keeps the connections of one function."""

    dial: DialOut
    server: ReplicaServer
    context: ssl.SSLContext
    gave_up: Callable[[], object]
    alone_seconds: float
    refused: Callable[[], object] | None
    instance: str
    left: Callable[[], float] | None
    open: set[socket.socket] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)
    serving: int = 0
    """Connections at present."""
    connected_at: float = field(default_factory=time.monotonic)
    """When there was a connection last, if there is none."""

    def keep(self) -> None:
        pause = 0.1
        more: dict[str, Any] = {"instance": self.instance} if self.instance else {}
        while not self.server.draining:
            begun = time.monotonic()
            try:
                if self.left is not None:
                    more["left"] = f"{max(0.0, self.left()):.1f}"
                connection = self.dial.connect(self.context, **more)
            except (OSError, ValueError) as error:
                # Another certificate is that of a gateway that has started since.
                if self.refused is not None and isinstance(error, ReplicaRefused | ssl.SSLCertVerificationError):
                    self.refused()
                    return
                if not self.serving and time.monotonic() - self.connected_at > self.alone_seconds:
                    print(f"no connection to {self.dial.address}: {error}", file=sys.stderr, flush=True)
                    self.gave_up()
                    return
                time.sleep(random.uniform(0, pause))
                pause = min(pause * 2, _LONGEST_PAUSE_SECONDS)
                continue
            with self.lock:
                self.serving += 1
                self.open.add(connection)
            self.server.process_request_thread(connection, self.dial.address)
            with self.lock:
                self.serving, self.connected_at = self.serving - 1, time.monotonic()
                self.open.discard(connection)
            # A gateway that closes connections at once is not asked again and again.
            pause = 0.1 if self.connected_at - begun > 1 else min(pause * 2, _LONGEST_PAUSE_SECONDS)
            time.sleep(random.uniform(0, pause))

    def close(self) -> None:
        """Close the connections; no call may run over them any more."""
        with self.lock:
            left = list(self.open)
        for connection in left:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


def connections_for(calls: int) -> int:
    """Return how many connections a function keeps open that answers so many calls at the same time.

    One more than the calls: a gateway that has just ended a call needs a connection before that one is made again.
    """
    return min(calls, _MOST_CONNECTIONS) + 1


def keep_alive(connection: socket.socket) -> None:
    """Have the kernel notice within `GONE_SECONDS` that the other side is gone without a word, and keep routers from
    forgetting the connection. Platforms take a function away without closing its connections."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    idle, interval, probes = _KEEPALIVE
    for option, value in (
        (socket.TCP_KEEPIDLE, idle),
        (socket.TCP_KEEPINTVL, interval),
        (socket.TCP_KEEPCNT, probes),
        # For what is sent and not acknowledged; without it that is a quarter of an hour.
        (socket.TCP_USER_TIMEOUT, 1000 * GONE_SECONDS),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def is_open(connection: socket.socket) -> bool:
    """Whether the other side of a connection still waits for an answer; it sends nothing meanwhile."""
    with contextlib.suppress(OSError, ValueError):
        # Not `select.select`, which knows no file descriptors above 1,023.
        poll = select.poll()
        poll.register(connection, select.POLLIN)
        readable = poll.poll(0)
        if isinstance(connection, ssl.SSLSocket):
            # What can be read is the end of the connection, as a record of TLS.
            return not readable
        return not readable or bool(connection.recv(1, socket.MSG_PEEK))
    return False
