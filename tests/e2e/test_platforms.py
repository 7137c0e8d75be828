"""Jobs whose workers run on a function platform that several regions share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from support.running import Federation, Running, check_succeeded, digits_sites, eventually

from tests.region_agent.gateway.conftest import Embedded

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

REGIONS = ("lille", "lyon")


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
    with Federation(tmp_path / "federation", sites) as federation:
        running = Running(federation, tmp_path)
        job = running.submit("train.workers=2", "train.end.epochs=12", "wan.interval=20")
        running.wait_round(job, 1)
        functions = httpx2.get(f"{faasd.url}/system/functions").json()
        assert sorted(function["labels"]["geofed.region"] for function in functions) == sorted(REGIONS * 2)
        assert {(function["replicas"], function["labels"]["geofed.job"]) for function in functions} == {(1, job)}
        described = running.wait_end(job)
        check_succeeded(described)
        assert not [event for event in running.events(job) if event["kind"] in ("setback", "worker-failed")]
        eventually(lambda: not httpx2.get(f"{faasd.url}/system/functions").json(), "the functions are deleted")

        # What an agent that was killed has left goes when it starts again; another region's function stays.
        left = {"geofed.owner": functions[0]["labels"]["geofed.owner"], "geofed.job": "gone"}
        own = functions[0]["labels"]["geofed.region"]
        for name, region in (("left", own), ("strange", "elsewhere")):
            body = {"service": name, "image": "geofed/worker", "labels": {**left, "geofed.region": region}}
            httpx2.post(f"{faasd.url}/system/functions", json=body).raise_for_status()
        federation.processes[own].terminate()
        federation.processes[own].wait(timeout=30)
        federation.start_agent(own)
        there = [{"strange"}]
        eventually(lambda: {f["name"] for f in httpx2.get(f"{faasd.url}/system/functions").json()} in there, "only its")
