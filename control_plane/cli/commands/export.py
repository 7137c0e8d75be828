"""`export`: write a model of a job, verified, with a manifest."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from control_plane._view import ENDED, Data, job_view, model_text, standing_text
from control_plane.cli._connect import ask_control_plane, confirm
from control_plane.cli._options import ContextFile, NoInput, Output, Yes
from control_plane.cli._output import emit, fields, unwritable
from control_plane.cli._settings import Format
from control_plane.cli.commands.jobs import JobArgument
from geofed_pb.errors import OUTAGE, GeofedError

if TYPE_CHECKING:
    from control_plane.client import ControlClient

_ATTEMPTS = 20
"""Number of download attempts over lost connections."""
_RETRY_SECONDS = 0.5
"""Pause between two attempts."""


class Part(StrEnum):
    """What `export` writes."""

    WHOLE = "whole"
    TRAINED = "trained"
    PEFT = "peft"


def export(
    job: JobArgument,
    output_file: Annotated[
        Path | None,
        typer.Option(
            "--output-file",
            metavar="FILE",
            help="File to write; default: JOB.safetensors. With `--as peft` a folder; default: JOB.",
            show_default=False,
        ),
    ] = None,
    round_: Annotated[
        str | None,
        typer.Option(
            "--round",
            metavar="N|best",
            help="The model of a kept round, or the best one by `train.best`; default: the last one.",
            show_default=False,
        ),
    ] = None,
    region: Annotated[
        str | None,
        typer.Option(
            "--region",
            metavar="NAME",
            help="A region's own model, of a job with `train.local`: that of its last evaluation.",
            show_default=False,
        ),
    ] = None,
    part: Annotated[
        Part,
        typer.Option(
            "--as",
            help="`whole` model; what was `trained`, such as an adapter; or a LoRA adapter in the layout of `peft`, "
            "into a folder.",
        ),
    ] = Part.WHOLE,
    yes: Yes = False,
    no_input: NoInput = False,
    context: ContextFile = None,
    output: Output = Format.TABLE,
) -> None:
    """Write a job's model as safetensors, and a manifest next to it. Of a job that runs, has failed or was cancelled,
    that of an evaluated round.
    """

    async def fetch(client: ControlClient) -> Data:
        view = job_view(await client.job(job))
        if region is not None:
            if round_ is not None or part is not Part.WHOLE:
                raise GeofedError("USAGE", "--region writes the whole model of a region's last evaluation")
            return await _written_own(client, view, region, output_file, yes=yes)
        view["model"] = chosen(view, round_)
        target = output_file or Path(view["id"] if part is Part.PEFT else f"{view['id']}.safetensors")
        if part is not Part.WHOLE:
            return await _written_part(client, view, target, part, yes=yes)
        if target.is_file() and not _holds(target, view["model"]["digest"]):
            confirm(f"Overwrite {target}?", yes=yes)
        await download(client, view, target)
        return _with_manifest(view, target)

    emit(ask_control_plane(context, fetch), table=_exported_text, name=lambda data: str(data["file"]))


async def _written_own(client: ControlClient, view: Data, region: str, file: Path | None, *, yes: bool) -> Data:
    """Write the own model of a region."""
    target = file or Path(f"{view['id']}-{region}.safetensors")
    if target.exists():
        confirm(f"Overwrite {target}?", yes=yes)
    view["model"] = {"round": 0, "region": region, "metrics": {}, "digest": "", "bytes": 0}
    await download(client, view, target)
    facts = _facts_in(target)
    view["model"]["round"] = int(facts.get("round", 0))
    return _with_manifest(view, target)


def _facts_in(file: Path) -> Data:
    with file.open("rb") as opened:
        head = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
    found: Data = head.get("__metadata__", {})
    return found


async def _written_part(client: ControlClient, view: Data, target: Path, part: Part, *, yes: bool) -> Data:
    """Write the part of the model that the job has trained."""
    import tempfile

    from control_plane.cli._adapter import write_peft, write_trained

    file = target / "adapter_model.safetensors" if part is Part.PEFT else target
    if file.exists():
        confirm(f"Overwrite {file}?", yes=yes)
    with tempfile.TemporaryDirectory(prefix="geofed-export-") as folder:
        whole = Path(folder) / "model.safetensors"
        await download(client, view, whole)
        try:
            if part is Part.PEFT:
                told = write_peft(whole, target, view["spec"]["task"]["config"])
            else:
                told = write_trained(whole, target)
        except OSError as error:
            raise unwritable(target, error) from None
    return _with_manifest(view, file, told)


def chosen(view: Data, wanted: str | None) -> Data:
    """Return the model of a job that a user wants: of a round, the best one or the last one."""
    models, job, state = view["models"], view["id"], view["state"]
    if wanted not in (None, "best") and not (wanted.isascii() and wanted.isdigit()):
        raise GeofedError("USAGE", f"invalid value {wanted!r} for --round", hint="give the number of a round, or best")
    if not models:
        pending = state not in (*ENDED, "cancelling")
        hint = "wait for its first evaluation" if pending else f"`geofed events {job}` shows what happened"
        raise GeofedError("MODEL_NOT_FOUND", f"job {job} {standing_text(state)}; it has no model", hint=hint)
    if wanted is None:
        last: Data = models[-1]
        return last
    found: Data | None = None
    for model in models:
        if model["best"] if wanted == "best" else model["round"] == int(wanted):
            found = model
    if found is None:
        text = "no kept model has the metric of `train.best`" if wanted == "best" else f"round {wanted} is not kept"
        kept = "; ".join(model_text(model) for model in models)
        raise GeofedError("MODEL_NOT_FOUND", f"job {job}: {text}", hint=f"kept: {kept}")
    return found


def _holds(path: Path, digest: str) -> bool:
    """Whether the file already is this model, so that overwriting it loses nothing."""
    import hashlib

    try:
        with path.open("rb") as file:
            return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}" == digest
    except OSError:
        return False


async def download(client: ControlClient, view: Data, target: Path) -> None:
    """Write the complete model, or nothing. After a lost connection, resume at the last byte.

    Raises ``GeofedError("DIGEST_MISMATCH")`` if the bytes are not those of the job's model.
    """
    import asyncio
    import hashlib

    expected, digest, have = view["model"], hashlib.sha256(), 0
    plain = target.is_file() or not target.exists()
    # A device such as /dev/stdout cannot be replaced by a file, so it is written directly.
    draft = target.with_name(f".{target.name}.{os.getpid()}") if plain else target
    try:
        with draft.open("wb") as file:
            for attempt in range(1, _ATTEMPTS + 1):
                try:
                    region = expected.get("region", "")
                    async for chunk in client.model(view["id"], round_=expected["round"], region=region, offset=have):
                        # Which one a region's own model is, is known when it arrives.
                        expected["digest"] = expected["digest"] or chunk.digest
                        expected["bytes"] = expected["bytes"] or chunk.total_bytes
                        file.write(chunk.data)
                        digest.update(chunk.data)
                        have += len(chunk.data)
                    break
                except GeofedError as error:
                    if error.code not in OUTAGE or attempt == _ATTEMPTS:
                        raise
                    await asyncio.sleep(_RETRY_SECONDS)
            file.flush()
            if plain:
                os.fsync(file.fileno())
        if f"sha256:{digest.hexdigest()}" != expected["digest"]:
            of_round = f"the model of round {expected['round']} is {expected['digest']}"
            text = f"{have} bytes arrived as sha256:{digest.hexdigest()}, {of_round}"
            raise GeofedError("DIGEST_MISMATCH", text, hint="nothing was written; export again")
        if plain:
            draft.replace(target)
    except OSError as error:
        raise unwritable(target, error) from None
    finally:
        with suppress(OSError):
            if plain:
                draft.unlink()


def _with_manifest(view: Data, target: Path, part: Data | None = None) -> Data:
    """Write the manifest next to the model; return the result of the command. ``part``: digest and bytes of the file,
    where it is not the whole model."""
    result, model = view["result"] or {}, view["model"]
    written = {"digest": model["digest"], "bytes": model["bytes"], "format": "safetensors", **(part or {})}
    manifest = {
        "apiVersion": "geofed/v1",
        "kind": "ModelManifest",
        "file": target.name,
        **written,
        "job": view["id"],
        "name": view["name"],
        "state": view["state"],
        "finished_at": view["finished_at"],
        "round": model["round"],
        **({"region": model["region"]} if "region" in model else {}),
        "metrics": model["metrics"],
        "data": {"dataset": view["spec"]["data"]["dataset"], "residency": view["plan"]["residency"]},
        "digests": result.get("digests"),
        "spec": view["spec"],
        "plan": view["plan"],
        "account": view["result"],
    }
    path = target.with_name(f"{target.name}.manifest.json")
    try:
        path.write_text(json.dumps(manifest, indent=2) + "\n")
    except OSError as error:
        raise unwritable(path, error) from None
    return {"job": view["id"], "round": model["round"], "file": str(target), "manifest": str(path), **written}


def _exported_text(data: Data) -> str:
    return fields(
        [("model", data["file"]), ("round", data["round"]), ("digest", data["digest"]), ("manifest", data["manifest"])]
    )
