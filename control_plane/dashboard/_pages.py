"""Pages of the dashboard. They show what the commands show, to callers with a token of the federation."""

from __future__ import annotations

import asyncio
import base64
import binascii
import heapq
import json
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from control_plane._view import (
    ENDED,
    Data,
    bytes_text,
    event_view,
    job_view,
    region_view,
    seconds_text,
    slack_text,
    time_text,
    usd_text,
)
from control_plane.core import TERMINAL
from control_plane.dashboard._chart import line_chart
from control_plane.service import Caller, Federation, JobEntry, caller_of, event_message
from control_plane.store import Store
from geofed_pb.errors import GeofedError

__all__ = ["Dashboard"]

_REFRESH_SECONDS = 5
"""Interval in which pages reload."""
_ACTIVE_JOBS = 100
"""Limit of active jobs on the overview."""
_ENDED_JOBS = 20
"""Limit of ended jobs on the overview."""
_REGIONS = 200
"""Limit of regions on a page of the overview."""
_EVENTS = 40
"""Limit of events on a job's page."""
_ROUNDS = 5000
"""Limit of rounds in the loss chart."""
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; img-src 'self'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_STATUS = {"UNAUTHENTICATED": 401, "FORBIDDEN": 403, "JOB_NOT_FOUND": 404}


class Dashboard:
    """The pages of one federation."""

    def __init__(self, federation: Federation, operator_hash: str) -> None:
        """Create the pages; ``operator_hash`` is the hash of the operator's token."""
        self._federation, self._operator_hash = federation, operator_hash
        self._templates = Environment(
            loader=PackageLoader("control_plane.dashboard"),
            autoescape=select_autoescape(default=True),
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.filters |= {
            "bytes": bytes_text,
            "usd": usd_text,
            "seconds": seconds_text,
            "number": _number,
            "time": _time,
            "slack": slack_text,
            "slack_class": _slack_class,
        }
        self._style = (Path(__file__).parent / "style.css").read_text()

    @property
    def routes(self) -> list[Route]:
        """Routes of the overview, of a job's page and of the style sheet; the pages need a token."""
        return [
            Route("/", self._guarded(self._overview)),
            Route("/jobs/{job}", self._guarded(self._job)),
            Route("/style.css", self._stylesheet),
        ]

    # Authentication

    def _guarded(self, page: Callable[[Request, Caller], Awaitable[str]]) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            try:
                return HTMLResponse(await page(request, self._caller(request)), headers=_HEADERS)
            except GeofedError as error:
                status = _STATUS.get(error.code, 500)
                more = {"WWW-Authenticate": 'Basic realm="geofed", charset="UTF-8"'} if status == 401 else {}
                text = self._templates.get_template("error.html").render(
                    code=error.code, message=error.message, hint=error.hint, **self._frame("", refresh=False)
                )
                return HTMLResponse(text, status_code=status, headers={**_HEADERS, **more})

        return answer

    def _caller(self, request: Request) -> Caller:
        """Return the caller. In a browser the password is the token, and the user name is ignored."""
        shown = request.headers.get("authorization", "")
        kind, _, value = shown.partition(" ")
        if kind.lower() == "basic":
            try:
                _, _, token = base64.b64decode(value, validate=True).decode().partition(":")
            except (binascii.Error, UnicodeDecodeError):
                token = ""
            shown = f"Bearer {token}"
        return caller_of(shown, self._operator_hash, self._federation.users.values())

    # Pages

    async def _overview(self, request: Request, caller: Caller) -> str:
        # In a thread, since many jobs and regions take long; what is read is replaced, not changed.
        latest = await self._federation.list_jobs(TERMINAL, _ENDED_JOBS, reader=caller.user)
        after = request.query_params.get("regions-after", "")
        return await asyncio.to_thread(self._overview_page, caller, latest, after)

    def _overview_page(self, caller: Caller, latest: list[JobEntry], after: str) -> str:
        federation = self._federation
        known, found = list(federation.jobs.values()), dict(federation.regions)
        newest = [entry for entry in known if caller.may_read(entry.row)]
        first = heapq.nlargest(_ACTIVE_JOBS, newest, key=lambda entry: entry.row.created_at)
        active = [job_view(federation.summarise(entry)) for entry in first]
        ended = [job_view(federation.summarise(entry)) for entry in latest]
        names = sorted(name for name in found if name > after)
        regions = [region_view(federation.describe_region(found[name])) for name in names[:_REGIONS]]
        used: dict[str, int] = {}
        for part in (part for entry in known for part in entry.state.partitions):
            used[part.region] = used.get(part.region, 0) + (part.report.workers if part.report is not None else 0)
        return self._templates.get_template("overview.html").render(
            active=active,
            more=max(0, len(newest) - _ACTIVE_JOBS),
            ended=ended,
            regions=regions,
            more_regions=len(names) - len(regions),
            used=used,
            **self._frame(caller.user, refresh=True),
        )

    async def _job(self, request: Request, caller: Caller) -> str:
        federation = self._federation
        entry = await federation.find_job(request.path_params["job"], caller.may_read)
        caller.require("read", entry.row)
        job = job_view(federation.describe(entry))
        newest = partial(Store.newest_events, job=job["id"])
        events = await federation.read(partial(newest, limit=_EVENTS))
        rounds = await federation.read(partial(newest, kind="partition.round", limit=_ROUNDS))
        return self._templates.get_template("job.html").render(
            job=job,
            chart=_loss_chart(
                [part["region"] for part in job["partitions"]],
                [(row.region, json.loads(row.data_json)) for row in rounds],
            ),
            events=[event_view(event_message(row)) for row in reversed(events)],
            money=_money(job),
            done=min((part["round"] for part in job["partitions"]), default=0),
            **self._frame(caller.user, refresh=job["state"] not in ENDED),
        )

    async def _stylesheet(self, request: Request) -> Response:
        return Response(self._style, media_type="text/css", headers=_HEADERS)

    def _frame(self, user: str, *, refresh: bool) -> Data:
        return {
            "federation": self._federation.name,
            "user": user or "operator",
            "refresh": _REFRESH_SECONDS if refresh else 0,
            "now": time_text(time.time()),
        }


def _loss_chart(regions: list[str], rounds: list[tuple[str, Any]]) -> str:
    """Return the chart of each region's loss by round; colours are assigned in the order of the sorted regions."""
    series: dict[str, list[tuple[float, float]]] = {region: [] for region in regions}
    for region, data in rounds:
        if isinstance(data.get("loss"), int | float):
            series.setdefault(region, []).append((float(data["round"]), float(data["loss"])))
    return line_chart(series, x_name="round", y_name="loss")


def _money(job: Data) -> list[tuple[str, str, float]]:
    """Return metered costs as (region, item, US dollars)."""
    found: dict[tuple[str, str], float] = {}
    charges = [(part["region"], charge) for part in job["partitions"] for charge in part["money"]]
    charges += [(copy["source"], charge) for copy in job["shards"] for charge in copy["money"]]
    for region, charge in charges:
        key = region, charge["item"]
        found[key] = found.get(key, 0.0) + charge["usd"]
    return [(region, item, usd) for (region, item), usd in sorted(found.items()) if usd]


def _time(text: str | None) -> str:
    """Format a time that `time_text` returned."""
    return f"{text[:10]} {text[11:19]} UTC" if text else ""


def _slack_class(job: Data) -> str:
    """Return the style of a job's deadline."""
    kept = job["successor"] or (job["slack_seconds"] is not None and job["slack_seconds"] >= 0)
    return "good" if kept else "bad"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
