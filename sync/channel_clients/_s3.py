"""The channel over an object store with the S3 interface.

The store does not announce new keys, so waiting means to request the value itself, with growing pauses: once it exists
it is received, and nothing is listed.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import heapq
import math
import random
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import botocore.exceptions

from geofed_pb.errors import GeofedError
from sync.channel import Buffer, ChannelLimits, RangedValue, Usage
from sync.channel_clients._address import parsed, whole
from sync.channel_clients._keys import checked_key, late
from sync.channel_clients._meter import Meter
from sync.channel_clients._pieces import checked_size, cut, joined, kept, views
from sync.channel_clients._s3_client import catalogue_errors, client_for

__all__ = ["S3Channel"]

_VALUE_BYTES = 5 << 40
"""Bytes of a value, at most: S3's limit of an object, 5 TiB."""
_MAX_PARTS = 10_000
"""Parts of a multipart upload, at most."""
_PART_BYTES = 16 << 20
"""Size of a part that is sent or received by one request."""
_MULTIPART_BYTES = 64 << 20
"""Values from this size are uploaded in parts: that takes two more requests of about 0.1 s, but one connection carries
only 100 MB/s."""
_KEYS_AT_ONCE = 1000
"""Keys that one request deletes, at most: the limit of S3's DeleteObjects."""
_PARALLEL = 16
"""Requests in flight, at most. A choice: enough to hide the latency of a store, few enough for a worker's sockets."""
_MIN_PAUSE_SECONDS = 0.02
"""Pause before a missing value is requested again."""
_MAX_PAUSE_SECONDS = 1.0
"""Longest such pause."""
_PAUSE_FACTOR = 1.5
"""Growth of the pause with each request."""
_READ_ATTEMPTS = 4
"""Attempts to read a value whose connection breaks, or that is replaced meanwhile; boto3 retries only until the body
begins."""


class _Interrupted(Exception):
    """Raised when a value was received only in part: the connection broke, or the value was replaced or deleted
    meanwhile."""


class S3Channel:
    """A channel in one bucket, which must exist.

    ``s3://bucket[/prefix]`` with the options ``endpoint``, ``region``, ``path_style`` (1: the bucket is part of the
    path) and ``parallel`` (concurrent requests; default 16). Credentials are found by boto3, and never part of the
    address. An object stays until it is deleted, or until the bucket's life-cycle rule deletes it.
    """

    def __init__(self, address: str, *, part_bytes: int = _PART_BYTES, multipart_bytes: int = _MULTIPART_BYTES) -> None:
        url = parsed(address, ("s3",), ("endpoint", "region", "path_style", "parallel"))
        if url.user or url.password:
            text = "the channel's address contains credentials"
            raise GeofedError("CONFIG_INVALID", text, hint="give them where boto3 looks: environment, profile, or role")
        if not url.host or url.port is not None:
            raise GeofedError("CONFIG_INVALID", "the channel's address names no bucket: s3://bucket/prefix")
        prefix = url.path.strip("/")
        self._bucket, self._prefix = url.host, f"{checked_key(prefix)}/" if prefix else ""
        self._shown, self._part_bytes, self._multipart_bytes = url.shown, part_bytes, multipart_bytes
        self._parallel = whole(url, "parallel", _PARALLEL)
        self._meter = Meter()
        with catalogue_errors(self._shown):
            self._client = client_for(url, self._meter, 3 * self._parallel)
        # Uploads and downloads have separate threads, so that they don't delay each other. Parts have their own
        # threads, too: a value that waited for its parts in the same ones could wait forever.
        self._puts = ThreadPoolExecutor(self._parallel, thread_name_prefix="geofed-s3-put")
        self._gets = ThreadPoolExecutor(self._parallel, thread_name_prefix="geofed-s3-get")
        self._parts = ThreadPoolExecutor(self._parallel, thread_name_prefix="geofed-s3-part")

    @property
    def usage(self) -> Usage:
        return self._meter.usage

    @property
    def limits(self) -> ChannelLimits:
        return ChannelLimits(value_bytes=_VALUE_BYTES, total_bytes=None)

    @property
    def in_memory(self) -> bool:
        return False

    def put(self, key: str, pieces: Sequence[Buffer]) -> None:
        name, left = self._name(key), views(pieces)
        size = checked_size(key, left, _VALUE_BYTES, self._shown)
        with catalogue_errors(self._shown):
            if size < self._multipart_bytes:
                self._client.put_object(**self._object(name), Body=joined(left))
            else:
                self._put_in_parts(name, left, size)
        self._meter.count(bytes_in=size)

    def _put_in_parts(self, name: str, pieces: list[memoryview], size: int) -> None:
        upload = self._client.create_multipart_upload(**self._object(name))["UploadId"]
        at = {**self._object(name), "UploadId": upload}

        def send(number: int, part: list[memoryview]) -> dict[str, Any]:
            # A part is joined only when it is sent, so that there is never a second copy of the whole value.
            answer = self._client.upload_part(**at, PartNumber=number, Body=joined(part))
            return {"PartNumber": number, "ETag": answer["ETag"]}

        try:
            parts = cut(pieces, max(self._part_bytes, math.ceil(size / _MAX_PARTS)))
            sent = _all(self._parts.submit(send, number, part) for number, part in enumerate(parts, 1))
            self._client.complete_multipart_upload(**at, MultipartUpload={"Parts": sent})
        except BaseException:
            # Also when interrupted: parts of an upload that is neither completed nor aborted are billed.
            with contextlib.suppress(botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError):
                self._client.abort_multipart_upload(**at)
            raise

    def put_made(self, key: str, make: Callable[[], tuple[int, Iterator[memoryview]]]) -> None:
        self.put(key, kept(make()[1]))

    def put_many(self, items: Mapping[str, Sequence[Buffer]]) -> None:
        for key in items:
            checked_key(key)
        _all([self._puts.submit(self.put, key, pieces) for key, pieces in items.items()])

    def get(self, key: str) -> memoryview | None:
        name = self._name(key)
        for reads_left in reversed(range(_READ_ATTEMPTS)):
            try:
                with catalogue_errors(self._shown):
                    value = self._read(name)
                break
            except _Interrupted as error:
                if not reads_left:
                    raise GeofedError("CHANNEL_UNAVAILABLE", f"cannot read {key}: {error}") from error
        if value is not None:
            self._meter.count(bytes_out=value.nbytes)
        return value

    def _read(self, name: str) -> memoryview | None:
        """Read a value: in one request if it is no larger than a part, otherwise its parts concurrently."""
        try:
            first = self._client.get_object(**self._object(name), Range=f"bytes=0-{self._part_bytes - 1}")
        except botocore.exceptions.ClientError as error:
            if _code(error) == "NoSuchKey":
                return None
            if _code(error) == "InvalidRange":
                # There is no first byte, so the value is empty.
                return memoryview(b"")
            raise
        total = int(first.get("ContentRange", "/0").rpartition("/")[2])
        if total <= self._part_bytes:
            return memoryview(_body(first))
        value = memoryview(bytearray(total))

        def fetch(start: int) -> None:
            end = min(start + self._part_bytes, total)
            part = self._client.get_object(
                **self._object(name), Range=f"bytes={start}-{end - 1}", IfMatch=first["ETag"]
            )
            value[start:end] = _body(part)

        rest = [self._parts.submit(fetch, start) for start in range(self._part_bytes, total, self._part_bytes)]
        try:
            value[: self._part_bytes] = _body(first)
            _all(rest)
        except botocore.exceptions.ClientError as error:
            if _code(error) in ("NoSuchKey", "PreconditionFailed"):
                raise _Interrupted("it was replaced") from None
            raise
        return value

    def wait(self, keys: Collection[str], timeout_seconds: float) -> Iterator[tuple[str, memoryview]]:
        wanted = list(dict.fromkeys(checked_key(key) for key in keys))
        return self._wait(wanted, time.monotonic() + timeout_seconds, timeout_seconds)

    def wait_ranged(
        self, keys: Collection[str], timeout_seconds: float, whole: int
    ) -> Iterator[tuple[str, memoryview | RangedValue]]:
        return self.wait(keys, timeout_seconds)

    def _wait(self, keys: list[str], deadline: float, seconds: float) -> Iterator[tuple[str, memoryview]]:
        """Request each key separately, so that a long download delays no other key; the last time at the deadline."""
        due = [(0.0, key) for key in sorted(keys)]
        pauses = dict.fromkeys(keys, _MIN_PAUSE_SECONDS)
        asked: dict[Future[memoryview | None], tuple[str, float]] = {}
        missing: list[str] = []
        try:
            while due or asked:
                now = time.monotonic()
                while due and due[0][0] <= now and len(asked) < self._parallel:
                    _, key = heapq.heappop(due)
                    asked[self._gets.submit(self.get, key)] = (key, now)
                pause = max(0.0, due[0][0] - now) if due and len(asked) < self._parallel else None
                if not asked:
                    time.sleep(pause or 0.0)
                    continue
                done, _ = concurrent.futures.wait(asked, pause, concurrent.futures.FIRST_COMPLETED)
                for future in done:
                    key, when = asked.pop(future)
                    value = future.result()
                    if value is not None:
                        yield key, value
                    elif when >= deadline:
                        missing.append(key)
                    else:
                        after = time.monotonic() + pauses[key] * random.uniform(0.75, 1.25)
                        pauses[key] = min(pauses[key] * _PAUSE_FACTOR, _MAX_PAUSE_SECONDS)
                        heapq.heappush(due, (min(after, deadline), key))
        finally:
            _cancel_all(asked)
        if missing:
            raise late(missing, seconds)

    def has(self, key: str) -> bool:
        try:
            with catalogue_errors(self._shown):
                self._client.head_object(**self._object(self._name(key)))
        except GeofedError as error:
            if _code(error.__cause__) in ("404", "NoSuchKey"):
                return False
            raise
        return True

    def delete(self, key: str) -> None:
        with catalogue_errors(self._shown):
            self._client.delete_object(**self._object(self._name(key)))

    def delete_many(self, keys: Collection[str]) -> None:
        self._delete([self._name(key) for key in keys])

    def _delete(self, names: list[str]) -> None:
        for at in range(0, len(names), _KEYS_AT_ONCE):
            objects = [{"Key": name} for name in names[at : at + _KEYS_AT_ONCE]]
            with catalogue_errors(self._shown):
                answer = self._client.delete_objects(Bucket=self._bucket, Delete={"Objects": objects, "Quiet": True})
            if refused := [error for error in answer.get("Errors", ()) if error.get("Code") != "NoSuchKey"]:
                first = f"{refused[0].get('Key')}: {refused[0].get('Message')}"
                raise GeofedError("CHANNEL_UNAVAILABLE", f"{self._shown} did not delete {len(refused)} keys: {first}")

    def delete_tree(self, prefix: str) -> None:
        asked = {"Bucket": self._bucket, "Prefix": f"{self._name(prefix)}/", "MaxKeys": _KEYS_AT_ONCE}
        while True:
            with catalogue_errors(self._shown):
                page = self._client.list_objects_v2(**asked)
            self._delete([entry["Key"] for entry in page.get("Contents", ())])
            if not page.get("IsTruncated"):
                return
            asked["ContinuationToken"] = page["NextContinuationToken"]

    def close(self) -> None:
        for threads in (self._puts, self._gets, self._parts):
            threads.shutdown(cancel_futures=True)
        self._client.close()

    def _name(self, key: str) -> str:
        return self._prefix + checked_key(key)

    def _object(self, name: str) -> dict[str, Any]:
        return {"Bucket": self._bucket, "Key": name}


def _code(error: BaseException | None) -> str:
    """Return the store's error code."""
    return str(error.response["Error"].get("Code")) if isinstance(error, botocore.exceptions.ClientError) else ""


def _body(answer: dict[str, Any]) -> bytes:
    try:
        content: bytes = answer["Body"].read()
    except (botocore.exceptions.HTTPClientError, botocore.exceptions.IncompleteReadError) as error:
        raise _Interrupted(str(error)) from error
    return content


def _all(futures: Iterable[Future[Any]]) -> list[Any]:
    """Return all results, or raise the first error after all work has ended, so that none continues unnoticed."""
    begun = list(futures)
    concurrent.futures.wait(begun, return_when=concurrent.futures.FIRST_EXCEPTION)
    _cancel_all([future for future in begun if not future.done()])
    for future in begun:
        if not future.cancelled():
            future.result()
    return [future.result() for future in begun]


def _cancel_all(futures: Iterable[Future[Any]]) -> None:
    for future in futures:
        future.cancel()
    concurrent.futures.wait(list(futures))
