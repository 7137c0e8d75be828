"""A process beside the control plane that writes the metrics of all jobs: ``serve --track`` starts it.

It is a process of its own since other tools' clients block, and may fail in their own ways. It ends when its standard
input does, so that it never outlives the control plane.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import structlog

from control_plane._view import job_view
from control_plane.client import Context, ControlClient
from control_plane.tracking import parsed_place, track_job
from geofed_pb.errors import GeofedError
from geofed_pb.logs import configure_logs
from geofed_pb.tasks import awaited, background, log_only
from geofed_pb.v1 import control_pb2

_log = structlog.get_logger("geofed.tracking")
_LOOK_SECONDS = 2.0
"""Time between two looks for new jobs."""
_NEWEST = 200
"""Jobs that a look reads; more are submitted within two seconds nowhere."""
_ALL = (1 << 32) - 1
"""More than there are; the request has 32 bits for it."""
_ENDED_SECONDS = 3600.0
"""Jobs that ended at most so long before the start are written again: this process may have been down meanwhile."""
_AT_ONCE = 100
"""Jobs that are followed at once for a place. Those of others are written once one of these has ended."""
_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 2.0, 300.0
"""Time before a failed place is tried again; it doubles with each try."""
_TRIES = 20
"""Failures in a row for a job and a place, an hour and a half all together."""
_LASTED_SECONDS = 600.0
"""A place that was written for so long before it failed has not failed in a row."""


class Tracker:
    """Follows jobs, and writes each to each place that its job file allows."""

    def __init__(self, client: ControlClient, places: list[str]) -> None:
        self._client, self._places = client, places
        self._known: set[str] = set()
        self._free = {place: asyncio.Semaphore(_AT_ONCE) for place in places}
        self._began = time.time()
        self._has_active = False
        """Whether the jobs that were active at the start are known."""

    async def run(self) -> None:
        """Look for new jobs until cancelled."""
        while True:
            try:
                if not self._has_active:
                    # Jobs that are older than the newest ones may still be active when this process starts.
                    self._follow(await self._client.jobs(limit=_ALL))
                    self._has_active = True
                self._follow(await self._client.jobs(ended=True, limit=_NEWEST))
            except GeofedError as error:
                if not error.retryable:
                    raise
                _log.warning("the control plane does not answer", code=error.code, error=error.message)
            await asyncio.sleep(_LOOK_SECONDS)

    def _follow(self, jobs: Iterable[control_pb2.Job]) -> None:
        for job in jobs:
            if job.id in self._known or (job.finished_at and job.finished_at < self._began - _ENDED_SECONDS):
                continue
            self._known.add(job.id)
            for place in self._places:
                background(self._write(job.id, place), log_only, name=f"tracking of {job.id}")

    async def _write(self, job: str, place: str) -> None:
        kind, _ = parsed_place(place)
        wait_s, left = _FIRST_WAIT_SECONDS, _TRIES
        while left:
            began = time.monotonic()
            try:
                async with self._free[place]:
                    wanted = job_view(await self._client.job(job))["spec"].get("tracking", "all")
                    if wanted == "all" or kind in wanted:
                        await track_job(self._client, job, [place.replace("{job}", job)], follow=True)
                return
            except GeofedError as error:
                if error.code == "JOB_NOT_FOUND":
                    return
                text = f"{error.code}: {error.message}"
            except Exception as error:  # noqa: BLE001 - another tool's client raises what it likes; other jobs go on
                text = f"{type(error).__name__}: {error}"
            if time.monotonic() > began + _LASTED_SECONDS:
                wait_s, left = _FIRST_WAIT_SECONDS, _TRIES
            left -= 1
            _log.warning("metrics cannot be written", job=job, place=kind, error=text[:500], again_in_s=wait_s)
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_SECONDS)
        _log.error("metrics are not written", job=job, place=kind)


async def _run(context: Path, places: list[str]) -> None:
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(sys.stdin, ended.set)
    async with ControlClient.connect(Context.load(context)) as client:
        tracking, waiting = awaited(Tracker(client, places).run()), awaited(ended.wait())
        await asyncio.wait({tracking, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if tracking.done():
            tracking.result()
        tracking.cancel()


def main() -> None:
    """Run until standard input ends."""
    parser = argparse.ArgumentParser(prog="python -m control_plane.tracking")
    parser.add_argument("--context", type=Path, required=True)
    parser.add_argument("--log-format", default="text")
    parser.add_argument("places", nargs="+")
    given = parser.parse_args()
    configure_logs(given.log_format)
    asyncio.run(_run(given.context, given.places))


if __name__ == "__main__":
    main()
