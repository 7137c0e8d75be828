"""Profiles: asked over the stream, told again after a break, kept for later plans."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from control_plane.cli._pareto_chart import front_picture
from control_plane.cli._report import plan_text
from control_plane.server import ServeConfig
from control_plane.service.measuring._task_history import task_keys
from control_plane.spec import load, pack
from control_plane.store import Change, RunRow, open_store
from geofed_pb.errors import GeofedError
from geofed_pb.v1 import common_pb2
from tests.control_plane.conftest import Stage, staged
from tests.control_plane.fake_agent import catalogue, profile_of


def on_a_loop(test: Callable[[ServeConfig, Path], Coroutine[Any, Any, None]]) -> Callable[[ServeConfig, Path], None]:
    @functools.wraps(test)
    def run(serve_config: ServeConfig, job_file: Path) -> None:
        asyncio.run(test(serve_config, job_file))

    return run


async def profiled(stage: Stage, job_file: Path, request_id: str = "p1", overrides: tuple[str, ...] = ()) -> Any:
    """All that was told, the result last."""
    loaded = load(job_file, overrides)
    packed = pack(loaded.folder, loaded.spec.task.module)
    content, digest = packed.content, packed.digest
    await stage.client.put_bundle(content, digest)
    return [progress async for progress in stage.client.profile(loaded.json, digest, request_id)]


async def plan(stage: Stage, job_file: Path, overrides: tuple[str, ...] = ()) -> Any:
    return json.loads((await stage.client.plan(load(job_file, overrides).json)).plan_json)


@pytest.mark.slow
@on_a_loop
async def test_a_plan_after_a_profile_rests_on_what_was_measured(serve_config: ServeConfig, job_file: Path) -> None:
    async with staged(serve_config) as stage, await stage.agent("a") as agent:
        assert (await plan(stage, job_file))["estimate"]["basis"] == "stated"
        asked = asyncio.create_task(profiled(stage, job_file))
        command = await agent.command("profile")
        assert (command.region, command.batch, list(command.memories_mb)) == ("a", 10, [1024])
        # Its code may be fetched as long as it is measured.
        assert await agent.fetch(command.task.bundle_digest)
        agent.tell_profile(command.id, condition="measures steps")
        agent.tell_profile(command.id, profile_json=json.dumps(profile_of("a")))
        told = await asked
        assert [progress.text for progress in told[:-1]] == ["measures steps", "measured"]
        result = json.loads(told[-1].result_json)["regions"]["a"]
        assert result["samples_per_second"] == pytest.approx(10 / 0.012)
        assert result["chosen"] in result["front"]
        shown = [*result["front"], *result["others"]]
        assert {one["workers"] for one in shown} == {1, 2}, "a configuration with each number of workers"
        picture = front_picture({"a": result["front"]}, {"a": result["others"]})
        assert picture.count("<circle") == len(shown)
        assert picture.count('fill="none" stroke="#b45309"><title>') == len(result["others"]) > 0
        seconds = [one["seconds"] for one in result["front"]]
        assert seconds == sorted(seconds)
        with pytest.raises(GeofedError, match="FORBIDDEN"):
            await agent.fetch(command.task.bundle_digest)
        after = await plan(stage, job_file)
        assert after["estimate"]["basis"] == "profiled"
        assert after["partitions"][0]["samples_per_second"] == pytest.approx(10 / 0.012)
    async with staged(serve_config) as stage, await stage.agent("a"):
        after = await plan(stage, job_file)
        assert after["estimate"]["basis"] == "profiled"
        assert "based on   a profile: steps of the task by one worker in each region" in plan_text(after)
        # What a run has measured counts more than a profile, also than a later one, and the plan says so.
        loaded = load(job_file)
        key, kin = task_keys(loaded.spec, loaded.code_digest)
        with open_store(f"sqlite:///{serve_config.state_dir / 'state.db'}") as store:
            store.commit(Change(runs=(RunRow("before", "a", key, 1.0, 391.0, 1000, 1.0, batch=10, kin_key=kin),)))
        ran = await plan(stage, job_file)
        assert ran["estimate"]["basis"] == "measured"
        assert ran["partitions"][0]["samples_per_second"] == 391.0
        assert "based on   earlier runs of this task" in plan_text(ran)


def layered(region: str) -> dict[str, Any]:
    """The profile of a model that can be cut."""
    layer = {
        "kind": "Linear", "parameter_bytes": 2e7, "state_bytes": 0.0, "activation_bytes": 2e5, "output_bytes": 1e5,
        "forward_alpha_seconds": 0.001, "forward_beta_seconds": 0.002, "backward_alpha_seconds": 0.001,
        "backward_beta_seconds": 0.004,
    }  # fmt: skip
    return profile_of(region) | {"layers": [{**layer, "name": str(number)} for number in range(4)], "layers_note": ""}


@asynccontextmanager
async def profile_told(stage: Stage, job_file: Path, profile: dict[str, Any]) -> AsyncIterator[None]:
    """Have region a, whose channel is Redis, answer a profile of the job with this one."""
    joined = await stage.agent("a")
    joined.catalogue = replace(catalogue("a", 1000, 8), channel="redis")
    async with joined as agent:
        asked = asyncio.create_task(profiled(stage, job_file))
        command = await agent.command("profile")
        agent.tell_profile(command.id, profile_json=json.dumps(profile))
        await asked
        yield


@pytest.mark.slow
@on_a_loop
async def test_explain_tells_what_else_stages_and_chunks_could_be(serve_config: ServeConfig, job_file: Path) -> None:
    async with staged(serve_config) as stage, profile_told(stage, job_file, layered("a")):
        told = await plan(stage, job_file, ("parallelism={pipeline: {}}",))
        decided = {one["decision"].split(" ")[0]: one for one in told["alternatives"]}
        assert {"stages", "micro-batch", "recomputed", "replicas"} <= decided.keys()
        for one in decided.values():
            assert " s and $" in one["text"]
            assert one["why_not"]
        assert decided["stages"]["decision"] in plan_text(told)
        chunks = await plan(stage, job_file, ("advanced.collective=k-reduce", "train.workers=6"))
        others = [one for one in chunks["alternatives"] if one["decision"].startswith("K ")]
        assert len(others) == 2
        assert all(" s and $" in one["text"] for one in others)


@pytest.mark.slow
@on_a_loop
async def test_a_model_that_no_function_holds_is_cut_with_any_batch_or_refused(
    serve_config: ServeConfig, job_file: Path
) -> None:
    large = layered("a") | {"model_bytes": 600_000_000}
    large["steps"] = [{**step, "peak_mb": 1800.0} for step in large["steps"]]
    large["layers"] = [{**layer, "parameter_bytes": 1.5e8} for layer in large["layers"]]
    noise = "privacy.differential={level: region, epsilon: 5, delta: 1e-5, clipNorm: 1}"
    async with staged(serve_config) as stage, profile_told(stage, job_file, large):
        chosen = await plan(stage, job_file, ("train.batch=auto", "train.end={epochs: 2}"))
        (part,) = chosen["partitions"]
        assert len(part["pipeline"]["stages"]) > 1
        assert f"batch {part['batch']}" in {one["decision"] for one in chosen["alternatives"]}
        # Noise is added to whole updates, so that the model is not cut.
        (reason,) = (await plan(stage, job_file, (noise,)))["reasons"]
        assert reason["code"] == "INADMISSIBLE"
        assert reason["text"] == "a step of 10 samples does not fit into a function of 2048 MB in a, as profiled"
        assert "use a smaller train.batch" in reason["remedy"]
        tried = await plan(stage, job_file, ("parallelism=data",))
        assert tried["partitions"][0]["pipeline"] is None


@pytest.mark.slow
@on_a_loop
async def test_a_job_runs_with_the_slice_that_its_plan_has_chosen(serve_config: ServeConfig, job_file: Path) -> None:
    async with staged(serve_config) as stage, await stage.agent("a") as agent:
        asked = asyncio.create_task(profiled(stage, job_file))
        command = await agent.command("profile")
        agent.tell_profile(command.id, profile_json=json.dumps(profile_of("a") | {"again_seconds": 1.0}))
        await asked
        long = ("train.end={epochs: 3000}",)
        told = await plan(stage, job_file, long)
        chosen = told["slice_seconds"]
        assert 30.0 < chosen < 600.0
        others = [one for one in told["alternatives"] if one["decision"] == f"slice {chosen:g} s"]
        assert len(others) == 2
        assert f"slice {chosen:g} s" in plan_text(told)
        assert (await plan(stage, job_file, (*long, "function.slice=45s")))["slice_seconds"] == 45.0
        await stage.submit(job_file, overrides=long)
        assert (await agent.command("start")).plan.slice_seconds == chosen


@pytest.mark.slow
@on_a_loop
async def test_an_agent_that_comes_back_is_asked_again_under_the_same_id(
    serve_config: ServeConfig, job_file: Path
) -> None:
    async with staged(serve_config) as stage, await stage.agent("a") as agent:
        asked = asyncio.create_task(profiled(stage, job_file))
        first = await agent.command("profile")
        await agent.close()
        await agent.connect()
        again = await agent.command("profile", 2)
        assert again == first
        agent.tell_profile(first.id, profile_json=json.dumps(profile_of("a")))
        assert json.loads((await asked)[-1].result_json)["regions"].keys() == {"a"}


@on_a_loop
async def test_labels_are_not_asked_for_by_a_job_that_hides_what_regions_contribute(
    serve_config: ServeConfig, job_file: Path
) -> None:
    noise = "privacy.differential={level: region, epsilon: 5, delta: 1e-5, clipNorm: 1}"
    async with staged(serve_config) as stage, await stage.agent("a") as agent:
        for count, overrides in enumerate(((), (noise,), ("privacy.secureAggregation=true",)), 1):
            asked = asyncio.create_task(profiled(stage, job_file, f"p{count}", overrides))
            command = await agent.command("profile", count)
            assert command.labels == (not overrides)
            agent.tell_profile(command.id, profile_json=json.dumps(profile_of("a")))
            await asked


@on_a_loop
async def test_labels_that_cannot_be_are_refused(serve_config: ServeConfig, job_file: Path) -> None:
    bad = ([[0, 5], [0, 6]], [[100, 5]], [[-1, 5]], [[0, 0]], [[0, 2**31]], [[0, 1, 2]], [["a", 1]])
    async with staged(serve_config) as stage, await stage.agent("a") as agent:
        for count, labels in enumerate(bad, 1):
            asked = asyncio.create_task(profiled(stage, job_file, f"p{count}"))
            command = await agent.command("profile", count)
            agent.tell_profile(command.id, profile_json=json.dumps(profile_of("a") | {"labels": labels}))
            with pytest.raises(GeofedError, match="FRAME_INVALID: the profile of region a"):
                await asked


@on_a_loop
async def test_one_region_that_fails_does_not_take_the_others_along(serve_config: ServeConfig, job_file: Path) -> None:
    async with staged(serve_config) as stage, await stage.agent("a") as one, await stage.agent("b") as two:
        asked = asyncio.create_task(profiled(stage, job_file))
        command = await one.command("profile")
        # One region after the other.
        assert not two.commands
        one.tell_profile(command.id, error=common_pb2.Error(code="TASK_FAILED", message="loss raised", hint="mend it"))
        command = await two.command("profile")
        two.tell_profile(command.id, profile_json=json.dumps(profile_of("b")))
        result = json.loads((await asked)[-1].result_json)
        assert result["regions"].keys() == {"b"}
        assert result["failed"]["a"]["code"] == "TASK_FAILED"
        assert result["failed"]["a"]["hint"] == "mend it"


@on_a_loop
async def test_where_all_regions_fail_the_call_does(serve_config: ServeConfig, job_file: Path) -> None:
    async with staged(serve_config) as stage, await stage.agent("a") as agent:
        asked = asyncio.create_task(profiled(stage, job_file))
        command = await agent.command("profile")
        agent.tell_profile(command.id, profile_json='{"region": "b"}')
        with pytest.raises(GeofedError, match="FRAME_INVALID: the profile of region a"):
            await asked
        # Nothing was kept.
        assert (await plan(stage, job_file))["estimate"]["basis"] == "stated"


@on_a_loop
async def test_without_data_or_agents_it_says_so(serve_config: ServeConfig, job_file: Path) -> None:
    async with staged(serve_config) as stage:
        with pytest.raises(GeofedError, match="DATASET_UNKNOWN"):
            await profiled(stage, job_file)
        async with await stage.agent("a"):
            with pytest.raises(GeofedError, match="DATASET_UNKNOWN"):
                await profiled(stage, job_file, overrides=("data.dataset=other",))
            with pytest.raises(GeofedError, match="DATASET_UNKNOWN"):
                await profiled(stage, job_file, overrides=("regions.avoid=[a]",))

        async def away() -> bool:
            return not await stage.phase_is("a", "live")

        await stage.until(away)
        with pytest.raises(GeofedError, match="INADMISSIBLE: no agent of a region that holds digits is connected"):
            await profiled(stage, job_file)


@on_a_loop
async def test_a_stored_profile_of_another_version_counts_as_a_run(serve_config: ServeConfig, job_file: Path) -> None:
    row = RunRow(
        "profile-1", "a", task_keys(load(job_file).spec, "")[0], 1.0, 500.0, 1000, 2.0, '{"format": "of tomorrow"}'
    )
    async with staged(serve_config) as stage, await stage.agent("a"):
        with open_store(f"sqlite:///{serve_config.state_dir / 'state.db'}") as store:
            store.commit(Change(runs=(row,)))
        told = await plan(stage, job_file)
        assert told["estimate"]["basis"] == "profiled"
        assert told["partitions"][0]["samples_per_second"] == 500.0
        assert told["partitions"][0]["merge_seconds"] is None
