"""The command `geofed`: the commands of `control-plane`, and those of the other programs as groups."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from control_plane.cli._options import ContextFile, NoInput, Output, Yes
from control_plane.cli._settings import Format
from control_plane.cli.main import command_line, run
from deploy.emulator import cli as emulator
from region_agent import cli as region_agent

app = command_line("geofed")
app.add_typer(region_agent.app, name="agent", rich_help_panel="The federation")
app.add_typer(emulator.app, name="emulator", rich_help_panel="To begin with")


@app.command(rich_help_panel="To begin with", epilog="Example: geofed demo --folder demo")
def demo(
    data: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A folder with MNIST's IDX files, instead of the digits.")
    ] = None,
    folder: Annotated[Path, typer.Option(help="Where everything is kept.")] = Path(".geofed/demo"),
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget earlier runs, and what they have measured.")] = False,
) -> None:
    """Train a small model over three regions on this machine, over an emulated WAN where that is possible."""
    from deploy.demo import run_demo

    raise typer.Exit(run_demo(folder, data, fresh=fresh))


@app.command(rich_help_panel="Jobs", epilog="Example: geofed sweep sweep.yaml --yes")
def sweep(
    sweep_file: Annotated[Path, typer.Argument(metavar="SWEEP.yaml", help="The sweep file.", show_default=False)],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the number of trials and the plan of the first one; run nothing.")
    ] = False,
    yes: Yes = False,
    no_input: NoInput = False,
    context: ContextFile = None,
    output: Output = Format.TABLE,
) -> None:
    """Run a job with different parameters, and compare what they give. Run again, it continues."""
    from geofed.sweep.cli import sweep_command

    sweep_command(context, sweep_file, dry_run=dry_run, yes=yes)


def main() -> None:
    """Run the console script `geofed`."""
    run(app)


if __name__ == "__main__":
    main()
