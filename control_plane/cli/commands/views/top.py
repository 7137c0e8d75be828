"""`top`: watch regions and jobs of the federation."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from control_plane._view import Data
from control_plane.cli._connect import ask_control_plane
from control_plane.cli._options import ContextFile, NoInput, Output
from control_plane.cli._output import emit
from control_plane.cli._settings import Format, is_interactive, settings
from control_plane.cli.commands.jobs import federation_text, federation_view
from geofed_pb.errors import OUTAGE, GeofedError

if TYPE_CHECKING:
    from control_plane.client import ControlClient


def top(
    interval: Annotated[float, typer.Option(min=0.2, help="Seconds between two looks.")] = 2.0,
    no_input: NoInput = False,
    context: ContextFile = None,
    output: Output = Format.TABLE,
) -> None:
    """Watch regions and active jobs until Ctrl-C; without a terminal, show them once."""
    if settings.format is Format.TABLE and is_interactive():
        ask_control_plane(context, lambda client: _watch(client, interval))
        return
    emit(ask_control_plane(context, federation_view), table=federation_text, name=lambda data: str(data["federation"]))


async def _watch(client: ControlClient, interval: float) -> None:
    """Redraw the federation; while the control plane is unreachable, say so and retry."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    shown: Data = await federation_view(client)
    with Live(console=Console(stderr=True, highlight=False), auto_refresh=False, screen=True) as live:
        note = ""
        while True:
            text = f"{federation_text(shown)}\n\n{note or 'Ctrl-C ends the view, no job'}"
            live.update(Text.from_ansi(text), refresh=True)
            await asyncio.sleep(interval)
            try:
                shown, note = await federation_view(client), ""
            except GeofedError as error:
                if error.code not in OUTAGE:
                    raise
                note = f"control plane unreachable; retrying ({error.message})"
