"""A draft collects all changes that one incoming message causes, to be stored in one transaction."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from control_plane.core import (
    EndSession,
    Failure,
    JobEvent,
    JobMachine,
    JobState,
    LinksMeasured,
    Record,
    RegionEvent,
    RegionLive,
    RegionMachine,
    RegionState,
    Report,
    Reported,
    job_state_to_json,
    models_of,
    region_state_to_json,
    with_late_charges,
)
from control_plane.service.jobs._result import result_of, runs_of, unpromised_worker_seconds
from control_plane.service.measuring._links import links_measured, links_of_plan
from control_plane.service.rpc._wire import command_of, to_json
from control_plane.service.state._entries import JobEntry, RegionEntry
from control_plane.service.state._index import JobIndex, WorkerUse, use_of
from control_plane.store import (
    Change,
    CommandRow,
    Deletion,
    EventRow,
    InvitationRow,
    JobProgress,
    JobRow,
    LogRow,
    Revocation,
    RunRow,
    UserRow,
    WeightRow,
)
from geofed_pb.bounds import clean
from geofed_pb.errors import GeofedError
from geofed_pb.security.audit import AuditBroken, Head, bounded_facts
from scheduler import LinkTable, Plan
from scheduler.deadline import devices_of

AUDITED = frozenset({
    "authority.rotated", "control-plane.started", "job.cancelling", "job.deleted", "job.renamed", "job.replanned",
    "job.shared", "region.drained", "region.enrolled", "region.invited", "region.removed", "region.revoked",
    "user.added", "user.changed", "user.key", "user.removed",
    "user.signed-in", "user.signed-out",
})  # fmt: skip
"""Kinds of events that are in the audit log, too."""
_NAMES = ("at", "kind", "job", "region", "by", "seq")
"""Keys of an entry that an event's data may not replace."""
OPERATOR = "operator"
"""User name of the holder of the operator's token; no other user may have it."""


@dataclass
class Draft:
    """Changes caused by one message, visible to others only after they are stored; dropped if storing fails."""

    at: float
    jobs: dict[str, JobEntry]
    """The jobs that have not ended. Read only."""
    regions: dict[str, RegionEntry]
    """All regions. Read only."""
    users: dict[str, UserRow] = field(default_factory=dict)
    """All users, by name. Read only."""
    changed_jobs: dict[str, JobEntry] = field(default_factory=dict)
    changed_regions: dict[str, RegionEntry] = field(default_factory=dict)
    ended_sessions: list[tuple[str, int]] = field(default_factory=list)
    events: list[EventRow] = field(default_factory=list)
    commands: list[CommandRow] = field(default_factory=list)
    runs: list[RunRow] = field(default_factory=list)
    audits: list[dict[str, Any]] = field(default_factory=list)
    weights: list[WeightRow] = field(default_factory=list)
    logs: list[LogRow] = field(default_factory=list)
    invitations: list[InvitationRow] = field(default_factory=list)
    changed_users: dict[str, UserRow | None] = field(default_factory=dict)
    """None: removed."""
    removed_region: str = ""
    """Region that is forgotten; empty: none."""
    deletions: list[Deletion] = field(default_factory=list)
    revocations: list[Revocation] = field(default_factory=list)
    report_cursor: tuple[str, int] | None = None
    """Region and sequence number of the agent's report that this draft applies."""
    command_cursor: tuple[str, int] | None = None
    """Region and sequence number up to which its agent has stored commands."""
    met: tuple[str, int] | None = None
    """Region whose agent opens a session, and the last command that the agent has received."""
    dropped_command: tuple[str, int] | None = None
    """Region and sequence number of a command that cannot be sent."""
    renumbered_region: str = ""
    """Region that has joined again, whose reports may start at any sequence number; empty: none."""
    by: str = ""
    """User who has requested the changes, which the events name; empty: nobody."""
    void: bool = False
    """Whether the draft is to be dropped."""
    applied: Callable[[], None] | None = None
    """Called once the next changes build on this one, before it is stored."""
    dropped_models: list[str] = field(default_factory=list)
    """Digests of models that their jobs keep no longer."""
    index: JobIndex | None = None
    """Index of `jobs`; None: it is made when it is needed."""
    _durable: bool = False
    _changed_rows: set[str] = field(default_factory=set)
    """Changed jobs of which more has changed than the progress."""
    stored_regions: set[str] = field(default_factory=set)
    """Regions of which more has changed than the lease."""

    def job(self, job_id: str) -> JobEntry | None:
        """Return the job with the draft's changes; None: unknown or ended."""
        return self.changed_jobs.get(job_id) or self.jobs.get(job_id)

    def region(self, name: str) -> RegionEntry | None:
        """Return the region with the draft's changes; None: unknown."""
        return self.changed_regions.get(name) or self.regions.get(name)

    def _indexed(self) -> JobIndex:
        if self.index is None:
            self.index = JobIndex(self.jobs.values())
        return self.index

    def jobs_in(self, region: str) -> list[str]:
        """Return the IDs of the jobs that a region concerns, with the draft's changes."""
        new = (name for name in self.changed_jobs if name not in self.jobs)
        return [*self._indexed().jobs_in(region), *new]

    def use(self, job: str) -> WorkerUse | None:
        """Return what a job occupies; None if it is not active."""
        entry = self.changed_jobs.get(job)
        if entry is not None:
            return None if entry.state.terminal else use_of(entry)
        return self._indexed().use(job)

    def busy(self, region: str, *, preemptible: bool = False) -> int:
        """Return the workers of a region that its jobs have or were commanded to have, with the draft's changes."""
        index = self._indexed()
        busy = index.preemptible(region) if preemptible else index.lasting(region)
        for use, sign in self._changes_of_use():
            busy += sign * use.workers.get(region, 0) * (use.preemptible == preemptible)
        return busy

    def touched(self) -> dict[str, None]:
        """Return the regions in which jobs or workers in use have changed; the caller takes them out."""
        return self._indexed().touched

    def may_be_rerouted(self) -> list[str]:
        """Return the jobs whose files leave the topology to the plan."""
        return list(self._indexed().may_be_rerouted)

    def fixed(self, region: str) -> int:
        """Return the workers of a region that its jobs keep to their ends, with the draft's changes."""
        fixed = self._indexed().fixed(region)
        for use, sign in self._changes_of_use():
            fixed += sign * use.workers.get(region, 0) * use.fixed
        return fixed

    def fixed_workers(self) -> dict[str, int]:
        """Return the same of all regions where there are any."""
        found = self._fixed_anywhere()
        return {name: fixed for name in self.regions if (fixed := found.get(name))}

    def fixed_devices(self) -> dict[str, int]:
        """Return the devices of these workers, by region."""
        found = self._fixed_anywhere()
        return {name: fixed for name in self.regions if (fixed := found.get(devices_of(name)))}

    def _fixed_anywhere(self) -> dict[str, int]:
        found = self._indexed().all_fixed()
        for use, sign in self._changes_of_use():
            for row, count in use.workers.items() if use.fixed else ():
                found[row] = found.get(row, 0) + sign * count
        return found

    def unpromised_seconds(self) -> dict[str, float]:
        """Return the worker seconds of active jobs without a promised deadline, by user, with the draft's changes."""
        found = dict(self._indexed().unpromised_seconds)
        for use, sign in self._changes_of_use():
            found[use.user] = found.get(use.user, 0.0) + sign * use.unpromised_seconds
        return found

    def _changes_of_use(self) -> Iterator[tuple[WorkerUse, int]]:
        for name, entry in self.changed_jobs.items():
            if (before := self._indexed().use(name)) is not None:
                yield before, -1
            if not entry.state.terminal:
                yield use_of(entry), 1

    def add_job(self, entry: JobEntry) -> None:
        """Add a job, or replace it."""
        self.changed_jobs[entry.row.id] = entry
        self._changed_rows.add(entry.row.id)
        self._durable = True

    def _state_of(self, region: str) -> RegionState:
        entry = self.region(region)
        return entry.state if entry is not None else RegionState(region)

    def put_region(self, entry: RegionEntry) -> None:
        """Add a region, or replace it."""
        self.changed_regions[entry.row.name] = entry
        self.stored_regions.add(entry.row.name)
        self._durable = True

    def put_user(self, user: UserRow) -> None:
        """Add a user, or replace it."""
        self.changed_users[user.name] = user

    def remove_user(self, name: str) -> None:
        """Remove a user."""
        self.changed_users[name] = None

    def record(
        self, kind: str, text: str, *, region: str = "", job: str = "", data: object = None, audited: bool = True
    ) -> None:
        """Add an event to the history, and to the audit log if it is of an audited kind.

        ``audited``: False for what somebody else reports, so that nothing is forged.
        """
        if audited and kind in AUDITED:
            # The event of a deletion is no longer one of the job.
            named = job or (str(data.get("job", "")) if isinstance(data, dict) else "")
            self.record_audited(kind, data, region=region, job=named)
        self.events.append(
            EventRow(
                self.at, clean(job, 64), region, clean(kind, 64), clean(text), to_json(self._with_user(data or {}))
            )
        )

    def record_audited(self, kind: str, data: object, *, region: str = "", job: str = "") -> None:
        """Add an event's data to the audit log."""
        self.audit(kind, job=job, region=region, **self._facts(data))

    def audit(self, kind: str, *, job: str = "", region: str = "", **facts: object) -> None:
        """Add an entry to the audit log, which is stored with the change."""
        named = {"job": clean(job, 64), "region": clean(region, 64), "by": self.by}
        told = bounded_facts(json.loads(to_json(facts)))
        given = {key: value for key, value in named.items() if value}
        self.audits.append({"at": self.at, "kind": kind, **given, **told})

    def resend_commands(self, region: str, why: str) -> None:
        """Have the jobs send a region all their commands again, since one side has lost some state."""
        self.record("region.restored", f"commands are sent to region {region} again: {why}", region=region)
        for job_id in self.jobs_in(region):
            self.apply_to_job(job_id, RegionLive(self.at, region, restarted=True))

    def set_aside_message(self, region: str, job_id: str, what: str, error: GeofedError) -> None:
        """Skip a message that can never be sent or applied, and fail its job."""
        text = f"{what} is skipped: {error}"
        self.record("message.undeliverable", text, region=region, job=job_id, data={"code": error.code})
        entry = self.job(job_id)
        part = entry.state.partition(region) or entry.state.copy_from(region) if entry is not None else None
        if part is not None:
            failure = Failure(error.code, clean(text), error.hint)
            self.apply_to_job(job_id, Reported(self.at, region, Report(part.epoch, "failed", error=failure)))

    def apply_to_job(self, job_id: str, event: JobEvent) -> None:
        """Apply an event to a job's state machine; ignored for ended and unknown jobs."""
        entry = self.job(job_id)
        if entry is None or entry.state.terminal:
            return
        machine = JobMachine(entry.state)
        actions = machine.handle(event)
        if machine.state is entry.state and not actions:
            return
        for action in actions:
            if isinstance(action, Record):
                self._take_record(job_id, action)
            else:
                payload = command_of(action, entry.row, entry.spec, entry.plan, self._state_of).SerializeToString()
                self.commands.append(CommandRow(action.region, job_id, payload))
        kept = {model.digest for model in models_of(machine.state)}
        self.dropped_models += [model.digest for model in models_of(entry.state) if model.digest not in kept]
        row = entry.row
        if machine.state.terminal:
            result = result_of(row, machine.state, entry.plan)
            self.audit(
                "job.ended", job=job_id, state=machine.state.phase, error=result["error"], model=result["model"],
                metrics=result["metrics"], usd=result["usd"], wan_bytes=result["wan_bytes"],
                applied_updates=result["applied_updates"],
                privacy={one["name"]: one["privacy"] for one in result["regions"] if one["privacy"]},
                data={one["name"]: one["data"] for one in result["regions"] if one["data"]},
            )  # fmt: skip
            row = replace(
                row,
                result_json=to_json(result),
                unpromised_worker_seconds=unpromised_worker_seconds(machine.state, entry.plan),
            )
            links = self._note_links(machine.state, entry.plan)
            self.runs += runs_of(row, machine.state, entry.spec, entry.plan, links)
            self._changed_rows.add(job_id)
        self.changed_jobs[job_id] = replace(entry, row=row, state=machine.state)
        self._durable = self._durable or bool(actions)

    def _note_links(self, state: JobState, plan: Plan) -> LinkTable:
        """Keep what a job that has ended has measured of its links; return these as the next plan takes them."""
        regions = {part.region: one for part in state.partitions if (one := self.region(part.region)) is not None}
        known = {name: entry.state for name, entry in regions.items()}
        for name, links in links_measured(state, known).items():
            self.apply_to_region(name, LinksMeasured(links))
        catalogues = {name: entry.planned for name in regions if (entry := self.region(name)) is not None}
        return links_of_plan(plan, catalogues)

    def note_region_head(self, job_id: str, region: str, value: Mapping[str, object]) -> None:
        """Record the head of a region's own audit log, which the region has reported at the end of its part of a job.

        What is no head is recorded as that: it takes nothing from the job.
        """
        try:
            head = Head.read(dict(value))
            if head.region != region:
                raise AuditBroken("it is the head of another log")
            facts: dict[str, object] = {"head": asdict(head)}
        except AuditBroken as error:
            facts = {"error": str(error)}
        self.audit("region.head", job=job_id, region=region, **facts)

    def settle(self, entry: JobEntry, region: str, report: Report) -> None:
        """Apply a region's report to an ended job: only its charges count."""
        state = with_late_charges(entry.state, region, report)
        if state == entry.state:
            return
        result = result_of(entry.row, state, entry.plan)
        row = replace(
            entry.row,
            result_json=to_json(result),
            unpromised_worker_seconds=unpromised_worker_seconds(state, entry.plan),
        )
        self.audit("job.settled", job=entry.row.id, region=region, usd=result["usd"], wan_bytes=result["wan_bytes"])
        self.add_job(replace(entry, row=row, state=state))

    def apply_to_region(self, name: str, event: RegionEvent) -> None:
        """Apply an event to a region's state machine, and the events that result from it to the jobs."""
        entry = self.region(name)
        if entry is None:
            return
        machine = RegionMachine(entry.state)
        actions = machine.handle(event)
        before, after = entry.state, machine.state
        if after is before and not actions:
            return
        self.changed_regions[name] = replace(entry, state=after)
        passing = {"last_contact": 0.0, "lease_ends": 0.0, "connected": False, "since": 0.0}
        if replace(before, **passing) != replace(after, **passing):  # type: ignore[arg-type]
            self._durable = True
            self.stored_regions.add(name)
        for action in actions:
            if isinstance(action, EndSession):
                self.ended_sessions.append((name, action.session))
            elif isinstance(action, Record):
                self._take_record("", action)
            else:
                for job_id in self.jobs_in(name):
                    self.apply_to_job(job_id, action.event)

    @property
    def is_stored(self) -> bool:
        """Whether anything has changed that the store keeps."""
        known = self.events or self.commands or self.invitations or self.changed_users or self.report_cursor
        known = known or self.met or self.dropped_command or self.command_cursor
        durable = self._durable or bool(known or self.audits or self.weights)
        return bool(durable or self.revocations or self.removed_region or self.deletions)

    def to_change(self) -> Change:
        """Return the transaction for the store. It may be called in a thread, once nothing is added any more."""
        changed = [(name in self._changed_rows, entry) for name, entry in self.changed_jobs.items()]
        return Change(
            jobs=tuple(_stored(entry) for whole, entry in changed if whole),
            progress=tuple(_progress(entry) for whole, entry in changed if not whole),
            regions=tuple(
                replace(entry.row, state_json=region_state_to_json(entry.state))
                for entry in self.changed_regions.values()
                if entry.row.name in self.stored_regions and entry.row.name != self.removed_region
            ),
            events=tuple(self.events),
            commands=tuple(self.commands),
            runs=tuple(self.runs),
            audit=tuple(self.audits),
            weights=tuple(self.weights),
            logs=tuple(self.logs),
            invitations=tuple(self.invitations),
            users=tuple(user for user in self.changed_users.values() if user is not None),
            removed_region=self.removed_region,
            deletions=tuple(self.deletions),
            revocations=tuple(self.revocations),
            removed_users=tuple(name for name, user in self.changed_users.items() if user is None),
            report_cursor=self.report_cursor,
            command_cursor=self.command_cursor,
            met=self.met,
            dropped_command=self.dropped_command,
            renumbered_region=self.renumbered_region,
        )

    def _with_user(self, data: object) -> object:
        return {**data, "by": self.by} if self.by and isinstance(data, dict) else data

    @staticmethod
    def _facts(data: object) -> dict[str, Any]:
        return {key: value for key, value in data.items() if key not in _NAMES} if isinstance(data, dict) else {}

    def _take_record(self, job_id: str, record: Record) -> None:
        if record.kind in AUDITED:
            self.audit(record.kind, job=job_id, region=record.region, **self._facts(record.data))
        self.events.append(
            EventRow(
                self.at,
                job_id,
                record.region,
                record.kind,
                record.text,
                to_json(self._with_user(record.data)),
                record.terminal,
            )
        )


def _progress(entry: JobEntry) -> JobProgress:
    state = entry.state
    digests = tuple(model.digest for model in models_of(state))
    return JobProgress(entry.row.id, job_state_to_json(state), state.phase, digests)


def _stored(entry: JobEntry) -> JobRow:
    ended_at = entry.state.finished_at if entry.state.terminal else 0.0
    return replace(entry.row, ended_at=ended_at, **vars(_progress(entry)))
