"""`support-bundle`: what a report of a defect needs, in one file, without secrets."""

from __future__ import annotations

import io
import json
import os
import platform
import tarfile
from importlib.metadata import distributions
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from control_plane._redaction import redacted
from control_plane._view import Data, event_view, job_view, log_view, region_view
from control_plane.cli._completion import complete_job
from control_plane.cli._connect import ask_control_plane
from control_plane.cli._options import ContextFile, Output
from control_plane.cli._output import emit, fields, say, unwritable
from control_plane.cli._settings import Format

if TYPE_CHECKING:
    from control_plane.client import ControlClient

_NEWEST_JOBS = 3
"""Jobs that are taken if none is named."""
_LOG_LINES = 2000
"""The last lines of a job's log; what explains a failure is among them."""
_LISTED_JOBS = 100
"""Newest jobs whose states are told."""


def support_bundle(
    file: Annotated[Path, typer.Argument(metavar="FILE.tar.gz", help="File to write.", show_default=False)],
    jobs: Annotated[
        list[str] | None,
        typer.Argument(metavar="[JOB]...", help="Jobs it is about [the newest three].", autocompletion=complete_job),
    ] = None,
    context: ContextFile = None,
    output: Output = Format.TABLE,
) -> None:
    """Write versions, regions, and the events and logs of jobs into a file for a report, without secrets."""

    async def ask(client: ControlClient) -> dict[str, Any]:
        return await _collected(client, jobs or [])

    documents = ask_control_plane(context, ask)
    _write(file, {name: redacted(document) for name, document in documents.items()})
    data = {"file": str(file), "bytes": file.stat().st_size, "documents": sorted(documents)}
    emit(data, table=lambda shown: fields([("file", shown["file"]), *_listed(shown)]), name=lambda shown: shown["file"])
    say("values that look like secrets were removed; look through it before you pass it on")


def _listed(shown: Data) -> list[tuple[str, str]]:
    return [("" if at else "holds", name) for at, name in enumerate(shown["documents"])]


async def _collected(client: ControlClient, wanted: list[str]) -> dict[str, Any]:
    """Return the documents by their names in the bundle."""
    listed = [job_view(job) for job in await client.jobs(ended=True, limit=_LISTED_JOBS)]
    found: dict[str, Any] = {
        "versions.json": {"control_plane": (await client.version()).version, **_versions()},
        "regions.json": [region_view(region) for region in await client.regions()],
        "jobs.json": [{key: job[key] for key in ("id", "name", "state", "created_at")} for job in listed],
    }
    for name in wanted or [job["id"] for job in listed[:_NEWEST_JOBS]]:
        view = job_view(await client.job(name))
        job = view["id"]
        found[f"{job}/job.json"] = view
        found[f"{job}/events.json"] = [event_view(event) async for event in client.watch(job, follow=False)]
        found[f"{job}/log.json"] = [log_view(line) async for line in client.logs(job, tail=_LOG_LINES)]
    return found


def _versions() -> dict[str, Any]:
    """Versions of what the command runs with."""
    packages = {str(one.metadata["Name"]): one.version for one in distributions()}
    system = {"python": platform.python_version(), "system": platform.platform()}
    return {**system, "packages": dict(sorted(packages.items()))}


def _write(file: Path, documents: dict[str, Any]) -> None:
    try:
        # Closed to others: logs may say more than their writer thinks.
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as target, tarfile.open(fileobj=target, mode="w:gz") as archive:
            for name, document in documents.items():
                content = json.dumps(document, indent=1, default=str).encode()
                member = tarfile.TarInfo(name)
                member.size, member.mode = len(content), 0o600
                archive.addfile(member, io.BytesIO(content))
    except OSError as error:
        raise unwritable(file, error) from None
