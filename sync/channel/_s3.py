"""The channel over an object store that speaks S3.

The store tells nobody that a key has come, so waiting is asking for the value itself, with pauses that grow: what is
there is then already got, and nothing is listed.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import heapq
import math
import random
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import botocore.exceptions

from geofed_pb.errors import GeofedError
from sync.channel._address import parsed, whole
from sync.channel._contract import Buffer, Limits
from sync.channel._keys import checked_key, late
from sync.channel._meter import Meter, Usage
from sync.channel._pieces import checked_size, cut, joined, views
from sync.channel._s3_client import client_for, told

__all__ = ["S3Channel"]

_VALUE_BYTES = 5 << 40
_MOST_PARTS = 10_000
_PART_BYTES = 16 << 20
_CUT_BYTES = 64 << 20
"""From here on parts pay: they take two more requests of some 0.1 s each, against 100 MB/s on one connection."""
_KEYS_AT_ONCE = 1000
_PARALLEL = 16
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS, _PAUSE_FACTOR = 0.02, 1.0, 1.5
_READS = 4
"""Tries to read a value whose connection breaks, or that is replaced meanwhile; boto3 repeats only until it begins."""


class _Again(Exception):
    """The value came in part only: the connection broke, or it was replaced or deleted meanwhile."""


class S3Channel:
    """Values as objects of one bucket, which must be there.

    ``s3://bucket[/prefix]`` with the options ``endpoint``, ``region``, ``path_style`` (1: the bucket stands in the
    path) and ``parallel`` (requests at one time; default 16). Credentials come from where boto3 looks for them, never
    from the address. An object lives until it is deleted, or until the bucket's own life-cycle rule ends it.
    """

    def __init__(self, address: str, *, part_bytes: int = _PART_BYTES, cut_bytes: int = _CUT_BYTES) -> None:
        url = parsed(address, ("s3",), ("endpoint", "region", "path_style", "parallel"))
        if url.user or url.password:
            text = "credentials do not belong into the channel's address"
            raise GeofedError("CONFIG_INVALID", text, hint="give them where boto3 looks: environment, profile, or role")
        if not url.host or url.port is not None:
            raise GeofedError("CONFIG_INVALID", "the channel's address names no bucket: s3://bucket/prefix")
        prefix = url.path.strip("/")
        self._bucket, self._prefix = url.host, f"{checked_key(prefix)}/" if prefix else ""
        self._shown, self._part_bytes, self._cut_bytes = url.shown, part_bytes, cut_bytes
        self._parallel = whole(url, "parallel", _PARALLEL)
        self._meter = Meter()
        with told(self._shown):
            self._client = client_for(url, self._meter, 3 * self._parallel)
        # Uploads do not stand in the way of downloads. And parts have threads of their own: a value that waited for
        # its parts in the same ones could wait for ever.
        self._puts = ThreadPoolExecutor(self._parallel, thread_name_prefix="geofed-s3-put")
        self._gets = ThreadPoolExecutor(self._parallel, thread_name_prefix="geofed-s3-get")
        self._parts = ThreadPoolExecutor(self._parallel, thread_name_prefix="geofed-s3-part")

    @property
    def usage(self) -> Usage:
        return self._meter.usage

    @property
    def limits(self) -> Limits:
        return Limits(value_bytes=_VALUE_BYTES, total_bytes=None)

    @property
    def in_memory(self) -> bool:
        return False

    def put(self, key: str, pieces: Sequence[Buffer]) -> None:
        name, left = self._name(key), views(pieces)
        size = checked_size(key, left, _VALUE_BYTES, self._shown)
        with told(self._shown):
            if size < self._cut_bytes:
                self._client.put_object(**self._object(name), Body=joined(left))
            else:
                self._put_in_parts(name, left, size)
        self._meter.count(bytes_in=size)

    def _put_in_parts(self, name: str, pieces: list[memoryview], size: int) -> None:
        upload = self._client.create_multipart_upload(**self._object(name))["UploadId"]
        at = {**self._object(name), "UploadId": upload}

        def send(number: int, part: list[memoryview]) -> dict[str, Any]:
            # A part becomes bytes only when it is sent, so that no second copy of the whole value comes to be.
            answer = self._client.upload_part(**at, PartNumber=number, Body=joined(part))
            return {"PartNumber": number, "ETag": answer["ETag"]}

        try:
            parts = cut(pieces, max(self._part_bytes, math.ceil(size / _MOST_PARTS)))
            sent = _all(self._parts.submit(send, number, part) for number, part in enumerate(parts, 1))
            self._client.complete_multipart_upload(**at, MultipartUpload={"Parts": sent})
        except BaseException:
            with contextlib.suppress(botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError):
                self._client.abort_multipart_upload(**at)
            raise

    def put_many(self, items: Mapping[str, Sequence[Buffer]]) -> None:
        for key in items:
            checked_key(key)
        _all([self._puts.submit(self.put, key, pieces) for key, pieces in items.items()])

    def get(self, key: str) -> memoryview | None:
        name = self._name(key)
        for reads_left in reversed(range(_READS)):
            try:
                with told(self._shown):
                    value = self._read(name)
                break
            except _Again as error:
                if not reads_left:
                    raise GeofedError("CHANNEL_UNAVAILABLE", f"{key} cannot be read whole: {error}") from error
        if value is not None:
            self._meter.count(bytes_out=value.nbytes)
        return value

    def _read(self, name: str) -> memoryview | None:
        """The value in one request where it is no longer than a part; otherwise the parts side by side."""
        try:
            first = self._client.get_object(**self._object(name), Range=f"bytes=0-{self._part_bytes - 1}")
        except botocore.exceptions.ClientError as error:
            if _code(error) == "NoSuchKey":
                return None
            if _code(error) == "InvalidRange":
                # There is no first byte: the value is empty.
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
                raise _Again("it was replaced") from None
            raise
        return value

    def wait(self, keys: Collection[str], timeout_seconds: float) -> Iterator[tuple[str, memoryview]]:
        wanted = list(dict.fromkeys(checked_key(key) for key in keys))
        return self._wait(wanted, time.monotonic() + timeout_seconds, timeout_seconds)

    def _wait(self, keys: list[str], deadline: float, seconds: float) -> Iterator[tuple[str, memoryview]]:
        """Each key is asked for by itself, so that a long download holds up no other; the last time at the deadline."""
        due = [(0.0, key) for key in sorted(keys)]
        pauses = dict.fromkeys(keys, _FIRST_PAUSE_SECONDS)
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
                        pauses[key] = min(pauses[key] * _PAUSE_FACTOR, _LONGEST_PAUSE_SECONDS)
                        heapq.heappush(due, (min(after, deadline), key))
        finally:
            _give_up(asked)
        if missing:
            raise late(missing, seconds)

    def has(self, key: str) -> bool:
        try:
            with told(self._shown):
                self._client.head_object(**self._object(self._name(key)))
        except GeofedError as error:
            if _code(error.__cause__) in ("404", "NoSuchKey"):
                return False
            raise
        return True

    def delete(self, key: str) -> None:
        with told(self._shown):
            self._client.delete_object(**self._object(self._name(key)))

    def delete_many(self, keys: Collection[str]) -> None:
        self._delete([self._name(key) for key in keys])

    def _delete(self, names: list[str]) -> None:
        for at in range(0, len(names), _KEYS_AT_ONCE):
            objects = [{"Key": name} for name in names[at : at + _KEYS_AT_ONCE]]
            with told(self._shown):
                answer = self._client.delete_objects(Bucket=self._bucket, Delete={"Objects": objects, "Quiet": True})
            if refused := [error for error in answer.get("Errors", ()) if error.get("Code") != "NoSuchKey"]:
                first = f"{refused[0].get('Key')}: {refused[0].get('Message')}"
                raise GeofedError("CHANNEL_UNAVAILABLE", f"{self._shown} did not delete {len(refused)} keys: {first}")

    def delete_tree(self, prefix: str) -> None:
        asked = {"Bucket": self._bucket, "Prefix": f"{self._name(prefix)}/", "MaxKeys": _KEYS_AT_ONCE}
        while True:
            with told(self._shown):
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
    """The store's own name of an error."""
    return str(error.response["Error"].get("Code")) if isinstance(error, botocore.exceptions.ClientError) else ""


def _body(answer: dict[str, Any]) -> bytes:
    try:
        content: bytes = answer["Body"].read()
    except (botocore.exceptions.HTTPClientError, botocore.exceptions.IncompleteReadError) as error:
        raise _Again(str(error)) from error
    return content


def _all(futures: Iterable[Future[Any]]) -> list[Any]:
    """The results of all; the first error when every one has ended, so that none continues unseen."""
    begun = list(futures)
    concurrent.futures.wait(begun, return_when=concurrent.futures.FIRST_EXCEPTION)
    _give_up([future for future in begun if not future.done()])
    for future in begun:
        if not future.cancelled():
            future.result()
    return [future.result() for future in begun]


def _give_up(futures: Iterable[Future[Any]]) -> None:
    for future in futures:
        future.cancel()
    concurrent.futures.wait(list(futures))
