"""State of the federation: each message is applied to the state machines, stored, and only then visible.

All code here runs on one event loop, and the store in threads. A lock serialises messages, so that memory always equals
the store, except for progress that agents will report again.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from typing import TypeVar

import structlog
from pydantic import ValidationError

from control_plane.blobs import BlobStore
from control_plane.core import (
    CatalogueChecked,
    ClockJumped,
    Connected,
    ControlPlaneRestarted,
    Disconnected,
    Heartbeat,
    RegionMachine,
    Tick,
    region_state_from_json,
)
from control_plane.service.measuring._task_history import TaskHistory
from control_plane.service.planning._admission import Answer, PendingAdmission
from control_plane.service.planning._allocation import Allocation
from control_plane.service.planning._routing import Routing
from control_plane.service.rpc._session import AgentSession
from control_plane.service.rpc._wire import job_message, to_json
from control_plane.service.state._audit import AuditLog
from control_plane.service.state._catalogue import fault_of, read_catalogue
from control_plane.service.state._certificates import Certificate, admit_certificate
from control_plane.service.state._changes import Changes
from control_plane.service.state._draft import OPERATOR, Draft
from control_plane.service.state._entries import JobEntry, RegionEntry, reported_workers
from control_plane.service.state._job_lookup import JobLookup, active_jobs
from control_plane.service.state._leadership import LeaderState, StoreThreads
from control_plane.service.state._notifier import Notifier
from control_plane.service.state._sums import JobSums
from control_plane.spec import JobSpec, packed_code_digest
from control_plane.store import CommandRow, Committed, Cursors, JobRow, OutcomeUnknown, Store, UserRow
from geofed_pb.bounds import NAME_BYTES, clean
from geofed_pb.errors import GeofedError
from geofed_pb.features import FEATURES
from geofed_pb.v1 import agent_pb2, control_pb2

_T = TypeVar("_T")
_log = structlog.get_logger("geofed.federation")
MAX_TICK_GAP_SECONDS = 5.0
"""Longest time between two ticks; a longer one means that the process was suspended or the clock was set."""
SERVED_SECONDS = 7 * 86_400.0
"""Period over which the workers of a user's jobs without a promise count for the user's place in the queue."""
_READ_SECONDS = 60.0
"""Time within which reading the same thing again is not recorded again, so that nobody fills the disk by reading."""
_MISSING_HINT = "submit the job again, which uploads what is missing"
_KNOWN_CODE = 1000
"""Bundles of which the digest of the code is kept in memory, some 200 bytes each: a sweep submits one many times."""
_SERVICE_REFRESH_SECONDS = 60.0
"""Time between two sums of what users' ended jobs have used."""


class Federation:
    """Regions, jobs, users and sessions; all changes of state go through `change`."""

    def __init__(
        self,
        store: Store,
        blobs: BlobStore,
        clock: Callable[[], float],
        lease: timedelta,
        name: str,
        leading: LeaderState | None = None,
    ) -> None:
        self.name = name
        self.leading = leading or LeaderState(store)
        self.blobs = blobs
        self.clock = clock
        self.lease = lease
        self.events_notifier = Notifier()
        self.logs_notifier = Notifier()
        self.sessions: dict[str, AgentSession] = {}
        self.revoked: dict[str, float] = {}
        """Serial numbers of revoked certificates, with the times after which these have expired."""
        self.issues_certificates = True
        """Whether this control plane signs the regions' certificates; else the operator's own CA does."""
        self.ca_pem: Callable[[], bytes] = bytes
        """Returns the certificates of the trusted CAs."""
        self.rights_changed: Callable[[], Awaitable[None]] = _nothing
        """Ends the calls under way whose callers may not make them any more."""
        self.changes = Changes(self._store_changes, self._publish)
        self._lock = asyncio.Lock()
        """Held while a change is made, but not while it is stored."""
        self.planning = asyncio.Lock()
        """Held while a new job is planned, but not while it is stored, and taken before `change`: jobs are planned one
        after another, so that each plan accounts for the jobs before it."""
        self._closed = False
        self.stopping = False
        self._ticked_at = 0.0
        self._summed_at = -math.inf
        self.allocation = Allocation()
        self.routing = Routing()
        self._logged_failures: set[tuple[str, type[Exception]]] = set()
        """Reviews and exception types that were logged already."""
        self.audit = AuditLog(clock)
        self._noted_reads: dict[tuple[str, str, str], float] = {}
        """When who has read what, within `_READ_SECONDS`."""
        self._code_digests: dict[str, str] = {}
        """By bundle, of some that are one archive: the digest of its code."""
        self._threads = StoreThreads(store, 4)
        self.lookup = JobLookup(self.changes, self._threads)
        """Finds jobs for users."""

    @property
    def jobs(self) -> dict[str, JobEntry]:
        """Jobs that have not ended, as stored, in the order in which they came."""
        return self.changes.visible.jobs

    @property
    def sums(self) -> JobSums:
        """Sums over these jobs."""
        return self.changes.sums

    @property
    def regions(self) -> dict[str, RegionEntry]:
        """All regions, as stored."""
        return self.changes.visible.regions

    @property
    def users(self) -> dict[str, UserRow]:
        """All users, as stored."""
        return self.changes.visible.users

    async def load(self, known: Mapping[str, JobEntry] | None = None) -> None:
        """Load the stored state into memory, before any request is served.

        ``known``: jobs that were read before (`active_jobs`), of which only what has changed is parsed again.

        Raises ``GeofedError("STATE_INVALID")`` if a row cannot be parsed.
        """
        try:
            await self._load_rows(known or {})
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise GeofedError("STATE_INVALID", f"a stored {error.title} cannot be read: {first['msg']}") from error
        async with self.change() as draft:
            for name in self.regions:
                draft.apply_to_region(name, ControlPlaneRestarted(draft.at, self.lease.total_seconds()))
            if self.jobs or self.regions:
                draft.record(
                    "control-plane.started", f"the control plane has restarted with {len(self.jobs)} active jobs"
                )
        _log.info("state loaded", jobs=len(self.jobs), regions=len(self.regions))

    async def _load_rows(self, known: Mapping[str, JobEntry]) -> None:
        await self.read(lambda store: store.begin())
        await self.read(self.audit.load)
        self.users.update({user.name: user for user in await self.read(lambda store: store.users())})
        at = self.clock()
        self.revoked = {row.serial: row.expires for row in await self.read(lambda store: store.revocations(at))}
        for row in await self.read(lambda store: store.regions()):
            catalogue, state = None, region_state_from_json(row.state_json)
            if row.catalogue_json:
                try:
                    catalogue = read_catalogue(row.name, row.catalogue_json)
                except GeofedError as error:
                    # Stored by a version with other bounds.
                    state = replace(state, fault=error.message)
            self.regions[row.name] = RegionEntry(row, state, catalogue)
        self.jobs.update(await active_jobs(self.read, known))
        self.changes.visible.report_cursors.update(await self.read(Store.report_cursors))
        self.changes.loaded()

    def stop(self) -> None:
        """End all sessions and all streams that wait for events or logs."""
        self.stopping = True
        for session in list(self.sessions.values()):
            session.end(GeofedError("UNAVAILABLE", "the control plane is stopping"))
        self.events_notifier.ring()
        self.logs_notifier.ring()

    async def close(self) -> None:
        """Stop the store's threads once the last change is stored."""
        self._closed = True
        async with self._lock:
            await self.changes.drain()
            await self._threads.close()

    async def read(self, query: Callable[[Store], _T]) -> _T:
        """Run a query of the store in a thread, with a time limit."""
        return await self._threads.run(query)

    async def code_digest(self, bundle_digest: str) -> str:
        """Return the digest of an uploaded bundle's code, by which the same task is recognised.

        Raises ``GeofedError("TASK_INVALID")``, also if not all of it has arrived.
        """
        blobs = self.blobs

        def found() -> str:
            if missing := blobs.missing_parts(bundle_digest):
                text = f"{len(missing)} files of the task folder have not arrived, such as {missing[0].name}"
                raise GeofedError("TASK_INVALID", text, hint=_MISSING_HINT)
            return packed_code_digest(blobs.path(bundle_digest), blobs.path)

        if blobs.size(bundle_digest) is None:
            raise GeofedError("TASK_INVALID", "the code of the job has not arrived", hint=_MISSING_HINT)
        if (known := self._code_digests.get(bundle_digest)) is not None:
            return known
        digest = await asyncio.to_thread(found)
        # Of a folder with parts, these may be gone the next time.
        if not blobs.parts(bundle_digest):
            if len(self._code_digests) >= _KNOWN_CODE:
                self._code_digests.clear()
            self._code_digests[bundle_digest] = digest
        return digest

    async def answer(
        self, spec: JobSpec, job: str, history: TaskHistory, user: str, *, without: str = ""
    ) -> tuple[PendingAdmission, Answer]:
        """Plan a new job for the present federation, in a thread, since it may take seconds. The caller holds
        `planning`.

        Args:
            without: ID of a job whose workers count as free, since the new job replaces it.
        """
        draft = self.changes.draft(self.clock())
        if (replaced := draft.job(without)) is not None:
            ended = replace(replaced.state, phase="succeeded")
            draft.changed_jobs[without] = replace(replaced, state=ended)
        admission = self.allocation.admission(draft, spec, job, history, user)
        return admission, await asyncio.to_thread(admission.answer)

    @asynccontextmanager
    async def change(self) -> AsyncIterator[Draft]:
        """Yield a draft of the next change; store it and make it visible when the block ends without an error.

        A draft whose `void` is set is dropped. Raises ``GeofedError("STANDBY")`` if this control plane does not lead.
        """
        async with self._lock:
            self.leading.check()
            draft = self.changes.draft(self.clock())
            yield draft
            if draft.void:
                return
            stored = self.changes.add(draft)
            if draft.applied is not None:
                draft.applied()
        if stored is not None:
            # It is stored also if the caller is cancelled.
            await asyncio.shield(stored)

    def _publish(self, draft: Draft, committed: Committed) -> None:
        """Do what follows from a change that is stored."""
        self.revoked |= {row.serial: row.expires for row in draft.revocations}
        if any(entry.state.terminal for entry in draft.changed_jobs.values()):
            self._summed_at = -math.inf
        for digest in draft.dropped_models:
            # A job that starts from it may still fetch it.
            if not self.changes.index.starts_from(digest):
                self.blobs.remove(digest)
        for region, number in draft.ended_sessions:
            session = self.sessions.get(region)
            if session is not None and session.number == number:
                session.end(self._why_ended(draft, region))
        for region in {command.region for command in committed.commands}:
            if region in self.sessions:
                self.sessions[region].wake()
        if draft.revocations:
            self.tell_certificates()
        for event in committed.events:
            _log.info(event.text, kind=event.kind, job=event.job or None, region=event.region or None)
        if committed.audit is not None:
            self.audit.appended(committed.audit)
            self._tell_witnesses(draft)
        if committed.events:
            self.events_notifier.ring()
        if committed.logged:
            self.logs_notifier.ring()

    async def note_read(self, entry: JobEntry, user: str, digest: str, region: str = "") -> None:
        """Record in the audit log that a user is about to get a model, the code, or lines of the log of a job; once in
        a minute.

        ``digest``: of model or code; empty: it is the log. ``region``: whose own model it is.
        """
        at, read = self.clock(), (user, entry.row.id, digest)
        self._noted_reads = {one: then for one, then in self._noted_reads.items() if at - then < _READ_SECONDS}
        if read in self._noted_reads:
            return
        async with self.change() as draft:
            draft.by = user or OPERATOR
            what = {"digest": digest} if digest else {"what": "log"}
            draft.audit("job.read", job=entry.row.id, region=region, **what)
        # Only now: what is not recorded is not read.
        self._noted_reads[read] = at

    def _tell_witnesses(self, draft: Draft) -> None:
        """Give the head of the audit log to the regions of jobs that have ended."""
        ended = [entry for entry in draft.changed_jobs.values() if entry.state.terminal]
        regions = {part.region for entry in ended for part in entry.state.partitions}
        for session in (self.sessions[region] for region in sorted(regions & self.sessions.keys())):
            session.send(self.audit.message())

    async def write(self, change: Callable[[Store], _T]) -> _T:
        """Change rows of the store that are not in memory."""
        async with self._lock:
            self.leading.check()
            await self.changes.drain()
            return await self._written(change)

    async def _store_changes(self, drafts: Sequence[Draft]) -> Sequence[Committed]:
        # Encoded in the thread, since many jobs take long.
        return await self._written(lambda store: store.commit_all([draft.to_change() for draft in drafts]))

    async def _written(self, change: Callable[[Store], _T]) -> _T:
        """Change the store. If it is unknown whether that was stored, this control plane stops leading, since its
        memory may differ from the store."""
        try:
            self.leading.check()
            return await self.read(change)
        except OutcomeUnknown:
            self.leading.step_down("the database has not answered whether a change was stored")
            raise GeofedError("UNAVAILABLE", "the database has not answered whether the change was stored") from None
        except GeofedError as error:
            if error.code == "STANDBY":
                self.leading.step_down(error.message)
            raise

    @staticmethod
    def _why_ended(draft: Draft, region: str) -> GeofedError:
        entry = draft.region(region)
        if entry is not None and entry.state.revoked:
            return GeofedError("FORBIDDEN", f"region {region} was shut out by the operator")
        if entry is not None and entry.state.phase == "lost":
            return GeofedError("UNAVAILABLE", f"the lease of region {region} has expired; connect again")
        return GeofedError("FENCED", f"a later session of region {region} has replaced this one")

    # --- agents

    def require_certificate(self, region: str, serial: str) -> None:
        """Raise ``GeofedError("FORBIDDEN")`` unless a region's certificate is valid now."""
        entry = self.regions.get(region)
        if entry is None and self.issues_certificates:
            raise GeofedError("FORBIDDEN", f"region {region} is not part of this federation")
        unknown = self.issues_certificates and entry is not None and serial not in entry.row.serials
        if unknown or serial in self.revoked:
            text = f"this certificate of region {region} is not valid any more"
            raise GeofedError("FORBIDDEN", text, hint=f"join again: `geofed region invite {region}`")

    def revoked_certificates(self) -> agent_pb2.RevokedCertificates:
        """Return all revoked certificates that have not expired."""
        at = self.clock()
        serials = sorted(one for one, ends in self.revoked.items() if ends > at)
        return agent_pb2.RevokedCertificates(serials=serials, ca_pem=self.ca_pem())

    def tell_certificates(self) -> None:
        """Send all connected agents the revoked certificates and the trusted CAs."""
        for session in self.sessions.values():
            session.send(agent_pb2.ToAgent(revoked=self.revoked_certificates()))

    async def connect(
        self, region: str, hello: agent_pb2.Hello, address: str = "", shown: Certificate | None = None
    ) -> AgentSession:
        """Open a session of an agent that connects from an IP address; an earlier one of the region ends.

        ``shown``: its certificate by the operator's own CA, which makes the region a member.

        With an invalid catalogue the region keeps its last valid one, for the jobs that it has, and gets no new ones.
        """
        fault = ""
        try:
            catalogue = read_catalogue(region, hello.catalogue_json)
        except GeofedError as error:
            fault, catalogue = error.message, None
        # Before the change, so that sessions do not wait for each other's reads. The transaction reads them again.
        cursors = await self.read(partial(Store.cursors, region=region))
        async with self.change() as draft:
            if shown is not None:
                admit_certificate(draft, region, shown)
            before = self._known(draft, region)
            boot_id = clean(hello.boot_id, NAME_BYTES)
            lease = self.lease.total_seconds()
            features = tuple(sorted(set(FEATURES).intersection(hello.features)))
            draft.apply_to_region(region, Connected(draft.at, boot_id, lease, fault, address, features))
            entry = self._known(draft, region)
            self._resume(draft, before, hello, cursors)
            row = replace(entry.row, agent_version=clean(hello.agent_version[:64], 64))
            if catalogue is not None:
                row = replace(row, cloud=catalogue.cloud, catalogue_json=to_json(asdict(catalogue)))
                entry = replace(entry, catalogue=catalogue)
            draft.put_region(replace(entry, row=row))
            _, applied = draft.report_cursor or (region, self.report_cursor(region))
            session = AgentSession(region, entry.state.session, hello.command_cursor, applied)
        self.sessions[region] = session
        session.send(self.audit.message())
        session.wake()
        return session

    def _resume(self, draft: Draft, before: RegionEntry, hello: agent_pb2.Hello, cursors: Cursors) -> None:
        """Have both sides continue from their sequence numbers. A side restored from a backup is behind the other: it
        takes over the other's numbers, and all commands are sent to the agent again."""
        region = before.row.name
        draft.met = (region, hello.command_cursor)
        applied = self.report_cursor(region)
        if hello.report_cursor > applied:
            draft.report_cursor = (region, hello.report_cursor)
        if cursors.older_than(hello.command_cursor) or hello.report_cursor > applied > 0:
            draft.resend_commands(region, "the control plane's state is older than the agent's")
        elif hello.command_cursor < cursors.command_cursor:
            # The agent is a new process, to which the commands are sent again in any case.
            text = f"the state of region {region} is older than before: it was lost, or restored from a backup"
            draft.record("region.restored", text, region=region)

    async def refuse_command(self, region: str, command: CommandRow, error: GeofedError) -> None:
        """Skip a command that cannot be sent, and fail its job."""
        async with self.change() as draft:
            draft.dropped_command = (region, command.seq)
            draft.set_aside_message(region, command.job, f"command {command.seq} of region {region}", error)

    async def capacity_changed(self, session: AgentSession, preemptible: int) -> None:
        """Update the number of a region's preemptible workers."""
        async with self.change() as draft:
            entry = self._known(draft, session.region)
            known = entry.catalogue
            if known is None or known.capacity.preemptible == preemptible:
                return
            before = known.capacity.preemptible
            catalogue = replace(known, capacity=replace(known.capacity, preemptible=preemptible))
            if fault := fault_of(session.region, catalogue):
                draft.apply_to_region(session.region, CatalogueChecked(draft.at, fault))
                return
            row = replace(entry.row, catalogue_json=to_json(asdict(catalogue)))
            draft.put_region(replace(entry, row=row, catalogue=catalogue))
            text = f"{session.region} now has {preemptible} preemptible workers instead of {before}"
            data = {"before": before, "preemptible": preemptible}
            draft.record("region.capacity", text, region=session.region, data=data)

    async def disconnect(self, session: AgentSession) -> None:
        """Record that the stream of a session has ended."""
        session.end()
        if self.sessions.get(session.region) is session:
            del self.sessions[session.region]
        if self._closed or self.stopping:
            # Whoever serves next waits for the region as after a crash; its jobs need not be told, nor stored.
            return
        async with self.change() as draft:
            draft.apply_to_region(session.region, Disconnected(draft.at, session.number))

    async def renew_lease(self, session: AgentSession) -> None:
        """Renew a region's lease, since its agent has sent a message."""
        self.leading.check()
        event = Heartbeat(self.clock(), session.number, self.lease.total_seconds())
        entry = self.changes.latest.regions.get(session.region)
        if entry is not None:
            machine = RegionMachine(entry.state)
            if not machine.handle(event):
                # Only the lease has changed, which is not stored.
                self.changes.contact(replace(entry, state=machine.state))
                return
        async with self.change() as draft:
            draft.apply_to_region(session.region, replace(event, at=draft.at))

    async def acknowledge_commands(self, session: AgentSession, seq: int) -> None:
        """Record that the agent has stored its commands up to sequence number `seq`."""
        async with self.change() as draft:
            draft.command_cursor = session.region, seq

    def report_cursor(self, region: str) -> int:
        """Return the sequence number of the last applied report of a region."""
        return self.changes.latest.report_cursors.get(region, 0)

    async def tick(self) -> None:
        """Apply the passing of time; to be called every second.

        Leases expire, jobs fail whose regions are lost for too long, workers are allocated, and updates are rerouted
        around slow links.
        """
        async with self.change() as draft:
            gap, self._ticked_at = draft.at - (self._ticked_at or draft.at), draft.at
            if not -1.0 < gap < MAX_TICK_GAP_SECONDS:
                _log.warning("the process was suspended or the clock was set; all leases are renewed", seconds=gap)
                for name in draft.regions:
                    draft.apply_to_region(name, ClockJumped(draft.at, self.lease.total_seconds()))
            for name in draft.regions:
                draft.apply_to_region(name, Tick(draft.at))
            for job_id in list(self.changes.index.waiting_for_lost):
                draft.apply_to_job(job_id, Tick(draft.at))
        await self._refresh_served()
        await self._allocate()
        await self._review("routing", self.routing.review)

    async def _allocate(self) -> None:
        """Review the allocation of workers: decide in a thread, some jobs at a time, and command it."""
        try:
            while (review := self.allocation.due(self.changes.draft(self.clock()))) is not None:
                answer = await asyncio.to_thread(review.answer)
                if not await self._review("allocation", partial(self.allocation.apply, review=review, answer=answer)):
                    return
        except Exception as error:  # noqa: BLE001 - leases must expire whatever a review fails with
            self._note_failure("allocation", error)

    async def _review(self, name: str, review: Callable[[Draft], None]) -> bool:
        """Run a review of jobs in a change of its own, so that its failure stops neither time nor other reviews; return
        whether it has not failed."""
        async with self.change() as draft:
            try:
                review(draft)
            except Exception as error:  # noqa: BLE001 - leases must expire whatever a review fails with
                draft.void = True
                self._note_failure(name, error)
        return not draft.void

    def _note_failure(self, review: str, error: Exception) -> None:
        """Log a review's failure: once for each type of exception, since it would recur every second."""
        kind = review, type(error)
        if kind not in self._logged_failures:
            self._logged_failures.add(kind)
            _log.error("a review of the jobs failed; they continue unchanged", review=review, exc_info=error)

    async def _refresh_served(self) -> None:
        """Sum what each user's ended jobs have lately used: once a minute, and after each job's end."""
        at = self.clock()
        if 0 <= at - self._summed_at < _SERVICE_REFRESH_SECONDS:
            return
        since = at - SERVED_SECONDS
        self.allocation.served = await self.read(lambda store: store.unpromised_worker_seconds(since))
        self._summed_at = at

    def may_fetch(self, region: str, digest: str) -> bool:
        """Whether a job that runs in the region has this code bundle, or starts from this model."""
        return any(
            entry.state.partition(region) is not None and (digest in _blobs_of(entry) or self._is_part(entry, digest))
            for entry in self.jobs_in(region)
        )

    def _is_part(self, entry: JobEntry, digest: str) -> bool:
        return digest in self.blobs.parts(entry.row.bundle_digest)

    def jobs_in(self, region: str) -> list[JobEntry]:
        """Return the active jobs that a region concerns, as stored."""
        return [self.jobs[job] for job in self.changes.index.jobs_in(region) if job in self.jobs]

    # --- users

    def describe(self, entry: JobEntry) -> control_pb2.Job:
        """Return the job's message for users."""
        message = job_message(entry.row, entry.state, entry.plan, self._last_contact)
        message.user = entry.row.user
        message.shared_with.extend(entry.row.shared_with)
        message.labels.update(entry.spec.metadata.labels)
        return message

    def _last_contact(self, region: str) -> float:
        entry = self.regions.get(region)
        return entry.state.last_contact if entry is not None else 0.0

    def summarise(self, entry: JobEntry) -> control_pb2.Job:
        """Return the job's message for a list, without spec, plan and result."""
        message = self.describe(entry)
        for name in ("spec_json", "plan_json", "result_json"):
            message.ClearField(name)
        return message

    def occupied(self, may_read: Callable[[JobRow], bool]) -> dict[str, int]:
        """Return by region the workers of active jobs that a caller may not read."""
        return reported_workers(entry for entry in list(self.jobs.values()) if not may_read(entry.row))

    def describe_region(self, entry: RegionEntry) -> control_pb2.Region:
        """Return the region's message for users."""
        state = entry.state
        left = max(0.0, state.lease_ends - self.clock())
        conditions = {
            "invited": "waiting for its agent to join" if not entry.row.serials else "waiting for its agent to connect",
            "unreachable": f"no message received; its lease expires in {left:.0f} s",
            "lost": "its lease has expired; waiting for its agent to reconnect",
            "misconfigured": f"it gets no new jobs: {state.fault}",
            "draining": "it gets no new jobs, as the operator has ordered",
            "revoked": "its certificates are revoked; it may join again with a new invitation",
        }
        return control_pb2.Region(
            name=entry.row.name,
            cloud=entry.row.cloud,
            state=state.standing,
            condition=conditions.get(state.standing, ""),
            last_contact=state.last_contact,
            agent_version=entry.row.agent_version,
            catalogue_json=entry.row.catalogue_json,
            certificate_expires=entry.row.certificate_expires,
            measured_links=[control_pb2.MeasuredLink(**asdict(link)) for link in state.measured],
        )

    def promised_workers(self) -> dict[str, int]:
        """Return by user the largest number of workers that are reserved for its promises at any time from now on."""
        return self.allocation.promised_workers(self.changes.draft(self.clock()))

    @staticmethod
    def _known(draft: Draft, region: str) -> RegionEntry:
        entry = draft.region(region)
        if entry is None:
            raise GeofedError("FORBIDDEN", f"region {region} is not part of this federation")
        return entry


async def _nothing() -> None:
    """Do nothing."""


def _blobs_of(entry: JobEntry) -> tuple[str, ...]:
    """Return the digests of the files that a job's regions fetch."""
    model = entry.state.initial_model
    return (entry.row.bundle_digest, *(model.uploaded if model is not None else ()))
