"""Watch a job until it ends. If the control plane is unreachable, the job's state is unknown, not failed: retry."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

from control_plane._view import ENDED, Data, clock, event_view, job_view
from control_plane.cli._output import emit_line, say
from control_plane.cli._settings import Format, is_interactive, settings
from geofed_pb.errors import OUTAGE, GeofedError
from geofed_pb.tasks import awaited

if TYPE_CHECKING:
    from control_plane.client import ControlClient

REFRESH = timedelta(seconds=0.5)
"""Time between two status requests for a job that is shown live."""


class Outage:
    """Reports once per outage that the control plane is unreachable, and once that it is reachable again."""

    def __init__(self, report: Callable[[str], None] = say) -> None:
        self._report = report
        self.lasting = False

    def call_failed(self, error: GeofedError) -> None:
        """Report the outage if it begins with this failed call."""
        if not self.lasting:
            self._report(f"control plane unreachable; retrying ({error.message})")
        self.lasting = True

    def call_succeeded(self) -> None:
        """Report the end of the outage if there was one."""
        if self.lasting:
            self._report("control plane reachable again")
        self.lasting = False


class Display(Protocol):
    """Shows a watched job to the user."""

    def note(self, text: str) -> None:
        """Show a line about the connection, not the job."""

    def event(self, event: Data) -> None:
        """Show an event of the job."""

    def job(self, view: Data) -> None:
        """Show the current state of the job."""


class PlainDisplay:
    """Writes one line to stderr for each event."""

    def note(self, text: str) -> None:
        say(text)

    def event(self, event: Data) -> None:
        say(f"{clock(event['at'])}  {event['text']}")

    def job(self, view: Data) -> None:
        """Show nothing: the events have reported each change."""


@dataclass(frozen=True)
class _Watched:
    client: ControlClient
    job: str
    outage: Outage


async def follow_job(client: ControlClient, job: str) -> Data:
    """Show a job, and after a replan its successors, until the last one has ended; return its view.

    With `-o jsonl` the events are written to stdout, too.
    """
    view = job_view(await client.job(job))
    with _display() as display:
        watched = _Watched(client, view["id"], Outage(display.note))
        while True:
            display.job(view)
            view = await _show_until_ended(watched, display)
            if not view["successor"]:
                return view
            watched, view = await _successor_of(watched, view, display.note)


async def _show_until_ended(watched: _Watched, display: Display) -> Data:
    """Show one job until it has ended; return its final view."""
    refreshing = awaited(_keep_refreshing(watched, display)) if not isinstance(display, PlainDisplay) else None
    try:
        async for event in events_of(watched):
            if settings.format is Format.JSONL:
                emit_line(event)
            display.event(event)
        view = await _view_of(watched)
        display.job(view)
    finally:
        if refreshing is not None:
            refreshing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await refreshing
    return view


async def _successor_of(watched: _Watched, view: Data, report: Callable[[str], None]) -> tuple[_Watched, Data]:
    """Return the job that continues the model of a replanned job, and its view."""
    report(f"job {view['id']} continues as {view['successor']}")
    watched = replace(watched, job=view["successor"])
    return watched, await _view_of(watched)


async def events_of(watched: _Watched) -> AsyncIterator[Data]:
    """Yield all events of a job, from the first to the last."""
    async for event in watched.client.watch(watched.job, on_break=watched.outage.call_failed):
        watched.outage.call_succeeded()
        yield event_view(event)


async def wait_for_job(client: ControlClient, job: str, *, running: bool = False) -> Data:
    """Wait without output until a job and its successors have ended, or with `running` until it trains."""
    view = job_view(await client.job(job))
    watched = _Watched(client, view["id"], Outage())
    while True:
        if running and view["state"] in ("running", "finishing"):
            return view
        async for event in events_of(watched):
            if running and event["kind"] == "job.running":
                break
        view = await _view_of(watched)
        if not view["successor"]:
            return view
        watched, view = await _successor_of(watched, view, say)


async def _view_of(watched: _Watched) -> Data:
    """Return the view of a job; while the control plane is unreachable, retry."""
    while True:
        try:
            view = job_view(await watched.client.job(watched.job))
            watched.outage.call_succeeded()
            return view
        except GeofedError as error:
            if error.code not in OUTAGE:
                raise
            watched.outage.call_failed(error)
        await asyncio.sleep(REFRESH.total_seconds())


async def _keep_refreshing(watched: _Watched, display: Display) -> None:
    while True:
        await asyncio.sleep(REFRESH.total_seconds())
        try:
            display.job(job_view(await watched.client.job(watched.job)))
        except GeofedError as error:
            watched.outage.call_failed(error)


def _display() -> contextlib.AbstractContextManager[Display]:
    if is_interactive():
        from control_plane.cli._live import LiveDisplay

        return LiveDisplay()
    return contextlib.nullcontext(PlainDisplay())


def raise_unless_succeeded(view: Data) -> None:
    """Raise ``GeofedError("JOB_CANCELLED")`` or ``("JOB_FAILED")`` if the job has ended that way."""
    if view["state"] not in ENDED or view["state"] == "succeeded":
        return
    if view["state"] == "cancelled":
        raise GeofedError("JOB_CANCELLED", f"job {view['id']} was cancelled")
    error = view["error"] or {"code": "JOB_FAILED", "message": "no cause was reported", "hint": ""}
    hint = error["hint"] or f"`geofed events {view['id']}` shows what happened"
    raise GeofedError("JOB_FAILED", f"job {view['id']} failed: {error['code']}: {error['message']}", hint=hint)
