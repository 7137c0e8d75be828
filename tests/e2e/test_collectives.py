"""Workers of a region that merge among themselves, through every channel; and what is left of a broken attempt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.lasting import Lasting
from support.running import Running, check_succeeded, digits_sites
from support.stores import BUCKET, redis_server, s3_server

from deploy.local import LocalFederation

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

REGIONS = ("frankfurt", "virginia")
PRICES = {"source": "test", "asOf": "2026-01", "usdPerHour": 0.02, "usdPerPut": 5e-6, "usdPerGet": 4e-7}
SETTINGS = ("train.end.epochs=12", "wan.interval=20", "train.evaluateEvery=0")


def _federation(folder: Path, channel: Mapping[str, Any] | None = None) -> LocalFederation:
    """Two regions with three workers each, all of which a job gets."""
    more = {"channel": dict(channel)} if channel else {}
    return LocalFederation(folder / "federation", digits_sites(folder, REGIONS, workers=3, **more))


def _used(running: Running, job: str) -> set[str]:
    return {event["data"]["collective"] for event in running.events(job) if event["kind"] == "collective.used"}


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lasting]:
    """Their channel is shared memory."""
    with Lasting(_federation, tmp_path_factory) as federation:
        yield federation


@pytest.mark.parametrize(
    ("settings", "used"),
    [
        (("collective=k-reduce", "k=2"), "k-reduce with K = 2"),
        # A worker of three that is a step behind: as many steps again, for as good a model.
        (
            ("collective=k-reduce", "k=2", "merge.staleness=1", "merge.codec=bf16", "train.end.epochs=24"),
            "k-reduce with K = 2",
        ),
        (("collective=pipelined-scatter-reduce", "wan.exchange=background"), "pipelined-scatter-reduce"),
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


def test_workers_merge_through_redis_and_see_only_their_jobs_keys(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("the region's own")
    with redis_server(tmp_path, password="the region's own") as redis:
        redis.command("SET", "geofed/another-job/model", "secret")
        channel = {
            "kind": "redis", "url": f"redis://127.0.0.1:{redis.port}/0", "passwordFile": str(tmp_path / "password"),
            "prices": PRICES,
        }  # fmt: skip
        with _federation(tmp_path, channel) as federation:
            running = Running(federation, tmp_path)
            job = running.submit("train.workers=3", *SETTINGS)
            running.wait_round(job, 1)
            users = [line for line in redis.command("ACL", "LIST").splitlines() if job in line]
            assert len(users) == 2, "one in each region, although both have this server"
            assert sum(f"~geofed/{region}/{job}/*" in user for region in REGIONS for user in users) == 2
            assert all("-@all" in user for user in users)
            described = running.wait_end(job)
            check_succeeded(described)
            # Each region chooses by what it has measured.
            assert _used(running, job)
            assert "server-reduce" not in _used(running, job)
            lines = {(line["region"], line["item"]): line for line in described["result"]["money"]}
            for region in REGIONS:
                puts = lines[region, "channel-puts"]
                assert puts["quantity"] > 3 * described["plan"]["rounds"]
                assert puts["usd"] == pytest.approx(puts["quantity"] * 5e-6)
                assert lines[region, "channel-server"]["usd"] > 0
        assert redis.command("KEYS", "*").split() == ["geofed/another-job/model"], "a job leaves nothing"


def test_workers_merge_through_an_object_store(tmp_path: Path) -> None:
    credentials = tmp_path / "credentials"
    credentials.write_text("[default]\naws_access_key_id = test\naws_secret_access_key = test\n")
    with s3_server() as store:
        channel = {
            "kind": "s3", "bucket": BUCKET, "endpointUrl": store.endpoint, "region": "us-east-1", "pathStyle": True,
            "workerCredentialsFile": str(credentials), "prices": PRICES,
        }  # fmt: skip
        with _federation(tmp_path, channel) as federation:
            running = Running(federation, tmp_path)
            job = running.submit("train.workers=3", "train.end.epochs=8", "wan.interval=10", "collective=all-reduce")
            described = running.wait_end(job, 150)
            check_succeeded(described, accuracy=0.7)
            assert _used(running, job) == {"all-reduce"}


@pytest.mark.parametrize("collective", ["server-reduce", "k-reduce"])
def test_a_killed_worker_costs_no_more_than_two_steps(running: Running, collective: str) -> None:
    """Rounds are long, and the worker dies in the middle of one."""
    settings = ("train.end.epochs=50", "wan.interval=400", "train.evaluateEvery=0", "wan.exchange=synchronous")
    job = running.submit("train.workers=3", *settings, f"collective={collective}")
    running.wait_step(job, 100, "virginia")
    running.workers("virginia")[0].kill()
    check_succeeded(running.wait_end(job))
    events = [e for e in running.events(job) if e["region"] == "virginia"]
    assert any(event["kind"] == "worker-failed" for event in events)
    (resumed,) = [event for event in events if event["kind"] == "attempt.resumed"]
    assert resumed["data"]["step"] >= 100, "what was told of before the kill is not made again"
