"""Workers of a region that merge among themselves, through every channel; and what is left of a broken attempt."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.running import Federation, Running, check_succeeded, digits_sites, eventually
from support.stores import BUCKET, RedisServer, s3_server

from tests.e2e.conftest import PAIR, STORE_PRICES

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

SETTINGS = ("train.end.epochs=8", "wan.interval=10", "train.evaluateEvery=0")


def _used(running: Running, job: str) -> set[str]:
    return {event["data"]["collective"] for event in running.events(job) if event["kind"] == "collective.used"}


@pytest.fixture
def running(running_pair: Running) -> Running:
    return running_pair


@pytest.mark.parametrize(
    ("settings", "used"),
    [
        # A worker of three that is a step behind: as many steps again, for as good a model.
        (
            ("collective=k-reduce", "k=2", "merge.staleness=1", "merge.codec=bf16", "train.end.epochs=16"),
            "k-reduce with K = 2",
        ),
        # After eight passes its accuracy was 0.80 to 0.91, as updates happened to come.
        (
            ("collective=pipelined-scatter-reduce", "wan.exchange=background", "train.end.epochs=12"),
            "pipelined-scatter-reduce",
        ),
        (
            ("collective=isp", "k=2", "task.config.lr=0.05", "function.slice=3s", "train.end.epochs=20"),
            "isp with K = 2",
        ),
    ],
)
def test_workers_merge_through_shared_memory(running: Running, settings: tuple[str, ...], used: str) -> None:
    job = running.submit("train.workers=3", *SETTINGS, *settings)
    check_succeeded(running.wait_end(job))
    assert _used(running, job) == {used}


def test_workers_merge_through_redis_and_see_only_their_jobs_keys(running_redis: Running, redis: RedisServer) -> None:
    running = running_redis
    redis.command("SET", "geofed/another-job/model", "secret")
    job = running.submit("train.workers=3", *SETTINGS)
    running.wait_round(job, 1)
    users = [line for line in redis.command("ACL", "LIST").splitlines() if job in line]
    assert len(users) == 2, "one in each region, although both have this server"
    assert sum(f"~geofed/{region}/{job}/*" in user for region in PAIR for user in users) == 2
    assert all("-@all" in user for user in users)
    described = running.wait_end(job)
    check_succeeded(described)
    # Each region chooses by what it has measured.
    assert _used(running, job)
    assert "server-reduce" not in _used(running, job)
    lines = {(line["region"], line["item"]): line for line in described["result"]["money"]}
    for region in PAIR:
        puts = lines[region, "channel-puts"]
        assert puts["quantity"] > 3 * described["plan"]["rounds"]
        assert puts["usd"] == pytest.approx(puts["quantity"] * 5e-6)
        assert lines[region, "channel-server"]["usd"] > 0
    left = ["geofed/another-job/model"]
    eventually(lambda: redis.command("KEYS", "*").split() == left, "a job leaves nothing")


def test_workers_merge_through_an_object_store(tmp_path: Path) -> None:
    credentials = tmp_path / "credentials"
    credentials.write_text("[default]\naws_access_key_id = test\naws_secret_access_key = test\n")
    with s3_server() as store:
        channel = {
            "kind": "s3", "bucket": BUCKET, "endpointUrl": store.endpoint, "region": "us-east-1", "pathStyle": True,
            "workerCredentialsFile": str(credentials), "prices": STORE_PRICES,
        }  # fmt: skip
        sites = digits_sites(tmp_path, PAIR, workers=3, channel=channel)
        with Federation(tmp_path / "federation", sites) as federation:
            running = Running(federation, tmp_path)
            job = running.submit("train.workers=3", "train.end.epochs=7", "wan.interval=10", "collective=all-reduce")
            described = running.wait_end(job, 150)
            check_succeeded(described, accuracy=0.7)
            assert _used(running, job) == {"all-reduce"}


@pytest.mark.parametrize(
    ("merge", "used"),
    [(("collective=server-reduce",), "server-reduce"), (("collective=k-reduce", "k=2"), "k-reduce with K = 2")],
)
def test_a_killed_worker_costs_no_more_than_two_steps(running: Running, merge: tuple[str, ...], used: str) -> None:
    """Rounds are long, and the worker dies in the middle of one."""
    settings = ("train.end.epochs=25", "wan.interval=200", "train.evaluateEvery=0", "wan.exchange=synchronous")
    job = running.submit("train.workers=3", *settings, *merge)
    running.wait_step(job, 60, "virginia")
    running.workers("virginia")[0].kill()
    check_succeeded(running.wait_end(job))
    assert _used(running, job) == {used}
    events = [e for e in running.events(job) if e["region"] == "virginia"]
    assert any(event["kind"] == "worker-failed" for event in events)
    (resumed,) = [event for event in events if event["kind"] == "attempt.resumed"]
    assert resumed["data"]["step"] >= 60, "what was told of before the kill is not made again"
