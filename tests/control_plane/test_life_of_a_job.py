"""Jobs over real TLS sockets, with agents played by a script."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from control_plane.server import ServeConfig
from geofed_pb.v1 import agent_pb2, common_pb2
from tests.control_plane.conftest import Stage, staged
from tests.control_plane.fake_agent import FakeAgent, digest_of

MODEL = b"safetensors" * 1000


def figures(region: str, other: str, rounds: int) -> dict[str, Any]:
    return {
        "round": rounds,
        "step": rounds * 2,
        "samples": rounds * 20,
        "loss": 1.0 / (rounds + 1),
        "metrics": {"accuracy": 0.9 if region == "a" else 0.6},
        "metrics_samples": 30 if region == "a" else 10,
        "metrics_round": rounds,
        "sent_bytes": {other: 1000 * rounds},
        "money": [common_pb2.Money(item="egress", quantity=1e-6, unit="GB", usd=0.25, source="test")],
        "workers": 2,
        "samples_per_second": 400.0,
        "applied_updates": rounds,
    }


async def bring_up(stage: Stage) -> tuple[FakeAgent, FakeAgent]:
    agents = await stage.agent("a"), await stage.agent("b")
    for agent in agents:
        await agent.connect()
    return agents


async def train(job: str, a: FakeAgent, b: FakeAgent) -> None:
    """From the start to the end of training."""
    for agent in (a, b):
        start = await agent.command("start")
        assert (start.job, start.region, start.epoch, list(start.regions)) == (job, agent.region, 1, ["a", "b"])
        assert await agent.fetch(start.task.bundle_digest)
        agent.report(job, "accepted")
        agent.report(job, "ready", ps_address=f"{agent.region}.example:9000")
    for agent in (a, b):
        peers = await agent.command("peers")
        assert [(p.region, p.epoch, p.address) for p in peers.peers] == [
            ("a", 1, "a.example:9000"),
            ("b", 1, "b.example:9000"),
        ]
        agent.report(job, "training")


async def finish(job: str, a: FakeAgent, b: FakeAgent) -> None:
    a.report(job, "finished", model_digest="m", **figures("a", "b", 2))
    b.report(job, "finished", model_digest="m", **figures("b", "a", 2))
    await a.command("publish")
    assert (await a.put(MODEL)).complete
    a.report(job, "published", model_digest="m", blob_digest=digest_of(MODEL), **figures("a", "b", 2))
    await a.settled()


def test_a_job_runs_to_its_model(serve_config: ServeConfig, job_file: Path) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            a, b = await bring_up(stage)
            reply = await stage.submit(job_file)
            job = reply.job.id
            assert reply.created
            assert reply.job.state == "starting"
            assert "a, b" in reply.job.condition
            await train(job, a, b)
            a.send(
                agent_pb2.FromAgent(
                    logs=agent_pb2.LogBatch(
                        records=[agent_pb2.LogRecord(job=job, at=1.0, source="worker 1", text="hello")]
                    )
                )
            )
            await finish(job, a, b)
            done = await stage.client.job(job)
            assert done.state == "succeeded"
            result = json.loads(done.result_json)
            assert result["wan_bytes"] == {"a>b": 2000, "b>a": 2000}
            assert result["usd"] == 0.5
            assert abs(result["metrics"]["accuracy"] - (0.9 * 30 + 0.6 * 10) / 40) < 1e-9
            assert result["model"] == {"digest": digest_of(MODEL), "bytes": len(MODEL), "format": "safetensors"}
            assert result["predicted"]["usd"]["low"] <= result["predicted"]["usd"]["high"]
            assert b"".join([chunk.data async for chunk in stage.client.model(job)]) == MODEL
            assert [line.text async for line in stage.client.logs(job)] == ["hello"]
            assert [line.text async for line in stage.client.logs("digits", region="b", follow=True)] == []
            kinds = [event.kind async for event in stage.client.watch(job)]
            assert kinds[0] == "job.submitted"
            assert kinds[-1] == "job.succeeded"
            assert [kind for kind in kinds if kind.startswith("job.")] == [
                "job.submitted",
                "job.planned",
                "job.starting",
                "job.running",
                "job.finishing",
                "job.publishing",
                "job.succeeded",
            ]
            assert (await a.command("stop")).discard
            again = json.loads((await stage.client.plan(load_json(job_file))).plan_json)
            assert again["estimate"]["basis"] == "measured"
            for agent in (a, b):
                await agent.close()

    asyncio.run(scenario())


def load_json(job_file: Path) -> str:
    from control_plane.spec import load

    return load(job_file).json
