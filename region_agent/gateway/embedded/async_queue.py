"""Asynchronous calls: a bounded queue in memory, and callbacks with the answers."""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import structlog
from tenacity import (
    AsyncRetrying,
    RetryError,
    retry_if_exception,
    retry_if_exception_type,
    retry_if_result,
    stop_after_attempt,
)

from geofed_pb.tasks import background, log_only
from region_agent.gateway.client import is_loopback
from region_agent.gateway.embedded.config import Profile
from region_agent.gateway.embedded.proxy import Answered, ProxiedCall, Proxy
from region_agent.gateway.embedded.replica_table import Refused
from region_agent.gateway.functions import EXIT_HEADER, INTERNAL_HEADER
from region_agent.gateway.retry import RetryPolicy

__all__ = ["AsyncQueue", "QueuedCall"]

_CALLBACK_ATTEMPTS = 4
"""Attempts to deliver a callback; then its answer is dropped."""
_CALLBACK_TIMEOUT_S = 30.0
"""Timeout of one attempt, in seconds."""
_WAITS_WHILE_BUSY = RetryPolicy(longest=timedelta(milliseconds=800)).waits
"""Before a call is tried again whose function had no free replica."""
_log = structlog.get_logger("gateway.queue")


@dataclass(frozen=True)
class QueuedCall:
    """A call that waits."""

    call: ProxiedCall
    """The call."""
    callback_url: str
    """URL for the answer; empty: the answer is dropped."""
    start_time: str
    """Time at which the call was accepted, in Unix nanoseconds."""


class AsyncQueue:
    """Runs queued calls, a bounded number at a time."""

    def __init__(self, proxy: Proxy, profile: Profile, callback_ca: Path | None) -> None:
        self._proxy = proxy
        self._profile = profile
        self._callback_ca = callback_ca
        self._waiting: deque[QueuedCall] = deque()
        self._running: set[asyncio.Task[None]] = set()
        self._http: httpx2.AsyncClient | None = None

    def put(self, queued: QueuedCall) -> None:
        """Accept a call; raises ``Refused`` 413 or 429, and 400 for a callback in plaintext."""
        if len(queued.call.body) > self._profile.queue_body_bytes:
            raise Refused(413, f"an asynchronous call exceeds the limit of {self._profile.queue_body_bytes} bytes")
        if len(self._waiting) >= self._profile.queue_items:
            raise Refused(429, f"the queue is full: {self._profile.queue_items} calls")
        if queued.callback_url:
            check_callback(queued.callback_url)
        self._waiting.append(queued)
        self._fill()

    def cancel(self, call_id: str) -> None:
        """Take a waiting call out of the queue; raises ``Refused`` 404."""
        for queued in self._waiting:
            if queued.call.call_id == call_id:
                self._waiting.remove(queued)
                return
        raise Refused(404, f"no waiting call has the id {call_id}")

    async def stop(self) -> None:
        """Drop waiting calls and cancel running ones."""
        self._waiting.clear()
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        if self._http is not None:
            await self._http.aclose()

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self._profile.queue_inflight:
            task = background(self._run(self._waiting.popleft()), log_only)
            self._running.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            self._fill()

    async def _run(self, queued: QueuedCall) -> None:
        headers: dict[str, str] = {}
        try:
            answered = await self._call_when_free(queued.call)
            status, body, seconds = answered.status, answered.body, answered.duration.total_seconds()
            headers = {key: value for key, value in answered.headers.items() if key == "content-type"}
        except Refused as refusal:
            status, body, seconds = refusal.status, refusal.text.encode(), 0.0
            headers[INTERNAL_HEADER] = "proxy"
            if refusal.exit_reason:
                headers[EXIT_HEADER] = refusal.exit_reason
        except Exception as error:  # noqa: BLE001 - the caller waits for its callback, whatever has failed
            _log.exception("an asynchronous call failed")
            status, body, seconds = 500, f"{type(error).__name__}: {error}".encode(), 0.0
            headers[INTERNAL_HEADER] = "proxy"
        if queued.callback_url:
            headers |= {
                "X-Call-Id": queued.call.call_id,
                "X-Function-Name": queued.call.function,
                "X-Function-Status": str(status),
                "X-Duration-Seconds": f"{seconds:.6f}",
                "X-Start-Time": queued.start_time,
                "User-Agent": "queue-worker/geofed",
            }
            await self._deliver(queued.callback_url, headers, body)

    async def _call_when_free(self, call: ProxiedCall) -> Answered:
        """Call the function, and retry while all of its replicas are busy."""
        busy = retry_if_exception(lambda error: isinstance(error, Refused) and error.status == 429)
        return await AsyncRetrying(retry=busy, wait=_WAITS_WHILE_BUSY)(self._proxy.call, call)

    async def _deliver(self, url: str, headers: dict[str, str], body: bytes) -> None:
        failed = retry_if_exception_type(httpx2.HTTPError) | retry_if_result(lambda answer: answer.status_code >= 500)
        attempts = AsyncRetrying(retry=failed, stop=stop_after_attempt(_CALLBACK_ATTEMPTS), wait=RetryPolicy().waits)
        try:
            await attempts(self._client().post, url, content=body, headers=headers)
        except RetryError:
            _log.error("callback could not be delivered", call_id=headers["X-Call-Id"])

    def _client(self) -> httpx2.AsyncClient:
        if self._http is None:
            context = ssl.create_default_context(cafile=self._callback_ca)
            self._http = httpx2.AsyncClient(verify=context, timeout=_CALLBACK_TIMEOUT_S, trust_env=False)
        return self._http


def check_callback(url: str) -> None:
    """Raises ``Refused`` 400 for a callback that is no URL or would travel in plaintext."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise Refused(400, f"X-Callback-Url {url!r} is not an http(s) URL")
    if parts.scheme == "http" and not is_loopback(parts.hostname):
        raise Refused(400, f"X-Callback-Url {url} is in plaintext; use https beyond this machine")
