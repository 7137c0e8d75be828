"""Replicas elsewhere that connect to the gateway: what all platforms of this kind have in common."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from datetime import timedelta

import httpx2

from geofed_pb.errors import GeofedError
from region_agent.gateway.embedded.config import Config
from region_agent.gateway.embedded.dialled import DialledConnections
from region_agent.gateway.embedded.provider import Provider
from region_agent.gateway.embedded.replicas.running import Running
from region_agent.gateway.quantities import parse_cpu

__all__ = ["RemoteProvider"]

_PROBE_SECONDS = 5.0
"""Timeout of the question whether a replica is ready."""


class RemoteProvider(Provider):
    """The functions of one gateway on a platform whose replicas connect to it."""

    answer_grace = timedelta(seconds=2)  # the replica's own 504 arrives first
    exit_grace = timedelta(seconds=15)  # the platform tells later that a replica has ended

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._dialled = DialledConnections(self._greeted)
        self._stopping = False

    def _greeted(self, replica: str) -> None:
        """Called when a replica has connected, by the name that it was given for that."""

    def handler(self, image: str) -> str:
        """Return an image itself: its entry point names the handler."""
        return image

    def kill(self, running: Running, reason: str, text: str) -> None:
        """Kill a replica that has exceeded a limit. One whose caller has gone notices that by itself and stays."""
        if reason != "gone":
            super().kill(running, reason, text)

    def _fail(self, replica: str, error: GeofedError) -> None:
        """Give up a replica: it ends, its calls fail, and the table decides about another."""
        running = self._running.get(replica)
        if running is None:
            return
        if not running.kill_text:
            running.kill_text, running.kill_code, running.kill_hint = error.message, error.code, error.hint
        self._end(replica)

    def _environment(self, running: Running, cpu: str) -> dict[str, str]:
        """Return a replica's environment, without what it needs to connect."""
        spec = running.spec
        return {
            "OMP_NUM_THREADS": str(max(1, int(parse_cpu(spec.limits.get("cpu") or cpu)))),
            "max_inflight": str(running.limits.max_inflight), "OPENFAAS_NAME": spec.service, **spec.env_vars,
        }  # fmt: skip

    async def _client_of(
        self, running: Running, dialled: str, over: Callable[[], bool], until: float
    ) -> httpx2.AsyncClient | None:
        """Wait until a replica says over its connection that it is ready; returns a client of it.

        None: it is over, or a time has passed, by the monotonic clock.
        """
        http = self._dialled.client(dialled)
        while running.name in self._running and not over() and time.monotonic() < until:
            with contextlib.suppress(httpx2.HTTPError):
                if (await http.get("/_/ready", timeout=_PROBE_SECONDS)).status_code == 200:
                    return http
            await asyncio.sleep(0.05)
        await http.aclose()
        return None
