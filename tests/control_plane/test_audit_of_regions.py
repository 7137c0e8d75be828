"""What a region can bring into the control plane's audit log: only what agents report, bounded, and in its own name."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from geofed_pb.security.audit import Head, verify
from geofed_pb.v1 import agent_pb2, common_pb2
from tests.control_plane.conftest import ServeConfig, Stage, staged
from tests.control_plane.scenario import bring_up, run
from tests.control_plane.test_dashboard import browser
from tests.control_plane.test_signed import as_user

KEY = Ed25519PrivateKey.generate()


def head(seq: int, region: str = "a", at: float = 1.0) -> agent_pb2.AuditHead:
    return agent_pb2.AuditHead(**asdict(Head.sign(KEY, seq, "a" * 64, at, region)))


async def entries(stage: Stage, kind: str) -> list[dict[str, Any]]:
    lines = [line async for line in stage.client.audit()]
    assert verify(lines)
    found = [json.loads(json.loads(line)["entry"]) for line in lines if "entry" in json.loads(line)]
    return [one for one in found if one["kind"] == kind]


def happening(job: str, kind: str, data: str) -> agent_pb2.FromAgent:
    return agent_pb2.FromAgent(happening=agent_pb2.Happening(job=job, at=1, kind=kind, text="told", data_json=data))


@pytest.mark.slow
def test_a_region_forges_no_entries(serve_config: ServeConfig, job_file: Path) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            a, b = await bring_up(stage)
            job = (await stage.submit(job_file)).job.id
            for agent in (a, b):
                await agent.command("start")
            kinds = ("user.signed-in", "user.added", "region.enrolled", "authority.rotated", "job.deleted")
            for kind in kinds:
                a.send(happening(job, kind, json.dumps({"user": "boss", "role": "operator"})))
            for _ in range(20):
                for job_id in (job, "another", ""):
                    a.send(happening(job_id, "shard.sent", '{"to": "b", "by": "boss", "x": "\\ud800"}'))
                a.send(happening(job, "shard.received", '{"from": "nowhere"}'))
                a.send(happening(job, "shard.received", '{"from": "elsewhere"}'))
            await a.settled()
            told = [one for kind in kinds for one in await entries(stage, kind)]
            assert not [one for one in told if one.get("user") == "boss" or one.get("role") == "operator"]
            (sent,) = await entries(stage, "shard.sent")
            assert (sent["job"], sent["region"], sent["to"], sent["x"], "by" in sent) == (job, "a", "b", "?", False)
            assert len(await entries(stage, "shard.received")) == 1
            shown = [event async for event in stage.client.watch(job, follow=False)]
            assert [event.kind for event in shown].count("region.note") == len(kinds)
            assert "message.undeliverable" not in [event.kind for event in shown]

    run(scenario())


def test_who_reads_lines_of_a_log_is_recorded(serve_config: ServeConfig, job_file: Path) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            a, b = await bring_up(stage)
            job = (await stage.submit(job_file)).job.id
            ann = (await stage.client.add_user("ann")).token
            await stage.client.share(job, "ann")
            assert not [line async for line in stage.client.logs(job)]
            assert not await entries(stage, "job.read"), "there are no lines yet"
            record = agent_pb2.LogRecord(job=job, at=1.0, source="worker 1", text="hello")
            a.send(agent_pb2.FromAgent(logs=agent_pb2.LogBatch(records=[record])))
            await a.settled()
            async with as_user(stage, ann, None) as client:
                for _ in range(2):
                    assert [line.text async for line in client.logs(job)] == ["hello"]
            (read,) = await entries(stage, "job.read")
            assert (read["by"], read["job"], read["what"], "digest" in read) == ("ann", job, "log", False)
            async with browser(stage) as pages:
                assert (await pages.get(f"/jobs/{job}/logs")).status_code == 200
            assert [one["by"] for one in await entries(stage, "job.read")] == ["ann", "operator"]
            for agent in (a, b):
                await agent.close()

    run(scenario())


@pytest.mark.slow
def test_heads_of_a_region_are_recorded_once_for_each_end(serve_config: ServeConfig, job_file: Path) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            a, b = await bring_up(stage)
            job = (await stage.submit(job_file)).job.id
            for agent in (a, b):
                await agent.command("start")
            for number in range(30):
                a.report(job, f"x{number}", audit_head=head(number + 1))
                a.report(job, "published", epoch=number + 2, audit_head=head(number + 1))
            await a.settled()
            assert await entries(stage, "region.head") == []
            a.report(job, "published", audit_head=head(500, at=float("nan")))
            a.report(job, "published", audit_head=head(500))
            a.report(job, "failed", error=common_pb2.Error(code="TASK_FAILED"), audit_head=head(600))
            await a.settled()
            for _ in range(3):
                b.report(job, "stopped", audit_head=head(77, "b"))
            await b.settled()
            a.report(job, "stopped", audit_head=head(601, "b"))
            await a.settled()
            (odd, *found) = await entries(stage, "region.head")
            assert ("error" in odd, "head" in odd) == (True, False)
            assert [(one["region"], one.get("head", {}).get("seq"), one.get("error")) for one in found] == [
                ("a", 600, None), ("b", 77, None), ("a", None, "it is the head of another log"),
            ]  # fmt: skip

    run(scenario())
