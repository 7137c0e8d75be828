"""The `control-plane` command. Heavy imports happen inside the commands, so that `--help` is fast."""

from __future__ import annotations

import os
import traceback
from typing import Annotated

import typer

from control_plane.cli._output import emit_error
from control_plane.cli._settings import settings
from control_plane.cli.commands import (
    catalogue,
    compare,
    export,
    history,
    init,
    jobs,
    meta,
    profile,
    region,
    simulate,
    storage,
    submit,
    template,
    user,
)
from control_plane.cli.commands.server import authority, backup, serve
from geofed_pb.errors import Exit, GeofedError
from geofed_pb.output import written_out

app = typer.Typer(
    name="control-plane",
    help="Train one model on data in several cloud regions, without moving the data.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", envvar="GEOFED_DEBUG", help="Print tracebacks of errors.")] = False,
    no_input: Annotated[
        bool, typer.Option("--no-input", help="Never ask for confirmation, and draw no live display.")
    ] = False,
) -> None:
    settings.debug = debug
    settings.ask = not no_input


app.command("submit")(submit.submit)
app.command("explain")(submit.explain)
app.command("validate")(submit.validate)
app.command("profile")(profile.profile)
app.command("status")(jobs.status)
app.command("list")(jobs.list_jobs)
app.command("describe")(jobs.describe)
app.command("wait")(jobs.wait)
app.command("compare")(compare.compare)
app.command("scale")(jobs.scale)
app.command("replan")(jobs.replan)
app.command("finish")(jobs.finish)
app.command("cancel")(jobs.cancel)
app.command("resume")(jobs.resume)
app.command("delete")(storage.delete)
app.command("storage")(storage.storage)
app.command("share")(jobs.share)
app.command("unshare")(jobs.unshare)
app.command("logs")(history.logs)
app.command("events")(history.events)
app.command("export")(export.export)
app.add_typer(region.app)
app.command("rotate-ca")(authority.rotate_ca)
app.add_typer(user.app)
app.add_typer(catalogue.app)
app.add_typer(template.app)
app.command("new")(template.new)
app.command("init")(init.init)
app.command("schema")(meta.schema)
app.command("version")(meta.version)
app.command("completion")(meta.completion)
app.command("serve")(serve.serve)
app.command("backup")(backup.backup)
app.command("restore")(backup.restore)
app.command("simulate")(simulate.simulate)


def main() -> None:
    """Run the console script; turn errors into a message and an exit status."""
    if meta.COMPLETE_VARIABLE in os.environ:
        # Typer does this itself only with its option --install-completion, which edits the user's files.
        from typer._completion_classes import completion_init

        completion_init()
    try:
        with written_out():
            app(prog_name=meta.PROGRAM)
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
