"""The receiving side of bulk streams: one thread per connection writes from TLS into the file."""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Protocol

from geofed_pb.errors import GeofedError
from geofed_pb.rpc import to_proto
from geofed_pb.v1 import sync_pb2
from sync.tcp_streams.partial_file import PartialFile
from sync.tcp_streams.sockets import DIAL_FAULT, Tls, accept_tls, dial, listen, region_of, serial_of
from sync.tcp_streams.stream import hello
from sync.tcp_streams.wire import HEAD_BYTES, FrameHead, FrameKind, decoded, frame, parse

__all__ = ["BulkPort", "ReceiverHandler"]

_log = logging.getLogger("geofed.ps.bulk")
_HANDSHAKE_SECONDS = 10.0
"""Timeout of connecting, the TLS handshake and the first frame."""
_CLOSE_SECONDS = 2.0
"""How long `BulkPort.close` waits for each connection's thread."""
_PIECE_BYTES = 256 << 10
"""Bytes that are read before they are written to the file."""
_GATHERED_BYTES = 32 << 10
"""Bytes that the kernel collects before it wakes the thread; see `_Receiving._gather`."""
_RECORD_BYTES = 16 << 10
"""Largest TLS record: at most this much has been decrypted but not read yet."""
_MAX_CONNECTIONS = 512
"""Connections that are accepted at the same time."""
_MAX_PEER_CONNECTIONS = 64
"""Connections of one peer that are accepted at the same time: four times the most streams of a sender, since it may
take a while until broken ones are noticed here."""
_MAX_HANDSHAKES = 64
"""Connections at the same time that have not shown a certificate yet; a peer opens at most 16 at once."""


class ReceiverHandler(Protocol):
    """Decides which updates are accepted. Called from the connections' threads; all methods may raise
    ``GeofedError``."""

    def greeted(self, caller: str, greeting: sync_pb2.BulkHello) -> None:
        """Admit a caller, or raise ``GeofedError``."""

    def adopted(self, caller: str, greeting: sync_pb2.BulkHello, connection: ssl.SSLSocket) -> None:
        """Take over a connection that a peer has opened to receive updates over it."""

    def offered(self, caller: str, offer: sync_pb2.BulkOffer) -> tuple[sync_pb2.OfferReply, PartialFile | None]:
        """Answer an offer: the reply, and the file to write to if the update is wanted."""

    def received(self, caller: str, count: int) -> None:
        """Count bytes of chunks that have been received."""

    def landed(self, caller: str, offer: sync_pb2.BulkOffer) -> sync_pb2.OfferReply:
        """Verify an update whose bytes are all written, make it durable, and return the reply."""

    def failed(self, error: GeofedError) -> None:
        """Take note of the error that has ended a connection. Raises nothing."""


class BulkPort:
    """Listens for peers' streams, and opens streams to peers that cannot connect to this side."""

    def __init__(self, host: str, port: int, job: str, identity: Callable[[], Tls], handler: ReceiverHandler) -> None:
        """Raises OSError if the port is in use."""
        self._job, self._identity, self._handler = job, identity, handler
        self._listener = listen(host, port)
        self.port: int = self._listener.getsockname()[1]
        self._open_connections: set[ssl.SSLSocket] = set()
        self._of_peers: Counter[str] = Counter()
        """Open connections by peer."""
        self._handshakes = threading.Semaphore(_MAX_HANDSHAKES)
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._closed = False

    @property
    def connections(self) -> int:
        """Number of connections that updates are received over."""
        with self._lock:
            return len(self._open_connections)

    def start(self) -> None:
        """Accept connections from now on."""
        self._run(self._accept)

    def collect(self, address: tuple[str, int], region: str, streams: int, ticket: bytes) -> None:
        """Open streams to a region that has asked for it, and receive updates over them."""
        for _ in range(streams):
            self._run(self._collect, address, region, ticket)

    def close(self) -> None:
        """Close all connections, and wait for their threads. Must not be called in the event loop, which the threads
        may still call."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._shut_down(lambda _: True)
        for thread in list(self._threads):
            thread.join(_CLOSE_SECONDS)

    def end_revoked(self) -> None:
        """Close the connections of peers whose certificates are revoked by now."""
        revoked = self._identity().revoked.serials
        self._shut_down(lambda connection: serial_of(connection) in revoked)

    def _shut_down(self, wanted: Callable[[ssl.SSLSocket], bool]) -> None:
        with self._lock:
            connections = [connection for connection in self._open_connections if wanted(connection)]
        for connection in connections:
            # This shuts down the TCP connection: the TLS socket's own method would leave its reader with ciphertext.
            with contextlib.suppress(OSError):
                socket.socket.shutdown(connection, socket.SHUT_RDWR)

    # Connections

    def _run(self, work: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments, name="bulk", daemon=True)
        with self._lock:
            self._threads = [*(other for other in self._threads if other.is_alive()), thread]
            thread.start()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if not self._closed:
                    _log.warning("the bulk port was closed")
                return
            with self._lock:
                crowded = len(self._open_connections) >= _MAX_CONNECTIONS
            if crowded or not self._handshakes.acquire(blocking=False):
                connection.close()
            else:
                self._run(self._serve, connection)

    def _serve(self, plain: socket.socket) -> None:
        try:
            connection = accept_tls(plain, self._identity(), _HANDSHAKE_SECONDS)
        except (OSError, ValueError, GeofedError) as error:
            _log.debug("a bulk stream was refused: %s", error)
            plain.close()
            return
        finally:
            self._handshakes.release()
        caller = region_of(connection)
        with self._kept(connection), self._counted(caller):
            head = parse(_exactly(connection, HEAD_BYTES))
            if head.kind is not FrameKind.HELLO:
                raise GeofedError("FRAME_INVALID", f"the first frame of a stream is {head.kind.name}")
            greeting = decoded(sync_pb2.BulkHello, _exactly(connection, head.length))
            self._handler.greeted(caller, greeting)
            connection.settimeout(None)
            if greeting.collects:
                with self._lock:
                    self._open_connections.discard(connection)
                self._handler.adopted(caller, greeting, connection)
            else:
                _Receiving(connection, caller, self._handler).run()

    def _collect(self, address: tuple[str, int], region: str, ticket: bytes) -> None:
        try:
            connection = dial(address, region, self._identity(), _HANDSHAKE_SECONDS)
        except (OSError, ValueError, GeofedError) as error:
            _log.warning("%s: cannot open a bulk stream to %s at %s:%d: %s", DIAL_FAULT, region, *address, error)
            return
        with self._kept(connection):
            connection.sendall(hello(self._job, collects=True, ticket=ticket))
            connection.settimeout(None)
            _Receiving(connection, region, self._handler).run()

    @contextlib.contextmanager
    def _counted(self, caller: str) -> Iterator[None]:
        """Count a peer's connection. Raises ``GeofedError("LIMIT_EXCEEDED")`` if it has too many."""
        with self._lock:
            self._of_peers[caller] += 1
            many = self._of_peers[caller] > _MAX_PEER_CONNECTIONS
        try:
            if many:
                raise GeofedError("LIMIT_EXCEEDED", f"{caller} has more than {_MAX_PEER_CONNECTIONS} open connections")
            yield
        finally:
            with self._lock:
                self._of_peers[caller] -= 1

    @contextlib.contextmanager
    def _kept(self, connection: ssl.SSLSocket) -> Iterator[None]:
        """Report errors to the peer, and close the connection at the end unless it was passed on."""
        with self._lock:
            self._open_connections.add(connection)
        try:
            yield
        except GeofedError as error:
            self._handler.failed(error)
            with contextlib.suppress(OSError):
                connection.sendall(frame(FrameKind.FAULT, 0, to_proto(error).SerializeToString()))
        except (OSError, EOFError) as error:
            _log.debug("a bulk stream ended: %s", error)
        except Exception:  # noqa: BLE001 - outermost frame of the thread: the error must be logged
            _log.exception("a bulk stream failed")
        finally:
            with self._lock:
                ours = connection in self._open_connections
                self._open_connections.discard(connection)
            if ours:
                with contextlib.suppress(OSError):
                    connection.close()


class _Receiving:
    """One connection that updates, or parts of them, are received over."""

    def __init__(self, connection: ssl.SSLSocket, caller: str, handler: ReceiverHandler) -> None:
        self._line, self._caller, self._handler = connection, caller, handler
        self._buffer = memoryview(bytearray(_PIECE_BYTES))
        self._gathering = False
        self._tag = -1
        self._offer: sync_pb2.BulkOffer | None = None
        self._landing: PartialFile | None = None
        self._declined = False
        """Whether the sender has been told that no bytes are needed."""

    def run(self) -> None:
        """Receive until the connection ends. Raises EOFError, OSError, or the ``GeofedError`` to report to the
        sender."""
        while True:
            head = parse(_exactly(self._line, HEAD_BYTES))
            if head.kind is FrameKind.OFFER:
                self._offered(head)
            elif head.kind is FrameKind.CHUNK:
                self._chunk(head)
            else:
                raise GeofedError("FRAME_INVALID", f"unexpected frame from a sender: {head.kind.name}")

    def _reply(self, head: FrameHead, reply: sync_pb2.OfferReply) -> None:
        payload = reply.SerializeToString()
        answer = FrameHead(FrameKind.REPLY, head.tag, len(payload), head.offset)
        self._line.sendall(answer.pack() + payload)

    def _offered(self, head: FrameHead) -> None:
        self._offer = decoded(sync_pb2.BulkOffer, _exactly(self._line, head.length))
        reply, self._landing = self._handler.offered(self._caller, self._offer)
        self._tag, self._declined = head.tag, self._landing is None
        self._reply(head, reply)

    def _chunk(self, head: FrameHead) -> None:
        if head.tag != self._tag or self._offer is None:
            raise GeofedError("FRAME_INVALID", "the chunk belongs to no offered update")
        file = self._landing
        if file is not None and head.offset + head.length > file.total_bytes:
            raise GeofedError(
                "FRAME_INVALID", f"a chunk ends at {head.offset + head.length} of {file.total_bytes} bytes"
            )
        with contextlib.ExitStack() as interrupted:
            if file is not None:
                interrupted.callback(_record_what_came, file)
            crc = self._write(head, file)
            interrupted.pop_all()
        if file is None or self._landing is None:
            if not self._declined:
                # The update is complete without this chunk: the sender needn't continue.
                self._declined = True
                self._reply(
                    FrameHead(FrameKind.OFFER, head.tag, 0, 1 << 32), self._handler.landed(self._caller, self._offer)
                )
            return
        if head.crc not in (0, crc):
            file.drop(head.offset, head.length)
            self._line.sendall(FrameHead(FrameKind.BAD, head.tag, head.length, head.offset).pack())
            return
        file.write_record()
        self._line.sendall(FrameHead(FrameKind.ACK, head.tag, head.length, head.offset).pack())
        if file.whole:
            self._reply(
                FrameHead(FrameKind.OFFER, head.tag, 0, 1 << 32), self._handler.landed(self._caller, self._offer)
            )

    def _gather(self, gathering: bool) -> None:
        """Have the kernel wake this thread only for many packets, or again for each one.

        Waking for each packet costs more than processing it. Since the kernel does not wake the thread for less even if
        nothing more will come, this may be on only while more is certain to come.
        """
        if gathering != self._gathering:
            self._gathering = gathering
            self._line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, _GATHERED_BYTES if gathering else 1)

    def _write(self, head: FrameHead, file: PartialFile | None) -> int:
        """Read a chunk's bytes and write them to the file, also those before an interruption; return their CRC-32, 0
        if the sender has left it out."""
        left, at, crc = head.length, head.offset, 0
        while left:
            # While the thread waits with gathering on, more bytes than that are certain to come.
            surplus = left - _GATHERED_BYTES - _RECORD_BYTES
            self._gather(surplus > 0)
            piece = self._buffer[: min(surplus if surplus > 0 else left, _PIECE_BYTES)]
            count = _fill(self._line, piece)
            whole, piece = count == len(piece), piece[:count]
            crc = zlib.crc32(piece, crc) if head.crc else 0
            self._handler.received(self._caller, count)
            if file is not None:
                try:
                    new = file.write(at, piece)
                except GeofedError as error:
                    if error.code != "FENCED":
                        raise
                    # Another stream has completed the update; the rest of the chunk is read and dropped.
                    file = self._landing = None
                else:
                    file.hash_and_flush(at, piece if new else b"")
            if not whole:
                raise EOFError
            left, at = left - count, at + count
        return crc


def _record_what_came(file: PartialFile) -> None:
    """Record the bytes that came before an interruption, where the disk allows it, so that they are not sent again."""
    with contextlib.suppress(OSError):
        file.write_record()


def _exactly(connection: ssl.SSLSocket, count: int) -> bytes:
    data = bytearray(count)
    if _fill(connection, memoryview(data)) < count:
        raise EOFError
    return bytes(data)


def _fill(connection: ssl.SSLSocket, view: memoryview) -> int:
    """Read until the buffer is full or the connection has ended for any reason; return the number of bytes."""
    filled = 0
    try:
        while filled < len(view) and (count := connection.recv_into(view[filled:])):
            filled += count
    except OSError:
        if not filled:
            raise
    return filled
