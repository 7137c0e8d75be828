"""Watching a job to its end, over restarts of the control plane: unknown is not failed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

from control_plane._view import ENDED, Data, clock, event_view, job_view
from control_plane.cli._output import emit_line, say
from control_plane.cli._settings import Format, is_lively, settings
from geofed_pb.errors import GeofedError

if TYPE_CHECKING:
    from control_plane.client import ControlClient

REFRESH = timedelta(seconds=0.5)
"""Between two looks at a job that is shown live."""


class Outage:
    """Says once for each outage that the control plane cannot be reached, and once that it can again."""

    def __init__(self, tell: Callable[[str], None] = say) -> None:
        self._tell = tell
        self.lasting = False

    def broke(self, error: GeofedError) -> None:
        """A call has failed."""
        if not self.lasting:
            self._tell(f"control plane unreachable, trying again ({error.message})")
        self.lasting = True

    def over(self) -> None:
        """A call has succeeded."""
        if self.lasting:
            self._tell("control plane reachable again")
        self.lasting = False


class Display(Protocol):
    """Where a watched job is shown."""

    def note(self, text: str) -> None:
        """Show a line that is not of the job."""

    def event(self, event: Data) -> None:
        """Show that something has happened."""

    def job(self, view: Data) -> None:
        """Show how the job stands."""


class PlainDisplay:
    """One line on stderr for each event."""

    def note(self, text: str) -> None:
        say(text)

    def event(self, event: Data) -> None:
        say(f"{clock(event['at'])}  {event['text']}")

    def job(self, view: Data) -> None:
        """Its events have told it."""


@dataclass(frozen=True)
class _Watched:
    client: ControlClient
    job: str
    outage: Outage


async def follow_job(client: ControlClient, job: str) -> Data:
    """Show a job until it has ended, and those that continue with its model; returns how the last one then stands.

    In jsonl the events are data, too.
    """
    view = job_view(await client.job(job))
    with _display() as display:
        watched = _Watched(client, view["id"], Outage(display.note))
        while True:
            display.job(view)
            view = await _shown(watched, display)
            if not view["successor"]:
                return view
            watched, view = await _next_of(watched, view, display.note)


async def _shown(watched: _Watched, display: Display) -> Data:
    """Show one job until it has ended; returns how it then stands."""
    looking = asyncio.create_task(_keep_looking(watched, display)) if not isinstance(display, PlainDisplay) else None
    try:
        async for event in events_of(watched):
            if settings.format is Format.JSONL:
                emit_line(event)
            display.event(event)
        view = await _look(watched)
        display.job(view)
    finally:
        if looking is not None:
            looking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await looking
    return view


async def _next_of(watched: _Watched, view: Data, tell: Callable[[str], None]) -> tuple[_Watched, Data]:
    """The job that continues with the model of one that was replanned, and how it stands."""
    tell(f"job {view['id']} continues as {view['successor']}")
    watched = replace(watched, job=view["successor"])
    return watched, await _look(watched)


async def events_of(watched: _Watched) -> AsyncIterator[Data]:
    """All events of a job from the first, until the last."""
    async for event in watched.client.watch(watched.job, on_break=watched.outage.broke):
        watched.outage.over()
        yield event_view(event)


async def wait_for_job(client: ControlClient, job: str, *, running: bool = False) -> Data:
    """Wait, silently, until a job and those that continue with its model have ended, or with `running` until it
    trains."""
    view = job_view(await client.job(job))
    watched = _Watched(client, view["id"], Outage())
    while True:
        if running and view["state"] in ("running", "finishing"):
            return view
        async for event in events_of(watched):
            if running and event["kind"] == "job.running":
                break
        view = await _look(watched)
        if not view["successor"]:
            return view
        watched, view = await _next_of(watched, view, say)


async def _look(watched: _Watched) -> Data:
    """How a job stands, as soon as that can be told."""
    while True:
        try:
            view = job_view(await watched.client.job(watched.job))
            watched.outage.over()
            return view
        except GeofedError as error:
            if error.code != "UNAVAILABLE":
                raise
            watched.outage.broke(error)
        await asyncio.sleep(REFRESH.total_seconds())


async def _keep_looking(watched: _Watched, display: Display) -> None:
    while True:
        await asyncio.sleep(REFRESH.total_seconds())
        try:
            display.job(job_view(await watched.client.job(watched.job)))
        except GeofedError as error:
            watched.outage.broke(error)


def _display() -> contextlib.AbstractContextManager[Display]:
    if is_lively():
        from control_plane.cli._live import LiveDisplay

        return LiveDisplay()
    return contextlib.nullcontext(PlainDisplay())


def end_of(view: Data) -> None:
    """Leave with the job's fate. Raises ``GeofedError`` where the job has ended badly."""
    if view["state"] not in ENDED or view["state"] == "succeeded":
        return
    if view["state"] == "cancelled":
        raise GeofedError("JOB_CANCELLED", f"job {view['id']} was cancelled")
    error = view["error"] or {"code": "JOB_FAILED", "message": "no cause was told", "hint": ""}
    hint = error["hint"] or f"`control-plane events {view['id']}` shows what happened"
    raise GeofedError("JOB_FAILED", f"job {view['id']} failed: {error['code']}: {error['message']}", hint=hint)
