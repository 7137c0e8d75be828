"""`template list`, `template show` and `new`: example jobs. Templates are data files; their code is not imported."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from control_plane._templates import find_template, template_folders, template_view, write_template
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
    emit([template_view(folder) for folder in template_folders()], table=_table, name=_name_of)


@app.command(epilog="Example: geofed template show text")
def show(template: TemplateName, output: Output = Format.TABLE) -> None:
    """Show a template's description."""
    folder = find_template(template)
    view = template_view(folder) | {"readme": (folder / "README.md").read_text(encoding="utf-8")}
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
    find_template(template)
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
    say(f"{folder / 'README.md'} describes the data that the task needs, and how to make some; next:")
    say(f"  geofed validate {folder / 'job.yaml'}")
    say(f"  geofed submit {folder / 'job.yaml'} --watch")


def _table(views: list[Data]) -> str:
    return columns(["TEMPLATE", "DESCRIPTION"], [[view["name"], view["summary"]] for view in views])


def _name_of(view: Data) -> str:
    return str(view["name"])
