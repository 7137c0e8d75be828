"""Blobs of the control plane: what is told of them while they arrive."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from control_plane import blobs
from control_plane.blobs import BlobStore
from geofed_pb.errors import GeofedError
from geofed_pb.v1 import common_pb2

CONTENT = b"the code of a job"
NAME = hashlib.sha256(CONTENT).hexdigest()
DIGEST = f"sha256:{NAME}"


def test_what_arrived_is_told(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    assert (store.stat(DIGEST, "ann").have_bytes, store.stat(DIGEST, "ann").complete) == (0, False)
    store._partial_of(DIGEST, "ann").write_bytes(CONTENT[:5])
    assert (store.stat(DIGEST, "ann").have_bytes, store.stat(DIGEST, "ann").complete) == (5, False)


def test_an_upload_that_ends_while_it_is_asked_about_is_told_as_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, size = BlobStore(tmp_path), BlobStore.size
    partial = store._partial_of(DIGEST, "ann")
    partial.write_bytes(CONTENT)

    def ends_then(self: BlobStore, digest: str) -> int | None:
        found = size(self, digest)
        if partial.exists():
            partial.replace(tmp_path / NAME)
        return found

    monkeypatch.setattr(BlobStore, "size", ends_then)
    told = store.stat(DIGEST, "ann")
    assert (told.have_bytes, told.complete) == (len(CONTENT), True)


def send(store: BlobStore, who: str, data: bytes, *, offset: int = 0, total: int = len(CONTENT)) -> common_pb2.BlobAck:
    async def chunks() -> AsyncIterator[common_pb2.BlobChunk]:
        yield common_pb2.BlobChunk(digest=DIGEST, total_bytes=total, offset=offset, data=data)

    return asyncio.run(store.receive(chunks(), limit_bytes=1 << 20, uploader=who))


def test_what_one_has_begun_does_not_block_another(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    assert send(store, "eve", b"garbage of", total=len(CONTENT)).have_bytes == 10
    assert store.stat(DIGEST, "ann").have_bytes == 0, "ann begins at the beginning"
    assert send(store, "ann", CONTENT[:5]).have_bytes == 5
    assert store.stat(DIGEST, "eve").have_bytes == 10
    assert send(store, "ann", CONTENT[5:], offset=5).complete
    assert store.path(DIGEST).read_bytes() == CONTENT


@pytest.mark.parametrize("total", [len(CONTENT), 3])
def test_an_upload_that_is_too_long_leaves_nothing(tmp_path: Path, total: int) -> None:
    store = BlobStore(tmp_path)
    with pytest.raises(GeofedError, match="more than the announced"):
        send(store, "ann", CONTENT + b"more", total=total)
    assert store.stat(DIGEST, "ann").have_bytes == 0
    assert list((tmp_path / "partial").iterdir()) == []
    assert send(store, "ann", CONTENT).complete


def test_code_of_one_user_within_a_day_is_limited_and_others_are_not_affected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    store = BlobStore(tmp_path)
    assert put(store, "ann", b"a" * 60).complete
    assert put(store, "ann", b"a" * 60).complete, "what is there already is not sent"
    with pytest.raises(GeofedError, match="41 bytes more exceed") as refused:
        put(store, "ann", b"b" * 41)
    assert refused.value.code == "LIMIT_EXCEEDED"
    assert put(store, "eve", b"b" * 41).complete
    assert put(store, "ann", b"c" * 40).complete
    now[0] += 24 * 3600
    assert put(store, "ann", b"d" * 100).complete


def test_an_interrupted_upload_counts_what_arrived(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    assert put(store, "ann", b"a" * 100, sent=70).have_bytes == 70
    assert put(store, "ann", b"a" * 100, offset=70).complete
    with pytest.raises(GeofedError, match="1 bytes more exceed"):
        put(store, "ann", b"b")


def test_an_upload_that_would_fill_the_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def full(folder: Path, more_bytes: int) -> bool:
        asked.append((folder, more_bytes))
        return True

    monkeypatch.setattr(blobs, "is_nearly_full", full)
    with pytest.raises(GeofedError, match="no space for 17 bytes") as refused:
        send(BlobStore(tmp_path), "ann", CONTENT)
    assert (refused.value.code, asked) == ("DISK_FULL", [(tmp_path, 17)])


def put(store: BlobStore, who: str, data: bytes, *, offset: int = 0, sent: int | None = None) -> common_pb2.BlobAck:
    async def chunks() -> AsyncIterator[common_pb2.BlobChunk]:
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        yield common_pb2.BlobChunk(digest=digest, total_bytes=len(data), offset=offset, data=data[offset:sent])

    return asyncio.run(store.receive(chunks(), limit_bytes=1 << 20, uploader=who, daily_bytes=100))
