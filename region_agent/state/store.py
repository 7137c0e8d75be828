"""The agent's durable state: its partitions, reports that are not acknowledged yet, and meters."""

from __future__ import annotations

import json
import secrets
import sqlite3
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from geofed_pb.errors import GeofedError
from geofed_pb.security.audit import GENESIS, bounded_facts, entry_text, hash_of
from region_agent.state.database import AgentDatabase

__all__ = ["AgentStore", "AuditEntry", "PartitionRow", "stored_messages"]

_MAX_SET_ASIDE = 100
"""Messages set aside that are kept."""
_MAX_READ_BYTES = 4 << 20
"""Bytes of reports that are read at a time; a larger report is read alone."""
_KEEP, _DISCARD = 1, 2
"""Values of `stopped`: keep or discard the partition's state. 0: the partition is not stopped."""


@dataclass(frozen=True)
class PartitionRow:
    """Stored partition."""

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
    """Number that the control plane has set; None: the planned one."""
    batch: int | None = None
    """Samples of all workers in a step that were requested with it; None: the planned ones."""
    rate: float | None = None
    """Factor of the learning rate with that batch."""
    stretches: str = "[]"
    """Stretches of steps with their batch, as JSON."""
    preemptible: bool = False
    """The workers run on preemptible capacity."""
    scale_order: int = 0
    """Number of the last scaling command; 0: none."""


@dataclass(frozen=True)
class AuditEntry:
    """Entry of the audit log, with what finds it again, so that no stored text has to be read for it."""

    kind: str
    job: str
    epoch: int
    """0: it is of no epoch."""
    mark: str
    """What tells it from others of the same kind, job and epoch; empty: nothing."""
    facts: Mapping[str, object]


def stored_messages(path: Path) -> tuple[list[bytes], list[bytes]]:
    """Return the StartPartition and SendShard messages in an agent's database, which may be in use.

    Raises ``sqlite3.Error`` if it cannot be read.
    """
    with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as db:
        starts, sendings = (
            db.execute(f"select {name}").fetchall() for name in ("start from partitions", "message from sendings")
        )
    return [row[0] for row in starts], [row[0] for row in sendings]


class AgentStore(AgentDatabase):
    """The agent's database, with its queries."""

    def owner_mark(self, made: str) -> str:
        """Return the mark of the region's functions, in hexadecimal digits. The first call keeps the one given."""
        with self._writing() as db:
            db.execute("insert or ignore into facts values ('owner', ?)", (str(int(made, 16)),))
        return f"{self.fact('owner'):0{len(made)}x}"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        if not self.fact("meter"):
            self._db.execute("insert into facts values ('meter', ?)", (str(secrets.randbits(62) + 1),))
        found = self._rows("select value from facts where name = 'reports_shared'")
        self._shared: int | None = int(str(found[0][0])) if found else self._last_report()
        """Number of the last report at the agent's start, until its first session; None: there was a session. If the
        control plane has later reports, they were sent from a later state than this one."""
        if not found:
            insert = "insert or replace into facts values ('reports_shared', ?)"
            self._write_or_defer(lambda db: db.execute(insert, (str(self._shared),)))

    @property
    def meter_id(self) -> int:
        """Identity of the meters; a new one if the database, and the counts in it, were lost."""
        return self.fact("meter")

    # Commands of the control plane: the cursor moves in the same transaction as what the command changes

    def took_start(self, seq: int, job: str, start: bytes, token_key: str, audit: AuditEntry | None = None) -> None:
        """Store a partition's start command, with the key that signs its workers' tokens, and the command's number.

        ``audit``: entry of the audit log, which is stored in the same transaction.
        """
        with self._writing() as db:
            db.execute(
                "insert into partitions (job, start, attempt, publish, worker_port, exchange_port, token_key, stopped)"
                " values (?, ?, 0, 0, 0, 0, ?, 0)"
                " on conflict (job) do update set start = excluded.start, stopped = 0",
                (job, start, token_key),
            )
            if audit is not None:
                _append_audit(db, audit)
            _move_cursor(db, seq)

    def took_peers(self, seq: int, job: str, peers: bytes) -> None:
        """Store the addresses of a partition's peers, and the command's number."""
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
        """Store a number of workers. ``batch`` 0: unchanged."""
        with self._writing() as db:
            change = "update partitions set workers = ?, preemptible = ?, scale_order = ? where job = ?"
            db.execute(change, (workers, preemptible, order, job))
            if batch:
                db.execute("update partitions set batch = ?, rate = ? where job = ?", (batch, rate, job))
            _move_cursor(db, seq)

    def took_publish(self, seq: int, job: str) -> None:
        """Store that a partition is to publish its model, and the command's number."""
        with self._writing() as db:
            db.execute("update partitions set publish = 1 where job = ?", (job,))
            _move_cursor(db, seq)

    def took_stop(self, seq: int, job: str, *, discard: bool) -> None:
        """Store that a partition is to end, and discard its model or not, and the command's number."""
        with self._writing() as db:
            db.execute("update partitions set stopped = ? where job = ?", (_DISCARD if discard else _KEEP, job))
            _move_cursor(db, seq)

    def took_sending(self, seq: int, job: str, message: bytes) -> None:
        """Store a transfer; it replaces an earlier one of the job. ``message``: SendShard."""
        with self._writing() as db:
            db.execute("insert or replace into sendings (job, message) values (?, ?)", (job, message))
            _move_cursor(db, seq)

    def took_end_of_sending(self, seq: int, job: str) -> None:
        """Delete a transfer and its meters, after its account was reported."""
        with self._writing() as db:
            db.execute("delete from sendings where job = ?", (job,))
            db.execute("delete from meters where job = ?", (job,))
            _move_cursor(db, seq)

    def keep_sent(self, job: str) -> None:
        """Note that the other region has the whole shard."""
        self._write_or_defer(lambda db: db.execute("update sendings set sent = 1 where job = ?", (job,)))

    def sendings(self) -> list[tuple[bytes, bool]]:
        """Return the transfers as SendShard messages, and whether they are complete."""
        rows = self._rows("select message, sent from sendings")
        return [(bytes(message), bool(sent)) for message, sent in rows if isinstance(message, bytes)]

    def took(self, seq: int) -> None:
        """Note a command that changes nothing else."""
        with self._writing() as db:
            _move_cursor(db, seq)

    def command_cursor(self) -> int:
        """Return the number of the last command that was stored."""
        return self.fact("command_cursor")

    # Partitions

    def partition(self, job: str) -> PartitionRow | None:
        """Return a job's partition; None if there is none."""
        rows = self._partition_rows("where job = ?", job)
        return rows[0] if rows else None

    def is_open(self, job: str) -> bool:
        """Whether a job has a partition that is not stopped."""
        return bool(self._rows("select 1 from partitions where job = ? and stopped = 0", job))

    def open_partitions(self) -> list[PartitionRow]:
        """Return the partitions that are not stopped, in the order of their start commands."""
        return self._partition_rows("where stopped = 0")

    def stopped_partitions(self) -> list[tuple[PartitionRow, bool]]:
        """Return the partitions whose stop is not complete, and whether their state is discarded."""
        kept, discarded = (self._partition_rows("where stopped = ?", value) for value in (_KEEP, _DISCARD))
        return [(row, False) for row in kept] + [(row, True) for row in discarded]

    def forget(self, job: str) -> None:
        """Delete a stopped partition after its last report; one that was started again is kept."""
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
        """Store the attempt before its first invocation, so that it is not used again after a restart of the agent.

        Not before a parameter server has run: from then on a server that finds no state has lost it.
        """
        with self._writing() as db:
            db.execute("update partitions set attempt = max(attempt, ?) where job = ?", (attempt, job))

    def keep_stretches(self, job: str, stretches: str) -> None:
        """Store the stretches, before any worker makes a step of the last one."""
        with self._writing() as db:
            db.execute("update partitions set stretches = ? where job = ?", (stretches, job))

    def keep_ports(self, job: str, worker_port: int, exchange_port: int, bulk_port: int) -> None:
        """Store the ports of a partition's server, so that its next run listens on the same ones."""
        with self._writing() as db:
            db.execute(
                "update partitions set worker_port = ?, exchange_port = ?, bulk_port = ? where job = ?",
                (worker_port, exchange_port, bulk_port, job),
            )

    # Reports to the control plane

    def add_report(self, message: bytes) -> bool:
        """Store a report until it is acknowledged; False if it is deferred because the disk is full."""
        return self._write_or_defer(lambda db: db.execute("insert into reports (message) values (?)", (message,)))

    def reports_after(self, seq: int, most: int = 256) -> list[tuple[int, bytes]]:
        """Return the next reports in order, with a limit of their number and bytes."""
        found: list[tuple[int, bytes]] = []
        total = 0
        with self._lock:
            rows = self._db.execute("select seq, message from reports where seq > ? order by seq limit ?", (seq, most))
            for number, message in rows:
                total += len(message)
                if found and total > _MAX_READ_BYTES:
                    break
                found.append((number, message))
        return found

    def reports_acknowledged(self) -> int:
        """Return the number of the last report that was acknowledged and deleted."""
        first = self._rows("select min(seq) from reports")[0][0]
        return self._last_report() if first is None else int(str(first)) - 1

    def resume_reports(self, cursor: int) -> bool:
        """Continue after the reports that the control plane has, which are those up to ``cursor``.

        True if this state is older than the reports sent from it: it was lost, or restored from a backup. The reports
        of the backup have arrived; reports added since then get new numbers.
        """
        shared, self._shared = self._shared, None
        older = cursor > (self._last_report() if shared is None else shared)
        if not older:
            # The usual case. Deferred writes, so that a full disk does not prevent a session.
            self.forget_reports(cursor)
            if shared is not None:
                self._write_or_defer(lambda db: db.execute("delete from facts where name = 'reports_shared'"))
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
        """Return the bytes of all reports that are not acknowledged."""
        return int(str(self._rows("select coalesce(sum(length(message)), 0) from reports")[0][0]))

    # Audit log

    def add_audit(self, *entries: AuditEntry, unless: Sequence[str] = (), now: bool = False) -> None:
        """Append entries to the audit log, in one transaction.

        ``unless``: marks, with any of which an entry of the same kind, job and epoch makes a new one superfluous.
        ``now``: for what has not happened yet; else it is stored once a full disk has space again.

        Raises ``GeofedError("DISK_FULL")`` with ``now``.
        """

        def write(db: sqlite3.Connection) -> None:
            for entry in entries:
                if not _is_audited(db, entry, unless):
                    _append_audit(db, entry)

        if not now:
            self._write_or_defer(write)
            return
        with self._writing() as db:
            write(db)

    def last_audit(self) -> tuple[int, str] | None:
        """Return the number and the hash of the audit log's last entry; None: it is empty."""
        rows = self._rows("select seq, hash from audit order by seq desc limit 1")
        return (int(str(rows[0][0])), str(rows[0][1])) if rows else None

    def audited(self, kind: str) -> list[str]:
        """Return the texts of all entries of a kind, in their order."""
        return [str(text) for (text,) in self._rows("select text from audit where kind = ? order by seq", kind)]

    def last_of(self, job: str, *kinds: str, epoch: int | None = None) -> tuple[int, str] | None:
        """Return number and mark of the last entry of a job that is of these kinds. ``epoch`` None: of any one."""
        where = f"job = ? and kind in ({', '.join('?' * len(kinds))})"
        values: list[object] = [job, *kinds]
        if epoch is not None:
            where, values = f"{where} and epoch = ?", [*values, epoch]
        rows = self._rows(f"select seq, mark from audit where {where} order by seq desc limit 1", *values)
        return (int(str(rows[0][0])), str(rows[0][1])) if rows else None

    # Messages set aside

    def set_report_aside(self, seq: int, reason: str, substitute: bytes) -> None:
        """Replace a report that cannot be delivered, under the same number, and keep it for the operator."""
        with self._writing() as db:
            row = db.execute("select message from reports where seq = ?", (seq,)).fetchone()
            if row is not None:
                _set_aside(db, "report", seq, reason, row[0])
                db.execute("update reports set message = ? where seq = ?", (substitute, seq))

    def set_command_aside(self, seq: int, reason: str, message: bytes) -> None:
        """Skip a command that can never be carried out, and keep it for the operator."""
        with self._writing() as db:
            _set_aside(db, "command", seq, reason, message)
            _move_cursor(db, seq)

    def set_aside(self) -> list[tuple[str, int, str, bytes]]:
        """Return the messages set aside: "report" or "command", its number, the reason, and the message."""
        rows = self._rows("select kind, seq, reason, message from set_aside order by id")
        return [(str(kind), int(str(seq)), str(why), raw) for kind, seq, why, raw in rows if isinstance(raw, bytes)]

    def reports_waiting(self) -> int:
        """Return the number of reports that are not acknowledged."""
        return int(str(self._rows("select count(*) from reports")[0][0]))

    def forget_reports(self, up_to: int) -> None:
        """Delete all reports up to an acknowledged number."""
        self._write_or_defer(lambda db: db.execute("delete from reports where seq <= ?", (up_to,)))

    # Meters

    def add_to_meters(self, job: str, amounts: dict[str, float]) -> None:
        """Add amounts to a job's meters by name, now or once the disk has space again."""
        self._write_or_defer(lambda db: _add(db, job, amounts))

    def meters(self, job: str) -> dict[str, float]:
        """Return the sums of a job's meters by name."""
        rows = self._rows("select name, value from meters where job = ?", job)
        return {str(name): float(str(value)) for name, value in rows}

    def invocation_begun(self, job: str, now: float, *, preemptible: bool = False) -> int:
        """Store a running invocation; returns its number. ``preemptible``: it runs on preemptible capacity."""
        insert = "insert into invocations (job, begun, preemptible) values (?, ?, ?)"
        with self._writing() as db:
            return int(db.execute(insert, (job, now, preemptible)).lastrowid or 0)

    def invocation_ended(self, number: int, job: str, amounts: dict[str, float]) -> None:
        """Close an invocation and charge it, in one transaction."""

        def write(db: sqlite3.Connection) -> None:
            db.execute("delete from invocations where id = ?", (number,))
            _add(db, job, amounts)

        self._write_or_defer(write)

    def open_invocations(self) -> list[tuple[int, str, float, bool]]:
        """Return number, job, begin and preemptible of invocations that ran when the agent ended."""
        rows = self._rows("select id, job, begun, preemptible from invocations")
        return [(int(str(number)), str(job), float(str(begun)), bool(kind)) for number, job, begun, kind in rows]

    def alive(self, now: float) -> None:
        """Note that the agent runs; invocations that run when it dies are charged until the last of these times."""
        with self._writing() as db:
            db.execute("insert or replace into facts values ('alive', ?)", (json.dumps(now),))

    def last_alive(self) -> float:
        """Instant at which the agent last recorded that it runs, as a Unix time; 0: never."""
        rows = self._rows("select value from facts where name = 'alive'")
        return float(str(rows[0][0])) if rows else 0.0


def _add(db: sqlite3.Connection, job: str, amounts: dict[str, float]) -> None:
    for name, amount in amounts.items():
        db.execute(
            "insert into meters values (?, ?, ?) on conflict (job, name) do update set value = value + excluded.value",
            (job, name, amount),
        )


def _is_audited(db: sqlite3.Connection, entry: AuditEntry, marks: Sequence[str]) -> bool:
    places = ", ".join("?" * len(marks))
    query = f"select 1 from audit where job = ? and kind = ? and epoch = ? and mark in ({places}) limit 1"
    return bool(marks) and db.execute(query, (entry.job, entry.kind, entry.epoch, *marks)).fetchone() is not None


def _append_audit(db: sqlite3.Connection, entry: AuditEntry) -> None:
    rows = db.execute("select seq, hash from audit order by seq desc limit 1").fetchall()
    seq, before = rows[0] if rows else (0, GENESIS)
    text = entry_text(seq + 1, bounded_facts(entry.facts))
    values = (seq + 1, entry.kind, entry.job, entry.epoch, entry.mark, text, hash_of(before, text))
    db.execute("insert into audit (seq, kind, job, epoch, mark, text, hash) values (?, ?, ?, ?, ?, ?, ?)", values)


def _set_aside(db: sqlite3.Connection, kind: str, seq: int, reason: str, message: bytes) -> None:
    insert = "insert into set_aside (at, kind, seq, reason, message) values (?, ?, ?, ?, ?)"
    db.execute(insert, (time.time(), kind, seq, reason, message))
    db.execute(
        "delete from set_aside where id <= (select max(id) from set_aside) - ?",
        (_MAX_SET_ASIDE,),
    )


def _move_cursor(db: sqlite3.Connection, seq: int) -> None:
    if seq:
        db.execute("insert or replace into facts values ('command_cursor', ?)", (str(seq),))
