"""Store on SQLite or PostgreSQL. Its methods block, so that the services call them in threads."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from types import TracebackType
from typing import Any

from sqlalchemy import (
    Connection,
    Engine,
    Integer,
    String,
    Table,
    and_,
    case,
    cast,
    delete,
    func,
    insert,
    literal,
    or_,
    select,
    text,
    update,
)
from sqlalchemy.exc import DatabaseError, DataError, IntegrityError, OperationalError, SQLAlchemyError

from control_plane.store import _schema as t
from control_plane.store._records import (
    AuditRow,
    Change,
    CommandRow,
    Committed,
    Cursors,
    Deletion,
    EventRow,
    Invitation,
    JobRow,
    JobUse,
    Leadership,
    LogRow,
    RegionRow,
    Revocation,
    RowUse,
    RunRow,
    UserRow,
    WeightRow,
)
from geofed_pb.audit import GENESIS, hash_of
from geofed_pb.errors import GeofedError

MAX_LOG_LINES = 20_000
"""Limit of stored log lines of a job; the oldest are dropped."""
SETTLE_SECONDS = 5.0
"""How long a commit whose answer was lost is looked up. It covers a restart of the database's connection pooler or a
switch to its replica; a longer outage ends the leadership instead."""
_SETTLE_PAUSE_SECONDS = 0.2
"""Time between two attempts to look up a commit."""


_DAY_SECONDS = 86_400
"""Rows that belong to no job are measured by the day."""
HISTORIES = {
    "events": ("text", "data_json"),
    "logs": ("text",),
    "runs": ("profile_json", "merge_json"),
    "weights": ("steps_json", "note"),
    "deletions": (),
}
"""Tables of histories, with their long texts."""


_LISTS = ("shared_with", "model_digests")
"""Columns of the jobs that hold lists, as JSON."""


class OutcomeUnknown(Exception):
    """The database did not answer whether a transaction was committed, and could not be asked again."""


class Store:
    """Reads return committed state; all writes go through `commit`, one transaction each.

    Transactions are of the epoch in which the store was opened, or which it has begun by `take`. They are refused with
    STANDBY once another store has begun a later one.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_log_lines: int = MAX_LOG_LINES,
        interrupt: Callable[[], None] = lambda: None,
    ) -> None:
        self.engine = engine
        self._max_log_lines = max_log_lines
        self.interrupt = interrupt
        """Break all connections, so that calls in other threads that wait for the database fail at once."""
        self.shared = engine.dialect.name == "postgresql"
        """Whether other control planes can reach the database; a file lock keeps them from SQLite."""
        self._epoch = self.leadership().epoch
        self._last_change: int | None = None
        """Number of this leader's last change; None: it has made none."""

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self.engine.dispose()

    # --- writing

    def commit(self, change: Change) -> Committed:
        """Store a change in one transaction; raises as `commit_all` does."""
        return self.commit_all((change,))[0]

    def commit_all(self, changes: Sequence[Change]) -> list[Committed]:
        """Store changes in one transaction, in order.

        Raises ``GeofedError``, and nothing is stored: REQUEST_CONFLICT, DISK_FULL, UNAVAILABLE; STANDBY if another
        control plane leads. Raises ``OutcomeUnknown``.
        """
        with self._writing() as connection:
            return [self._apply(connection, change) for change in changes]

    def _apply(self, connection: Connection, change: Change) -> Committed:
        if change.renumbered_region:
            of_region = update(t.regions).where(t.regions.c.name == change.renumbered_region)
            connection.execute(of_region.values(report_cursor=0))
        if change.met:
            self._meet_agent(connection, *change.met)
        if change.dropped_command:
            name, seq = change.dropped_command
            connection.execute(delete(t.commands).where(t.commands.c.region == name, t.commands.c.seq == seq))
        for job in change.jobs:
            lists = {name: json.dumps(getattr(job, name)) for name in _LISTS}
            _put(connection, t.jobs, {"id": job.id}, vars(job) | lists)
        for gone in change.deletions:
            _delete_job(connection, gone)
        for region in change.regions:
            self._put_region(connection, region)
        for invitation in change.invitations:
            _put(connection, t.invitations, {"secret_hash": invitation.secret_hash}, asdict(invitation))
        for user in change.users:
            _put(connection, t.users, {"name": user.name}, asdict(user))
        if change.removed_users:
            connection.execute(delete(t.users).where(t.users.c.name.in_(change.removed_users)))
        for revoked in change.revocations:
            _put(connection, t.revocations, {"serial": revoked.serial}, asdict(revoked))
        if name := change.removed_region:
            for table, column in (("commands", "region"), ("invitations", "region"), ("regions", "name")):
                of_table = t.metadata.tables[table]
                connection.execute(delete(of_table).where(of_table.c[column] == name))
        for run in change.runs:
            _put(connection, t.runs, {"job": run.job, "region": run.region}, asdict(run))
        for weight in change.weights:
            _put(connection, t.weights, {"task_key": weight.task_key}, asdict(weight))
        events = self._append_events(connection, change.events)
        commands = tuple(self._append_command(connection, command) for command in change.commands)
        if change.logs:
            self._append_logs(connection, change.logs)
        self._move_cursors(connection, change)
        return Committed(events, commands, bool(change.logs), _append_audit(connection, change.audit))

    def last_audit(self) -> AuditRow | None:
        """Return the last entry of the audit log; None: it is empty."""
        with self._reading() as connection:
            row = connection.execute(select(t.audit).order_by(t.audit.c.seq.desc()).limit(1)).mappings().first()
            return AuditRow(**row) if row is not None else None

    def audit_after(self, seq: int, limit: int = 1000) -> list[AuditRow]:
        """Return a page of the audit log, after an entry."""
        wanted = select(t.audit).where(t.audit.c.seq > seq).order_by(t.audit.c.seq).limit(limit)
        with self._reading() as connection:
            return [AuditRow(**row) for row in connection.execute(wanted).mappings()]

    def remove_rows(self, table: str, until: float, job: str | None = None, limit: int = 2000) -> int:
        """Remove up to `limit` rows of a history that are not later than `until`, the oldest first; return how many.

        ``job``: only those that name it; empty: that name none.
        """
        found = t.metadata.tables[table]
        wanted = found.c.at <= until
        if job is not None:
            wanted = and_(wanted, found.c.job == job)
        if "cursor" in found.c:
            first = select(found.c.cursor).where(wanted).order_by(found.c.cursor).limit(limit)
            wanted = found.c.cursor.in_(first)
        with self._writing() as connection:
            return connection.execute(delete(found).where(wanted)).rowcount

    def jobs_with_events_beyond(self, most: int) -> list[str]:
        """Return the jobs that have more events than `most`. Reads the index of all events."""
        many = select(t.events.c.job).where(t.events.c.job != "").group_by(t.events.c.job)
        with self._reading() as connection:
            return list(connection.execute(many.having(func.count() > most)).scalars())

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
            _put(connection, t.meta, {"key": key}, {"key": key, "value": value})

    def begin(self) -> None:
        """Record the start of the control plane: an agent with later commands than the present ones is ahead of this
        store."""
        with self._writing() as connection:
            first = update(t.regions).where(t.regions.c.shared_seq.is_(None))
            connection.execute(first.values(shared_seq=t.regions.c.command_seq))

    # --- leading

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
            self._write_as_leader(connection, beats=t.leadership.c.beats + 1)

    def release(self) -> None:
        """Let another control plane lead at once."""
        with self._transaction() as connection:
            self._write_as_leader(connection, holder="")

    def _write_as_leader(self, connection: Connection, **values: Any) -> int:
        """Update the row of the leadership, which also locks it until the transaction ends, so that no other control
        plane takes over in between; return the number of the last change."""
        own = update(t.leadership).where(t.leadership.c.epoch == self._epoch).values(**values)
        number = connection.execute(own.returning(t.leadership.c.changes)).scalar()
        if number is None:
            raise GeofedError("STANDBY", "another control plane leads now")
        return int(number)

    # --- reading

    def job(self, job_id: str) -> JobRow | None:
        """Return a job by its ID, or None."""
        found = self._jobs(t.jobs.c.id == job_id, 1)
        return found[0] if found else None

    def job_of_request(self, request_id: str) -> JobRow | None:
        """Return the job created with a request ID, or None."""
        found = self._jobs(t.jobs.c.request_id == request_id, 1)
        return found[0] if found else None

    def jobs_named(self, name: str) -> list[JobRow]:
        """Return the jobs with a name, newest first."""
        return self._jobs(t.jobs.c.name == name, 100)

    def jobs_that_began(
        self, *, task_key: str = "", digest: str = "", held: str = "", limit: int = 500
    ) -> list[JobRow]:
        """Return the newest jobs of a task, or those whose state names a model's digest.

        ``held``: what the text of their job files must hold.
        """
        wanted = t.jobs.c.state_json.contains(digest, autoescape=True) if digest else t.jobs.c.task_key == task_key
        return self._jobs(and_(wanted, t.jobs.c.spec_json.contains(held, autoescape=True)), limit)

    def jobs(
        self, *, phases: frozenset[str] | None = None, limit: int = 1000, after: str = "", reader: str = ""
    ) -> list[JobRow]:
        """Return jobs in `phases` (None: any), newest first, starting after the job with ID `after`.

        ``reader``: only jobs that are this user's or shared with it; empty: all.
        """
        wanted: list[Any] = [t.jobs.c.phase.in_(phases)] if phases is not None else []
        if reader:
            wanted.append(or_(t.jobs.c.user == reader, t.jobs.c.shared_with.contains(json.dumps(reader))))
        if after:
            created = select(t.jobs.c.created_at).where(t.jobs.c.id == after).scalar_subquery()
            older = t.jobs.c.created_at < created
            wanted.append(or_(older, and_(t.jobs.c.created_at == created, t.jobs.c.id > after)))
        return self._jobs(and_(True, *wanted), limit)

    def job_uses(self) -> list[JobUse]:
        """Return what each job keeps."""
        columns = [t.jobs.c[name] for name in JobUse.__dataclass_fields__]
        with self._reading() as connection:
            rows = connection.execute(select(*columns)).mappings()
            return [JobUse(**_lists_read(row)) for row in rows]

    def row_uses(self, table: str, job: str = "") -> list[RowUse]:
        """Return what the rows of a history take, by job; those of no job are split by day. Reads the whole table.

        ``job``: only what names this job; empty: all.
        """
        found = t.metadata.tables[table]
        of_job = found.c.job if _is_of_jobs(found) else cast(literal(""), String)
        groups = [of_job, case((of_job == "", cast(found.c.at / _DAY_SECONDS, Integer)), else_=0)]
        size = func.sum(sum((func.length(found.c[column]) for column in HISTORIES[table]), start=literal(0)))
        # By their places, since PostgreSQL takes two equal expressions with parameters for different ones.
        wanted = select(*groups, func.count(), size, func.max(found.c.at)).group_by(text("1"), text("2"))
        if job:
            wanted = wanted.where(of_job == job)
        with self._reading() as connection:
            rows = connection.execute(wanted).all()
        return [RowUse(table, row[0], row[2], int(row[3] or 0), row[4]) for row in rows]

    def jobs_with_rows(self, table: str) -> list[str]:
        """Return the jobs that rows of events or logs name; empty: rows that name none. Reads one row of each."""
        first = f"SELECT min(job) FROM {t.metadata.tables[table].name}"
        each = f"{first} UNION ALL SELECT ({first} WHERE job > found.job) FROM found WHERE job IS NOT NULL"
        query = f"WITH RECURSIVE found(job) AS ({each}) SELECT job FROM found WHERE job IS NOT NULL"
        with self._reading() as connection:
            return list(connection.execute(text(query)).scalars())

    def database_bytes(self) -> int:
        """Return the size of the database."""
        pages = "SELECT page_count * page_size FROM pragma_page_count(), pragma_page_size()"
        query = "SELECT pg_database_size(current_database())" if self.shared else pages
        with self._reading() as connection:
            return int(connection.execute(text(query)).scalar_one())

    def deletion(self, job_id: str) -> Deletion | None:
        """Return who has deleted a job, or None."""
        with self._reading() as connection:
            row = connection.execute(select(t.deletions).where(t.deletions.c.job == job_id)).mappings().first()
            return Deletion(**row) if row else None

    def existing(self, job_ids: set[str]) -> set[str]:
        """Return those of the jobs that exist."""
        with self._reading() as connection:
            return set(connection.execute(select(t.jobs.c.id).where(t.jobs.c.id.in_(job_ids))).scalars())

    def regions(self) -> list[RegionRow]:
        """Return all regions, sorted by name."""
        names = [
            column
            for column in t.regions.c
            if column.name not in ("command_seq", "command_cursor", "report_cursor", "shared_seq")
        ]
        with self._reading() as connection:
            rows = connection.execute(select(*names).order_by(t.regions.c.name)).mappings()
            return [RegionRow(**{**row, "serials": tuple(json.loads(row["serials"]))}) for row in rows]

    def revocations(self, at: float) -> list[Revocation]:
        """Return the revoked certificates that have not expired at a time."""
        with self._reading() as connection:
            wanted = select(t.revocations).where(t.revocations.c.expires > at).order_by(t.revocations.c.serial)
            return [Revocation(**row) for row in connection.execute(wanted).mappings()]

    def cursors(self, region: str) -> Cursors:
        """Return the sequence numbers of a region; zeros if it is unknown."""
        with self._reading() as connection:
            return _cursors(connection, region)

    def report_cursors(self) -> dict[str, int]:
        """Return the sequence number of the last applied report of each region."""
        with self._reading() as connection:
            rows = connection.execute(select(t.regions.c.name, t.regions.c.report_cursor))
            return {row[0]: row[1] for row in rows}

    def commands_after(self, region: str, seq: int, limit: int = 100) -> list[CommandRow]:
        """Return the commands after a sequence number, in order."""
        wanted = select(t.commands).where(t.commands.c.region == region, t.commands.c.seq > seq)
        with self._reading() as connection:
            rows = connection.execute(wanted.order_by(t.commands.c.seq).limit(limit)).mappings()
            return [CommandRow(**row) for row in rows]

    def commands_pending(self) -> dict[str, int]:
        """Return the number of commands that agents have not stored, by region."""
        with self._reading() as connection:
            rows = connection.execute(select(t.commands.c.region, func.count()).group_by(t.commands.c.region))
            return {row[0]: row[1] for row in rows}

    def events_after(self, cursor: int, *, job: str | None = None, limit: int = 500) -> list[EventRow]:
        """Return the events after a cursor in order, of one job or of all."""
        wanted = select(t.events).where(t.events.c.cursor > cursor)
        if job is not None:
            wanted = wanted.where(t.events.c.job == job)
        with self._reading() as connection:
            rows = connection.execute(wanted.order_by(t.events.c.cursor).limit(limit)).mappings()
            return [EventRow(**row) for row in rows]

    def jobs_by_phase(self) -> dict[str, int]:
        """Return the number of jobs in each phase."""
        with self._reading() as connection:
            rows = connection.execute(select(t.jobs.c.phase, func.count()).group_by(t.jobs.c.phase))
            return {row[0]: row[1] for row in rows}

    def newest_events(self, *, job: str, kind: str = "", limit: int = 500) -> list[EventRow]:
        """Return the last events of a job in order, of one kind or of all."""
        wanted = select(t.events).where(t.events.c.job == job)
        if kind:
            wanted = wanted.where(t.events.c.kind == kind)
        with self._reading() as connection:
            rows = connection.execute(wanted.order_by(t.events.c.cursor.desc()).limit(limit)).mappings()
            return [EventRow(**row) for row in rows][::-1]

    def logs_after(self, job: str, cursor: int, *, region: str = "", limit: int = 500) -> list[LogRow]:
        """Return the log lines of a job after a cursor, in order."""
        with self._reading() as connection:
            wanted = select(t.logs).where(_log_filter(job, region), t.logs.c.cursor > cursor)
            rows = connection.execute(wanted.order_by(t.logs.c.cursor).limit(limit)).mappings()
            return [LogRow(**row) for row in rows]

    def log_tail_cursor(self, job: str, lines: int, *, region: str = "") -> int:
        """Return the cursor before the last `lines` log lines."""
        with self._reading() as connection:
            wanted = select(t.logs.c.cursor).where(_log_filter(job, region)).order_by(t.logs.c.cursor.desc())
            found = connection.execute(wanted.offset(lines).limit(1)).scalar()
            return int(found) if found is not None else 0

    def invitation(self, secret_hash: str) -> Invitation | None:
        """Return an invitation by the hash of its secret, or None."""
        with self._reading() as connection:
            wanted = select(t.invitations).where(t.invitations.c.secret_hash == secret_hash)
            row = connection.execute(wanted).mappings().first()
            return Invitation(**row) if row else None

    def open_invitations(self, region: str) -> list[Invitation]:
        """Return the invitations of a region that are not used."""
        with self._reading() as connection:
            unused = and_(t.invitations.c.region == region, t.invitations.c.used_at == 0)
            return [Invitation(**row) for row in connection.execute(select(t.invitations).where(unused)).mappings()]

    def users(self) -> list[UserRow]:
        """Return all users, sorted by name."""
        with self._reading() as connection:
            rows = connection.execute(select(t.users).order_by(t.users.c.name)).mappings()
            return [UserRow(**row) for row in rows]

    def unpromised_worker_seconds(self, since: float) -> dict[str, float]:
        """Return the worker seconds of ended jobs without a promise, by user, for jobs submitted after `since`."""
        found: dict[str, float] = {}
        with self._reading() as connection:
            # A deleted job counts as before, so that deleting gives no better place in the queue.
            for table in (t.jobs, t.deletions):
                total = func.sum(table.c.unpromised_worker_seconds)
                wanted = select(table.c.user, total).where(table.c.created_at > since).group_by(table.c.user)
                for user, seconds in connection.execute(wanted):
                    found[user] = found.get(user, 0.0) + float(seconds)
        return found

    def runs(self, task_key: str, kin_key: str = "", limit: int = 100) -> list[RunRow]:
        """Return earlier runs of a task, newest first; if there are none, those of its other versions."""
        with self._reading() as connection:
            for column, key in ((t.runs.c.task_key, task_key), (t.runs.c.kin_key, kin_key)):
                wanted = select(t.runs).where(column == key).order_by(t.runs.c.at.desc()).limit(limit)
                if key and (found := [RunRow(**row) for row in connection.execute(wanted).mappings()]):
                    return found
        return []

    def weight(self, task_key: str) -> WeightRow | None:
        """Return the result of a task's probe, or None."""
        with self._reading() as connection:
            row = connection.execute(select(t.weights).where(t.weights.c.task_key == task_key)).mappings().first()
            return WeightRow(**row) if row else None

    def meta(self, key: str) -> str | None:
        """Return the value of a key, or None."""
        with self._reading() as connection:
            return connection.execute(select(t.meta.c.value).where(t.meta.c.key == key)).scalar()

    # --- helpers

    def _jobs(self, condition: Any, limit: int) -> list[JobRow]:
        wanted = select(t.jobs).where(condition).order_by(t.jobs.c.created_at.desc(), t.jobs.c.id).limit(limit)
        with self._reading() as connection:
            rows = connection.execute(wanted).mappings()
            return [JobRow(**_lists_read(row)) for row in rows]

    def _put_region(self, connection: Connection, region: RegionRow) -> None:
        values = asdict(region) | {"serials": json.dumps(region.serials)}
        first = {"command_seq": 0, "command_cursor": 0, "report_cursor": 0}
        _put(connection, t.regions, {"name": region.name}, values, on_insert=first)

    def _append_events(self, connection: Connection, events: Sequence[EventRow]) -> tuple[EventRow, ...]:
        if not events:
            return ()
        values = [{key: value for key, value in vars(event).items() if key != "cursor"} for event in events]
        added = insert(t.events).returning(t.events.c.cursor, sort_by_parameter_order=True)
        cursors = connection.execute(added, values).scalars()
        return tuple(replace(event, cursor=cursor) for event, cursor in zip(events, cursors, strict=True))

    def _append_command(self, connection: Connection, command: CommandRow) -> CommandRow:
        seq = connection.execute(
            update(t.regions)
            .where(t.regions.c.name == command.region)
            .values(command_seq=t.regions.c.command_seq + 1)
            .returning(t.regions.c.command_seq)
        ).scalar()
        if seq is None:
            raise GeofedError("REGION_NOT_FOUND", f"region {command.region} not found")
        numbered = replace(command, seq=seq)
        connection.execute(insert(t.commands), asdict(numbered))
        return numbered

    def _append_logs(self, connection: Connection, lines: tuple[LogRow, ...]) -> None:
        rows = [{key: value for key, value in asdict(line).items() if key != "cursor"} for line in lines]
        connection.execute(insert(t.logs), rows)
        for job in {line.job for line in lines}:
            _drop_oldest(connection, job, self._max_log_lines)

    def _meet_agent(self, connection: Connection, region: str, taken: int) -> None:
        """If the store is behind the agent, since it was restored from a backup, give its pending commands numbers
        after the last one that the agent has received. Commands from before the backup are dropped: the agent has
        them. Else what the agent has received is acknowledged."""
        of_region, cursors = t.commands.c.region == region, _cursors(connection, region)
        values: dict[str, int | None] = {"shared_seq": None}
        if cursors.older_than(taken):
            if cursors.shared_seq is not None:
                connection.execute(delete(t.commands).where(of_region, t.commands.c.seq <= cursors.shared_seq))
            pending = select(t.commands.c.seq).where(of_region).order_by(t.commands.c.seq)
            waiting = connection.execute(pending).scalars().all()
            # Last one first, since the old and new ranges may overlap.
            for rank, seq in reversed(list(enumerate(waiting, 1))):
                connection.execute(
                    update(t.commands).where(of_region, t.commands.c.seq == seq).values(seq=taken + rank)
                )
            values |= {"command_seq": taken + len(waiting), "command_cursor": taken}
        elif taken > cursors.command_cursor:
            # The acknowledgement was lost with the session before.
            connection.execute(delete(t.commands).where(of_region, t.commands.c.seq <= taken))
            values["command_cursor"] = taken
        connection.execute(update(t.regions).where(t.regions.c.name == region).values(**values))

    def _move_cursors(self, connection: Connection, change: Change) -> None:
        if change.report_cursor:
            region, seq = change.report_cursor
            connection.execute(update(t.regions).where(t.regions.c.name == region).values(report_cursor=seq))
        if change.command_cursor:
            region, seq = change.command_cursor
            connection.execute(update(t.regions).where(t.regions.c.name == region).values(command_cursor=seq))
            connection.execute(delete(t.commands).where(t.commands.c.region == region, t.commands.c.seq <= seq))

    @contextmanager
    def _writing(self) -> Iterator[Connection]:
        """Run a transaction as the leader. If its commit fails, whether it was stored is looked up."""
        number = 0
        with self._transaction(lambda: self._settle(number)) as connection:
            number = self._write_as_leader(connection, changes=t.leadership.c.changes + 1)
            if self._last_change is not None and number <= self._last_change:
                text = "the database has lost changes of this control plane, as after a switch to an older replica"
                raise GeofedError("STANDBY", text)
            yield connection
        self._last_change = number

    @contextmanager
    def _transaction(self, settle: Callable[[], bool] = lambda: False) -> Iterator[Connection]:
        """Run a transaction. If its commit fails, `settle` says whether it was stored."""
        with _mapped(), self.engine.connect().execution_options(geofed_write=True) as connection:
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

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        with _mapped(), self.engine.connect() as connection, connection.begin():
            yield connection


def _put(
    connection: Connection,
    table: Table,
    key: dict[str, Any],
    values: dict[str, Any],
    *,
    on_insert: dict[str, Any] | None = None,
) -> None:
    """Update a row, or insert it. This is safe because a store has one writer."""
    where = and_(*(table.c[name] == value for name, value in key.items()))
    if connection.execute(update(table).where(where).values(**values)).rowcount == 0:
        connection.execute(insert(table).values(**values, **(on_insert or {})))


def _lists_read(row: Mapping[Any, Any]) -> dict[str, Any]:
    """Return a row of the jobs with its lists as tuples."""
    return {**row, **{name: tuple(json.loads(row[name])) for name in _LISTS if name in row}}


def _is_of_jobs(table: Table) -> bool:
    """Whether a table's rows are removed with their job."""
    return "job" in table.c and table is not t.deletions


def _delete_job(connection: Connection, gone: Deletion) -> None:
    """Remove a job's rows. Its commands stay: a region that is away gets them when it is back."""
    connection.execute(delete(t.jobs).where(t.jobs.c.id == gone.job))
    for table in (t.events, t.logs, t.runs):
        connection.execute(delete(table).where(table.c.job == gone.job))
    _put(connection, t.deletions, {"job": gone.job}, asdict(gone))


def _cursors(connection: Connection, region: str) -> Cursors:
    columns = (t.regions.c.command_seq, t.regions.c.command_cursor, t.regions.c.report_cursor, t.regions.c.shared_seq)
    row = connection.execute(select(*columns).where(t.regions.c.name == region)).mappings().first()
    return Cursors(**row) if row else Cursors(0, 0, 0)


def _log_filter(job: str, region: str) -> Any:
    return and_(t.logs.c.job == job, t.logs.c.region.in_([region, ""])) if region else t.logs.c.job == job


def _drop_oldest(connection: Connection, job: str, most: int) -> None:
    """Keep the newest `most` log lines of a job; a line without a region then states how many were dropped."""
    of_job = select(t.logs.c.cursor, t.logs.c.region).where(t.logs.c.job == job).order_by(t.logs.c.cursor.desc())
    last = connection.execute(of_job.offset(most).limit(1)).first()
    if last is None or not last.region:
        return
    before = and_(t.logs.c.job == job, t.logs.c.cursor < last.cursor)
    marker = connection.execute(select(t.logs.c.text).where(before, t.logs.c.region == "")).scalar()
    dropped = int(marker.split()[1].replace(",", "")) if marker else 0
    dropped += connection.execute(delete(t.logs).where(before, t.logs.c.region != "")).rowcount + 1
    connection.execute(delete(t.logs).where(before))
    values = {"region": "", "source": "control-plane", "text": f"… {dropped:,} lines dropped"}
    connection.execute(update(t.logs).where(t.logs.c.cursor == last.cursor).values(**values))


@contextmanager
def _mapped() -> Iterator[None]:
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


def _append_audit(connection: Connection, entries: Sequence[Mapping[str, Any]]) -> AuditRow | None:
    """Append to the audit log; return the last entry. Only the leader writes, so that nobody appends meanwhile."""
    if not entries:
        return None
    found = connection.execute(select(t.audit.c.seq, t.audit.c.hash).order_by(t.audit.c.seq.desc()).limit(1)).first()
    seq, before = (found.seq, found.hash) if found is not None else (0, GENESIS)
    rows = []
    for facts in entries:
        seq += 1
        text = json.dumps({"seq": seq, **facts}, ensure_ascii=False, sort_keys=True, allow_nan=False)
        before = hash_of(before, text)
        rows.append(AuditRow(text, seq, before))
    connection.execute(insert(t.audit), [vars(row) for row in rows])
    return rows[-1]
