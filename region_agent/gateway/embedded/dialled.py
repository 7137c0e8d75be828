"""The connections that replicas elsewhere open to the gateway, over which it calls them (`gateway.dial_out`)."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import hmac
import json
import math
import secrets
import ssl
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from geofed_pb import address
from geofed_pb.errors import GeofedError
from region_agent.gateway.dial_out import (
    ACCEPTED,
    CALLS,
    CERTIFICATE_NAME,
    END,
    MOST_HELLO_BYTES,
    OUTPUT,
    REFUSED,
    DialOut,
    keep_alive,
)
from region_agent.gateway.stream_transport import StreamTransport

__all__ = ["DialledConnections", "Listener"]

_HELLO_SECONDS = 10.0
"""Timeout of the handshake and the first line together."""
_MOST_STRANGERS = 256
"""Most connections that have not said yet whose they are."""
_MOST_WAITING = 128
"""Most connections of a replica that wait for a call; further ones are closed."""
_OUTPUT_BYTES = 65536
"""Bytes that are read at a time from a connection with what a function prints."""
_TOLD_SECONDS = 4.0
"""Time after a replica was given up in which the listener stays to tell it, when it asks again."""
_VALID = datetime.timedelta(days=3650)
"""Validity of the certificate, which each start makes."""

_Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(frozen=True)
class Listener:
    """Who is told what a replica prints, and how it ends, where the platform does not tell."""

    output: Callable[[bytes], object]
    """Called with the next part of its output."""
    ended: Callable[[str, str], object]
    """Called with the reason of its end and a sentence about it, in its own words."""


@dataclass(frozen=True)
class _Hello:
    """A first line with the token of a replica."""

    replica: str
    instance: str
    use: str
    reason: str
    text: str
    left: float | None
    """Seconds until its platform ends it."""


@dataclass(frozen=True)
class _Dismissed:
    """A replica that was given up and has not asked again since."""

    token: str
    until: float
    """When it is no longer waited for, by the monotonic clock."""


class _Unexpected(Exception):
    """A first line of a replica that nobody expects."""


@dataclass
class _Expected:
    """A replica that may connect."""

    token: str
    listener: Listener | None
    instance: str = ""
    """Which process of the replica has connected, if it has said."""
    over: bool = False
    """Whether it has said that it has ended."""
    ends_at: float | None = None
    """When its platform ends it, if it has said; by the monotonic clock."""
    connections: asyncio.Queue[_Connection | None] = field(default_factory=lambda: asyncio.Queue(_MOST_WAITING + 1))
    """Those that wait for a call; None: there will be no more."""
    open: dict[asyncio.StreamWriter, asyncio.StreamReader] = field(default_factory=dict)


class _Protocol(asyncio.StreamReaderProtocol):
    """A connection that closes when the other side has closed it, also while TLS begins."""

    def eof_received(self) -> bool:
        super().eof_received()
        return False


class DialledConnections:
    """The listener, and the connections of each replica."""

    def __init__(self, greeted: Callable[[str], None]) -> None:
        """``greeted`` is called with the name of a replica that has connected."""
        self._greeted = greeted
        self._expected: dict[str, _Expected] = {}
        self._server: asyncio.Server | None = None
        self._strangers: dict[str, dict[asyncio.Task[Any], None]] = {}
        """What accepts the connections that have not said yet whose they are, by the other side's address."""
        self._dismissed: dict[str, _Dismissed] = {}
        """Replicas that end only if they are told so."""
        self._address, self._certificate = "", ""
        self._context: ssl.SSLContext

    async def start(self, host: str, port: int) -> None:
        """Listen; raises ``GeofedError("PORT_IN_USE")``."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        self._certificate, key = _certificate()
        with tempfile.TemporaryDirectory(prefix="geofed-") as folder:
            file = Path(folder) / "both.pem"
            file.touch(mode=0o600)
            file.write_text(self._certificate + key)
            context.load_cert_chain(file)
        self._context = context
        try:
            # Without TLS, which begins in `_accept`: connections count from their first moment.
            self._server = await asyncio.get_running_loop().create_server(
                lambda: _Protocol(asyncio.StreamReader(), self._accept), host.strip("[]"), port
            )
        except OSError as error:
            text = f"cannot listen on {address.joined(host, port)} for functions: {error.strerror or error}"
            hint = "set `server.workerHost` to an address of this machine, and `gateway.port` to a free port"
            raise GeofedError("PORT_IN_USE", text, hint=hint) from error
        self._address = address.joined(host.strip("[]"), self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Close all connections, and the listener. Replicas that end only if they are told so are told first, also
        those that were given up a moment before."""
        for replica in list(self._expected):
            self.forget(replica)
        while any(one.until > time.monotonic() for one in self._dismissed.values()):  # noqa: ASYNC110 - a bounded wait
            await asyncio.sleep(0.05)
        if self._server is not None:
            self._server.close()

    def expect(self, replica: str, listener: Listener | None = None) -> DialOut:
        """Accept connections of a replica from now on; returns what it has to know."""
        self._expected[replica] = _Expected(secrets.token_hex(32), listener)
        return DialOut(self._address, replica, self._expected[replica].token, self._certificate)

    def forget(self, replica: str) -> None:
        """Close a replica's connections and accept no more."""
        connected, now = self.connected(replica), time.monotonic()
        expected = self._expected.pop(replica, None)
        if expected is None:
            return
        self._dismissed = {name: one for name, one in self._dismissed.items() if one.until > now}
        if expected.listener is not None and connected and not expected.over:
            self._dismissed[replica] = _Dismissed(expected.token, now + _TOLD_SECONDS)
        for writer in expected.open:
            writer.transport.abort()
        while not expected.connections.empty():
            expected.connections.get_nowait()
        expected.connections.put_nowait(None)

    def connected(self, replica: str) -> bool:
        """Whether a replica has a connection."""
        expected = self._expected.get(replica)
        return expected is not None and any(
            not writer.is_closing() and not reader.at_eof() for writer, reader in expected.open.items()
        )

    def left(self, replica: str) -> float | None:
        """Return the seconds after which the platform ends a replica, if it has said."""
        expected = self._expected.get(replica)
        return None if expected is None or expected.ends_at is None else expected.ends_at - time.monotonic()

    def client(self, replica: str) -> httpx2.AsyncClient:
        """Return a client of a replica; a call waits until it has a connection."""
        expected = self._expected[replica]

        async def connected() -> _Connection:
            while True:
                found = await expected.connections.get()
                if found is None:
                    expected.connections.put_nowait(None)  # for the next call
                    raise ConnectionResetError("the replica has ended")
                reader, writer = found
                if not reader.at_eof() and not writer.is_closing():
                    return reader, writer
                writer.transport.abort()

        # A connection that has served a call serves the next ones, however much later.
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=None)
        return httpx2.AsyncClient(
            transport=StreamTransport(connected, limits), base_url="http://replica", timeout=None, trust_env=False
        )

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host = str((writer.get_extra_info("peername") or ("",))[0])
        task = self._admit(host)
        try:
            keep_alive(writer.get_extra_info("socket"))
            async with asyncio.timeout(_HELLO_SECONDS):
                # Nothing may be awaited before this, or the first bytes of the handshake are read as plain text.
                await writer.start_tls(self._context, ssl_handshake_timeout=_HELLO_SECONDS)
                hello = self._hello(await reader.readuntil(b"\n"))
                expected = self._expected.get(hello.replica)
                if expected is None or expected.connections.qsize() >= _MOST_WAITING:
                    raise ConnectionRefusedError
                writer.write(ACCEPTED)
                await writer.drain()
        except _Unexpected:
            writer.write(REFUSED)
            writer.close()
            return
        except (OSError, ValueError, EOFError, asyncio.LimitOverrunError, asyncio.CancelledError):
            writer.transport.abort()
            return
        finally:
            self._dismiss(host, task)
        if self._expected.get(hello.replica) is not expected:
            writer.transport.abort()
            return
        listener = expected.listener
        if hello.use == END:
            writer.close()
            expected.over = True
            if listener is not None:
                listener.ended(hello.reason, hello.text)
            return
        expected.open = {one: its for one, its in expected.open.items() if not one.is_closing()} | {writer: reader}
        if hello.left is not None and expected.ends_at is None:
            expected.ends_at = time.monotonic() + hello.left
        if hello.use == CALLS:
            expected.connections.put_nowait((reader, writer))
        self._greeted(hello.replica)
        if hello.use == OUTPUT and listener is not None:
            with contextlib.suppress(OSError):
                while part := await reader.read(_OUTPUT_BYTES):
                    listener.output(part)
            writer.transport.abort()
            self._greeted(hello.replica)

    def _admit(self, host: str) -> asyncio.Task[Any]:
        """Count the connection of this task as a stranger's.

        Where there are too many, the address with the most loses its oldest one: who opens connections and says nothing
        keeps no other out, and one that shares its address (pods behind a NAT) has time to say whose it is.
        """
        task = asyncio.current_task()
        assert task is not None
        if sum(map(len, self._strangers.values())) >= _MOST_STRANGERS:
            most = max(self._strangers, key=lambda one: len(self._strangers[one]))
            oldest = next(iter(self._strangers[most]))
            self._dismiss(most, oldest)
            oldest.cancel()
        self._strangers.setdefault(host, {})[task] = None
        return task

    def _dismiss(self, host: str, task: asyncio.Task[Any]) -> None:
        """Count a connection no longer, if it still counts."""
        strangers = self._strangers.get(host, {})
        strangers.pop(task, None)
        if not strangers:
            self._strangers.pop(host, None)

    def _hello(self, line: bytes) -> _Hello:
        """Return what a first line says; raises ``ValueError``, and `_Unexpected`."""
        given = json.loads(line) if len(line) <= MOST_HELLO_BYTES else None
        members = ("replica", "token", "instance", "use", "reason", "text", "left")
        if not isinstance(given, dict) or not isinstance(given.get("replica"), str):
            raise ValueError("not a first line")
        replica, token, instance, use, reason, text, left = (given.get(one, "") for one in members)
        expected = self._expected.get(replica)
        if not all(isinstance(one, str) for one in (token, instance, use, reason, text, left)):
            raise ValueError("not a first line")
        seconds = float(left) if left else None
        if seconds is not None and not 0 <= seconds < math.inf:
            raise ValueError("no time")
        known = expected or self._dismissed.get(replica)
        if not hmac.compare_digest(token.encode(), (known.token if known else secrets.token_hex(32)).encode()):
            raise _Unexpected
        if expected is None:
            if use in ("", CALLS):
                # A refused connection for output ends no invocation.
                self._dismissed.pop(replica, None)
            raise _Unexpected
        if (use or CALLS) not in (CALLS, *((OUTPUT, END) if expected.listener is not None else ())):
            raise ValueError("no use of a connection")
        expected.instance = expected.instance or instance
        if instance != expected.instance:
            # A platform may run what it was given once twice.
            raise _Unexpected
        return _Hello(replica, instance, use or CALLS, reason, text, seconds)


def _certificate() -> tuple[str, str]:
    """Make a certificate that is its own authority; returns it and its key, PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, CERTIFICATE_NAME)])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + _VALID)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(CERTIFICATE_NAME)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem, plain = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    return made.public_bytes(pem).decode(), key.private_bytes(pem, plain, serialization.NoEncryption()).decode()
