"""Contents of the dashboard's pages."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from starlette.requests import Request

from control_plane._plan_view import plan_facts, usd_by_region
from control_plane._view import (
    ENDED,
    Data,
    bytes_text,
    event_view,
    figure_text,
    histogram_text,
    job_view,
    kept_if_cancelled,
    log_view,
    region_view,
    seconds_text,
    slack_text,
    time_text,
    usd_text,
)
from control_plane.core import TERMINAL, wan_links
from control_plane.dashboard._chart import line_chart
from control_plane.dashboard._series import federation_network
from control_plane.dashboard._submission import SubmissionForm, templates
from control_plane.dashboard._timeline import PARTS, means_of, reason_of, timeline_of, took_text
from control_plane.pki import new_secret
from control_plane.service import (
    Caller,
    Federation,
    JobEntry,
    event_message,
    log_message,
    newest,
    reported_workers,
)
from control_plane.store import EventRow, Store
from geofed_pb.errors import GeofedError

__all__ = ["Pages"]

_REFRESH_SECONDS = 5
"""Interval in which pages reload where no scripts run."""
_ACTIVE_JOBS = 60
"""Limit of active jobs on the overview."""
_DRAWN_REGIONS = 40
"""Limit of regions in the picture of the federation: names of more would cover each other."""
_ENDED_JOBS = 20
"""Limit of ended jobs on a page of the overview."""
_REGIONS = 100
"""Limit of regions on a page of the overview."""
_DATASETS = 200
"""Limit of datasets that are proposed for a job."""
_EVENTS = 40
"""Limit of events on a job's page."""
_ROUNDS = 5000
"""Limit of rounds in the loss chart."""
_MEAN_ROUNDS = 20
"""Number of each region's last rounds that the table of their time is the mean of, or a few more."""
_LOG_LINES = 5000
"""Limit of log lines that are searched."""
_SHOWN_LINES = 500
"""Limit of log lines on a page."""
_SHOWN_LOG_BYTES = 100_000
"""Limit of their text."""
_FIGURES = (("time", "seconds", "seconds"), ("WAN", "wan_bytes", "bytes"), ("cost", "usd", "usd"))


class Pages:
    """Renders the pages of one federation."""

    def __init__(self, federation: Federation, charts_script: str, provider: str = "") -> None:
        """``charts_script``: HTML that loads the script which draws charts; empty: there is none. ``provider``: host of
        the identity provider; empty: there is none."""
        self._provider = provider
        self._federation, self._script = federation, charts_script
        self._templates = Environment(
            loader=PackageLoader("control_plane.dashboard"),
            autoescape=select_autoescape(default=True),
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        written = {"bytes": bytes_text, "usd": usd_text, "seconds": seconds_text}
        self._templates.filters |= {
            **written,
            "write": lambda value, how: written[how](value),
            "number": _number,
            "histogram": histogram_text,
            "took": took_text,
            "time": _time,
            "slack": slack_text,
            "slack_class": _slack_class,
            "facts": plan_facts,
            "usd_by_region": usd_by_region,
            "sum_values": lambda values: sum(values.values()),
        }
        # Compiling it takes 15 ms, with Python's lock, which calls would wait for.
        self._templates.get_template("overview.html")

    def sign_in(self, message: str, then: str) -> str:
        """Return the page on which a token is entered. ``then``: path of the page that follows."""
        return self._rendered("signin.html", None, message=message, next=then, provider=self._provider)

    def error(self, error: GeofedError) -> str:
        """Return the page of an error."""
        return self._rendered("error.html", None, code=error.code, message=error.message, hint=error.hint)

    async def overview(self, request: Request, caller: Caller) -> str:
        """Return the page of all jobs that the caller may read, and of all regions."""
        # In a thread, since many jobs and regions take long; what is read is replaced, not changed.
        before, after = request.query_params.get("before", ""), request.query_params.get("regions-after", "")
        latest = await self._federation.lookup.list_jobs(TERMINAL, _ENDED_JOBS + 1, before, caller.reads_of)
        return await asyncio.to_thread(self._overview, caller, latest, after, "authorization" not in request.headers)

    def _overview(self, caller: Caller, latest: list[JobEntry], after: str, session: bool) -> str:
        federation = self._federation
        found, mine = dict(federation.regions), self._read_by(caller)
        active = [job_view(federation.summarise(entry)) for entry in newest(mine, _ACTIVE_JOBS)]
        ended = [job_view(federation.summarise(entry)) for entry in latest[:_ENDED_JOBS]]
        names = sorted(name for name in found if name > after)
        regions = [region_view(federation.describe_region(found[name])) for name in names[:_REGIONS]]
        # Of all, not only of those that are shown.
        sums = federation.sums
        used = sums.workers()
        everything = not caller.reads_of
        totals = {
            "active": len(mine),
            "usd": sums.usd if everything else sum(entry.state.usd for entry in mine.values()),
            "workers": sum((used if everything else reported_workers(mine.values())).values()),
        }
        return self._rendered(
            "overview.html",
            caller,
            live="/live",
            charts_script=self._script,
            session=session,
            active=active,
            totals=totals,
            more=max(0, len(mine) - _ACTIVE_JOBS),
            ended=ended,
            may_submit=caller.may_submit,
            before=ended[-1]["id"] if len(latest) > _ENDED_JOBS else "",
            regions=regions,
            more_regions=len(names) - len(regions),
            used=used,
        )

    def _read_by(self, caller: Caller) -> dict[str, JobEntry]:
        """Return the active jobs that a caller may read, in the order in which they came."""
        jobs = dict(self._federation.jobs)
        # Who may read all is not asked for each of them.
        return {name: entry for name, entry in jobs.items() if caller.may_read(entry.row)} if caller.reads_of else jobs

    def network(self, caller: Caller) -> Data:
        """Return the regions of the federation, the first ones by name, and the links between them.

        A link is as the newest active job that the caller may read has measured it.
        """
        # It runs in a thread: what the service changes meanwhile is copied at once.
        found, mine = dict(self._federation.regions), self._read_by(caller)
        regions = [(name, found[name].state.standing) for name in sorted(found)[:_DRAWN_REGIONS]]
        return federation_network(regions, [wan_links(entry.state) for entry in newest(mine, _ACTIVE_JOBS)])

    async def job(self, entry: JobEntry, caller: Caller) -> str:
        """Return the page of a job."""
        federation = self._federation
        job = job_view(federation.describe(entry))
        newest_of = partial(Store.newest_events, job=job["id"])
        events = await federation.read(partial(newest_of, limit=_EVENTS))
        chart = ""
        if not self._script:
            rounds = await federation.read(partial(newest_of, kind="partition.round", limit=_ROUNDS))
            named = [part["region"] for part in job["partitions"]]
            chart = _loss_chart(named, [(row.region, json.loads(row.data_json)) for row in rounds])
        each = max(2, min(_MEAN_ROUNDS + 1, _ROUNDS // (len(job["partitions"]) or 1)))
        timed = await federation.read(
            partial(Store.newest_of_regions, job=job["id"], kind="partition.round", each=each)
        )
        # In a thread, as whatever may be long.
        return await asyncio.to_thread(self._job, entry, caller, job, chart, events, timed)

    def _job(
        self,
        entry: JobEntry,
        caller: Caller,
        job: Data,
        chart: str,
        events: Sequence[EventRow],
        timed: Sequence[EventRow],
    ) -> str:
        means = means_of(timeline_of(event_view(event_message(row)) for row in timed), _MEAN_ROUNDS)
        return self._rendered(
            "job.html",
            caller,
            live="" if job["state"] in ENDED else f"/live?job={job['id']}",
            job=job,
            chart=chart,
            charts_script=self._script,
            series=f"/jobs/{job['id']}/series",
            events=[event_view(event_message(row)) for row in reversed(events)],
            kept=kept_if_cancelled(job),
            money=_money(job),
            means=means,
            parts=PARTS,
            mean_rounds=_MEAN_ROUNDS,
            reason=reason_of(means, {part["region"]: part["workers"] for part in job["partitions"]}),
            figures=_FIGURES,
            may_change=caller.may_change(entry.row),
            ended=ENDED,
            # Sent with the form, so that a second press of the button makes no second job.
            request_id=new_secret(),
            done=min((part["round"] for part in job["partitions"]), default=0),
        )

    def deletion(self, entry: JobEntry, caller: Caller) -> str:
        """Return the page on which the deletion of a job is confirmed."""
        return self._rendered("delete.html", caller, job=job_view(self._federation.summarise(entry)))

    def compare(self, entries: Sequence[JobEntry], caller: Caller) -> str:
        """Return the page of several jobs beside each other."""
        jobs = [job_view(self._federation.describe(entry)) for entry in entries]
        series = " ".join(f"/jobs/{job['id']}/series" for job in jobs)
        return self._rendered(
            "compare.html",
            caller,
            live=""
            if all(job["state"] in ENDED for job in jobs)
            else f"/live?job={'&job='.join(j['id'] for j in jobs)}",
            jobs=jobs,
            chart="",
            charts_script=self._script,
            series=series,
        )

    def submit(
        self,
        caller: Caller,
        draft: SubmissionForm | None,
        *,
        error: GeofedError | None = None,
        plan: Data | None = None,
        request_id: str = "",
    ) -> str:
        """Return the page on which a job is submitted from a template.

        Args:
            draft: what was entered; None: no template is chosen yet.
            error: what is wrong with it.
            plan: its plan, or the reasons why there is none.
            request_id: of the submission; empty: it cannot be submitted.
        """
        known = self._federation.regions.values()
        held = {one.name for entry in known if entry.catalogue is not None for one in entry.catalogue.datasets}
        return self._rendered(
            "submit.html",
            caller,
            templates=templates(),
            draft=draft,
            error=error,
            plan=plan,
            request_id=request_id,
            datasets=sorted(held)[:_DATASETS],
        )

    async def logs(self, entry: JobEntry, caller: Caller, text: str, region: str) -> str:
        """Return the page of a job's last log lines that contain a text, in one region or in all."""
        job = job_view(self._federation.describe(entry))
        lines = await self._federation.read(lambda store: _last_lines(store, entry.row.id, region))
        wanted = [line for line in lines if text.lower() in line.text.lower()]
        sizes = accumulate(len(line.text.encode()) for line in reversed(wanted[-_SHOWN_LINES:]))
        fit = sum(1 for size in sizes if size <= _SHOWN_LOG_BYTES)
        shown = [log_view(log_message(line)) for line in wanted[len(wanted) - fit :]]
        live = "" if job["state"] in ENDED else f"/live?job={job['id']}"
        return await asyncio.to_thread(
            self._rendered,
            "logs.html",
            caller,
            live=live,
            job=job,
            lines=shown,
            searched=len(lines),
            q=text,
            region=region,
        )

    def _rendered(self, template: str, caller: Caller | None, **values: Any) -> str:
        frame = {
            "federation": self._federation.name,
            "user": "" if caller is None else caller.user or "operator",
            "session": caller is not None,
            "live": "",
            "refresh": _REFRESH_SECONDS,
            "now": time_text(time.time()),
        }
        return self._templates.get_template(template).render(frame | values)


def _last_lines(store: Store, job: str, region: str) -> list[Any]:
    cursor, found = store.log_tail_cursor(job, _LOG_LINES, region=region), list[Any]()
    while rows := store.logs_after(job, cursor, region=region):
        found += rows
        cursor = rows[-1].cursor
    return found


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
    return "" if value is None else figure_text(value)
