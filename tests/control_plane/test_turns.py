"""Threads of the control plane take short turns, so that the event loop and transactions wait less for them."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from dataclasses import replace

from control_plane.server import ServeConfig, serve
from control_plane.serving import _turns


def test_a_control_plane_has_short_turns_while_it_serves(serve_config: ServeConfig) -> None:
    before, seen = sys.getswitchinterval(), []
    ready = serve_config.state_dir / "ready.json"

    async def scenario() -> None:
        config = replace(serve_config, ready_file=ready, stop_signals=(signal.SIGUSR1,))
        serving = asyncio.create_task(serve(config))
        async with asyncio.timeout(30):
            while not ready.exists():  # noqa: ASYNC110 - another task writes the file
                await asyncio.sleep(0.05)
            seen.append(sys.getswitchinterval())
            os.kill(os.getpid(), signal.SIGUSR1)
            await serving

    asyncio.run(scenario())
    assert seen == [_turns._SECONDS]
    assert sys.getswitchinterval() == before
