"""Calls under way are ended once their caller has lost the right to make them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from geofed_pb.errors import GeofedError
from geofed_pb.security.access import AccessInterceptor, Rule


class Context:
    """Keeps the status that a call ends with."""

    status: Any = None

    def set_trailing_metadata(self, metadata: Any) -> None:
        pass

    async def abort(self, code: Any, details: str = "", trailing_metadata: Any = ()) -> None:
        self.status = code
        raise grpc.aio.AbortError


def test_a_call_that_is_ended_while_a_message_is_sent_ends_with_a_status() -> None:
    removed = False

    async def check(*_: object, again: bool) -> None:
        if removed:
            raise GeofedError("UNAUTHENTICATED", "the user was removed")

    async def messages(request: object, context: object) -> AsyncIterator[str]:
        yield "first"
        await asyncio.Event().wait()

    async def scenario() -> None:
        nonlocal removed
        interceptor, context = AccessInterceptor({}, check), Context()
        call = interceptor._stream(Rule(("user",)), "Watch", messages, streams=False)
        answers = call("request", context)
        assert await anext(answers) == "first"
        removed = True
        await interceptor.recheck()
        await asyncio.sleep(0)  # gRPC is sending the message, in the call's task; a cancellation would end it here
        async with asyncio.timeout(30):
            with pytest.raises(grpc.aio.AbortError):
                await anext(answers)
        assert context.status == grpc.StatusCode.PERMISSION_DENIED

    asyncio.run(scenario())
