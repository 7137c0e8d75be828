"""The durable state, on SQLite or PostgreSQL. Blocking; the services call it from one thread of their own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from types import TracebackType
from typing import Any

from sqlalchemy import Connection, Engine, Table, and_, delete, func, insert, or_, select, update
from sqlalchemy.exc import DatabaseError, DataError, IntegrityError, OperationalError

from control_plane.store import _schema as t
from control_plane.store._records import (
    Change,
    CommandRow,
    Committed,
    Cursors,
    EventRow,
    Invitation,
    JobRow,
    LogRow,
    RegionRow,
    RunRow,
    UserRow,
    WeightRow,
)
from geofed_pb.errors import GeofedError

MAX_LOG_LINES = 20_000
"""Kept of one job; the oldest go first."""


class Store:
    """All reads are of committed state; all writes go through `commit`, one transaction each."""

    def __init__(self, engine: Engine, *, max_log_lines: int = MAX_LOG_LINES) -> None:
        self._engine = engine
        self._max_log_lines = max_log_lines

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the connections back."""
        self._engine.dispose()

    # --- writing

    def commit(self, change: Change) -> Committed:
        """Store a change as a whole. Raises ``GeofedError``: REQUEST_CONFLICT, DISK_FULL, UNAVAILABLE."""
        with self._writing() as connection:
            if change.renumbered_region:
                of_region = update(t.regions).where(t.regions.c.name == change.renumbered_region)
                connection.execute(of_region.values(report_cursor=0))
            if change.met:
                self._meet(connection, *change.met)
            if change.dropped_command:
                name, seq = change.dropped_command
                connection.execute(delete(t.commands).where(t.commands.c.region == name, t.commands.c.seq == seq))
            for job in change.jobs:
                _put(connection, t.jobs, {"id": job.id}, asdict(job))
            for region in change.regions:
                self._put_region(connection, region)
            for invitation in change.invitations:
                _put(connection, t.invitations, {"secret_hash": invitation.secret_hash}, asdict(invitation))
            for user in change.users:
                _put(connection, t.users, {"name": user.name}, asdict(user))
            if change.removed_users:
                connection.execute(delete(t.users).where(t.users.c.name.in_(change.removed_users)))
            for run in change.runs:
                _put(connection, t.runs, {"job": run.job, "region": run.region}, asdict(run))
            for weight in change.weights:
                _put(connection, t.weights, {"task_key": weight.task_key}, asdict(weight))
            events = tuple(self._append_event(connection, event) for event in change.events)
            commands = tuple(self._append_command(connection, command) for command in change.commands)
            if change.logs:
                self._append_logs(connection, change.logs)
            self._move_cursors(connection, change)
        return Committed(events, commands, bool(change.logs))

    def put_meta(self, key: str, value: str) -> None:
        """Keep a value of the whole store."""
        with self._writing() as connection:
            _put(connection, t.meta, {"key": key}, {"key": key, "value": value})

    def begin(self) -> None:
        """The control plane begins: what agents have taken of commands beyond the present ones, this store lacks."""
        with self._writing() as connection:
            first = update(t.regions).where(t.regions.c.shared_seq.is_(None))
            connection.execute(first.values(shared_seq=t.regions.c.command_seq))

    # --- reading

    def job(self, job_id: str) -> JobRow | None:
        """A job by its id."""
        found = self._jobs(t.jobs.c.id == job_id, 1)
        return found[0] if found else None

    def job_of_request(self, request_id: str) -> JobRow | None:
        """The job that a request id has made."""
        found = self._jobs(t.jobs.c.request_id == request_id, 1)
        return found[0] if found else None

    def jobs_named(self, name: str) -> list[JobRow]:
        """Jobs by name, newest first."""
        return self._jobs(t.jobs.c.name == name, 100)

    def jobs(self, *, phases: frozenset[str] | None = None, limit: int = 1000, after: str = "") -> list[JobRow]:
        """Jobs in one of `phases` (None: any), newest first; those behind the job with the id `after`."""
        wanted: list[Any] = [t.jobs.c.phase.in_(phases)] if phases is not None else []
        if after:
            begun = select(t.jobs.c.created_at).where(t.jobs.c.id == after).scalar_subquery()
            older = t.jobs.c.created_at < begun
            wanted.append(or_(older, and_(t.jobs.c.created_at == begun, t.jobs.c.id > after)))
        return self._jobs(and_(True, *wanted), limit)

    def regions(self) -> list[RegionRow]:
        """All regions, sorted by name."""
        names = [
            column
            for column in t.regions.c
            if column.name not in ("command_seq", "command_cursor", "report_cursor", "shared_seq")
        ]
        with self._reading() as connection:
            rows = connection.execute(select(*names).order_by(t.regions.c.name)).mappings()
            return [RegionRow(**{**row, "serials": tuple(json.loads(row["serials"]))}) for row in rows]

    def cursors(self, region: str) -> Cursors:
        """How far the conversation with a region has come; zeros for one that is not known."""
        with self._reading() as connection:
            return _cursors(connection, region)

    def commands_after(self, region: str, seq: int, limit: int = 100) -> list[CommandRow]:
        """Commands that the agent has not taken, in order."""
        wanted = select(t.commands).where(t.commands.c.region == region, t.commands.c.seq > seq)
        with self._reading() as connection:
            rows = connection.execute(wanted.order_by(t.commands.c.seq).limit(limit)).mappings()
            return [CommandRow(**row) for row in rows]

    def commands_pending(self) -> dict[str, int]:
        """Commands that agents have not taken, by region."""
        with self._reading() as connection:
            rows = connection.execute(select(t.commands.c.region, func.count()).group_by(t.commands.c.region))
            return {row[0]: row[1] for row in rows}

    def events_after(self, cursor: int, *, job: str | None = None, limit: int = 500) -> list[EventRow]:
        """Events in order, of one job or of all."""
        wanted = select(t.events).where(t.events.c.cursor > cursor)
        if job is not None:
            wanted = wanted.where(t.events.c.job == job)
        with self._reading() as connection:
            rows = connection.execute(wanted.order_by(t.events.c.cursor).limit(limit)).mappings()
            return [EventRow(**row) for row in rows]

    def jobs_by_phase(self) -> dict[str, int]:
        """How many jobs there are in each phase."""
        with self._reading() as connection:
            rows = connection.execute(select(t.jobs.c.phase, func.count()).group_by(t.jobs.c.phase))
            return {row[0]: row[1] for row in rows}

    def newest_events(self, *, job: str, kind: str = "", limit: int = 500) -> list[EventRow]:
        """The last events of a job, in order, of one kind or of all."""
        wanted = select(t.events).where(t.events.c.job == job)
        if kind:
            wanted = wanted.where(t.events.c.kind == kind)
        with self._reading() as connection:
            rows = connection.execute(wanted.order_by(t.events.c.cursor.desc()).limit(limit)).mappings()
            return [EventRow(**row) for row in rows][::-1]

    def logs_after(self, job: str, cursor: int, *, region: str = "", limit: int = 500) -> list[LogRow]:
        """Log lines of a job in order."""
        with self._reading() as connection:
            wanted = select(t.logs).where(_log_filter(job, region), t.logs.c.cursor > cursor)
            rows = connection.execute(wanted.order_by(t.logs.c.cursor).limit(limit)).mappings()
            return [LogRow(**row) for row in rows]

    def log_tail_cursor(self, job: str, lines: int, *, region: str = "") -> int:
        """The cursor after which the last `lines` log lines come."""
        with self._reading() as connection:
            wanted = select(t.logs.c.cursor).where(_log_filter(job, region)).order_by(t.logs.c.cursor.desc())
            found = connection.execute(wanted.offset(lines).limit(1)).scalar()
            return int(found) if found is not None else 0

    def invitation(self, secret_hash: str) -> Invitation | None:
        """An invitation by the hash of its secret."""
        with self._reading() as connection:
            wanted = select(t.invitations).where(t.invitations.c.secret_hash == secret_hash)
            row = connection.execute(wanted).mappings().first()
            return Invitation(**row) if row else None

    def users(self) -> list[UserRow]:
        """All users, sorted by name."""
        with self._reading() as connection:
            rows = connection.execute(select(t.users).order_by(t.users.c.name)).mappings()
            return [UserRow(**row) for row in rows]

    def unpromised_worker_seconds(self, since: float) -> dict[str, float]:
        """What ended jobs without a promise have had, by user, of those that were submitted after `since`."""
        total = func.sum(t.jobs.c.unpromised_worker_seconds)
        wanted = select(t.jobs.c.user, total).where(t.jobs.c.created_at > since).group_by(t.jobs.c.user)
        with self._reading() as connection:
            return {row[0]: float(row[1]) for row in connection.execute(wanted)}

    def runs(self, task_key: str, kin_key: str = "", limit: int = 100) -> list[RunRow]:
        """Earlier runs of a task, newest first; where there are none, those of its kin."""
        with self._reading() as connection:
            for column, key in ((t.runs.c.task_key, task_key), (t.runs.c.kin_key, kin_key)):
                wanted = select(t.runs).where(column == key).order_by(t.runs.c.at.desc()).limit(limit)
                if key and (found := [RunRow(**row) for row in connection.execute(wanted).mappings()]):
                    return found
        return []

    def weight(self, task_key: str) -> WeightRow | None:
        """What was found of a task before its first plan."""
        with self._reading() as connection:
            row = connection.execute(select(t.weights).where(t.weights.c.task_key == task_key)).mappings().first()
            return WeightRow(**row) if row else None

    def meta(self, key: str) -> str | None:
        """A value of the whole store."""
        with self._reading() as connection:
            return connection.execute(select(t.meta.c.value).where(t.meta.c.key == key)).scalar()

    # --- inside

    def _jobs(self, condition: Any, limit: int) -> list[JobRow]:
        wanted = select(t.jobs).where(condition).order_by(t.jobs.c.created_at.desc(), t.jobs.c.id).limit(limit)
        with self._reading() as connection:
            return [JobRow(**row) for row in connection.execute(wanted).mappings()]

    def _put_region(self, connection: Connection, region: RegionRow) -> None:
        values = asdict(region) | {"serials": json.dumps(region.serials)}
        first = {"command_seq": 0, "command_cursor": 0, "report_cursor": 0}
        _put(connection, t.regions, {"name": region.name}, values, on_insert=first)

    def _append_event(self, connection: Connection, event: EventRow) -> EventRow:
        values = asdict(event)
        del values["cursor"]
        return replace(
            event, cursor=connection.execute(insert(t.events).returning(t.events.c.cursor), values).scalar_one()
        )

    def _append_command(self, connection: Connection, command: CommandRow) -> CommandRow:
        seq = connection.execute(
            update(t.regions)
            .where(t.regions.c.name == command.region)
            .values(command_seq=t.regions.c.command_seq + 1)
            .returning(t.regions.c.command_seq)
        ).scalar()
        if seq is None:
            raise GeofedError("REGION_NOT_FOUND", f"there is no region {command.region} to command")
        numbered = replace(command, seq=seq)
        connection.execute(insert(t.commands), asdict(numbered))
        return numbered

    def _append_logs(self, connection: Connection, lines: tuple[LogRow, ...]) -> None:
        rows = [{key: value for key, value in asdict(line).items() if key != "cursor"} for line in lines]
        connection.execute(insert(t.logs), rows)
        for job in {line.job for line in lines}:
            _drop_oldest(connection, job, self._max_log_lines)

    def _meet(self, connection: Connection, region: str, taken: int) -> None:
        """Number the commands that wait behind what the agent has taken, where this store does not remember all of it.
        Those of before the loss are among what it has taken."""
        here, cursors = t.commands.c.region == region, _cursors(connection, region)
        values: dict[str, int | None] = {"shared_seq": None}
        if cursors.older_than(taken):
            if cursors.shared_seq is not None:
                connection.execute(delete(t.commands).where(here, t.commands.c.seq <= cursors.shared_seq))
            of_region = select(t.commands.c.seq).where(here).order_by(t.commands.c.seq)
            waiting = connection.execute(of_region).scalars().all()
            # The last one first, since the ranges may overlap.
            for rank, seq in reversed(list(enumerate(waiting, 1))):
                connection.execute(update(t.commands).where(here, t.commands.c.seq == seq).values(seq=taken + rank))
            values |= {"command_seq": taken + len(waiting), "command_cursor": taken}
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
        with _mapped(), self._engine.connect().execution_options(geofed_write=True) as connection, connection.begin():
            yield connection

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        with _mapped(), self._engine.connect() as connection, connection.begin():
            yield connection


def _put(
    connection: Connection,
    table: Table,
    key: dict[str, Any],
    values: dict[str, Any],
    *,
    on_insert: dict[str, Any] | None = None,
) -> None:
    """Update the row, or insert it. Safe because a store has one writer."""
    where = and_(*(table.c[name] == value for name, value in key.items()))
    if connection.execute(update(table).where(where).values(**values)).rowcount == 0:
        connection.execute(insert(table).values(**values, **(on_insert or {})))


def _cursors(connection: Connection, region: str) -> Cursors:
    columns = (t.regions.c.command_seq, t.regions.c.command_cursor, t.regions.c.report_cursor, t.regions.c.shared_seq)
    row = connection.execute(select(*columns).where(t.regions.c.name == region)).mappings().first()
    return Cursors(**row) if row else Cursors(0, 0, 0)


def _log_filter(job: str, region: str) -> Any:
    return and_(t.logs.c.job == job, t.logs.c.region.in_([region, ""])) if region else t.logs.c.job == job


def _drop_oldest(connection: Connection, job: str, most: int) -> None:
    """Keep so many of a job's lines, the newest; of no region is the one that says how many there were before them."""
    of_job = select(t.logs.c.cursor, t.logs.c.region).where(t.logs.c.job == job).order_by(t.logs.c.cursor.desc())
    last = connection.execute(of_job.offset(most).limit(1)).first()
    if last is None or not last.region:
        return
    before = and_(t.logs.c.job == job, t.logs.c.cursor < last.cursor)
    said = connection.execute(select(t.logs.c.text).where(before, t.logs.c.region == "")).scalar()
    dropped = int(said.split()[1].replace(",", "")) if said else 0
    dropped += connection.execute(delete(t.logs).where(before, t.logs.c.region != "")).rowcount + 1
    connection.execute(delete(t.logs).where(before))
    told = {"region": "", "source": "control-plane", "text": f"… {dropped:,} lines dropped"}
    connection.execute(update(t.logs).where(t.logs.c.cursor == last.cursor).values(**told))


@contextmanager
def _mapped() -> Iterator[None]:
    """Give the failures of a database the codes of the catalogue."""
    try:
        yield
    except IntegrityError as error:
        raise GeofedError("REQUEST_CONFLICT", f"the store already holds another row: {error.orig}") from error
    except DataError as error:
        raise GeofedError("FRAME_INVALID", f"the database does not take it: {error.orig}") from error
    except (OperationalError, DatabaseError) as error:
        text = str(error.orig)
        if "disk is full" in text or "No space left" in text:
            raise GeofedError("DISK_FULL", "the database cannot grow: no space left") from error
        if "not a database" in text or "malformed" in text:
            raise GeofedError("STATE_INVALID", f"the database is damaged: {text}") from error
        raise GeofedError("UNAVAILABLE", f"the database does not answer: {text.splitlines()[0]}") from error
