"""Options of commands that use the control plane's state directory and database themselves."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from geofed_pb.errors import GeofedError

DEFAULT_STATE_DIR = Path(".geofed/control-plane")
StateDir = Annotated[Path, typer.Option(help="Directory for keys, state and models.", envvar="GEOFED_STATE_DIR")]
DatabaseUrl = Annotated[
    str | None,
    typer.Option(
        help="postgresql://… or sqlite:///…, without a password; see --database-url-file.",
        envvar="GEOFED_DATABASE_URL",
        show_envvar=True,
    ),
]
DatabaseUrlFile = Annotated[Path | None, typer.Option(help="File with the database URL.")]


def database_url_of(url: str | None, file: Path | None) -> str | None:
    """Return the database's URL from the options; None: the state directory's own database."""
    if file is not None:
        try:
            return file.read_text().strip()
        except OSError as error:
            raise GeofedError("CONFIG_INVALID", f"cannot read {file}: {error.strerror}") from None
    if url and "GEOFED_DATABASE_URL" not in os.environ and _has_password(url):
        raise GeofedError(
            "CONFIG_INVALID",
            "the database URL on the command line has a password, which every user of the machine can read",
            hint="use --database-url-file, the environment variable GEOFED_DATABASE_URL, or ~/.pgpass",
        )
    return url


def _has_password(url: str) -> bool:
    authority = url.partition("://")[2].partition("/")[0]
    return ":" in authority.rpartition("@")[0]
