"""Two regions, played by a script in a process of its own: `python scripted_agents.py CONTEXT READY_FILE`.

What a job meets is in its task's config: `play: finish | hold | fail | keep`; with the last one it is held, and the
models of two evaluated rounds are uploaded. Over a restart of the control plane the agents
connect again, as real ones do.
"""

from __future__ import annotations

import asyncio
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from control_plane.client import Context, ControlClient
from geofed_pb.v1 import agent_pb2, common_pb2
from tests.control_plane.fake_agent import FakeAgent, digest_of, join, profile_of

MODEL = b"safetensors" * 1000
OTHER = {"a": "b", "b": "a"}


async def main(context: Path, ready: Path) -> None:
    async with ControlClient.connect(Context.load(context)) as client:
        agents = [FakeAgent(await join((await client.invite(region)).token)) for region in OTHER]
    for agent in agents:
        await agent.connect()
    ready.touch()
    await asyncio.gather(*(play(agent) for agent in agents))


async def play(agent: FakeAgent) -> None:
    plays: dict[str, str] = {}
    done = 0
    while True:
        await agent._until(partial(has_news, agent, done), seconds=3600)
        if agent.failure is not None:
            await agent.close()
            await asyncio.sleep(0.1)
            await agent.connect()
            continue
        command = agent.commands[done]
        done += 1
        await act(agent, command, plays)


def has_news(agent: FakeAgent, done: int) -> bool:
    return len(agent.commands) > done or agent.failure is not None


async def act(agent: FakeAgent, command: agent_pb2.ToAgent, plays: dict[str, str]) -> None:
    kind = command.WhichOneof("body")
    body: Any = getattr(command, str(kind))
    if kind == "start":
        plays[body.job] = json.loads(body.task.config_json)["play"]
        agent.report(body.job, "accepted", epoch=body.epoch)
        agent.report(body.job, "ready", epoch=body.epoch, ps_address=f"{agent.region}.example:9000")
    elif kind == "peers":
        told = {"keeps_models": plays[body.job] == "keep", **figures(agent.region, 1)}
        agent.report(body.job, "training", epoch=body.epoch, **told)
        record = agent_pb2.LogRecord(job=body.job, at=1.0, source="worker 1", text=f"hello from {agent.region}")
        agent.send(agent_pb2.FromAgent(logs=agent_pb2.LogBatch(records=[record])))
        end(agent, body, plays[body.job])
    elif kind == "keep":
        model = kept_model(body.job, body.round)
        await agent.put(model)
        kept = agent_pb2.UploadedModel(round=body.round, blob_digest=digest_of(model))
        agent.report(body.job, "training", epoch=body.epoch, keeps_models=True, kept=kept, **figures(agent.region, 1))
    elif kind == "publish":
        await agent.put(MODEL)
        told = {"model_digest": "m", "blob_digest": digest_of(MODEL), **figures(agent.region, 2)}
        agent.report(body.job, "published", epoch=body.epoch, **told)
    elif kind == "profile":
        agent.tell_profile(body.id, condition="measures steps")
        agent.tell_profile(body.id, profile_json=json.dumps(profile_of(agent.region, body.batch)))
    elif kind == "stop":
        agent.report(body.job, "stopped", epoch=body.epoch, **figures(agent.region, 1))


def end(agent: FakeAgent, body: Any, play: str) -> None:
    if play == "finish":
        agent.report(body.job, "finished", epoch=body.epoch, model_digest="m", **figures(agent.region, 2))
    elif play == "fail" and agent.region == "a":
        error = common_pb2.Error(code="TASK_FAILED", message="loss raised ValueError", hint="see the logs")
        agent.report(body.job, "failed", epoch=body.epoch, error=error, **figures(agent.region, 1))
    elif play == "keep":
        told = figures(agent.region, 2, accuracy=0.8)
        agent.report(body.job, "training", epoch=body.epoch, keeps_models=True, **told)


def kept_model(job: str, rounds: int) -> bytes:
    """A safetensors file without tensors, of always the same bytes."""
    head = json.dumps({"__metadata__": {"job": job, "round": str(rounds)}}).encode()
    return len(head).to_bytes(8, "little") + head


def figures(region: str, rounds: int, accuracy: float = 0.9) -> dict[str, Any]:
    return {
        "round": rounds,
        "step": rounds * 2,
        "samples": rounds * 20,
        "loss": 1.0 / (rounds + 1),
        "evaluation": {"metrics": {"accuracy": accuracy}, "samples": 30, "round": rounds},
        "workers": 2,
        "totals": {
            "sent_bytes": {OTHER[region]: 1000 * rounds},
            "received_bytes": {OTHER[region]: 900 * rounds},
            "money": [common_pb2.Money(item="egress", quantity=1e-6, unit="GB", usd=0.25, source="test")],
        },
        "speed": {"samples_per_second": 400.0},
        "exchange": {
            "applied_updates": rounds,
            "staleness": {OTHER[region]: 1.5},
            "interval": 16,
            "codec": "int8",
        },
        "links": {OTHER[region]: {"rtt_ms": 220.5, "mbps": 80.0, "streams": 4}},
    }


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))
