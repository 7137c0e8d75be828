"""Migration of the agent's database to the newest revision of its schema."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from geofed_pb.errors import GeofedError
from region_agent.state.migrations import HEAD

__all__ = ["migrate"]


def migrate(path: Path) -> None:
    """Create or upgrade the schema of the database at ``path``, in one transaction.

    Raises ``GeofedError("STATE_INVALID")`` if the database is damaged, or of a newer version of geofed.
    """
    try:
        if _revision(path) != HEAD:
            _upgrade(path)
    except sqlite3.DatabaseError as error:
        if "full" in str(error) or "disk I/O" in str(error):
            raise GeofedError("DISK_FULL", f"no space left for {path}") from None
        raise GeofedError("STATE_INVALID", f"{path} cannot be read: {error}") from None


def _revision(path: Path) -> str:
    """Return the revision of the database; "" if Alembic has never seen it."""
    with closing(sqlite3.connect(path)) as connection:
        if not connection.execute("select 1 from sqlite_master where name = 'alembic_version'").fetchone():
            return ""
        found = connection.execute("select version_num from alembic_version").fetchone()
    return str(found[0]) if found else ""


def _upgrade(path: Path) -> None:
    # Imported only for new databases and after an update.
    from alembic import command
    from alembic.config import Config
    from alembic.util.exc import CommandError
    from sqlalchemy import create_engine
    from sqlalchemy.exc import DatabaseError
    from sqlalchemy.pool import NullPool

    config = Config()
    folder = Path(__file__).parent / "migrations"
    config.set_main_option("script_location", str(folder).replace("%", "%%"))
    engine = create_engine("sqlite://", creator=lambda: sqlite3.connect(path, isolation_level=None), poolclass=NullPool)
    try:
        with engine.connect() as connection:
            # The driver begins transactions late, and none for DDL.
            connection.exec_driver_sql("begin immediate")
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
            connection.commit()
    except CommandError as error:
        raise GeofedError("STATE_INVALID", f"{path} belongs to another version of geofed: {error}") from error
    except DatabaseError as error:
        raise error.orig if isinstance(error.orig, sqlite3.DatabaseError) else error from None
