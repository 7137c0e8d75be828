"""The channel over an object store: what only this store does, against moto's S3 server."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from botocore.exceptions import IncompleteReadError
from botocore.response import StreamingBody
from support.stores import S3Server

from geofed_pb.errors import GeofedError
from sync.channel_clients import open_channel

pytestmark = pytest.mark.processes

Open = Callable[..., Any]
MB = 1 << 20


@pytest.fixture
def opened(s3: S3Server) -> Iterator[Open]:
    """Opens a channel under a prefix of its own, and closes it when the test is over."""
    from sync.channel_clients._s3 import S3Channel

    prefix, channels = f"test-{uuid.uuid4().hex}", []

    def open_one(address: str | None = None, **more: int) -> S3Channel:
        channels.append(S3Channel(address or s3.address(prefix), **more))
        return channels[-1]

    yield open_one
    for channel in channels:
        channel.close()


def test_the_meter_equals_what_the_server_counted(s3: S3Server, opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sync.channel_clients._s3._KEYS_AT_ONCE", 10)
    channel = opened(part_bytes=5 * MB, multipart_bytes=6 * MB)
    s3.counts()
    value = random.Random(1).randbytes(12 * MB)
    channel.put("large", [value])
    assert channel.get("large") == value
    channel.put_many({f"a/{number}": [b"z"] for number in range(12)})
    channel.put("a/empty", [])
    assert channel.get("a/empty") == b""
    assert channel.get("a/none") is None
    assert len(list(channel.wait([f"a/{number}" for number in range(12)], 10.0))) == 12
    with pytest.raises(GeofedError, match="CHANNEL_TIMEOUT"):
        list(channel.wait(["a/none"], 0.1))
    assert channel.has("a/2")
    assert not channel.has("a/none")
    channel.delete_many([f"b/{number}" for number in range(25)])
    channel.delete("a/3")
    channel.delete_tree("a")
    usage, counts = channel.usage, s3.counts()
    assert {kind: getattr(usage, kind) for kind in counts} == counts
    assert usage.requests == sum(counts.values())
    # Three parts, and what begins and ends them.
    assert usage.puts == 5 + 13
    assert usage.lists == 2
    assert usage.deletes == 3 + 1 + 2
    assert (usage.failures, usage.waits) == (0, 0)
    assert usage.bytes_in == usage.bytes_out == len(value) + 12


@pytest.mark.parametrize("size", [0, 1, 999, 1000, 1001, 4567])
def test_a_large_value_is_read_in_parts(opened: Open, size: int) -> None:
    channel = opened(part_bytes=1000)
    value = random.Random(size).randbytes(size)
    channel.put("key", [value])
    assert channel.get("key") == value
    assert channel.usage.gets == max(1, -(-size // 1000))


def test_a_value_that_is_replaced_while_it_is_read_is_read_again(opened: Open) -> None:
    channel, other = opened(part_bytes=1000), opened()
    channel.put("key", [b"a" * 5000])
    replaced = []

    def replace(params: dict[str, Any], **_: Any) -> None:
        if "If-Match" in params["headers"] and not replaced:
            replaced.append(True)
            other.put("key", [b"b" * 4500])

    channel._client.meta.events.register("before-call.s3.GetObject", replace)
    assert channel.get("key") == b"b" * 4500
    assert replaced


def test_a_value_that_is_deleted_while_it_is_read_is_not_there(opened: Open) -> None:
    channel, other = opened(part_bytes=1000), opened()
    channel.put("key", [b"a" * 5000])

    def delete(params: dict[str, Any], **_: Any) -> None:
        if "If-Match" in params["headers"]:
            other.delete("key")

    channel._client.meta.events.register("before-call.s3.GetObject", delete)
    assert channel.get("key") is None


def test_a_download_that_breaks_off_is_made_again(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    channel = opened(part_bytes=1000)
    read, broken = StreamingBody.read, []

    def breaks(body: StreamingBody, *arguments: Any) -> bytes:
        content = read(body, *arguments)
        if len(broken) < fails:
            broken.append(True)
            raise IncompleteReadError(actual_bytes=1, expected_bytes=2)
        return content

    monkeypatch.setattr(StreamingBody, "read", breaks)
    for size, fails in ((10, 3), (2500, 1)):
        broken.clear()
        channel.put(f"key/{size}", [b"a" * size])
        assert channel.get(f"key/{size}") == b"a" * size
        assert len(broken) == fails
    broken.clear()
    fails = 100
    with pytest.raises(GeofedError, match="CHANNEL_UNAVAILABLE"):
        channel.get("key/10")


def test_a_broken_upload_leaves_no_parts(s3: S3Server, opened: Open) -> None:
    channel = opened(part_bytes=5 * MB, multipart_bytes=6 * MB)

    def fail(params: dict[str, Any], **_: Any) -> None:
        if "partNumber=2" in params["url"]:
            raise RuntimeError("broken")

    channel._client.meta.events.register("before-call.s3.UploadPart", fail)
    with pytest.raises(RuntimeError, match="broken"):
        channel.put("key", [bytes(11 * MB)])
    assert channel.get("key") is None
    assert not channel._client.list_multipart_uploads(Bucket="channel").get("Uploads")


def test_other_stores_get_the_checksum_that_they_insist_on(opened: Open) -> None:
    channel, seen = opened(), []

    def look(request: Any, **_: Any) -> None:
        seen.append({name.lower() for name in request.headers.keys()})  # noqa: SIM118 - no mapping

    channel._client.meta.events.register("before-send.s3.DeleteObjects", look)
    channel._client.meta.events.register("before-send.s3.PutObject", look)
    channel.delete_many(["a", "b"])
    assert "content-md5" in seen.pop()
    channel.put("a", [b"x"])
    assert not {name for name in seen.pop() if "checksum" in name or "trailer" in name}


def test_a_bucket_that_is_not_there_is_told(s3: S3Server, opened: Open) -> None:
    channel = opened(s3.address("p").replace("s3://channel", "s3://nobody-has-it"))
    for call in (lambda: channel.get("a"), lambda: channel.put("a", [b"x"]), lambda: list(channel.wait(["a"], 1.0))):
        with pytest.raises(GeofedError) as raised:
            call()
        assert raised.value.code == "CONFIG_INVALID"
        assert "nobody-has-it" in str(raised.value)


def test_a_store_that_stays_away_is_told(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sync.channel_clients._s3_client._TRIES", 1)
    channel = opened("s3://bucket/p?endpoint=http://127.0.0.1:1&path_style=1")
    for call in (lambda: channel.get("a"), lambda: channel.put("a", [b"x"]), lambda: channel.delete("a")):
        with pytest.raises(GeofedError) as raised:
            call()
        assert raised.value.code == "CHANNEL_UNAVAILABLE"
        assert raised.value.retryable
    assert channel.usage.requests == 0


def test_without_credentials_it_says_where_to_give_them(
    s3: S3Server, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")
    with pytest.raises(GeofedError, match="UNAUTHENTICATED: no credentials") as raised:
        opened(s3.address("p")).get("a")
    assert "environment" in raised.value.hint


@pytest.mark.parametrize(
    "address",
    [
        "http://bucket/p",
        "s3:///p",
        "s3://key:s3cret@bucket/p",
        "s3://bucket/p?bogus=1",
        "s3://bucket/p?path_style=yes",
        "s3://bucket/p?parallel=0",
        "s3://bucket/p?endpoint=nowhere",
    ],
)
def test_a_wrong_address_is_told(address: str) -> None:
    with pytest.raises(GeofedError) as raised:
        open_channel("s3", address)
    assert raised.value.code == "CONFIG_INVALID"
    assert "s3cret" not in str(raised.value.as_dict())
