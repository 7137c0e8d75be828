"""What goes over the connection between two regions' servers, read in the middle with their own keys."""

from __future__ import annotations

import contextlib
import socket
import ssl
import tempfile
import threading
from pathlib import Path

from support.pki import write
from support.server_process import Server

from deploy.local import LOOPBACK
from geofed_pb.rpc import region_name


class Tap:
    """Stands between the server of one region, which connects to `address`, and that of another one. Both see each
    other's certificate, so that neither notices it."""

    def __init__(self, source: Server, destination: Server) -> None:
        self._name, self._port = region_name(destination.region), destination.ports["exchange"]
        self._server, self._client = _context(destination, server=True), _context(source, server=False)
        self._streams: list[list[bytes]] = []
        """Of each direction of each connection, so that nothing of another one is between two parts of a message."""
        self._sockets: list[socket.socket] = []
        self._listening = socket.create_server((LOOPBACK, 0))
        self.address = f"{LOOPBACK}:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def taken(self) -> bytes:
        """All bytes so far, of both directions, as they were before encryption."""
        return b"|".join(b"".join(stream) for stream in list(self._streams))

    def close(self) -> None:
        for one in (self._listening, *self._sockets):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                plain, _ = self._listening.accept()
                threading.Thread(target=self._join, args=(plain,), daemon=True).start()

    def _join(self, plain: socket.socket) -> None:
        with contextlib.suppress(OSError):
            one = self._server.wrap_socket(plain, server_side=True)
            behind = socket.create_connection((LOOPBACK, self._port))
            other = self._client.wrap_socket(behind, server_hostname=self._name)
            self._sockets += [one, other]
            threading.Thread(target=self._pump, args=(other, one), daemon=True).start()
            self._pump(one, other)

    def _pump(self, source: ssl.SSLSocket, into: ssl.SSLSocket) -> None:
        stream: list[bytes] = []
        self._streams.append(stream)
        with contextlib.suppress(OSError, ValueError):
            while data := source.recv(1 << 16):
                stream.append(data)
                into.sendall(data)
        for one in (source, into):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


def _context(of: Server, *, server: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    with tempfile.TemporaryDirectory() as folder:
        ca, certificate, key = write(of.identity, Path(folder) / "identity")[:3]
        context.load_verify_locations(ca)
        context.load_cert_chain(certificate, key)
    context.verify_mode = ssl.CERT_REQUIRED
    context.set_alpn_protocols(["h2"])
    return context
