"""The one place where state changes: each message runs through the machines, is stored, and only then seen.

All that is here runs on one event loop; the store runs in threads. A lock keeps messages one after another, so that
what is in memory always equals what is in the store, apart from progress that agents will tell again.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import structlog
from pydantic import TypeAdapter, ValidationError

from control_plane.blobs import BlobStore
from control_plane.core import (
    TERMINAL,
    ClockJumped,
    Connected,
    ControlPlaneRestarted,
    Disconnected,
    Heartbeat,
    Tick,
    job_state_from_json,
    region_state_from_json,
)
from control_plane.service.measuring._known import Learnt
from control_plane.service.planning._admission import Answer, Asked
from control_plane.service.planning._allocation import Allocation
from control_plane.service.planning._routing import Routing
from control_plane.service.rpc._session import AgentSession
from control_plane.service.rpc._wire import job_message, to_json
from control_plane.service.state._draft import Draft, JobEntry, RegionEntry
from control_plane.service.state._notifier import Notifier
from control_plane.spec import JobSpec, packed_code_digest, parse_json
from control_plane.store import Change, CommandRow, Committed, JobRow, Store, UserRow
from geofed_pb.errors import GeofedError
from geofed_pb.v1 import agent_pb2, control_pb2
from scheduler import Plan
from scheduler import Region as Catalogue

_T = TypeVar("_T")
_PLAN = TypeAdapter(Plan)
_CATALOGUE = TypeAdapter(Catalogue)
_log = structlog.get_logger("geofed.federation")
MAX_TICK_GAP_SECONDS = 5.0
"""Between two ticks; longer means that the process was stopped, or the clock set."""
SERVED_SECONDS = 7 * 86_400.0
"""What a user had counts for so long, where jobs without a promise wait in line."""
_SUM_UP_SECONDS = 60.0
ACTIVE = frozenset({"queued", "planned", "starting", "running", "finishing", "cancelling"})


class Federation:
    """Regions, jobs and sessions, as they are now."""

    def __init__(self, store: Store, blobs: BlobStore, clock: Callable[[], float], lease: timedelta, name: str) -> None:
        self.name = name
        self.blobs = blobs
        self.clock = clock
        self.lease = lease
        self.events_notifier = Notifier()
        self.logs_notifier = Notifier()
        self.regions: dict[str, RegionEntry] = {}
        self.jobs: dict[str, JobEntry] = {}
        """Those that have not ended."""
        self.users: dict[str, UserRow] = {}
        self.sessions: dict[str, AgentSession] = {}
        self._report_cursors: dict[str, int] = {}
        self._store = store
        self._lock = asyncio.Lock()
        self.planning = asyncio.Lock()
        """Taken before a change is begun. New jobs are answered one after another, so that each sees the one before."""
        self._closed = False
        self.stopping = False
        self._ticked_at = 0.0
        self._summed_at = -math.inf
        self.allocation = Allocation()
        self.routing = Routing()
        self._stumbled: set[tuple[str, type[Exception]]] = set()
        """Looks, and what they broke on, that were logged."""
        self._threads = ThreadPoolExecutor(4, "geofed-store")

    async def load(self) -> None:
        """Bring the stored state into memory; until this is done no one may be answered.

        Raises ``GeofedError`` STATE_INVALID where a row cannot be understood.
        """
        try:
            await self._load_rows()
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise GeofedError("STATE_INVALID", f"a stored {error.title} cannot be read: {first['msg']}") from error
        async with self.change() as draft:
            for name in self.regions:
                draft.tell_region(name, ControlPlaneRestarted(draft.at, self.lease.total_seconds()))
            if self.jobs or self.regions:
                draft.record("control-plane.started", f"the control plane is back with {len(self.jobs)} running jobs")
            for job_id in self.jobs:
                draft.record("control-plane.started", "the control plane is back", job=job_id)
        _log.info("state loaded", jobs=len(self.jobs), regions=len(self.regions))

    async def _load_rows(self) -> None:
        await self.read(lambda store: store.begin())
        self.users = {user.name: user for user in await self.read(lambda store: store.users())}
        for row in await self.read(lambda store: store.regions()):
            catalogue = _CATALOGUE.validate_json(row.catalogue_json) if row.catalogue_json else None
            self.regions[row.name] = RegionEntry(row, region_state_from_json(row.state_json), catalogue)
            cursors = await self.read(partial(Store.cursors, region=row.name))
            self._report_cursors[row.name] = cursors.report_cursor
        for job in await self.read(lambda store: store.jobs(phases=ACTIVE, limit=100_000)):
            self.jobs[job.id] = _entry(job)

    def stop(self) -> None:
        """End what would otherwise wait: sessions, and streams that follow."""
        self.stopping = True
        for session in list(self.sessions.values()):
            session.end(GeofedError("UNAVAILABLE", "the control plane is stopping"))
        self.events_notifier.ring()
        self.logs_notifier.ring()

    async def close(self) -> None:
        """Let go of the threads, once the last message is stored."""
        self._closed = True
        async with self._lock:
            self._threads.shutdown(wait=True)

    async def read(self, question: Callable[[Store], _T]) -> _T:
        """Ask the store, in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, question, self._store)

    async def code_digest(self, bundle_digest: str) -> str:
        """By which the code of a bundle that is here is known again. Raises ``GeofedError``: TASK_INVALID."""
        path = self.blobs.path(bundle_digest)
        return await asyncio.to_thread(lambda: packed_code_digest(path.read_bytes()))

    async def answer(
        self, spec: JobSpec, job: str, learnt: Learnt, user: str, *, without: str = ""
    ) -> tuple[Asked, Answer]:
        """A new job with the federation as it stands, and the answer, worked out in a thread: it may take seconds, and
        all others are served meanwhile. Who asks holds `planning`. ``without``: a job that is to make room for it."""
        jobs = {name: entry for name, entry in self.jobs.items() if name != without}
        draft = Draft(self.clock(), jobs, self.regions, self.users)
        asked = self.allocation.asked(draft, spec, job, learnt, user)
        return asked, await asyncio.to_thread(asked.answer)

    @asynccontextmanager
    async def change(self) -> AsyncIterator[Draft]:
        """A draft of the next change; stored and made visible when the block ends without an error, unless void."""
        async with self._lock:
            draft = Draft(self.clock(), self.jobs, self.regions, self.users)
            yield draft
            if draft.void:
                return
            await _unbroken(self._commit(draft, draft.to_change()))

    async def _commit(self, draft: Draft, change: Change | None) -> None:
        committed = await self.read(lambda store: store.commit(change)) if change is not None else Committed()
        if draft.renumbered_region:
            self._report_cursors[draft.renumbered_region] = 0
        if draft.report_cursor:
            self._report_cursors[draft.report_cursor[0]] = draft.report_cursor[1]
        self.regions.update(draft.changed_regions)
        for job_id, entry in draft.changed_jobs.items():
            if entry.state.terminal:
                self.jobs.pop(job_id, None)
                self._summed_at = -math.inf
            else:
                self.jobs[job_id] = entry
        for name, user in draft.changed_users.items():
            self.users.pop(name, None)
            if user is not None:
                self.users[name] = user
        for region, number in draft.ended_sessions:
            session = self.sessions.get(region)
            if session is not None and session.number == number:
                session.end(self._why_ended(draft, region))
        for region in {command.region for command in committed.commands}:
            if region in self.sessions:
                self.sessions[region].wake()
        for event in committed.events:
            _log.info(event.text, kind=event.kind, job=event.job or None, region=event.region or None)
        if committed.events:
            self.events_notifier.ring()
        if committed.logged:
            self.logs_notifier.ring()

    @staticmethod
    def _why_ended(draft: Draft, region: str) -> GeofedError:
        entry = draft.region(region)
        if entry is not None and entry.state.phase == "lost":
            return GeofedError("UNAVAILABLE", f"the lease of region {region} is over; connect again")
        return GeofedError("FENCED", f"a later session of region {region} has taken over")

    # --- agents

    async def connect(self, region: str, hello: agent_pb2.Hello) -> AgentSession:
        """Open a session; an earlier one of the region ends. Raises ``GeofedError`` CONFIG_INVALID."""
        catalogue = _catalogue_of(region, hello.catalogue_json)
        async with self.change() as draft:
            before = self._known(draft, region)
            draft.tell_region(region, Connected(draft.at, hello.boot_id, self.lease.total_seconds()))
            entry = self._known(draft, region)
            await self._resume(draft, before, hello)
            row = replace(
                entry.row,
                cloud=catalogue.cloud,
                agent_version=hello.agent_version[:64],
                catalogue_json=hello.catalogue_json,
            )
            draft.put_region(replace(entry, row=row, catalogue=catalogue))
            _, applied = draft.report_cursor or (region, self.report_cursor(region))
            session = AgentSession(region, entry.state.session, hello.command_cursor, applied)
        self.sessions[region] = session
        session.wake()
        return session

    async def _resume(self, draft: Draft, before: RegionEntry, hello: agent_pb2.Hello) -> None:
        """Both sides continue from where they were. One that was put back from a copy is behind the other: it takes
        over the other's numbers, and the agent gets its orders anew."""
        region = before.row.name
        cursors = await self.read(partial(Store.cursors, region=region))
        draft.met = (region, hello.command_cursor)
        applied = self.report_cursor(region)
        if hello.report_cursor > applied:
            draft.report_cursor = (region, hello.report_cursor)
        if cursors.older_than(hello.command_cursor) or hello.report_cursor > applied > 0:
            draft.told_anew(region, "what the control plane knows of it is older than what it has done")
        elif hello.command_cursor < cursors.command_cursor:
            # A new process: it gets its orders anew in any case.
            text = f"region {region} has an older state than it had: it was lost, or put back from a copy"
            draft.record("region.restored", text, region=region)

    async def refuse_command(self, region: str, command: CommandRow, error: GeofedError) -> None:
        """A command that cannot be sent: its job fails, and those behind it are sent."""
        async with self.change() as draft:
            draft.dropped_command = (region, command.seq)
            draft.cannot_deliver(region, command.job, f"command {command.seq} of region {region}", error)

    async def capacity_changed(self, session: AgentSession, preemptible: int) -> None:
        """A region has another number of preemptible workers than before."""
        async with self.change() as draft:
            entry = self._known(draft, session.region)
            known = entry.catalogue
            if known is None or known.capacity.preemptible == preemptible:
                return
            before = known.capacity.preemptible
            catalogue = replace(known, capacity=replace(known.capacity, preemptible=preemptible))
            row = replace(entry.row, catalogue_json=to_json(asdict(catalogue)))
            draft.put_region(replace(entry, row=row, catalogue=catalogue))
            text = f"{session.region} has {preemptible} preemptible workers now, {before} before"
            data = {"before": before, "preemptible": preemptible}
            draft.record("region.capacity", text, region=session.region, data=data)

    async def disconnect(self, session: AgentSession) -> None:
        """The stream of a session is over."""
        session.end()
        if self.sessions.get(session.region) is session:
            del self.sessions[session.region]
        if self._closed:
            return
        async with self.change() as draft:
            draft.tell_region(session.region, Disconnected(draft.at, session.number))

    async def heard(self, session: AgentSession) -> None:
        """Anything came from the agent: its lease begins anew."""
        async with self.change() as draft:
            draft.tell_region(session.region, Heartbeat(draft.at, session.number, self.lease.total_seconds()))

    async def acknowledge_commands(self, session: AgentSession, seq: int) -> None:
        """The agent has stored its commands up to `seq`."""
        async with self._lock:
            await self.read(lambda store: store.commit(Change(command_cursor=(session.region, seq))))

    def report_cursor(self, region: str) -> int:
        """The last report of the region that was applied."""
        return self._report_cursors.get(region, 0)

    async def tick(self) -> None:
        """Let time pass, to be called every second.

        Leases end, lost regions run out of patience, workers are shared out anew, and updates led around slow links.
        """
        async with self.change() as draft:
            gap, self._ticked_at = draft.at - (self._ticked_at or draft.at), draft.at
            if not -1.0 < gap < MAX_TICK_GAP_SECONDS:
                _log.warning("the process stood still, or its clock was set; leases begin anew", seconds=gap)
                for name in self.regions:
                    draft.tell_region(name, ClockJumped(draft.at, self.lease.total_seconds()))
            for name in self.regions:
                draft.tell_region(name, Tick(draft.at))
            for job_id in list(self.jobs):
                draft.tell_job(job_id, Tick(draft.at))
        await self._sum_up_service()
        await self._review("allocation", self.allocation.review)
        await self._review("routing", self.routing.review)

    async def _review(self, what: str, look: Callable[[Draft], None]) -> None:
        """One look at all jobs, in a change of its own: what it breaks on stops neither time nor the other looks."""
        async with self.change() as draft:
            try:
                look(draft)
            except Exception as error:  # noqa: BLE001 - the edge of a decision: leases must end whatever it stumbles on
                draft.void = True
                kind = what, type(error)
                if kind not in self._stumbled:
                    # Once: it would be the same every second.
                    self._stumbled.add(kind)
                    _log.exception("a look at the jobs failed; they continue as they are", look=what)

    async def _sum_up_service(self) -> None:
        """What each user's ended jobs have had of late: once a minute, and after each job's end."""
        at = self.clock()
        if 0 <= at - self._summed_at < _SUM_UP_SECONDS:
            return
        since = at - SERVED_SECONDS
        self.allocation.served = await self.read(lambda store: store.unpromised_worker_seconds(since))
        self._summed_at = at

    def may_fetch(self, region: str, digest: str) -> bool:
        """True where a job that runs in the region is made of this bundle, or begins with this model."""
        return any(
            digest in _blobs_of(entry) and entry.state.partition(region) is not None for entry in self.jobs.values()
        )

    # --- users

    async def find_job(self, name: str) -> JobEntry:
        """A job by its id, or by its name where one only has it; of jobs that continued as each other, the last has it.
        Raises ``GeofedError`` JOB_NOT_FOUND."""
        if name in self.jobs:
            return self.jobs[name]
        row = await self.read(lambda store: store.job(name))
        if row is None:
            named = await self.read(lambda store: store.jobs_named(name))
            if not named:
                raise GeofedError("JOB_NOT_FOUND", f"there is no job {name}")
            if len(named) > 1:
                named = [job for job in named if not job_state_from_json(job.state_json).successor]
            if len(named) > 1:
                ids = ", ".join(job.id for job in named[:5])
                text = f"{len(named)} jobs are called {name}; say which: {ids}"
                raise GeofedError("JOB_NOT_FOUND", text, hint="give the id of the one that you mean, not its name")
            row = named[0]
        return self.jobs.get(row.id) or _entry(row)

    async def ended_job(self, job_id: str) -> JobEntry | None:
        """A job that has ended, by its id; None: there is none."""
        row = await self.read(lambda store: store.job(job_id))
        return _entry(row) if row is not None and row.phase in TERMINAL else None

    async def list_jobs(self, phases: frozenset[str], limit: int, after: str = "") -> list[JobEntry]:
        """Jobs in one of these phases, newest first; those behind the job with the id `after`."""
        known = dict(self.jobs)

        def entries(store: Store) -> list[JobEntry]:
            # In the thread: to read many jobs takes long.
            rows = store.jobs(phases=phases, limit=limit, after=after)
            return [known.get(row.id) or _entry(row) for row in rows]

        return await self.read(entries)

    def describe(self, entry: JobEntry) -> control_pb2.Job:
        """The job as users see it."""
        contacts = {name: region.state.last_contact for name, region in self.regions.items()}
        message = job_message(entry.row, entry.state, entry.plan, contacts)
        message.user = entry.row.user
        return message

    def summarise(self, entry: JobEntry) -> control_pb2.Job:
        """The job as it stands in a list: without what it was asked for, planned and accounted."""
        message = self.describe(entry)
        for name in ("spec_json", "plan_json", "result_json"):
            message.ClearField(name)
        return message

    def describe_region(self, entry: RegionEntry) -> control_pb2.Region:
        """The region as users see it."""
        state = entry.state
        left = max(0.0, state.lease_ends - self.clock())
        conditions = {
            "invited": "waiting: for its agent to join"
            if not entry.row.serials
            else "waiting: for its agent to connect",
            "unreachable": f"nothing is heard of it; its lease runs for {left:.0f} s",
            "lost": "its lease is over; waiting: for its agent to come back",
        }
        return control_pb2.Region(
            name=entry.row.name,
            cloud=entry.row.cloud,
            state=state.phase,
            condition=conditions.get(state.phase, ""),
            last_contact=state.last_contact,
            agent_version=entry.row.agent_version,
            catalogue_json=entry.row.catalogue_json,
            certificate_expires=entry.row.certificate_expires,
        )

    def promised_workers(self) -> dict[str, int]:
        """The most workers that the promises to a user hold at any instant from now on, by user."""
        return self.allocation.promised_workers(Draft(self.clock(), self.jobs, self.regions, self.users))

    @staticmethod
    def _known(draft: Draft, region: str) -> RegionEntry:
        entry = draft.region(region)
        if entry is None:
            raise GeofedError("FORBIDDEN", f"region {region} is not part of this federation")
        return entry


async def _unbroken(work: Coroutine[Any, Any, None]) -> None:
    """Finish the work even when the caller is cancelled, so that memory and store never differ."""
    task = asyncio.create_task(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # seen; the one who waited for it is gone
        raise


def _blobs_of(entry: JobEntry) -> tuple[str, ...]:
    """What the regions of a job fetch."""
    model = entry.state.initial_model
    return (entry.row.bundle_digest,) if model is None else (entry.row.bundle_digest, model.digest)


def _entry(row: JobRow) -> JobEntry:
    return JobEntry(
        row, job_state_from_json(row.state_json), parse_json(row.spec_json), _PLAN.validate_json(row.plan_json)
    )


def _catalogue_of(region: str, text: str) -> Catalogue:
    try:
        catalogue = _CATALOGUE.validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise GeofedError("CONFIG_INVALID", f"the catalogue of region {region}: {where}: {first['msg']}") from None
    if catalogue.name != region:
        raise GeofedError("CONFIG_INVALID", f"the certificate is of region {region}, the catalogue of {catalogue.name}")
    return catalogue
