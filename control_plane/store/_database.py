"""Connections to the control plane's database, and transactions of the one control plane that leads."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from types import TracebackType
from typing import Any, Self

from sqlalchemy import (
    Connection,
    Engine,
    and_,
    bindparam,
    select,
    update,
)
from sqlalchemy.exc import DatabaseError, DataError, IntegrityError, OperationalError, SQLAlchemyError
from sqlalchemy.sql.dml import ReturningUpdate

from control_plane.store import _schema as t
from control_plane.store._records import (
    Leadership,
)
from geofed_pb.errors import GeofedError

SETTLE_SECONDS = 5.0
"""How long a commit whose answer was lost is looked up. It covers a restart of the database's connection pooler or a
switch to its replica; a longer outage ends the leadership instead."""
BUSY = "busy_timeout=10000"
"""Setting of SQLite: the time for which a write waits for another process, in milliseconds."""
_CLEARING = "busy_timeout=1000"
"""The same while the log is emptied: no write can begin meanwhile."""
_SETTLE_PAUSE_SECONDS = 0.2
"""Time between two attempts to look up a commit."""


def _by_leader(**values: Any) -> ReturningUpdate[int]:
    """Return an update of the leader's row, with the number of its last change; made once, since that takes longer
    than the update."""
    own = update(t.leadership).where(t.leadership.c.epoch == bindparam("own_epoch"))
    return own.values(**values).returning(t.leadership.c.changes)


_CHANGE = _by_leader(changes=t.leadership.c.changes + 1)
_BEAT = _by_leader(beats=t.leadership.c.beats + 1)
_RELEASE = _by_leader(holder="")


class OutcomeUnknown(Exception):
    """The database did not answer whether a transaction was committed, and could not be asked again."""


class Database:
    """Transactions of the epoch in which the database was opened, or which was begun by `take`.

    They are refused with STANDBY once another control plane has begun a later epoch.
    """

    def __init__(self, engine: Engine, interrupt: Callable[[], None]) -> None:
        self.engine = engine
        self.interrupt = interrupt
        """Break all connections, so that calls in other threads that wait for the database fail at once."""
        self.shared = engine.dialect.name == "postgresql"
        """Whether other control planes can reach the database; a file lock keeps them from SQLite."""
        self._epoch = self.leadership().epoch
        self._last_change: int | None = None
        """Number of this leader's last change; None: it has made none."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self.engine.dispose()

    def leadership(self) -> Leadership:
        """Return which control plane leads."""
        with self._reading() as connection:
            row = connection.execute(select(t.leadership.c.epoch, t.leadership.c.beats, t.leadership.c.holder)).one()
            return Leadership(*row)

    def take(self, seen: Leadership, holder: str) -> bool:
        """Begin a new epoch, unless the leader has given a sign of life since `seen`; return whether it has begun."""
        unchanged = and_(t.leadership.c.epoch == seen.epoch, t.leadership.c.beats == seen.beats)
        begun = {"epoch": seen.epoch + 1, "beats": 0, "holder": holder[:256]}
        with self._transaction() as connection:
            taken = connection.execute(update(t.leadership).where(unchanged).values(**begun)).rowcount == 1
        if taken:
            self._epoch, self._last_change = seen.epoch + 1, None
        return taken

    def beat(self) -> None:
        """Give a sign of life. Raises ``GeofedError("STANDBY")`` if another control plane leads."""
        with self._transaction() as connection:
            self._write_as_leader(connection, _BEAT)

    def release(self) -> None:
        """Let another control plane lead at once."""
        with self._transaction() as connection:
            self._write_as_leader(connection, _RELEASE)

    def _write_as_leader(self, connection: Connection, write: ReturningUpdate[int]) -> int:
        """Update the row of the leadership, which also locks it until the transaction ends, so that no other control
        plane takes over in between; return the number of the last change."""
        number = connection.execute(write, {"own_epoch": self._epoch}).scalar()
        if number is None:
            raise GeofedError("STANDBY", "another control plane leads now")
        return int(number)

    @contextmanager
    def _writing(self) -> Iterator[Connection]:
        """Run a transaction as the leader. If its commit fails, whether it was stored is looked up."""
        number = 0
        with self._transaction(lambda: self._settle(number)) as connection:
            number = self._write_as_leader(connection, _CHANGE)
            if self._last_change is not None and number <= self._last_change:
                text = "the database has lost changes of this control plane, as after a switch to an older replica"
                raise GeofedError("STANDBY", text)
            yield connection
        self._last_change = number

    @contextmanager
    def _transaction(self, settle: Callable[[], bool] = lambda: False) -> Iterator[Connection]:
        """Run a transaction. If its commit fails, `settle` says whether it was stored."""
        with mapped(), self.engine.connect().execution_options(geofed_write=True) as connection:
            transaction = connection.begin()
            try:
                yield connection
            except BaseException:
                with suppress(SQLAlchemyError):
                    # If this fails, the connection is lost, and the database rolls back.
                    transaction.rollback()
                raise
            try:
                transaction.commit()
            except SQLAlchemyError:
                connection.invalidate()
                if not settle():
                    raise

    def _settle(self, number: int) -> bool:
        """Return whether the change with this number was committed. Raises ``OutcomeUnknown``.

        The row is read with a lock: a commit that is still in progress is waited for.
        """
        give_up = time.monotonic() + SETTLE_SECONDS
        own = select(t.leadership.c.changes).where(t.leadership.c.epoch == self._epoch).with_for_update()
        while True:
            try:
                with self.engine.connect().execution_options(geofed_write=True) as connection, connection.begin():
                    last = connection.execute(own).scalar()
            except SQLAlchemyError as error:
                if time.monotonic() > give_up:
                    raise OutcomeUnknown from error
                time.sleep(_SETTLE_PAUSE_SECONDS)
                continue
            if last is None:
                raise OutcomeUnknown  # another control plane leads, whose changes have other numbers
            return int(last) >= number

    def clear_log(self) -> None:
        """Empty the log of an SQLite database, which has rows that are deleted from its file. If somebody else reads it
        for longer than a second, the next call does it. PostgreSQL does so by itself."""
        if self.shared:
            return
        with mapped(), closing(self.engine.raw_connection()) as connection:
            # It begins no transaction, in which the log cannot be emptied.
            cursor = connection.cursor()
            for pragma in (_CLEARING, "wal_checkpoint(TRUNCATE)", BUSY):
                cursor.execute(f"PRAGMA {pragma}")
                cursor.fetchall()
            cursor.close()

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        with mapped(), self.engine.connect() as connection, connection.begin():
            yield connection


@contextmanager
def mapped() -> Iterator[None]:
    """Convert database errors to ``GeofedError``."""
    try:
        yield
    except IntegrityError as error:
        raise GeofedError("REQUEST_CONFLICT", f"the store already has a conflicting row: {error.orig}") from error
    except DataError as error:
        raise GeofedError("FRAME_INVALID", f"the database rejects the value: {error.orig}") from error
    except (OperationalError, DatabaseError) as error:
        text = str(error.orig)
        if "disk is full" in text or "No space left" in text:
            raise GeofedError("DISK_FULL", "no space left for the database") from error
        if "not a database" in text or "malformed" in text:
            raise GeofedError("STATE_INVALID", f"the database is damaged: {text}") from error
        raise GeofedError("UNAVAILABLE", f"the database is unavailable: {text.splitlines()[0]}") from error
