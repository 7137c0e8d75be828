"""`context list`, `add`, `use` and `remove`: control planes by name."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from control_plane.cli._connect import LOCAL_CONTEXT, complete_context, contexts_folder, current_context, named_contexts
from control_plane.cli._options import Output
from control_plane.cli._output import columns, emit, say, unwritable
from control_plane.cli._settings import Format
from geofed_pb.errors import GeofedError

if TYPE_CHECKING:
    from control_plane.client import Context

app = typer.Typer(name="context", help="Control planes by name, and which one commands use.", no_args_is_help=True)
NewName = Annotated[str, typer.Argument(metavar="NAME", help="Name to give it.", show_default=False)]
Name = Annotated[
    str, typer.Argument(metavar="NAME", help="Name of a context.", show_default=False, autocompletion=complete_context)
]
_FORBIDDEN = "/\\ "
"""Characters that a name may not have, since it is the name of a file."""


@app.command("list", epilog="Example: geofed context list")
def list_contexts(output: Output = Format.TABLE) -> None:
    """List the contexts; the current one is marked."""
    current = current_context().resolve()
    views = [_view(name, path, current == path.resolve()) for name, path in sorted(named_contexts().items())]
    emit(views, table=_table, name=lambda view: str(view["name"]))
    if not views:
        say("no contexts; add one: geofed context add NAME CONTEXT.json")


@app.command(epilog="Example: geofed context add lab .geofed/control-plane/context.json")
def add(
    name: NewName,
    file: Annotated[Path, typer.Argument(help="The context.json of its control plane.")] = LOCAL_CONTEXT,
    output: Output = Format.TABLE,
) -> None:
    """Add a control plane under a name, or replace it; the first one becomes the current one."""
    from control_plane.client import Context

    require_name(name)
    path = save(name, Context.load(file))
    emit(
        [_view(name, path, current_context().resolve() == path.resolve())],
        table=_table,
        name=lambda view: str(view["name"]),
    )


def require_name(name: str) -> None:
    """Raise ``GeofedError("USAGE")`` for what cannot be the name of a context."""
    if not name or name.startswith(".") or set(name) & set(_FORBIDDEN):
        raise GeofedError("USAGE", f"{name!r} is no name of a context", hint="use letters, digits and -")


def save(name: str, context: Context) -> Path:
    """Store a context under a name; the first one becomes the current one."""
    path, first = contexts_folder() / f"{name}.json", not current_context().exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(_fields(context), indent=2) + "\n")
    except OSError as error:
        raise unwritable(path, error) from None
    if first:
        _make_current(path)
    return path


def _fields(context: Context) -> dict[str, str]:
    return {
        "address": context.address,
        "ca_file": str(context.ca_file.absolute()),
        "token_file": str(context.token_file.absolute()),
        "federation": context.federation,
        "key_file": str((context.key_file or Path("user.key")).absolute()),
    }


@app.command(epilog="Example: geofed context use lab")
def use(name: Name, output: Output = Format.TABLE) -> None:
    """Have commands use this control plane, where no folder or option names another one."""
    path = _found(name)
    _make_current(path)
    emit([_view(name, path, current=True)], table=_table, name=lambda view: str(view["name"]))
    if LOCAL_CONTEXT.is_file():
        say(f"in this folder {LOCAL_CONTEXT} comes first; --context {name} overrides it")


@app.command(epilog="Example: geofed context remove lab")
def remove(name: Name, output: Output = Format.TABLE) -> None:
    """Remove a context; its control plane and its credentials stay."""
    path = _found(name)
    view = _view(name, path, current_context().resolve() == path.resolve())
    if view["current"]:
        current_context().unlink()
    path.unlink()
    emit([{**view, "current": False}], table=_table, name=lambda view: str(view["name"]))


def _found(name: str) -> Path:
    contexts = named_contexts()
    if name not in contexts:
        known = ", ".join(sorted(contexts)) or "none"
        raise GeofedError("USAGE", f"there is no context {name!r}", hint=f"contexts: {known}")
    return contexts[name]


def _make_current(path: Path) -> None:
    link, new = current_context(), current_context().with_suffix(".new")
    try:
        new.unlink(missing_ok=True)
        new.symlink_to(path)
        os.replace(new, link)
    except OSError as error:
        raise unwritable(link, error) from None


def _view(name: str, path: Path, current: bool) -> dict[str, Any]:
    from control_plane.client import Context

    context = Context.load(path)
    return {"name": name, "current": current, "address": context.address, "federation": context.federation}


def _table(views: list[dict[str, Any]]) -> str:
    rows = [("*" if v["current"] else "", v["name"], v["address"], v["federation"]) for v in views]
    return columns(("", "NAME", "ADDRESS", "FEDERATION"), rows)
