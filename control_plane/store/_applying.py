"""Carry out changes of the control plane's state in a transaction."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import cache
from typing import Any

from sqlalchemy import (
    Connection,
    Insert,
    Table,
    Update,
    and_,
    bindparam,
    delete,
    insert,
    select,
    update,
)

from control_plane.store import _schema as t
from control_plane.store._records import (
    AuditRow,
    Change,
    CommandRow,
    Committed,
    Cursors,
    Deletion,
    EventRow,
    JobProgress,
    LogRow,
    RegionRow,
)
from geofed_pb.errors import GeofedError
from geofed_pb.security.audit import GENESIS, entry_text, hash_of

LISTS = ("shared_with", "model_digests")
"""Columns of the jobs that hold lists, as JSON."""

_PROGRESS = tuple(field.name for field in fields(JobProgress))
_FREQUENT = ("progress", "events", "report_cursor", "command_cursor")
"""Fields of changes of which there are a hundred a second."""

_NEXT_COMMAND = (
    update(t.regions)
    .where(t.regions.c.name == bindparam("found_name"))
    .values(command_seq=t.regions.c.command_seq + 1)
    .returning(t.regions.c.command_seq)
)
_TAKEN = delete(t.commands).where(
    t.commands.c.region == bindparam("found_region"), t.commands.c.seq <= bindparam("found_seq")
)
_ADDED_EVENTS = insert(t.events).returning(t.events.c.cursor, sort_by_parameter_order=True)
_CURSORS = select(
    t.regions.c.command_seq, t.regions.c.command_cursor, t.regions.c.report_cursor, t.regions.c.shared_seq
).where(t.regions.c.name == bindparam("found_name"))
_LAST_AUDIT = select(t.audit.c.seq, t.audit.c.hash).order_by(t.audit.c.seq.desc()).limit(1)


def apply_all(connection: Connection, changes: Sequence[Change], max_log_lines: int) -> list[Committed]:
    """Carry out changes in a transaction, in order; of a job's log lines the newest `max_log_lines` stay.

    What reports consist of is carried out together, for as many changes as follow one another: each statement waits
    for the database, and then for the Python code of other threads.
    """
    committed: list[Committed] = []
    for often, some in itertools.groupby(changes, _is_frequent):
        if often:
            committed += _apply_frequent(connection, list(some))
        else:
            committed += [_apply(connection, change, max_log_lines) for change in some]
    return committed


def _is_frequent(change: Change) -> bool:
    """Whether a change has nothing but what nearly all reports of agents change."""
    return not any(value for name, value in vars(change).items() if name not in _FREQUENT)


def _apply_frequent(connection: Connection, changes: Sequence[Change]) -> list[Committed]:
    # Of several changes to one row only the last counts.
    progress = {job.id: _of_progress(job) for change in changes for job in change.progress}
    if progress:
        connection.execute(_update_of(t.jobs, ("id",), _PROGRESS), list(progress.values()))
    events = iter(_append_events(connection, [event for change in changes for event in change.events]))
    reported = dict(change.report_cursor for change in changes if change.report_cursor)
    taken = [change.command_cursor for change in changes if change.command_cursor]
    for column, cursors in (("report_cursor", reported), ("command_cursor", dict(taken))):
        if cursors:
            moved = [{"found_name": region, f"new_{column}": seq} for region, seq in cursors.items()]
            connection.execute(_update_of(t.regions, ("name",), (column,)), moved)
    if taken:
        connection.execute(_TAKEN, [{"found_region": region, "found_seq": seq} for region, seq in taken])
    return [Committed(tuple(itertools.islice(events, len(change.events)))) for change in changes]


def _of_progress(job: JobProgress) -> dict[str, Any]:
    return {"found_id": job.id} | {f"new_{name}": value for name, value in _with_lists(vars(job)).items()}


def _with_lists(job: Mapping[str, Any]) -> dict[str, Any]:
    return {name: json.dumps(value) if name in LISTS else value for name, value in job.items()}


def _apply(connection: Connection, change: Change, max_log_lines: int) -> Committed:
    if change.renumbered_region:
        of_region = update(t.regions).where(t.regions.c.name == change.renumbered_region)
        connection.execute(of_region.values(report_cursor=0))
    if change.met:
        _meet_agent(connection, *change.met)
    if change.dropped_command:
        name, seq = change.dropped_command
        connection.execute(delete(t.commands).where(t.commands.c.region == name, t.commands.c.seq == seq))
    for job in change.jobs:
        put(connection, t.jobs, {"id": job.id}, _with_lists(vars(job)))
        for digest in job.model_digests if job.ended_at else ():
            of_model = {"digest": digest, "job": job.id}
            put(connection, t.job_models, of_model, of_model)
    for gone in change.deletions:
        _delete_job(connection, gone)
    for region in change.regions:
        _put_region(connection, region)
    for invitation in change.invitations:
        put(connection, t.invitations, {"secret_hash": invitation.secret_hash}, asdict(invitation))
    for user in change.users:
        put(connection, t.users, {"name": user.name}, asdict(user))
    if change.removed_users:
        connection.execute(delete(t.users).where(t.users.c.name.in_(change.removed_users)))
    for revoked in change.revocations:
        put(connection, t.revocations, {"serial": revoked.serial}, asdict(revoked))
    if name := change.removed_region:
        for table, column in (("commands", "region"), ("invitations", "region"), ("regions", "name")):
            of_table = t.metadata.tables[table]
            connection.execute(delete(of_table).where(of_table.c[column] == name))
    for run in change.runs:
        put(connection, t.runs, {"job": run.job, "region": run.region}, asdict(run))
    for weight in change.weights:
        put(connection, t.weights, {"task_key": weight.task_key}, asdict(weight))
    (often,) = _apply_frequent(connection, [change])
    commands = tuple(_append_command(connection, command) for command in change.commands)
    if change.logs:
        _append_logs(connection, change.logs, max_log_lines)
    return Committed(often.events, commands, bool(change.logs), _append_audit(connection, change.audit))


def put(
    connection: Connection,
    table: Table,
    key: dict[str, Any],
    values: dict[str, Any],
    *,
    on_insert: dict[str, Any] | None = None,
) -> None:
    """Update a row, or insert it. This is safe because a store has one writer."""
    found = {f"found_{name}": value for name, value in key.items()}
    new = {f"new_{name}": value for name, value in values.items()}
    if connection.execute(_update_of(table, tuple(key), tuple(values)), found | new).rowcount == 0:
        connection.execute(_insert_into(table), values | (on_insert or {}))


@cache
def _insert_into(table: Table) -> Insert:
    """Return the insertion of a row; building it takes longer than the insertion."""
    return insert(table)


@cache
def _update_of(table: Table, key: tuple[str, ...], columns: tuple[str, ...]) -> Update:
    """Return the update of a row, by parameters `found_NAME` of the key and `new_NAME` of the columns. Building it
    takes longer than the update."""
    where = and_(*(table.c[name] == bindparam(f"found_{name}") for name in key))
    return update(table).where(where).values({name: bindparam(f"new_{name}") for name in columns})


def _put_region(connection: Connection, region: RegionRow) -> None:
    values = vars(region) | {"serials": json.dumps(region.serials)}
    first = {"command_seq": 0, "command_cursor": 0, "report_cursor": 0}
    put(connection, t.regions, {"name": region.name}, values, on_insert=first)


def _append_events(connection: Connection, events: Sequence[EventRow]) -> tuple[EventRow, ...]:
    if not events:
        return ()
    values = [{key: value for key, value in vars(event).items() if key != "cursor"} for event in events]
    cursors = connection.execute(_ADDED_EVENTS, values).scalars()
    return tuple(replace(event, cursor=cursor) for event, cursor in zip(events, cursors, strict=True))


def _append_command(connection: Connection, command: CommandRow) -> CommandRow:
    seq = connection.execute(_NEXT_COMMAND, {"found_name": command.region}).scalar()
    if seq is None:
        raise GeofedError("REGION_NOT_FOUND", f"region {command.region} not found")
    numbered = replace(command, seq=seq)
    connection.execute(_insert_into(t.commands), asdict(numbered))
    return numbered


def _append_logs(connection: Connection, lines: tuple[LogRow, ...], max_log_lines: int) -> None:
    rows = [{key: value for key, value in asdict(line).items() if key != "cursor"} for line in lines]
    connection.execute(_insert_into(t.logs), rows)
    for job in {line.job for line in lines}:
        _drop_oldest(connection, job, max_log_lines)


def _meet_agent(connection: Connection, region: str, taken: int) -> None:
    """If the store is behind the agent, since it was restored from a backup, give its pending commands numbers
    after the last one that the agent has received. Commands from before the backup are dropped: the agent has
    them. Else what the agent has received is acknowledged."""
    of_region, cursors = t.commands.c.region == region, cursors_of(connection, region)
    values: dict[str, int | None] = {"shared_seq": None}
    if cursors.older_than(taken):
        if cursors.shared_seq is not None:
            connection.execute(delete(t.commands).where(of_region, t.commands.c.seq <= cursors.shared_seq))
        pending = select(t.commands.c.seq).where(of_region).order_by(t.commands.c.seq)
        waiting = connection.execute(pending).scalars().all()
        # Last one first, since the old and new ranges may overlap.
        for rank, seq in reversed(list(enumerate(waiting, 1))):
            connection.execute(update(t.commands).where(of_region, t.commands.c.seq == seq).values(seq=taken + rank))
        values |= {"command_seq": taken + len(waiting), "command_cursor": taken}
    elif taken > cursors.command_cursor:
        # The acknowledgement was lost with the session before.
        connection.execute(delete(t.commands).where(of_region, t.commands.c.seq <= taken))
        values["command_cursor"] = taken
    new = {f"new_{name}": value for name, value in values.items()}
    connection.execute(_update_of(t.regions, ("name",), tuple(values)), {"found_name": region} | new)


def _delete_job(connection: Connection, gone: Deletion) -> None:
    """Remove a job's rows. Its commands stay: a region that is away gets them when it is back."""
    connection.execute(delete(t.jobs).where(t.jobs.c.id == gone.job))
    for table in (t.events, t.logs, t.runs, t.job_models):
        connection.execute(delete(table).where(table.c.job == gone.job))
    put(connection, t.deletions, {"job": gone.job}, asdict(gone))


def cursors_of(connection: Connection, region: str) -> Cursors:
    row = connection.execute(_CURSORS, {"found_name": region}).mappings().first()
    return Cursors(**row) if row else Cursors(0, 0, 0)


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


def _append_audit(connection: Connection, entries: Sequence[Mapping[str, Any]]) -> AuditRow | None:
    """Append to the audit log; return the last entry. Only the leader writes, so that nobody appends meanwhile."""
    if not entries:
        return None
    found = connection.execute(_LAST_AUDIT).first()
    seq, before = (found.seq, found.hash) if found is not None else (0, GENESIS)
    rows = []
    for facts in entries:
        seq += 1
        text = entry_text(seq, facts)
        before = hash_of(before, text)
        rows.append(AuditRow(text, seq, before))
    connection.execute(_insert_into(t.audit), [vars(row) for row in rows])
    return rows[-1]
