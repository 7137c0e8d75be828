"""Open a store by URL, and migrate its schema."""

from __future__ import annotations

import math
import os
import socket
import sqlite3
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakSet

from alembic import command
from alembic.config import Config
from alembic.util.exc import CommandError
from sqlalchemy import Connection, Engine, create_engine, event, inspect
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, InvalidatePoolError, NoSuchModuleError
from sqlalchemy.pool import ConnectionPoolEntry

from control_plane.store._database import BUSY, mapped
from control_plane.store._store import MAX_LOG_LINES, Store
from geofed_pb.errors import GeofedError, install_hint

CONNECT_SECONDS = 3
"""Timeout of a connection to PostgreSQL; libpq takes whole seconds."""
STATEMENT_SECONDS = 6
"""Timeout of a statement, a lock, and a pause within a transaction: a leader that is suspended in a transaction holds
the leadership's row no longer than this."""
IDLE_SECONDS = 1.0
"""Time without use after which a connection is asked whether it works: a restart of the database takes longer."""
_POSTGRES_OPTIONS = " ".join(
    f"-c {name}={STATEMENT_SECONDS}s"
    for name in ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout")
)


def open_store(url: str, *, max_log_lines: int = MAX_LOG_LINES, upgrade: bool = True) -> Store:
    """Open the store at ``sqlite:///path`` or ``postgresql://…`` and run pending migrations.

    Args:
        upgrade: whether to migrate a database that another control plane may be using.

    Raises ``GeofedError``: CONFIG_INVALID for an invalid URL; STATE_INVALID if the database is damaged or of a newer
    version; UNAVAILABLE if it cannot be reached.
    """
    engine, interrupt = _engine(url)
    try:
        with mapped():
            fresh = not inspect(engine).has_table("leadership")
        if upgrade or fresh:
            _upgrade(engine)
        return Store(engine, max_log_lines=max_log_lines, interrupt=interrupt)
    except GeofedError:
        engine.dispose()
        raise


def sqlite_file(url: str) -> Path | None:
    """Return the file of an SQLite database; None for PostgreSQL, an invalid URL, or a database in memory."""
    with suppress(ArgumentError):
        parsed = make_url(url)
        if parsed.drivername.startswith("sqlite") and parsed.database:
            return Path(parsed.database)
    return None


def upgrade_store(store: Store) -> None:
    """Run pending migrations. Raises ``GeofedError``: STATE_INVALID, UNAVAILABLE."""
    _upgrade(store.engine)


def _upgrade(engine: Engine) -> None:
    try:
        with mapped(), engine.connect().execution_options(geofed_write=True) as connection, connection.begin():
            if engine.dialect.name == "postgresql":
                # A migration may take longer than any other statement.
                connection.exec_driver_sql("SET LOCAL statement_timeout = 0")
            migrate(connection, "head")
    except CommandError as error:
        raise GeofedError("STATE_INVALID", f"the database belongs to another version of geofed: {error}") from error


def _engine(url: str) -> tuple[Engine, Callable[[], None]]:
    """Return the engine, and a function that breaks its connections."""
    try:
        parsed = make_url(url)
        if parsed.drivername in ("postgres", "postgresql"):
            parsed = parsed.set(drivername="postgresql+psycopg")
        if not parsed.drivername.startswith(("sqlite", "postgresql")):
            raise GeofedError("CONFIG_INVALID", f"{parsed.drivername} is not supported; use sqlite or postgresql")
        if parsed.drivername.startswith("sqlite"):
            engine = create_engine(parsed)
        else:
            # A database without an encoding, as a cluster made without a locale has, would return bytes for texts.
            given = {"connect_timeout": CONNECT_SECONDS, "options": _POSTGRES_OPTIONS, "client_encoding": "utf8"}
            arguments = {name: value for name, value in given.items() if name not in parsed.query}
            engine = create_engine(parsed, connect_args=arguments)
    except (ArgumentError, NoSuchModuleError, ModuleNotFoundError) as error:
        hint = f"for PostgreSQL, {install_hint('postgres')}; write the URL like postgresql://user@host/name"
        raise GeofedError("CONFIG_INVALID", f"the database URL cannot be used: {error}", hint=hint) from error
    if parsed.drivername.startswith("sqlite"):
        event.listen(engine, "connect", _prepare_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
        return engine, lambda: None
    sockets: WeakSet[Any] = WeakSet()
    event.listen(engine, "connect", lambda connection, _: sockets.add(connection))
    _ask_idle_connections(engine)
    return engine, lambda: _break(list(sockets))


def _ask_idle_connections(engine: Engine) -> None:
    """Have the pool ask a connection that was idle whether it still works, and replace it if not. ``pool_pre_ping``
    asks before each transaction, of which there are hundreds a second."""
    used_at = "geofed_used_at"

    def returned(connection: Any, record: ConnectionPoolEntry) -> None:
        record.info[used_at] = time.monotonic()

    def taken(connection: Any, record: ConnectionPoolEntry, proxy: Any) -> None:
        if time.monotonic() - record.info.get(used_at, math.inf) < IDLE_SECONDS:
            return
        try:
            engine.dialect.do_ping(connection)
        except engine.dialect.loaded_dbapi.Error as error:
            raise InvalidatePoolError from error

    event.listen(engine, "checkin", returned)
    event.listen(engine, "checkout", taken)


def _break(connections: Iterable[Any]) -> None:
    """Shut down the sockets of connections, on which other threads may be waiting."""
    for connection in connections:
        # Closed connections have no socket.
        with suppress(Exception), socket.socket(fileno=os.dup(connection.fileno())) as shared:
            shared.shutdown(socket.SHUT_RDWR)


def _prepare_sqlite(connection: sqlite3.Connection, record: Any) -> None:
    connection.isolation_level = None  # the driver's implicit BEGIN is late, and never IMMEDIATE
    # What a user deletes must not stay readable in the file.
    for pragma in ("journal_mode=WAL", "synchronous=FULL", BUSY, "foreign_keys=ON", "secure_delete=ON"):
        connection.execute(f"PRAGMA {pragma}").close()


def _begin_sqlite(connection: Connection) -> None:
    writes = connection.get_execution_options().get("geofed_write")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def migrate(connection: Connection, revision: str) -> None:
    """Run the migrations up to a revision."""
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, revision)
