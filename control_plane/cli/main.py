"""The `control-plane` command. Heavy imports happen inside the commands, so that `--help` is fast."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from typing import Annotated

import typer

from control_plane.cli._output import emit_error
from control_plane.cli._settings import settings
from control_plane.cli.commands import (
    audit,
    catalogue,
    context,
    export,
    jobs,
    login,
    profile,
    region,
    simulate,
    storage,
    submit,
    user,
)
from control_plane.cli.commands.server import authority, backup, doctor, serve
from control_plane.cli.commands.start import init, meta, template
from control_plane.cli.commands.views import compare, history, support, top, track
from geofed_pb.errors import Exit, GeofedError
from geofed_pb.files.output import written_out

COMMANDS: dict[str, dict[str, tuple[Callable[..., None], str]]] = {
    "Jobs": {
        "submit": (submit.submit, "job.yaml --yes --watch"),
        "explain": (submit.explain, "job.yaml --plot plan.svg"),
        "validate": (submit.validate, "job.yaml"),
        "profile": (profile.profile, "job.yaml --memory 1024"),
        "status": (jobs.status, "digits --watch"),
        "list": (jobs.list_jobs, "--all --label team=vision"),
        "describe": (jobs.describe, "digits"),
        "top": (top.top, ""),
        "wait": (jobs.wait, "digits --timeout 10m"),
        "compare": (compare.compare, "digits digits-2"),
        "history": (history.history, "digits"),
        "track": (track.track, "digits metrics.csv --follow"),
        "logs": (history.logs, "digits --since 10m"),
        "events": (history.events, "digits -o jsonl"),
        "export": (export.export, "digits --output-file model.safetensors"),
    },
    "Running and ended jobs": {
        "scale": (jobs.scale, "digits frankfurt=2"),
        "replan": (jobs.replan, "digits"),
        "finish": (jobs.finish, "digits"),
        "cancel": (jobs.cancel, "digits --reason mistake --yes"),
        "resume": (jobs.resume, "digits"),
        "delete": (storage.delete, "digits --yes"),
        "rename": (jobs.rename, "digits digits-wide"),
        "share": (jobs.share, "digits ann"),
        "unshare": (jobs.unshare, "digits ann"),
    },
    "To begin with": {
        "login": (login.login, "lab.example.org:7443 --ca-file ca.crt"),
        "logout": (login.logout, ""),
        "init": (init.init, "first --regions home,office"),
        "new": (template.new, "image-classification my-job"),
        "schema": (meta.schema, "job"),
        "simulate": (simulate.simulate, "trace.csv --cluster 16x4"),
        "completion": (meta.completion, "bash"),
        "version": (meta.version, "-o json"),
        "support-bundle": (support.support_bundle, "report.tar.gz digits"),
    },
    "The federation": {
        "serve": (serve.serve, "--state-dir state"),
        "doctor": (doctor.doctor, ""),
        "storage": (storage.storage, "--top 5"),
        "rotate-ca": (authority.rotate_ca, "--yes"),
        "backup": (backup.backup, "today.backup"),
        "restore": (backup.restore, "today.backup --yes"),
    },
}
"""Commands without a group of their own, with the arguments of an example, by the heading of `--help`."""
GROUPS = {
    "To begin with": (template.app,),
    "The federation": (region.app, context.app, user.app, audit.app, catalogue.app),
}
"""Groups of commands, by the heading."""


def command_line(program: str) -> typer.Typer:
    """Return the commands, for a console script of this name."""
    app = typer.Typer(
        name=program,
        help="Train one model on data in several cloud regions, without moving the data.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(_options)
    for heading, commands in COMMANDS.items():
        for name, (function, arguments) in commands.items():
            app.command(name, rich_help_panel=heading, epilog=f"Example: geofed {name} {arguments}".rstrip())(function)
        for group in GROUPS.get(heading, ()):
            app.add_typer(group, rich_help_panel=heading)
    return app


def _print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print(version("geofed"))
        raise typer.Exit


def _options(
    debug: Annotated[bool, typer.Option("--debug", envvar="GEOFED_DEBUG", help="Print tracebacks of errors.")] = False,
    no_input: Annotated[
        bool, typer.Option("--no-input", help="Never ask for confirmation, and draw no live display.")
    ] = False,
    _version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    settings.debug = debug
    settings.ask = not no_input


app = command_line("control-plane")


def main() -> None:
    """Run the console script `control-plane`."""
    run(app)


def run(app: typer.Typer) -> None:
    """Run a console script; turn errors into a message and an exit status."""
    program = str(app.info.name)
    if meta.complete_variable(program) in os.environ:
        # Typer does this itself only with its option --install-completion, which edits the user's files.
        from typer._completion_classes import completion_init

        completion_init()
    try:
        with written_out():
            app(prog_name=program)
    except GeofedError as error:
        if settings.debug:
            traceback.print_exc()
        emit_error(error)
        raise SystemExit(int(error.exit)) from None
    except KeyboardInterrupt:
        raise SystemExit(int(Exit.INTERRUPTED)) from None
    except Exception as error:  # noqa: BLE001 - the last handler of the process: users get a message, not a traceback
        if settings.debug:
            traceback.print_exc()
        emit_error(GeofedError("INTERNAL", f"{type(error).__name__}: {error}"))
        raise SystemExit(int(Exit.BUG)) from None


if __name__ == "__main__":
    main()
