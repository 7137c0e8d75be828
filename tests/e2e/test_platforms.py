"""Jobs whose workers run on a function platform that several regions share."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest
from support import failures
from support.running import (
    UNHURRIED,
    Federation,
    Running,
    check_succeeded,
    digits_sites,
    eventually,
    named,
    warm_daemons,
)
from support.stores import BUCKET, s3_server
from support.warm_functions import forked_from

from tests.e2e.conftest import STORE_PRICES
from tests.region_agent.gateway.conftest import Embedded

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

REGIONS = ("lille", "lyon")
CAPACITY, MEMORY = {"workers": 2, "memoryMb": 2048}, "function.memoryMb=2000"
"""So much that nobody has to look again and again which part of it an invocation's processes share."""
READS = """
from geofed import secret
assert secret("token").startswith("value of l")
"""
PRINTS = """
import os
print("variables:", dict(os.environ), flush=True)
assert os.environ["AWS_SECRET_ACCESS_KEY"].startswith("of-the-")
"""


@pytest.fixture
def faasd(tmp_path: Path) -> Iterator[Embedded]:
    """A gateway with faasd's limits and conduct: one replica of a function, which counts as there before it listens."""
    folder = tmp_path / "faasd"
    folder.mkdir()
    images = {"geofed/worker": "region_agent.worker.handler:handle"}
    preload = ["numpy", "torch", "region_agent.worker.handler"]
    gateway = Embedded(folder, {"profile": "faasd", "images": images, "preload": preload, "cold_start": "500ms"})
    gateway.start()
    yield gateway
    gateway.stop()


def test_two_regions_with_two_workers_each_share_one_faasd(faasd: Embedded, tmp_path: Path) -> None:
    platform = {"kind": "openfaas", "url": faasd.url, "image": "geofed/worker"}
    sites = digits_sites(tmp_path, REGIONS, workers=2, gateway=platform)
    for site in sites:
        (tmp_path / f"{site.name}.token").write_text(f"value of {site.name}")
        site.config["secrets"] = {"token": {"file": str(tmp_path / f"{site.name}.token")}}
    with Federation(tmp_path / "federation", sites) as federation:
        running = Running(federation, tmp_path)
        settings = "train.workers=2", "train.end.epochs=12", "wan.interval=20", "task.secrets=[token]"
        job = running.submit(*settings, task=named("reads a secret") + READS)
        running.wait_round(job, 1)
        # Each region's value, although both have the same name for it.
        held = {path.read_text() for path in (faasd.state_dir / "secrets").iterdir()}
        assert held >= {f"value of {region}" for region in REGIONS}
        functions = httpx2.get(f"{faasd.url}/system/functions").json()
        assert sorted(function["labels"]["geofed.region"] for function in functions) == sorted(REGIONS * 2)
        assert {(function["replicas"], function["labels"]["geofed.job"]) for function in functions} == {(1, job)}
        described = running.wait_end(job)
        check_succeeded(described)
        assert not [event for event in running.events(job) if event["kind"] in ("setback", "worker-failed")]
        eventually(lambda: not httpx2.get(f"{faasd.url}/system/functions").json(), "the functions are deleted")
        eventually(lambda: not httpx2.get(f"{faasd.url}/system/secrets").json(), "and their secrets")

        # What an agent that was killed has left goes when it starts again; another region's function stays.
        left = {"geofed.owner": functions[0]["labels"]["geofed.owner"], "geofed.job": "gone"}
        own = functions[0]["labels"]["geofed.region"]
        for name, region in (("left", own), ("strange", "elsewhere")):
            body = {"service": name, "image": "geofed/worker", "labels": {**left, "geofed.region": region}}
            httpx2.post(f"{faasd.url}/system/functions", json=body).raise_for_status()
        for name in (f"token-{left['geofed.owner']}-0123abcd", "strange"):
            body = {"name": name, "value": "left"}
            httpx2.post(f"{faasd.url}/system/secrets", json=body).raise_for_status()
        federation.processes[own].terminate()
        federation.processes[own].wait(timeout=30)
        federation.start_agent(own)
        for kind in ("functions", "secrets"):
            found = partial(httpx2.get, f"{faasd.url}/system/{kind}")
            eventually(lambda found=found: {one["name"] for one in found().json()} == {"strange"}, f"only its {kind}")


def test_a_job_runs_in_its_own_image_where_the_region_file_allows_it(faasd: Embedded, tmp_path: Path) -> None:
    image = "geofed/worker-of-a-team:1"
    platform = {"kind": "openfaas", "url": faasd.url, "image": "geofed/worker"}
    sites = digits_sites(tmp_path, (*REGIONS, "bergen"), workers=2)
    for site in sites[:2]:
        site.config["gateway"] = platform
    sites[0].config["policy"] = {"isolation": "prefer", "allowImages": ["geofed/worker-of-a-team:"]}
    with Federation(tmp_path / "federation", sites) as federation:
        running = Running(federation, tmp_path)
        file = str(running.job_folder(named("has an image")) / "job.yaml")
        for command in ("explain", "submit"):
            for region, code in (("lyon", 9), ("bergen", 9)):
                settings = ("--set", f"task.image={image}", "--set", f"regions.use=[{region}]")
                done = federation.control_plane(command, file, *settings, check=False)
                assert done.returncode == code
                assert f"IMAGE_REFUSED]: region {region} does not let tasks run in {image}" in done.stderr, done.stderr
        settings = f"task.image={image}", "regions.use=[lille]", "train.workers=2", "train.end.epochs=12"
        job = running.submit(*settings, "wan.interval=20")
        running.wait_round(job, 1)
        functions = httpx2.get(f"{faasd.url}/system/functions").json()
        assert {one["image"] for one in functions} == {image}
        described = running.wait_end(job)
        assert described["state"] == "succeeded", described["error"]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Any]:
    """A cluster of Kubernetes that has the worker's image."""
    pytest.importorskip("lightkube")
    from support.kubernetes_cluster import Cluster, worker_command

    (tmp_path / "cluster").mkdir()
    with Cluster(tmp_path / "cluster", {"geofed/worker": worker_command()}, start=forked_from(warm_daemons)) as cluster:
        yield cluster


def _region_of(one: dict[str, Any]) -> str:
    return str(one["metadata"]["labels"]["geofed.region"])


@pytest.mark.timeout(600)
def test_two_regions_train_in_one_cluster_over_an_eviction(cluster: Any, tmp_path: Path) -> None:
    platform = {"kind": "kubernetes", "image": "geofed/worker", "kubeconfig": str(cluster.kubeconfig())}
    sites = digits_sites(tmp_path, REGIONS, workers=2, gateway=platform)
    for site in sites:
        (tmp_path / f"{site.name}.token").write_text(f"value of {site.name}")
        site.config["secrets"] = {"token": {"file": str(tmp_path / f"{site.name}.token")}}
    with Federation(tmp_path / "federation", sites) as federation:
        running = Running(federation, tmp_path)
        settings = "train.workers=2", "train.end.epochs=16", "wan.interval=20", "task.secrets=[token]"
        job = running.submit(*settings, task=UNHURRIED + READS)
        running.wait_round(job, 1)
        jobs = cluster.of_kind("jobs")
        labels = [one["metadata"]["labels"] for one in jobs]
        assert sorted(one["geofed.region"] for one in labels) == sorted(REGIONS * 2)
        assert {one["geofed.job"] for one in labels} == {job}
        assert len({one["geofed.gateway"] for one in labels}) == 2
        pod = next(one for one in cluster.of_kind("pods") if _region_of(one) == REGIONS[0])
        cluster.evict(pod["metadata"]["name"], "The node was low on resource: memory.")
        running.wait_round(job, 3)
        # An agent that is killed finds its Jobs when it starts again, and makes others.
        of_killed = {one["metadata"]["name"] for one in cluster.of_kind("jobs") if _region_of(one) == REGIONS[1]}
        federation.processes[REGIONS[1]].kill()
        federation.processes[REGIONS[1]].wait(timeout=30)
        federation.start_agent(REGIONS[1])
        eventually(lambda: not of_killed & {one["metadata"]["name"] for one in cluster.of_kind("jobs")}, "others")
        described = running.wait_end(job)
        check_succeeded(described)
        failed = [event for event in running.events(job) if event["kind"] == "worker-failed"]
        assert [event for event in failed if "low on resource: memory" in event["text"]], failed
        eventually(lambda: not cluster.of_kind("jobs"), "the Jobs are deleted")
        eventually(lambda: not cluster.of_kind("secrets"), "and their Secrets")

        # A function's start is measured, and plans use it.
        measured = running.job_folder(named("starts in a cluster")) / "job.yaml"
        told = json.loads(federation.control_plane("profile", str(measured), "-o", "json", timeout=120).stdout)
        starts = {region: one["start_seconds"] for region, one in told["data"]["regions"].items()}
        assert starts.keys() == set(REGIONS)
        assert all(0.1 < seconds < 60 for seconds in starts.values()), starts
        assert not cluster.of_kind("jobs")

        # An image that is not there fails a job, and says so.
        images = dict(cluster.images)
        cluster.images.clear()
        failing = running.submit("train.workers=2", "train.end.epochs=1", task=named("finds no image"))
        ended = running.wait_end(failing)
        assert (ended["state"], ended["error"]["code"]) == ("failed", "IMAGE_UNAVAILABLE"), ended
        cluster.images.update(images)


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A function service of AWS that has the worker's image, and that agents find by their environment."""
    pytest.importorskip("boto3")
    from support.lambda_service import IMAGE, Service, function_command

    (tmp_path / "lambda").mkdir()
    with Service(tmp_path / "lambda", {IMAGE: function_command()}, forked_from(warm_daemons)) as service:
        for name, value in service.variables.items():
            monkeypatch.setenv(name, value)
        yield service


@pytest.mark.timeout(600)
def test_two_regions_train_in_functions_of_aws_over_a_killed_invocation(functions: Any, tmp_path: Path) -> None:
    from support.lambda_service import IMAGE, ROLE

    gateway = {"kind": "lambda", "image": IMAGE, "role": ROLE}
    sites = digits_sites(tmp_path, REGIONS, gateway=gateway, capacity=CAPACITY)
    for site in sites:
        (tmp_path / f"{site.name}.token").write_text(f"value of {site.name}")
        site.config["secrets"] = {"token": {"file": str(tmp_path / f"{site.name}.token")}}
    with Federation(tmp_path / "federation", sites) as federation:
        running = Running(federation, tmp_path)
        settings = "train.workers=2", "train.end.epochs=16", "wan.interval=20", "task.secrets=[token]", MEMORY
        job = running.submit(*settings, task=UNHURRIED + READS)
        running.wait_round(job, 1)
        # One function in each region, and an invocation of it for each worker.
        of_region = {one.tags["geofed.region"]: name for name, one in functions.functions.items()}
        assert sorted(of_region) == sorted(REGIONS)
        assert {one.tags["geofed.job"] for one in functions.functions.values()} == {job}
        assert sorted(one.function for one in functions.working()) == sorted([*of_region.values()] * 2)
        killed = next(one for one in functions.working() if one.function == of_region[REGIONS[0]])
        killed.process.kill()
        running.wait_round(job, 3)
        # An agent that is killed finds its functions when it starts again, and makes others.
        federation.processes[REGIONS[1]].kill()
        federation.processes[REGIONS[1]].wait(timeout=30)
        federation.start_agent(REGIONS[1])
        eventually(lambda: of_region[REGIONS[1]] not in functions.functions, "its earlier function is deleted")
        described = running.wait_end(job)
        check_succeeded(described)
        failed = [event for event in running.events(job) if event["kind"] == "worker-failed"]
        assert [event for event in failed if "ended without a word" in event["text"]], failed
        eventually(lambda: not functions.functions, "the functions are deleted")

        # A plan knows that an invocation ends after 900 s.
        asked = "--set", "function.slice=590s", "--set", "task.secrets=[token]", "--dry-run"
        done = federation.control_plane("submit", str(running.job_folder() / "job.yaml"), *asked, check=False)
        refused = failures.told(done)
        assert refused.code == "LIMIT_EXCEEDED"
        assert "a slice has at most 585 s, 590 s are asked for" in refused.text

        # A function's start is measured, and plans use it.
        measured = running.job_folder(named("starts in a function")) / "job.yaml"
        told = json.loads(federation.control_plane("profile", str(measured), "-o", "json", timeout=120).stdout)
        starts = {region: one["start_seconds"] for region, one in told["data"]["regions"].items()}
        assert starts.keys() == set(REGIONS)
        assert all(0.1 < seconds < 60 for seconds in starts.values()), starts

        # An image that is not there fails a job, and says so.
        functions.images.clear()
        failing = running.submit("train.workers=2", "train.end.epochs=1", task=named("finds no image at AWS"))
        ended = running.wait_end(failing)
        assert (ended["state"], ended["error"]["code"]) == ("failed", "IMAGE_UNAVAILABLE"), ended


@pytest.mark.timeout(600)
def test_two_regions_train_in_functions_of_tencent_over_a_killed_invocation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tencentcloud.scf")
    from support.scf_service import IMAGE, REGION, Service

    (tmp_path / "scf").mkdir()
    key = tmp_path / "key"
    key.write_text("[default]\naws_access_key_id = AKIAOFTHEWORKERS\naws_secret_access_key = of-the-workers\n")
    with Service(tmp_path / "scf", {IMAGE: ""}, forked_from(warm_daemons)) as functions, s3_server() as store:
        for name, value in functions.variables.items():
            monkeypatch.setenv(name, value)
        gateway = {"kind": "scf", "image": IMAGE, "tencentRegion": REGION, "endpoint": functions.url}
        channel = {
            "kind": "s3", "bucket": BUCKET, "endpointUrl": store.endpoint, "region": "us-east-1", "pathStyle": True,
            "workerCredentialsFile": str(key), "prices": STORE_PRICES,
        }  # fmt: skip
        sites = digits_sites(tmp_path, REGIONS, gateway=gateway, channel=channel, capacity=CAPACITY)
        with Federation(tmp_path / "federation", sites) as federation:
            running = Running(federation, tmp_path)
            settings = "train.workers=2", "train.end.epochs=12", "wan.interval=40", MEMORY
            job = running.submit(*settings, task=named("prints its variables") + PRINTS)
            running.wait_round(job, 1)
            tags = [{one["Key"]: one["Value"] for one in made.given["Tags"]} for made in functions.functions.values()]
            assert sorted(one["geofed.region"] for one in tags) == sorted(REGIONS)
            assert {one["geofed.job"] for one in tags} == {job}
            assert {made.given["MemorySize"] for made in functions.functions.values()} == {2048}
            assert len(functions.running) == 4
            functions.running[0].process.kill()
            running.wait_round(job, 2)
            described = running.wait_end(job, 400)
            check_succeeded(described)
            # Memory comes in steps, and is planned and billed as it comes.
            assert {part["memory_mb"] for part in described["plan"]["partitions"]} == {2048}
            failed = [event for event in running.events(job) if event["kind"] == "worker-failed"]
            assert [event for event in failed if "ended without a word" in event["text"]], failed
            eventually(lambda: not functions.functions, "the functions are deleted")
            # The job has the key of its channel, and its logs have not.
            logs = federation.control_plane("logs", job).stdout
            assert "'AWS_SECRET_ACCESS_KEY': '[secret geofed-aws-secret-access-key" in logs
            assert not [value for value in ("AKIAOFTHEWORKERS", "of-the-workers") if value in logs]
