"""The dashboard, `/metrics` and `/healthz` over HTTPS."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from control_plane._address import bound_socket, split_address
from control_plane.dashboard import Dashboard
from control_plane.service import MetricsExporter


class Web:
    """HTTPS server of the dashboard, `/metrics` and `/healthz`; it serves while its context is open."""

    def __init__(self, meter: MetricsExporter, dashboard: Dashboard, listen: str, certificate: Path, key: Path) -> None:
        self._meter = meter
        self._listen = listen
        routes = [*dashboard.routes, Route("/metrics", self._metrics), Route("/healthz", self._healthz)]
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

    async def __aenter__(self) -> Web:
        self._socket = bound_socket(*split_address(self._listen))
        self.port = self._socket.getsockname()[1]
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.should_exit = True
        await self._task
        self._socket.close()

    async def _metrics(self, request: Request) -> Response:
        return Response(await self._meter.exposition(), media_type=CONTENT_TYPE_LATEST)

    async def _healthz(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})


class _WithoutSignals(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no handlers, since the control plane handles signals itself."""
        yield
