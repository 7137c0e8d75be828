"""Finding jobs: those that have not ended are in memory, the others in the store."""

from __future__ import annotations

import asyncio
import heapq
import math
from collections.abc import Awaitable, Callable, Mapping

from pydantic import TypeAdapter

from control_plane.core import TERMINAL, job_state_from_json
from control_plane.service.state._changes import Changes
from control_plane.service.state._entries import JobEntry
from control_plane.service.state._leadership import StoreThreads
from control_plane.spec import parse_json
from control_plane.store import JobRow, Store
from geofed_pb.errors import GeofedError
from scheduler import Plan

__all__ = ["ACTIVE", "JobLookup", "active_jobs", "entry_of"]

_PLAN = TypeAdapter(Plan)
_LOADED_JOBS = 500
"""Number of active jobs that one query loads at the start: some tenths of a second."""
ACTIVE = frozenset({"queued", "planned", "starting", "running", "finishing", "cancelling"})


class JobLookup:
    """Finds jobs by ID or name, and lists them; what it returns is stored."""

    def __init__(self, changes: Changes, threads: StoreThreads) -> None:
        self._changes, self._threads = changes, threads

    @property
    def _jobs(self) -> Mapping[str, JobEntry]:
        return self._changes.visible.jobs

    async def find_job(self, name: str, may: Callable[[JobRow], bool] = lambda row: True) -> JobEntry:
        """Return a job by its ID or its unique name. Among a replanned job and its successors, the last has the name.

        Only jobs that the caller ``may`` know are found by name. Raises ``GeofedError("JOB_NOT_FOUND")``.
        """
        if name in self._jobs:
            return self._jobs[name]
        row = await self._threads.run(lambda store: store.job(name))
        if row is None:
            named = [row for row in await self._threads.run(lambda store: store.jobs_named(name)) if may(row)]
            if not named:
                raise GeofedError("JOB_NOT_FOUND", f"job {name} not found")
            if len(named) > 1:
                named = [job for job in named if not job_state_from_json(job.state_json).successor]
            if len(named) > 1:
                ids = ", ".join(job.id for job in named[:5])
                text = f"{len(named)} jobs have the name {name}: {ids}"
                raise GeofedError("JOB_NOT_FOUND", text, hint="give the job's ID instead of its name")
            row = named[0]
        return self._jobs.get(row.id) or entry_of(row)

    async def jobs_that_began(self, *, task_key: str = "", digest: str = "", secure: bool = False) -> list[JobEntry]:
        """Return what `Store.jobs_that_began` does, as entries, with the new jobs that are being stored."""
        fresh = {
            job.row.id: job
            for name in self._changes.new
            if (job := self._changes.latest.jobs.get(name)) is not None
            and (digest or job.row.task_key == task_key)
            and (job.row.secure_aggregation or not secure)
        }

        def entries(store: Store) -> list[JobEntry]:
            # Parsed in the thread, since many jobs take long.
            rows = store.jobs_that_began(task_key=task_key, digest=digest, secure=secure)
            stored = [self._jobs.get(row.id) or entry_of(row) for row in rows if row.id not in fresh]
            return [*fresh.values(), *stored]

        return await self._threads.run(entries)

    async def job_of_request(self, request_id: str) -> JobRow | None:
        """Return the job that was created with a request ID, or None; one that is being stored is waited for."""
        latest = self._changes.latest.jobs
        for name, stored in list(self._changes.new.items()):
            if (entry := latest.get(name)) is not None and entry.row.request_id == request_id:
                await asyncio.wait({stored})
        return await self._threads.run(lambda store: store.job_of_request(request_id))

    async def ended_job(self, job_id: str) -> JobEntry | None:
        """Return an ended job by its ID; None if it is active or there is none."""
        if job_id in self._changes.latest.jobs:
            return None
        if (ending := self._changes.ended.get(job_id)) is not None:
            return ending
        row = await self._threads.run(lambda store: store.job(job_id))
        return entry_of(row) if row is not None and row.phase in TERMINAL else None

    async def list_jobs(self, phases: frozenset[str], limit: int, after: str = "", reader: str = "") -> list[JobEntry]:
        """Return jobs in the given phases, newest first, starting after the job with ID `after`.

        ``reader``: only jobs that this user may read; empty: all.
        """

        if phases == ACTIVE:
            return await self._list_active(limit, after, reader)
        wanted = None if phases == ACTIVE | TERMINAL else phases

        def entries(store: Store) -> list[JobEntry]:
            # Parsed in the thread, since many jobs take long.
            rows = store.jobs(phases=wanted, limit=limit, after=after, reader=reader)
            return [self._jobs.get(row.id) or entry_of(row) for row in rows]

        return await self._threads.run(entries)

    async def _list_active(self, limit: int, after: str, reader: str) -> list[JobEntry]:
        last = self._jobs.get(after)
        row = last.row if last is not None else None
        if row is None and after:
            # The last job of the page before has ended.
            row = await self._threads.run(lambda store: store.job(after))
        begin = _turn(row) if row is not None else (-math.inf, "")

        def entries() -> list[JobEntry]:
            found = list(self._jobs.values())
            if after:
                found = [entry for entry in found if _turn(entry.row) > begin]
            if reader:
                found = [entry for entry in found if reader in (entry.row.user, *entry.row.shared_with)]
            return heapq.nsmallest(limit, found, key=lambda entry: _turn(entry.row))

        return await asyncio.to_thread(entries)


def _turn(row: JobRow) -> tuple[float, str]:
    """Return the sort key of lists: the newest first."""
    return -row.created_at, row.id


async def active_jobs(
    read: Callable[[Callable[[Store], list[JobEntry]]], Awaitable[list[JobEntry]]], known: Mapping[str, JobEntry]
) -> dict[str, JobEntry]:
    """Return the jobs that have not ended, by ID, in the order in which they came.

    Args:
        read: runs a query of the store.
        known: jobs that were read before, of which only what has changed is parsed again.
    """
    found: dict[str, JobEntry] = {}
    last = ""

    def page(store: Store) -> list[JobEntry]:
        rows = store.jobs(phases=ACTIVE, limit=_LOADED_JOBS, after=last)
        return [entry_of(row, known.get(row.id)) for row in rows]

    while entries := await read(page):
        found.update({entry.row.id: entry for entry in entries})
        last = entries[-1].row.id
    return dict(reversed(found.items()))


def entry_of(row: JobRow, known: JobEntry | None = None) -> JobEntry:
    """Parse a job's row. ``known``: the job as it was read before, of which what has not changed is taken."""
    if known is None:
        spec, plan = parse_json(row.spec_json, stored=True), _PLAN.validate_json(row.plan_json)
        return JobEntry(row, job_state_from_json(row.state_json), spec, plan)
    before = known.row
    spec = known.spec if row.spec_json == before.spec_json else parse_json(row.spec_json, stored=True)
    plan = known.plan if row.plan_json == before.plan_json else _PLAN.validate_json(row.plan_json)
    state = known.state if row.state_json == before.state_json else job_state_from_json(row.state_json)
    return JobEntry(row, state, spec, plan)
