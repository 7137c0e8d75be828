"""What an agent must not forget: its partitions, the reports that were not acknowledged, and its meters."""

from __future__ import annotations

import json
import secrets
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from geofed_pb.errors import GeofedError

__all__ = ["AgentStore", "PartitionRow"]

_SCHEMA = """
create table if not exists facts (name text primary key, value text not null);
create table if not exists partitions (
    job text primary key, start blob not null, peers blob, attempt integer not null, publish integer not null,
    worker_port integer not null, exchange_port integer not null, token_key text not null, stopped integer not null,
    bulk_port integer not null default 0, workers integer, batch integer, rate real, stretches text,
    preemptible integer, scale_order integer);
create table if not exists sendings (job text primary key, message blob not null, sent integer not null default 0);
create table if not exists reports (seq integer primary key autoincrement, message blob not null);
create table if not exists meters (
    job text not null, name text not null, value real not null, primary key (job, name));
create table if not exists invocations (
    id integer primary key, job text not null, begun real not null, preemptible integer not null default 0);
"""

_KEEP, _DISCARD = 1, 2
"""Values of `stopped`: what becomes of the partition's state. 0: it is not stopped."""


@dataclass(frozen=True)
class PartitionRow:
    """A partition as it is kept."""

    job: str
    start: bytes
    """The StartPartition message."""
    peers: bytes | None
    """The last Peers message."""
    attempt: int
    publish: bool
    worker_port: int
    exchange_port: int
    bulk_port: int
    token_key: str
    workers: int | None
    """None: as planned."""
    batch: int | None = None
    """Samples of all workers in a step that were asked for with them; None: as planned."""
    rate: float | None = None
    """What the learning rate is multiplied by with it."""
    stretches: str = "[]"
    """Which batch each step has, as JSON."""
    preemptible: bool = False
    """Its workers are on capacity that may be taken away."""
    scale_order: int = 0
    """By which they were asked for; 0: by none."""


class AgentStore:
    """SQLite in the agent's state directory. Small, synchronous, and safe for the agent's threads."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # It holds the keys by which tokens of workers are made; SQLite's other files take its mode.
        path.touch(mode=0o600)
        path.chmod(0o600)
        self._path = path
        self._lock = threading.Lock()
        self._owed: list[Callable[[sqlite3.Connection], object]] = []
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._db.execute("pragma journal_mode = wal")
        self._db.execute("pragma synchronous = full")
        self._db.executescript(_SCHEMA)
        columns = {name for _, name, *_ in self._db.execute("pragma table_info(partitions)")}
        if "bulk_port" not in columns:
            # An older agent has made the table.
            self._db.execute("alter table partitions add column bulk_port integer not null default 0")
        later = {
            "workers": "integer",
            "batch": "integer",
            "rate": "real",
            "stretches": "text",
            "preemptible": "integer",
            "scale_order": "integer",
        }
        for name, kind in later.items():
            if name not in columns:
                self._db.execute(f"alter table partitions add column {name} {kind}")
        if "preemptible" not in {name for _, name, *_ in self._db.execute("pragma table_info(invocations)")}:
            self._db.execute("alter table invocations add column preemptible integer not null default 0")
        if not self.fact("meter"):
            self._db.execute("insert into facts values ('meter', ?)", (str(secrets.randbits(62) + 1),))

    @property
    def meter_id(self) -> int:
        """Another one where what was counted before is lost with the disk."""
        return self.fact("meter")

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            try:
                self._db.execute("begin immediate")
                try:
                    for write in self._owed:
                        write(self._db)
                    yield self._db
                    self._db.execute("commit")
                except BaseException:
                    if self._db.in_transaction:  # SQLite itself rolls back when the disk is full
                        self._db.execute("rollback")
                    raise
                self._owed.clear()
            except sqlite3.OperationalError as error:
                if "full" in str(error) or "disk I/O" in str(error):
                    raise GeofedError("DISK_FULL", f"no space left for {self._path}") from None
                raise

    def _write_or_owe(self, write: Callable[[sqlite3.Connection], object]) -> bool:
        """Write what has happened already and must be kept: where the disk is full, with the next write that succeeds.

        True where it is stored now.
        """
        try:
            with self._writing() as db:
                write(db)
        except GeofedError as error:
            if error.code != "DISK_FULL":
                raise
            with self._lock:
                self._owed.append(write)
            return False
        return True

    def _rows(self, query: str, *values: object) -> list[tuple[object, ...]]:
        with self._lock:
            return self._db.execute(query, values).fetchall()

    # Facts

    def fact(self, name: str, default: int = 0) -> int:
        rows = self._rows("select value from facts where name = ?", name)
        return int(str(rows[0][0])) if rows else default

    # Commands of the control plane: the cursor moves in the same transaction as what the command changes

    def took_start(self, seq: int, job: str, start: bytes, token_key: str) -> None:
        with self._writing() as db:
            db.execute(
                "insert into partitions (job, start, attempt, publish, worker_port, exchange_port, token_key, stopped)"
                " values (?, ?, 0, 0, 0, 0, ?, 0)"
                " on conflict (job) do update set start = excluded.start, stopped = 0",
                (job, start, token_key),
            )
            _move_cursor(db, seq)

    def took_peers(self, seq: int, job: str, peers: bytes) -> None:
        with self._writing() as db:
            db.execute("update partitions set peers = ? where job = ?", (peers, job))
            _move_cursor(db, seq)

    def took_scale(
        self,
        seq: int,
        job: str,
        workers: int,
        batch: int = 0,
        rate: float = 1.0,
        *,
        preemptible: bool = False,
        order: int = 0,
    ) -> None:
        """``batch`` 0: it stays."""
        with self._writing() as db:
            change = "update partitions set workers = ?, preemptible = ?, scale_order = ? where job = ?"
            db.execute(change, (workers, preemptible, order, job))
            if batch:
                db.execute("update partitions set batch = ?, rate = ? where job = ?", (batch, rate, job))
            _move_cursor(db, seq)

    def took_publish(self, seq: int, job: str) -> None:
        with self._writing() as db:
            db.execute("update partitions set publish = 1 where job = ?", (job,))
            _move_cursor(db, seq)

    def took_stop(self, seq: int, job: str, *, discard: bool) -> None:
        with self._writing() as db:
            db.execute("update partitions set stopped = ? where job = ?", (_DISCARD if discard else _KEEP, job))
            _move_cursor(db, seq)

    def took_sending(self, seq: int, job: str, message: bytes) -> None:
        """``message``: SendShard; a later one takes the place of the one before."""
        with self._writing() as db:
            db.execute("insert or replace into sendings (job, message) values (?, ?)", (job, message))
            _move_cursor(db, seq)

    def took_end_of_sending(self, seq: int, job: str) -> None:
        """What it has cost has been reported."""
        with self._writing() as db:
            db.execute("delete from sendings where job = ?", (job,))
            db.execute("delete from meters where job = ?", (job,))
            _move_cursor(db, seq)

    def keep_sent(self, job: str) -> None:
        """The other region has all of it."""
        self._write_or_owe(lambda db: db.execute("update sendings set sent = 1 where job = ?", (job,)))

    def sendings(self) -> list[tuple[bytes, bool]]:
        """The shards that other regions were to get, as SendShard messages, and whether they have them."""
        rows = self._rows("select message, sent from sendings")
        return [(bytes(message), bool(sent)) for message, sent in rows if isinstance(message, bytes)]

    def took(self, seq: int) -> None:
        """A command that changes nothing here."""
        with self._writing() as db:
            _move_cursor(db, seq)

    def command_cursor(self) -> int:
        return self.fact("command_cursor")

    # Partitions

    def partition(self, job: str) -> PartitionRow | None:
        rows = self._partition_rows("where job = ?", job)
        return rows[0] if rows else None

    def open_partitions(self) -> list[PartitionRow]:
        """Those that the control plane has not stopped, in the order in which they were taken."""
        return self._partition_rows("where stopped = 0")

    def stopped_partitions(self) -> list[tuple[PartitionRow, bool]]:
        """Those whose stop was not carried out to its end, and whether their state goes."""
        kept, discarded = (self._partition_rows("where stopped = ?", value) for value in (_KEEP, _DISCARD))
        return [(row, False) for row in kept] + [(row, True) for row in discarded]

    def forget(self, job: str) -> None:
        """A partition that was stopped is gone, and its account has been reported; not if it has begun again."""
        with self._writing() as db:
            gone = db.execute("delete from partitions where job = ? and stopped != 0", (job,)).rowcount
            for table in ("meters", "invocations") if gone else ():
                db.execute(f"delete from {table} where job = ?", (job,))

    def _partition_rows(self, where: str, *values: object) -> list[PartitionRow]:
        fields = "job, start, peers, attempt, publish, worker_port, exchange_port, bulk_port, token_key, workers"
        fields += ", batch, rate, coalesce(stretches, '[]'), coalesce(preemptible, 0), coalesce(scale_order, 0)"
        with self._lock:
            found = self._db.execute(f"select {fields} from partitions {where} order by rowid", values).fetchall()
        return [
            PartitionRow(job, start, peers, attempt, bool(publish), *(*rest[:-2], bool(rest[-2]), rest[-1]))
            for job, start, peers, attempt, publish, *rest in found
        ]

    def keep_attempt(self, job: str, attempt: int) -> None:
        """Before the attempt's first invocation, so that no two lives of the agent use the same one; but not before a
        parameter server has been up: from then on one that finds no state has lost it."""
        with self._writing() as db:
            db.execute("update partitions set attempt = max(attempt, ?) where job = ?", (attempt, job))

    def keep_stretches(self, job: str, stretches: str) -> None:
        """Before anybody makes a step by them."""
        with self._writing() as db:
            db.execute("update partitions set stretches = ? where job = ?", (stretches, job))

    def keep_ports(self, job: str, worker_port: int, exchange_port: int, bulk_port: int) -> None:
        with self._writing() as db:
            db.execute(
                "update partitions set worker_port = ?, exchange_port = ?, bulk_port = ? where job = ?",
                (worker_port, exchange_port, bulk_port, job),
            )

    # Reports to the control plane

    def add_report(self, message: bytes) -> bool:
        """Number a report and keep it until it is acknowledged; False where it has to wait for space on the disk."""
        return self._write_or_owe(lambda db: db.execute("insert into reports (message) values (?)", (message,)))

    def reports_after(self, seq: int, most: int = 256) -> list[tuple[int, bytes]]:
        rows = self._rows("select seq, message from reports where seq > ? order by seq limit ?", seq, most)
        return [(int(str(number)), bytes(message)) for number, message in rows if isinstance(message, bytes)]

    def number_reports_after(self, seq: int) -> None:
        """The control plane has reports up to here: an agent that has lost its own memory goes on from there."""
        known = self._rows("select seq from sqlite_sequence where name = 'reports'")
        if known and int(str(known[0][0])) >= seq:
            return  # as almost always; a full disk must not keep the agent from the control plane
        with self._writing() as db:
            last = db.execute("select seq from sqlite_sequence where name = 'reports'").fetchone()
            if last is None:
                db.execute("insert into sqlite_sequence values ('reports', ?)", (seq,))
                return
            if last[0] < seq:
                # In two steps, since the ranges may overlap.
                db.execute("update reports set seq = -(seq + ?)", (seq,))
                db.execute("update reports set seq = -seq")
                db.execute("update sqlite_sequence set seq = seq + ? where name = 'reports'", (seq,))

    def reports_waiting(self) -> int:
        """How many reports the control plane has not acknowledged."""
        return int(str(self._rows("select count(*) from reports")[0][0]))

    def forget_reports(self, up_to: int) -> None:
        self._write_or_owe(lambda db: db.execute("delete from reports where seq <= ?", (up_to,)))

    # Meters

    def add_to_meters(self, job: str, amounts: dict[str, float]) -> None:
        self._write_or_owe(lambda db: _add(db, job, amounts))

    def meters(self, job: str) -> dict[str, float]:
        rows = self._rows("select name, value from meters where job = ?", job)
        return {str(name): float(str(value)) for name, value in rows}

    def invocation_begun(self, job: str, now: float, *, preemptible: bool = False) -> int:
        """``preemptible``: on capacity that may be taken away, however the partition goes on."""
        insert = "insert into invocations (job, begun, preemptible) values (?, ?, ?)"
        with self._writing() as db:
            return int(db.execute(insert, (job, now, preemptible)).lastrowid or 0)

    def invocation_ended(self, number: int, job: str, amounts: dict[str, float]) -> None:
        """Close an invocation and charge it, in one transaction."""

        def write(db: sqlite3.Connection) -> None:
            db.execute("delete from invocations where id = ?", (number,))
            _add(db, job, amounts)

        self._write_or_owe(write)

    def open_invocations(self) -> list[tuple[int, str, float, bool]]:
        """Invocations that an earlier life of the agent has not seen end, and whether they were preemptible."""
        rows = self._rows("select id, job, begun, preemptible from invocations")
        return [(int(str(number)), str(job), float(str(begun)), bool(kind)) for number, job, begun, kind in rows]

    def alive(self, now: float) -> None:
        """Note that the agent runs; what was open when it died is charged up to here."""
        with self._writing() as db:
            db.execute("insert or replace into facts values ('alive', ?)", (json.dumps(now),))

    def last_alive(self) -> float:
        rows = self._rows("select value from facts where name = 'alive'")
        return float(str(rows[0][0])) if rows else 0.0


def _add(db: sqlite3.Connection, job: str, amounts: dict[str, float]) -> None:
    for name, amount in amounts.items():
        db.execute(
            "insert into meters values (?, ?, ?) on conflict (job, name) do update set value = value + excluded.value",
            (job, name, amount),
        )


def _move_cursor(db: sqlite3.Connection, seq: int) -> None:
    if seq:
        db.execute("insert or replace into facts values ('command_cursor', ?)", (str(seq),))
