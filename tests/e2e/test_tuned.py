"""Jobs whose workers follow a tuner (`train.scaling`): the batch goes with the workers, and every sample is counted as
the steps say, whoever leaves, comes or dies."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support.lasting import Lasting
from support.running import PRICES, TEMPLATES, Federation, Running, eventually

from deploy.local import RegionSite

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

BATCH, INTERVAL, POOL = 64, 5, 4
REGIONS = ("east", "west")
TEMPLATE = "sparse-logistic-regression"
SLEEP = """

_loss = loss


def loss(model, batch):
    import time

    time.sleep(batch[2].numel() * 0.3e-3)
    return _loss(model, batch)
"""
"""For each sample, so that workers and not the machine's cores are what is scaled."""
TUNED = (
    f"train.batch={BATCH}", "train.scaling=tuned", "train.evaluateEvery=1", f"wan.interval={INTERVAL}",
    "task.config.lr=0.001",
)  # fmt: skip


def _federation(folder: Path) -> Federation:
    """Two regions where next to nothing but workers is paid for."""
    argv = [
        sys.executable,
        str(TEMPLATES / TEMPLATE / "make_data.py"),
        "--regions",
        ",".join(REGIONS),
        "--out",
        str(folder / "data"),
        "--samples",
        "16000",
    ]
    made = json.loads(subprocess.run(argv, check=True, capture_output=True, text=True).stdout)
    sites = [
        RegionSite(
            name,
            {
                "cloud": "test",
                "capacity": {"workers": POOL, "memoryMb": 1024},
                "prices": {**PRICES, "serverUsdPerHour": 0.001},
                "datasets": {"clicks": {"splits": {s: {"uri": p["path"], "samples": p["samples"]}
                                                   for s, p in made[name].items()}}},
                "channel": {"kind": "file", "path": str(folder / "channels" / name)},
            },
        )
        for name in REGIONS
    ]  # fmt: skip
    return Federation(folder / "federation", sites)


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lasting]:
    with Lasting(_federation, tmp_path_factory) as federation:
        yield federation


@pytest.fixture
def running(lasting: Lasting, request: pytest.FixtureRequest, tmp_path: Path) -> Running:
    job = tmp_path / "job"
    shutil.copytree(TEMPLATES / TEMPLATE, job)
    with (job / "task.py").open("a") as file:
        file.write(SLEEP)
    return lasting.running(request, tmp_path)


def _counted(described: dict[str, Any], events: list[dict[str, Any]]) -> dict[str, tuple[int, int]]:
    """By region: samples as the region counts them, and as its steps say."""
    found = {}
    for part in described["plan"]["partitions"]:
        name = part["region"]
        stated = [e["data"] for e in events if e["kind"] == "partition.batch" and e["region"] == name]
        region = next(region for region in described["result"]["regions"] if region["name"] == name)
        batches = [part["workers"] * part["batch"]] * region["steps"]
        for change in stated:
            rest = region["steps"] - change["first_step"] + 1
            assert (change["first_step"] - 1) % part["steps_per_round"] == 0, "a batch changes with a round"
            assert change["batch"] == change["workers"] * BATCH
            assert change["learning_rate"] == pytest.approx((change["workers"] / part["workers"]) ** 0.5)
            batches[change["first_step"] - 1 :] = [change["batch"]] * max(0, rest)
        found[name] = (region["samples"], sum(batches))
    return found


def _check(described: dict[str, Any], events: list[dict[str, Any]]) -> None:
    assert described["state"] == "succeeded", described.get("error") or described
    for region, (counted, said) in _counted(described, events).items():
        assert counted == said, region


def test_a_tuner_lets_workers_leave_and_the_job_reaches_its_loss(running: Running) -> None:
    end = "train.end={epochs: 100, goal: {metric: loss, atMost: 0.62}}"
    job = running.submit(*TUNED, end, f"train.workers={POOL}", "regions.use=[east]")
    ended = running.wait_end(job, 150.0)
    events = running.events(job)
    _check(ended, events)
    assert ended["result"]["ended_early"].startswith("loss is 0.6"), ended["result"]["ended_early"]
    assert ended["result"]["metrics"]["loss"] <= 0.62
    told = [event["data"] for event in events if event["kind"] == "job.tuning"]
    assert told[0]["before"] == POOL > told[0]["workers"], "the first to be told is that workers leave"
    scaled = [event["data"] for event in events if event["kind"] == "partition.scaled"]
    assert (scaled[0]["before"], scaled[0]["workers"]) == (POOL, told[0]["workers"])
    assert {change["reason"] for change in scaled} <= {change["reason"] for change in told}
    assert all(before["workers"] == after["before"] for before, after in pairwise(scaled))
    assert any(event["kind"] == "partition.batch" for event in events)
    assert "worker-failed" not in {event["kind"] for event in events}


def test_every_sample_counts_once_whoever_leaves_comes_and_dies(running: Running) -> None:
    # So seldom that the tuner has nothing to say: who leaves and comes is the test's to say.
    end = ("train.end={steps: 5000, goal: {metric: loss, atMost: 0.1}}", "train.evaluateEvery=100")
    job = running.submit(*TUNED, *end, "train.workers={east: 4, west: 2}")

    def batches(region: str) -> int:
        return sum(event["kind"] == "partition.batch" and event["region"] == region for event in running.events(job))

    running.wait_round(job, 3)
    running.federation.control_plane("scale", job, "east=1")
    eventually(lambda: batches("east") == 1, "the batch to go with the workers that left")
    # The server that has just said where the batch changes, and later the agent that has stored it.
    for server in running.descendants("east", "sync.ps"):
        server.kill()
    running.federation.control_plane("scale", job, "west=1")
    eventually(lambda: batches("west") == 1, "the batch of the other region")
    running.wait_round(job, max(part["round"] for part in running.describe(job)["partitions"]) + 3)
    running.federation.control_plane("scale", job, "east=3", "--reason", "a test")
    eventually(lambda: batches("east") == 2, "the batch to go with the workers that came")
    agent = running.federation.processes["east"]
    agent.kill()
    agent.wait()
    running.federation.start_agent("east")
    running.wait_round(job, max(part["round"] for part in running.describe(job)["partitions"]) + 3, seconds=120.0)
    running.federation.control_plane("finish", job)
    ended = running.wait_end(job)
    _check(ended, running.events(job))
    assert {part["region"]: part["workers"] for part in ended["partitions"]} == {"east": 3, "west": 1}
    refused = running.submit(*TUNED, *end, "train.workers={east: 2, west: 2}")
    running.wait_round(refused, 1)
    told = running.federation.control_plane("scale", refused, "east=3", check=False)
    assert "is limited to 2 workers" in told.stderr
    running.federation.control_plane("cancel", refused, "--yes")
