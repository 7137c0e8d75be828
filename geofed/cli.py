"""The command `geofed`: the commands of `control-plane`, and those of the other programs as groups."""

from __future__ import annotations

from control_plane.cli.main import command_line, run
from deploy.emulator import cli as emulator
from region_agent import cli as region_agent

app = command_line("geofed")
app.add_typer(region_agent.app, name="agent", rich_help_panel="The federation")
app.add_typer(emulator.app, name="emulator", rich_help_panel="To begin with")


def main() -> None:
    """Run the console script `geofed`."""
    run(app)


if __name__ == "__main__":
    main()
