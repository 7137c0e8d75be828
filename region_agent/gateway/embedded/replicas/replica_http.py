"""HTTP server of a replica: turns requests into events for the handler, and serves the watchdog's two health paths."""

from __future__ import annotations

import contextlib
import json
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler
from typing import Any, BinaryIO
from urllib.parse import parse_qsl, unquote, urlsplit

from region_agent.gateway.functions import EXIT_HEADER

__all__ = ["LEAVING", "Answer", "CallEvent", "ReplicaServer"]

LEAVING = "leaving"
"""Value of the header by which a replica says that it has not begun a call, since it ends."""

_MAX_LINE_BYTES = 65536
"""Longest line of a request."""
_HEALTH_PATHS = ("/_/health", "/_/ready")


@dataclass(frozen=True)
class CallEvent:
    """A call, as it is passed to the handler."""

    body: bytes
    """Body, whole."""
    headers: Message[str, str]
    """Headers, looked up without regard to case."""
    method: str
    """HTTP method."""
    query: Mapping[str, str]
    """Query parameters, the first of each name."""
    path: str
    """Path below the function's route."""


@dataclass(frozen=True)
class Answer:
    """HTTP answer made of the handler's return value."""

    status: int = 200
    """HTTP status."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Headers."""
    body: bytes = b""
    """Body."""

    @classmethod
    def of(cls, returned: object) -> Answer:
        """Convert a handler's return value; raises ``TypeError`` for a type that the contract does not allow."""
        status, headers = 200, {}
        if isinstance(returned, dict):
            status = int(returned.get("statusCode", 200))
            headers = {str(key): str(value) for key, value in (returned.get("headers") or {}).items()}
            returned = returned.get("body")
        if returned is None:
            return cls(status, headers, b"")
        if isinstance(returned, bytes):
            return cls(status, _with_type(headers, "application/octet-stream"), returned)
        if isinstance(returned, str):
            return cls(status, _with_type(headers, "text/plain; charset=utf-8"), returned.encode())
        if isinstance(returned, dict | list):
            return cls(status, _with_type(headers, "application/json"), json.dumps(returned).encode())
        raise TypeError(f"a handler returns None, str, bytes or a dict, not {type(returned).__name__}")


class ReplicaServer(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    """Serves a listening socket; one thread per connection parses, and ``call`` runs the handler elsewhere."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, listener: socket.socket, call: Callable[[CallEvent], Answer], max_inflight: int) -> None:
        super().__init__("", _Connection, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.call = call
        self.slots = threading.BoundedSemaphore(max_inflight)
        self.draining = False
        """True when no further call is accepted; the health paths report it."""
        self._unanswered = 0
        self._changed = threading.Condition()

    @property
    def ready(self) -> bool:
        """Whether the handler is loaded; a server of a replica starts when it is."""
        return True

    def allows(self, headers: Message[str, str]) -> bool:
        """Whether a request with these headers may be answered; only the replica's gateway reaches its socket."""
        return True

    def run(self, event: CallEvent, connection: socket.socket) -> Answer:
        """Run the handler for a call that came over a connection."""
        return self.call(event)

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Count a request as unanswered for the duration of the context."""
        with self._changed:
            self._unanswered += 1
        try:
            yield
        finally:
            with self._changed:
                self._unanswered -= 1
                self._changed.notify_all()

    def drain(self, timeout_s: float) -> bool:
        """Refuse further calls and wait until all present ones are answered; False after the timeout."""
        self.draining = True
        with self._changed:
            return self._changed.wait_for(lambda: not self._unanswered, timeout_s)


class _Connection(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1
    disable_nagle_algorithm = False
    server: ReplicaServer

    def handle_one_request(self) -> None:
        """Read one request and answer it, whatever its method."""
        self.raw_requestline = self.rfile.readline(_MAX_LINE_BYTES + 1)
        if not self.raw_requestline:
            self.close_connection = True
            return
        if not self.parse_request():
            return
        started = time.monotonic()
        if urlsplit(self.path).path not in _HEALTH_PATHS and not self.server.allows(self.headers):
            self.close_connection = True  # its body is not read
            self._write(Answer(403, {"Connection": "close"}, b"the call has no token of this function"), started)
            return
        try:
            body = read_body(self.rfile, self.headers)
        except (ValueError, EOFError) as error:
            self.close_connection = True
            self._write(Answer(400, {}, str(error).encode()), started)
            return
        with self.server.answering():
            answer = self._answer(body)
            with contextlib.suppress(ConnectionError):
                self._write(answer, started)

    def _answer(self, body: bytes) -> Answer:
        parts = urlsplit(self.path)
        if self.server.draining:
            return Answer(503, {"Retry-After": "1", EXIT_HEADER: LEAVING}, b"draining")
        if parts.path == "/_/health":
            return Answer(200, {}, b"OK")
        ready = parts.path == "/_/ready"
        if ready and not self.server.ready:
            return Answer(503, {"Retry-After": "1"}, b"starting")
        if not self.server.slots.acquire(blocking=False):
            return Answer(429, {"Retry-After": "1"}, b"max_inflight reached")
        try:
            if ready:
                return Answer(200, {}, b"OK")
            query = dict(reversed(parse_qsl(parts.query, keep_blank_values=True)))
            event = CallEvent(body, self.headers, self.command, query, unquote(parts.path))
            return self.server.run(event, self.connection)
        finally:
            self.server.slots.release()

    def _write(self, answer: Answer, started: float) -> None:
        self.send_response(answer.status)
        for key, value in answer.headers.items():
            if key.lower() not in ("content-length", "transfer-encoding", "connection"):
                self.send_header(key, value)
        self.send_header("X-Duration-Seconds", f"{time.monotonic() - started:.6f}")
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)
        self.wfile.flush()

    def address_string(self) -> str:
        return "gateway"

    def log_request(self, code: Any = "-", size: Any = "-") -> None:
        """Log nothing: the replica's output belongs to the handler."""


def read_body(stream: BinaryIO | Any, headers: Message[str, str]) -> bytes:
    """The body of a request, with or without Content-Length; raises ``ValueError`` or ``EOFError``."""
    if "chunked" in headers.get("Transfer-Encoding", "").lower():
        return _read_chunks(stream)
    length = int(headers.get("Content-Length", "0"))
    return _exactly(stream, length)


def _read_chunks(stream: BinaryIO | Any) -> bytes:
    body = bytearray()
    while True:
        size_line = stream.readline(_MAX_LINE_BYTES)
        if not size_line.strip():
            raise EOFError("the body is incomplete")
        size = int(size_line.split(b";")[0], 16)
        if size == 0:
            break
        body += _exactly(stream, size)
        stream.readline(_MAX_LINE_BYTES)
    while stream.readline(_MAX_LINE_BYTES).strip():
        pass
    return bytes(body)


def _exactly(stream: BinaryIO | Any, size: int) -> bytes:
    data: bytes = stream.read(size) if size else b""
    if len(data) != size:
        raise EOFError("the body is incomplete")
    return data


def _with_type(headers: dict[str, str], content_type: str) -> dict[str, str]:
    if any(key.lower() == "content-type" for key in headers):
        return headers
    return {**headers, "Content-Type": content_type}
