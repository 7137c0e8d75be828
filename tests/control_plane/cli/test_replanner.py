"""A job that is replanned, as who watches it sees it: it continues as another one, to that one's end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from control_plane.server import ServeConfig
from geofed_pb.v1 import common_pb2
from tests.control_plane.cli.conftest import ROOT
from tests.control_plane.conftest import staged
from tests.control_plane.scenario import bring_up, figures, run, train
from tests.control_plane.test_replanner import LONG, close, come, end_early, ended, rounds
from tests.control_plane.test_users import refused

pytestmark = pytest.mark.processes


@contextlib.asynccontextmanager
async def command(context: Path, *arguments: str) -> AsyncIterator[Process]:
    """The command, in a process of its own."""
    told = {**os.environ, "GEOFED_CONTEXT": str(context), "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"}
    words = (sys.executable, "-m", "control_plane.cli.main", *arguments)
    process = await asyncio.create_subprocess_exec(*words, env=told, stdout=PIPE, stderr=PIPE)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def test_who_watches_a_job_is_led_to_the_end_of_the_one_that_goes_on(serve_config: ServeConfig, job_file: str) -> None:
    async def scenario() -> None:
        context = serve_config.state_dir / "context.json"
        async with staged(serve_config) as stage, contextlib.AsyncExitStack() as commands:
            a, b = await bring_up(stage)
            job = (await stage.submit(Path(job_file), overrides=LONG)).job.id
            wait = await commands.enter_async_context(command(context, "wait", job, "-o", "json"))
            watch = await commands.enter_async_context(command(context, "status", job, "--watch", "-o", "jsonl"))
            await train(job, a, b)
            c = await come(stage, "c")
            await rounds(job, (a, b), 5)
            await stage.client.replan(job)
            await end_early(job, (a, b), 5)
            after = (await ended(stage, job)).successor
            # Who comes only now is led there, too.
            late = await commands.enter_async_context(command(context, "wait", job, "--for", "running", "-o", "name"))
            for agent, nth in ((a, 2), (b, 2), (c, 1)):
                assert (await agent.command("start", nth)).job == after
                agent.report(after, "ready", ps_address=f"{agent.region}.example:9000")
            for agent in (a, b, c):
                agent.report(after, "training", **figures(agent.region, "b" if agent is a else "a", 1))
            out, said = await asyncio.wait_for(late.communicate(), 30)
            assert (late.returncode, out.decode().strip()) == (0, after)
            assert said.decode().count(f"job {job} continues as {after}\n") == 1
            a.report(after, "failed", error=common_pb2.Error(code="TASK_FAILED", message="loss raised ValueError"))
            assert (await ended(stage, after)).state == "failed"

            out, said = await asyncio.wait_for(wait.communicate(), 30)
            error = json.loads(out)["error"]
            assert (wait.returncode, error["code"]) == (1, "JOB_FAILED")
            assert f"job {after} failed: TASK_FAILED" in error["message"]
            assert said.decode().count(f"job {job} continues as {after}\n") == 1
            out, said = await asyncio.wait_for(watch.communicate(), 30)
            *events, last = [json.loads(line) for line in out.splitlines()]
            assert [event["data"]["job"] for event in events if event["data"]["terminal"]] == [job, after]
            assert (watch.returncode, last["error"]["code"]) == (1, "JOB_FAILED")
            assert f"job {job} continues as {after}\n" in said.decode()
            await close(a, b, c)

    run(scenario())


def test_the_name_of_a_job_is_that_of_the_last_one_that_goes_on(serve_config: ServeConfig, job_file: str) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            a, b = await bring_up(stage)
            client, file = stage.client, Path(job_file)
            job = (await stage.submit(file, overrides=LONG)).job.id
            await train(job, a, b)
            c = await come(stage, "c")
            await rounds(job, (a, b), 5)
            await client.replan("digits")
            assert (await client.job("digits")).id == job, "until it has ended"
            await end_early(job, (a, b), 5)
            after = (await ended(stage, job)).successor
            assert (await client.job("digits")).id == after
            assert (await client.job(job)).id == job
            assert {event.job async for event in client.watch("digits", follow=False)} == {after}
            await refused(client.replan("digits"), "ILLEGAL_STATE", f"job {after} is not running")
            error = await refused(client.replan(job), "ILLEGAL_STATE", f"job {job} has succeeded; only a running job")
            assert error.hint == f"it continued as {after}"
            # One that only starts from its model is another job.
            wanted = (f"train.initialModel={{job: {job}}}",)
            other = (await stage.submit(file, "r2", wanted)).job.id
            await refused(client.job("digits"), "JOB_NOT_FOUND", f"2 jobs have the name digits: {other}, {after}")
            await close(a, b, c)

    run(scenario())
