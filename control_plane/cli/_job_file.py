"""The job file argument of a command."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from control_plane._view import bytes_text
from control_plane.cli._output import say

if TYPE_CHECKING:
    from control_plane.client import ControlClient
    from control_plane.spec import LoadedSpec, PackedTask

JobFile = Annotated[Path, typer.Argument(metavar="JOB.yaml", help="The job file.", show_default=False)]


@functools.cache
def _warn(text: str) -> None:
    """Say a warning once in a process: a sweep reads its job file for each trial."""
    say(f"warning: {text}")


def read_job(job_file: Path, overrides: list[str] | None, name: str | None = None) -> tuple[LoadedSpec, PackedTask]:
    """Return the validated job file, and its packed code."""
    from control_plane.spec import check_requirements, check_task, load, pack

    name_override = [f"metadata.name={json.dumps(name)}"] if name is not None else []
    loaded = load(job_file, [*(overrides or ()), *name_override])
    for text in loaded.warnings:
        _warn(text)
    check_task(loaded.folder, loaded.spec.task.module, evaluates_only=loaded.spec.evaluates_only)
    if loaded.spec.task.requirements is not None:
        check_requirements(loaded.folder, loaded.spec.task.requirements)
    return loaded, pack(loaded.folder, loaded.spec.task.module, set(loaded.weights.values()))


async def put_task(client: ControlClient, bundle: PackedTask) -> None:
    """Upload a task folder: what of it is not uploaded already."""

    def begun(files: int, left: int) -> None:
        say(f"uploading {bytes_text(left)} of the task folder: {files:,} of {len(bundle.parts):,} larger files")

    if bundle.parts:
        await client.put_parts(bundle.parts, bundle.folder, begun)
    await client.put_bundle(bundle.content, bundle.digest)
