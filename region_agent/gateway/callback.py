"""Receiver of the answers of asynchronous calls: ASGI routes that accept each call id once."""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse
from starlette.responses import Response as HttpResponse
from starlette.routing import Route

__all__ = ["CallbackReceiver", "CallbackResult"]

_MAX_BODY_BYTES = 4 * 2**20
"""Largest body of a callback."""


@dataclass(frozen=True)
class CallbackResult:
    """The answer of a function to an asynchronous call."""

    call_id: str
    """Identity of the call."""
    function: str
    """Function that answered, with its namespace if the gateway sends it."""
    status: int
    """HTTP status of the function; 0: the gateway has not sent it."""
    duration_s: float
    """Duration of the call in seconds."""
    body: bytes
    """Body of the answer."""


class CallbackReceiver:
    """Calls ``on_result`` exactly once per call id.

    A gateway may deliver twice. The second delivery is answered like the first and dropped. If ``on_result`` raises,
    the call id stays open and the answer is 500, so that the gateway delivers again. The path contains a random token,
    since gateways send callbacks without credentials.
    """

    def __init__(self, on_result: Callable[[CallbackResult], Awaitable[None]], *, remembered: int = 100_000) -> None:
        self._on_result = on_result
        self._remembered = remembered
        self._token = secrets.token_urlsafe(24)
        self._taken: OrderedDict[str, asyncio.Future[None]] = OrderedDict()

    def url(self, base: str) -> str:
        """The callback URL of a server at ``base`` that mounts ``routes()``."""
        return f"{base.rstrip('/')}/callback/{self._token}"

    def routes(self) -> list[Route]:
        """Routes to mount in a Starlette application."""
        return [Route("/callback/{token}", self._receive, methods=["POST"])]

    async def _receive(self, request: Request) -> HttpResponse:
        if not hmac.compare_digest(request.path_params["token"].encode(), self._token.encode()):
            return PlainTextResponse("unknown callback", 404)
        call_id = request.headers.get("X-Call-Id")
        if not call_id:
            return PlainTextResponse("X-Call-Id is missing", 400)
        try:
            body = await _bounded_body(request)
        except ClientDisconnect:
            return PlainTextResponse("the body is incomplete", 400)
        if body is None:
            return PlainTextResponse(f"the body exceeds {_MAX_BODY_BYTES} bytes", 413)
        try:
            result = CallbackResult(
                call_id=call_id,
                function=request.headers.get("X-Function-Name", ""),
                status=int(request.headers.get("X-Function-Status", "0")),
                duration_s=float(request.headers.get("X-Duration-Seconds", "0")),
                body=body,
            )
        except ValueError:
            return PlainTextResponse("X-Function-Status or X-Duration-Seconds is not a number", 400)
        return await self._take_once(result)

    async def _take_once(self, result: CallbackResult) -> HttpResponse:
        earlier = self._taken.get(result.call_id)
        if earlier is not None:
            await asyncio.wait([earlier])
            return PlainTextResponse("", 202 if not earlier.cancelled() else 500)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._taken[result.call_id] = done
        try:
            await self._on_result(result)
            done.set_result(None)
        finally:
            if not done.done():
                # Failed or cancelled: a repetition of this result must be handled, and those that wait for it must end.
                del self._taken[result.call_id]
                done.cancel()
        self._forget_oldest()
        return PlainTextResponse("", 202)

    def _forget_oldest(self) -> None:
        while len(self._taken) > self._remembered:
            oldest = next(iter(self._taken))
            if not self._taken[oldest].done():
                return
            del self._taken[oldest]


async def _bounded_body(request: Request) -> bytes | None:
    received = bytearray()
    async for chunk in request.stream():
        received += chunk
        if len(received) > _MAX_BODY_BYTES:
            return None
    return bytes(received)
