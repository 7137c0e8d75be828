"""Approvals of the region's operator: what waits, and what may run. They are files, which the commands and the agent
share."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from geofed_pb.bounds import NAME_BYTES, clean
from geofed_pb.errors import GeofedError
from geofed_pb.files.durable import write_durably
from geofed_pb.v1 import agent_pb2

__all__ = ["Approvals", "Pending"]

_PROBE = "probe-"
"""Begins the ID of a probe."""


@dataclass(frozen=True)
class Pending:
    """Something that waits for the operator's approval."""

    job: str
    """ID of the job, profile or probe."""
    user: str
    code: str
    """Digest of the code."""
    dataset: str
    mark: str
    """Identifies user, key, code, its environment variables, secrets and dataset together."""
    since: float
    """Unix seconds."""
    secrets: tuple[str, ...] = ()
    """Names of the region's secrets that the code may read."""
    image: str = ""
    """Container image that the code runs in; empty: the region's own."""


class Approvals:
    """The approvals in a state directory."""

    def __init__(self, state_dir: Path, rule: Literal["none", "first-run", "every"] = "every") -> None:
        """``rule``: `policy.approve` of the region file."""
        self._folder, self._rule = state_dir / "approvals", rule

    def waits(self, job: str, task: agent_pb2.TaskRef) -> bool:
        """Whether a job waits for an approval; if so, it is listed until `done` or `approve`."""
        found = _pending(job, task)
        if self._is_approved(job, found.mark):
            return False
        if not self._waiting(job).exists():
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_durably(self._waiting(job), [json.dumps(asdict(found)).encode()], mode=0o600)
        return True

    def is_approved(self, job: str, task: agent_pb2.TaskRef) -> bool:
        """Whether a job may run; `waits` lists it if not."""
        return self._is_approved(job, _pending(job, task).mark)

    def require(self, id_: str, task: agent_pb2.TaskRef) -> None:
        """Raise ``GeofedError("FORBIDDEN")`` if a profile or probe waits for an approval.

        A probe is never repeated with its ID, so its code is listed instead, under one ID however often it is tried.
        """
        mark = _pending(id_, task).mark
        listed = f"code-{mark[:12]}" if id_.startswith(_PROBE) else id_
        if self._is_approved(listed, mark):
            return
        text = f"the code of user {task.submission.user} waits for the approval of the region's operator"
        hint = f"`geofed agent approve {listed}` there; then repeat the command"
        if self._rule == "every" and listed != id_:
            text, hint = "the region's operator approves every run, so nothing is probed", "submit the job"
        else:
            self.waits(listed, task)
        raise GeofedError("FORBIDDEN", text, hint=hint)

    def _is_approved(self, job: str, mark: str) -> bool:
        # The mark counts: the control plane could give another job's ID to other code.
        if self._rule == "none" or self._mark_of(job) == mark:
            return True
        return self._rule == "first-run" and self._mark_of(mark) == mark

    def _mark_of(self, name: str) -> str:
        """Return the mark of what was approved under a name; empty: nothing."""
        try:
            return self._approved(name).read_text().partition("\n")[0]
        except FileNotFoundError:
            return ""

    def approver(self, job: str, task: agent_pb2.TaskRef) -> str:
        """Return who has approved a job or, for `first-run`, its code before; empty: nobody, or not known."""
        mark = _pending(job, task).mark
        for name in (job, mark):
            if self._mark_of(name) == mark:
                return self._approved(name).read_text().partition("\n")[2].strip()
        return ""

    def pending(self) -> Iterator[Pending]:
        """Yield what waits, the oldest first."""
        files = sorted(self._folder.glob("*.waiting"), key=lambda path: path.stat().st_mtime)
        for path in files:
            yield Pending(**json.loads(path.read_text()))

    def approve(self, job: str, approver: str = "") -> Pending:
        """Approve what waits: the job and, for `first-run`, the user's code. ``approver``: who does.

        Raises ``GeofedError("JOB_NOT_FOUND")``.
        """
        try:
            found = Pending(**json.loads(self._waiting(job).read_text()))
        except FileNotFoundError:
            raise GeofedError(
                "JOB_NOT_FOUND", f"{job} waits for no approval", hint="see `geofed agent pending`"
            ) from None
        for name in (found.mark, job):
            write_durably(self._approved(name), [f"{found.mark}\n{clean(approver, NAME_BYTES)}".encode()], mode=0o600)
        self._waiting(job).unlink(missing_ok=True)
        return found

    def done(self, job: str) -> None:
        """Forget a job that has ended."""
        for path in (self._waiting(job), self._approved(job)):
            path.unlink(missing_ok=True)

    def _waiting(self, job: str) -> Path:
        return self._folder / f"{_name(job)}.waiting"

    def _approved(self, name: str) -> Path:
        return self._folder / f"{_name(name)}.approved"


def _pending(job: str, task: agent_pb2.TaskRef) -> Pending:
    submission = task.submission
    facts = [submission.user, submission.public_key, task.bundle_digest, task.module, task.dataset]
    if task.env:
        facts.append(json.dumps(dict(task.env), sort_keys=True))
    if task.requirements:
        facts.append(json.dumps(["requirements", task.requirements]))
    if task.image:
        facts.append(json.dumps(["image", task.image]))
    secrets = tuple(sorted(clean(name, NAME_BYTES) for name in task.secrets))
    if secrets:
        facts.append(json.dumps(["secrets", *secrets]))
    mark = hashlib.sha256("\n".join(facts).encode()).hexdigest()
    return Pending(
        job, clean(submission.user), task.bundle_digest, clean(task.dataset), mark, time.time(), secrets,
        clean(task.image, NAME_BYTES),
    )  # fmt: skip


def _name(text: str) -> str:
    """Return an ID if it can be the name of a file. Raises ``GeofedError("CONFIG_INVALID")``."""
    if not text or len(text) > 100 or not all(letter.isalnum() or letter in "-_" for letter in text) or text[0] == "-":
        raise GeofedError("CONFIG_INVALID", f"{clean(text, 100)!r} is not the ID of a job")
    return text
