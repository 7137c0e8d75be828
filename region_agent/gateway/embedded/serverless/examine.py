"""Whether a region's functions can run at its cloud's function service, for `geofed agent doctor`."""

from __future__ import annotations

import asyncio
import secrets
import time

from geofed_pb.errors import GeofedError
from region_agent.config import LambdaGateway, RegionConfig, ScfGateway
from region_agent.gateway.embedded.serverless.api import GATEWAY_TAG, RUN_TAG, Hosted
from region_agent.gateway.embedded.serverless.clouds import functions_of

__all__ = ["examine_functions"]

_MARK = "doctor"
_POLL_SECONDS = 0.5
"""Interval at which `doctor` asks whether its function is ready."""


async def examine_functions(config: RegionConfig, gateway: LambdaGateway | ScfGateway) -> str:
    """Return what was found; raises ``GeofedError`` for what would keep functions from running.

    A function is made for that, and deleted; none is invoked.
    """
    run, limit = secrets.token_hex(3), gateway.start_seconds
    tags = {GATEWAY_TAG: _MARK, RUN_TAG: run, "geofed.region": config.name}
    function = Hosted(f"geofed-{_MARK}-{run}-f1", gateway.image, config.capacity.memory_mb, tags)

    def examined() -> str:
        begun = time.monotonic()

        def wait() -> None:
            if time.monotonic() - begun > limit:
                text = f"{config.platform.title} has not made the function within {limit:g} s"
                raise GeofedError("FUNCTION_UNSCHEDULABLE", text)
            time.sleep(_POLL_SECONDS)

        return functions_of(gateway).examine(function, config.capacity.workers, wait)

    return await asyncio.to_thread(examined)
