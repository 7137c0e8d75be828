"""The control plane of `scale.py`, in a process of its own that counts what holds its event loop.

    python tests/bench/scale_server.py STATE_DIR READY_FILE SLOW_FILE [DATABASE_URL]

A callback that takes more than the limit of processor time is written to SLOW_FILE, one JSON line each. Processor time
is counted instead of time, since the load runs on the same cores.
"""

from __future__ import annotations

import asyncio
import asyncio.events
import cProfile
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from control_plane.serving._garbage import collected_later
from geofed_pb.logs import configure_logs

with collected_later():  # like the command
    from control_plane.server import ServeConfig, serve

SLOW_SECONDS = 0.020
"""Processor time that a callback may take."""


def main() -> None:
    state, ready, slow, *url = sys.argv[1:]
    configure_logs("json")
    _watch_callbacks(Path(slow))
    anywhere = "127.0.0.1:0"
    config = ServeConfig(
        Path(state),
        listen=anywhere,
        agent_listen=anywhere,
        metrics_listen=anywhere,
        database_url=url[0] if url else None,
        ready_file=Path(ready),
    )
    profile = cProfile.Profile() if os.environ.get("SCALE_PROFILE") else None
    if profile is not None:
        profile.enable()
    asyncio.run(serve(config))
    if profile is not None:
        profile.dump_stats(os.environ["SCALE_PROFILE"])


def _watch_callbacks(path: Path) -> None:
    run = asyncio.events.Handle._run

    def timed(handle: Any) -> None:
        begun = time.thread_time()
        run(handle)
        took = time.thread_time() - begun
        if took > SLOW_SECONDS:
            with path.open("a") as file:
                file.write(json.dumps({"at": time.time(), "seconds": took, "callback": _name(handle)}) + "\n")

    asyncio.events.Handle._run = timed  # type: ignore[method-assign]


def _name(handle: Any) -> str:
    callback = handle._callback
    task = getattr(callback, "__self__", None)
    if isinstance(task, asyncio.Task):
        coroutine = task.get_coro()
        return getattr(coroutine, "__qualname__", repr(coroutine))
    return repr(callback)[:200]


if __name__ == "__main__":
    main()
