"""`export`: write a model of a job, verified, with a manifest."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from control_plane._redaction import redacted
from control_plane._view import ENDED, Data, job_view, model_text, standing_text
from control_plane.cli._connect import ask_control_plane, confirm
from control_plane.cli._options import ContextFile, NoInput, Output, Yes
from control_plane.cli._output import emit, fields, unwritable
from control_plane.cli._settings import Format
from control_plane.cli.commands.export._options import (
    As,
    ChosenRound,
    ExportKind,
    Inputs,
    OfRegion,
    OutputFile,
    TaskFolder,
)
from control_plane.cli.commands.export._targets import (
    MANIFEST,
    Agree,
    agree_to_overwrite,
    check_places,
    manifest_of,
)
from control_plane.cli.commands.jobs import JobArgument
from geofed_pb.errors import OUTAGE, GeofedError

if TYPE_CHECKING:
    from control_plane.cli.commands.export._program import Input
    from control_plane.client import ControlClient

_ATTEMPTS = 20
"""Number of download attempts over lost connections."""
_RETRY_SECONDS = 0.5
"""Pause between two attempts."""


def export(
    job: JobArgument,
    output_file: OutputFile = None,
    round_: ChosenRound = None,
    region: OfRegion = None,
    part: As = ExportKind.WHOLE,
    task: TaskFolder = None,
    inputs: Inputs = None,
    yes: Yes = False,
    no_input: NoInput = False,
    context: ContextFile = None,
    output: Output = Format.TABLE,
) -> None:
    """Write a job's model as safetensors, and a manifest next to it. Of a job that runs, has failed or was cancelled,
    that of an evaluated round.
    """

    wanted = Export(output_file, round_, region, part, task, tuple(inputs or ()))
    # Before there is a connection.
    wanted.check()

    def agree(files: str) -> None:
        confirm(f"Overwrite {files}?", yes=yes)

    async def fetch(client: ControlClient) -> Data:
        return await write_model(client, job, wanted, agree)

    emit(ask_control_plane(context, fetch), table=_exported_text, name=lambda data: str(data["file"]))


@dataclass(frozen=True)
class Export:
    """What is to be written of a job's model, and where; the fields are the options of the command."""

    file: Path | None = None
    """None: named after the job."""
    round: str | None = None
    region: str | None = None
    part: ExportKind = ExportKind.WHOLE
    task: Path | None = None
    inputs: tuple[str, ...] = ()

    def check(self) -> tuple[Path, list[Input]] | None:
        """Return what a program is made of; None: it is none.

        Raises ``GeofedError("USAGE")`` if packages are missing or options do not go together.
        """
        return _ready(self.part, self.task, list(self.inputs))


async def write_model(client: ControlClient, job: str, wanted: Export, agree: Agree) -> Data:
    """Write a job's model, and a manifest next to it; return what was written, as the command does.

    Raises ``GeofedError``: what `Export.check` and ``agree`` raise; MODEL_NOT_FOUND, DIGEST_MISMATCH, DISK_FULL.
    """
    program, part = wanted.check(), wanted.part
    view = job_view(await client.job(job))
    own = wanted.region is not None
    view["model"] = _own_model(wanted.region or "", wanted.round, part) if own else chosen(view, wanted.round)
    name = f"{view['id']}-{wanted.region}" if own else view["id"]
    target = wanted.file or Path(name if part.is_folder else f"{name}{part.ending}")
    check_places(target, is_folder=part.is_folder)
    if part is ExportKind.HUB:
        return await _written_for_hub(client, view, target, agree)
    if part is not ExportKind.WHOLE:
        return await _written_part(client, view, target, part, program, agree)
    changed = target.is_file() and not _holds(target, view["model"]["digest"])
    agree_to_overwrite({target: None} if changed else {}, target, agree)
    await download(client, view, target)
    _take_round(view, target)
    return _with_manifest(view, target)


def _own_model(region: str, round_: str | None, part: ExportKind) -> Data:
    """Return a region's own model as it is known before it is here."""
    if round_ is not None or not (part is ExportKind.WHOLE or part.is_program):
        text = "--region writes the whole model of a region's last evaluation, or a program of it"
        raise GeofedError("USAGE", text)
    return {"round": 0, "region": region, "metrics": {}, "digest": "", "bytes": 0}


def _take_round(view: Data, file: Path) -> None:
    """Of which round a region's own model is, is known when its file is here."""
    if "region" in view["model"] and file.is_file():
        view["model"]["round"] = int(_facts_in(file).get("round", 0))


def _facts_in(file: Path) -> Data:
    with file.open("rb") as opened:
        head = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
    found: Data = head.get("__metadata__", {})
    return found


def _ready(part: ExportKind, task: Path | None, inputs: list[str]) -> tuple[Path, list[Input]] | None:
    """Check, before anything is fetched, what is needed to write a part: packages and options."""
    from control_plane.cli.commands.export._program import Input, find_packages

    if not part.is_program:
        if task is not None or inputs:
            raise GeofedError("USAGE", "--task and --input are for `--as torch-export` and `--as onnx`")
        if part is ExportKind.STATE_DICT:
            find_packages("torch", option=part, extra="worker")
        return None
    if task is None:
        hint = "give your folder of the job file; the code that the control plane has is never run here"
        raise GeofedError("USAGE", f"--as {part} needs --task, for the model's class", hint=hint)
    found = [Input.parse(text) for text in inputs]
    find_packages("torch", option=part, extra="worker")
    if part is ExportKind.ONNX:
        find_packages("onnx", "onnxscript", option=part, extra="onnx")
    return task, found


async def _written_part(
    client: ControlClient,
    view: Data,
    target: Path,
    part: ExportKind,
    program: tuple[Path, list[Input]] | None,
    agree: Agree,
) -> Data:
    """Write the model as something else than its own file."""
    import tempfile

    from control_plane.cli.commands.export._adapter import write_peft, write_trained
    from control_plane.cli.commands.export._program import TaskCopy, write_program, write_state_dict

    asked = view["spec"]["task"]
    found = TaskCopy.find(program[0], asked["module"], asked["config"]) if program is not None else None

    file = target / "adapter_model.safetensors" if part.is_folder else target
    files = [file, target / "adapter_config.json"] if part.is_folder else [file]
    agree_to_overwrite(dict.fromkeys(files), file, agree)
    with tempfile.TemporaryDirectory(prefix="geofed-export-") as folder:
        whole = Path(folder) / "model.safetensors"
        await download(client, view, whole)
        _take_round(view, whole)
        try:
            if program is not None and found is not None:
                told = write_program(whole, target, found, program[1], as_onnx=part is ExportKind.ONNX)
            elif part is ExportKind.STATE_DICT:
                told = write_state_dict(whole, target)
            elif part is ExportKind.PEFT:
                told = write_peft(whole, target, view["spec"]["task"]["config"])
            else:
                told = write_trained(whole, target)
        except OSError as error:
            raise unwritable(target, error) from None
    return _with_manifest(view, file, told)


async def _written_for_hub(client: ControlClient, view: Data, folder: Path, agree: Agree) -> Data:
    """Write a folder as model hubs have it: weights, the task's config, and a card that says where they come from."""
    from control_plane.cli.commands.views._card import model_card

    # The folder is for others: it has no environment variables and no names of secrets.
    task = {key: held for key, held in view["spec"]["task"].items() if key not in ("env", "secrets")}
    shown = view | {"spec": redacted({**view["spec"], "task": task})}
    target = folder / "model.safetensors"
    texts: dict[Path, bytes] = {
        folder / "config.json": json.dumps(shown["spec"]["task"]["config"], indent=2).encode() + b"\n",
        folder / "README.md": model_card(view).encode(),
    }
    changed = target.exists() and not _holds(target, view["model"]["digest"])
    agree_to_overwrite({**({target: None} if changed else {}), **texts}, target, agree)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        await download(client, view, target)
        for path, text in texts.items():
            path.write_bytes(text)
    except OSError as error:
        raise unwritable(folder, error) from None
    return _with_manifest(shown, target)


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
        "kind": MANIFEST,
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
    path = manifest_of(target)
    try:
        path.write_text(json.dumps(manifest, indent=2) + "\n")
    except OSError as error:
        raise unwritable(path, error) from None
    return {"job": view["id"], "round": model["round"], "file": str(target), "manifest": str(path), **written}


def _exported_text(data: Data) -> str:
    rows = [
        ("model", data["file"]),
        ("round", data["round"]),
        ("digest", data["digest"]),
        ("manifest", data["manifest"]),
    ]
    if "inputs" in data:
        rows.insert(2, ("inputs", ", ".join(data["inputs"])))
    return fields(rows)
