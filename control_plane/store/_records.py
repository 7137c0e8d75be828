"""What goes into the store and what comes out: frozen rows, and the change that one incoming message makes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class JobRow:
    """A job as it is stored."""

    id: str
    name: str
    request_id: str
    content_digest: str
    """Of spec and bundle together: what a request id stands for."""
    bundle_digest: str
    task_key: str
    """Jobs with the same key run the same code on the same data at the same batch; their speeds compare."""
    spec_json: str
    plan_json: str
    state_json: str
    phase: str
    created_at: float
    result_json: str = ""
    """Empty until the job ended."""
    user: str = ""
    """Who submitted it; empty: the operator."""
    unpromised_worker_seconds: float = 0.0
    """That it has had, of a job without a promised deadline that has ended."""


@dataclass(frozen=True)
class EventRow:
    """One thing that happened."""

    at: float
    job: str
    region: str
    kind: str
    text: str
    data_json: str = "{}"
    terminal: bool = False
    cursor: int = 0
    """Given by the store; 0: not stored yet."""


@dataclass(frozen=True)
class RegionRow:
    """A region as it is stored."""

    name: str
    cloud: str
    agent_version: str
    catalogue_json: str
    state_json: str
    serials: tuple[str, ...]
    """Serial numbers of the certificates that are taken."""
    certificate_expires: float


@dataclass(frozen=True)
class Cursors:
    """How far the two directions of a region's conversation have come."""

    command_seq: int
    """Of the last command that was made."""
    command_cursor: int
    """Of the last command that the agent has stored."""
    report_cursor: int
    """Of the last report that was applied."""
    shared_seq: int | None = None
    """Of the last command that there was when the control plane began, where the agent has not connected since."""

    def older_than(self, taken: int) -> bool:
        """Whether an agent that has taken this command knows more than is stored here: it was put back from a copy."""
        return taken > (self.command_seq if self.shared_seq is None else self.shared_seq)


@dataclass(frozen=True)
class CommandRow:
    """A durable command to an agent."""

    region: str
    job: str
    payload: bytes
    seq: int = 0
    """Given by the store, 1, 2, 3 … for each region; 0: not stored yet."""


@dataclass(frozen=True)
class Invitation:
    """A one-time token for a region."""

    secret_hash: str
    region: str
    expires: float
    used_at: float = 0.0
    """0: not used."""


@dataclass(frozen=True)
class UserRow:
    """Who may submit jobs, besides the operator."""

    name: str
    token_hash: str
    promised_workers: int | None
    """The quota: that the promises to this user may hold at once, over all regions; None: any number."""
    created_at: float


@dataclass(frozen=True)
class LogRow:
    """One line of a job's log."""

    at: float
    job: str
    region: str
    source: str
    text: str
    cursor: int = 0


@dataclass(frozen=True)
class RunRow:
    """What an ended run, or a profile, taught about a task in a region."""

    job: str
    region: str
    task_key: str
    at: float
    samples_per_second: float
    """Of one worker."""
    model_bytes: int
    start_seconds: float
    profile_json: str = ""
    """`scheduler.tuning.TaskProfile`, where this was no job but a profile."""
    merge_json: str = ""
    """`scheduler.tuning.MergePoint`, where the workers of the region merged in a way that a model predicts."""
    kin_key: str = ""
    """Of tasks that it says something about, where nothing is known of their own code."""
    batch: int = 0
    """Samples of one worker in a step; 0: not known."""
    stage_pace: float = 0.0
    """A step's seconds over those that the profile alone predicted, where the model ran in stages; 0: it did not."""


@dataclass(frozen=True)
class WeightRow:
    """What one agent has found of a task before its first plan."""

    task_key: str
    region: str
    """Whose agent it was."""
    at: float
    parameters: int
    model_bytes: int
    """Of the flat model."""
    steps_json: str = "[]"
    """[batch, seconds] of one worker's steps there, the job's own batch first; none: they were not timed."""
    start_seconds: float = 0.0
    """Until the first step could be made; 0: not known."""
    note: str = ""
    """Why there are no steps."""


@dataclass(frozen=True)
class Change:
    """All that one incoming message changes; stored as a whole or not at all."""

    jobs: tuple[JobRow, ...] = ()
    regions: tuple[RegionRow, ...] = ()
    events: tuple[EventRow, ...] = ()
    commands: tuple[CommandRow, ...] = ()
    logs: tuple[LogRow, ...] = ()
    runs: tuple[RunRow, ...] = ()
    weights: tuple[WeightRow, ...] = ()
    invitations: tuple[Invitation, ...] = ()
    """New, or used now."""
    users: tuple[UserRow, ...] = ()
    """New, or changed."""
    removed_users: tuple[str, ...] = ()
    report_cursor: tuple[str, int] | None = None
    """Region and sequence of the report that this change applies."""
    command_cursor: tuple[str, int] | None = None
    """Region and sequence up to which its agent has stored commands."""
    met: tuple[str, int] | None = None
    """Region whose agent has begun a session, and the last command that it has taken."""
    dropped_command: tuple[str, int] | None = None
    """Region and sequence of a command that cannot be sent."""
    renumbered_region: str = ""
    """A region that has joined anew: its agent may have kept its state or lost it, so its reports may begin with any
    number. Commands keep theirs: what was not taken is still to be done."""


@dataclass(frozen=True)
class Committed:
    """A change as it was stored: with cursors and sequence numbers."""

    events: tuple[EventRow, ...] = ()
    commands: tuple[CommandRow, ...] = ()
    logged: bool = False
