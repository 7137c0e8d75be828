"""A job that starts from a file of its user: what is uploaded, what regions are told, and how long it is kept."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from control_plane import client as client_module
from control_plane._plan_view import initial_model_text
from control_plane.cli._job_file import read_job
from control_plane.cli.commands.submit import Submission, planned
from control_plane.client import ControlClient
from control_plane.server import ServeConfig
from control_plane.service.rpc import _control
from control_plane.spec import load, pack
from geofed_pb.errors import GeofedError
from geofed_pb.files.task_folder import MAX_ARCHIVE_BYTES
from geofed_pb.rpc import CHUNK_BYTES
from geofed_pb.security.signing import Signer, require_signature, statement
from geofed_pb.v1 import agent_pb2, common_pb2
from tests.control_plane.conftest import Stage, staged
from tests.control_plane.fake_agent import digest_of
from tests.control_plane.scenario import bring_up, run, train
from tests.control_plane.test_models import keeps
from tests.control_plane.test_users import refused

WEIGHTS = save({"w": np.arange(1 << 20, dtype=np.float32)})
"""Several chunks."""
DIGEST = digest_of(WEIGHTS)
START = "train.initialModel={file: weights.safetensors, partial: true}"


@pytest.fixture
def weights(job_file: Path) -> Path:
    path = job_file.parent / "weights.safetensors"
    path.write_bytes(WEIGHTS)
    return path


async def submitted(client: ControlClient, job_file: Path, request_id: str, *overrides: str) -> Any:
    view = await Submission(*read_job(job_file, list(overrides)), request_id).send(client)
    return await client.job(view["id"])


async def kinds(stage: Stage) -> dict[str, int]:
    return {kind.kind: kind.count for kind in (await stage.client.storage()).kinds if kind.count}


@pytest.mark.usefixtures("weights")
def test_the_file_is_named_by_its_digest_and_is_no_code(job_file: Path) -> None:
    loaded, packed = read_job(job_file, [START])
    assert json.loads(loaded.json)["train"]["initialModel"] == {
        "job": None, "round": None, "file": "weights.safetensors", "digest": DIGEST, "partial": True,
        "uri": None, "adapter": None,
    }  # fmt: skip
    assert len(packed.content) < len(WEIGHTS) // 10
    with pytest.raises(GeofedError, match=f"has the digest {DIGEST}, not sha256:0000"):
        load(job_file, [START, f"train.initialModel.digest=sha256:{'0' * 64}"])
    assert load(job_file, [START, f"train.initialModel.digest={DIGEST}"]).json == loaded.json


@pytest.mark.slow
@pytest.mark.usefixtures("weights")
def test_every_region_fetches_it_and_it_is_kept_for_as_long_as_the_job_needs_it(
    serve_config: ServeConfig, job_file: Path
) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            a, b = await bring_up(stage)
            told = {"job": "", "digest": DIGEST, "bytes": 0, "round": 0, "file": "weights.safetensors"}
            told |= {"partial": True, "uri": "", "adapter": "", "adapter_bytes": 0, "adapter_file": ""}
            loaded, bundle = read_job(job_file, [START])
            # A plan needs no upload, which takes long.
            plan = await planned(stage.client, loaded, bundle)
            assert json.loads(plan.plan_json)["initial_model"] == told
            told["bytes"] = len(WEIGHTS)
            with pytest.raises(GeofedError, match="is not at the control plane") as caught:
                await stage.client.submit(loaded.json, bundle.digest, "r1")
            assert caught.value.code == "MODEL_NOT_FOUND"
            job = await submitted(stage.client, job_file, "r1", START)
            assert json.loads(job.plan_json)["initial_model"] == told
            starts = [await agent.command("start") for agent in (a, b)]
            assert {(s.task.initial_model, s.task.initial_holds, s.task.initial_job) for s in starts} == {
                (DIGEST, "some", "")
            }
            assert await a.fetch(DIGEST) == WEIGHTS
            own = Signer.load_or_create(serve_config.state_dir / "user.key").public_key
            task = starts[0].task
            facts = task.bundle_digest, task.module, task.config_json, task.dataset, task.env, DIGEST
            require_signature(task.submission, own, statement(task.submission.spec_digest, *facts))
            (event,) = [e async for e in stage.client.watch(job.id, follow=False) if e.kind == "job.submitted"]
            assert event.text.endswith("to start from the file weights.safetensors")
            for agent in (a, b):
                await agent.close()
            ports = {"listen": stage.ports.control, "agent_listen": stage.ports.agent}
            there = replace(serve_config, **{name: f"127.0.0.1:{port}" for name, port in ports.items()})
        async with staged(there) as stage:
            assert (await kinds(stage))["models"] == 1
            a.boot_id = "boot-2"
            await a.connect()
            again = (await a.command("start", 2)).task
            assert (again.initial_model, again.initial_holds) == (DIGEST, "some")
            assert await a.fetch(DIGEST) == WEIGHTS
            await stage.client.cancel(job.id)
            await a.told_to_stop(job.id)
            a.report(job.id, "stopped")
            b.boot_id = "boot-2"
            await b.connect()
            await b.told_to_stop(job.id)
            b.report(job.id, "stopped")

            async def over() -> bool:
                return (await stage.client.job(job.id)).state == "cancelled"

            await stage.until(over)
            assert ((await kinds(stage)).get("models", 0), (await kinds(stage))["unused"]) == (0, 1)
            await stage.client.delete(job.id)
            assert "unused" not in await kinds(stage)
            for agent in (a, b):
                await agent.close()

    run(scenario())


@pytest.mark.usefixtures("weights")
def test_an_adapter_of_weights_that_regions_read_is_uploaded_and_signed(
    serve_config: ServeConfig, job_file: Path
) -> None:
    uri = f"train.initialModel={{uri: s3://models/w, digest: 'sha256:{'ab' * 32}'}}"
    start = (uri, "train.initialModel.adapter.file=weights.safetensors")

    async def scenario() -> None:
        async with staged(serve_config) as stage:
            a, b = await bring_up(stage)
            loaded, bundle = read_job(job_file, list(start))
            own = Signer.load_or_create(serve_config.state_dir / "user.key")
            await stage.client.put_bundle(bundle.content, bundle.digest)
            await refused(stage.client.submit(loaded.json, bundle.digest, "r1"), "MODEL_NOT_FOUND", DIGEST)
            job = await submitted(stage.client, job_file, "r1", *start)
            told = json.loads(job.plan_json)["initial_model"]
            assert (told["adapter"], told["adapter_bytes"]) == (DIGEST, len(WEIGHTS))
            assert initial_model_text(told) == "the file s3://models/w with the adapter weights.safetensors (4.2 MB)"
            task = (await a.command("start")).task
            assert (task.initial_adapter, task.submission.initial_adapter) == (DIGEST, DIGEST)
            require_signature(task.submission, own.public_key, own_statement(task))
            assert await a.fetch(DIGEST) == WEIGHTS
            assert (await kinds(stage))["models"] == 1
            for agent in (a, b):
                await agent.close()

    run(scenario())


def own_statement(task: agent_pb2.TaskRef) -> bytes:
    signed = task.submission
    return statement(
        signed.spec_digest, task.bundle_digest, task.module, task.config_json, task.dataset, task.env,
        signed.initial_model, initial_adapter=signed.initial_adapter,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.usefixtures("weights")
def test_what_continues_the_job_starts_from_its_model_under_the_same_signature(
    serve_config: ServeConfig, job_file: Path
) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            a, b = await bring_up(stage)
            end = ("train.end={steps: 20}", "wan.interval=2", "train.evaluateEvery=1")
            job = (await submitted(stage.client, job_file, "r1", START, *end)).id
            await train(job, a, b)
            kept = await keeps(job, a, b, 1, 1)
            await stage.client.cancel(job)
            for agent in (a, b):
                agent.report(job, "stopped")
                await agent.settled()
            assert json.loads((await stage.client.job(job)).result_json)["initial_model"]["digest"] == DIGEST
            after = (await stage.client.resume(job, "again")).job
            assert (after.initial_model.job, after.initial_model.file) == (job, "")
            task = (await a.command("start", 2)).task
            assert (task.initial_model, task.initial_job, task.initial_holds) == (digest_of(kept), job, "")
            own = Signer.load_or_create(serve_config.state_dir / "user.key").public_key
            facts = task.bundle_digest, task.module, task.config_json, task.dataset, task.env, DIGEST
            require_signature(task.submission, own, statement(task.submission.spec_digest, *facts))
            assert task.submission.initial_model == DIGEST
            for agent in (a, b):
                await agent.close()

    run(scenario())


class _Lost:
    """A stub whose first uploads are lost: their connection ends after a chunk has arrived, or before."""

    def __init__(self, stub: Any, arrives: list[bool]) -> None:
        self._stub, self._arrives, self.offsets = stub, arrives, list[int]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stub, name)

    async def PutBlob(self, chunks: AsyncIterator[common_pb2.BlobChunk], metadata: Any) -> common_pb2.BlobAck:
        first = await anext(chunks)
        self.offsets.append(first.offset)
        if not self._arrives:
            return await self._stub.PutBlob(_whole(first, chunks), metadata=metadata)  # type: ignore[no-any-return]
        if self._arrives.pop(0):
            await self._stub.PutBlob(_one(first), metadata=metadata)
        raise GeofedError("UNAVAILABLE", "the connection is lost")


async def _one(chunk: common_pb2.BlobChunk) -> AsyncIterator[common_pb2.BlobChunk]:
    yield chunk


async def _whole(
    first: common_pb2.BlobChunk, others: AsyncIterator[common_pb2.BlobChunk]
) -> AsyncIterator[common_pb2.BlobChunk]:
    yield first
    async for chunk in others:
        yield chunk


def test_an_interrupted_upload_continues_where_it_was_while_bytes_arrive(
    serve_config: ServeConfig, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "RETRY_WAIT", timedelta(0))

    async def scenario() -> None:
        async with staged(serve_config) as stage:
            begun = list[int]()
            stub = _Lost(stage.client._stub, [True, True, False])
            stage.client._stub = stub  # type: ignore[assignment]
            await refused(stage.client.put_weights(weights, DIGEST, begun.append), "UNAVAILABLE", "is lost")
            await stage.client.put_weights(weights, DIGEST, begun.append)
            await stage.client.put_weights(weights, DIGEST, begun.append)
            have = 2 * CHUNK_BYTES
            assert (begun, stub.offsets) == ([len(WEIGHTS), len(WEIGHTS) - have], [0, CHUNK_BYTES, have, have])
            assert (serve_config.state_dir / "blobs" / DIGEST.removeprefix("sha256:")).read_bytes() == WEIGHTS

    run(scenario())


def test_weights_have_limits_of_their_own(
    serve_config: ServeConfig, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            chunk = common_pb2.BlobChunk(digest=DIGEST, total_bytes=65 << 30, data=b"x", model=True)
            for model, most in ((True, 64 << 30), (False, MAX_ARCHIVE_BYTES)):
                chunk.model = model
                upload = stage.client._stub.PutBlob(_one(chunk), metadata=stage.client._metadata)
                with pytest.raises(Exception, match=f"exceeds the limit of {most}"):
                    await upload
            monkeypatch.setattr(_control, "_DAILY_WEIGHTS_BYTES", len(WEIGHTS))
            await stage.client.put_weights(weights, DIGEST)
            weights.write_bytes(save({"w": np.zeros(1)}))
            other = f"sha256:{hashlib.sha256(weights.read_bytes()).hexdigest()}"
            await refused(stage.client.put_weights(weights, other), "LIMIT_EXCEEDED", "were uploaded within a day")
            await stage.client.put_bundle(b"code", digest_of(b"code"))

    run(scenario())


def test_what_a_client_did_not_check_is_refused(serve_config: ServeConfig, job_file: Path, weights: Path) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            a, b = await bring_up(stage)
            packed = pack(job_file.parent, "task.py", [weights])
            content, bundle = packed.content, packed.digest
            await stage.client.put_bundle(content, bundle)
            spec = json.loads(load(job_file, [START]).json)
            for digest, text in ((None, "the digest is missing"), (bundle, "is no file of safetensors")):
                spec["train"]["initialModel"]["digest"] = digest
                await refused(stage.client.submit(json.dumps(spec), bundle, "r1"), "SPEC_INVALID", text)
                await refused(stage.client.plan(json.dumps(spec)), "SPEC_INVALID", text)
                start = {"uri": "s3://models/w", "digest": DIGEST, "adapter": {"file": "a", "digest": digest}}
                adapted = {**spec, "train": {**spec["train"], "initialModel": start}}
                await refused(stage.client.plan(json.dumps(adapted)), "SPEC_INVALID", text)
            for agent in (a, b):
                await agent.close()

    run(scenario())


def test_a_file_that_changes_while_it_is_sent_is_refused(serve_config: ServeConfig, weights: Path) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            weights.write_bytes(WEIGHTS[:-4] + os.urandom(4))
            await refused(stage.client.put_weights(weights, DIGEST), "DIGEST_MISMATCH", "has the digest")
            await asyncio.to_thread(weights.write_bytes, WEIGHTS)
            await stage.client.put_weights(weights, DIGEST)

    run(scenario())
