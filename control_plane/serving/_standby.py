"""A control plane that stands by: it listens, and tells everybody who asks that another one leads."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from control_plane.service import LeaderState
from geofed_pb.errors import GeofedError
from geofed_pb.rpc import refuse

_FIRST_MESSAGE_SECONDS = 5.0
"""How long a call may take to send its first message before it is refused without: a round trip or two."""


class Refusing(grpc.GenericRpcHandler):
    """Ends every call of every service with one error, except for the health check."""

    def __init__(self, error: GeofedError) -> None:
        self._handler = _refusing(error)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """Return the handler of a call."""
        return self._handler


class WhileLeading(grpc.aio.ServerInterceptor):
    """Refuses calls once the control plane may not lead any more."""

    def __init__(self, leading: LeaderState) -> None:
        self._leading = leading

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Return the handler of a call."""
        try:
            self._leading.check()
        except GeofedError as error:
            return _refusing(error)
        return await continuation(handler_call_details)


async def standby_server(error: GeofedError, options: list[tuple[str, Any]]) -> grpc.aio.Server:
    """Return a server that ends every call with the error, and whose health check says that it does not serve."""
    server = grpc.aio.server(options=options)
    checks = health.aio.HealthServicer()
    await checks.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    server.add_generic_rpc_handlers((Refusing(error),))
    return server


def _refusing(error: GeofedError) -> Any:
    """Return a handler for calls of any kind: each is a stream of bytes in both directions on the wire."""

    async def end(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[bytes]:
        # A client whose write fails since its call has ended reports INTERNAL in place of the status (grpc/grpc#36066).
        # Every call begins with a message, so the status is sent once that has arrived.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FIRST_MESSAGE_SECONDS):
                await anext(aiter(requests), b"")
        await refuse(context, error)
        yield b""

    return grpc.stream_stream_rpc_method_handler(end)
