"""Copies of a whole store, which do not depend on the kind of database."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

from alembic.migration import MigrationContext
from alembic.util.exc import CommandError
from sqlalchemy import Connection, LargeBinary, MetaData, Table, insert, select, text, update

from control_plane.store import _schema as t
from control_plane.store._database import mapped
from control_plane.store._open import migrate
from control_plane.store._store import Store
from geofed_pb.errors import GeofedError

_ROWS_AT_ONCE = 500
"""Rows that are inserted by one statement."""
_UNLIMITED = ("statement_timeout", "idle_in_transaction_session_timeout")
"""Limits of PostgreSQL that a copy of a large store may exceed."""
Line = tuple[str, dict[str, Any]]
"""Name of a table, and one of its rows with values of JSON."""


def copy_rows(store: Store) -> Iterator[str | Line]:
    """Yield the revision of the schema, then all rows as of one instant. Other transactions continue meanwhile."""
    level = {"isolation_level": "REPEATABLE READ"} if store.shared else {}
    with mapped(), store.engine.connect().execution_options(**level) as connection, connection.begin():
        _unlimited(connection)
        yield MigrationContext.configure(connection).get_current_revision() or ""
        for table in t.metadata.sorted_tables:
            rows = connection.execution_options(yield_per=_ROWS_AT_ONCE).execute(select(table)).mappings()
            for row in rows:
                yield table.name, {name: _to_json(value) for name, value in row.items()}


def replace_rows(store: Store, revision: str, lines: Iterator[Line]) -> None:
    """Replace everything in the store by a copy, in one transaction, and migrate it to the present schema.

    No control plane that led before can write afterwards. Raises ``GeofedError``: STATE_INVALID if the copy is of a
    newer version; UNAVAILABLE.
    """
    write = store.engine.connect().execution_options(geofed_write=True)
    try:
        with mapped(), write as connection, connection.begin():
            _unlimited(connection)
            before = connection.execute(select(t.leadership.c.epoch)).scalar_one()
            _drop_all(connection)
            migrate(connection, revision)
            _insert_all(connection, lines)
            migrate(connection, "head")
            copied = connection.execute(select(t.leadership.c.epoch)).scalar_one()
            free = {"epoch": max(before, copied) + 1, "beats": 0, "holder": ""}
            connection.execute(update(t.leadership).values(**free))
    except CommandError as error:
        raise GeofedError("STATE_INVALID", f"the backup belongs to another version of geofed: {error}") from error


def _unlimited(connection: Connection) -> None:
    if connection.dialect.name == "postgresql":
        for name in _UNLIMITED:
            connection.exec_driver_sql(f"SET LOCAL {name} = 0")


def _drop_all(connection: Connection) -> None:
    present = MetaData()
    present.reflect(connection)
    present.drop_all(connection)


def _insert_all(connection: Connection, lines: Iterator[Line]) -> None:
    tables = MetaData()
    tables.reflect(connection)
    if "leadership" in tables.tables:
        # Its migration has inserted a row.
        connection.execute(tables.tables["leadership"].delete())
    waiting: list[dict[str, Any]] = []
    table: Table | None = None
    for name, row in lines:
        if table is not None and (name != table.name or len(waiting) == _ROWS_AT_ONCE):
            connection.execute(insert(table), waiting)
            waiting = []
        table = tables.tables[name]
        waiting.append({column: _from_json(table, column, value) for column, value in row.items()})
    if table is not None and waiting:
        connection.execute(insert(table), waiting)
    if connection.dialect.name == "postgresql":
        for name in ("events", "logs"):
            # The next cursor follows the last one that was copied.
            highest = f"(SELECT coalesce(max(cursor), 0) + 1 FROM {name})"
            connection.execute(text(f"SELECT setval(pg_get_serial_sequence('{name}', 'cursor'), {highest}, false)"))


def _to_json(value: Any) -> Any:
    return base64.b64encode(value).decode() if isinstance(value, bytes) else value


def _from_json(table: Table, column: str, value: Any) -> Any:
    return base64.b64decode(value) if isinstance(table.c[column].type, LargeBinary) else value


def to_line(line: Line) -> str:
    """Return a row as a line of JSON."""
    return json.dumps(line)


def from_line(text: str) -> Line:
    """Return the row of a line. Raises ``GeofedError("STATE_INVALID")``."""
    try:
        name, row = json.loads(text)
        return str(name), dict(row)
    except (ValueError, TypeError) as error:
        raise GeofedError("STATE_INVALID", f"the backup is damaged: {error}") from None
