"""Which database a state directory has, and the lock of an SQLite file."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from control_plane.store import sqlite_file
from geofed_pb.errors import GeofedError


def database_of(state_dir: Path, url: str | None) -> str:
    """Return the URL of the database: the given one, or that of the file in the state directory."""
    return url or f"sqlite:///{state_dir / 'state.db'}"


@contextmanager
def locked_database(state_dir: Path, url: str | None) -> Iterator[tuple[str, bool]]:
    """Lock an SQLite file while the context is open; yield the URL, and whether control planes can share the database.

    Raises ``GeofedError("ILLEGAL_STATE")`` if a control plane uses the file.
    """
    whole = database_of(state_dir, url)
    file = sqlite_file(whole)
    if file is None:
        yield whole, True
        return
    with _locked(state_dir if url is None else file, state_dir / "lock" if url is None else None):
        if url is None:
            # Set before SQLite writes to it, since its journal files inherit the mode.
            file.touch(mode=0o600)
            file.chmod(0o600)
        yield whole, False


@contextmanager
def _locked(what: Path, lock: Path | None) -> Iterator[None]:
    with (lock or what.with_name(f"{what.name}.lock")).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise GeofedError(
                "ILLEGAL_STATE",
                f"another control plane uses {what}",
                hint="stop it, or choose another --state-dir; two control planes can share a PostgreSQL database only",
            ) from None
        yield
