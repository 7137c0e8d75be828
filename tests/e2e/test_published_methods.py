"""Published methods from a job file to its result: WAN policies, MLLess's filter and tuner, and later deadlines."""

from __future__ import annotations

from collections import Counter

import pytest
from support.running import Running, check_succeeded, named

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

FEW = ("train.end.epochs=4", "train.batch=32", "train.evaluateEvery=0", "wan.interval=auto", "task.config.lr=0.01")
"""The changes of all regions are added with `asgd` and its kin: at the rate of the template they diverge. How well jobs
learn is not what is tested here: they are short."""

LEARNS = ("train.end.epochs=12", "task.config.lr=0.02")
"""With the changes of three workers added."""

UNREACHED = ("train.end.goal={metric: loss, atMost: 0.0001}", "train.evaluateEvery=1")


@pytest.mark.parametrize("policy", ["asgd", "asgd-ga", "asp", "bsp"])
def test_a_job_exchanges_by_a_published_policy(policy: str, running: Running) -> None:
    ended = running.wait_end(running.submit("train.workers=1", *FEW, "train.end.epochs=1", f"wan.policy={policy}"))
    check_succeeded(ended, accuracy=0.0)
    plan, result = ended["plan"], ended["result"]
    assert plan["wan_policy"] == policy
    every_step = policy in ("asgd", "asp", "bsp")
    assert (plan["interval"] == 1) == every_step
    assert bool(plan["wan_settings"].get("background")) == (policy != "bsp"), "only bsp waits for all"
    for region in result["regions"]:
        assert region["rounds"] == plan["rounds"]
        assert region["applied_updates"] > 0


def test_a_filter_of_significant_changes_is_known_to_the_next_plan(running: Running) -> None:
    # Of another name: runs of the same job with another threshold tell something else.
    settings = (
        "metadata.name=filtered",
        "train.workers=1",
        *FEW,
        "train.end.epochs=2",
        "wan.policy=asp",
        "wan.significance=0.2",
    )
    first = running.wait_end(running.submit(*settings, task=named("filtered")))
    second = running.wait_end(running.submit(*settings))
    for ended in (first, second):
        check_succeeded(ended, accuracy=0.0)
    shares = [ended["plan"].get("sent_share", 1.0) for ended in (first, second)]
    assert shares[0] == 1.0
    assert 0.0 < shares[1] < 1.0
    results = [ended["result"] for ended in (first, second)]
    off = [one["predicted"]["wan_bytes"]["expected"] / one["measured"]["wan_bytes"] for one in results]
    assert off[0] > off[1]
    assert off[1] == pytest.approx(1.0, rel=0.3)


@pytest.mark.parametrize(
    ("settings", "used"),
    [
        # Lists are merged by ranges, as is best over the channel.
        (("train.workers=3",), "isp with K = 3"),
        (("train.workers=3", "k=0"), "isp"),
        # The mean of all changes: the learning rate may be that of other collectives.
        (("train.workers=2", "merge.step=mean", "task.config.lr=0.1"), "isp"),
    ],
)
def test_workers_share_significant_changes(settings: tuple[str, ...], used: str, running_pair: Running) -> None:
    """MLLess's filter."""
    job = running_pair.submit(*FEW, "wan.exchange=synchronous", "collective=isp", *LEARNS, *settings)
    check_succeeded(running_pair.wait_end(job), accuracy=0.8)
    told = {event["data"]["collective"] for event in running_pair.events(job) if event["kind"] == "collective.used"}
    assert told == {used}


COUNTED = (
    named("counted")
    + """
_loss = loss


def loss(model, batch):
    if model.training:
        print(f"{len(batch[1])} samples at once", flush=True)
    return _loss(model, batch)
"""
)


def test_workers_that_merge_nothing_process_more_samples(running_pair: Running) -> None:
    """FasDL's unequal partition, with staleness 1: of two workers' 64 samples the owner processes 13, the other 51, in
    parts of no more than the batch."""
    unequal = ("collective=k-reduce", "k=1", "merge.staleness=1", "merge.ratio=4")
    shown = ("metadata.name=counted", "train.workers=2", *FEW, "wan.exchange=synchronous", *LEARNS)
    job = running_pair.submit(*shown, *unequal, task=COUNTED)
    ended = running_pair.wait_end(job)
    check_succeeded(ended)
    told = {event["data"]["collective"] for event in running_pair.events(job) if event["kind"] == "collective.used"}
    assert told == {"k-reduce with K = 1"}
    lines = running_pair.federation.control_plane("logs", job).stdout.splitlines()
    counts = Counter(int(line.split(" samples at once")[0].split()[-1]) for line in lines if "samples at once" in line)
    steps = sum(part["step"] for part in ended["partitions"])
    assert counts[13] == steps, counts
    assert counts[25] == counts[26] == steps, counts


def test_a_job_is_scaled_as_published(running_pair: Running) -> None:
    """By MLLess's tuner: no worker comes, and the job ends with its planned steps. It decides after forty evaluations,
    which takes longer than this job: that workers leave is in tests/control_plane/test_scaling.py."""
    job = running_pair.submit(
        "train.workers=3", *FEW, "wan.exchange=synchronous", *UNREACHED, "train.scaling=mlless", "train.end.epochs=24"
    )
    ended = running_pair.wait_end(job)
    check_succeeded(ended, accuracy=0.0)
    scaled = [event["data"] for event in running_pair.events(job) if event["kind"] == "partition.scaled"]
    counts = [one["workers"] for one in scaled]
    assert all(1 <= count < 3 for count in counts)
    assert ended["result"]["rounds"] == ended["plan"]["rounds"]


def test_a_later_deadline_is_promised_where_the_first_one_cannot_be(running: Running) -> None:
    late = ("objective.deadline=1s", "objective.soft=[{deadline: 30m, value: 0.5}]", "wan.exchange=synchronous")
    ended = running.wait_end(running.submit("train.workers=1", *FEW, *late))
    check_succeeded(ended, accuracy=0.0)
    (told,) = [event for event in running.events(ended["id"]) if event["kind"] == "job.deadline"]
    assert told["data"]["kept"]
    assert 60.0 < ended["slack_seconds"] < 1800.0, "of the later one"
