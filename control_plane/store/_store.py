"""Store on SQLite or PostgreSQL. Its methods block, so that the services call them in threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sqlalchemy import (
    Engine,
    delete,
    select,
    update,
)

from control_plane.store import _schema as t
from control_plane.store._applying import apply_all, put
from control_plane.store._queries import Queries, rows_until
from control_plane.store._records import (
    Change,
    Committed,
)

MAX_LOG_LINES = 20_000
"""Limit of stored log lines of a job; the oldest are dropped."""


class Store(Queries):
    """Reads return committed state; all writes go through `commit`, one transaction each."""

    def __init__(
        self,
        engine: Engine,
        *,
        max_log_lines: int = MAX_LOG_LINES,
        interrupt: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(engine, interrupt)
        self._max_log_lines = max_log_lines

    def commit(self, change: Change) -> Committed:
        """Store a change in one transaction; raises as `commit_all` does."""
        return self.commit_all((change,))[0]

    def commit_all(self, changes: Sequence[Change]) -> list[Committed]:
        """Store changes in one transaction, in order.

        Raises ``GeofedError``, and nothing is stored: REQUEST_CONFLICT, DISK_FULL, UNAVAILABLE; STANDBY if another
        control plane leads. Raises ``OutcomeUnknown``.
        """
        with self._writing() as connection:
            return apply_all(connection, changes, self._max_log_lines)

    def remove_rows(self, table: str, until: float, job: str | None = None, limit: int = 2000) -> int:
        """Remove up to `limit` rows of a history that are not later than `until`, the oldest first; return how many.

        ``job``: only those that name it; empty: that name none.
        """
        found = t.metadata.tables[table]
        wanted = rows_until(found, until, job)
        if "cursor" in found.c:
            first = select(found.c.cursor).where(wanted).order_by(found.c.cursor).limit(limit)
            wanted = found.c.cursor.in_(first)
        with self._writing() as connection:
            return connection.execute(delete(found).where(wanted)).rowcount

    def remove_events_beyond(self, most: int, job: str, limit: int = 2000) -> int:
        """Remove up to `limit` events of a job beyond its `most` newest, the oldest first; return how many."""
        of_job = select(t.events.c.cursor).where(t.events.c.job == job)
        with self._writing() as connection:
            last = connection.execute(of_job.order_by(t.events.c.cursor.desc()).offset(most).limit(1)).scalar()
            if last is None:
                return 0
            oldest = of_job.where(t.events.c.cursor <= last).order_by(t.events.c.cursor).limit(limit)
            return connection.execute(delete(t.events).where(t.events.c.cursor.in_(oldest))).rowcount

    def put_meta(self, key: str, value: str) -> None:
        """Store a value under a key."""
        with self._writing() as connection:
            put(connection, t.meta, {"key": key}, {"key": key, "value": value})

    def begin(self) -> None:
        """Record the start of the control plane: an agent with later commands than the present ones is ahead of this
        store."""
        with self._writing() as connection:
            first = update(t.regions).where(t.regions.c.shared_seq.is_(None))
            connection.execute(first.values(shared_seq=t.regions.c.command_seq))
