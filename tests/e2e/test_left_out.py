"""A region of a job with secure aggregation goes for good: a new job continues without it, with new keys."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.running import Federation, Running, check_succeeded, digits_sites, eventually

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

REGIONS = ("frankfurt", "shanghai", "tokyo", "virginia")
SECURE = ("privacy.secureAggregation=true", "privacy.minRegions=3")
SETTINGS = (
    *SECURE,
    "regions.lost=continue", "limits.lostRegion=3s", "train.workers=1", "train.end.epochs=8", "wan.interval=5",
)  # fmt: skip


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    folder = tmp_path_factory.mktemp("four")
    with Federation(folder / "federation", digits_sites(folder, REGIONS), serve_options=("--lease", "4s")) as started:
        yield started


@pytest.fixture
def running(federation: Federation, tmp_path: Path) -> Running:
    return Running(federation, tmp_path)


def test_a_job_continues_without_a_region_that_is_gone(running: Running) -> None:
    federation = running.federation
    # A worker waits in its call for 15 s at most; then its slice is over, and none runs when the job ends at once.
    job = running.submit(*SETTINGS, "function.slice=1s", "limits.lostRegion=20s", "train.evaluateEvery=0")
    running.wait_round(job, 3)
    federation.kill("tokyo")
    eventually(lambda: running.describe(job)["finished_at"], "the job ends without the region")
    first = running.describe(job)
    assert first["state"] == "succeeded", first
    left = [part for part in first["partitions"] if part["region"] != "tokyo"]
    calls = [one["quantity"] for part in left for one in part["money"] if one["item"] == "function-calls"]
    assert len(calls) == 3, left
    assert min(calls) >= 2, "workers that waited are called again"
    successor = first["successor"]
    ended = running.wait_end(successor)
    check_succeeded(ended)
    parts = {part["region"] for part in ended["plan"]["partitions"]}
    assert parts == set(REGIONS) - {"tokyo"}
    assert ended["plan"]["codec"].endswith("-masked")
    assert ended["plan"]["rounds"] < first["plan"]["rounds"], "it makes the rest"
    (why,) = [event for event in running.events(job) if event["kind"] == "job.replanning"]
    assert why["data"]["without"] == ["tokyo"]
    assert "region tokyo has been lost for longer than 20 s" in why["text"]
    # Nothing of the first job stays where it comes back.
    federation.start_agent("tokyo")
    federation.wait_connected(["tokyo"])
    folder = federation.region_state("tokyo") / "state" / "jobs" / job
    eventually(lambda: not folder.exists(), "the region has forgotten the job")


def test_with_too_few_regions_it_fails_and_the_rest_is_trained_when_the_region_is_back(running: Running) -> None:
    federation = running.federation
    job = running.submit(*SETTINGS, "privacy.minRegions=4", "train.seed=5")
    running.wait_round(job, 3)
    federation.kill("tokyo")
    ended = running.wait_end(job)
    assert (ended["state"], ended["error"]["code"]) == ("failed", "REGION_LOST"), ended
    assert "privacy.minRegions is 4, and 3 regions take part" in ended["error"]["message"]
    federation.start_agent("tokyo")
    federation.wait_connected(["tokyo"])
    again = federation.control_plane("resume", job, "-o", "name").stdout.strip().rpartition("/")[2]
    resumed = running.wait_end(again)
    check_succeeded(resumed)
    assert len(resumed["plan"]["partitions"]) == 4
