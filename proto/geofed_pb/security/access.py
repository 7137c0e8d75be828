"""Who may call each RPC: a rule for each one, checked by one interceptor in front of all services of a port."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
import grpc.aio

from geofed_pb.errors import GeofedError
from geofed_pb.files.decoding import Undecodable, decoding
from geofed_pb.rpc import errors_with_code

__all__ = ["AccessInterceptor", "Check", "Rule", "wrapped"]


@dataclass(frozen=True)
class Rule:
    """Who may call an RPC."""

    callers: tuple[str, ...]
    """Roles: of a control port "anyone", "viewer", "member", "auditor", "operator"; of an agent port "region"; of a
    parameter server's ports "peer", "own agent", "worker"."""
    job: str = ""
    """What a caller must be allowed with the job that the request names: "read", its "contents", or "change"; empty:
    nothing."""
    note: str = ""
    """Further condition, for the table in the documentation."""


class Check(Protocol):
    """Checks a call. It is called at its start, and again at each of its messages."""

    async def __call__(self, rule: Rule, context: Any, request: Any, *, again: bool) -> None:
        """Raise ``GeofedError`` unless the caller may make the call.

        ``request``: None if the client streams. ``again``: whether the call was allowed before.
        """


class AccessInterceptor(grpc.aio.ServerInterceptor):
    """Refuses every call that its rule does not allow, and every RPC without a rule.

    A call that lasts is checked again at each message, and by `recheck` when somebody has lost a right.
    """

    def __init__(self, rules: Mapping[str, Rule], check: Check) -> None:
        self._rules, self._check = rules, check
        self._running: dict[asyncio.Task[Any], Callable[[], Awaitable[None]]] = {}
        self._ended: dict[asyncio.Task[Any], GeofedError] = {}
        """Calls that are being ended, with the reason."""
        self._sending: set[asyncio.Task[Any]] = set()
        """Calls that gRPC is sending a message of: cancelled there, they would end without a status."""

    async def recheck(self) -> None:
        """End the calls under way whose caller may not make them any more."""
        for task, check in list(self._running.items()):
            try:
                await check()
            except GeofedError as error:
                self._ended[task] = error
                if task not in self._sending:
                    task.cancel()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wrap a call's handler in the check of its rule."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        method = str(handler_call_details.method)
        rule = self._rules.get(method, Rule(()))
        wrap = self._stream if handler.response_streaming else self._answer
        return wrapped(handler, functools.partial(wrap, rule, method, streams=handler.request_streaming), decoding)

    def _answer(self, rule: Rule, method: str, behaviour: Any, *, streams: bool) -> Any:
        async def call(request: Any, context: Any) -> Any:
            async with errors_with_code(context, method):
                await self._begin(rule, method, context, None if streams else request)
            async with self._tracked(rule, method, context, None if streams else request):
                return await behaviour(self._checked(rule, method, context, request) if streams else request, context)

        return call

    def _stream(self, rule: Rule, method: str, behaviour: Any, *, streams: bool) -> Any:
        async def call(request: Any, context: Any) -> AsyncIterator[Any]:
            known = None if streams else request
            async with errors_with_code(context, method):
                await self._begin(rule, method, context, known)
            async with self._tracked(rule, method, context, known):
                inner = self._checked(rule, method, context, request) if streams else request
                async for message in behaviour(inner, context):
                    async with errors_with_code(context, method):
                        await self._again(rule, context, known)
                    with self._sent():
                        yield message
                    async with errors_with_code(context, method):
                        self._require_going_on()

        return call

    @contextlib.contextmanager
    def _sent(self) -> Iterator[None]:
        task = asyncio.current_task()
        assert task is not None
        self._sending.add(task)
        try:
            yield
        finally:
            self._sending.discard(task)

    def _require_going_on(self) -> None:
        task = asyncio.current_task()
        if task in self._ended:
            raise self._ended[task]

    async def _begin(self, rule: Rule, method: str, context: Any, request: Any) -> None:
        _require_decoded(method, request)
        if not rule.callers:
            raise GeofedError("FORBIDDEN", f"no rule says who may call {method}")
        if "anyone" not in rule.callers:
            await self._check(rule, context, request, again=False)

    async def _again(self, rule: Rule, context: Any, request: Any) -> None:
        if "anyone" not in rule.callers:
            await self._check(rule, context, request, again=True)

    async def _checked(self, rule: Rule, method: str, context: Any, messages: Any) -> AsyncIterator[Any]:
        async for message in messages:
            async with errors_with_code(context, method):
                _require_decoded(method, message)
                await self._again(rule, context, None)
            yield message

    @contextlib.asynccontextmanager
    async def _tracked(self, rule: Rule, method: str, context: Any, request: Any) -> AsyncIterator[None]:
        """Let `recheck` end the call in the context."""
        task = asyncio.current_task()
        assert task is not None
        self._running[task] = functools.partial(self._again, rule, context, request)
        try:
            yield
        except asyncio.CancelledError:
            if task not in self._ended:
                raise
            task.uncancel()
            async with errors_with_code(context, method):
                raise self._ended[task] from None
        finally:
            self._running.pop(task, None)
            self._ended.pop(task, None)


def _require_decoded(method: str, message: Any) -> None:
    if isinstance(message, Undecodable):
        raise GeofedError("FRAME_INVALID", f"what was sent cannot be a message of {method}: {message.reason}")


def wrapped(
    handler: Any,
    wrap: Callable[[Any], Any],
    wrap_decoding: Callable[[Callable[[bytes], Any]], Callable[[bytes], Any]] = lambda decode: decode,
) -> Any:
    """Return a copy of an RPC's handler with another behaviour, which ``wrap`` makes from the present one, and another
    decoding of its messages, which ``wrap_decoding`` makes."""
    kind = f"{'stream' if handler.request_streaming else 'unary'}_{'stream' if handler.response_streaming else 'unary'}"
    make, decode = getattr(grpc, f"{kind}_rpc_method_handler"), handler.request_deserializer
    return make(wrap(getattr(handler, kind)), decode and wrap_decoding(decode), handler.response_serializer)
