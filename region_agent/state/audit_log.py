"""The region's own audit log: what the agent let run on its data, and what left the region.

It does not depend on what the control plane records, and each gives the other the head of its log, so that neither can
write its log again unnoticed.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from geofed_pb.bounds import clean
from geofed_pb.errors import GeofedError
from geofed_pb.security.audit import GENESIS, Head, bounded_texts, entry_line, head_line, header_line
from geofed_pb.security.signing import load_or_create_key
from geofed_pb.storage import Stored
from geofed_pb.v1 import agent_pb2
from region_agent.state.store import AgentStore, AuditEntry

__all__ = ["AUDIT_KEY", "RegionAudit", "exported"]

AUDIT_KEY = "audit.key"
"""Name of the file with the key that signs heads, in the agent's state directory."""
_JOB_BYTES = 100
"""Longest ID of a job, profile or probe in the log."""
_SIGNATURE_BYTES = 64
"""Bytes of a signature of Ed25519."""
_MOST_NAMES = 100
"""Removed files of one kind that an entry names; it counts all."""
_ENDS = frozenset({"finished", "failed", "stopped"})
"""States of a partition in which it trains no more."""
_TOLD = frozenset({*_ENDS, "published", "refused", "sent"})
"""States whose reports have the head of the log: what is recorded until then cannot be changed any more."""


class RegionAudit:
    """Records in the agent's database; what it records is stored before, or with, what it is about."""

    def __init__(
        self, store: AgentStore, key_file: Path, region: str, version: str, clock: Callable[[], float] = time.time
    ) -> None:
        """Open the log. Raises ``GeofedError("STATE_INVALID")`` if the key is damaged, or lost while it has entries."""
        self._store, self._region, self._version, self._clock = store, region, version, clock
        self._key = load_or_create_key(key_file, is_new=store.last_audit() is None)

    def of_start(
        self, command: agent_pb2.StartPartition, approved: str, *, checked: bool = False, waits: bool = False
    ) -> AuditEntry | None:
        """Return the entry of a partition that is stored, to start at once or to wait; None if it is recorded already.

        Args:
            approved: the region's rule for approvals.
            checked: whether the region has checked the user's signature.
            waits: for the approval of the region's operator.
        """
        kind, digest = "job.received" if waits else "job.started", _digest_of(command)
        last = self._store.last_of(_job(command.job), kind)
        if last is not None and last[1] == digest and self._store.is_open(command.job):
            return None
        return self._start(kind, command, approved, checked)

    def starting(
        self, command: agent_pb2.StartPartition, approved: str, *, checked: bool = False, approver: str = ""
    ) -> None:
        """Record that a stored partition starts now, unless it was recorded when it was stored.

        ``approver``: who has approved it, if it waited for that. Raises ``GeofedError("DISK_FULL")``.
        """
        job, digest = _job(command.job), _digest_of(command)
        last = self._store.last_of(job, "job.received", "job.started")
        started = self._store.last_of(job, "job.started")
        if last is not None and last == started and last[1] == digest:
            return
        entries = [self._start("job.started", command, approved, checked)]
        if last is not None and last != started:
            facts = {"received": last[0], "approver": approver}
            entries.insert(0, self._entry("job.approved", command.job, command.epoch, digest, **facts))
        self._store.add_audit(*entries, now=True)

    def _start(self, kind: str, command: agent_pb2.StartPartition, approved: str, checked: bool) -> AuditEntry:
        task, digest = command.task, _digest_of(command)
        return self._entry(
            kind,
            command.job,
            command.epoch,
            digest,
            command=digest,
            user=task.submission.user,
            user_key=task.submission.public_key,
            signature=task.submission.signature[:_SIGNATURE_BYTES].hex(),
            signature_checked=checked,
            code=task.bundle_digest,
            module=task.module,
            config=_digest(task.config_json.encode()),
            dataset=task.dataset,
            env=sorted(task.env),
            secrets=sorted(task.secrets),
            requirements=task.requirements,
            image=task.image,
            initial_model=task.initial_model,
            initial_adapter=task.initial_adapter,
            plan=_digest(command.plan.SerializeToString(deterministic=True)),
            regions=list(command.regions),
            approval=approved,
        )

    def measuring(self, id_: str, task: agent_pb2.TaskRef) -> None:
        """Record that a task's code is about to be profiled or probed on the region's data.

        Raises ``GeofedError("DISK_FULL")``, as `sending_shard` and `sending_model`.
        """
        submission = task.submission
        entry = self._entry("task.measured", id_, user=submission.user, code=task.bundle_digest, dataset=task.dataset)
        self._store.add_audit(entry, now=True)

    def sending_shard(self, job: str, data: dict[str, Any]) -> None:
        """Record that a shard is about to be sent to another region; attempts of one transfer once."""
        mark = _digest(json.dumps([data.get("to"), data.get("digest")]).encode())
        more = {name: value for name, value in data.items() if name != "epoch"}
        entry = self._entry("shard.sending", job, data.get("epoch", 0), mark, **more)
        self._store.add_audit(entry, unless=(mark,), now=True)

    def event(self, job: str, kind: str, data: dict[str, Any]) -> None:
        """Record an event of a job: data that have moved between regions."""
        self._store.add_audit(self._entry(kind, job, **data))

    def sending_model(self, job: str, digest: str, round_: int = 0, *, own: bool = False) -> None:
        """Record that a model is about to be sent to the control plane. ``own``: the region's own one."""
        self._store.add_audit(self._entry("model.sent", job, digest=digest, round=round_, own=own), now=True)

    def erased(self, items: Iterable[Stored], job: str = "") -> None:
        """Record what was removed of what the region kept: of a deleted job, or (empty) by the region's own rules."""
        by_kind: dict[str, list[Stored]] = {}
        for item in items:
            by_kind.setdefault(item.kind, []).append(item)
        for kind, gone in sorted(by_kind.items()):
            facts: dict[str, Any] = {
                "what": kind,
                "rule": "job.deleted" if job else "retention",
                "names": [clean(item.name) for item in gone[:_MOST_NAMES]],
                "count": len(gone),
                "bytes": sum(item.bytes for item in gone),
            }
            self._store.add_audit(self._entry("data.erased", job, **facts))

    def releases(self) -> dict[str, int]:
        """Return how many releases each job with noise had made when a part of it ended, as far as that is recorded."""
        found: dict[str, int] = {}
        for text in self._store.audited("job.ended"):
            try:
                facts = json.loads(text)
                # Earlier versions recorded epsilon only.
                if facts.get("releases") is not None or facts.get("epsilon") is not None:
                    job = str(facts["job"])
                    found[job] = max(found.get(job, 0), int(facts.get("releases") or 0))
            except (ValueError, TypeError, KeyError, AttributeError):
                # `verify` finds a damaged entry, which must stop no job.
                continue
        return found

    def note(self, report: agent_pb2.PartitionReport) -> None:
        """Record the end of a partition or transfer, or its refusal, and put the head of the log into the report."""
        if report.state in _ENDS:
            self._note_end(report)
        elif report.state == "refused":
            entry = self._entry(
                "job.refused",
                report.job,
                report.epoch,
                report.error.code,
                code=report.error.code,
                reason=report.error.message,
                sent_bytes=dict(report.totals.sent_bytes),
            )
            self._store.add_audit(entry, unless=(report.error.code,))
        if report.state in _TOLD and (last := self._store.last_audit()) is not None:
            head = Head.sign(self._key, *last, self._clock(), self._region)
            report.audit_head.CopyFrom(agent_pb2.AuditHead(**asdict(head)))

    def _note_end(self, report: agent_pb2.PartitionReport) -> None:
        """Record an end once for each state of each start; one that was stopped after another end has ended before."""
        job, beginnings = _job(report.job), ("job.received", "job.started", "shard.sending")
        last = self._store.last_of(job, *beginnings, epoch=report.epoch)
        if last is None and report.state == "stopped":
            return  # The control plane may stop what has never been here.
        started = last[0] if last is not None else 0
        ends = sorted(_ENDS) if report.state == "stopped" else [report.state]
        entry = self._entry(
            "job.ended",
            report.job,
            report.epoch,
            f"{started} {report.state}",
            started=started or None,
            state=report.state,
            error=report.error.code,
            rounds=report.round,
            samples=report.samples,
            model=report.model_digest,
            sent_bytes=dict(report.totals.sent_bytes),
            received_bytes=dict(report.totals.received_bytes),
            usd=sum(money.usd for money in report.totals.money),
            epsilon=report.privacy.epsilon if report.HasField("privacy") else None,
            releases=report.privacy.releases if report.HasField("privacy") else None,
            data=dict(report.data),
        )
        self._store.add_audit(entry, unless=[f"{started} {state}" for state in ends])

    def _entry(self, kind: str, job: str, epoch: int = 0, mark: str = "", **facts: Any) -> AuditEntry:
        told = {"at": self._clock(), "kind": kind, "job": _job(job), "version": self._version, **bounded_texts(facts)}
        if epoch:
            told["epoch"] = epoch
        return AuditEntry(kind, _job(job), epoch, mark, told)


def exported(state_dir: Path, federation: str, region: str) -> Iterator[str]:
    """Yield the lines of the log's file, with a new signed head; the agent may run meanwhile.

    Raises ``GeofedError``: UNAVAILABLE if no agent has run with the state directory, CONFIG_INVALID for a damaged key.
    """
    database, key_file = state_dir / "agent.db", state_dir / AUDIT_KEY
    if not database.exists() or not key_file.exists():
        raise GeofedError("UNAVAILABLE", f"no agent has run with {state_dir} yet")
    yield header_line(federation, region)
    seq, hash_ = 0, GENESIS
    try:
        with closing(sqlite3.connect(f"{database.resolve().as_uri()}?mode=ro", uri=True)) as db:
            for row in db.execute("select seq, text, hash from audit order by seq"):
                seq, text, hash_ = row
                yield entry_line(text, hash_)
    except sqlite3.Error as error:
        raise GeofedError("UNAVAILABLE", f"{database} cannot be read: {error}") from None
    key = load_or_create_key(key_file, is_new=False)
    yield head_line(Head.sign(key, seq, hash_, time.time(), region), key, federation)


def _digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def _digest_of(command: agent_pb2.StartPartition) -> str:
    return _digest(command.SerializeToString(deterministic=True))


def _job(job: str) -> str:
    return clean(job, _JOB_BYTES)
