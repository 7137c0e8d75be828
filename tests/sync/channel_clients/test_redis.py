"""The channel over Redis: what only this store does, against a real redis-server."""

from __future__ import annotations

import random
import socketserver
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.stores import RedisServer, redis_server, start_redis

from geofed_pb.errors import GeofedError
from sync.channel import Channel
from sync.channel_clients import open_channel

pytestmark = pytest.mark.processes

LONG = 30.0


@pytest.fixture
def prefix() -> str:
    return f"test-{uuid.uuid4().hex}"


@pytest.fixture
def opened() -> Iterator[Callable[..., Channel]]:
    """Opens channels, and closes them when the test is over."""
    from sync.channel_clients._redis import RedisChannel

    channels: list[Channel] = []

    def open_one(address: str, **more: float) -> Channel:
        channels.append(RedisChannel(address, **more))  # type: ignore[arg-type]
        return channels[-1]

    yield open_one
    for channel in channels:
        channel.close()


Open = Callable[..., Channel]


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_meter_equals_what_the_server_counted(redis: RedisServer, opened: Open, prefix: str) -> None:
    channel = opened(redis.unix(prefix))
    assert not channel.has("connected")
    before = redis.calls()
    channel.put("a/1", [b"x" * 10, b"y" * 100_000])
    channel.put_many({f"a/{number}": [b"z"] for number in range(2, 30)})
    assert channel.get("a/1") is not None
    assert channel.get("a/none") is None
    assert len(list(channel.wait([f"a/{number}" for number in range(1, 30)], LONG))) == 29
    with pytest.raises(GeofedError, match="CHANNEL_TIMEOUT"):
        list(channel.wait(["a/none"], 0.05))
    assert channel.has("a/2")
    assert channel.limits.total_bytes is None
    channel.delete_many(["a/1", "a/2", "a/none"])
    channel.delete("a/3")
    channel.delete_tree("a")
    usage = channel.usage
    after = redis.calls()
    calls = {name: after[name] - before.get(name, 0) for name in after}
    assert usage.failures == 0
    assert usage.puts == calls["set"] == 29
    assert usage.gets + usage.misses == calls["getex"] + calls["get"] + calls.get("mget", 0) == 3
    assert usage.misses == 1
    assert usage.waits == calls["xread"]
    # This test asks for the counts with INFO itself, once before and once (not yet counted) after.
    assert usage.looks - 1 == calls["exists"] + calls["info"] - 1
    assert usage.lists == calls["scan"]
    assert usage.deletes == calls["unlink"]
    assert usage.bytes_in == 100_010 + 28
    assert usage.bytes_out == 2 * 100_010 + 28


def test_nothing_stays_for_ever(redis: RedisServer, opened: Open, prefix: str) -> None:
    channel = opened(redis.unix(prefix, life=100))
    channel.put("small", [b"x"])
    channel.put("large", [b"x" * 100_000])
    names = [name for name in redis.command("KEYS", f"{prefix}/*").splitlines() if name]
    assert sorted(names) == [f"{prefix}/{name}" for name in ("large", "large:new", "small", "small:new")]
    assert all(90_000 < int(redis.command("PTTL", name)) <= 100_000 for name in names)
    for name in names:
        redis.command("PEXPIRE", name, "50000")
    channel.get("small")
    channel.get("large")
    assert all(90_000 < int(redis.command("PTTL", name)) <= 100_000 for name in names), "what is read lives on"
    channel.delete_many(["small", "large"])
    assert not redis.command("KEYS", f"{prefix}/*").strip()


@pytest.mark.parametrize("size", [0, 9_999, 10_000, 10_001, 35_000, 79_999, 80_000])
def test_a_value_above_what_one_string_holds_is_cut(redis: RedisServer, opened: Open, prefix: str, size: int) -> None:
    channel = opened(redis.unix(prefix), part_bytes=10_000)
    value = random.Random(size).randbytes(size)
    for before in (80_000, 30_000, 10_000, 5):
        channel.put("key", [b"b" * before])
        channel.put("key", [value[:15_000], value[15_000:]])
        assert channel.get("key") == value
        assert dict(channel.wait(["key"], 0.0)) == {"key": value}
    channel.delete("key")
    assert not redis.command("KEYS", f"{prefix}/*").strip()
    assert channel.limits.value_bytes == 80_000


def test_readers_of_cut_values_see_one_or_the_other(redis: RedisServer, opened: Open, prefix: str) -> None:
    stop = threading.Event()

    def write(letter: bytes, size: int) -> None:
        channel = opened(redis.unix(prefix), part_bytes=10_000)
        while not stop.is_set():
            channel.put("key", [letter * size])

    threads = [threading.Thread(target=write, args=args) for args in ((b"a", 30_000), (b"b", 75_000), (b"c", 10_000))]
    for thread in threads:
        thread.start()
    try:
        reader = opened(redis.unix(prefix), part_bytes=10_000)
        next(reader.wait(["key"], LONG))
        for _ in range(300):
            value = reader.get("key")
            assert value is not None
            assert bytes(value) in {b"a" * 30_000, b"b" * 75_000, b"c" * 10_000}
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_values_are_read_in_ranges(redis: RedisServer, opened: Open, prefix: str) -> None:
    channel = opened(redis.unix(prefix), part_bytes=20_000)
    values = {str(number): random.Random(number).randbytes(70_000 + number) for number in range(4)}
    channel.put_many({**{key: [value] for key, value in values.items()}, "small": [b"x"]})
    found = dict(channel.wait_ranged([*values, "small"], LONG, 1))
    assert found.pop("small") == b"x"
    ranged = {key: value for key, value in found.items() if not isinstance(value, memoryview)}
    assert len(ranged) == 3
    for key, value in ranged.items():
        for start, stop, size in ((0, 70_000, 30_000), (19_999, 20_001, 1), (25_000, 69_999, 7_000)):
            pieces = [bytes(piece) for piece in value.pieces(start, stop, size)]
            assert [len(piece) for piece in pieces[:-1]] == [size] * (len(pieces) - 1)
            assert b"".join(pieces) == values[key][start:stop]
    pieces = value.pieces(0, 60_000, 10_000)
    read = b"".join(bytes(next(pieces)) for _ in range(2))
    redis.command("CLIENT", "KILL", "TYPE", "normal")
    assert read + b"".join(pieces) == values[key][:60_000], "after a lost connection"
    channel.delete(key)
    with pytest.raises(GeofedError, match="FENCED"):
        list(value.pieces(0, 10, 10))


def test_a_sign_whose_value_has_gone_is_not_asked_again_and_again(
    redis: RedisServer, opened: Open, prefix: str
) -> None:
    channel, other = opened(redis.unix(prefix)), opened(redis.unix(prefix))
    channel.put("key", [b"x" * 100_000])
    redis.command("DEL", f"{prefix}/key")
    with pytest.raises(GeofedError, match="CHANNEL_TIMEOUT"):
        list(channel.wait(["key"], 0.3))
    assert channel.usage.requests < 10
    waiting = channel.wait(["key"], LONG)
    other.put("key", [b"y" * 100_000])
    assert next(waiting) == ("key", b"y" * 100_000)


def test_memory_that_ends_is_told_and_keeps_what_is_there(tmp_path: Path, opened: Open) -> None:
    with redis_server(tmp_path, "--maxmemory", "20mb", "--maxmemory-policy", "noeviction") as server:
        channel = opened(server.unix("full"))
        assert channel.limits.total_bytes == 20 << 20
        put: list[int] = []

        def fill() -> None:
            for number in range(20):
                channel.put(f"a/{number}", [bytes([number]) * (4 << 20)])
                put.append(number)

        with pytest.raises(GeofedError) as raised:
            fill()
        assert raised.value.code == "DISK_FULL"
        assert "maxmemory" in raised.value.hint
        assert put
        assert all(channel.get(f"a/{number}") == bytes([number]) * (4 << 20) for number in put)
        assert channel.get(f"a/{len(put)}") is None
        assert channel.usage.puts == len(put)
        assert channel.usage.failures == 1
        channel.delete_tree("a")
        channel.put("again", [b"x"])
        assert channel.get("again") == b"x"


def test_a_password_lets_in_and_is_never_shown(tmp_path: Path, opened: Open) -> None:
    with redis_server(tmp_path, password="s3cret-word") as server:
        for address in (server.tcp("p"), server.unix("p")):
            channel = opened(address)
            channel.put("key", [b"x"])
            assert channel.get("key") == b"x"
            assert "s3cret" not in repr(channel)
        wrong = server.tcp("p").replace("s3cret-word", "wr0ng-word")
        for address in (
            wrong,
            wrong.replace(":wr0ng-word@", "somebody:wr0ng-word@"),
            wrong.replace(":wr0ng-word@", ""),
        ):
            with pytest.raises(GeofedError) as raised:
                opened(address, timeout_seconds=0.1).get("key")
            assert raised.value.code == "UNAUTHENTICATED"
            assert not {"wr0ng", "s3cret", "somebody"} & set(str(raised.value.as_dict()).replace("-", " ").split())
            assert str(server.port) in str(raised.value)


def test_a_server_that_stays_away_is_told_in_time(tmp_path: Path, opened: Open) -> None:
    address = f"unix://:s3cret@{tmp_path}/nobody.sock"
    channel = opened(address, timeout_seconds=0.2)
    for call in (lambda: channel.put("a", [b"x"]), lambda: channel.get("a"), lambda: list(channel.wait(["a"], LONG))):
        began = time.monotonic()
        with pytest.raises(GeofedError) as raised:
            call()
        assert time.monotonic() - began < 10
        assert raised.value.code == "CHANNEL_UNAVAILABLE"
        assert raised.value.retryable
        assert "s3cret" not in str(raised.value.as_dict())
    assert channel.usage.requests == 0


def test_lost_connections_are_made_again(redis: RedisServer, opened: Open, prefix: str) -> None:
    channel = opened(redis.unix(prefix))
    channel.put("a", [b"x"])
    for _ in range(3):
        redis.command("CLIENT", "KILL", "TYPE", "normal")
        assert channel.get("a") == b"x"
        redis.command("CLIENT", "KILL", "TYPE", "normal")
        channel.put("a", [b"x"])


def test_a_waiter_outlasts_a_restart_of_the_server(tmp_path: Path, opened: Open) -> None:
    server = start_redis(tmp_path)
    came: list[tuple[str, bytes]] = []
    waiter = opened(server.tcp("p"))
    thread = threading.Thread(target=lambda: came.extend((k, bytes(v)) for k, v in waiter.wait(["a/1", "a/2"], LONG)))
    try:
        opened(server.tcp("p")).put("a/1", [b"1"])
        thread.start()
        _until(lambda: "blocked_clients:1" in server.command("INFO", "clients"))
        server.kill()
        server = start_redis(tmp_path, port=server.port)
        opened(server.tcp("p")).put("a/2", [b"2"])
        thread.join(LONG)
        assert came == [("a/1", b"1"), ("a/2", b"2")]
        assert waiter.usage.failures >= 1
    finally:
        server.kill()
        thread.join(LONG)


@pytest.mark.parametrize(
    "address",
    ["redis:", "http://host", "redis://host:port", "redis://host/x", "redis://host?bogus=1", "redis://host?life=0"],
)
def test_a_wrong_address_is_told_without_its_password(address: str) -> None:
    address = address.replace("//", "//somebody:s3cret@")
    with pytest.raises(GeofedError) as raised:
        open_channel("redis", address)
    assert raised.value.code == "CONFIG_INVALID"
    assert "s3cret" not in str(raised.value.as_dict())
    assert raised.value.__cause__ is None


def test_a_refusal_of_the_server_is_told(redis: RedisServer, opened: Open, prefix: str) -> None:
    channel = opened(redis.unix(prefix, db=99), timeout_seconds=0.1)
    with pytest.raises(GeofedError, match=r"CHANNEL_UNAVAILABLE: .*DB index"):
        channel.get("a")
    redis.command("RPUSH", f"{prefix}/list", "x")
    redis.command("XADD", f"{prefix}/list:new", "*", "large", "")
    healthy = opened(redis.unix(prefix))
    healthy.put("good", [b"x" * 100_000])
    for call in (lambda: healthy.get("list"), lambda: list(healthy.wait(["list", "good"], 1.0))):
        with pytest.raises(GeofedError, match=r"CHANNEL_UNAVAILABLE: .*WRONGTYPE"):
            call()
        assert healthy.get("good") == b"x" * 100_000
    redis.command("ACL", "SETUSER", "reader", "on", ">pw", "~*", "+getex", "+pexpire")
    address = redis.unix(prefix).replace("unix://", "unix://reader:pw@")
    with pytest.raises(GeofedError, match="FORBIDDEN"):
        opened(address).put("a", [b"x"])
    assert opened(address).get("a") is None


class _Web(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        self.request.recv(1000)
        self.request.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


def test_what_is_no_redis_is_told_at_once(opened: Open) -> None:
    with socketserver.TCPServer(("127.0.0.1", 0), _Web) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        channel = opened(f"redis://127.0.0.1:{server.server_address[1]}/0")
        with pytest.raises(GeofedError, match=r"CHANNEL_UNAVAILABLE: the server at .* is not a Redis server"):
            channel.put("a", [b"x"])
        server.shutdown()
