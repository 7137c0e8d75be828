"""The region's own audit log: what it says of a job, what it tells of itself, and what becomes of changes to it."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geofed_pb.errors import GeofedError
from geofed_pb.rpc import to_proto
from geofed_pb.security.audit import AuditBroken, Head, bounded_facts, entry_text, verify
from geofed_pb.v1 import agent_pb2, common_pb2
from region_agent.state.audit_log import AUDIT_KEY, RegionAudit, exported
from region_agent.state.store import AgentStore


@pytest.fixture
def store(tmp_path: Path) -> AgentStore:
    return AgentStore(tmp_path / "agent.db")


@pytest.fixture
def log(store: AgentStore, tmp_path: Path) -> RegionAudit:
    return RegionAudit(store, tmp_path / AUDIT_KEY, "a", "1.2.3", lambda: 5.0)


def start(job: str = "j1", epoch: int = 1) -> agent_pb2.StartPartition:
    submission = common_pb2.Submission(user="ann", public_key="ed25519:abc")
    task = agent_pb2.TaskRef(
        bundle_digest="sha256:1", module="task.py", dataset="digits", config_json="{}", submission=submission
    )
    return agent_pb2.StartPartition(job=job, epoch=epoch, region="a", regions=["a", "b"], task=task)


def report(state: str, epoch: int = 1, **more: Any) -> agent_pb2.PartitionReport:
    return agent_pb2.PartitionReport(job="j1", epoch=epoch, state=state, round=3, samples=90, **more)


def refused(log: RegionAudit, command: agent_pb2.StartPartition, error: GeofedError) -> None:
    log.note(agent_pb2.PartitionReport(job=command.job, epoch=command.epoch, state="refused", error=to_proto(error)))


def entries(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in exported(folder, "lab", "a")]
    return [json.loads(line["entry"]) for line in lines if "entry" in line]


def test_it_says_what_ran_on_which_data_and_what_left(store: AgentStore, log: RegionAudit, tmp_path: Path) -> None:
    store.took_start(1, "j1", b"", "key", log.of_start(start(), "every"))
    assert log.of_start(start(), "every") is None, "a command that is repeated"
    totals = agent_pb2.MeterTotals(sent_bytes={"b": 70}, received_bytes={"b": 60})
    log.note(report("training", totals=totals))
    privacy = agent_pb2.Privacy(epsilon=float("inf"), delta=1e-5, releases=3)
    log.note(report("finished", totals=totals, model_digest="sha256:7", privacy=privacy))
    log.note(report("stopped"))
    log.sending_model("j1", "sha256:9", 3)
    log.event("j1", "shard.sent", {"to": "b", "bytes": 12})
    refused(log, start("j2"), GeofedError("FORBIDDEN", "not here"))
    store.took_start(2, "j1", b"", "key", log.of_start(start(epoch=2), "none"))
    log.note(report("failed", epoch=2, error=common_pb2.Error(code="TASK_FAILED")))
    found = entries(tmp_path)
    assert [(one["seq"], one["kind"], one["job"]) for one in found] == [
        (1, "job.started", "j1"), (2, "job.ended", "j1"), (3, "model.sent", "j1"), (4, "shard.sent", "j1"),
        (5, "job.refused", "j2"), (6, "job.started", "j1"), (7, "job.ended", "j1"),
    ]  # fmt: skip
    first, end, model, shard, refusal, _, failed = found
    assert (first["user"], first["code"], first["dataset"]) == ("ann", "sha256:1", "digits")
    assert (first["regions"], first["approval"], first["version"]) == (["a", "b"], "every", "1.2.3")
    assert (end["state"], end["sent_bytes"], end["model"], end["epsilon"]) == ("finished", {"b": 70}, "sha256:7", None)
    assert (model["digest"], model["round"], model["own"]) == ("sha256:9", 3, False)
    assert (shard["to"], shard["bytes"]) == ("b", 12)
    assert (refusal["code"], refusal["reason"]) == ("FORBIDDEN", "not here")
    assert (failed["epoch"], failed["error"]) == (2, "TASK_FAILED")


def took(store: AgentStore, log: RegionAudit, command: agent_pb2.StartPartition) -> None:
    store.took_start(1, command.job, command.SerializeToString(), "key", log.of_start(command, "none"))


def test_other_code_under_the_same_job_and_epoch_is_another_start(
    store: AgentStore, log: RegionAudit, tmp_path: Path
) -> None:
    good, evil = start(), start()
    evil.task.bundle_digest, evil.task.dataset, evil.task.submission.user = "sha256:evil", "patients", "mallory"
    for command in (good, good, evil, evil):
        took(store, log, command)
    log.note(report("finished"))
    for command in (good, evil):
        took(store, log, command)
        log.note(report("finished", model_digest="sha256:stolen"))
        log.note(report("stopped"))
    store.took_stop(2, "j1", discard=False)
    store.forget("j1")
    took(store, log, evil)
    log.note(report("stopped"))
    found = [(one["seq"], one["kind"], one.get("code"), one.get("started")) for one in entries(tmp_path)]
    assert found == [
        (1, "job.started", "sha256:1", None), (2, "job.started", "sha256:evil", None), (3, "job.ended", None, 2),
        (4, "job.started", "sha256:1", None), (5, "job.ended", None, 4), (6, "job.started", "sha256:evil", None),
        (7, "job.ended", None, 6), (8, "job.started", "sha256:evil", None), (9, "job.ended", None, 8),
    ]  # fmt: skip
    assert (entries(tmp_path)[4]["model"], entries(tmp_path)[4]["epoch"]) == ("sha256:stolen", 1)


def test_a_partition_that_is_still_draining_does_not_hide_the_end_of_the_next(
    store: AgentStore, log: RegionAudit, tmp_path: Path
) -> None:
    took(store, log, start())
    log.note(report("stopped"))
    log.note(report("finished", model_digest="sha256:7"))
    log.note(report("finished", model_digest="sha256:8"))
    ends = [(one["state"], one["model"]) for one in entries(tmp_path) if one["kind"] == "job.ended"]
    assert ends == [("stopped", ""), ("finished", "sha256:7")]


def test_a_damaged_entry_hinders_no_job(store: AgentStore, log: RegionAudit, tmp_path: Path) -> None:
    took(store, log, start())
    with sqlite3.connect(tmp_path / "agent.db") as database:
        database.execute("update audit set text = '{'")
    took(store, log, start(epoch=2))
    ended = report("finished", epoch=2)
    log.note(ended)
    assert ended.audit_head.seq == 3
    with pytest.raises(AuditBroken, match="entry 1 is not the one that was recorded here"):
        verify(exported(tmp_path, "lab", "a"))


def test_entries_are_bounded_and_a_refusal_is_recorded_once(
    store: AgentStore, log: RegionAudit, tmp_path: Path
) -> None:
    for code, text in (("FORBIDDEN", "x" * 90_000), ("FORBIDDEN", "y"), ("LIMIT_EXCEEDED", "z\u2028")):
        for epoch in (1, 2):
            refused(log, start("j" * 4_000_000, epoch), GeofedError(code, text))
    log.measuring("p" * 4_000_000, agent_pb2.TaskRef(dataset="d\ud7ff" * 9000))
    wide = start()
    wide.task.submission.user, wide.task.module = "u\u2028" * 9000, "m" * 90_000
    took(store, log, wide)
    found = entries(tmp_path)
    assert [one["kind"] for one in found] == ["job.refused"] * 4 + ["task.measured", "job.started"]
    assert all(len(json.dumps(one)) < 30_000 and len(one["job"].encode()) <= 100 for one in found)
    lines = list(exported(tmp_path, "lab", "a"))
    assert "\n".join(lines).splitlines() == lines, "no character in an entry ends a line"
    assert verify(lines).head.seq == 6


@pytest.mark.parametrize("what", ["model", "shard", "task"])
def test_what_cannot_be_recorded_does_not_happen(
    what: str, store: AgentStore, log: RegionAudit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from region_agent.state import store as module

    def full(*_: Any) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    def begin() -> None:
        match what:
            case "model":
                log.sending_model("j1", "sha256:9", 3)
            case "shard":
                log.sending_shard("j1", {"to": "b", "digest": "sha256:5", "bytes": 7, "epoch": 2})
            case "task":
                log.measuring("probe-1", agent_pb2.TaskRef(dataset="digits"))

    with monkeypatch.context() as patched:
        patched.setattr(module, "_append_audit", full)
        with pytest.raises(GeofedError) as caught:
            begin()
    assert caught.value.code == "DISK_FULL"
    store.took(1)
    assert entries(tmp_path) == []
    begin()
    begin()
    assert len(entries(tmp_path)) == (1 if what == "shard" else 2), "attempts of one transfer once"


def test_a_job_that_waits_for_approval(store: AgentStore, log: RegionAudit, tmp_path: Path) -> None:
    def received(command: agent_pb2.StartPartition) -> None:
        entry = log.of_start(command, "every", checked=True, waits=True)
        store.took_start(1, command.job, command.SerializeToString(), "key", entry)

    command = start()
    command.task.env["TOKEN"], command.task.submission.signature = "value", b"\x01" * 64
    received(command)
    received(command)
    log.starting(command, "every", checked=True, approver="eve")
    log.starting(command, "every", checked=True, approver="eve")
    log.note(report("finished", data={"train": "hmac-sha256:00"}))
    received(start("j2"))
    log.note(agent_pb2.PartitionReport(job="j2", epoch=1, state="stopped"))
    log.note(agent_pb2.PartitionReport(job="never here", epoch=1, state="stopped"))
    found = entries(tmp_path)
    assert [(one["kind"], one["job"]) for one in found] == [
        ("job.received", "j1"), ("job.approved", "j1"), ("job.started", "j1"), ("job.ended", "j1"),
        ("job.received", "j2"), ("job.ended", "j2"),
    ]  # fmt: skip
    assert (found[1]["approver"], found[3]["data"], found[5]["data"]) == ("eve", {"train": "hmac-sha256:00"}, {})
    assert (found[1]["received"], found[3]["started"], found[5]["started"]) == (1, 3, 5)
    for one in (found[0], found[2]):
        assert (one["env"], one["signature"], one["signature_checked"]) == (["TOKEN"], "01" * 64, True)
        assert "value" not in json.dumps(one)


def test_a_full_disk_does_not_double_an_end(
    store: AgentStore, log: RegionAudit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from region_agent.state import store as module

    def full(*_: Any) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    took(store, log, start())
    monkeypatch.setattr(module, "_append_audit", full)
    for state in ("failed", "failed", "stopped"):
        log.note(report(state))
    monkeypatch.undo()
    store.took(2)
    assert [(one["kind"], one.get("state")) for one in entries(tmp_path)] == [
        ("job.started", None), ("job.ended", "failed"),
    ]  # fmt: skip


@pytest.mark.parametrize("state", ["finished", "failed", "stopped", "published", "sent"])
def test_reports_of_an_end_have_the_head_that_others_keep(
    store: AgentStore, log: RegionAudit, tmp_path: Path, state: str
) -> None:
    store.took_start(1, "j1", b"", "key", log.of_start(start(), "none"))
    running, ended = report("training"), report(state)
    log.note(running)
    log.note(ended)
    assert not running.HasField("audit_head")
    head = {field.name: value for field, value in ended.audit_head.ListFields()}
    lines = list(exported(tmp_path, "lab", "a"))
    found = verify(lines, witnesses=[Head.read(head)])
    assert (found.region, found.witnessed_seq) == ("a", len(lines) - 2)
    with sqlite3.connect(tmp_path / "agent.db") as database:
        text = database.execute("select text from audit where seq = 1").fetchone()[0]
        database.execute("update audit set text = ? where seq = 1", (text.replace("ann", "eve"),))
    with pytest.raises(AuditBroken, match="entry 1 is not the one that was recorded here"):
        verify(exported(tmp_path, "lab", "a"), witnesses=[Head.read(head)])


def test_a_job_starts_only_with_its_entry(
    store: AgentStore, log: RegionAudit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from region_agent.state import store as module

    def full(*_: Any) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    entry = log.of_start(start(), "none")
    monkeypatch.setattr(module, "_append_audit", full)
    with pytest.raises(GeofedError) as caught:
        store.took_start(1, "j1", b"", "key", entry)
    assert caught.value.code == "DISK_FULL"
    assert store.partition("j1") is None
    log.event("j1", "shard.sent", {})
    monkeypatch.undo()
    assert store.last_audit() is None
    store.took_start(1, "j1", b"", "key", entry)
    kinds = [one["kind"] for one in entries(tmp_path)]
    assert kinds == ["shard.sent", "job.started"], "what has happened is recorded once there is space"


def test_the_key_stays_and_a_damaged_one_is_refused(store: AgentStore, log: RegionAudit, tmp_path: Path) -> None:
    refused(log, start(), GeofedError("FORBIDDEN", "no"))
    keys = {json.loads(list(exported(tmp_path, "lab", "a"))[-1])["head"]["public_key"] for _ in range(2)}
    assert len(keys) == 1
    assert (tmp_path / AUDIT_KEY).stat().st_mode & 0o777 == 0o600
    (tmp_path / AUDIT_KEY).rename(tmp_path / "lost")
    with pytest.raises(GeofedError, match="is missing, which has signed the audit log"):
        RegionAudit(store, tmp_path / AUDIT_KEY, "a", "1")
    assert not (tmp_path / AUDIT_KEY).exists()
    (tmp_path / AUDIT_KEY).write_text("?")
    with pytest.raises(GeofedError) as caught:
        RegionAudit(store, tmp_path / AUDIT_KEY, "a", "1")
    assert caught.value.code == "STATE_INVALID"
    with pytest.raises(GeofedError, match="no agent has run with"):
        list(exported(tmp_path / "elsewhere", "lab", "a"))


@given(st.dictionaries(st.text(max_size=5), st.floats() | st.text(max_size=9) | st.none() | st.integers(), max_size=4))
def test_every_entry_can_be_read_again(facts: dict[str, Any]) -> None:
    bounded = bounded_facts({**facts, "long": "x" * (20 << 10)})
    assert json.loads(entry_text(1, bounded)) == {"seq": 1, **bounded} | {"seq": bounded.get("seq", 1)}
    assert set(bounded["long"]) == {"sha256", "bytes"}
