"""Workers that are taken away while a real job trains on them: it continues, keeps its promise, counts no step
twice."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.running import PRICES, TEMPLATES, Federation, Running, check_succeeded, digits_sites, eventually

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

REGIONS = ("shanghai", "virginia")
SLOW = """

_loss = loss


def loss(model, batch):
    import time

    time.sleep(len(batch[0]) * 0.001)
    return _loss(model, batch)
"""
JOB = ("train.end.epochs=18", "wan.interval=6", "train.evaluateEvery=0", "objective.minimise=time")


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    """Two workers that stay and two that do not, in each region."""
    more = {
        "capacity": {"workers": 2, "memoryMb": 1024, "preemptible": 2, "samplesPerSecond": 700},
        "prices": {**PRICES, "preemptibleUsdPerGbSecond": 0.0000033},
    }
    with Federation(tmp_path / "federation", digits_sites(tmp_path, REGIONS, **more)) as federation:
        yield Running(federation, tmp_path)


def leave(running: Running, workers: int) -> None:
    """Of the preemptible workers in each region."""
    program = [sys.executable, "-c", "from region_agent.cli import main; main()", "preemptible", str(workers)]
    folders = [running.federation.region_state(region) / "state" for region in REGIONS]
    told = [subprocess.Popen([*program, "--state-dir", str(folder)], stderr=subprocess.DEVNULL) for folder in folders]
    assert [one.wait(30) for one in told] == [0, 0]


def staff(running: Running, job: str) -> dict[str, tuple[int, bool]]:
    return {part["region"]: (part["workers"], part["preemptible"]) for part in running.describe(job)["partitions"]}


def usd(described: dict[str, Any], item: str) -> float:
    return sum(charge["usd"] for charge in described["result"]["money"] if charge["item"] == item)


def test_a_job_with_a_deadline_trains_on_workers_that_are_taken_away_and_keeps_its_promise(running: Running) -> None:
    task = (TEMPLATES / "image-classification" / "task.py").read_text() + SLOW
    job = running.submit(*JOB, "objective.deadline=200s", task=task)
    planned = {part["region"]: part["workers"] for part in running.describe(job)["plan"]["partitions"]}
    eventually(lambda: staff(running, job) == {name: (n, True) for name, n in planned.items()}, "preemptible workers")
    running.wait_round(job, 2)
    before = {part["region"]: part["round"] for part in running.describe(job)["partitions"]}
    leave(running, 1)
    eventually(lambda: staff(running, job) == dict.fromkeys(REGIONS, (1, True)), "half of them to be gone")
    running.wait_round(job, max(before.values()) + 2)
    leave(running, 0)
    eventually(lambda: not any(kind for _, kind in staff(running, job).values()), "none to be left")
    ended = running.wait_end(job, 200.0)
    check_succeeded(ended, accuracy=0.8)
    plan = ended["plan"]
    for part, region in zip(plan["partitions"], ended["result"]["regions"], strict=True):
        assert region["samples"] == plan["rounds"] * part["steps_per_round"] * part["workers"] * part["batch"]
    events = running.events(job)
    kept = next(event["data"] for event in events if event["kind"] == "job.deadline")
    assert kept["kept"], kept
    taken = [event for event in events if event["kind"] == "partition.preempted"]
    lost = {(event["region"], event["data"]["before"], event["data"]["workers"]) for event in taken}
    # Of the last ones the job may be told to leave before both agents have told that they are gone.
    halves = {(region, 2, 1) for region, workers in planned.items() if workers == 2}
    assert halves
    assert halves < lost
    assert lost - halves <= {(region, 1, 0) for region in REGIONS}
    why = [event["data"]["reason"] for event in events if event["kind"] == "partition.scaling"]
    assert "preemptible workers were preempted" in why
    assert usd(ended, "preemptible-function-seconds") > 0
    assert usd(ended, "function-seconds") > 0
