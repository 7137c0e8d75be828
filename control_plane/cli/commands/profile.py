"""`profile`: what a task takes, measured where its data are, and what to make of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from control_plane._view import Data, bytes_text, seconds_text, usd_text
from control_plane.cli._connect import ask_control_plane
from control_plane.cli._job_file import JobFile, read_job
from control_plane.cli._options import ContextFile, Output, Overrides
from control_plane.cli._output import columns, emit, fields, say, unwritable
from control_plane.cli._settings import Format
from geofed_pb.errors import GeofedError

if TYPE_CHECKING:
    from control_plane.client import ControlClient
    from control_plane.spec import LoadedSpec

_SHOWN = 8
"""Rows of a front in a table."""


def profile(
    job_file: JobFile,
    overrides: Overrides = None,
    memory: Annotated[
        list[int] | None,
        typer.Option("--memory", metavar="MB", min=64, help="Measure with so much memory; again for several."),
    ] = None,
    request_id: Annotated[
        str | None, typer.Option(help="Profiles with one id are one; give it again to continue after a break.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE.svg", help="Draw the fronts of time and money there too.")
    ] = None,
    context: ContextFile = None,
    output: Output = Format.TABLE,
) -> None:
    """Profile a task for a minute in every region that holds its data, and predict what configurations would take.

    Later plans of the task rest on it. Nothing of the data leaves a region.
    """
    import uuid

    loaded, bundle = read_job(job_file, overrides)
    mark = request_id or str(uuid.uuid4())
    result = ask_control_plane(
        context,
        lambda client: measured(client, loaded, bundle, mark, memory or ()),
        detach=f"detached; continue with --request-id {mark}",
    )
    emit(result, table=_text, name=lambda data: "\n".join(data["regions"]))
    if plot is not None:
        from control_plane.cli._front import front_picture

        try:
            plot.write_text(front_picture({name: one["front"] for name, one in result["regions"].items()}))
        except OSError as error:
            raise unwritable(plot, error) from None
        say(f"drawn in {plot}")


async def measured(
    client: ControlClient, loaded: LoadedSpec, bundle: tuple[bytes, str], mark: str, memories: Sequence[int] = ()
) -> Data:
    """Measure a task, and tell on the way what is being done; profiles with one ``mark`` are one."""
    content, digest = bundle
    await client.put_bundle(content, digest)
    try:
        async for progress in client.profile(loaded.json, digest, mark, memories):
            if progress.result_json:
                told: Data = json.loads(progress.result_json)
                return told
            say(f"{progress.region}: {progress.text}" if progress.region else progress.text)
    except GeofedError as error:
        if error.code != "UNAVAILABLE":
            raise
        hint = f"{error.hint}; --request-id {mark} continues with this profile"
        raise GeofedError("UNAVAILABLE", error.message, hint=hint) from None
    raise GeofedError("UNAVAILABLE", "the control plane ended without a result")


def _text(data: Data) -> str:
    parts = [_region_text(name, one) for name, one in data["regions"].items()]
    parts += [f"{name} could not be measured: {one['code']}: {one['message']}" for name, one in data["failed"].items()]
    return "\n\n".join(parts)


def _region_text(name: str, one: Data) -> str:
    channel, noise = one["channel"], one["noise_samples"]
    head = fields(
        [
            ("region", name),
            ("model", f"{one['parameters']:,} parameters, {bytes_text(one['model_bytes'])} as it travels"),
            ("speed", f"{one['samples_per_second']:.0f} samples/s of one worker at batch {one['batch']}"),
            ("noise scale", f"{noise:.0f} samples" if noise is not None else "not told by the gradients"),
            (
                "channel",
                f"{channel['name']}: put {1e3 * channel['put_seconds']:.1f} ms, get "
                f"{1e3 * channel['get_seconds']:.1f} ms, {channel['down_bytes_per_second'] / 1e6:.0f} MB/s",
            ),
            ("start", f"{seconds_text(one['start_seconds'])}, again {seconds_text(one['again_seconds'])}"),
            ("layers", f"{len(one['layers'])} measured" if one["layers"] else f"none: {one['layers_note']}"),
            ("cost of this", usd_text(one["usd"])),
        ]
    )
    steps = columns(
        ["BATCH", "MEMORY MB", "STEP MS", "PEAK MB"],
        [
            [point["batch"], point["memory_mb"], f"{1e3 * point['seconds']:.1f}", f"{point['peak_mb']:.0f}"]
            for point in one["steps"]
        ],
    )
    return "\n\n".join([head, steps, _front_text(one)])


def _front_text(one: Data) -> str:
    front, chosen = one["front"], one["chosen"]
    if not front:
        return "no configuration of this region has memory enough"
    shown = front
    if len(front) > _SHOWN:
        step = (len(front) - 1) / (_SHOWN - 1)
        shown = [front[round(number * step)] for number in range(_SHOWN)]
    if chosen is not None and chosen not in shown:
        shown = sorted([*shown, chosen], key=lambda row: float(row["seconds"]))
    table = columns(
        ["", "WORKERS", "MEMORY MB", "MERGED BY", "K", "ITERATION MS", "OF IT MERGE", "TIME", "USD"],
        [
            [
                "*" if row == chosen else "",
                row["workers"],
                row["memory_mb"],
                row["collective"] if row["workers"] > 1 else "-",
                row["chunks"] if row["collective"] == "k-reduce" and row["workers"] > 1 else "-",
                f"{1e3 * row['iteration_seconds']:.1f}",
                f"{1e3 * row['merge_seconds']:.1f}",
                seconds_text(row["seconds"]),
                usd_text(row["usd"]),
            ]
            for row in shown
        ],
    )
    note = "" if chosen is not None else "\nnone of them keeps deadline and budget"
    return f"{table}{note}\n* what the job file's objective takes, if it ran in this region alone; predicted"
