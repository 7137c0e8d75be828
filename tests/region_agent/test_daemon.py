"""What the daemon does beside its partitions."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable
from io import FileIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.pki import Authority

from geofed_pb.errors import GeofedError
from geofed_pb.v1 import agent_pb2
from region_agent.capacity import set_preemptible_workers
from region_agent.config import RegionConfig
from region_agent.daemon import Agent, jobs
from region_agent.daemon.jobs import RegionJobs
from region_agent.gateway import GatewayClient
from region_agent.link.identity import Identity, JoinedFederation
from region_agent.partition.events import (
    Event,
    PartitionPrepared,
    Preempted,
    PsReady,
    PsStatusChanged,
    PsView,
    RecordEvent,
    Started,
    WorkerEnded,
)
from region_agent.partition.machine import PartitionMachine
from region_agent.partition.runner import PartitionRunner
from region_agent.partition.server.process import PsProcess
from region_agent.state.audit_log import exported
from region_agent.state.store import AgentStore
from sync.framing import digest_of


class _Played:
    """A partition without anything around it."""

    def __init__(self, job: str, workers: int) -> None:
        self.job, self.machine = job, PartitionMachine("east", workers, epoch=1, preemptible=True)
        for event in (Started(1), PartitionPrepared(), PsReady("east:1")):
            self.machine.handle(event)

    def preempt(self, workers: int) -> None:
        self.machine.handle(Preempted(workers))

    def finish(self) -> None:
        self.machine.handle(PsStatusChanged(PsView("finished")))
        for worker in range(self.machine.workers):
            self.machine.handle(WorkerEnded(worker, self.machine.attempt, "done"))
        assert self.machine.state == "finished"


def test_what_was_spent_is_not_known_after_a_restore(tmp_path: Path) -> None:
    config = RegionConfig.model_validate(
        {
            "apiVersion": "geofed/v1", "kind": "Region", "metadata": {"name": "east"}, "cloud": "test",
            "capacity": {"workers": 1}, "channel": {"path": str(tmp_path / "channel")},
            "datasets": {"scans": {
                "splits": {"train": {"uri": "/nowhere", "samples": 9}}, "privacy": {"epsilon": 1, "delta": 1e-5},
            }},
        }
    )  # fmt: skip
    Identity(tmp_path).store(JoinedFederation("east", "127.0.0.1:9", "test"), b"", b"", b"")
    agent = Agent(config, tmp_path)
    assert agent._privacy.spent("job") is None
    agent.jobs.state_restored()
    with pytest.raises(GeofedError, match="restored from a copy"):
        agent._privacy.rate("job")


def test_only_those_that_are_at_work_lose_preemptible_workers_the_latest_first(tmp_path: Path) -> None:
    config = RegionConfig.model_validate(
        {
            "apiVersion": "geofed/v1", "kind": "Region", "metadata": {"name": "east"}, "cloud": "test",
            "capacity": {"workers": 1, "preemptible": 6}, "channel": {"path": str(tmp_path / "channel")},
        }
    )  # fmt: skip
    Identity(tmp_path).store(JoinedFederation("east", "127.0.0.1:9", "test"), b"", b"", b"")
    agent = Agent(config, tmp_path)
    ended, first, second = _Played("ended", 4), _Played("first", 4), _Played("second", 2)
    ended.finish()
    agent.jobs.partitions = {played.job: played for played in (first, ended, second)}  # type: ignore[dict-item, misc]
    agent._update_capacity()
    assert (first.machine.workers, second.machine.workers) == (4, 2), "there are workers for all that train"
    set_preemptible_workers(tmp_path, 3)
    for _ in range(2):
        agent._update_capacity()
        assert (first.machine.workers, second.machine.workers) == (3, 0)


def _audited(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in exported(folder, "test", "east")]
    return [json.loads(line["entry"]) for line in lines if "entry" in line]


async def _until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110 - what is waited for knows of no event loop
            await asyncio.sleep(0.005)


def test_a_stop_that_a_crash_cut_short_is_carried_out_by_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = RegionConfig.model_validate(
        {
            "apiVersion": "geofed/v1", "kind": "Region", "metadata": {"name": "east"}, "cloud": "test",
            "capacity": {"workers": 1}, "channel": {"path": str(tmp_path / "channel")},
            "gateway": {"kind": "openfaas", "url": "http://127.0.0.1:9", "image": "i"},
        }
    )  # fmt: skip
    tls = Authority().region("east")
    Identity(tmp_path).store(
        JoinedFederation("east", "127.0.0.1:9", "test"), tls.key_pem, tls.certificate_pem, tls.ca_pem
    )
    store = AgentStore(tmp_path / "agent.db")
    start = agent_pb2.StartPartition(job="job-1", region="east", epoch=1)
    store.took_start(1, "job-1", start.SerializeToString(), "key")
    store.took_stop(2, "job-1", discard=True)
    store.close()
    for left in (tmp_path / "jobs" / "job-1" / "ps", tmp_path / "channel" / "job-1"):
        left.mkdir(parents=True)

    deleted: list[str] = []
    gateway_is_back = False

    async def delete(self: GatewayClient, name: str) -> None:
        if not gateway_is_back:
            raise GeofedError("GATEWAY_UNAVAILABLE", "x")
        deleted.append(name)

    async def run() -> AgentStore:
        agent = Agent(config, tmp_path)
        running = asyncio.create_task(agent.run())
        await _until(lambda: agent._store.reports_waiting())
        if gateway_is_back:
            await _until(lambda: not agent._store.stopped_partitions())
        agent.stopped.set()
        await running
        return AgentStore(tmp_path / "agent.db")

    async def listed(self: GatewayClient) -> list[object]:
        if not gateway_is_back:
            raise GeofedError("GATEWAY_UNAVAILABLE", "x")
        return []

    monkeypatch.setattr(GatewayClient, "delete", delete)
    monkeypatch.setattr(GatewayClient, "list", listed)
    monkeypatch.setattr(jobs, "_CLOSING_SECONDS", 0.1)
    store = asyncio.run(run())
    assert [row.job for row, _ in store.stopped_partitions()] == ["job-1"]
    store.close()
    gateway_is_back = True
    store = asyncio.run(run())
    assert store.partition("job-1") is None
    (name,) = deleted
    assert name.startswith("geofed-job-1-"), "with the mark of this region"
    told = [agent_pb2.FromAgent.FromString(raw).partition for _, raw in store.reports_after(0)]
    assert {(report.job, report.state) for report in told} == {("job-1", "stopped")}
    store.close()
    assert not (tmp_path / "jobs" / "job-1").exists()
    assert not (tmp_path / "channel" / "job-1").exists()


@pytest.mark.parametrize("approve", ["none", "every"])
@pytest.mark.parametrize("budget", [None, {"epsilon": 1.0, "delta": 1e-5}])
def test_a_budget_ends_jobs_without_noise_that_were_stored_before_it(
    budget: dict[str, float] | None, approve: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that runs when the agent starts again, and one that is approved then."""
    digits = {"residency": "region", "splits": {"train": {"uri": "/nowhere", "samples": 9}}, "privacy": budget}
    config = RegionConfig.model_validate(
        {
            "apiVersion": "geofed/v1", "kind": "Region", "metadata": {"name": "east"}, "cloud": "test",
            "capacity": {"workers": 1}, "channel": {"path": str(tmp_path / "channel")},
            "gateway": {"kind": "openfaas", "url": "http://127.0.0.1:9", "image": "i"},
            "policy": {"approve": approve}, "datasets": {"digits": digits},
        }
    )  # fmt: skip
    tls = Authority().region("east")
    Identity(tmp_path).store(
        JoinedFederation("east", "127.0.0.1:9", "test"), tls.key_pem, tls.certificate_pem, tls.ca_pem
    )
    plan = agent_pb2.PartitionPlan(workers=1, batch=1, rounds=1, steps_per_round=1)
    start = agent_pb2.StartPartition(
        job="job-1", region="east", epoch=1, plan=plan, task=agent_pb2.TaskRef(dataset="digits"), regions=["east"]
    )
    store = AgentStore(tmp_path / "agent.db")
    store.took_start(1, "job-1", start.SerializeToString(), "key")
    store.close()

    async def nothing(self: GatewayClient, *_: object) -> list[object]:
        return []

    async def never(self: PartitionRunner) -> None:
        await asyncio.Event().wait()

    for name in ("delete", "list", "list_secrets", "delete_secret"):
        monkeypatch.setattr(GatewayClient, name, nothing)
    monkeypatch.setattr(PartitionRunner, "_prepare", never)
    monkeypatch.setattr(PartitionRunner, "_run_ps", lambda self, action: never(self))

    async def run() -> list[agent_pb2.PartitionReport]:
        agent = Agent(config, tmp_path)
        running = asyncio.create_task(agent.run())

        def told() -> list[agent_pb2.PartitionReport]:
            return [agent_pb2.FromAgent.FromString(raw).partition for _, raw in agent._store.reports_after(0)]

        await _until(told)
        if approve == "every":
            assert [report.state for report in told()] == ["accepted"]
            agent._approvals.approve("job-1")
        await _until(lambda: told()[-1].state != "accepted")
        reports = told()
        agent.jobs.stop(2, agent_pb2.StopPartition(job="job-1", epoch=1, discard=True))
        await _until(lambda: agent._store.partition("job-1") is None)
        agent.stopped.set()
        await running
        return reports

    *_, last = asyncio.run(run())
    kinds = [one["kind"] for one in _audited(tmp_path)]
    assert kinds == ["job.started", "job.ended"], "its start, though the log began later than the job"
    if budget is None:
        assert last.state == "preparing"
    else:
        assert (last.state, last.error.code) == ("failed", "FORBIDDEN")


@pytest.mark.parametrize("residency", ["region", "anywhere"])
def test_an_order_for_a_shard_is_kept_until_the_job_ends_or_refused_at_once(tmp_path: Path, residency: str) -> None:
    """By the region's own file, before anything is sent."""
    config = RegionConfig.model_validate(
        {
            "apiVersion": "geofed/v1", "kind": "Region", "metadata": {"name": "east"}, "cloud": "test",
            "capacity": {"workers": 0}, "channel": {"path": str(tmp_path / "channel")},
            "datasets": {"digits": {"residency": residency, "splits": {"train": {"uri": "/nowhere", "samples": 1}}}},
        }
    )  # fmt: skip
    tls = Authority().region("east")
    Identity(tmp_path).store(
        JoinedFederation("east", "127.0.0.1:9", "test"), tls.key_pem, tls.certificate_pem, tls.ca_pem
    )
    order = agent_pb2.SendShard(job="job-1", epoch=1, dataset="digits", to="west", address="127.0.0.1:1")

    async def run() -> list[bytes]:
        agent = Agent(config, tmp_path)
        agent.jobs.send_shard(1, order)
        kept = [message for message, _ in agent._store.sendings()]
        agent._store.add_to_meters("job-1", {"sent_bytes:west": 5.0})
        agent.jobs.stop(2, agent_pb2.StopPartition(job="job-1", epoch=1))
        await asyncio.gather(*agent.jobs._closing)
        assert agent._store.command_cursor() == 2
        assert not agent._store.sendings()
        assert not agent._store.meters("job-1") or residency == "region"
        agent._store.close()
        return kept

    assert asyncio.run(run()) == ([order.SerializeToString()] if residency == "anywhere" else [])
    store = AgentStore(tmp_path / "agent.db")
    told = [agent_pb2.FromAgent.FromString(raw).partition for _, raw in store.reports_after(0)]
    store.close()
    if residency == "region":
        assert (told[0].state, told[0].error.code) == ("refused", "RESIDENCY_VIOLATION")
        assert told[0].audit_head.seq == 1
        assert [(one["kind"], one["code"]) for one in _audited(tmp_path)] == [("job.refused", "RESIDENCY_VIOLATION")]
    else:
        assert [(report.state, dict(report.totals.sent_bytes)) for report in told] == [
            ("sending", {}),
            ("stopped", {"west": 5}),
        ]


def _agent_in(folder: Path) -> Agent:
    config = RegionConfig.model_validate(
        {
            "apiVersion": "geofed/v1", "kind": "Region", "metadata": {"name": "east"}, "cloud": "test",
            "capacity": {"workers": 1}, "channel": {"path": str(folder / "channel")},
        }
    )  # fmt: skip
    Identity(folder).store(JoinedFederation("east", "127.0.0.1:9", "test"), b"", b"", b"")
    return Agent(config, folder)


def test_only_the_job_that_takes_too_much_disk_space_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Fed(_Played):
        def feed(self, event: Event) -> None:
            self.machine.handle(event)

    monkeypatch.setattr(jobs, "_QUOTA_SECONDS", 0.001)
    large, small = Fed("large", 1), Fed("small", 1)
    for job, size in (("large", 1_500_000), ("small", 500_000)):
        (tmp_path / "jobs" / job).mkdir(parents=True)
        (tmp_path / "jobs" / job / "model").write_bytes(bytes(size))
        (tmp_path / "channel" / job).mkdir(parents=True)
        (tmp_path / "channel" / job / "value").write_bytes(bytes(600_000))

    async def run() -> None:
        agent = _agent_in(tmp_path)
        agent.jobs.partitions = {played.job: played for played in (small, large)}  # type: ignore[dict-item, misc]
        watching = asyncio.create_task(agent.jobs.watch_disk(2))
        await _until(lambda: large.machine.over)
        await asyncio.sleep(0.02)
        watching.cancel()
        agent._store.close()

    asyncio.run(run())
    assert large.machine.error is not None
    assert large.machine.error.code == "LIMIT_EXCEEDED"
    assert "takes 2 MB of disk space in region east, which gives a job 2 MB" in large.machine.error.message
    assert (small.machine.state, small.machine.error) == ("training", None)


def test_a_deleted_job_that_is_not_known_leaves_nothing(tmp_path: Path) -> None:
    """As after the loss of the agent's database, or a crash while the job ended."""
    left = tmp_path / "jobs" / "job-1" / "ps"
    left.mkdir(parents=True)
    bundle = tmp_path / "bundles" / ("a" * 64)
    bundle.parent.mkdir()
    bundle.write_bytes(b"code")

    async def run() -> list[bytes]:
        agent = _agent_in(tmp_path)
        stop = agent_pb2.StopPartition(job="job-1", discard=True, deleted=True, bundle_digest=f"sha256:{'a' * 64}")
        agent.jobs.stop(5, stop)
        assert agent._store.command_cursor() == 5, "it is stored before it is carried out"
        await asyncio.gather(*agent.jobs._closing)
        told = [raw for _, raw in agent._store.reports_after(0)]
        agent._store.close()
        return told

    (report,) = asyncio.run(run())
    assert agent_pb2.FromAgent.FromString(report).partition.state == "stopped"
    assert not left.parent.exists()
    assert not bundle.exists()


def test_folders_in_the_state_directory_are_told_as_absolute_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameter servers and workers run in other directories; without shared memory the channel is there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "state").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != "/dev/shm")
    config = RegionConfig.model_validate(
        {
            "apiVersion": "geofed/v1", "kind": "Region", "metadata": {"name": "east"}, "cloud": "test",
            "capacity": {"workers": 1},
        }
    )  # fmt: skip
    agent = Agent(config, Path("state"))
    assert agent._channel_folder() == tmp_path / "state" / "channel"
    assert agent._state_dir == tmp_path / "state"


def test_the_audit_log_tells_of_jobs_that_wait_shards_that_go_and_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = RegionConfig.model_validate(
        {
            "apiVersion": "geofed/v1", "kind": "Region", "metadata": {"name": "east"}, "cloud": "test",
            "capacity": {"workers": 1}, "channel": {"path": str(tmp_path / "channel")},
            "policy": {"approve": "every"},
            "datasets": {"digits": {"residency": "anywhere", "splits": {"train": {"uri": "/nowhere", "samples": 1}}}},
        }
    )  # fmt: skip
    Identity(tmp_path).store(JoinedFederation("east", "127.0.0.1:9", "test"), b"", b"", b"")
    for name in ("check_partition", "check_isolation"):
        monkeypatch.setattr(jobs, name, lambda *_: None)
    begun: list[str] = []
    monkeypatch.setattr(RegionJobs, "_start_partition", lambda self, command: begun.append(command.job))
    monkeypatch.setattr(jobs.Sending, "begin", lambda self: None)

    def no_space(*_: object, **__: object) -> None:
        raise GeofedError("DISK_FULL", "x")

    async def fails() -> None:
        raise GeofedError("GATEWAY_UNAVAILABLE", "x")

    async def run() -> list[agent_pb2.PartitionReport]:
        agent = Agent(config, tmp_path)
        for seq, job in enumerate(("one", "two"), start=1):
            agent.jobs.start(seq, agent_pb2.StartPartition(job=job, epoch=1, region="east", regions=["east"]))
        agent._approvals.approve("one")
        with monkeypatch.context() as full:
            full.setattr(agent._store, "add_audit", no_space)
            agent.jobs.start_approved()
            assert not begun, "it starts only with its entry"
        agent.jobs.start_approved()
        agent.jobs.start_approved()
        assert begun == ["one"]
        agent.jobs.stop(3, agent_pb2.StopPartition(job="two", epoch=1))
        agent.jobs._run_to_end(fails(), "one", 1)
        await _until(lambda: not agent.jobs._closing)
        order = agent_pb2.SendShard(job="three", epoch=1, dataset="digits", to="west", address="127.0.0.1:1")
        agent.jobs.send_shard(4, order)
        sending = agent.jobs.sendings["three"]
        data = {"to": "west", "digest": "sha256:1", "bytes": 7, "epoch": 1}
        for _ in range(3):
            sending._context.record_event("three", RecordEvent("shard.sending", "", data))
        agent._store.add_to_meters("three", {"sent_bytes:west": 5.0})
        sending._unforeseen(GeofedError("LIMIT_EXCEEDED", "x"))
        agent.jobs.stop(5, agent_pb2.StopPartition(job="three", epoch=1))
        await _until(lambda: not agent.jobs._closing)
        told = [agent_pb2.FromAgent.FromString(raw).partition for _, raw in agent._store.reports_after(0)]
        agent._store.close()
        return told

    told = asyncio.run(run())
    assert [(one["kind"], one["job"], one.get("state")) for one in _audited(tmp_path)] == [
        ("job.received", "one", None), ("job.received", "two", None),
        ("job.approved", "one", None), ("job.started", "one", None),
        ("job.ended", "two", "stopped"), ("job.ended", "one", "failed"),
        ("shard.sending", "three", None), ("job.ended", "three", "failed"),
    ]  # fmt: skip
    assert _audited(tmp_path)[-1]["sent_bytes"] == {"west": 5}
    heads = [(report.job, report.state, report.audit_head.seq) for report in told if report.HasField("audit_head")]
    assert heads == [("two", "stopped", 5), ("one", "failed", 6), ("three", "failed", 8), ("three", "stopped", 8)]


def test_a_model_that_cannot_be_recorded_is_not_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []

    async def put(content: FileIO, digest: str) -> None:
        assert os.pread(content.fileno(), 100, 0) == b"weights"
        sent.append(digest)

    class Server:
        async def model(self, round_: int) -> AsyncIterator[SimpleNamespace]:
            yield SimpleNamespace(data=b"wei")
            yield SimpleNamespace(data=b"ghts")

    def no_space(*_: object, **__: object) -> None:
        raise GeofedError("DISK_FULL", "x")

    async def run() -> None:
        agent, server = _agent_in(tmp_path), cast("PsProcess", Server())
        monkeypatch.setattr(agent._hub, "put_blob", put)
        with monkeypatch.context() as full:
            full.setattr(agent._store, "add_audit", no_space)
            with pytest.raises(GeofedError, match="x"):
                await agent._blobs.publish_model("job-1", server)
        assert not sent
        digest = await agent._blobs.publish_model("job-1", server, 3)
        assert sent == [digest] == [digest_of([b"weights"])]
        agent._store.close()

    asyncio.run(run())
    (entry,) = _audited(tmp_path)
    assert (entry["kind"], entry["digest"], entry["round"]) == ("model.sent", sent[0], 3)
