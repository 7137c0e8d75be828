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
from tests.control_plane.conftest import Stage, staged
from tests.control_plane.fake_agent import FakeAgent, digest_of
from tests.control_plane.scenario import figures, run

SECURE = ("privacy.secureAggregation=true", "privacy.minRegions=3")
FULL = ("train.end={steps: 20}", "train.evaluateEvery=1", "train.keep=all")


async def _failed_after_a_round(
    stage: Stage, job_file: Path, names: str, *settings: str
) -> tuple[list[FakeAgent], str]:
    """A job of which only the model of round 1 is kept; return its agents and its name."""
    agents = [await stage.agent(name) for name in names]
    for agent in agents:
        await agent.connect()
    job = (await stage.submit(job_file, "r1", (*FULL, *settings))).job.id
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
    return agents, job


@pytest.mark.slow
def test_a_round_is_not_repeated_without_one_region(serve_config: ServeConfig, job_file: Path) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            agents, job = await _failed_after_a_round(stage, job_file, "abcd", *SECURE)
            start = f"train.initialModel={{job: {job}, round: 1}}"

            async def told(*settings: str) -> tuple[bool, str]:
                answer = await stage.client.plan(load(job_file, [start, *settings]).json)
                reasons = json.loads(answer.plan_json).get("reasons", [])
                return answer.admissible, "".join(reason["text"] for reason in reasons)

            without = "regions.avoid=[d]"
            assert await told(*SECURE, without) == (
                False,
                f"{job} trains from the same model, and differs by d: both together would tell its updates",
            )
            with pytest.raises(GeofedError, match="differs by d"):
                await stage.submit(job_file, "r2", (start, *SECURE, without))
            assert await told(*SECURE) == (True, "")
            # Without secure aggregation it would even show the updates of all but d.
            assert "differs by d" in (await told(without))[1]
            assert await told("regions.avoid=[b, c, d]") == (True, "")
            assert await told() == (True, "")
            # So do jobs that both begin with the model of their task.
            for settings in ((*SECURE, without), (without,)):
                with pytest.raises(GeofedError, match="differs by d"):
                    await stage.submit(job_file, "r3", (*FULL, *settings))
            for number, settings in enumerate(
                ((*SECURE, without, "train.seed=7"), ("regions.avoid=[b, c, d]",), SECURE)
            ):
                assert await stage.submit(job_file, f"s{number}", (*FULL, *settings))
            for agent in agents:
                await agent.close()

    run(scenario())


@pytest.mark.slow
def test_jobs_that_start_from_one_model_differ_by_no_few_regions(serve_config: ServeConfig, job_file: Path) -> None:
    """Also where the model is that of a third job, without secure aggregation."""

    async def scenario() -> None:
        async with staged(serve_config) as stage:
            agents, job = await _failed_after_a_round(stage, job_file, "abcd")
            settings = (f"train.initialModel={{job: {job}, round: 1}}", *FULL, *SECURE)
            again = (await stage.submit(job_file, "r2", settings)).job.id
            with pytest.raises(GeofedError, match=f"{again} trains from the same model, and differs by d"):
                await stage.submit(job_file, "r3", (*settings, "regions.avoid=[d]"))
            for agent in agents:
                await agent.close()

    run(scenario())


@pytest.mark.slow
def test_the_larger_minimum_of_two_jobs_counts(serve_config: ServeConfig, job_file: Path) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            agents = [await stage.agent(name) for name in "abcdef"]
            for agent in agents:
                await agent.connect()
            await stage.submit(job_file, "r1", (*FULL, SECURE[0], "privacy.minRegions=4"))
            with pytest.raises(GeofedError, match="differs by d, e, f"):
                await stage.submit(job_file, "r2", (*FULL, *SECURE, "regions.avoid=[d, e, f]"))
            for agent in agents:
                await agent.close()

    run(scenario())


@pytest.mark.parametrize(
    ("settings", "text"),
    [("noiseMultiplier: 20, clipNorm: 5", "exceeds what"), ("noiseMultiplier: 0.001, clipNorm: 0.001", "is lost in")],
)
def test_noise_that_masked_numbers_cannot_hold_is_declined_before_a_job_begins(
    settings: str, text: str, serve_config: ServeConfig, job_file: Path
) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            agents = [await stage.agent(name) for name in "abc"]
            for agent in agents:
                await agent.connect()
            noise = f"privacy.differential={{level: region, delta: 1e-5, {settings}}}"
            with pytest.raises(GeofedError, match=text) as told:
                await stage.submit(job_file, "r1", (*FULL, *SECURE, noise))
            assert told.value.code == "INADMISSIBLE"
            for agent in agents:
                await agent.close()

    run(scenario())
