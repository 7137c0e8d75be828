"""Files in shared memory that are written again: nobody ever sees another value than the one that was asked for."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.budget import budget
from support.small_disk import small_disk

from geofed_pb.errors import GeofedError
from sync.channel_clients import FileChannel
from sync.channel_clients._buffer_pool import MIN_BYTES, BufferPool, locked

LARGE = MIN_BYTES + 4096
SIZES = [LARGE + 64 * number for number in (0, 1, 40, 2000)]


@pytest.fixture
def shared() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def files(folder: Path) -> set[int]:
    """Inodes of all files."""
    return {path.stat().st_ino for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("size", [LARGE, LARGE - 100, LARGE + 5000])
def test_a_deleted_value_is_written_again(shared: Path, size: int) -> None:
    channel = FileChannel(shared)
    channel.put("a/1", [b"x" * LARGE])
    before = files(shared)
    channel.delete("a/1")
    assert channel.get("a/1") is None
    assert not channel.has("a/1")
    channel.put("b/2", [b"y" * size])
    assert files(shared) == before
    assert channel.get("b/2") == b"y" * size


def test_of_a_deleted_tree_too(shared: Path) -> None:
    channel = FileChannel(shared)
    channel.put("a/1/model", [b"x" * LARGE])
    channel.put("a/1/small", [b"x"])
    before = (shared / "a/1/model").stat().st_ino
    channel.delete_tree("a/1")
    assert not (shared / "a/1").exists()
    channel.put("a/2/model", [b"y" * LARGE])
    assert (shared / "a/2/model").stat().st_ino == before


def test_many_may_delete_the_same_tree(shared: Path) -> None:
    """As the workers of a partition do at the end of a round."""
    channel = FileChannel(shared)
    start, done = threading.Barrier(4), []

    def delete() -> None:
        for number in range(60):
            start.wait()
            if start.wait() == 0:
                channel.put(f"b/{number}/model", [bytes(LARGE)])
                channel.put(f"b/{number}/deeper/state", [bytes(LARGE)])
            start.wait()
            channel.delete_tree(f"b/{number}")
        done.append(True)

    threads = [threading.Thread(target=delete) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done) == 4


@pytest.mark.slow
def test_what_has_been_put_can_be_read_at_once(shared: Path) -> None:
    """Whoever has deleted the file that it was written in is no longer busy with it, nor a process that it forked."""
    channel, ends = FileChannel(shared), threading.Event()

    def churn() -> None:
        while not ends.is_set():
            channel.put("old", [bytes(LARGE)])
            channel.delete("old")

    threads = [threading.Thread(target=churn) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for number in range(300):
            channel.put(f"new/{number}", [bytes(LARGE)])
            assert channel.get(f"new/{number}") is not None
            channel.delete(f"new/{number}")
    finally:
        ends.set()
        for thread in threads:
            thread.join()


def test_a_value_that_is_written_again_while_it_is_opened_is_read_whole(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel, other, later = FileChannel(shared), FileChannel(shared), [LARGE + 9000, LARGE]

    def held_late(descriptor: int, path: Path) -> bool:
        if later:
            other.delete("a")
            other.put("a", [b"y" * later.pop()])
        return locked(descriptor, path)

    channel.put("a", [b"x" * (LARGE + 5000)])
    monkeypatch.setattr("sync.channel_clients._file.locked", held_late)
    assert channel.get("a") == b"y" * LARGE
    assert channel.get("a") == b"y" * (LARGE + 9000)


def test_a_job_that_is_over_leaves_nothing(shared: Path) -> None:
    """The region's channel deletes the folder that a job's was."""
    region, job = FileChannel(shared), FileChannel(shared / "job-1")
    job.put("a", [bytes(LARGE)])
    job.put("b", [bytes(LARGE)])
    job.delete("a")
    region.delete_tree("job-1")
    assert list(shared.iterdir()) == []


def test_one_that_is_read_still_is_not(shared: Path) -> None:
    channel, other = FileChannel(shared), FileChannel(shared)
    channel.put("a", [b"x" * LARGE])
    value = other.get("a")
    channel.delete("a")
    for number in range(4):
        channel.put(f"b{number}", [b"y" * LARGE])
    assert value == b"x" * LARGE
    array = np.frombuffer(value, np.uint8)
    del value
    channel.delete("b0")
    channel.put("a", [b"z" * LARGE])
    assert (array == ord("x")).all()


def test_one_that_has_been_read_is(shared: Path) -> None:
    channel = FileChannel(shared)
    channel.put("a", [b"x" * LARGE])
    value = channel.get("a")
    before = files(shared)
    del value
    channel.delete("a")
    channel.put("b", [b"y" * LARGE])
    assert files(shared) == before


def test_on_a_disk_files_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sync.channel_clients._file._in_memory", lambda _: False)
    channel = FileChannel(tmp_path)
    channel.put("a", [b"x" * LARGE])
    channel.delete("a")
    assert files(tmp_path) == set()


@pytest.mark.processes
def test_no_more_is_kept_than_an_eighth_of_the_room(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", bytes_=32 * LARGE) as folder:
        channel = FileChannel(folder)
        for number in range(16):
            channel.put(f"a/{number}", [b"x" * LARGE])
        for number in range(16):
            channel.delete(f"a/{number}")
        kept = list((folder / ".spare").iterdir())
        assert 1 <= len(kept) <= 4


@pytest.mark.processes
def test_a_channel_that_is_full_gives_up_its_buffer_pool_first(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", bytes_=16 * LARGE) as folder:
        channel = FileChannel(folder)
        channel.put("b", [b"y" * LARGE])
        channel.delete("b")
        assert list((folder / ".spare").iterdir())
        channel.put("c", [b"z" * (15 * LARGE)])
        assert channel.get("c") == b"z" * (15 * LARGE)
        with pytest.raises(GeofedError) as raised:
            channel.put("d", [b"z" * (3 * LARGE)])
        assert raised.value.code == "DISK_FULL"
        assert channel.get("c") == b"z" * (15 * LARGE)


def test_two_never_take_the_same(shared: Path) -> None:
    buffer_pool = BufferPool(shared / ".spare")
    (shared / "a").write_bytes(bytes(LARGE))
    assert buffer_pool.keep(shared / "a")
    assert buffer_pool.take(LARGE, shared / "b")
    assert not buffer_pool.take(LARGE, shared / "c")


def _value(key: str, version: int, size: int) -> bytes:
    """Says of each of its pages whose it is."""
    page = f"{key}={version};".encode().ljust(64, b".")
    return (page * (size // 64 + 1))[:size]


def _play(folder: str, number: int, seconds: float) -> None:
    """Puts, deletes and reads a few keys that others use as well; ends with 1 where a value is not what it may be."""
    random, channel = np.random.default_rng(number), FileChannel(folder)
    kept: list[tuple[memoryview, bytes]] = []
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        key = f"k/{random.integers(4)}"
        match random.integers(4):
            case 0:
                version = int(random.integers(1000))
                channel.put(key, [_value(key, version, SIZES[version % len(SIZES)])])
            case 1:
                channel.delete(key)
            case 2 if (value := channel.get(key)) is not None:
                seen = bytes(value)
                whole = seen.startswith(key.encode()) and seen == seen[:64] * (len(seen) // 64) and len(seen) in SIZES
                if not whole:
                    os._exit(1)
                kept.append((value, seen))
            case _ if kept:
                value, seen = kept.pop(int(random.integers(len(kept))))
                if bytes(value) != seen:
                    os._exit(1)
    os._exit(0)


@pytest.mark.processes
def test_whoever_reads_sees_one_whole_value_of_that_key(shared: Path) -> None:
    """Several processes at once, one of which is killed."""
    context = multiprocessing.get_context("fork")
    players = [context.Process(target=_play, args=(str(shared), number, 3.0)) for number in range(4)]
    for player in players:
        player.start()
    time.sleep(1.0)
    assert players[0].pid is not None
    os.kill(players[0].pid, signal.SIGKILL)
    for player in players:
        player.join()
    assert [player.exitcode for player in players] == [-signal.SIGKILL, 0, 0, 0]


class Values(RuleBasedStateMachine):
    """Against a plain dictionary; what was read stays what it was."""

    @initialize()
    def begin(self) -> None:
        self.folder = tempfile.mkdtemp(dir="/dev/shm")
        self.channels = [FileChannel(self.folder), FileChannel(self.folder)]
        self.there: dict[str, bytes] = {}
        self.read: list[tuple[memoryview, bytes]] = []

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder)

    keys = st.sampled_from(["a/1", "a/2", "b/1", "c"])

    @rule(key=keys, byte=st.integers(1, 255), more=st.integers(-4096, 1 << 17), by=st.integers(0, 1))
    def put(self, key: str, byte: int, more: int, by: int) -> None:
        value = bytes([byte]) * (MIN_BYTES + more)
        self.channels[by].put(key, [value[:100], value[100:]])
        self.there[key] = value

    @rule(key=keys, by=st.integers(0, 1))
    def delete(self, key: str, by: int) -> None:
        self.channels[by].delete(key)
        self.there.pop(key, None)

    @rule(tree=st.sampled_from(["a", "b"]), by=st.integers(0, 1))
    def delete_tree(self, tree: str, by: int) -> None:
        self.channels[by].delete_tree(tree)
        self.there = {key: value for key, value in self.there.items() if not key.startswith(f"{tree}/")}

    @rule(key=keys, by=st.integers(0, 1))
    def get(self, key: str, by: int) -> None:
        value = self.channels[by].get(key)
        assert value == self.there.get(key)
        if value is not None:
            self.read.append((value, self.there[key]))

    @rule(at=st.integers(0, 10))
    def forget(self, at: int) -> None:
        if at < len(self.read):
            del self.read[at]

    @invariant()
    def what_was_read_is_what_it_was(self) -> None:
        assert all(value == then for value, then in self.read)


TestValues = Values.TestCase
TestValues.settings = settings(max_examples=budget(40), stateful_step_count=25, deadline=None)
