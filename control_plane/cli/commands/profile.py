"""`profile`: measure a task in the regions that hold its data, and predict the cost of configurations."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from control_plane._view import Data, bytes_text, seconds_text, usd_text
from control_plane.cli._connect import ask_control_plane
from control_plane.cli._job_file import JobFile, put_task, read_job
from control_plane.cli._options import ContextFile, Output, Overrides
from control_plane.cli._output import columns, emit, fields, say, unwritable
from control_plane.cli._settings import Format
from geofed_pb.errors import OUTAGE, GeofedError

if TYPE_CHECKING:
    from control_plane.client import ControlClient
    from control_plane.spec import LoadedSpec, PackedTask

_FRONT_ROWS = 8
"""Number of rows shown of a Pareto front."""


def profile(
    job_file: JobFile,
    overrides: Overrides = None,
    memory: Annotated[
        list[int] | None,
        typer.Option("--memory", metavar="MB", min=64, help="Memory of a function to measure with; may be repeated."),
    ] = None,
    request_id: Annotated[
        str | None, typer.Option(help="Repeat the ID of an interrupted profile to continue it.")
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE.svg", help="Also draw the Pareto fronts of time and cost to this file."),
    ] = None,
    context: ContextFile = None,
    output: Output = Format.TABLE,
) -> None:
    """Profile a task for a minute in each region that holds its data; predict time and cost of configurations.

    Later plans of the task use the measurements. No data leave a region.
    """
    import uuid

    loaded, bundle = read_job(job_file, overrides)
    request_id = request_id or str(uuid.uuid4())
    result = ask_control_plane(
        context,
        lambda client: run_profile(client, loaded, bundle, request_id, memory or ()),
        detach=f"detached; continue with --request-id {request_id}",
    )
    emit(result, table=_text, name=lambda data: "\n".join(data["regions"]))
    if plot is not None:
        from control_plane.cli._pareto_chart import front_picture

        try:
            regions = result["regions"].items()
            others = {name: one.get("others", []) for name, one in regions}
            plot.write_text(front_picture({name: one["front"] for name, one in regions}, others))
        except OSError as error:
            raise unwritable(plot, error) from None
        say(f"wrote {plot}")


async def run_profile(
    client: ControlClient, loaded: LoadedSpec, bundle: PackedTask, request_id: str, memories: Sequence[int] = ()
) -> Data:
    """Profile a task and report progress on stderr; a repeated ``request_id`` continues the same profile."""
    await put_task(client, bundle)
    try:
        async for progress in client.profile(loaded.json, bundle.digest, request_id, memories):
            if progress.result_json:
                result: Data = json.loads(progress.result_json)
                return result
            say(f"{progress.region}: {progress.text}" if progress.region else progress.text)
    except GeofedError as error:
        if error.code not in OUTAGE:
            raise
        hint = f"{error.hint}; --request-id {request_id} continues this profile"
        raise GeofedError("UNAVAILABLE", error.message, hint=hint) from None
    raise GeofedError("UNAVAILABLE", "the control plane ended the profile without a result")


def _text(data: Data) -> str:
    parts = [_region_text(name, one) for name, one in data["regions"].items()]
    parts += [f"{name} could not be measured: {one['code']}: {one['message']}" for name, one in data["failed"].items()]
    return "\n\n".join(parts)


def _region_text(name: str, one: Data) -> str:
    channel, noise = one["channel"], one["noise_samples"]
    head = fields(
        [
            ("region", name),
            ("model", f"{one['parameters']:,} parameters, {bytes_text(one['model_bytes'])} on the wire"),
            ("speed", f"{one['samples_per_second']:.0f} samples/s per worker at batch {one['batch']}"),
            ("noise scale", f"{noise:.0f} samples" if noise is not None else "not measurable from the gradients"),
            (
                "channel",
                f"{channel['name']}: put {1e3 * channel['put_seconds']:.1f} ms, get "
                f"{1e3 * channel['get_seconds']:.1f} ms, {channel['down_bytes_per_second'] / 1e6:.0f} MB/s",
            ),
            ("start", f"cold {seconds_text(one['start_seconds'])}, warm {seconds_text(one['again_seconds'])}"),
            ("layers", f"{len(one['layers'])} measured" if one["layers"] else f"none: {one['layers_note']}"),
            ("profile cost", usd_text(one["usd"])),
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
        return f"no configuration in this region: {one['why_none'] or 'none has enough memory'}"
    shown = front
    if len(front) > _FRONT_ROWS:
        step = (len(front) - 1) / (_FRONT_ROWS - 1)
        shown = [front[round(number * step)] for number in range(_FRONT_ROWS)]
    if chosen is not None and chosen not in shown:
        shown = sorted([*shown, chosen], key=lambda row: float(row["seconds"]))
    from sync.collective import collectives

    with_k = collectives(lambda method: method.takes_k)
    table = columns(
        ["", "WORKERS", "MEMORY MB", "COLLECTIVE", "K", "STEP MS", "MERGE MS", "TIME", "USD"],
        [
            [
                "*" if row == chosen else "",
                row["workers"],
                row["memory_mb"],
                row["collective"] if row["workers"] > 1 else "-",
                row["chunks"] if row["collective"] in with_k and row["workers"] > 1 else "-",
                f"{1e3 * row['iteration_seconds']:.1f}",
                f"{1e3 * row['merge_seconds']:.1f}",
                seconds_text(row["seconds"]),
                usd_text(row["usd"]),
            ]
            for row in shown
        ],
    )
    note = "" if chosen is not None else "\nno configuration meets deadline and budget"
    return f"{table}{note}\npredicted for a job in this region alone; *: chosen by the job file's objective"
