"""A job that ends before its plan, because what it measures is good enough: in all regions, with one model."""

from __future__ import annotations

import pytest
from support.running import Running, check_succeeded, eventually

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

PLANNED_EPOCHS = 200
TWO = "regions.use=[frankfurt, virginia]"
GOAL = (
    TWO,
    f"train.end.epochs={PLANNED_EPOCHS}",
    "train.end.goal.metric=accuracy",
    "train.end.goal.atLeast=0.6",
    "train.evaluateEvery=2",
    "wan.interval=10",
)


@pytest.mark.parametrize("exchange", ["synchronous", "background"])
def test_a_job_ends_once_its_metric_is_good_enough(running: Running, exchange: str) -> None:
    job = running.submit(*GOAL, f"wan.exchange={exchange}")
    ended = running.wait_end(job)
    check_succeeded(ended, accuracy=0.6)
    result = ended["result"]
    assert result["ended_early"].startswith("accuracy is 0.")
    (told,) = [event for event in running.events(job) if event["kind"] == "job.goal"]
    assert told["data"]["reached"] is True
    assert told["data"]["value"] >= told["data"]["bound"] == 0.6
    rounds = {part["region"]: part["round"] for part in ended["partitions"]}
    assert 2 <= max(rounds.values()) < ended["plan"]["rounds"] / 2, rounds
    assert exchange == "background" or len(set(rounds.values())) == 1


def test_a_region_that_dies_while_the_job_ends_ends_with_the_others(running: Running) -> None:
    job = running.submit(*GOAL, "wan.exchange=synchronous")
    eventually(lambda: any(event["kind"] == "job.goal" for event in running.events(job)), "the goal is reached")
    for server in running.descendants("frankfurt", "sync.ps"):
        server.kill()
    check_succeeded(running.wait_end(job), accuracy=0.6)


def test_a_metric_that_nobody_measures_is_told(running: Running) -> None:
    goal = ("train.end.goal.metric=acuracy", "train.end.goal.atLeast=0.6", "train.evaluateEvery=1")
    job = running.submit(TWO, "train.end.epochs=6", "wan.interval=10", *goal)
    check_succeeded(running.wait_end(job), accuracy=0.0)
    (told,) = [event for event in running.events(job) if event["kind"] == "job.goal"]
    assert told["data"] == {"reached": False, "measured": ["accuracy", "loss"]}
