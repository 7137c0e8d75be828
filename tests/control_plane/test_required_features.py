"""Agents of earlier versions: jobs run with them as they can, or are declined."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from control_plane.server import ServeConfig
from control_plane.spec import load
from sync.privacy import Release, epsilon_of
from tests.control_plane.conftest import staged
from tests.control_plane.fake_agent import catalogue
from tests.control_plane.scenario import run


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting",
    [
        "task.image=r/team/worker:1",
        "function={gpus: 2, memoryMb: 2048}",
        "function={gpus: 2, memoryMb: 2048, sharding: fsdp}",
        "train.learningRate.batch=64",
        f"train.initialModel={{uri: s3://m/w, digest: 'sha256:{'ab' * 32}', adapter: {{file: w.safetensors}}}}",
    ],
)
def test_what_an_agent_cannot_do_is_declined_with_its_region(
    serve_config: ServeConfig, job_file: Path, setting: str
) -> None:
    (job_file.parent / "w.safetensors").write_bytes(save({"w": np.zeros(3, np.float32)}))

    async def scenario() -> None:
        async with staged(serve_config) as stage:
            old, new = await stage.agent("a"), await stage.agent("b")
            old.features = ()
            for agent in (old, new):
                agent.catalogue = replace(agent.catalogue, images=("r/team/",))
                await agent.connect()
            keys = [setting.partition("=")[0] + (".gpus" if "gpus" in setting else "")]
            keys += ["function.sharding"] if "sharding" in setting else []
            if "uri" in setting:
                keys = ["train.initialModel.adapter"]
            told = await stage.client.plan(load(job_file, [setting, "train.workers=1"]).json)
            assert not told.admissible
            assert [reason["text"] for reason in json.loads(told.plan_json)["reasons"]] == [
                f"the agent of region a is of an earlier version, which does not know `{key}`" for key in keys
            ]
            assert (
                await stage.client.plan(load(job_file, [setting, "train.workers=1", "regions.avoid=[a]"]).json)
            ).admissible
            assert (await stage.client.plan(load(job_file).json)).admissible
            for agent in (old, new):
                await agent.close()

    run(scenario())


def test_a_job_whose_image_a_region_does_not_allow_is_declined_and_otherwise_sent_with_it(
    serve_config: ServeConfig, job_file: Path
) -> None:
    image = "task.image=r/team/worker:1"

    async def scenario() -> None:
        async with staged(serve_config) as stage:
            agents = [await stage.agent(name) for name in "abc"]
            for agent, images in zip(agents, (("r/team/",), ("r/other/",), ()), strict=True):
                agent.catalogue = replace(agent.catalogue, images=images)
                await agent.connect()
            told = json.loads((await stage.client.plan(load(job_file, [image]).json)).plan_json)
            assert [(one["code"], one["text"]) for one in told["reasons"]] == [
                ("IMAGE_REFUSED", "region b does not let tasks run in r/team/worker:1"),
                (
                    "IMAGE_REFUSED",
                    "region c does not let tasks run in r/team/worker:1: "
                    "it allows no image but its own, or its functions have none",
                ),
            ]
            await stage.submit(job_file, overrides=(image, "regions.use=[a]"))
            assert (await agents[0].command("start")).task.image == "r/team/worker:1"
            for agent in agents:
                await agent.close()

    run(scenario())


def test_a_secure_job_masks_its_updates_and_needs_three_regions(serve_config: ServeConfig, job_file: Path) -> None:
    secure = ["privacy.secureAggregation=true"]

    async def scenario() -> None:
        async with staged(serve_config) as stage:
            agents = [await stage.agent(name) for name in "bcd"]
            for agent in agents:
                await agent.connect()
            told = await stage.client.plan(load(job_file, secure).json)
            plan = json.loads(told.plan_json)
            assert told.admissible
            assert plan["codec"].endswith("-masked")
            assert plan["wan_settings"]["secure"] == 3.0
            assert "background" not in plan["wan_settings"]
            told = await stage.client.plan(load(job_file, [*secure, "regions.avoid=[b]"]).json)
            (reason,) = json.loads(told.plan_json)["reasons"]
            assert reason["text"] == "privacy.minRegions is 3, and 2 regions take part"
            for agent in agents:
                await agent.close()

    run(scenario())


def test_regions_with_a_small_share_do_not_hide_the_others(serve_config: ServeConfig, job_file: Path) -> None:
    secure = ["privacy.secureAggregation=true", "wan.interval=100", "train.end={steps: 1000}"]

    async def scenario() -> None:
        async with staged(serve_config) as stage:
            agents = [await stage.agent(name) for name in "abcd"]
            for agent in agents:
                agent.catalogue = catalogue(agent.region, samples=1 if agent.region == "d" else 20_000)
                await agent.connect()
            assert (await stage.client.plan(load(job_file, secure).json)).admissible
            told = await stage.client.plan(load(job_file, [*secure, "regions.avoid=[c]"]).json)
            (reason,) = json.loads(told.plan_json)["reasons"]
            assert reason["text"] == "privacy.minRegions is 3, and 2 of 3 regions have more than a small share"
            for agent in agents:
                await agent.close()

    run(scenario())


@pytest.mark.slow
def test_a_private_job_is_planned_with_its_noise_and_cost(serve_config: ServeConfig, job_file: Path) -> None:
    private = "privacy.differential={level: LEVEL, epsilon: 3, delta: 1e-5, clipNorm: 0.5}"

    async def scenario() -> None:
        async with staged(serve_config) as stage:
            agents = [await stage.agent(name) for name in "bc"]
            for agent in agents:
                await agent.connect()
            for level in ("region", "sample"):
                told = await stage.client.plan(load(job_file, [private.replace("LEVEL", level)]).json)
                assert told.admissible, told
                plan = json.loads(told.plan_json)
                numbers, part = plan["wan_settings"], plan["partitions"][0]
                assert (numbers["clip"], numbers["delta"], numbers["sampled"]) == (0.5, 1e-5, float(level == "sample"))
                rate = part["workers"] * part["batch"] / part["samples"]
                release = Release.of(numbers["noise"], rate, sampled=level == "sample")
                count = plan["rounds"] * (part["steps_per_round"] if level == "sample" else 1)
                assert epsilon_of([(release, count)], 1e-5) <= numbers["epsilon"] <= 3
                assert numbers["epsilon"] == pytest.approx(3, rel=1e-3)
            for level, admissible in (("region", False), ("sample", True)):
                settings = [private.replace("LEVEL", level), "regions.use=[b]"]
                told = await stage.client.plan(load(job_file, settings).json)
                assert told.admissible is admissible
            for agent in agents:
                await agent.close()

    run(scenario())
