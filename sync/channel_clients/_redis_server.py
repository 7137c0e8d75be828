"""Requests to a Redis server, repeated when the connection is lost."""

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
from sync.channel_clients._address import Address
from sync.channel_clients._meter import Meter
from sync.channel_clients._redis_wire import Argument, InPlaceParser, packed

__all__ = ["MAX_BLOCK_SECONDS", "Command", "ConnectionLost", "RetryTimer", "Server"]

Command = Sequence[Argument]

MAX_BLOCK_SECONDS = 5.0
"""A blocking request is repeated after this time, so that a dead connection is noticed."""
_SOCKET_TIMEOUT_SECONDS = 30.0
"""Longest time without a byte of an answer. A choice: more than a large value takes on a slow link."""
_CONNECT_TIMEOUT_SECONDS = 5.0
"""Longest time for a connection to be made. A choice: several round trips with a lost packet."""
_MIN_PAUSE_SECONDS = 0.02
"""Pause before the first retry; it doubles with each retry."""
_MAX_PAUSE_SECONDS = 1.0
"""Longest pause between retries."""

_BROKEN = (redis.ConnectionError, redis.TimeoutError, OSError)


class ConnectionLost(Exception):
    """Raised when the connection is lost or cannot be opened; the request may succeed on another one."""


class RetryTimer:
    """Pauses between retries, and their timeout since the server last answered."""

    def __init__(self, seconds: float, shown: str) -> None:
        self._seconds, self._shown = seconds, shown
        self.reset()

    def reset(self) -> None:
        """Record that the server has answered."""
        self._pause = _MIN_PAUSE_SECONDS
        self._since: float | None = None

    def pause(self, lost: ConnectionLost) -> None:
        """Wait before the next retry. Raises ``GeofedError("CHANNEL_UNAVAILABLE")`` after the timeout."""
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        left = self._since + self._seconds - now
        if left <= 0:
            text = f"Redis at {self._shown} does not answer: {lost}"
            raise GeofedError("CHANNEL_UNAVAILABLE", text) from None
        time.sleep(min(left, self._pause * random.uniform(0.5, 1.0)))
        self._pause = min(2 * self._pause, _MAX_PAUSE_SECONDS)


class Server:
    """One Redis server, with a pool of connections that threads share."""

    def __init__(self, address: Address, meter: Meter, timeout_seconds: float) -> None:
        self._shown, self._meter, self._timeout_seconds = address.shown, meter, timeout_seconds
        kind, endpoint = _endpoint(address)
        self._pool = ConnectionPool(
            connection_class=kind,
            username=address.user,
            password=address.password,
            protocol=2,
            parser_class=InPlaceParser,
            socket_timeout=_SOCKET_TIMEOUT_SECONDS,
            socket_connect_timeout=_CONNECT_TIMEOUT_SECONDS,
            # Retries are metered here, so redis-py must not retry by itself.
            retry=Retry(NoBackoff(), 0),
            driver_info=None,
            **endpoint,
        )

    def retries(self) -> RetryTimer:
        return RetryTimer(self._timeout_seconds, self._shown)

    def ask(self, commands: Sequence[Command]) -> list[Any]:
        """Send commands together and return their replies. After a lost connection they are sent again, so they may be
        executed twice.

        Raises ``GeofedError`` if the server refuses one of them, or ``CHANNEL_UNAVAILABLE``.
        """
        retries = self.retries()
        while True:
            try:
                return list(self.ask_pipelined(commands, ahead=len(commands)))
            except ConnectionLost as lost:
                retries.pause(lost)

    def ask_pipelined(self, commands: Sequence[Command], *, ahead: int = 2) -> Generator[Any, None, None]:
        """Yield replies in order, with at most ``ahead`` commands in flight. Raises ``ConnectionLost``.

        If the caller stops early, the connection is closed.
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
                # After a refusal the other replies are read and dropped, so that the connection can be used again.
                if not refused:
                    yield reply
                reply = None  # so that it can be freed while the next one is read
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
            raise self._unauthenticated() from None
        except InvalidResponse:
            raise self._not_redis() from None
        except ResponseError as error:
            # The server answers during the setup of the connection, for instance that the database does not exist.
            raise self._refusal([error]) from None
        except _BROKEN as error:
            raise ConnectionLost(_text(error)) from None

    def _try(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except (AuthenticationError, AuthorizationError):
            self._meter.count(failures=1)
            raise self._unauthenticated() from None
        except InvalidResponse:
            self._meter.count(failures=1)
            raise self._not_redis() from None
        except _BROKEN as error:
            self._meter.count(failures=1)
            raise ConnectionLost(_text(error)) from None

    def _unauthenticated(self) -> GeofedError:
        text = f"Redis at {self._shown} rejects this user and password"
        return GeofedError("UNAUTHENTICATED", text, hint="correct the channel's address")

    def _not_redis(self) -> GeofedError:
        text = f"the server at {self._shown} is not a Redis server"
        return GeofedError("CHANNEL_UNAVAILABLE", text, hint="correct the channel's address")

    def _refusal(self, errors: Sequence[ResponseError]) -> GeofedError:
        """Return the first of the server's errors that states a reason, as an error of the catalogue."""
        error = next((error for error in errors if not isinstance(error, ExecAbortError)), errors[0])
        if isinstance(error, OutOfMemoryError):
            hint = "raise `maxmemory` of the Redis server, or train with fewer workers or a smaller codec"
            return GeofedError("DISK_FULL", f"Redis at {self._shown} has no memory left", hint=hint)
        if isinstance(error, NoPermissionError):
            return GeofedError("FORBIDDEN", f"Redis at {self._shown}: {error}")
        return GeofedError("CHANNEL_UNAVAILABLE", f"Redis at {self._shown} refused: {error}")


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__


def _endpoint(address: Address) -> tuple[type[AbstractConnection], dict[str, Any]]:
    """Return the class of a connection, and its arguments."""
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
