"""Databases of tests, whose tables are those of the migrations, without running them for each: they take 50 ms."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from sqlalchemy import Connection, inspect

from control_plane.store import _open

__all__ = ["migrated_once"]


@contextmanager
def migrated_once() -> Iterator[None]:
    """The migrations run for the first empty SQLite database; later ones get the statements that it consists of."""
    migrate = _open.migrate
    statements: list[str] = []

    def like_the_first(connection: Connection, revision: str) -> None:
        if connection.dialect.name != "sqlite" or revision != "head" or inspect(connection).get_table_names():
            migrate(connection, revision)
        elif statements:
            for statement in statements:
                connection.exec_driver_sql(statement)
        else:
            migrate(connection, revision)
            dump = connection.connection.driver_connection.iterdump()
            statements.extend(one for one in dump if one not in ("BEGIN TRANSACTION;", "COMMIT;"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_open, "migrate", like_the_first)
        yield
