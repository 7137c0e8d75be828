"""The SQLite database in the agent's state directory, with blocking calls that any thread may make."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from geofed_pb.errors import GeofedError
from region_agent.state.migrating import migrate

__all__ = ["AgentDatabase"]

_BUSY_MS = 5000
"""Time for which a write waits for another process, such as a command that reads the database."""


class AgentDatabase:
    """A database with writes that are deferred while the disk is full.

    Raises ``GeofedError("STATE_INVALID")`` if it is damaged or of a newer version.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # The file contains the keys of workers' tokens. SQLite's other files get the same mode.
        path.touch(mode=0o600)
        path.chmod(0o600)
        migrate(path)
        self._path = path
        self._lock = threading.Lock()
        self._deferred: list[Callable[[sqlite3.Connection], object]] = []
        self._db = sqlite3.connect(path, _BUSY_MS / 1e3, isolation_level=None, check_same_thread=False)
        self._db.execute("pragma journal_mode = wal")
        self._db.execute("pragma synchronous = full")
        # What is deleted must not stay readable in the file: reports, and configurations of jobs.
        self._db.execute("pragma secure_delete = on")

    def close(self) -> None:
        """Close the database; deferred writes are lost."""
        self._db.close()

    def clear_log(self) -> None:
        """Empty SQLite's log beside the file, which has rows that are deleted from the file. If another process reads
        the database just now, the next call does it."""
        with self._lock:
            self._db.execute("pragma busy_timeout = 0")
            try:
                self._db.execute("pragma wal_checkpoint(truncate)").fetchall()
            finally:
                self._db.execute(f"pragma busy_timeout = {_BUSY_MS}")

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            try:
                # The connection commits at the end, or rolls back after any exception: no transaction may stay open,
                # since all threads share the connection.
                with self._db:
                    self._db.execute("begin immediate")
                    for write in self._deferred:
                        write(self._db)
                    yield self._db
                self._deferred.clear()
            except sqlite3.OperationalError as error:
                if "full" in str(error) or "disk I/O" in str(error):
                    raise GeofedError("DISK_FULL", f"no space left for {self._path}") from None
                raise

    def _write_or_defer(self, write: Callable[[sqlite3.Connection], object]) -> bool:
        """Write now or, if the disk is full, with the next write that succeeds; True if it is written now.

        For records of events that have already happened.
        """
        try:
            with self._writing() as db:
                write(db)
        except GeofedError as error:
            if error.code != "DISK_FULL":
                raise
            with self._lock:
                self._deferred.append(write)
            return False
        return True

    def _rows(self, query: str, *values: object) -> list[tuple[object, ...]]:
        with self._lock:
            return self._db.execute(query, values).fetchall()

    def fact(self, name: str, default: int = 0) -> int:
        """Return a number of the table `facts`."""
        rows = self._rows("select value from facts where name = ?", name)
        return int(str(rows[0][0])) if rows else default
