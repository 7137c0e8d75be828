"""A region stays lost, and another job continues without it; over real TLS sockets, with agents played by a script."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from control_plane.core import InitialModel, KeptModel, Models, Report
from control_plane.server import ServeConfig
from control_plane.service.jobs._difference_of_models import refused_by_difference
from control_plane.spec import load
from geofed_pb.errors import GeofedError
from tests.control_plane.conftest import Stage, staged
from tests.control_plane.fake_agent import FakeAgent, digest_of
from tests.control_plane.scenario import MODEL, figures, run
from tests.control_plane.test_life_of_a_job import beat
from tests.control_plane.test_replanner import data_of, ended, running
from tests.control_plane.test_users import refused

SECURE = ("privacy.secureAggregation=true", "privacy.minRegions=3")
CONTINUE = ("train.end.steps=40", "regions.lost=continue", "limits.lostRegion=1s")


@asynccontextmanager
async def lost(
    stage: Stage, job_file: Path, names: str, gone: str, *settings: str, rounds: int = 5
) -> AsyncIterator[tuple[str, dict[str, FakeAgent]]]:
    """A job that runs over regions, one letter each, of which some are lost; yield its name and the agents."""
    agents = {name: await stage.agent(name) for name in names}
    for agent in agents.values():
        await agent.connect()
    job = (await stage.submit(job_file, "r1", settings)).job.id
    for agent in agents.values():
        await agent.command("start")
        agent.report(job, "ready", ps_address=f"{agent.region}.example:9000")
    for agent in agents.values():
        assert not (await agent.command("peers")).halt
        agent.report(job, "training", **figures(agent.region, "x", rounds))
        await agent.settled()
    beating = [asyncio.create_task(beat(agent)) for name, agent in agents.items() if name not in gone]
    for name in gone:
        await agents[name].close()
    try:
        yield job, agents
    finally:
        for task in beating:
            task.cancel()
        for name, agent in agents.items():
            if name not in gone:
                await agent.close()


async def end_at_once(job: str, agents: dict[str, FakeAgent], **rounds: int) -> None:
    """They are told to, and do; the furthest one hands the model in."""
    for name in rounds:
        told = await agents[name].command("peers", 2)
        assert (told.halt, told.finish, list(told.peers)) == (True, True, [])
    for name, made in rounds.items():
        agents[name].report(job, "finished", model_digest=f"m{made}", **figures(name, "x", made))
        await agents[name].settled()
    furthest = max(rounds, key=lambda name: rounds[name])
    agent = agents[furthest]
    await agent.command("publish")
    assert (await agent.put(MODEL)).complete
    told = figures(furthest, "x", rounds[furthest])
    agent.report(job, "published", model_digest="m", blob_digest=digest_of(MODEL), **told)
    await agent.settled()


def quick(config: ServeConfig) -> ServeConfig:
    return replace(config, lease=timedelta(seconds=1))


@pytest.mark.slow
def test_a_secure_job_continues_with_new_keys_and_without_the_region(serve_config: ServeConfig, job_file: Path) -> None:
    async def scenario() -> None:
        async with (
            staged(quick(serve_config)) as stage,
            lost(stage, job_file, "abcd", "d", *CONTINUE, *SECURE) as (
                job,
                agents,
            ),
        ):
            await end_at_once(job, agents, a=6, b=7, c=6)
            first = await ended(stage, job)
            assert (first.state, bool(first.successor)) == ("succeeded", True)
            after = await stage.client.job(first.successor)
            plan = json.loads(after.plan_json)
            assert [part["region"] for part in plan["partitions"]] == ["a", "b", "c"]
            assert plan["codec"].endswith("-masked")
            assert (after.initial_model.digest, after.initial_model.round) == (digest_of(MODEL), 7)
            assert json.loads(after.spec_json)["train"]["end"]["steps"] == 26
            # The masks' keys are bound to the job's name.
            assert {(await agents[name].command("start", 2)).job for name in "abc"} == {after.id}
            why = await data_of(stage, job, "job.replanning")
            assert (why["without"], why["wanted"], why["by_itself"]) == (["d"], ["a", "b", "c"], True)
            # The region that was left out is told to forget the job.
            d = agents["d"]
            await d.connect()
            await d.told_to_stop(job)
            await d.close()

            # From the same model no other sum may be made.
            start = f"train.initialModel.job={job}"
            settings = ("train.end.steps=4", *SECURE, start)
            for avoided, told in (("[c, d]", "INADMISSIBLE"), ("[a]", "differs by")):
                spec = load(job_file, (*settings, f"regions.avoid={avoided}")).json
                answer = await stage.client.plan(spec)
                assert not answer.admissible
                assert told in answer.plan_json
            # Nor is the job itself made again without the region: its first rounds were summed with it.
            for n, masks in enumerate((SECURE, ())):
                error = await refused(
                    stage.submit(job_file, f"again-{n}", ("train.end.steps=40", *masks, "regions.avoid=[d]")),
                    "INADMISSIBLE",
                )
                assert f"{job} trains from the same model, and differs by d" in error.message

    run(scenario())


@pytest.mark.slow
def test_with_fewer_than_the_minimum_it_fails_and_keeps_its_model(serve_config: ServeConfig, job_file: Path) -> None:
    async def scenario() -> None:
        async with (
            staged(quick(serve_config)) as stage,
            lost(stage, job_file, "abc", "c", *CONTINUE, *SECURE) as (job, agents),
        ):
            await end_at_once(job, agents, a=6, b=6)
            done = await ended(stage, job)
            assert (done.state, done.error.code) == ("failed", "REGION_LOST")
            assert "region c stays away, and no job continues its model" in done.error.message
            assert "privacy.minRegions is 3, and 2 regions take part" in done.error.message
            # With the region it continues, from the last merged round.
            await agents["c"].connect()
            again = await stage.client.resume(job, "again")
            assert (again.job.initial_model.job, again.job.initial_model.round) == (job, 6)
            await agents["c"].close()

    run(scenario())


@pytest.mark.slow
def test_a_job_that_names_its_regions_continues_without_one_of_them(serve_config: ServeConfig, job_file: Path) -> None:
    async def scenario() -> None:
        async with (
            staged(quick(serve_config)) as stage,
            lost(stage, job_file, "abcd", "d", *CONTINUE, *SECURE, "regions.use=[a, b, c, d]") as (job, agents),
        ):
            await end_at_once(job, agents, a=6, b=6, c=6)
            first = await ended(stage, job)
            assert (first.state, bool(first.successor)) == ("succeeded", True)
            after = await stage.client.job(first.successor)
            assert [part["region"] for part in json.loads(after.plan_json)["partitions"]] == ["a", "b", "c"]
            assert json.loads(after.spec_json)["regions"]["use"] == ["a", "b", "c", "d"], "d may come back to it"

    run(scenario())


@pytest.mark.slow
@pytest.mark.parametrize("gone", ["a", "ac"])
def test_without_masks_it_may_continue_with_a_single_region(
    serve_config: ServeConfig, job_file: Path, gone: str
) -> None:
    """However many are lost together."""

    async def scenario() -> None:
        async with (
            staged(quick(serve_config)) as stage,
            lost(stage, job_file, f"b{gone}", gone, *CONTINUE) as (job, agents),
        ):
            await end_at_once(job, agents, b=6)
            first = await ended(stage, job)
            after = await stage.client.job(first.successor)
            assert [part["region"] for part in json.loads(after.plan_json)["partitions"]] == ["b"]

    run(scenario())


@pytest.mark.slow
def test_a_user_need_not_wait_for_the_limit(serve_config: ServeConfig, job_file: Path) -> None:
    async def scenario() -> None:
        asked = ("train.end.steps=40", "advanced.wan.exchange=synchronous", *SECURE)
        async with (
            staged(quick(serve_config)) as stage,
            lost(stage, job_file, "abcd", "d", *asked) as (job, agents),
        ):

            async def is_lost() -> bool:
                return "job.running" in await stage.events(job) and "partition.fenced" in await stage.events(job)

            await stage.until(is_lost)
            told: Any = await stage.client.replan(job, "d is on fire")
            assert "over a, b, c: d is on fire" in told.condition
            await end_at_once(job, agents, a=6, b=6, c=6)
            first = await ended(stage, job)
            assert first.successor

    run(scenario())


@pytest.mark.slow
def test_what_cannot_be_replanned_waits_on(serve_config: ServeConfig, job_file: Path) -> None:
    async def scenario() -> None:
        asked = ("train.end.steps=40", *SECURE)
        async with (
            staged(quick(serve_config)) as stage,
            lost(stage, job_file, "abc", "c", *asked) as (job, _),
        ):

            async def is_lost() -> bool:
                return "partition.fenced" in await stage.events(job)

            await stage.until(is_lost)
            error = await refused(stage.client.replan(job), "INADMISSIBLE", "so it continues unchanged")
            assert "privacy.minRegions is 3, and 2 regions take part" in error.message
            assert (await stage.client.job(job)).state == "running"

    run(scenario())


@pytest.mark.slow
@pytest.mark.parametrize("asked", [False, True])
def test_a_region_that_has_come_does_not_join_a_secure_job_without_another(
    serve_config: ServeConfig, job_file: Path, asked: bool
) -> None:
    async def scenario() -> None:
        settings = ("train.end.steps=40", "advanced.wan.exchange=synchronous") if asked else CONTINUE
        async with (
            staged(quick(serve_config)) as stage,
            lost(stage, job_file, "abcd", "d", *settings, *SECURE) as (job, agents),
        ):
            e = await stage.agent("e")
            await e.connect()
            beating = asyncio.create_task(beat(e))
            if asked:

                async def is_lost() -> bool:
                    return "partition.fenced" in await stage.events(job)

                await stage.until(is_lost)
                assert "over a, b, c" in (await stage.client.replan(job)).condition
            await end_at_once(job, agents, a=6, b=6, c=6)
            first = await ended(stage, job)
            assert (first.state, bool(first.successor)) == ("succeeded", True)
            after = await stage.client.job(first.successor)
            assert [part["region"] for part in json.loads(after.plan_json)["partitions"]] == ["a", "b", "c"]
            assert json.loads(after.spec_json)["regions"]["avoid"] == []
            beating.cancel()
            await e.close()

    run(scenario())


@pytest.mark.slow
def test_a_secure_job_that_cannot_continue_is_not_ended(serve_config: ServeConfig, job_file: Path) -> None:
    async def scenario() -> None:
        settings = ("train.end.steps=40", "advanced.wan.exchange=synchronous", *SECURE)
        async with (
            staged(quick(serve_config)) as stage,
            lost(stage, job_file, "abcd", "d", *settings, rounds=0) as (job, _),
        ):

            async def is_lost() -> bool:
                return "partition.fenced" in await stage.events(job)

            await stage.until(is_lost)
            error = await refused(stage.client.replan(job), "INADMISSIBLE", "so it continues unchanged")
            assert "differs by d" in error.message
            assert (await stage.client.job(job)).state == "running"

    run(scenario())


@pytest.mark.parametrize("masks", [SECURE, ()])
@pytest.mark.parametrize(
    ("began", "model", "rounds", "may"),
    [
        ("start", "final", 7, True),
        ("", "final", 7, True),
        ("", "", 7, False),
        ("start", "start", 7, False),
        ("start", "kept", 7, False),
        ("start", "final", 0, False),  # the same as `start`, under another digest
        ("final", "final", 7, False),
    ],
)
def test_only_from_where_it_ended_is_a_job_made_without_the_region(
    tmp_path: Path, masks: tuple[str, ...], began: str, model: str, rounds: int, may: bool
) -> None:
    entry = running(tmp_path, *SECURE, done=rounds)
    plan = replace(entry.plan, partitions=tuple(replace(entry.plan.partitions[0], region=name) for name in "abcd"))
    part = replace(entry.state.partitions[0], report=Report(1, "finished", round=rounds))
    state = replace(
        entry.state,
        partitions=tuple(replace(part, region=name) for name in "abcd"),
        initial_model=InitialModel("before", began, 1) if began else None,
        models=Models(kept=(KeptModel(5, {}, "kept", 1), KeptModel(rounds, {}, "final", 1))),
        blob_digest="final",
        blob_bytes=1,
        left_out=("d",),
    )
    job = replace(entry, plan=plan, state=state)
    spec = load(tmp_path / "job.yaml", masks).spec
    rest = replace(plan, partitions=plan.partitions[:3])
    start = InitialModel("j", model, 1, 3) if model else None
    assert (refused_by_difference(spec, rest, start, [job]) is None) is may
    # No other region has dropped out.
    assert refused_by_difference(spec, replace(plan, partitions=plan.partitions[1:]), start, [job]) is not None


@pytest.mark.slow
def test_a_second_region_drops_out_before_a_round_is_merged(serve_config: ServeConfig, job_file: Path) -> None:
    """The model that is left is the first job's, of which another region has the sum of the next round."""

    async def scenario() -> None:
        async with (
            staged(quick(serve_config)) as stage,
            lost(stage, job_file, "abcd", "d", *CONTINUE, *SECURE, rounds=0) as (job, agents),
        ):
            await end_at_once(job, agents, a=0, b=0, c=0)
            done = await ended(stage, job)
            assert (done.state, done.successor, done.error.code) == ("failed", "", "REGION_LOST")
            assert f"{job} trains from the same model, and differs by d" in done.error.message
            settings = ("train.end.steps=4", *SECURE, f"train.initialModel.job={job}", "regions.avoid=[d]")
            await refused(stage.submit(job_file, "again", settings), "INADMISSIBLE")

    run(scenario())


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (("advanced.wan.exchange=background",), "no round is the last one of all regions"),
        (("advanced.wan.policy=asgd-ga",), "exchanges in the background"),
    ],
)
def test_it_needs_rounds_that_all_make(job_file: Path, settings: tuple[str, ...], text: str) -> None:
    with pytest.raises(GeofedError, match=text) as caught:
        load(job_file, ("regions.lost=continue", *settings))
    assert caught.value.code == "SPEC_INVALID"
