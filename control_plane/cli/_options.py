"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from control_plane.cli._settings import Format, settings


def _take_format(value: Format) -> Format:
    settings.format = value
    return value


Output = Annotated[
    Format,
    typer.Option("--output", "-o", help="Format of the data on stdout.", callback=_take_format, show_default=True),
]
ContextFile = Annotated[
    Path | None,
    typer.Option(
        "--context",
        metavar="NAME|FILE",
        envvar="GEOFED_CONTEXT",
        show_envvar=True,
        help="The control plane: by its name in `context list`, or by the context.json in its state directory.",
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override a key of the job file, such as train.seed=1 or wan.codec=int8."
    ),
]


def _never_ask(value: bool) -> bool:
    settings.ask = settings.ask and not value
    return value


NoInput = Annotated[
    bool,
    typer.Option(
        "--no-input", help="Never ask, and draw no live display; also before the command.", callback=_never_ask
    ),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
