"""Write the metrics of a job from its events."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING

from control_plane._view import Data, event_view, job_view
from control_plane.tracking._points import points_of
from control_plane.tracking._sinks import Sink, open_sink

if TYPE_CHECKING:
    from control_plane.client import ControlClient


async def track_job(client: ControlClient, job: str, places: list[str], *, follow: bool) -> Data:
    """Write the metrics of a job; return how many figures were written. Repeating it gives the same."""
    view, written = job_view(await client.job(job)), 0
    loop = asyncio.get_running_loop()
    # Sinks write to disks and servers. One thread has them all, since not all of them may be used from several ones.
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="tracking") as thread:
        sinks: list[Sink] = []
        try:
            for place in places:
                sinks.append(await loop.run_in_executor(thread, open_sink, place, view["id"]))
            async for event in client.watch(view["id"], follow=follow):
                shown = event_view(event)
                written += len(points_of(shown))
                for sink in sinks:
                    await loop.run_in_executor(thread, sink.write, shown)
        finally:
            try:
                view = job_view(await client.job(view["id"]))
            finally:
                # Also if the job was deleted, or the control plane does not answer: with the view of the beginning.
                await loop.run_in_executor(thread, _close, sinks, view)
    return {"job": view["id"], "state": view["state"], "figures": written}


def _close(sinks: Sequence[Sink], view: Data) -> None:
    """Close all sinks, also if one of them fails."""
    with ExitStack() as closing:
        for sink in sinks:
            closing.callback(sink.close, view)
