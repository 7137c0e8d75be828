"""Reads of the control plane's committed state."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import (
    Integer,
    Select,
    String,
    Table,
    and_,
    bindparam,
    case,
    cast,
    func,
    literal,
    or_,
    select,
    text,
)

from control_plane.store import _schema as t
from control_plane.store._applying import LISTS, cursors_of
from control_plane.store._database import Database
from control_plane.store._records import (
    AuditRow,
    CommandRow,
    Cursors,
    Deletion,
    EventRow,
    InvitationRow,
    JobRow,
    JobUse,
    LogRow,
    RegionRow,
    Revocation,
    RowUse,
    RunRow,
    UserRow,
    WeightRow,
)

COMMANDS_AT_ONCE = 100
"""Commands of a region that are read at a time; each has up to `SESSION_MESSAGE_BYTES`."""
_RECENT_EVENTS = 20_000
"""Events of a job and kind among which each region's newest are looked for, which bounds the time of it."""
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
_JOB_USES = select(*(t.jobs.c[name] for name in JobUse.__dataclass_fields__))
"""Query of what jobs keep."""

_COMMANDS_AFTER = (
    select(t.commands)
    .where(t.commands.c.region == bindparam("of_region"), t.commands.c.seq > bindparam("after_seq"))
    .order_by(t.commands.c.seq)
    .limit(COMMANDS_AT_ONCE)
)
"""Made once, since that takes longer than the query."""


class Queries(Database):
    """Reads, each in a transaction of its own."""

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

    def region_heads(self, job: str) -> dict[str, Any]:
        """Return the last head of each region's own audit log that is recorded with a job, by region. Reads the log."""
        # Texts are JSON with sorted keys.
        with_kind, of_job = t.audit.c.text.contains('"kind": "region.head"'), t.audit.c.text.contains(json.dumps(job))
        wanted = select(t.audit.c.text).where(with_kind, of_job).order_by(t.audit.c.seq)
        with self._reading() as connection:
            entries = [json.loads(text) for text in connection.execute(wanted).scalars()]
        told = [one for one in entries if (one["kind"], one.get("job")) == ("region.head", job) and "head" in one]
        return {one["region"]: one["head"] for one in told}

    def jobs_with_events_beyond(self, most: int) -> list[str]:
        """Return the jobs that have more events than `most`. Reads the index of all events."""
        many = select(t.events.c.job).where(t.events.c.job != "").group_by(t.events.c.job)
        with self._reading() as connection:
            return list(connection.execute(many.having(func.count() > most)).scalars())

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
        self, *, task_key: str = "", digest: str = "", secure: bool = False, limit: int = 500
    ) -> list[JobRow]:
        """Return the newest jobs of a task, or those whose state names a model's digest.

        ``secure``: only those with secure aggregation.
        """
        wanted = t.jobs.c.state_json.contains(digest, autoescape=True) if digest else t.jobs.c.task_key == task_key
        kinds = (True,) if secure else (True, False)
        return self._newest([and_(t.jobs.c.secure_aggregation == kind, wanted) for kind in kinds], limit)

    def jobs(
        self, *, phases: frozenset[str] | None = None, limit: int = 1000, after: str = "", reader: str = ""
    ) -> list[JobRow]:
        """Return jobs in `phases` (None: any), newest first, starting after the job with ID `after`.

        ``reader``: only jobs that are this user's or shared with it; empty: all.
        """
        within: list[Any] = [True]
        if after:
            created = select(t.jobs.c.created_at).where(t.jobs.c.id == after).scalar_subquery()
            # Both together are what counts; the first alone is what an index is searched for.
            within = [t.jobs.c.created_at <= created, or_(t.jobs.c.created_at < created, t.jobs.c.id > after)]
        if not reader:
            each: list[Any] = [True] if phases is None else [t.jobs.c.phase == phase for phase in sorted(phases)]
            return self._newest([and_(one, *within) for one in each], limit)
        if phases is not None:
            within.append(t.jobs.c.phase.in_(phases))
        shared = and_(text(t.SHARED), t.jobs.c.shared_with.contains(json.dumps(reader)))
        return self._newest([and_(one, *within) for one in (t.jobs.c.user == reader, shared)], limit)

    def job_uses(self, limit: int, after: str = "") -> list[JobUse]:
        """Return a page of what jobs keep, by ID, after that of a job."""
        return self._job_uses(_JOB_USES.where(t.jobs.c.id > after).order_by(t.jobs.c.id).limit(limit))

    def uses_of_ended(self, since: float = -math.inf, until: float = math.inf) -> list[JobUse]:
        """Return what those jobs keep that have ended from one time to another, the first to end first."""
        ended = t.jobs.c.ended_at
        return self._job_uses(_JOB_USES.where(ended > 0, ended >= since, ended <= until).order_by(ended))

    def uses_of_blobs(self, digests: Sequence[str]) -> list[JobUse]:
        """Return what those jobs keep that have any of some blobs: the last one to end of those with the same code, and
        all that have ended with a model."""
        each = "json_array_elements_text(CAST(:digests AS json))" if self.shared else "json_each(:digests)"
        last = "SELECT id FROM jobs WHERE bundle_digest = each.value ORDER BY ended_at DESC LIMIT 1"
        of_models = f"SELECT job FROM job_models JOIN {each} AS each ON digest = each.value"
        ids = text(f"SELECT ({last}) AS id FROM {each} AS each UNION {of_models}")
        chosen = ids.bindparams(digests=json.dumps(list(digests))).columns(id=String)
        return self._job_uses(_JOB_USES.where(t.jobs.c.id.in_(chosen)))

    def bundles(self) -> list[str]:
        """Return the digests of all jobs' code, each once. Reads an index of all jobs."""
        with self._reading() as connection:
            return list(connection.execute(select(t.jobs.c.bundle_digest).distinct()).scalars())

    def _job_uses(self, wanted: Select[Any]) -> list[JobUse]:
        with self._reading() as connection:
            return [JobUse(**_lists_read(row)) for row in connection.execute(wanted).mappings()]

    def is_code_shared(self, bundle_digest: str, job: str) -> bool:
        """Whether another job than this one has the code."""
        others = select(t.jobs.c.id).where(t.jobs.c.bundle_digest == bundle_digest, t.jobs.c.id != job)
        with self._reading() as connection:
            return connection.execute(others.limit(1)).first() is not None

    def job_bytes(self) -> dict[str, int]:
        """Return the length of each job's description, plan, state and result, by ID. Reads the whole table."""
        texts = ("spec_json", "plan_json", "state_json", "result_json")
        # PostgreSQL decompresses each text to count its characters, which takes seconds, but not to tell its bytes.
        length = func.octet_length if self.shared else func.length
        size = sum((length(t.jobs.c[name]) for name in texts), start=literal(0))
        with self._reading() as connection:
            return {job: int(length) for job, length in connection.execute(select(t.jobs.c.id, size))}

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

    def unknown_jobs_with_rows(self, table: str) -> list[str]:
        """Return the jobs that rows of events or logs name and that do not exist; empty: rows that name none.

        Reads one row of each job.
        """
        first = f"SELECT min(job) FROM {t.metadata.tables[table].name}"
        each = f"{first} UNION ALL SELECT ({first} WHERE job > found.job) FROM found WHERE job IS NOT NULL"
        unknown = "job IS NOT NULL AND NOT EXISTS (SELECT 1 FROM jobs WHERE jobs.id = found.job)"
        query = f"WITH RECURSIVE found(job) AS ({each}) SELECT job FROM found WHERE {unknown}"
        with self._reading() as connection:
            return list(connection.execute(text(query)).scalars())

    def ended_jobs_with_rows(self, table: str, until: float) -> list[str]:
        """Return the jobs that have ended by a time and have events or log lines."""
        rows = t.metadata.tables[table]
        has_rows = select(rows.c.cursor).where(rows.c.job == t.jobs.c.id).exists()
        wanted = select(t.jobs.c.id).where(t.jobs.c.ended_at > 0, t.jobs.c.ended_at <= until, has_rows)
        with self._reading() as connection:
            return list(connection.execute(wanted).scalars())

    def has_rows(self, table: str, until: float, job: str | None = None) -> bool:
        """Whether `remove_rows` would remove any."""
        found = t.metadata.tables[table]
        with self._reading() as connection:
            wanted = select(literal(1)).select_from(found).where(rows_until(found, until, job))
            return connection.execute(wanted.limit(1)).first() is not None

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
            return cursors_of(connection, region)

    def report_cursors(self) -> dict[str, int]:
        """Return the sequence number of the last applied report of each region."""
        with self._reading() as connection:
            rows = connection.execute(select(t.regions.c.name, t.regions.c.report_cursor))
            return {row[0]: row[1] for row in rows}

    def commands_after(self, region: str, seq: int) -> list[CommandRow]:
        """Return the first commands after a sequence number, in order, up to `COMMANDS_AT_ONCE`."""
        wanted = {"of_region": region, "after_seq": seq}
        with self._reading() as connection:
            return [CommandRow(**row) for row in connection.execute(_COMMANDS_AFTER, wanted).mappings()]

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

    def newest_of_regions(self, *, job: str, kind: str, each: int) -> list[EventRow]:
        """Return the last ``each`` events of a job and kind of each region in order, of those that are among the last
        ``_RECENT_EVENTS`` of all regions."""
        newest = select(t.events).where(t.events.c.job == job, t.events.c.kind == kind)
        recent = newest.order_by(t.events.c.cursor.desc()).limit(_RECENT_EVENTS).subquery()
        back = func.row_number().over(partition_by=recent.c.region, order_by=recent.c.cursor.desc())
        numbered = select(recent, back.label("back")).subquery()
        own = [column for column in numbered.c if column.name != "back"]
        chosen = select(*own).where(numbered.c.back <= each).order_by(numbered.c.cursor)
        with self._reading() as connection:
            return [EventRow(**row) for row in connection.execute(chosen).mappings()]

    def sampled_events(self, *, job: str, kind: str, most: int) -> list[EventRow]:
        """Return the events of a job and kind in order or, of more than ``most``, every n-th of each region to the
        last one."""
        of_kind = t.events.c.job == job, t.events.c.kind == kind
        back = func.row_number().over(partition_by=t.events.c.region, order_by=t.events.c.cursor.desc())
        with self._reading() as connection:
            count = connection.execute(select(func.count()).select_from(t.events).where(*of_kind)).scalar_one()
            step = -(-count // most) or 1
            if step == 1:
                chosen = select(t.events).where(*of_kind)
            else:
                numbered = select(t.events.c.cursor, back.label("back")).where(*of_kind).subquery()
                picked = select(numbered.c.cursor).where((numbered.c.back - 1) % step == 0)
                chosen = select(t.events).where(t.events.c.cursor.in_(picked))
            rows = connection.execute(chosen.order_by(t.events.c.cursor)).mappings()
            return [EventRow(**row) for row in rows]

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

    def invitation(self, secret_hash: str) -> InvitationRow | None:
        """Return an invitation by the hash of its secret, or None."""
        with self._reading() as connection:
            wanted = select(t.invitations).where(t.invitations.c.secret_hash == secret_hash)
            row = connection.execute(wanted).mappings().first()
            return InvitationRow(**row) if row else None

    def open_invitations(self, region: str) -> list[InvitationRow]:
        """Return the invitations of a region that are not used."""
        with self._reading() as connection:
            unused = and_(t.invitations.c.region == region, t.invitations.c.used_at == 0)
            return [InvitationRow(**row) for row in connection.execute(select(t.invitations).where(unused)).mappings()]

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

    def _newest(self, conditions: Sequence[Any], limit: int) -> list[JobRow]:
        """Return the newest jobs that fulfil any of some conditions, each of which an index serves in order."""
        found = {row.id: row for condition in conditions for row in self._jobs(condition, limit)}
        return sorted(found.values(), key=lambda row: (-row.created_at, row.id))[:limit]

    def _jobs(self, condition: Any, limit: int) -> list[JobRow]:
        wanted = select(t.jobs).where(condition).order_by(t.jobs.c.created_at.desc(), t.jobs.c.id).limit(limit)
        with self._reading() as connection:
            rows = connection.execute(wanted).mappings()
            return [JobRow(**_lists_read(row)) for row in rows]


def _lists_read(row: Mapping[Any, Any]) -> dict[str, Any]:
    """Return a row of the jobs with its lists as tuples."""
    return {**row, **{name: tuple(json.loads(row[name])) for name in LISTS if name in row}}


def rows_until(table: Table, until: float, job: str | None) -> Any:
    """Return the condition of the rows of a history that are not later than a time. ``job``: that name it."""
    old = table.c.at <= until
    return old if job is None else and_(old, table.c.job == job)


def _is_of_jobs(table: Table) -> bool:
    """Whether a table's rows are removed with their job."""
    return "job" in table.c and table is not t.deletions


def _log_filter(job: str, region: str) -> Any:
    return and_(t.logs.c.job == job, t.logs.c.region.in_([region, ""])) if region else t.logs.c.job == job
