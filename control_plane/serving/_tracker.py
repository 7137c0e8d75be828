"""Keep the process running that writes metrics of all jobs to other tools."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

import structlog

_log = structlog.get_logger("geofed.server")
_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 1.0, 60.0
"""Time before the process is started again; it doubles with each start, until one has lasted."""
_LASTED_SECONDS = 60.0
"""A process that ran so long is started again at once."""
_STOP_SECONDS = 5.0
"""Time to write what is open once its standard input has ended."""


async def keep_tracking(context: Path, places: Sequence[str], log_format: str) -> None:
    """Run the process until cancelled."""
    loop, wait_s = asyncio.get_running_loop(), _FIRST_WAIT_SECONDS
    while True:
        began = loop.time()
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "control_plane.tracking", "--context", str(context), "--log-format", log_format,
            *places, stdin=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            status = await process.wait()
        finally:
            await _stop(process)
        if loop.time() - began > _LASTED_SECONDS:
            wait_s = _FIRST_WAIT_SECONDS
        _log.warning("the process that writes metrics has ended", status=status, again_in_s=wait_s)
        await asyncio.sleep(wait_s)
        wait_s = min(2 * wait_s, _LONGEST_WAIT_SECONDS)


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    if process.stdin is not None:
        process.stdin.close()
    try:
        await asyncio.wait_for(process.wait(), _STOP_SECONDS)
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
