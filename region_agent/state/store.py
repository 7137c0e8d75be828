"""What an agent must not forget: its partitions, the reports that were not acknowledged, and its meters."""

from __future__ import annotations

import json
import secrets
import sqlite3
import time
from dataclasses import dataclass
from pathlib import Path

from geofed_pb.errors import GeofedError
from region_agent.state.database import AgentDatabase

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
create table if not exists set_aside (
    id integer primary key autoincrement, at real not null, kind text not null, seq integer not null,
    reason text not null, message blob not null);
create table if not exists meters (
    job text not null, name text not null, value real not null, primary key (job, name));
create table if not exists invocations (
    id integer primary key, job text not null, begun real not null, preemptible integer not null default 0);
"""

_MOST_SET_ASIDE = 100
_MOST_READ_BYTES = 4 << 20
"""Of reports that are held in memory at a time; one that is larger is held alone."""
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


class AgentStore(AgentDatabase):
    """What the agent keeps in its state directory."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, _SCHEMA)
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
        found = self._rows("select value from facts where name = 'reports_shared'")
        self._shared: int | None = int(str(found[0][0])) if found else self._last_report()
        """The last report that there was when this or an earlier life of the agent began that has had no session yet:
        what the control plane has beyond it was sent from a later state than this one. None: there was a session."""
        if not found:
            insert = "insert or replace into facts values ('reports_shared', ?)"
            self._write_or_owe(lambda db: db.execute(insert, (str(self._shared),)))

    @property
    def meter_id(self) -> int:
        """Another one where what was counted before is lost with the disk."""
        return self.fact("meter")

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
        """The next ones in order, no more than are to be held in memory at a time."""
        found: list[tuple[int, bytes]] = []
        total = 0
        with self._lock:
            rows = self._db.execute("select seq, message from reports where seq > ? order by seq limit ?", (seq, most))
            for number, message in rows:
                total += len(message)
                if found and total > _MOST_READ_BYTES:
                    break
                found.append((number, message))
        return found

    def reports_acknowledged(self) -> int:
        """Reports up to this one were acknowledged, and are forgotten."""
        first = self._rows("select min(seq) from reports")[0][0]
        return self._last_report() if first is None else int(str(first)) - 1

    def resume_reports(self, cursor: int) -> bool:
        """Continue behind the reports that the control plane has, which are those up to ``cursor``.

        True where this state is older than what was sent to the control plane: it was lost, or put back from a copy.
        What the copy holds of reports has arrived; what was reported since is numbered anew.
        """
        shared, self._shared = self._shared, None
        older = cursor > (self._last_report() if shared is None else shared)
        if not older:
            # As almost always; a full disk must not keep the agent from the control plane.
            self.forget_reports(cursor)
            if shared is not None:
                self._write_or_owe(lambda db: db.execute("delete from facts where name = 'reports_shared'"))
            return False
        try:
            with self._writing() as db:
                if shared is not None:
                    db.execute("delete from reports where seq <= ?", (shared,))
                    db.execute("delete from facts where name = 'reports_shared'")
                waiting = db.execute("select seq from reports order by seq").fetchall()
                # In two steps, since the ranges may overlap.
                moves = [(-(cursor + rank), number) for rank, (number,) in enumerate(waiting, 1)]
                db.executemany("update reports set seq = ? where seq = ?", moves)
                db.execute("update reports set seq = -seq where seq < 0")
                db.execute("delete from sqlite_sequence where name = 'reports'")
                db.execute("insert into sqlite_sequence values ('reports', ?)", (cursor + len(waiting),))
        except GeofedError:
            self._shared = shared
            raise
        return True

    def _last_report(self) -> int:
        found = self._rows("select seq from sqlite_sequence where name = 'reports'")
        return int(str(found[0][0])) if found else 0

    def report_bytes_waiting(self) -> int:
        """Of all reports that the control plane has not acknowledged."""
        return int(str(self._rows("select coalesce(sum(length(message)), 0) from reports")[0][0]))

    # What could not be delivered, or not be taken

    def set_report_aside(self, seq: int, reason: str, instead: bytes) -> None:
        """Send another report under the number of one that cannot be delivered, which is kept for people."""
        with self._writing() as db:
            row = db.execute("select message from reports where seq = ?", (seq,)).fetchone()
            if row is not None:
                _set_aside(db, "report", seq, reason, row[0])
                db.execute("update reports set message = ? where seq = ?", (instead, seq))

    def set_command_aside(self, seq: int, reason: str, message: bytes) -> None:
        """Have a command behind us that can never be carried out."""
        with self._writing() as db:
            _set_aside(db, "command", seq, reason, message)
            _move_cursor(db, seq)

    def set_aside(self) -> list[tuple[str, int, str, bytes]]:
        """Of each: "report" or "command", its number, the reason, and the message."""
        rows = self._rows("select kind, seq, reason, message from set_aside order by id")
        return [(str(kind), int(str(seq)), str(why), raw) for kind, seq, why, raw in rows if isinstance(raw, bytes)]

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
        """``preemptible``: on capacity that may be taken away, however the partition continues."""
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


def _set_aside(db: sqlite3.Connection, kind: str, seq: int, reason: str, message: bytes) -> None:
    insert = "insert into set_aside (at, kind, seq, reason, message) values (?, ?, ?, ?, ?)"
    db.execute(insert, (time.time(), kind, seq, reason, message))
    db.execute(
        "delete from set_aside where id <= (select max(id) from set_aside) - ?",
        (_MOST_SET_ASIDE,),
    )


def _move_cursor(db: sqlite3.Connection, seq: int) -> None:
    if seq:
        db.execute("insert or replace into facts values ('command_cursor', ?)", (str(seq),))
