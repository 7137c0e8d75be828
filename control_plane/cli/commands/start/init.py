"""`init`: a job and the files of its regions, with example data, from five answers."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from control_plane._templates import template_folders, write_template
from control_plane._view import Data
from control_plane.cli._options import NoInput, Output
from control_plane.cli._output import emit, say, unwritable
from control_plane.cli._settings import Format, can_ask
from geofed_pb.errors import CATALOGUE, GeofedError, install_hint

_REGION = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_DATASETS = {
    "image-classification": "digits", "matrix-factorisation": "ratings", "pipeline": "documents",
    "sparse-logistic-regression": "clicks", "tabular": "customers", "text": "letters",
}  # fmt: skip
"""Name of each template's dataset, as in its job file."""
_MAKE_SECONDS = 300.0
"""Timeout of making the example data, which takes some seconds."""
_OWN_ERROR = re.compile(r"^error\[(?P<code>\w+)\]: (?P<message>.*)(?:\nhint: (?P<hint>.*))?", re.MULTILINE)
"""As commands write their errors."""
_Answer = Callable[[str], Any]


def init(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder to write to; created if missing.", show_default=False)
    ],
    template: Annotated[str | None, typer.Option(help="Template of the job; default: image-classification.")] = None,
    regions: Annotated[
        str | None, typer.Option(help="Names of the regions, with commas; default: home,office.")
    ] = None,
    workers: Annotated[str | None, typer.Option(help="Most workers in each region; default: 2.")] = None,
    minimise: Annotated[str | None, typer.Option(help="What plans minimise: cost or time; default: cost.")] = None,
    budget: Annotated[str | None, typer.Option(help="Most USD that a job may cost, or none; default: none.")] = None,
    own_machines: Annotated[
        bool, typer.Option("--own-machines", help="Each region is on a machine or container with the region's name.")
    ] = False,
    no_input: NoInput = False,
    output: Output = Format.TABLE,
) -> None:
    """Write a job and the files of its regions, with example data to run it on; ask for what no option gives."""
    chosen = _answer("What to train", template, "image-classification", _template)
    names = _answer("Names of the regions", regions, "home,office", _regions)
    most = _answer("Most workers in each region", workers, "2", _workers)
    aim = _answer("Minimise cost or time", minimise, "cost", _aim)
    usd = _answer("Budget of a job in USD", budget, "none", _budget)
    try:
        if folder.is_dir() and any(folder.iterdir()):
            raise GeofedError("ILLEGAL_STATE", f"{folder} is not empty", hint="choose another folder")
        write_template(chosen, folder / "job", None)
        try:
            shards = _example_data(chosen, folder, names)
        except GeofedError:
            # So that the command can be given again.
            for part in ("job", "shards"):
                shutil.rmtree(folder / part, ignore_errors=True)
            raise
        form = _format(folder / "job" / "dataset.yaml")
        files = [
            _write_region(folder, name, chosen, form, most, shards[name], name if own_machines else "")
            for name in names
        ]
        _set_objective(folder / "job" / "job.yaml", aim, usd)
    except OSError as error:
        raise unwritable(Path(error.filename or folder), error) from None
    data = {"template": chosen, "job": str(folder / "job" / "job.yaml"), "regions": files}
    emit(data, table=_written, name=lambda shown: str(shown["job"]))
    _say_next(folder, names)


def _answer(question: str, given: str | None, default: str, read: _Answer) -> Any:
    """Return the option's value, else the user's answer, else the default; ask again until an answer is valid."""
    if given is not None or not can_ask():
        return read(default if given is None else given)
    while True:
        print(f"{question} [{default}]: ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        try:
            return read(line.strip() or default)
        except GeofedError as error:
            if not line:
                raise
            say(f"{error.message}: {error.hint}")


def _template(text: str) -> str:
    if text not in _DATASETS and text in (folder.name for folder in template_folders()):
        hint = f"`geofed new {text} DIR` writes the job alone; with example data: {', '.join(_DATASETS)}"
        raise GeofedError("TEMPLATE_NOT_FOUND", f"template {text} has no example data", hint=hint)
    if text not in _DATASETS:
        raise GeofedError("TEMPLATE_NOT_FOUND", f"template {text} not found", hint=f"one of {', '.join(_DATASETS)}")
    return text


def _regions(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names or len(set(names)) < len(names) or not all(_REGION.fullmatch(name) for name in names):
        raise GeofedError("USAGE", f"{text!r} are not names of regions", hint="like home,office: lower-case letters")
    return names


def _workers(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not int(text):
        raise GeofedError("USAGE", f"{text!r} is not a number of workers", hint="give a number from 1 on")
    return int(text)


def _aim(text: str) -> str:
    if text not in ("cost", "time"):
        raise GeofedError("USAGE", f"{text!r} cannot be minimised", hint="give cost or time")
    return text


def _budget(text: str) -> float | None:
    try:
        usd = None if text == "none" else float(text.lstrip("$"))
    except ValueError:
        usd = -1.0
    if usd is not None and not 0 < usd < float("inf"):
        raise GeofedError("USAGE", f"{text!r} is not a budget", hint="give an amount like 1.50, or none")
    return usd


def _example_data(template: str, folder: Path, regions: list[str]) -> Data:
    """Make the template's example data for the regions; return the files with their samples."""
    makers = {"image-classification": ["-m", "deploy.shards", "--source", "digits"]}
    maker = makers.get(template, [str((folder / "job" / "make_data.py").resolve())])
    # Apart from the job's folder, which is what is sent as code.
    argv = [sys.executable, *maker, "--regions", ",".join(regions), "--out", str((folder / "shards").resolve())]
    say("making example data")
    made = subprocess.run(argv, capture_output=True, text=True, timeout=_MAKE_SECONDS, check=False)
    if made.returncode:
        raise _not_made(made.stderr)
    found: Data = json.loads(made.stdout)
    return found


def _not_made(output: str) -> GeofedError:
    """Return the error of a maker of example data: its own, else that of the last line which it has written."""
    own = _OWN_ERROR.search(output)
    if own is not None and own["code"] in CATALOGUE:
        return GeofedError(own["code"], f"no example data: {own['message']}", hint=own["hint"])
    say(output.rstrip())
    last = ([line for line in output.splitlines() if line.strip()] or ["it said nothing"])[-1]
    hint = "all that it said is above; `geofed new TEMPLATE DIR` writes a job without data"
    if last.startswith("ModuleNotFoundError"):
        hint = install_hint("demo")
    return GeofedError("UNAVAILABLE", f"no example data: {last}", hint=hint)


def _format(file: Path) -> str:
    """Return the lines of a template's `dataset.yaml`, without comments; empty: the task reads its data itself."""
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.exists() else []
    return "".join(f"    {line}" for line in lines if not line.startswith("#"))


def _write_region(folder: Path, name: str, template: str, form: str, workers: int, shards: Data, host: str) -> str:
    """``form``: lines of the dataset that state its format, with which samples are counted. ``host``: at which other
    regions reach it; empty: all are on this machine."""
    splits = "".join(
        f"      {split}: {{uri: shards/{name}/{Path(part['path']).name}{counted}}}\n"
        for split, part in shards.items()
        for counted in ["" if form else f", samples: {part['samples']}"]
    )
    file = folder / f"{name}.yaml"
    text = _REGION_FILE.format(name=name, workers=workers, dataset=_DATASETS[template], form=form, splits=splits)
    file.write_text(text.replace("\ncapacity:", f"\nadvertise: {host}\ncapacity:", 1) if host else text)
    return str(file)


def _set_objective(job: Path, aim: str, usd: float | None) -> None:
    limit = f"  budget: {usd!r}\n" if usd is not None else ""
    text = re.sub(
        r"^  minimise: cost(.*\n)", rf"  minimise: {aim}\1{limit}", job.read_text(encoding="utf-8"), count=1, flags=re.M
    )
    job.write_text(text, encoding="utf-8")


def _written(data: Data) -> str:
    return "\n".join([data["job"], *data["regions"]])


def _say_next(folder: Path, names: list[str]) -> None:
    say("next, each in a terminal of its own, from this folder:")
    say("  geofed serve")
    for name in names:
        state, token = f"--state-dir .geofed/{name}", f"{name}.token"
        say(f"  geofed region invite {name} > {token}")
        say(f"  geofed agent join --token-file {token} {state}")
        say(f"  geofed agent run --config {folder / f'{name}.yaml'} {state}")
    say(f"  geofed submit {folder / 'job' / 'job.yaml'} --watch")
    say("the prices in the region files are 0: state your own there before a plan's cost means anything")


_REGION_FILE = """\
# A region. All keys: `geofed agent schema`, docs/region-file.md
apiVersion: geofed/v1
kind: Region
metadata: {{name: {name}}}
cloud: local
capacity: {{workers: {workers}}}
prices: {{source: my own machine, asOf: 2026-11, functionUsdPerGbSecond: 0, functionUsdPerRequest: 0, \
serverUsdPerHour: 0, egressUsdPerGb: 0}}
datasets:
  {dataset}:
{form}    splits:
{splits}"""
