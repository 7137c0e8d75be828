"""`compare`: show metrics, time, bytes and cost of several jobs, and what differs between their job files."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from control_plane._figures import metric_text
from control_plane._view import Data, bytes_text, job_view, seconds_text, usd_text
from control_plane.cli._completion import complete_job
from control_plane.cli._connect import ask_control_plane
from control_plane.cli._options import ContextFile, Output
from control_plane.cli._output import beside, emit
from control_plane.cli._settings import Format
from geofed_pb.errors import GeofedError

if TYPE_CHECKING:
    from control_plane.client import ControlClient


def compare(
    jobs: Annotated[
        list[str],
        typer.Argument(
            metavar="JOB JOB...", help="IDs of two or more jobs.", show_default=False, autocompletion=complete_job
        ),
    ],
    context: ContextFile = None,
    output: Output = Format.TABLE,
) -> None:
    """Compare jobs: metrics, rounds, time, WAN bytes, cost, and what differs between their job files."""

    _require_several(jobs)

    async def ask(client: ControlClient) -> Data:
        return compared([job_view(await client.job(job)) for job in jobs])

    emit(ask_control_plane(context, ask), table=_compared_text, name=_names)


def compared(views: list[Data]) -> Data:
    """Return the figures of jobs beside each other, and what differs between their job files.

    Raises ``GeofedError("USAGE")`` for fewer than two jobs.
    """
    from control_plane.cli._plan import differing

    _require_several(views)
    return {"jobs": [_figures(view) for view in views], "differing": differing([view["spec"] for view in views])}


def _require_several(jobs: Sequence[object]) -> None:
    if len(jobs) < 2:
        raise GeofedError("USAGE", "give at least two jobs", hint="`geofed list --all` shows the jobs")


def _figures(view: Data) -> Data:
    """Return what counts of a job: of an ended one its result, else how far it is."""
    result, parts = view["result"], view["partitions"]
    models = view["models"]
    sent = sum(count for part in parts for count in part["sent_bytes"].values())
    return {
        "job": view["id"],
        "state": view["state"],
        "metrics": result["metrics"] if result else models[-1]["metrics"] if models else {},
        "rounds": max((part["round"] for part in parts), default=0),
        "samples": sum(part["samples"] for part in parts),
        "training_seconds": result["training_seconds"] if result else _seconds_since(view["started_at"]),
        "wan_bytes": sum(result["wan_bytes"].values()) if result else sent,
        "usd": result["usd"] if result else view["usd"],
    }


def _seconds_since(started: str | None) -> float:
    if started is None:
        return 0.0
    then = datetime.fromisoformat(started)
    return (datetime.now(then.tzinfo) - then).total_seconds()


def _compared_text(data: Data) -> str:
    jobs = data["jobs"]
    rows = [["state", *(job["state"] for job in jobs)]]
    for name in sorted({name for job in jobs for name in job["metrics"]}):
        rows.append([name, *(metric_text(job["metrics"][name]) if name in job["metrics"] else "-" for job in jobs)])
    rows.append(["rounds", *(str(job["rounds"]) for job in jobs)])
    rows.append(["samples", *(str(job["samples"]) for job in jobs)])
    rows.append(["training time", *(seconds_text(job["training_seconds"]) for job in jobs)])
    rows.append(["WAN bytes", *(bytes_text(job["wan_bytes"]) for job in jobs)])
    rows.append(["cost", *(usd_text(job["usd"]) for job in jobs)])
    rows += [
        [row["key"], *("-" if value is None else str(value) for value in row["values"])] for row in data["differing"]
    ]
    return beside(["", *(job["job"] for job in jobs)], rows)


def _names(data: Data) -> str:
    return "\n".join(job["job"] for job in data["jobs"])
