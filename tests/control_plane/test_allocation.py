"""Who gets workers where there are not enough for all: over real TLS sockets, with agents played by a script."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from control_plane.server import ServeConfig
from control_plane.spec import load
from geofed_pb.errors import GeofedError
from tests.control_plane.conftest import staged
from tests.control_plane.scenario import bring_up, run, train

HELD = "train.workers=2"


@pytest.mark.slow
def test_a_job_without_room_waits_in_line_and_starts_when_there_is(serve_config: ServeConfig, job_file: Path) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            a, b = await bring_up(stage)
            first = (await stage.submit(job_file, overrides=(HELD,))).job.id
            late = (await stage.submit(job_file, "r2", ("train.seed=2",))).job
            hurried = (await stage.submit(job_file, "r3", ("train.seed=3", HELD, "objective.deadline=1h"))).job
            assert (late.state, hurried.state) == ("queued", "queued")
            assert late.condition == f"waiting for workers in a, b, behind {first}"
            told = json.loads((await stage.client.plan(load(job_file).json)).plan_json)
            assert late.id in told["waits_for"]
            with pytest.raises(GeofedError, match="without breaking promises to other jobs") as caught:
                await stage.submit(job_file, "r4", ("objective.deadline=40s",))
            assert caught.value.code == "INADMISSIBLE"
            with pytest.raises(GeofedError, match="9 are needed"):
                await stage.submit(job_file, "r5", ("train.workers=9",))
            with pytest.raises(GeofedError, match="ILLEGAL_STATE"):
                await stage.client.scale(late.id, {"a": 1})
            await stage.client.cancel(first)
            for agent in (a, b):
                await agent.command("start")
                await agent.command("stop")
                agent.report(first, "stopped")
            starts = [await agent.command("start", 2) for agent in (a, b)]
            assert {start.job for start in starts} == {hurried.id}, "deadlines go first"
            assert (await stage.client.job(late.id)).state == "queued"
            kinds = await stage.events(hurried.id)
            assert kinds[:4] == ["job.submitted", "job.queued", "job.planned", "job.starting"]
            await stage.client.cancel(late.id)
            assert (await stage.client.job(late.id)).state == "cancelled"
            for agent in (a, b):
                await agent.close()

    run(scenario())


@pytest.mark.slow
def test_jobs_give_up_workers_for_those_that_wait(serve_config: ServeConfig, job_file: Path) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            a, b = await bring_up(stage)
            first = (
                await stage.submit(job_file, overrides=("train.end={epochs: 900}", "objective.minimise=time"))
            ).job.id
            await train(first, a, b)
            second = (await stage.submit(job_file, "r2", ("train.seed=2",))).job
            assert second.state == "queued"
            for agent in (a, b):
                scaled = await agent.command("scale")
                assert (scaled.job, scaled.workers) == (first, 1)
                assert second.id in scaled.reason
                start = await agent.command("start", 2)
                assert (start.job, start.plan.workers) == (second.id, 1)
            for agent in (a, b):
                await agent.close()

    run(scenario())


@pytest.mark.slow
def test_a_job_pauses_for_one_with_a_deadline_and_goes_on_after_it(serve_config: ServeConfig, job_file: Path) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            a, b = await bring_up(stage)
            first = (await stage.submit(job_file)).job.id
            await train(first, a, b)
            second = (await stage.submit(job_file, "r2", (HELD, "objective.deadline=10m"))).job
            assert second.state == "queued"
            for agent in (a, b):
                paused = await agent.command("scale")
                assert (paused.job, paused.workers, paused.reason) == (first, 0, f"paused in favour of {second.id}")
                assert (await agent.command("start", 2)).job == second.id
            await stage.client.cancel(second.id)
            for agent in (a, b):
                await agent.command("stop")
                agent.report(second.id, "stopped")
            for agent in (a, b):
                again = await agent.command("scale", 2)
                assert (again.job, again.workers, again.reason) == (first, 1, "workers are free again")
            for agent in (a, b):
                await agent.close()

    run(scenario())


@pytest.mark.slow
def test_a_promise_holds_workers_until_another_promise_has_ended(serve_config: ServeConfig, job_file: Path) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            a, b = await bring_up(stage)
            first = (await stage.submit(job_file, overrides=(HELD, "objective.deadline=10m"))).job
            assert first.state == "starting"
            second = (await stage.submit(job_file, "r2", ("train.seed=2", HELD, "objective.deadline=10m"))).job
            assert second.state == "queued", "the first one's workers are its own until it has ended"
            alone = json.loads(first.plan_json)["estimate"]["seconds"]["high"]
            soon = int(2.2 * alone)
            with pytest.raises(GeofedError, match="without breaking promises to other jobs") as caught:
                await stage.submit(job_file, "r3", ("train.seed=3", HELD, f"objective.deadline={soon}s"))
            assert caught.value.code == "INADMISSIBLE"
            seconds = re.search(r"of (\d+) s from now", str(caught.value.hint))
            assert seconds is not None
            later = ("train.seed=3", HELD, f"objective.deadline={int(seconds[1]) + 5}s")
            assert (await stage.submit(job_file, "r4", later)).job.deadline_at > 0, "what is named can be promised"
            soft = (
                "train.seed=4",
                HELD,
                f"objective={{deadline: {soon}s, soft: [{{deadline: {soon + 1}s, value: 0.5}}]}}",
            )
            told = (await stage.submit(job_file, "r5", soft)).job
            assert (told.state, told.deadline_at) == ("queued", 0.0)
            for agent in (a, b):
                await agent.close()

    run(scenario())
