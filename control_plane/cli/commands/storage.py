"""`storage` and `delete`: what the control plane keeps, and the deletion of ended jobs."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Annotated

import typer

from control_plane._durations import format_duration
from control_plane._view import Data, bytes_text, time_text
from control_plane.cli._completion import complete_job
from control_plane.cli._connect import ask_control_plane, confirm
from control_plane.cli._options import ContextFile, NoInput, Output, Yes
from control_plane.cli._output import columns, emit, fields
from control_plane.cli._settings import Format
from control_plane.cli.commands.jobs import JobArgument

if TYPE_CHECKING:
    from control_plane.client import ControlClient
    from geofed_pb.v1 import control_pb2


def storage(
    job: Annotated[
        str | None,
        typer.Option(metavar="JOB", help="Only what belongs to this job.", autocompletion=complete_job),
    ] = None,
    top: Annotated[int, typer.Option(help="Number of jobs to show, the largest first.", min=0, max=1000)] = 10,
    context: ContextFile = None,
    output: Output = Format.TABLE,
) -> None:
    """Show what the control plane keeps, how long, and what it removes next."""

    async def ask(client: ControlClient) -> Data:
        return _view(await client.storage(job or "", top))

    emit(
        ask_control_plane(context, ask),
        table=_text,
        name=lambda data: "\n".join(kind["kind"] for kind in data["kinds"]),
    )


def delete(
    job: JobArgument,
    yes: Yes = False,
    no_input: NoInput = False,
    context: ContextFile = None,
    output: Output = Format.TABLE,
) -> None:
    """Delete an ended job with its model, code, log, events and measurements, also in its regions."""
    confirm(f"Delete job {job}, its model and all else that belongs to it?", yes=yes)

    async def ask(client: ControlClient) -> Data:
        return deletion_view(await client.delete(job))

    emit(ask_control_plane(context, ask), table=_deleted_text, name=lambda data: str(data["id"]))


def deletion_view(gone: control_pb2.DeleteReply) -> Data:
    """Return the view of a deletion."""
    at, regions = time_text(gone.deleted_at), list(gone.regions)
    return {"id": gone.job, "deleted_at": at, "deleted_by": gone.deleted_by, "regions": regions}


def _deleted_text(data: Data) -> str:
    return fields(
        [
            ("job", data["id"]),
            ("deleted", f"{data['deleted_at']} by {data['deleted_by']}"),
            ("regions", ", ".join(data["regions"])),
        ]
    )


def _view(reply: control_pb2.StorageReply) -> Data:
    return {
        "kinds": [
            {
                "kind": kind.kind,
                "count": kind.count,
                "bytes": kind.bytes,
                "keep_seconds": kind.keep_seconds if kind.HasField("keep_seconds") else None,
                "due_count": kind.due_count,
                "due_bytes": kind.due_bytes,
                "next_at": time_text(kind.next_at),
            }
            for kind in reply.kinds
        ],
        "jobs": [
            {
                "id": one.job,
                "state": one.state,
                "ended_at": time_text(one.ended_at),
                "bytes": sum(one.bytes.values()),
                "by_kind": dict(sorted(one.bytes.items())),
            }
            for one in reply.jobs
        ],
        "database_bytes": reply.database_bytes or None,
        "free_bytes": reply.free_bytes or None,
    }


def _text(data: Data) -> str:
    parts = [
        columns(
            ["KIND", "COUNT", "SIZE", "KEPT", "REMOVED NEXT", "FURTHER"],
            [
                [
                    kind["kind"],
                    kind["count"],
                    bytes_text(kind["bytes"]),
                    _kept_text(kind["keep_seconds"]),
                    f"{kind['due_count']} ({bytes_text(kind['due_bytes'])})" if kind["due_count"] else "-",
                    kind["next_at"] or "-",
                ]
                for kind in data["kinds"]
            ],
            leave_out=("FURTHER", "COUNT"),
        )
    ]
    if data["jobs"]:
        rows = [[one["id"], one["state"], one["ended_at"] or "-", bytes_text(one["bytes"])] for one in data["jobs"]]
        parts.append(columns(["JOB", "STATE", "ENDED", "SIZE"], rows, leave_out=("ENDED",)))
    sizes = {"database": data["database_bytes"], "free": data["free_bytes"]}
    parts.append(fields([(name, bytes_text(size)) for name, size in sizes.items() if size is not None]))
    return "\n\n".join(part for part in parts if part)


def _kept_text(seconds: float | None) -> str:
    return "until deleted" if seconds is None else format_duration(timedelta(seconds=seconds))
