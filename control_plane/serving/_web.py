"""The dashboard, `/metrics` and `/healthz` over HTTPS."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from control_plane.dashboard import Dashboard
from control_plane.pki import hash_secret
from control_plane.service import LeaderState, MetricsExporter
from control_plane.serving._address import bound_socket, split_address
from geofed_pb.errors import GeofedError
from geofed_pb.tasks import background


def serving_routes(
    meter: MetricsExporter, dashboard: Dashboard, leading: LeaderState, metrics_hash: str
) -> list[BaseRoute]:
    """Return the pages of a control plane that leads. ``metrics_hash``: hash of the token of `/metrics`."""

    async def metrics(request: Request) -> Response:
        kind, _, token = request.headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not hmac.compare_digest(hash_secret(token), metrics_hash):
            return Response("the token of /metrics is missing or wrong", 401, {"WWW-Authenticate": "Bearer"})
        return Response(await meter.exposition(), media_type=CONTENT_TYPE_LATEST)

    async def healthz(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    routes = [*dashboard.routes, Route("/metrics", metrics), Route("/healthz", healthz)]
    return [_while(leading, route) for route in routes]


def standby_routes(refusal: GeofedError) -> list[BaseRoute]:
    """Return the pages of a control plane that stands by: each has status 503, so that a proxy tries the leader."""

    async def unavailable(request: Request) -> Response:
        return JSONResponse({"status": "standby", "message": refusal.message}, 503)

    return [Route("/{path:path}", unavailable, methods=["GET", "POST"])]


def _while(leading: LeaderState, route: Route) -> Route:
    """Have a page answer only while the control plane leads."""

    async def page(request: Request) -> Response:
        try:
            leading.check()
        except GeofedError as error:
            return JSONResponse({"status": "standby", "message": error.message}, 503)
        response: Response = await route.endpoint(request)
        return response

    return Route(route.path, page, methods=route.methods)


class Web:
    """HTTPS server of the dashboard, `/metrics` and `/healthz`; it serves while its context is open."""

    def __init__(
        self,
        routes: Sequence[BaseRoute],
        listen: str,
        certificate: Path,
        key: Path,
        failed: Callable[[GeofedError], object],
    ) -> None:
        self._listen, self._failed = listen, failed
        self._files = certificate, key
        self._server = _WithoutSignals(
            uvicorn.Config(
                Starlette(routes=routes),
                ssl_certfile=str(certificate),
                ssl_keyfile=str(key),
                log_config=None,
                access_log=False,
                lifespan="off",
                ws="none",
                timeout_graceful_shutdown=1,
            )
        )
        self.port = 0

    def reload(self) -> None:
        """Use the present certificate and key for new connections."""
        if self._server.config.ssl is not None:
            self._server.config.ssl.load_cert_chain(*self._files)

    async def __aenter__(self) -> Web:
        self._socket = bound_socket(*split_address(self._listen))
        self.port = self._socket.getsockname()[1]
        self._task = background(self._server.serve(sockets=[self._socket]), self._failed)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.should_exit = True
        await asyncio.wait({self._task})  # its error, if any, was passed to its owner
        self._socket.close()


class _WithoutSignals(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no handlers, since the control plane handles signals itself."""
        yield
