"""The ASGI application: routes of calls, authentication, and start and stop of the provider."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hmac
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from geofed_pb.errors import GeofedError, install_hint
from geofed_pb.tasks import awaited
from region_agent.gateway.embedded.async_queue import AsyncQueue, QueuedCall
from region_agent.gateway.embedded.config import Config
from region_agent.gateway.embedded.metrics import Metrics
from region_agent.gateway.embedded.provider import Provider
from region_agent.gateway.embedded.proxy import Answered, ProxiedCall, Proxy
from region_agent.gateway.embedded.replica_table import Refused
from region_agent.gateway.embedded.replicas.running import FunctionLimits
from region_agent.gateway.embedded.system_routes import NAMESPACE, SystemRoutes, function_name
from region_agent.gateway.functions import EXIT_HEADER, INTERNAL_HEADER, BasicAuth

__all__ = ["create_app"]

_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD"]
Endpoint = Callable[[Request], Awaitable[Response]]


def create_app(config: Config, on_ready: Callable[[], None]) -> tuple[Starlette, Provider]:
    """The application, which starts the provider in its lifespan and then calls ``on_ready``."""
    provider = _provider_of(config)
    metrics = Metrics()
    proxy = Proxy(provider, metrics)
    queue = AsyncQueue(proxy, config.limits, config.callback_ca)
    calls = _CallRoutes(config, provider, proxy, queue)
    system = SystemRoutes(provider)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await provider.start()
        on_ready()
        try:
            yield
        finally:
            await queue.stop()
            await provider.stop()

    async def prometheus(request: Request) -> Response:
        replicas = {name: provider.table.available(name) for name in provider.table.names()}
        return Response(metrics.text(replicas), media_type="text/plain; version=0.0.4")

    async def healthz(request: Request) -> Response:
        return PlainTextResponse("OK")

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, Refused)
        headers = {INTERNAL_HEADER: "gateway"}
        if error.exit_reason:
            headers = {INTERNAL_HEADER: "proxy", EXIT_HEADER: error.exit_reason}
        return PlainTextResponse(error.text, error.status, headers)

    routes = [
        Route("/healthz", healthz, methods=["GET", "HEAD"]),
        Route("/metrics", prometheus),
        Route("/function/{name}", calls.invoke, methods=_METHODS),
        Route("/function/{name}/{rest:path}", calls.invoke, methods=_METHODS),
        Route("/async-function/{name}", calls.invoke_async, methods=["POST"]),
        Route("/async-function/{name}", calls.cancel, methods=["DELETE"]),
        Route("/async-function/{name}/{rest:path}", calls.invoke_async, methods=["POST"]),
        *system.routes(),
    ]
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers={Refused: refused})
    if (auth := config.auth) is not None:
        app.add_middleware(_SystemAuth, auth=auth)
    return app, provider


def _provider_of(config: Config) -> Provider:
    if config.docker:
        from region_agent.gateway.embedded.containers import ContainerProvider

        return ContainerProvider(config)
    if config.kubernetes is not None:
        try:
            from region_agent.gateway.embedded.cluster.provider import ClusterProvider
        except ImportError:
            raise GeofedError(
                "CONFIG_INVALID", "the package lightkube is not installed", hint=install_hint("kubernetes")
            ) from None
        return ClusterProvider(config)
    if config.serverless is not None:
        from region_agent.gateway.embedded.serverless.provider import ServerlessProvider

        return ServerlessProvider(config)
    return Provider(config)


class _SystemAuth:
    """Basic authentication for ``/metrics`` and all routes below ``/system/``; calls of functions need none, as in
    OpenFaaS."""

    def __init__(self, app: ASGIApp, auth: BasicAuth) -> None:
        self._app = app
        self._expected = b"Basic " + base64.b64encode(f"{auth.user}:{auth.password}".encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(("/system", "/metrics")):
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                headers = {"WWW-Authenticate": 'Basic realm="Restricted"'}
                await PlainTextResponse("invalid credentials", 401, headers)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class _CallRoutes:
    """Synchronous and asynchronous calls."""

    def __init__(self, config: Config, provider: Provider, proxy: Proxy, queue: AsyncQueue) -> None:
        self._config = config
        self._provider = provider
        self._proxy = proxy
        self._queue = queue

    async def invoke(self, request: Request) -> Response:
        """Call a function and answer with its answer."""
        started = time.time_ns()
        call_id = request.headers.get("X-Call-Id") or str(uuid.uuid4())
        bare = self._config.limits.edition.bare
        identity = {"X-Call-Id": call_id, "X-Start-Time": str(started)}
        if bare and "X-Call-Id" in request.headers:
            del identity["X-Call-Id"]
        try:
            answered = await self._answered(request, await self._read(request, call_id, started))
        except Refused as refusal:
            headers = {**identity, INTERNAL_HEADER: "proxy" if refusal.exit_reason else "gateway"}
            if refusal.exit_reason and not (bare and refusal.exit_reason == "crash"):
                headers[EXIT_HEADER] = refusal.exit_reason
            if bare and refusal.status == 404:
                del headers[INTERNAL_HEADER]
                function = request.path_params["name"]
                refusal.text = f"error finding function {function}.{NAMESPACE}: service not found"
            return PlainTextResponse(refusal.text, refusal.status, headers)
        headers = {**answered.headers, **identity}
        headers["X-Duration-Seconds"] = f"{answered.duration.total_seconds():.6f}"
        headers["X-Served-By"] = f"geofed-gateway/{answered.replica}"
        return Response(answered.body, answered.status, headers)

    async def _answered(self, request: Request, call: ProxiedCall) -> Answered:
        """Call a function; the call ends as soon as its caller has gone."""
        calling = awaited(self._proxy.call(call))
        leaving = awaited(_left(request))
        try:
            await asyncio.wait((calling, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not calling.done():
                raise Refused(499, "the caller has gone")
            return calling.result()
        finally:
            calling.cancel()
            leaving.cancel()

    async def invoke_async(self, request: Request) -> Response:
        """Queue a call and answer 202."""
        started = time.time_ns()
        call_id = request.headers.get("X-Call-Id") or str(uuid.uuid4())
        call = await self._read(request, call_id, started)
        self._queue.put(QueuedCall(call, request.headers.get("X-Callback-Url", ""), str(started)))
        return Response(b"", 202, {"X-Call-Id": call_id, "X-Start-Time": str(started)})

    async def cancel(self, request: Request) -> Response:
        """Take a waiting call out of the queue."""
        self._queue.cancel(request.path_params["name"])
        return Response(b"", 200)

    async def _read(self, request: Request, call_id: str, started_ns: int) -> ProxiedCall:
        name = function_name(request.path_params["name"])
        limits = FunctionLimits.of(self._provider.table.spec(name), self._config)
        limit = self._config.max_body_bytes
        body = bytearray()
        try:
            async with asyncio.timeout(limits.read_timeout.total_seconds()):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > limit:
                        raise Refused(
                            413, f"the body exceeds the limit of {limit} bytes; pass keys and store data in the channel"
                        )
        except TimeoutError:
            raise Refused(504, f"the body of the call did not arrive within {limits.read_timeout}") from None
        except ClientDisconnect:
            raise Refused(400, "the body of the call is incomplete") from None
        path = "/" + request.path_params.get("rest", "")
        headers = {**request.headers, "x-call-id": call_id, "x-start-time": str(started_ns)}
        target = f"{path}?{request.url.query}" if request.url.query else path
        return ProxiedCall(name, request.method, target, headers, bytes(body), call_id)


async def _left(request: Request) -> None:
    """Wait until the caller of a request whose body has been read has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
