"""`template list`, `template show` and `new`: example jobs. Templates are data files; their code is not imported."""

from __future__ import annotations

import re
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated

import typer

from control_plane._view import Data
from control_plane.cli._options import Output
from control_plane.cli._output import columns, emit, say, unwritable
from control_plane.cli._settings import Format
from geofed_pb.errors import GeofedError

app = typer.Typer(name="template", help="Example jobs to start from.", no_args_is_help=True)
TemplateName = Annotated[str, typer.Argument(metavar="TEMPLATE", show_default=False)]
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


@app.command("list", epilog="Example: geofed template list")
def list_templates(output: Output = Format.TABLE) -> None:
    """List the templates."""
    emit([_view(folder) for folder in _folders()], table=_table, name=_name_of)


@app.command(epilog="Example: geofed template show text")
def show(template: TemplateName, output: Output = Format.TABLE) -> None:
    """Show a template's description."""
    folder = _find(template)
    view = _view(folder) | {"readme": (folder / "README.md").read_text(encoding="utf-8")}
    emit(view, table=lambda data: str(data["readme"]).rstrip(), name=_name_of)


def new(
    template: TemplateName,
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder to write to; created if missing.", show_default=False)
    ],
    name: Annotated[str | None, typer.Option("--name", help="Name of the job; default: the template's.")] = None,
    output: Output = Format.TABLE,
) -> None:
    """Write a new job from a template into a folder."""
    _find(template)
    if name is not None and not _LABEL.fullmatch(name):
        raise GeofedError(
            "USAGE", f"{name!r} is not a valid job name", hint="use lower-case letters, digits and hyphens"
        )
    try:
        if folder.is_dir() and any(folder.iterdir()):
            raise GeofedError("ILLEGAL_STATE", f"{folder} is not empty", hint="choose another folder")
        written = write_template(template, folder, name)
    except OSError as error:
        raise unwritable(Path(error.filename or folder), error) from None
    data = {"template": template, "name": name or template, "folder": str(folder), "files": written}
    emit(data, table=lambda shown: "\n".join(shown["files"]), name=lambda shown: str(shown["folder"]))
    say("next:")
    say(f"  read {folder / 'README.md'}; it describes the data that the task needs and how to make some")
    say(f"  geofed validate {folder / 'job.yaml'}")
    say(f"  geofed submit {folder / 'job.yaml'} --watch")


def write_template(template: str, folder: Path, name: str | None) -> list[str]:
    """Write a template's files into a folder, and return them; ``name``: of the job, None: the template's.

    Raises ``GeofedError("TEMPLATE_NOT_FOUND")`` and OSError.
    """
    source = _find(template)
    folder.mkdir(parents=True, exist_ok=True)
    return [_write(file, folder / file.name, template, name) for file in _files(source)]


def _folders() -> list[Traversable]:
    try:
        root = files("deploy") / "templates"
        return sorted((entry for entry in root.iterdir() if (entry / "job.yaml").is_file()), key=lambda e: e.name)
    except (ModuleNotFoundError, FileNotFoundError):
        raise GeofedError("TEMPLATE_NOT_FOUND", "no templates are installed") from None


def _find(template: str) -> Traversable:
    for folder in _folders():
        if folder.name == template:
            return folder
    names = ", ".join(folder.name for folder in _folders())
    raise GeofedError("TEMPLATE_NOT_FOUND", f"template {template} not found; the templates are {names}")


def _files(folder: Traversable) -> list[Traversable]:
    return sorted((file for file in folder.iterdir() if file.is_file()), key=lambda file: file.name)


def _view(folder: Traversable) -> Data:
    readme = (folder / "README.md").read_text(encoding="utf-8")
    return {
        "name": folder.name,
        "summary": readme.splitlines()[0].removeprefix("# "),
        "files": [file.name for file in _files(folder)],
    }


def _write(source: Traversable, target: Path, template: str, name: str | None) -> str:
    text = source.read_text(encoding="utf-8")
    if source.name == "job.yaml" and name is not None:
        text = text.replace(f"\n  name: {template}\n", f"\n  name: {name}\n", 1)
    target.write_text(text, encoding="utf-8")
    return str(target)


def _table(views: list[Data]) -> str:
    return columns(["TEMPLATE", "DESCRIPTION"], [[view["name"], view["summary"]] for view in views])


def _name_of(view: Data) -> str:
    return str(view["name"])
