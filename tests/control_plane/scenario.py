"""What the tests of jobs over real sockets have in common."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from geofed_pb.v1 import common_pb2
from tests.control_plane.conftest import Stage
from tests.control_plane.fake_agent import FakeAgent, digest_of

MODEL = b"safetensors" * 1000


def figures(region: str, other: str, rounds: int) -> dict[str, Any]:
    return {
        "round": rounds,
        "step": rounds * 2,
        "samples": rounds * 20,
        "loss": 1.0 / (rounds + 1),
        "evaluation": {
            "metrics": {"accuracy": 0.9 if region == "a" else 0.6},
            "samples": 30 if region == "a" else 10,
            "round": rounds,
        },
        "totals": {
            "sent_bytes": {other: 1000 * rounds},
            "money": [common_pb2.Money(item="egress", quantity=1e-6, unit="GB", usd=0.25, source="test")],
        },
        "workers": 2,
        "speed": {"samples_per_second": 400.0},
        "exchange": {"applied_updates": rounds},
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


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scenario)
