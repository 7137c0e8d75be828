"""Connections out of sandboxes: each goes from an address inside to the one address outside that belongs to it.

A function never holds a socket of this machine's network: with one it could connect to anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from ipaddress import ip_address

from geofed_pb import address

__all__ = ["Relay", "addresses_inside"]

_FIRST_HOST = (127, 99, 0, 1)
"""Address in a sandbox of the first host that is known by its name."""
_CONNECT_SECONDS = 10.0
"""Timeout of a connection to the address outside."""
_MOST_SOCKETS = 512
"""Open sockets of one sandbox's connections, two for each. An S3 client opens 48 connections at most; beyond that a
function would take descriptors and threads from others."""
_PIECE_BYTES = 1 << 18
"""Bytes that are passed on at a time. With 256 KiB the rate was highest."""


def addresses_inside(targets: Iterable[str]) -> dict[str, str]:
    """Return an address in the sandbox for each name of a host among ``host:port`` targets."""
    names = sorted({host for host, _ in map(address.split, targets) if not _is_address(host)})
    first = int(ip_address(".".join(map(str, _FIRST_HOST))))
    return {name: str(ip_address(first + number)) for number, name in enumerate(names)}


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


class Relay:
    """Passes connections of one sandbox on, in threads, until it is closed."""

    def __init__(self, listeners: Mapping[str, socket.socket], target_of: Callable[[str], str | None]) -> None:
        """``listeners``: sockets in the sandbox's network by the ``host:port`` that they stand for. ``target_of``
        returns the present address outside; None: there is none, and connections are closed."""
        self._listeners, self._target_of = listeners, target_of
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        loop = asyncio.get_running_loop()
        for name, listener in listeners.items():
            listener.setblocking(False)
            loop.add_reader(listener, self._accept, name, listener)

    def close(self) -> None:
        """Close the listening sockets and all connections."""
        loop = asyncio.get_running_loop()
        for listener in self._listeners.values():
            loop.remove_reader(listener)
            listener.close()
        with self._lock:
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def _accept(self, name: str, listener: socket.socket) -> None:
        try:
            inner, _ = listener.accept()
        except OSError:
            return
        inner.setblocking(True)
        target = self._target_of(name) if len(self._open) < _MOST_SOCKETS else None
        threading.Thread(target=self._serve, args=(inner, target), name="relay", daemon=True).start()

    def _serve(self, inner: socket.socket, target: str | None) -> None:
        with contextlib.ExitStack() as held:
            held.enter_context(self._kept(inner))
            try:
                if target is None:
                    raise ConnectionRefusedError
                outer = socket.create_connection(address.split(target), _CONNECT_SECONDS)
            except OSError:
                # Without lingering the other side gets an error instead of an end.
                inner.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                return
            held.enter_context(self._kept(outer))
            outer.settimeout(None)
            for end in (inner, outer):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            back = threading.Thread(target=_pump, args=(outer, inner), name="relay", daemon=True)
            back.start()
            _pump(inner, outer)
            back.join()

    @contextlib.contextmanager
    def _kept(self, connection: socket.socket) -> Iterator[None]:
        with connection:
            with self._lock:
                self._open.add(connection)
            try:
                yield
            finally:
                with self._lock:
                    self._open.discard(connection)


def _pump(source: socket.socket, sink: socket.socket) -> None:
    """Pass on what arrives until the end, which is passed on as well."""
    buffer = memoryview(bytearray(_PIECE_BYTES))
    with contextlib.suppress(OSError):
        while count := source.recv_into(buffer):
            sink.sendall(buffer[:count])
        sink.shutdown(socket.SHUT_WR)
        return
    # One direction is broken: the other one must not wait for ever.
    for end in (source, sink):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
