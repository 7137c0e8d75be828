"""Rows of the store as frozen dataclasses, and the change that one message causes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class JobRow:
    """A stored job."""

    id: str
    name: str
    request_id: str
    content_digest: str
    """Digest of spec and bundle together; a repeated request ID must have the same."""
    bundle_digest: str
    task_key: str
    """Key of the task: jobs with the same key run the same code on the same data, so that their speeds compare."""
    spec_json: str
    plan_json: str
    state_json: str
    phase: str
    created_at: float
    result_json: str = ""
    """Empty until the job has ended."""
    user: str = ""
    """Name of the user who submitted the job; empty: the operator."""
    unpromised_worker_seconds: float = 0.0
    """Worker seconds used by an ended job without a promised deadline; else 0."""
    signature_json: str = ""
    """The submitter's signature over specification and code; empty: unsigned."""
    shared_with: tuple[str, ...] = ()
    """Users that may read the job beside its own."""
    ended_at: float = 0.0
    """0: it has not ended."""
    model_digests: tuple[str, ...] = ()
    """Digests of its models' blobs."""
    secure_aggregation: bool = False


@dataclass(frozen=True)
class JobProgress:
    """What changes in a stored job while it runs. The rest of its row may be ten times as large."""

    id: str
    state_json: str
    phase: str
    model_digests: tuple[str, ...] = ()


@dataclass(frozen=True)
class JobUse:
    """What a job keeps in the control plane's folder, and since when it is over."""

    id: str
    user: str
    phase: str
    ended_at: float
    bundle_digest: str
    model_digests: tuple[str, ...]


@dataclass(frozen=True)
class RowUse:
    """Rows of one table that are measured and removed together."""

    table: str
    job: str
    """Job that they name, which need not exist; empty: none."""
    rows: int
    bytes: int
    """Length of their texts."""
    at: float
    """Unix time of the latest one."""


@dataclass(frozen=True)
class Deletion:
    """A job that a user has deleted."""

    job: str
    user: str
    """Whose it was; empty: the operator's."""
    by: str
    at: float
    created_at: float
    """When the job was submitted."""
    unpromised_worker_seconds: float
    """As of the job's row: a deleted job still counts for its user's place in the queue."""


@dataclass(frozen=True)
class EventRow:
    """An event of the history."""

    at: float
    job: str
    region: str
    kind: str
    text: str
    data_json: str = "{}"
    terminal: bool = False
    cursor: int = 0
    """Assigned by the store; 0: not stored yet."""


@dataclass(frozen=True)
class RegionRow:
    """A stored region."""

    name: str
    cloud: str
    agent_version: str
    catalogue_json: str
    state_json: str
    serials: tuple[str, ...]
    """Serial numbers of the valid certificates."""
    certificate_expires: float


@dataclass(frozen=True)
class Cursors:
    """Sequence numbers of both directions of a region's message streams."""

    command_seq: int
    """Sequence number of the last command created."""
    command_cursor: int
    """Sequence number of the last command that the agent has stored."""
    report_cursor: int
    """Sequence number of the last report applied."""
    shared_seq: int | None = None
    """`command_seq` when the control plane started; None once the agent has connected since."""

    def older_than(self, taken: int) -> bool:
        """Whether an agent that has received command `taken` is ahead of the store: the store was restored from a
        backup."""
        return taken > (self.command_seq if self.shared_seq is None else self.shared_seq)


@dataclass(frozen=True)
class CommandRow:
    """A durable command to an agent."""

    region: str
    job: str
    payload: bytes
    seq: int = 0
    """Assigned by the store: 1, 2, 3 … for each region; 0: not stored yet."""


@dataclass(frozen=True)
class InvitationRow:
    """A one-time token for a region."""

    secret_hash: str
    region: str
    expires: float
    used_at: float = 0.0
    """When it was used; 0: not used."""


@dataclass(frozen=True)
class Revocation:
    """A certificate that is not valid any more."""

    serial: str
    region: str
    expires: float
    """Time after which the certificate has expired anyway."""


@dataclass(frozen=True)
class UserRow:
    """A user who may submit jobs, in addition to the operator."""

    name: str
    token_hash: str
    promised_workers: int | None
    """Quota: limit of workers reserved for the user's promises at any time, over all regions; None: unlimited."""
    created_at: float
    public_key: str = ""
    """Public key that the user's submissions are signed with; empty: none is registered."""
    role: str = "member"
    """What the user may do: "viewer", "member", "auditor" or "operator"."""
    token_expires_at: float = 0.0
    """Unix seconds after which the token is refused; 0: never."""
    identity: str = ""
    """Who the user is at the identity provider. Empty: the user cannot sign in."""
    subject: str = ""
    """Hash of the issuer and the account there that the user has first signed in with; empty: has not yet."""
    sign_ins_json: str = ""
    """Tokens of sign-ins: [hash, Unix seconds when it expires, hash of the ID token], the oldest first; empty: none."""


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
    """Measurements of a task in a region, by an ended run or a profile."""

    job: str
    region: str
    task_key: str
    at: float
    samples_per_second: float
    """Speed of one worker."""
    model_bytes: int
    start_seconds: float
    profile_json: str = ""
    """`scheduler.tuning.Profile` of a profile; empty for a run."""
    merge_json: str = ""
    """`scheduler.tuning.MergePoint` of the region's workers; empty if it has one, or they changed."""
    kin_key: str = ""
    """Key of all versions of the task, for versions without own measurements."""
    batch: int = 0
    """Samples of one worker in a step; 0: unknown."""
    stage_pace: float = 0.0
    """Ratio of measured to profiled step time of a pipeline; 0: not a pipeline."""
    start_function_seconds: float | None = None
    """Seconds for which a worker's function was billed besides those from the first step to the job's end; None:
    unknown."""
    start_server_seconds: float | None = None
    """The same of the parameter server."""
    round_end_seconds: float | None = None
    """Seconds of a round for which workers stood still beyond what was predicted; None: regions did not wait for each
    other."""
    background_end_seconds: float | None = None
    """The same where they exchanged in the background; None: they did not."""
    rest_seconds: float | None = None
    """Seconds from the end of the training to that of the job; None: unknown."""
    round_work_seconds: float | None = None
    """Seconds of a round besides its steps and its end; None: unknown."""
    sent_share: float | None = None
    """Part of the updates that has passed the filter of the job's WAN policy; None: it has none."""


@dataclass(frozen=True)
class WeightRow:
    """Result of a task's probe by one agent."""

    task_key: str
    region: str
    """Region of the agent."""
    at: float
    parameters: int
    model_bytes: int
    """Size of the flat model."""
    steps_json: str = "[]"
    """[batch, seconds, bytes of the GPU's memory] of one worker's steps, the job's own batch first; empty: not timed.
    Rows of earlier versions are without the bytes, which are 0 without a GPU."""
    start_seconds: float = 0.0
    """Time until the first step could begin; 0: unknown."""
    note: str = ""
    """Why no steps were timed, or other warnings."""
    held_bytes: int = 0
    """Size of all tensors of the model, also of those that are not trained, and of the gradients; 0: unknown."""
    batch_norms_json: str = "[]"
    """Names of the first layers with running statistics of batches."""
    labels_json: str = "{}"
    """By region: samples of its training split, and [label, number] of those that it has counted and reported."""
    gpu_lacks_json: str = "{}"
    """Regions whose GPU has too little memory: the smallest batch that did not fit, what was told of it, and
    when."""


@dataclass(frozen=True)
class AuditRow:
    """An entry of the audit log."""

    text: str
    """JSON object."""
    seq: int = 0
    """Its number, from 1; assigned when it is stored."""
    hash: str = ""
    """Assigned when it is stored (`geofed_pb.security.audit`)."""


@dataclass(frozen=True)
class Change:
    """All changes caused by one message, stored in one transaction."""

    jobs: tuple[JobRow, ...] = ()
    """New jobs, and those of which more has changed than their progress."""
    progress: tuple[JobProgress, ...] = ()
    """Of other stored jobs."""
    regions: tuple[RegionRow, ...] = ()
    events: tuple[EventRow, ...] = ()
    commands: tuple[CommandRow, ...] = ()
    logs: tuple[LogRow, ...] = ()
    runs: tuple[RunRow, ...] = ()
    weights: tuple[WeightRow, ...] = ()
    invitations: tuple[InvitationRow, ...] = ()
    """New or just used invitations."""
    users: tuple[UserRow, ...] = ()
    """New or changed users."""
    removed_users: tuple[str, ...] = ()
    deletions: tuple[Deletion, ...] = ()
    """Jobs to remove with their events, log and measurements."""
    removed_region: str = ""
    """Region to forget with its commands and invitations; empty: none."""
    revocations: tuple[Revocation, ...] = ()
    """Newly revoked certificates."""
    audit: tuple[Mapping[str, Any], ...] = ()
    """New entries of the audit log, without their numbers."""
    report_cursor: tuple[str, int] | None = None
    """Region and sequence number of the report that is applied."""
    command_cursor: tuple[str, int] | None = None
    """Region and sequence number up to which its agent has stored commands."""
    met: tuple[str, int] | None = None
    """Region whose agent has opened a session, and the last command that the agent has received."""
    dropped_command: tuple[str, int] | None = None
    """Region and sequence number of a command that cannot be sent."""
    renumbered_region: str = ""
    """Region that has joined again. Its agent may have lost its state, so that its reports may start at any number.
    Pending commands keep their numbers."""


@dataclass(frozen=True)
class Committed:
    """A stored change, with the assigned cursors and sequence numbers."""

    events: tuple[EventRow, ...] = ()
    commands: tuple[CommandRow, ...] = ()
    logged: bool = False
    """Whether log lines were stored."""
    audit: AuditRow | None = None
    """The last new entry of the audit log."""


@dataclass(frozen=True)
class Leadership:
    """Which control plane may write to the store."""

    epoch: int
    """Increases whenever a control plane takes over; transactions of earlier epochs are refused."""
    beats: int
    """Increases with each sign of life of the leader."""
    holder: str
    """Name and address of the leader; empty: none."""
