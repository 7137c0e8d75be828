"""Where a region's channel is, for whom; and waits that end with the attempt."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from support.stores import redis_server

from geofed_pb.errors import GeofedError
from region_agent.config import FileChannelConfig, RedisChannelConfig, S3ChannelConfig, load_config
from region_agent.partition.channel import RegionChannel
from region_agent.worker.training.merging import Fenced
from sync.store import FileChannel, fence_key

REGION = """\
apiVersion: geofed/v1
kind: Region
metadata: {name: east}
cloud: test
capacity: {workers: 2}
"""
PRICES = """\
prices:
  source: list
  asOf: 2026-01
  functionUsdPerGbSecond: 0.00001
  functionUsdPerRequest: 0.0000002
  serverUsdPerHour: 0.05
  egressUsdPerGb: 0.09
"""


def test_addresses_of_each_kind(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("p@ss word\n")
    file = RegionChannel(FileChannelConfig(), tmp_path, "east")
    assert file.address("job-1") == str(tmp_path / "job-1")
    redis = RedisChannelConfig(kind="redis", url="redis://cache:6379/2", password_file=tmp_path / "password")
    told = RegionChannel(redis, tmp_path, "east").address("job-1")
    assert told == "redis://default:p%40ss%20word@cache:6379/2?prefix=geofed/east/job-1"
    store = S3ChannelConfig(
        kind="s3", bucket="bucket", prefix="a/b/", endpoint_url="http://store:9000", path_style=True
    )
    told = RegionChannel(store, tmp_path, "east").address("job-1")
    assert told == "s3://bucket/a/b/east/job-1?endpoint=http%3A%2F%2Fstore%3A9000&path_style=1"


def test_without_a_password_workers_have_the_regions_own_address(tmp_path: Path) -> None:
    channel = RegionChannel(RedisChannelConfig(kind="redis", url="redis://cache:6379"), tmp_path, "east")
    assert channel.worker_address("job-1") == channel.address("job-1") == "redis://cache:6379?prefix=geofed/east/job-1"


def test_a_job_that_asks_for_another_channel_is_refused(tmp_path: Path) -> None:
    channel = RegionChannel(FileChannelConfig(), tmp_path, "east")
    channel.require("auto")
    channel.require("file")
    with pytest.raises(GeofedError, match="requires the channel redis, this region has file"):
        channel.require("redis")


def test_a_region_with_prices_states_those_of_its_channel(tmp_path: Path) -> None:
    path = tmp_path / "region.yaml"
    path.write_text(REGION + PRICES + "channel: {kind: redis, url: 'redis://cache:6379'}\n")
    with pytest.raises(GeofedError, match=r"`channel\.prices` is missing"):
        load_config(path)
    path.write_text(REGION + "channel: {kind: redis, url: 'redis://cache:6379'}\n")
    assert load_config(path).channel.kind == "redis"


def test_credentials_do_not_belong_into_the_url(tmp_path: Path) -> None:
    path = tmp_path / "region.yaml"
    path.write_text(REGION + "channel: {kind: redis, url: 'redis://user:secret@cache:6379'}\n")
    with pytest.raises(GeofedError, match="channel"):
        load_config(path)


def test_a_wait_ends_when_the_attempt_is_over(tmp_path: Path) -> None:
    channel = FileChannel(tmp_path)
    fenced = Fenced(channel, 3)
    channel.put("c/3/here", [b"x"])
    assert [key for key, _ in fenced.wait(("c/3/here",), 5.0)] == ["c/3/here"]
    ended: list[str] = []

    def wait() -> None:
        try:
            list(fenced.wait(("c/3/never",), 30.0))
        except GeofedError as error:
            ended.append(error.code)

    waiting = threading.Thread(target=wait)
    waiting.start()
    channel.put(fence_key(3), [b"over"])
    waiting.join(10)
    assert ended == ["FENCED"]


@pytest.mark.processes
def test_a_channel_that_is_there_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("secret")
    with redis_server(tmp_path, password="secret") as server:
        url = f"redis://127.0.0.1:{server.port}/0"
        config = RedisChannelConfig(kind="redis", url=url, password_file=tmp_path / "password")
        took = RegionChannel(config, tmp_path, "east").check()
        assert set(took) == {"put", "get"}
        assert "doctor" not in server.command("ACL", "LIST")
        assert server.command("DBSIZE").strip() == "0"
