"""A job that starts from another's model or a file, and one that is replanned because a region has come."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from support.running import UNHURRIED, Federation, Running, check_succeeded, digits_sites, eventually
from support.stores import BUCKET, s3_server

from deploy.local import LocalFederation, RegionSite

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

STILL = ("task.config.lr=0.0", "train.end.epochs=1", "wan.interval=10")
"""Nothing is learnt: the model that comes out is the one that went in, bit for bit."""


def losses(running: Running, job: str) -> list[float]:
    """Of the first region's rounds, in order."""
    told = [event for event in running.events(job) if event["kind"] == "partition.round"]
    return [event["data"]["loss"] for event in told if event["region"] == "frankfurt"]


def parameters(described: dict[str, Any]) -> str:
    return str(described["result"]["digests"]["model_parameters"])


@pytest.fixture(scope="module")
def models() -> dict[Path, dict[str, Any]]:
    """The job that has trained a model, by its federation's folder."""
    return {}


@pytest.fixture
def trained(running: Running, models: dict[Path, dict[str, Any]]) -> dict[str, Any]:
    """Once in each federation: to start from it does not change it."""
    if running.federation.folder not in models:
        job = running.submit("train.end.epochs=6", "wan.interval=10", "wan.exchange=synchronous")
        ended = running.wait_end(job)
        check_succeeded(ended)
        models[running.federation.folder] = ended
    return models[running.federation.folder]


def test_a_job_starts_where_another_has_ended(running: Running, trained: dict[str, Any]) -> None:
    start = f"train.initialModel.job={trained['id']}"
    ways = [
        ("wan.exchange=synchronous", "regions.use=[frankfurt, virginia]"),
        ("wan.exchange=background", "regions.use=[frankfurt, virginia]"),
        ("collective=scatter-reduce", "wan.policy=diloco", "train.workers={frankfurt: 1, shanghai: 2, virginia: 1}"),
        ("parallelism={pipeline: {stages: 2}}", "train.workers=2", "regions.use=[shanghai]"),
    ]
    # Stages are cut by a profile of the region that has them.
    profiled = ("profile", str(running.job_folder() / "job.yaml"), "--set", "regions.use=[shanghai]")
    running.federation.control_plane(*profiled, timeout=200)
    for way in ways:
        ended = running.wait_end(running.submit(start, *STILL, *way))
        check_succeeded(ended)
        assert parameters(ended) == parameters(trained), way
        assert ended["initial_model"] == ended["result"]["initial_model"] == ended["plan"]["initial_model"]
        assert ended["initial_model"]["job"] == trained["id"]
        assert ended["initial_model"]["digest"] == trained["result"]["model"]["digest"]
    job = running.submit(start, "train.end.epochs=3", "wan.interval=5", "wan.exchange=synchronous")
    check_succeeded(running.wait_end(job), accuracy=trained["result"]["metrics"]["accuracy"] - 0.03)
    before, after = losses(running, trained["id"]), losses(running, job)
    assert after[0] < before[-1] + 0.1 * (before[0] - before[-1]), (before, after)


def test_a_job_starts_from_a_file_as_far_as_it_goes(running: Running, trained: dict[str, Any], tmp_path: Path) -> None:
    """In bf16, without a bias, and with a tensor that the model lacks."""
    exported, path = tmp_path / "trained", tmp_path / "weights.safetensors"
    running.federation.control_plane("export", trained["id"], "--output-file", str(exported), "--yes")
    tensors = safetensors.torch.load_file(exported)
    narrow = {name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    lacking = [name for name in tensors if name.endswith("bias")][-1]
    safetensors.torch.save_file({n: t for n, t in narrow.items() if n != lacking} | {"x": torch.zeros(2)}, path)
    start, settings = f"train.initialModel.file={path}", ("wan.interval=5", "wan.exchange=synchronous")
    ended = running.wait_end(running.submit(start, "train.initialModel.partial=true", "train.end.epochs=3", *settings))
    check_succeeded(ended, accuracy=trained["result"]["metrics"]["accuracy"] - 0.05)
    assert ended["result"]["initial_model"]["file"] == "weights.safetensors"
    before, after = losses(running, trained["id"]), losses(running, ended["id"])
    assert after[0] < before[-1] + 0.2 * (before[0] - before[-1]), (before, after)
    refused = running.wait_end(running.submit(start))
    says = f"the model to start from has no {lacking} and has x, which the task's lacks"
    assert (refused["error"]["code"], losses(running, refused["id"])) == ("MODEL_MISMATCH", [])
    assert says in refused["error"]["message"]
    assert "partial" in refused["error"]["hint"]
    safetensors.torch.save_file(tensors | {lacking: torch.zeros(3)}, path)
    refused = running.wait_end(running.submit(start))
    assert (refused["error"]["code"], losses(running, refused["id"])) == ("MODEL_MISMATCH", [])
    assert f"{lacking} of the model to start from is F32 [3], the task's F32 [" in refused["error"]["message"]


def test_a_job_starts_from_a_file_that_each_region_reads_itself(tmp_path: Path) -> None:
    """From a store with the region's own keys, and from its disk; with another digest no region trains."""
    boto3 = pytest.importorskip("boto3")
    with s3_server() as server:
        stores = {"main": {"endpointUrl": server.endpoint, "region": "us-east-1"}}
        places = [{"uri": f"s3://{BUCKET}/models/", "store": "main"}, {"uri": f"file://{tmp_path}/models/"}]
        sites = digits_sites(tmp_path, ("frankfurt", "virginia"), stores=stores, models=places)
        with Federation(tmp_path / "federation", sites) as federation:
            running = Running(federation, tmp_path)
            trained = running.wait_end(running.submit("train.end.epochs=3", "wan.interval=10"))
            path = tmp_path / "models" / "digits.safetensors"
            path.parent.mkdir()
            federation.control_plane("export", trained["id"], "--output-file", str(path), "--yes")
            client = boto3.client("s3", endpoint_url=server.endpoint, region_name="us-east-1")
            client.upload_file(str(path), BUCKET, "models/digits.safetensors")
            client.close()
            digest = f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"

            def ends(uri: str, digest: str = digest) -> dict[str, Any]:
                start = f"train.initialModel={json.dumps({'uri': uri, 'digest': digest})}"
                return running.wait_end(running.submit(start, *STILL, "wan.exchange=synchronous"))

            for uri in (f"s3://{BUCKET}/models/digits.safetensors", f"file://{path}"):
                ended = ends(uri)
                check_succeeded(ended, accuracy=0.0)
                assert parameters(ended) == parameters(trained)
                assert (ended["initial_model"]["uri"], ended["initial_model"]["digest"]) == (uri, digest)
            for uri, wrong, code in (
                (f"file://{path}", f"sha256:{'ab' * 32}", "MODEL_MISMATCH"),
                (f"s3://{BUCKET}/models/none.safetensors", digest, "MODEL_NOT_FOUND"),
                (f"file://{tmp_path}/digits.safetensors", digest, "FORBIDDEN"),
            ):
                refused = ends(uri, wrong)
                assert (refused["state"], refused["error"]["code"]) == ("failed", code), refused["error"]
                assert losses(running, refused["id"]) == []
            no_digest = running.federation.control_plane(
                "validate", str(running.job_folder() / "job.yaml"), "--set", f"train.initialModel.uri=file://{path}",
                check=False,
            )  # fmt: skip
            assert "`uri` requires `digest`" in no_digest.stderr + no_digest.stdout


def test_a_model_of_another_shape_is_refused_by_name(running: Running, trained: dict[str, Any]) -> None:
    job = running.submit(f"train.initialModel.job={trained['id']}", "task.config.width=6")
    ended = running.wait_end(job)
    assert (ended["state"], ended["error"]["code"]) == ("failed", "MODEL_MISMATCH")
    assert (
        "0.weight of the model to start from is F32 [8, 1, 3, 3], the task's F32 [6, 1, 3, 3]"
        in (ended["error"]["message"])
    )


def test_what_a_job_starts_from_outlives_deaths(running: Running, trained: dict[str, Any]) -> None:
    """Of the region that brings the model in, before it has: it is still what all begin with."""
    for dies in ("agent", "server", "control-plane"):
        job = running.submit(f"train.initialModel.job={trained['id']}", *STILL)
        if dies == "control-plane":
            running.federation.kill("control-plane")
            running.federation.start_control_plane()
        else:
            strike = dies == "server"

            def found(strike: bool = strike) -> bool:
                """One of the job before may still be on its way out."""
                servers = running.descendants("frankfurt", "sync.ps")
                if servers and strike:
                    servers[-1].kill()
                return bool(servers)

            eventually(found, "the first region's server runs")
            if dies == "agent":
                running.federation.kill("frankfurt")
                running.federation.start_agent("frankfurt")
        ended = running.wait_end(job)
        check_succeeded(ended)
        assert parameters(ended) == parameters(trained), dies


@pytest.mark.timeout(500)
def test_a_job_that_is_planned_again_goes_on_with_the_region_that_has_come(tmp_path: Path) -> None:
    """First with one that joins, without a word of anybody; then with one that was away, as a user asks for it."""
    frankfurt, shanghai, virginia = digits_sites(tmp_path, ("frankfurt", "shanghai", "virginia"))
    options = ["--lease", "6s"]
    with Federation(tmp_path / "federation", [frankfurt, virginia], serve_options=options) as federation:
        running = Running(federation, tmp_path)
        _planned_again(running, shanghai, "synchronous", "auto")
        federation.kill("shanghai")
        eventually(lambda: _state(federation, "shanghai") == "lost", "shanghai is gone")
        _planned_again(running, shanghai, "background", "asked")


def _state(federation: LocalFederation, region: str) -> str:
    (found,) = [one for one in federation.ask(lambda client: client.regions()) if one.name == region]
    return found.state


def _planned_again(running: Running, comes: RegionSite, exchange: str, replan: str) -> None:
    federation = running.federation
    job = running.submit(
        "train.end.epochs=900", "wan.interval=10", "train.evaluateEvery=0", f"wan.exchange={exchange}",
        "objective.deadline=20h", "objective.budget=500", "train.learningRate={schedule: cosine}",
        f"regions.replan={replan}", task=UNHURRIED,
    )  # fmt: skip
    running.wait_round(job, 2)
    if replan == "asked":
        same = federation.control_plane("replan", job, check=False)
        assert same.returncode == 9, same.stderr
        assert "in the same regions, so" in same.stderr
    federation.join(comes)
    federation.start_agent("shanghai")
    federation.wait_connected(["shanghai"])
    if replan == "asked":
        told = federation.control_plane("replan", job, "--reason", "shanghai is here").stdout
        assert "replanned over frankfurt, shanghai, virginia: shanghai is here" in told
    # To wait for it is to wait for the last one that continues with its model.
    eventually(lambda: bool(running.describe(job)["finished_at"]), "the job ends", seconds=120.0)
    first = running.describe(job)
    check_succeeded(first, accuracy=0.0)
    after = running.describe(first["successor"])
    assert after["initial_model"]["job"] == job
    assert after["deadline_at"][:19] == first["deadline_at"][:19]
    asked, left = first["spec"], after["spec"]
    share = min(part["round"] for part in first["partitions"]) / first["plan"]["rounds"]
    assert left["train"]["end"]["epochs"] == pytest.approx(asked["train"]["end"]["epochs"] * (1 - share))
    assert left["train"]["learningRate"]["begin"] == pytest.approx(share)
    assert left["objective"]["budget"] == pytest.approx(500 - first["result"]["usd"], abs=1e-2)
    kinds = [event["kind"] for event in running.events(job)]
    assert kinds.index("job.replanning") < kinds.index("job.replanned") < kinds.index("job.succeeded")
    assert "job.deadline" not in kinds
    running.wait_round(after["id"], 5)
    federation.control_plane("finish", after["id"])
    ended = running.wait_end(after["id"])
    check_succeeded(ended, accuracy=max(0.9, first["result"]["metrics"]["accuracy"] - 0.02))
    assert [part["region"] for part in ended["partitions"]] == ["frankfurt", "shanghai", "virginia"]
    assert losses(running, after["id"])[0] < losses(running, job)[0]
