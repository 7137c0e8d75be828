"""The receiving side of bulk streams: one thread for each connection, from TLS straight into the file."""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading
import zlib
from collections.abc import Callable, Iterator
from typing import Protocol

from geofed_pb.errors import GeofedError
from geofed_pb.rpc import to_proto
from geofed_pb.v1 import sync_pb2
from sync.transport.landing import Landing
from sync.transport.sockets import Tls, common_name, dial, listen, welcome
from sync.transport.stream import hello
from sync.transport.wire import HEAD_BYTES, Frame, Kind, frame, parse

__all__ = ["BulkPort", "Desk"]

_log = logging.getLogger("geofed.ps.bulk")
_HANDSHAKE_SECONDS = 10.0
_CLOSE_SECONDS = 2.0
_PIECE_BYTES = 256 << 10
_GATHERED_BYTES = 32 << 10
_RECORD_BYTES = 16 << 10
"""The most that TLS has deciphered and not handed out yet."""
_MOST_CONNECTIONS = 512


class Desk(Protocol):
    """Who decides what is taken. Calls come from the connections' threads; all may raise ``GeofedError``."""

    def greeted(self, caller: str, greeting: sync_pb2.BulkHello) -> None:
        """Let a caller in, or raise."""

    def adopted(self, caller: str, greeting: sync_pb2.BulkHello, line: ssl.SSLSocket) -> None:
        """A peer has dialled to collect: the connection is yours now."""

    def offered(self, caller: str, offer: sync_pb2.BulkOffer) -> tuple[sync_pb2.OfferReply, Landing | None]:
        """What to say of an update, and where its bytes go, if they are wanted."""

    def received(self, caller: str, count: int) -> None:
        """So many bytes of chunks have come."""

    def landed(self, caller: str, offer: sync_pb2.BulkOffer) -> sync_pb2.OfferReply:
        """All bytes are written: verify them, make them durable, and say so."""


class BulkPort:
    """Listens for peers' streams, and dials those who cannot dial us."""

    def __init__(self, host: str, port: int, job: str, identity: Callable[[], Tls], desk: Desk) -> None:
        """Raises OSError where the port is taken."""
        self._job, self._identity, self._desk = job, identity, desk
        self._listener = listen(host, port)
        self.port: int = self._listener.getsockname()[1]
        self._lines: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._closed = False

    @property
    def connections(self) -> int:
        """Those that updates come through; not those that a peer collects over."""
        with self._lock:
            return len(self._lines)

    def start(self) -> None:
        self._run(self._accept)

    def collect(self, address: tuple[str, int], region: str, streams: int, ticket: bytes) -> None:
        """Dial streams to a region that has asked for it, and receive over them what it sends."""
        for _ in range(streams):
            self._run(self._collect, address, region, ticket)

    def close(self) -> None:
        """End all connections, and wait for their threads; not from the event loop, which these may still ask."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            lines = list(self._lines)
        for line in lines:
            # The connection below TLS: TLS's own method would leave its reader with bare ciphertext.
            with contextlib.suppress(OSError):
                socket.socket.shutdown(line, socket.SHUT_RDWR)
        for thread in list(self._threads):
            thread.join(_CLOSE_SECONDS)

    # Connections

    def _run(self, work: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments, name="bulk", daemon=True)
        with self._lock:
            self._threads = [*(other for other in self._threads if other.is_alive()), thread]
            thread.start()

    def _accept(self) -> None:
        while not self._closed:
            try:
                line, _ = self._listener.accept()
            except OSError:
                if not self._closed:
                    _log.warning("the bulk port has closed")
                return
            with self._lock:
                crowded = len(self._lines) >= _MOST_CONNECTIONS
            if crowded:
                line.close()
            else:
                self._run(self._welcome, line)

    def _welcome(self, plain: socket.socket) -> None:
        try:
            line = welcome(plain, self._identity(), _HANDSHAKE_SECONDS)
        except (OSError, ValueError, GeofedError) as error:
            _log.debug("a stream was not let in: %s", error)
            plain.close()
            return
        with self._kept(line):
            caller = common_name(line)
            head = parse(_exactly(line, HEAD_BYTES))
            if head.kind is not Kind.HELLO:
                raise GeofedError("FRAME_INVALID", f"a stream begins with {head.kind.name}")
            greeting = sync_pb2.BulkHello.FromString(_exactly(line, head.length))
            self._desk.greeted(caller, greeting)
            line.settimeout(None)
            if greeting.collects:
                with self._lock:
                    self._lines.discard(line)
                self._desk.adopted(caller, greeting, line)
            else:
                _Receiving(line, caller, self._desk).run()

    def _collect(self, address: tuple[str, int], region: str, ticket: bytes) -> None:
        try:
            line = dial(address, region, self._identity(), _HANDSHAKE_SECONDS)
        except (OSError, ValueError, GeofedError) as error:
            _log.warning("cannot collect from %s at %s:%d: %s", region, *address, error)
            return
        with self._kept(line):
            line.sendall(hello(self._job, collects=True, ticket=ticket))
            line.settimeout(None)
            _Receiving(line, region, self._desk).run()

    @contextlib.contextmanager
    def _kept(self, line: ssl.SSLSocket) -> Iterator[None]:
        """Tell the peer what went wrong, and close the connection at the end, unless it was handed on."""
        with self._lock:
            self._lines.add(line)
        try:
            yield
        except GeofedError as error:
            with contextlib.suppress(OSError):
                line.sendall(frame(Kind.FAULT, 0, to_proto(error).SerializeToString()))
        except (OSError, EOFError) as error:
            _log.debug("a bulk stream ended: %s", error)
        except Exception:  # noqa: BLE001 - the thread's edge: what it broke on must be told, not lost
            _log.exception("a bulk stream broke")
        finally:
            with self._lock:
                ours = line in self._lines
                self._lines.discard(line)
            if ours:
                with contextlib.suppress(OSError):
                    line.close()


class _Receiving:
    """One connection that updates come through, one after the other or several streams' parts of one."""

    def __init__(self, line: ssl.SSLSocket, caller: str, desk: Desk) -> None:
        self._line, self._caller, self._desk = line, caller, desk
        self._buffer = memoryview(bytearray(_PIECE_BYTES))
        self._gathering = False
        self._tag = -1
        self._offer: sync_pb2.BulkOffer | None = None
        self._landing: Landing | None = None
        self._told = False
        """That there is nothing to send of it."""

    def run(self) -> None:
        """Until the connection ends: EOFError, OSError, or what the sender is told as ``GeofedError``."""
        while True:
            head = parse(_exactly(self._line, HEAD_BYTES))
            if head.kind is Kind.OFFER:
                self._offered(head)
            elif head.kind is Kind.CHUNK:
                self._chunk(head)
            else:
                raise GeofedError("FRAME_INVALID", f"a sender sent {head.kind.name}")

    def _reply(self, head: Frame, reply: sync_pb2.OfferReply) -> None:
        payload = reply.SerializeToString()
        answer = Frame(Kind.REPLY, head.tag, len(payload), head.offset)
        self._line.sendall(answer.pack() + payload)

    def _offered(self, head: Frame) -> None:
        self._offer = sync_pb2.BulkOffer.FromString(_exactly(self._line, head.length))
        reply, self._landing = self._desk.offered(self._caller, self._offer)
        self._tag, self._told = head.tag, self._landing is None
        self._reply(head, reply)

    def _chunk(self, head: Frame) -> None:
        if head.tag != self._tag or self._offer is None:
            raise GeofedError("FRAME_INVALID", "a chunk of an update that was not offered")
        landing = self._landing
        if landing is not None and head.offset + head.length > landing.total_bytes:
            raise GeofedError("FRAME_INVALID", f"a chunk up to {head.offset + head.length} of {landing.total_bytes}")
        try:
            crc = self._write(head, landing)
        except BaseException:
            if landing is not None:
                with contextlib.suppress(OSError):
                    landing.keep_record()
            raise
        if landing is None or self._landing is None:
            if not self._told:
                # It is whole without this chunk: the sender need not continue.
                self._told = True
                self._reply(Frame(Kind.OFFER, head.tag, 0, 1 << 32), self._desk.landed(self._caller, self._offer))
            return
        if crc != head.crc:
            landing.drop(head.offset, head.length)
            self._line.sendall(Frame(Kind.BAD, head.tag, head.length, head.offset).pack())
            return
        landing.keep_record()
        self._line.sendall(Frame(Kind.ACK, head.tag, head.length, head.offset).pack())
        if landing.whole:
            self._reply(Frame(Kind.OFFER, head.tag, 0, 1 << 32), self._desk.landed(self._caller, self._offer))

    def _gather(self, gathering: bool) -> None:
        """Whether to be woken for many packets at once instead of for each, which costs more than what is in it.

        The kernel wakes nobody for less, even where no more will come: it may be on only as long as more will.
        """
        if gathering != self._gathering:
            self._gathering = gathering
            self._line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, _GATHERED_BYTES if gathering else 1)

    def _write(self, head: Frame, landing: Landing | None) -> int:
        """Take a chunk's bytes off the line and into the file, those before a cut too; returns their CRC-32."""
        left, at, crc = head.length, head.offset, 0
        while left:
            # While it waits with gathering on, more than is gathered is still to come.
            surplus = left - _GATHERED_BYTES - _RECORD_BYTES
            self._gather(surplus > 0)
            piece = self._buffer[: min(surplus if surplus > 0 else left, _PIECE_BYTES)]
            count = _fill(self._line, piece)
            whole, piece = count == len(piece), piece[:count]
            crc = zlib.crc32(piece, crc)
            self._desk.received(self._caller, count)
            if landing is not None:
                try:
                    landing.write(at, piece)
                except GeofedError as error:
                    if error.code != "FENCED":
                        raise
                    # Another stream has completed it; the rest of the chunk is read and dropped.
                    landing = self._landing = None
                else:
                    landing.settle()
            if not whole:
                raise EOFError
            left, at = left - count, at + count
        return crc


def _exactly(line: ssl.SSLSocket, count: int) -> bytes:
    data = bytearray(count)
    if _fill(line, memoryview(data)) < count:
        raise EOFError
    return bytes(data)


def _fill(line: ssl.SSLSocket, view: memoryview) -> int:
    """Read until the view is full or the connection has ended, however; returns the bytes."""
    filled = 0
    try:
        while filled < len(view) and (count := line.recv_into(view[filled:])):
            filled += count
    except OSError:
        if not filled:
            raise
    return filled
