"""A job that starts from another's model: who may, what is refused when, and what the regions are told."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from control_plane.server import ServeConfig
from control_plane.spec import load
from geofed_pb.errors import GeofedError
from tests.control_plane.conftest import Stage, staged
from tests.control_plane.fake_agent import FakeAgent, digest_of
from tests.control_plane.scenario import MODEL, bring_up, finish, run, train
from tests.control_plane.test_users import as_user, refused, submitted


async def ended(stage: Stage, job_file: Path, a: FakeAgent, b: FakeAgent) -> str:
    """A job that has handed its model in."""
    job = (await stage.submit(job_file)).job.id
    await train(job, a, b)
    await finish(job, a, b)
    assert (await stage.client.job(job)).state == "succeeded"
    return str(job)


def starting_from(job: str) -> str:
    return f"train.initialModel.job={job}"


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("train.initialModel={}", "exactly one of `job`, `file` and `uri`"),
        ("train.initialModel={job: x, file: y}", "exactly one of `job`, `file` and `uri`"),
        ("train.initialModel={job: x, partial: true}", "a job's model is whole"),
        ("train.initialModel={file: x, round: 1}", "a file holds one model"),
        ("train.initialModel={file: x, digest: y}", "digest"),
        ("train.initialModel={uri: s3://bucket/x}", "`uri` requires `digest`"),
        *(
            (f"train.initialModel={{uri: {uri}, digest: sha256:{'ab' * 32}}}", "no empty, `.` or `..` part")
            for uri in (
                "s3://bucket/a/../x",
                "s3://bucket//x",
                "file:///srv/./x",
                "file:///srv/..",
                "file:////x",
                "s3://../x",
            )
        ),
        ("train.initialModel={uri: https://host/x}", "uri"),
        ("train.initialModel={uri: s3://bucket/folder/}", "uri"),
        ("train.initialModel={uri: s3://bucket/x, file: y}", "exactly one of `job`, `file` and `uri`"),
        ("train.initialModel={file: missing.safetensors}", r"cannot read .*/job/missing.safetensors: No such file"),
        ("train.initialModel={file: task.py}", r"task.py is no file of safetensors: a header of"),
        ("train.initialModel={job: x, adapter: {file: y}}", "`adapter` is for a `file` or `uri`; a job's model has"),
        ("train.initialModel={adapter: {file: y}}", "exactly one of `job`, `file` and `uri`"),
        (
            f"train.initialModel={{uri: s3://b/x, digest: sha256:{'ab' * 32}, adapter: {{file: task.py}}}}",
            r"train.initialModel.adapter.file: .*task.py is no file of safetensors",
        ),
        ("train.initialModel={job: ''}", "at least 1 character"),
        ("train.initialModel={job: x, round: 0}", "round"),
        ("train.initialModel=x", "initialModel"),
        ("train.learningRate={schedule: linear, begin: 1}", "less than 1"),
    ],
)
def test_what_the_job_file_may_not_say(job_file: Path, setting: str, says: str) -> None:
    with pytest.raises(GeofedError, match=says) as caught:
        load(job_file, [setting])
    assert caught.value.code == "SPEC_INVALID"


@pytest.mark.slow
def test_every_region_fetches_it_and_all_that_tells_of_the_job_tells_of_it(
    serve_config: ServeConfig, job_file: Path
) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            a, b = await bring_up(stage)
            first = await ended(stage, job_file, a, b)
            told = {"job": first, "digest": digest_of(MODEL), "bytes": len(MODEL), "round": 2}
            told |= {"file": "", "partial": False, "uri": "", "adapter": "", "adapter_bytes": 0, "adapter_file": ""}
            # By its name, too, as only one job has it.
            spec = load(job_file, [starting_from("digits")])
            assert json.loads((await stage.client.plan(spec.json)).plan_json)["initial_model"] == told
            with pytest.raises(GeofedError, match="FORBIDDEN"):
                await a.fetch(digest_of(MODEL))
            job = (await stage.submit(job_file, "r2", (starting_from("digits"), "metadata.name=next"))).job
            assert (job.initial_model.job, job.initial_model.digest) == (first, digest_of(MODEL))
            assert json.loads(job.plan_json)["initial_model"] == told
            starts = [await agent.command("start", 2) for agent in (a, b)]
            assert [start.task.initial_model for start in starts] == [digest_of(MODEL)] * 2
            assert await a.fetch(digest_of(MODEL)) == MODEL
            (event,) = [e async for e in stage.client.watch(job.id, follow=False) if e.kind == "job.submitted"]
            assert json.loads(event.data_json)["initial_model"] == told
            assert f"from the model of {first}" in event.text
            again = await stage.submit(job_file, "r2", (starting_from("digits"), "metadata.name=next"))
            assert (again.job.id, again.created) == (job.id, False)
            for agent in (a, b):
                await agent.close()
            there = replace(
                serve_config,
                **{
                    name: f"127.0.0.1:{port}"
                    for name, port in (("listen", stage.ports.control), ("agent_listen", stage.ports.agent))
                },
            )
        async with staged(there) as stage:
            # What it begins with outlives the control plane.
            a.boot_id = "boot-2"
            await a.connect()
            assert (await a.command("start", 3)).task.initial_model == digest_of(MODEL)
            assert await a.fetch(digest_of(MODEL)) == MODEL
            await a.close()

    run(scenario())


@pytest.mark.slow
def test_what_has_no_model_or_is_anothers_is_refused_at_once(serve_config: ServeConfig, job_file: Path) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            a, b = await bring_up(stage)
            ann, bob = [(await stage.client.add_user(name)).token for name in ("ann", "bob")]

            async def both(client: Any, job: str, code: str, text: str) -> None:
                """Asked for the plan, and submitted."""
                await refused(client.plan(load(job_file, [starting_from(job)]).json), code, text)
                await refused(submitted(client, job_file, "never", starting_from(job)), code, text)

            await both(stage.client, "nobody", "JOB_NOT_FOUND", "job nobody not found")
            async with as_user(stage, ann) as client:
                job = (await submitted(client, job_file, "r1")).id
                await both(client, job, "MODEL_NOT_FOUND", "a job can start from its model once it has ended")
                await train(job, a, b)
                await finish(job, a, b)
                assert (await client.plan(load(job_file, [starting_from(job)]).json)).admissible
            async with as_user(stage, bob) as client:
                await both(client, job, "FORBIDDEN", "is another user's job")
            assert (await stage.client.plan(load(job_file, [starting_from(job)]).json)).admissible
            (serve_config.state_dir / "blobs" / digest_of(MODEL).removeprefix("sha256:")).unlink()
            await both(stage.client, job, "MODEL_NOT_FOUND", "is missing")
            cancelled = (await stage.submit(job_file, "r3")).job.id
            await stage.client.cancel(cancelled)
            await both(stage.client, cancelled, "MODEL_NOT_FOUND", "is cancelling; a job can start from its model")
            assert len(await stage.client.jobs(ended=True)) == 2
            for agent in (a, b):
                await agent.close()

    run(scenario())
