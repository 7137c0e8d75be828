"""Where a region's channel is, for whom; and waits that end with the attempt."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from support.stores import redis_server

from geofed_pb.errors import GeofedError
from geofed_pb.platforms import PLATFORMS
from region_agent.config import FileChannelConfig, RedisChannelConfig, S3ChannelConfig, load_config
from region_agent.partition.channel import RegionChannel, channel_text
from region_agent.worker.training.merging import FencedChannel
from sync.channel_clients import FileChannel, fence_key, open_channel

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
    redis = RedisChannelConfig(kind="redis", url="rediss://cache:6379/2", password_file=tmp_path / "password")
    told = RegionChannel(redis, tmp_path, "east").address("job-1")
    assert told == "rediss://default:p%40ss%20word@cache:6379/2?prefix=geofed/east/job-1"
    store = S3ChannelConfig(
        kind="s3", bucket="bucket", prefix="a/b/", endpoint_url="https://store:9000", path_style=True
    )
    told = RegionChannel(store, tmp_path, "east").address("job-1")
    assert told == "s3://bucket/a/b/east/job-1?endpoint=https%3A%2F%2Fstore%3A9000&path_style=1"


def test_credentials_of_a_bucket_are_sent_to_workers_that_see_no_file(tmp_path: Path) -> None:
    file = tmp_path / "credentials"
    store = S3ChannelConfig(kind="s3", bucket="tensors", worker_credentials_file=file)
    channel = RegionChannel(store, tmp_path, "east")
    named = {"AWS_SHARED_CREDENTIALS_FILE": str(file)}, dict[str, str]()
    # Their image may have the file, and a pod a role; at Lambda and SCF nothing else has a key.
    for name in ("embedded", "docker", "openfaas", "kubernetes"):
        assert channel.worker_env(PLATFORMS[name]) == named
    for name in ("lambda", "scf"):
        with pytest.raises(GeofedError, match="is not on the agent's machine") as caught:
            channel.worker_env(PLATFORMS[name])
        assert caught.value.code == "CONFIG_INVALID"
    file.write_text("[default]\naws_access_key_id = AKIA\naws_secret_access_key = a%b\n")
    for name in ("kubernetes", "lambda", "scf"):
        sent = {"AWS_ACCESS_KEY_ID": "AKIA", "AWS_SECRET_ACCESS_KEY": "a%b"}
        assert channel.worker_env(PLATFORMS[name]) == ({}, sent)
    assert channel.worker_env(PLATFORMS["docker"]) == named
    for wrong in ("", "[default]\naws_access_key_id = AKIA\n", "very secret"):
        file.write_text(wrong)
        with pytest.raises(GeofedError) as caught:
            channel.worker_env(PLATFORMS["kubernetes"])
        assert caught.value.code == "CONFIG_INVALID"
        assert "very secret" not in str(caught.value)


def test_without_a_password_workers_have_the_regions_own_address(tmp_path: Path) -> None:
    channel = RegionChannel(RedisChannelConfig(kind="redis", url="rediss://cache:6379"), tmp_path, "east")
    assert channel.worker_address("job-1") == channel.address("job-1") == "rediss://cache:6379?prefix=geofed/east/job-1"


def test_a_job_that_asks_for_another_channel_is_refused(tmp_path: Path) -> None:
    channel = RegionChannel(FileChannelConfig(), tmp_path, "east")
    channel.require("auto")
    channel.require("file")
    with pytest.raises(GeofedError, match="requires the channel redis, this region has file"):
        channel.require("redis")


def test_a_region_with_prices_states_those_of_its_channel(tmp_path: Path) -> None:
    path = tmp_path / "region.yaml"
    path.write_text(REGION + PRICES + "channel: {kind: redis, url: 'rediss://cache:6379'}\n")
    with pytest.raises(GeofedError, match=r"`channel\.prices` is missing"):
        load_config(path)
    path.write_text(REGION + "channel: {kind: redis, url: 'rediss://cache:6379'}\n")
    assert load_config(path).channel.kind == "redis"


def test_credentials_do_not_belong_into_the_url(tmp_path: Path) -> None:
    path = tmp_path / "region.yaml"
    path.write_text(REGION + "channel: {kind: redis, url: 'redis://user:secret@cache:6379'}\n")
    with pytest.raises(GeofedError, match="channel"):
        load_config(path)


def test_a_wait_ends_when_the_attempt_is_over(tmp_path: Path) -> None:
    channel = FileChannel(tmp_path)
    fenced = FencedChannel(channel, 3)
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


HARM = [
    "FLUSHALL", "FLUSHDB", "SCAN 0", "KEYS *", "SWAPDB 0 1", "CLIENT LIST", "CLIENT KILL TYPE normal", "CONFIG GET *",
    "CONFIG SET maxmemory 1", "SHUTDOWN NOSAVE", "SAVE", "BGSAVE", "REPLICAOF NO ONE", "MONITOR",
    "ACL LIST", "ACL SETUSER x on nopass +@all ~*", "ACL WHOAMI", "EVAL return(1) 0", "SCRIPT FLUSH", "FUNCTION LIST",
    "MODULE LIST", "INFO", "INFO clients", "INFO all", "DBSIZE", "RANDOMKEY", "SELECT 1", "MIGRATE h 1 k 0 1",
    "PUBLISH c m", "SUBSCRIBE c", "RENAME {own} {other}", "COPY {own} {other}", "SLOWLOG GET", "LATENCY LATEST",
    "MEMORY STATS", "OBJECT ENCODING {own}", "DUMP {own}", "RESTORE {own}2 0 x", "SORT {own} BY * GET *", "WAIT 1 0",
    "GET {other}", "GETRANGE {other} 0 1", "MGET {own} {other}", "SET {other} x", "UNLINK {other}",
    "EXISTS {other}", "XREAD STREAMS {other} 0", "XADD {other} * a b",
    "GETEX {other}", "PEXPIRE {other} 1", "DEL {own}", "APPEND {own} x", "FAILOVER", "PSYNC ? 0",
]  # fmt: skip


@pytest.mark.processes
def test_a_workers_redis_user_can_use_its_own_jobs_values_and_nothing_else(tmp_path: Path) -> None:
    import redis

    (tmp_path / "password").write_text("secret")
    with redis_server(tmp_path, password="secret") as server:
        url = f"redis://127.0.0.1:{server.port}/0"
        config = RedisChannelConfig(kind="redis", url=url, password_file=tmp_path / "password")
        region = RegionChannel(config, tmp_path, "east")
        theirs = region.open("job-2")
        theirs.put("k", [b"theirs"])
        own = open_channel("redis", region.worker_address("job-1"))
        own.put_many({"k": [b"small"], "large": [bytes(1 << 17)]})
        assert own.limits.value_bytes
        assert own.has("k")
        assert bytes(own.get("k") or b"") == b"small"
        assert {key: len(value) for key, value in own.wait(("k", "large"), 5.0)} == {"k": 5, "large": 1 << 17}
        own.delete("large")
        own.delete_many(["large", "none"])
        names = {"own": "geofed/east/job-1/k", "other": "geofed/east/job-2/k"}
        client = redis.Redis.from_url(region.worker_address("job-1").partition("?")[0])
        for text in HARM:
            with pytest.raises(redis.exceptions.ResponseError) as caught:
                client.execute_command(*(word.format(**names) for word in text.split()))
            assert "permissions" in str(caught.value), f"{text}: {caught.value}"
        assert bytes(theirs.get("k") or b"") == b"theirs"
        assert bytes(own.get("k") or b"") == b"small"
        client.close()
        for channel in (own, theirs):
            channel.close()
        region.discard("job-1")
        with pytest.raises(GeofedError):
            open_channel("redis", region.address("job-1").replace("default:secret", "geofed-east-job-1:x")).get("k")


@pytest.mark.processes
def test_a_worker_may_use_the_database_of_the_address_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("secret")
    with redis_server(tmp_path, password="secret") as server:
        url = f"redis://127.0.0.1:{server.port}/3"
        config = RedisChannelConfig(kind="redis", url=url, password_file=tmp_path / "password")
        assert set(RegionChannel(config, tmp_path, "east").check()) == {"put", "get"}


@pytest.mark.parametrize(
    ("channel", "plaintext"),
    [
        ("{kind: redis, url: 'redis://cache:6379'}", True),
        ("{kind: redis, url: 'redis://10.0.0.7:6379'}", True),
        ("{kind: redis, url: 'redis://127.0.0.1:6379'}", False),
        ("{kind: redis, url: 'redis://[::1]:6379'}", False),
        ("{kind: redis, url: 'redis://localhost:6379'}", False),
        ("{kind: redis, url: 'rediss://cache:6379'}", False),
        ("{kind: redis, url: 'unix:///run/redis.sock'}", False),
        ("{kind: s3, bucket: channel, endpointUrl: 'http://store:9000'}", True),
        ("{kind: s3, bucket: channel, endpointUrl: 'http://127.0.0.1:9000'}", False),
        ("{kind: s3, bucket: channel, endpointUrl: 'https://store:9000'}", False),
        ("{kind: s3, bucket: channel}", False),
        ("{kind: file}", False),
    ],
)
def test_tensors_cross_a_network_unencrypted_only_where_the_file_says_so(
    tmp_path: Path, channel: str, plaintext: bool
) -> None:
    path = tmp_path / "region.yaml"
    path.write_text(f"{REGION}channel: {channel}\n")
    if plaintext:
        with pytest.raises(GeofedError, match="insecure: true"):
            load_config(path)
        path.write_text(f"{REGION}channel: {channel[:-1]}, insecure: true}}\n")
    config = load_config(path)
    assert config.catalogue()["channel_plaintext"] is plaintext
    assert ("unencrypted" in channel_text(config)) is plaintext


@pytest.mark.parametrize(
    ("advertise", "loopback"),
    [("", True), ("127.0.0.2", True), ("'[::1]'", True), ("localhost", True), ("203.0.113.7", False), ("east", False)],
)
def test_the_catalogue_says_whether_other_machines_reach_the_region(
    tmp_path: Path, advertise: str, loopback: bool
) -> None:
    path = tmp_path / "region.yaml"
    path.write_text(REGION + (f"advertise: {advertise}\n" if advertise else ""))
    assert load_config(path).catalogue()["loopback"] is loopback
