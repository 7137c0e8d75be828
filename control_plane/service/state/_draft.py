"""A draft collects all changes that one incoming message causes, to be stored in one transaction."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from control_plane.core import (
    EndSession,
    Failure,
    JobEvent,
    JobMachine,
    JobState,
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
from control_plane.service.rpc._wire import command_of, to_json
from control_plane.spec import JobSpec
from control_plane.store import (
    Change,
    CommandRow,
    Deletion,
    EventRow,
    Invitation,
    JobRow,
    LogRow,
    RegionRow,
    Revocation,
    RunRow,
    UserRow,
    WeightRow,
)
from geofed_pb.bounds import clean
from geofed_pb.errors import GeofedError
from scheduler import Plan
from scheduler import Region as Catalogue

OPERATOR = "operator"
"""User name of the holder of the operator's token; no other user may have it."""


@dataclass(frozen=True)
class JobEntry:
    """A job in memory."""

    row: JobRow
    state: JobState
    spec: JobSpec
    plan: Plan


@dataclass(frozen=True)
class RegionEntry:
    """A region in memory."""

    row: RegionRow
    state: RegionState
    catalogue: Catalogue | None
    """Catalogue that its agent has sent; None: the agent has never connected."""


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
    weights: list[WeightRow] = field(default_factory=list)
    logs: list[LogRow] = field(default_factory=list)
    invitations: list[Invitation] = field(default_factory=list)
    changed_users: dict[str, UserRow | None] = field(default_factory=dict)
    """None: removed."""
    removed_region: str = ""
    """Region that is forgotten; empty: none."""
    deletions: list[Deletion] = field(default_factory=list)
    revocations: list[Revocation] = field(default_factory=list)
    report_cursor: tuple[str, int] | None = None
    """Region and sequence number of the agent's report that this draft applies."""
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
    dropped_models: list[str] = field(default_factory=list)
    """Digests of models that their jobs keep no longer."""
    _durable: bool = False

    def job(self, job_id: str) -> JobEntry | None:
        """Return the job with the draft's changes; None: unknown or ended."""
        return self.changed_jobs.get(job_id) or self.jobs.get(job_id)

    def region(self, name: str) -> RegionEntry | None:
        """Return the region with the draft's changes; None: unknown."""
        return self.changed_regions.get(name) or self.regions.get(name)

    def add_job(self, entry: JobEntry) -> None:
        """Add a job, or replace it."""
        self.changed_jobs[entry.row.id] = entry
        self._durable = True

    def _state_of(self, region: str) -> RegionState:
        entry = self.region(region)
        return entry.state if entry is not None else RegionState(region)

    def put_region(self, entry: RegionEntry) -> None:
        """Add a region, or replace it."""
        self.changed_regions[entry.row.name] = entry
        self._durable = True

    def put_user(self, user: UserRow) -> None:
        """Add a user, or replace it."""
        self.changed_users[user.name] = user

    def remove_user(self, name: str) -> None:
        """Remove a user."""
        self.changed_users[name] = None

    def record(self, kind: str, text: str, *, region: str = "", job: str = "", data: object = None) -> None:
        """Add an event to the history."""
        self.events.append(
            EventRow(
                self.at, clean(job, 64), region, clean(kind, 64), clean(text), to_json(self._with_user(data or {}))
            )
        )

    def resend_commands(self, region: str, why: str) -> None:
        """Have the jobs send a region all their commands again, since one side has lost some state."""
        self.record("region.restored", f"commands are sent to region {region} again: {why}", region=region)
        for job_id in list(self.jobs | self.changed_jobs):
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
            row = replace(
                row,
                result_json=to_json(result_of(row, machine.state, entry.plan)),
                unpromised_worker_seconds=unpromised_worker_seconds(machine.state, entry.plan),
            )
            self.runs += runs_of(row, machine.state, entry.spec, entry.plan)
        self.changed_jobs[job_id] = replace(entry, row=row, state=machine.state)
        self._durable = self._durable or bool(actions)

    def settle(self, entry: JobEntry, region: str, report: Report) -> None:
        """Apply a region's report to an ended job: only its charges count."""
        state = with_late_charges(entry.state, region, report)
        if state == entry.state:
            return
        row = replace(
            entry.row,
            result_json=to_json(result_of(entry.row, state, entry.plan)),
            unpromised_worker_seconds=unpromised_worker_seconds(state, entry.plan),
        )
        self.add_job(replace(entry, row=row, state=state))

    def apply_to_region(self, name: str, event: RegionEvent) -> None:
        """Apply an event to a region's state machine, and the events that result from it to the jobs."""
        entry = self.region(name)
        if entry is None:
            return
        machine = RegionMachine(entry.state)
        actions = machine.handle(event)
        self.changed_regions[name] = replace(entry, state=machine.state)
        before, after = entry.state, machine.state
        passing = {"last_contact": 0.0, "lease_ends": 0.0, "connected": False, "since": 0.0}
        if replace(before, **passing) != replace(after, **passing):  # type: ignore[arg-type]
            self._durable = True
        for action in actions:
            if isinstance(action, EndSession):
                self.ended_sessions.append((name, action.session))
            elif isinstance(action, Record):
                self._take_record("", action)
            else:
                for job_id in list(self.jobs | self.changed_jobs):
                    self.apply_to_job(job_id, action.event)

    def to_change(self) -> Change | None:
        """Return the transaction for the store; None if nothing durable has changed."""
        known = self.events or self.commands or self.invitations or self.changed_users or self.report_cursor
        known = known or self.met or self.dropped_command
        if not (self._durable or known or self.weights or self.revocations or self.removed_region or self.deletions):
            return None
        return Change(
            jobs=tuple(_stored(entry) for entry in self.changed_jobs.values()),
            regions=tuple(
                replace(entry.row, state_json=region_state_to_json(entry.state))
                for entry in self.changed_regions.values()
                if entry.row.name != self.removed_region
            ),
            events=tuple(self.events),
            commands=tuple(self.commands),
            runs=tuple(self.runs),
            weights=tuple(self.weights),
            logs=tuple(self.logs),
            invitations=tuple(self.invitations),
            users=tuple(user for user in self.changed_users.values() if user is not None),
            removed_region=self.removed_region,
            deletions=tuple(self.deletions),
            revocations=tuple(self.revocations),
            removed_users=tuple(name for name, user in self.changed_users.items() if user is None),
            report_cursor=self.report_cursor,
            met=self.met,
            dropped_command=self.dropped_command,
            renumbered_region=self.renumbered_region,
        )

    def _with_user(self, data: object) -> object:
        return {**data, "by": self.by} if self.by and isinstance(data, dict) else data

    def _take_record(self, job_id: str, record: Record) -> None:
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


def _stored(entry: JobEntry) -> JobRow:
    state = entry.state
    return replace(
        entry.row,
        state_json=job_state_to_json(state),
        phase=state.phase,
        ended_at=state.finished_at if state.terminal else 0.0,
        model_digests=tuple(model.digest for model in models_of(state)),
    )
