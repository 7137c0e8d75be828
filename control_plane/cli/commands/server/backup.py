"""`backup` and `restore`: the state of a control plane in one file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from control_plane._view import Data, bytes_text
from control_plane.cli._connect import confirm
from control_plane.cli._database import DEFAULT_STATE_DIR, DatabaseUrl, DatabaseUrlFile, StateDir, database_url_of
from control_plane.cli._options import Output, Yes
from control_plane.cli._output import emit, fields, unwritable
from control_plane.cli._settings import Format
from geofed_pb.errors import GeofedError

BackupFile = Annotated[Path, typer.Argument(metavar="FILE", help="File of the backup.", show_default=False)]


def backup(
    file: BackupFile,
    state_dir: StateDir = DEFAULT_STATE_DIR,
    database_url: DatabaseUrl = None,
    database_url_file: DatabaseUrlFile = None,
    yes: Yes = False,
    output: Output = Format.TABLE,
) -> None:
    """Write database, code, models and keys to one file; the control plane may run meanwhile."""
    from control_plane.backup import back_up
    from control_plane.serving._database import database_of
    from control_plane.store import open_store, sqlite_file

    url = database_of(state_dir, database_url_of(database_url, database_url_file))
    database = sqlite_file(url)
    if not state_dir.is_dir() or (database is not None and not database.is_file()):
        raise GeofedError("CONFIG_INVALID", f"{database or state_dir} does not exist", hint="check --state-dir")
    if file.exists():
        confirm(f"Overwrite {file}?", yes=yes)
    with _file_errors(file), open_store(url, upgrade=False) as store:
        _show(file, back_up(store, state_dir, file))


def restore(
    file: BackupFile,
    state_dir: StateDir = DEFAULT_STATE_DIR,
    database_url: DatabaseUrl = None,
    database_url_file: DatabaseUrlFile = None,
    yes: Yes = False,
    output: Output = Format.TABLE,
) -> None:
    """Replace the state of a control plane by a backup; no control plane may run."""
    from control_plane.backup import restore as put_back
    from control_plane.serving._database import locked_database
    from control_plane.store import open_store

    if not file.is_file():
        raise GeofedError("CONFIG_INVALID", f"{file} does not exist")
    confirm(f"Replace the state in {state_dir} and its database by {file}?", yes=yes)
    with _file_errors(file):
        state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        with (
            locked_database(state_dir, database_url_of(database_url, database_url_file)) as (url, _),
            open_store(url) as store,
        ):
            _show(file, put_back(store, state_dir, file))


@contextmanager
def _file_errors(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise unwritable(Path(error.filename or file), error) from None


def _show(file: Path, copied: Any) -> None:
    emit({"file": str(file), **asdict(copied)}, table=_text, name=lambda data: str(data["file"]))


def _text(data: Data) -> str:
    at = datetime.fromtimestamp(data["created_at"], UTC)
    return fields(
        [
            ("file", data["file"]),
            ("federation", data["federation"]),
            ("state of", f"{at:%Y-%m-%d %H:%M:%S} UTC"),
            ("rows", f"{data['rows']:,}"),
            ("code and models", f"{data['blobs']:,}"),
            ("size", bytes_text(data["bytes"])),
        ]
    )
