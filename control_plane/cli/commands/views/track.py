"""`track`: write a job's metrics into files and to other tools."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from control_plane._view import Data
from control_plane.cli._connect import ask_control_plane
from control_plane.cli._options import ContextFile, Output
from control_plane.cli._output import emit, fields
from control_plane.cli._settings import Format
from control_plane.cli.commands.jobs import JobArgument

if TYPE_CHECKING:
    from control_plane.client import ControlClient


def track(
    job: JobArgument,
    places: Annotated[
        list[str],
        typer.Argument(
            metavar="PLACE...",
            help="FILE.csv, FILE.jsonl, tensorboard:FOLDER, mlflow:URI, wandb:FOLDER or otlp:URL.",
            show_default=False,
        ),
    ],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue until the job has ended.")] = False,
    context: ContextFile = None,
    output: Output = Format.TABLE,
) -> None:
    """Write the metrics of a job's rounds into files, TensorBoard, MLflow or W&B, or its trace."""

    async def ask(client: ControlClient) -> Data:
        from control_plane.tracking import track_job

        return await track_job(client, job, places, follow=follow)

    again = f"detached; the job continues. Track it again: geofed track {job} {' '.join(places)} --follow"
    told = ask_control_plane(context, ask, detach=again)
    emit(told, table=lambda data: fields(data.items()), name=lambda data: str(data["job"]))
