"""Asks a Redis server, and asks again where the connection was lost."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.connection import AbstractConnection, Connection, ConnectionPool, SSLConnection, UnixDomainSocketConnection
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    ExecAbortError,
    InvalidResponse,
    NoPermissionError,
    OutOfMemoryError,
    ResponseError,
)
from redis.retry import Retry

from geofed_pb.errors import GeofedError
from sync.channel._address import Address
from sync.channel._meter import Meter
from sync.channel._redis_wire import Argument, InPlaceParser, packed

__all__ = ["LONGEST_BLOCK_SECONDS", "Command", "Lost", "Patience", "Server"]

Command = Sequence[Argument]

LONGEST_BLOCK_SECONDS = 5.0
"""A blocking request is made anew after this, so that a connection that died without a word is noticed."""
_SILENCE_SECONDS = 30.0
_CONNECT_SECONDS = 5.0
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.02, 1.0

_BROKEN = (redis.ConnectionError, redis.TimeoutError, OSError)


class Lost(Exception):
    """The connection broke off, or there was none; the same may go well on another."""


class Patience:
    """How long a server may stay away: pauses that grow, within a bounded time since it was last there."""

    def __init__(self, seconds: float, shown: str) -> None:
        self._seconds, self._shown = seconds, shown
        self.well()

    def well(self) -> None:
        """The server is there."""
        self._pause = _FIRST_PAUSE_SECONDS
        self._since: float | None = None

    def again(self, lost: Lost) -> None:
        """Pause before the next try. Raises ``GeofedError("CHANNEL_UNAVAILABLE")`` when there shall be none."""
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        left = self._since + self._seconds - now
        if left <= 0:
            text = f"Redis at {self._shown} does not answer: {lost}"
            raise GeofedError("CHANNEL_UNAVAILABLE", text) from None
        time.sleep(min(left, self._pause * random.uniform(0.5, 1.0)))
        self._pause = min(2 * self._pause, _LONGEST_PAUSE_SECONDS)


class Server:
    """One Redis server, over a pool of connections that threads share."""

    def __init__(self, address: Address, meter: Meter, patience_seconds: float) -> None:
        self._shown, self._meter, self._patience_seconds = address.shown, meter, patience_seconds
        kind, place = _place(address)
        self._pool = ConnectionPool(
            connection_class=kind,
            username=address.user,
            password=address.password,
            protocol=2,
            parser_class=InPlaceParser,
            socket_timeout=_SILENCE_SECONDS,
            socket_connect_timeout=_CONNECT_SECONDS,
            # What is tried again is metered, so redis-py must not do it by itself.
            retry=Retry(NoBackoff(), 0),
            driver_info=None,
            **place,
        )

    def patience(self) -> Patience:
        return Patience(self._patience_seconds, self._shown)

    def ask(self, commands: Sequence[Command]) -> list[Any]:
        """Send commands at once; their replies. They may be carried out twice.

        Raises ``GeofedError`` where the server refuses one of them, and ``CHANNEL_UNAVAILABLE``.
        """
        patience = self.patience()
        while True:
            try:
                return list(self.ask_in_turn(commands, ahead=len(commands)))
            except Lost as lost:
                patience.again(lost)

    def ask_in_turn(self, commands: Sequence[Command], *, ahead: int = 2) -> Generator[Any, None, None]:
        """Replies one after the other, while so many commands are under way. Raises ``Lost`` when the connection is.

        Whoever stops early gives the connection up.
        """
        connection: Any = self._connected()
        waiting = 0
        try:
            left = iter(commands)
            refused: list[ResponseError] = []
            while True:
                more = list(itertools.islice(left, ahead - waiting))
                waiting += len(more)
                if more:
                    self._try(lambda: connection.send_packed_command(packed(more)))  # noqa: B023 - called at once
                if not waiting:
                    break
                try:
                    reply = self._try(connection.read_response)
                except ResponseError as error:
                    refused.append(error)
                waiting -= 1
                # After a refusal the rest is read, so that the connection can be used on, and given to nobody.
                if not refused:
                    yield reply
            if refused:
                self._meter.count(failures=1)
                raise self._refusal(refused)
        finally:
            if waiting:
                connection.disconnect()
            self._pool.release(connection)

    def close(self) -> None:
        self._pool.disconnect()

    def _connected(self) -> AbstractConnection:
        try:
            return self._pool.get_connection()
        except (AuthenticationError, AuthorizationError):
            raise self._stranger() from None
        except InvalidResponse:
            raise self._no_redis() from None
        except ResponseError as error:
            # The server speaks while the connection is set up: the number of a database that it does not have.
            raise self._refusal([error]) from None
        except _BROKEN as error:
            raise Lost(_text(error)) from None

    def _try(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except (AuthenticationError, AuthorizationError):
            self._meter.count(failures=1)
            raise self._stranger() from None
        except InvalidResponse:
            self._meter.count(failures=1)
            raise self._no_redis() from None
        except _BROKEN as error:
            self._meter.count(failures=1)
            raise Lost(_text(error)) from None

    def _stranger(self) -> GeofedError:
        text = f"Redis at {self._shown} does not take this user and password"
        return GeofedError("UNAUTHENTICATED", text, hint="correct the channel's address")

    def _no_redis(self) -> GeofedError:
        text = f"what answers at {self._shown} is no Redis server"
        return GeofedError("CHANNEL_UNAVAILABLE", text, hint="correct the channel's address")

    def _refusal(self, errors: Sequence[ResponseError]) -> GeofedError:
        """The first of a server's errors that says why, in words of the catalogue."""
        error = next((error for error in errors if not isinstance(error, ExecAbortError)), errors[0])
        if isinstance(error, OutOfMemoryError):
            hint = "raise `maxmemory` of the Redis server, or train with fewer workers or a smaller codec"
            return GeofedError("DISK_FULL", f"Redis at {self._shown} has no memory left", hint=hint)
        if isinstance(error, NoPermissionError):
            return GeofedError("FORBIDDEN", f"Redis at {self._shown}: {error}")
        return GeofedError("CHANNEL_UNAVAILABLE", f"Redis at {self._shown} refused: {error}")


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__


def _place(address: Address) -> tuple[type[AbstractConnection], dict[str, Any]]:
    """The class of a connection, and what it needs to find its server."""
    if address.scheme == "unix":
        return UnixDomainSocketConnection, {"path": address.path, "db": _database(address.options.get("db", "0"))}
    if not address.host:
        raise GeofedError("CONFIG_INVALID", f"the channel's address {address.shown} names no host")
    kind = SSLConnection if address.scheme == "rediss" else Connection
    database = _database(address.path.strip("/") or address.options.get("db", "0"))
    return kind, {"host": address.host, "port": address.port or 6379, "db": database}


def _database(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise GeofedError("CONFIG_INVALID", f"the channel's address names the database {text!r}, not a number")
    return int(text)
