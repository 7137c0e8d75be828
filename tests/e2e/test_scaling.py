"""Workers are added and taken away while a real job trains: no step is lost, none is made twice."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from support.running import TEMPLATES, Running, check_succeeded, eventually, named

from tests.e2e.conftest import PAIR

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

LONG = ("train.end.epochs=60", "train.batch=32", "train.workers=2", "wan.interval=30", "train.evaluateEvery=0")


@pytest.fixture
def running(running_pair: Running) -> Running:
    return running_pair


def _samples(described: dict[str, Any]) -> dict[str, int]:
    return {region["name"]: region["samples"] for region in described["result"]["regions"]}


def _stands_still(running: Running, job: str) -> bool:
    before = [part["step"] for part in running.describe(job)["partitions"]]
    time.sleep(1.0)
    return before == [part["step"] for part in running.describe(job)["partitions"]]


def _expected(described: dict[str, Any]) -> dict[str, int]:
    """Of all rounds that were planned; of one that has ended early, of those that each region made."""
    plan = described["plan"]
    early = bool(described["result"]["ended_early"])
    made = {part["region"]: part["round"] if early else plan["rounds"] for part in described["partitions"]}
    return {
        part["region"]: made[part["region"]] * part["steps_per_round"] * part["workers"] * part["batch"]
        for part in plan["partitions"]
    }


def _finished(running: Running, job: str) -> dict[str, Any]:
    """How it ends where it is to end now, before its plan: it has its model, and each step counts once."""
    at = max(part["round"] for part in running.describe(job)["partitions"])
    running.wait_round(job, at + 3)
    running.federation.control_plane("finish", job, "--reason", "all is seen")
    ended = running.wait_end(job)
    check_succeeded(ended, accuracy=0.5)  # it ends early, at a round that depends on the machine
    assert ended["result"]["ended_early"] == "requested by a user: all is seen"
    assert _samples(ended) == _expected(ended)
    return ended


@pytest.mark.parametrize("more", [(), ("collective=all-reduce",), ("wan.exchange=background",)], ids=str)
def test_workers_come_and_go_while_a_job_trains(running: Running, more: tuple[str, ...]) -> None:
    job = running.submit(*LONG, "wan.exchange=synchronous", *more)
    running.wait_round(job, 2)
    running.federation.control_plane("scale", job, "shanghai=4", "virginia=1", "--reason", "a test")
    at = {part["region"]: part["round"] for part in running.describe(job)["partitions"]}
    running.wait_round(job, max(at.values()) + 2)
    now = {part["region"]: part["workers"] for part in running.describe(job)["partitions"]}
    assert now == {"shanghai": 4, "virginia": 1}
    running.federation.control_plane("scale", job, "shanghai=3")
    eventually(lambda: len(_scaled(running, job)) == 3, "the third change")
    _finished(running, job)
    events = running.events(job)
    scaled = [(e["region"], e["data"]["workers"]) for e in events if e["kind"] == "partition.scaled"]
    assert scaled == [("shanghai", 4), ("virginia", 1), ("shanghai", 3)] or scaled == [
        ("virginia", 1),
        ("shanghai", 4),
        ("shanghai", 3),
    ]
    assert "worker-failed" not in {event["kind"] for event in events}


def test_a_job_pauses_and_goes_on_from_the_step_it_was_at(running: Running) -> None:
    job = running.submit(*LONG)
    running.wait_round(job, 2)
    running.federation.control_plane("scale", job, *(f"{region}=0" for region in PAIR), "--reason", "lunch")
    eventually(lambda: _stands_still(running, job), "all regions to stand still")
    paused = running.describe(job)
    assert "paused: lunch" in paused["condition"]
    assert [part["workers"] for part in paused["partitions"]] == [0, 0]
    running.federation.control_plane("scale", job, *(f"{region}=2" for region in PAIR))
    _finished(running, job)
    refused = running.federation.control_plane("scale", job, "virginia=1", check=False)
    assert "ILLEGAL_STATE" in refused.stderr


def test_what_cannot_be_is_refused(running: Running) -> None:
    job = running.submit(*LONG)
    for wanted, code in (("virginia=9", "INADMISSIBLE"), ("mars=1", "REGION_NOT_FOUND"), ("virginia", "USAGE")):
        told = running.federation.control_plane("scale", job, wanted, check=False)
        assert told.returncode != 0
        assert code in told.stderr
    running.federation.control_plane("cancel", job, "--yes")


def _scaled(running: Running, job: str) -> list[dict[str, Any]]:
    return [event for event in running.events(job) if event["kind"] == "partition.scaled"]


THROTTLED = """

_loss, _dataset = loss, dataset


def dataset(uri, split, config):
    import os

    # Of the process: one that is called again has its data already.
    if "shanghai" in uri:
        os.environ["THROTTLED"] = "yes"
    return _dataset(uri, split, config)


def loss(model, batch):
    import os
    import time

    time.sleep(len(batch[0]) * (0.003 if "THROTTLED" in os.environ else 0.001))
    return _loss(model, batch)
"""
"""One worker of the fast region has more to do than three of the slow one, and two have less, however long the rest of
a step takes."""


def _throttled(name: str) -> tuple[tuple[str, ...], str]:
    """Steps take as long as they sleep, on any machine. Under a name that no other test takes, it is a task that nobody
    has run: the federation does not know yet of how fast it is where."""
    code = (TEMPLATES / "image-classification" / "task.py").read_text()
    return ("train.evaluateEvery=0", f"metadata.name={name}"), f"{code}{THROTTLED}\n# {name}\n"


def test_a_region_that_is_slower_than_planned_has_the_others_give_up_workers_that_wait(running: Running) -> None:
    settings, task = _throttled("slower")
    # To a goal larger batches may be cheapest; for a number of epochs they would cost some of the accuracy.
    goal = ("train.end.goal.metric=accuracy", "train.end.goal.atLeast=1", "train.evaluateEvery=1000")
    job = running.submit(*settings, *goal, "train.end.epochs=60", "wan.interval=10", task=task)
    planned = {part["region"]: part["workers"] for part in running.describe(job)["plan"]["partitions"]}
    assert planned["virginia"] > 1

    def gave_up() -> bool:
        return "virginia" in {event["region"] for event in _scaled(running, job)}

    # Seldom: what is asked takes of the cores that the steps are measured on.
    eventually(gave_up, "virginia gives up workers", 120.0, pause=2.0)
    _finished(running, job)
    scaled = _scaled(running, job)
    assert {event["region"] for event in scaled} <= {"virginia", "shanghai"}
    fewer = next(event["data"] for event in scaled if event["region"] == "virginia")
    # Half; another number where cores are so busy that what is measured of a step is more than its sleep.
    assert fewer["before"] == planned["virginia"]
    assert fewer["workers"] < planned["virginia"]
    assert "of what is left to pay" in fewer["reason"]


def test_a_job_starts_with_workers_that_divide_its_batch(running: Running) -> None:
    """For a number of epochs a larger global batch would cost accuracy: the workers of the region with most to do share
    one batch, once a run of several has measured what a merge takes. All steps take as long as they sleep."""
    task = named("divided").replace("def loss(", "def loss_of(") + SLEEPS
    asked = (
        "metadata.name=divided",
        "train.evaluateEvery=0",
        "train.batch=16",
        "train.end.epochs=1",
        "wan.interval=10",
    )
    measuring = (
        "train.evaluateEvery=0",
        "train.batch=16",
        "train.workers=2",
        "train.end={steps: 20}",
        "wan.interval=10",
    )
    check_succeeded(running.wait_end(running.submit(*measuring, task=task)), accuracy=0.0)
    job = running.submit(*asked, task=task)
    plan = running.describe(job)["plan"]
    most = max(plan["partitions"], key=lambda part: part["samples"])
    assert most["workers"] == most["divided"] > 1
    assert {part["workers"] * part["batch"] for part in plan["partitions"]} == {16}
    told = f"every {most['workers']} workers in {most['region']} divide one, {most['batch']} samples of a step each"
    assert told in " ".join(running.federation.control_plane("describe", job).stdout.split())
    ended = running.wait_end(job)
    check_succeeded(ended, accuracy=0.5)
    assert _samples(ended) == _expected(ended)
    # What was measured with parts of the batch tells the next plan, which divides it again.
    chosen = [part for setting in asked for part in ("--set", setting)]
    file = str(running.job_folder(task) / "job.yaml")
    plan = json.loads(running.federation.control_plane("explain", file, *chosen, "-o", "json").stdout)["data"]
    assert plan["estimate"]["basis"] == "measured"
    assert max(plan["partitions"], key=lambda part: part["samples"])["divided"] > 1


SLEEPS = """


def loss(model, batch):
    import time

    time.sleep(len(batch[0]) * 0.032)  # merges are much shorter, on busy cores, too
    return loss_of(model, batch)
"""


def test_a_second_job_gets_workers_of_the_first_and_both_come_to_their_end(running: Running) -> None:
    settings, task = _throttled("second")
    quick = ("objective.minimise=time", "wan.interval=10")
    first = running.submit(*settings, *quick, "train.end.epochs=40", task=task)
    running.wait_round(first, 1)
    held = {part["region"]: part["workers"] for part in running.describe(first)["partitions"]}
    assert held["virginia"] == 4
    second = running.submit(*settings, "train.end.epochs=5", "objective.deadline=30m")
    done = running.wait_end(second)
    check_succeeded(done)
    assert done["slack_seconds"] > 0
    told = {event["kind"]: event for event in running.events(second)}
    assert first in told["job.queued"]["text"]
    assert told["job.deadline"]["data"]["kept"]
    _finished(running, first)
    reasons = [event["data"]["reason"] for event in _scaled(running, first)]
    assert f"workers are needed by {second}" in reasons


def test_a_job_pauses_for_one_with_a_deadline_and_both_come_to_their_end(running: Running) -> None:
    settings, task = _throttled("paused")
    first = running.submit(*settings, "train.end.epochs=60", "wan.interval=10", task=task)
    running.wait_round(first, 1)
    second = running.submit(*settings, "train.workers=4", "train.end.epochs=4", "objective.deadline=30m")
    check_succeeded(running.wait_end(second), accuracy=0.0)
    eventually(lambda: len(_scaled(running, first)) >= 2 * len(PAIR), "the first one continues")
    _finished(running, first)
    reasons = [event["data"]["reason"] for event in _scaled(running, first)]
    assert f"paused in favour of {second}" in reasons
    assert "workers are free again" in reasons
