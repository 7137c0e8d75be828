"""Open a store by URL, and migrate its schema."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.util.exc import CommandError
from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError

from control_plane.store._store import MAX_LOG_LINES, Store, _mapped
from geofed_pb.errors import GeofedError


def open_store(url: str, *, max_log_lines: int = MAX_LOG_LINES) -> Store:
    """Open the store at ``sqlite:///path`` or ``postgresql://…`` and run pending migrations.

    Raises ``GeofedError``: CONFIG_INVALID for an invalid URL; STATE_INVALID if the database is damaged or of a newer
    version; UNAVAILABLE if it cannot be reached.
    """
    engine = _engine(url)
    try:
        with _mapped(), engine.connect().execution_options(geofed_write=True) as connection, connection.begin():
            _migrate(connection)
    except CommandError as error:
        engine.dispose()
        raise GeofedError("STATE_INVALID", f"the database belongs to another version of geofed: {error}") from error
    except GeofedError:
        engine.dispose()
        raise
    return Store(engine, max_log_lines=max_log_lines)


def _engine(url: str) -> Engine:
    try:
        parsed = make_url(url)
        if parsed.drivername in ("postgres", "postgresql"):
            parsed = parsed.set(drivername="postgresql+psycopg")
        if not parsed.drivername.startswith(("sqlite", "postgresql")):
            raise GeofedError("CONFIG_INVALID", f"{parsed.drivername} is not supported; use sqlite or postgresql")
        engine = create_engine(parsed, pool_pre_ping=parsed.drivername.startswith("postgresql"))
    except (ArgumentError, NoSuchModuleError, ModuleNotFoundError) as error:
        hint = "for PostgreSQL, in a clone of geofed, pip install '.[postgres]'; write the URL like postgresql://user@host/name"
        raise GeofedError("CONFIG_INVALID", f"the database URL cannot be used: {error}", hint=hint) from error
    if parsed.drivername.startswith("sqlite"):
        event.listen(engine, "connect", _prepare_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
    return engine


def _prepare_sqlite(connection: sqlite3.Connection, record: Any) -> None:
    connection.isolation_level = None  # the driver's implicit BEGIN is late, and never IMMEDIATE
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "busy_timeout=10000", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {pragma}").close()


def _begin_sqlite(connection: Connection) -> None:
    writes = connection.get_execution_options().get("geofed_write")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _migrate(connection: Connection) -> None:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
