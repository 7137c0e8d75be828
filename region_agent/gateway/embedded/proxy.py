"""Forwards calls to replicas and enforces their timeouts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import httpx2

from region_agent.gateway.embedded.metrics import Metrics
from region_agent.gateway.embedded.provider import Provider, unreachable
from region_agent.gateway.embedded.replica_table import OverLimit, Refused
from region_agent.gateway.embedded.replicas.replica_http import LEAVING
from region_agent.gateway.embedded.replicas.running import Running
from region_agent.gateway.functions import EXIT_HEADER
from region_agent.gateway.quantities import format_duration, parse_duration

__all__ = ["Answered", "ProxiedCall", "Proxy"]

_EXIT = EXIT_HEADER.lower()
_MOST_LEAVING = 5
"""Most replicas of which each may say that it ends, for one call."""
_HOP_HEADERS = frozenset(
    ("connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "host", "content-length", "expect")
)
"""Headers of one connection, which are not forwarded."""
_OWN_HEADERS = frozenset(("date", "server", "x-duration-seconds"))
"""Headers that the gateway sets itself."""
_PRIVATE_HEADERS = frozenset(("authorization", "proxy-authorization", "cookie"))
"""Headers that are not forwarded to functions: job code must not get the gateway's password if a client sends it."""


@dataclass(frozen=True)
class ProxiedCall:
    """A call of a function."""

    function: str
    """Function, without namespace."""
    method: str
    """HTTP method."""
    path: str
    """Path below the function's route, with its query."""
    headers: Mapping[str, str]
    """Headers."""
    body: bytes
    """Body, whole."""
    call_id: str
    """Identity of the call."""


@dataclass(frozen=True)
class Answered:
    """Answer of a call."""

    status: int
    """HTTP status."""
    headers: Mapping[str, str]
    """Headers of the function's answer."""
    body: bytes
    """Body."""
    duration: timedelta
    """Time in the replica."""
    replica: str
    """Replica that answered."""


class Proxy:
    """Sends calls to replicas."""

    def __init__(self, provider: Provider, metrics: Metrics) -> None:
        self._provider = provider
        self._metrics = metrics

    async def call(self, call: ProxiedCall) -> Answered:
        """Call a function; raises ``Refused`` for every failure that is not the function's own."""
        started = time.monotonic()
        self._metrics.started(call.function)
        status = 500
        try:
            answered = await self._call(call)
            status = answered.status
            return answered
        except Refused as refusal:
            status = refusal.status
            raise
        finally:
            self._metrics.ended(call.function, status, time.monotonic() - started)

    async def _call(self, call: ProxiedCall) -> Answered:
        """Call a replica, and another one if the platform is just ending the first."""
        for _ in range(_MOST_LEAVING):
            answered = await self._call_one(call)
            if answered.headers.get(_EXIT) != LEAVING:
                return answered
        raise Refused(503, f"function {call.function} has only replicas that end")

    async def _call_one(self, call: ProxiedCall) -> Answered:
        running = await self._provider.acquire(call.function)
        try:
            limit = time_limit(running.limits.call_timeout, call.headers)
            started = time.monotonic()
            answer = await self._exchange(running, call, limit)
            if answer.headers.get(_EXIT) == LEAVING:
                self._provider.apply(OverLimit(running.name))
            duration = timedelta(seconds=time.monotonic() - started)
            headers = {key: value for key, value in answer.headers.items() if key not in _HOP_HEADERS | _OWN_HEADERS}
            return Answered(answer.status_code, headers, answer.content, duration, running.name)
        finally:
            self._provider.release(running)

    async def _exchange(self, running: Running, call: ProxiedCall, limit: timedelta) -> httpx2.Response:
        headers = {
            key: value
            for key, value in call.headers.items()
            if key.lower() not in _HOP_HEADERS and key.lower() not in _PRIVATE_HEADERS
        }
        assert running.http is not None  # only replicas that are ready get calls
        request = running.http.build_request(call.method, call.path, content=call.body, headers=headers)
        try:
            async with asyncio.timeout((limit + self._provider.answer_grace).total_seconds()):
                return await running.http.send(request)
        except TimeoutError:
            text = (
                f"function {call.function} did not answer within {format_duration(limit)}; "
                f"replica {running.name} was killed and is replaced"
            )
            self._provider.kill(running, "timeout", text)
            raise Refused(504, text, exit_reason="timeout") from None
        except asyncio.CancelledError:
            self._provider.kill(running, "gone", f"the caller has gone; replica {running.name} was killed")
            raise
        except httpx2.HTTPError as error:
            cause = await self._cause(running, error)
            if self._provider.table.limits.bare:
                raise Refused(500, unreachable(call.function), exit_reason="crash") from error
            raise Refused(
                500, f"function {call.function}: {cause}", exit_reason=running.kill_reason or "crash"
            ) from error

    async def _cause(self, running: Running, error: httpx2.HTTPError) -> str:
        """Return the reason of a lost connection; the exit of the process is reported slightly later than that."""
        try:
            return await asyncio.wait_for(asyncio.shield(running.exited), self._provider.exit_grace.total_seconds())
        except TimeoutError:
            return f"replica {running.name} closed the connection: {error}"


def time_limit(bound: timedelta, headers: Mapping[str, str]) -> timedelta:
    """Return the timeout of a call: ``X-Timeout`` may shorten it, but not lengthen it; raises ``Refused`` 400."""
    requested = next((value for key, value in headers.items() if key.lower() == "x-timeout"), None)
    if requested is None:
        return bound
    try:
        return min(bound, parse_duration(requested))
    except ValueError as error:
        raise Refused(400, f"X-Timeout: {error}") from error
