"""Submissions with the user's signature: checked by the control plane, and carried to the regions as they are."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from control_plane.client import ControlClient
from control_plane.server import ServeConfig
from control_plane.spec import load, pack
from geofed_pb.security.signing import Signer, require_signature, statement
from geofed_pb.v1 import agent_pb2, control_pb2
from tests.control_plane.conftest import Stage, staged
from tests.control_plane.scenario import bring_up, run
from tests.control_plane.test_shut_out import refused


def as_user(stage: Stage, token: str, key: Path | None) -> ControlClient:
    return ControlClient(stage.context.address, stage.context.ca_file.read_bytes(), token, key)


async def submitted(client: ControlClient, job_file: Path, request_id: str, *overrides: str) -> Any:
    loaded = load(job_file, overrides)
    packed = pack(loaded.folder, loaded.spec.task.module)
    content, digest = packed.content, packed.digest
    await client.put_bundle(content, digest)
    return (await client.submit(loaded.json, digest, request_id)).job


def checked(task: agent_pb2.TaskRef, public_key: str) -> None:
    facts = task.submission.spec_digest, task.bundle_digest, task.module, task.config_json, task.dataset, task.env
    require_signature(task.submission, public_key, statement(*facts))


def test_a_signature_travels_to_every_region(serve_config: ServeConfig, job_file: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        # No probe is answered.
        async with staged(replace(serve_config, probe_wait=timedelta(seconds=2))) as stage:
            a, b = await bring_up(stage)
            a.probes = True
            token = (await stage.client.add_user("ann")).token
            ann_key = Signer.load_or_create(tmp_path / "ann.key").public_key
            async with as_user(stage, token, tmp_path / "ann.key") as ann:
                job = await submitted(ann, job_file, "r1", "task.env={MODE: fast}")
                probe = await a.command("probe")
                assert probe.task.submission.user == "ann"
                assert probe.task.env == {"MODE": "fast"}
                checked(probe.task, ann_key)
                for agent in (a, b):
                    task = (await agent.command("start")).task
                    assert (task.submission.user, task.env) == ("ann", {"MODE": "fast"})
                    checked(task, ann_key)
                (user,) = await stage.client.users()
                assert user.public_key == ann_key
                kinds = [event.kind async for event in stage.client.watch("", follow=False)]
                assert kinds.count("user.key") == 1
            assert job.user == "ann"
            operators = await submitted(stage.client, job_file, "r2")
            own = Signer.load_or_create(serve_config.state_dir / "user.key").public_key
            await stage.client.cancel(job.id)
            for agent in (a, b):
                await agent.told_to_stop(job.id)
                agent.report(job.id, "stopped")
            task = (await a.command("start", 2)).task
            assert (task.submission.user, operators.user) == ("operator", "")
            checked(task, own)
            for agent in (a, b):
                await agent.close()

    run(scenario())


def test_whose_key_is_known_submits_with_it_or_not_at_all(
    serve_config: ServeConfig, job_file: Path, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            a, b = await bring_up(stage)
            token = (await stage.client.add_user("ann")).token
            async with as_user(stage, token, tmp_path / "ann.key") as ann:
                await submitted(ann, job_file, "r1")
                forged = json.loads(load(job_file, ()).json)
                forged["task"]["config"] = {"width": 1}
                digest = (await stage.client.job("digits")).spec_json
                packed = pack(job_file.parent, "task.py")
                content, bundle = packed.content, packed.digest
                signed = Signer.load_or_create(tmp_path / "ann.key").sign(load(job_file, ()).json, bundle)
                request = control_pb2.SubmitRequest(
                    request_id="r9", spec_json=json.dumps(forged), bundle_digest=bundle, submission=signed
                )
                assert digest
                assert content
                await refused(ann._answer(lambda stub: stub.Submit, request), "FORBIDDEN", "is for another job file")
                signed.spec_digest = (
                    Signer.load_or_create(tmp_path / "eve.key").sign(json.dumps(forged), bundle).spec_digest
                )
                request.submission.CopyFrom(signed)
                await refused(ann._answer(lambda stub: stub.Submit, request), "FORBIDDEN", "or was changed")
            loaded = load(job_file, ())
            for key, text in ((None, "is not signed"), (tmp_path / "eve.key", "has another key")):
                async with as_user(stage, token, key) as thief:
                    await refused(submitted(thief, job_file, "r2"), "FORBIDDEN", text)
                    await refused(thief.plan(loaded.json, bundle_digest=bundle), "FORBIDDEN", text)
                    profile = thief.profile(loaded.json, bundle, "p1")
                    await refused(anext(aiter(profile)), "FORBIDDEN", text)
            await stage.client.change_user("ann", new_key=True)
            async with as_user(stage, token, tmp_path / "eve.key") as ann:
                await submitted(ann, job_file, "r3")
            for agent in (a, b):
                await agent.close()

    run(scenario())


def test_a_job_says_whose_approval_it_waits_for(serve_config: ServeConfig, job_file: Path) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            a, b = await bring_up(stage)
            job = (await stage.submit(job_file)).job.id
            text = f"waiting for the approval of b's operator: `geofed agent approve {job}`"
            a.report(job, "ready", ps_address="a.example:9000")
            b.report(job, "accepted", condition=text)
            for agent in (a, b):
                await agent.settled()
            assert (await stage.client.job(job)).condition == f"waiting for b to be ready; b: {text}"
            for agent in (a, b):
                await agent.close()

    run(scenario())


def test_a_context_says_where_the_key_is(tmp_path: Path, serve_config: ServeConfig) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            assert stage.context.key_file == serve_config.state_dir / "user.key"
            assert replace(stage.context, key_file=None).key_file is None

    run(scenario())
