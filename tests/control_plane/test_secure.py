"""Secure aggregation at the control plane: which jobs are refused for what their sums would tell together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.numpy import save

from control_plane.server import ServeConfig
from control_plane.spec import load
from geofed_pb.errors import GeofedError
from geofed_pb.v1 import agent_pb2
from tests.control_plane.conftest import staged
from tests.control_plane.fake_agent import digest_of
from tests.control_plane.scenario import figures, run

SECURE = ("privacy.secureAggregation=true", "privacy.minRegions=3")
FULL = ("train.end={steps: 20}", "train.evaluateEvery=1", "train.keep=all")


def test_a_round_is_not_repeated_without_one_region(serve_config: ServeConfig, job_file: Path) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            agents = [await stage.agent(name) for name in "abcd"]
            for agent in agents:
                await agent.connect()
            job = (await stage.submit(job_file, "r1", (*FULL, *SECURE))).job.id
            for agent in agents:
                await agent.command("start")
                agent.report(job, "accepted")
                agent.report(job, "ready", ps_address=f"{agent.region}.example:9000")
            for agent in agents:
                agent.report(job, "training", keeps_models=True, **figures(agent.region, "a", 1))
            model = save({}, {"job": job, "round": "1"})
            assert (await agents[0].command("keep")).round == 1
            await agents[0].put(model)
            kept = agent_pb2.UploadedModel(round=1, blob_digest=digest_of(model))
            agents[0].report(job, "training", keeps_models=True, kept=kept, **figures("a", "b", 1))
            agents[0].report(job, "failed", condition="boom")
            await agents[0].settled()
            start = f"train.initialModel={{job: {job}, round: 1}}"

            async def told(*settings: str) -> tuple[bool, str]:
                answer = await stage.client.plan(load(job_file, [start, *settings]).json)
                reasons = json.loads(answer.plan_json).get("reasons", [])
                return answer.admissible, "".join(reason["text"] for reason in reasons)

            without = "regions.avoid=[d]"
            assert await told(*SECURE, without) == (
                False,
                f"{job} has gone on from this model, and differs by d: the sums of both jobs would tell its updates",
            )
            with pytest.raises(GeofedError, match="differs by d"):
                await stage.submit(job_file, "r2", (start, *SECURE, without))
            assert await told(*SECURE) == (True, "")
            assert await told(without) == (True, "")
            for agent in agents:
                await agent.close()

    run(scenario())
