"""The channel of files: what a disk does, and how the kernel tells of what has come."""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
import tempfile
import threading
from pathlib import Path

import pytest
from support.small_disk import small_disk

from geofed_pb.errors import GeofedError
from sync.channel_clients import FileChannel, _arrivals, _inotify


@pytest.mark.processes
def test_a_full_channel_is_told_and_keeps_what_it_has(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", bytes_=1 << 17) as folder:
        channel = FileChannel(folder / "channel")
        channel.put("kept/value", [b"x" * 1000])
        with pytest.raises(GeofedError) as raised:
            channel.put("kept/more", [bytes(1 << 18)])
        assert raised.value.code == "DISK_FULL"
        assert channel.get("kept/more") is None
        assert channel.get("kept/value") == b"x" * 1000
        assert [path.name for path in (folder / "channel" / "kept").iterdir()] == ["value"]


def test_a_folder_in_shared_memory_is_known(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as shared:
        assert FileChannel(Path(shared) / "deeper" / "down").in_memory
        (tmp_path / "link").symlink_to(shared)
        assert FileChannel(tmp_path / "link").in_memory


def test_a_folder_on_disk_is_not_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = "21 1 8:1 / / rw - ext4 /dev/sda1 rw\n30 21 0:27 / /somewhere rw - tmpfs tmpfs rw\n"
    real = Path.read_text

    def read(path: Path, *arguments: str) -> str:
        return mounts if str(path) == "/proc/self/mountinfo" else real(path, *arguments)

    monkeypatch.setattr(Path, "read_text", read)
    assert not FileChannel(tmp_path).in_memory


def test_other_errors_are_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise OSError(errno.EIO, "the disk is broken")

    channel = FileChannel(tmp_path)
    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises(OSError, match="the disk is broken"):
        channel.put("key", [b"x"])
    assert list(tmp_path.iterdir()) == []


def _without_inotify(*_: object) -> None:
    raise OSError(errno.EMFILE, "every instance is taken")


def _no_watch_left(*_: object) -> None:
    raise OSError(errno.ENOSPC, "every watch is taken")


@pytest.mark.parametrize(("method", "broken"), [("__init__", _without_inotify), ("watch", _no_watch_left)])
def test_without_inotify_the_files_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, broken: object
) -> None:
    monkeypatch.setattr(_inotify.Inotify, method, broken)
    channel = FileChannel(tmp_path / "channel")
    with pytest.raises(GeofedError, match="CHANNEL_TIMEOUT"):
        list(channel.wait(["a/1"], 0.1))
    thread = threading.Thread(target=lambda: [channel.put(key, [b"x"]) for key in ("a/1", "b/2")])
    thread.start()
    assert dict(channel.wait(["a/1", "b/2"], 30.0)) == {"a/1": b"x", "b/2": b"x"}
    thread.join()
    assert channel.usage.waits == 0


def test_the_kernel_tells_of_a_file_however_deep_its_folders_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_arrivals, "_SAFETY_SECONDS", 30.0)
    channel = FileChannel(tmp_path / "channel")
    watched = threading.Event()
    begin = _arrivals.Arrivals.begin

    def begun(arrivals: _arrivals.Arrivals) -> None:
        begin(arrivals)
        watched.set()

    monkeypatch.setattr(_arrivals.Arrivals, "begin", begun)

    def put() -> None:
        assert watched.wait(30)
        shutil.rmtree(tmp_path / "channel")
        for noise in range(50):
            (tmp_path / f"noise-{noise}").mkdir()
        FileChannel(tmp_path / "channel").put("a/b/c/d", [b"x"])

    thread = threading.Thread(target=put)
    thread.start()
    assert dict(channel.wait(["a/b/c/d"], 20.0)) == {"a/b/c/d": b"x"}
    thread.join()
    assert channel.usage.misses < 12, "looked at for each name that came"


def test_waiting_keeps_one_watch_open_until_the_channel_is_closed(tmp_path: Path) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    channel = FileChannel(tmp_path)
    for _ in range(3):
        with pytest.raises(GeofedError, match="CHANNEL_TIMEOUT"):
            list(channel.wait(["a/b", "c/d"], 0.0))
        assert descriptors() == before + 1
    channel.close()
    assert descriptors() == before
    with pytest.raises(GeofedError, match="CHANNEL_TIMEOUT"):
        list(channel.wait(["a/b"], 0.0))
    del channel
    assert descriptors() == before, "nor where nobody closes it"


def test_a_watch_that_is_used_again_knows_nothing_of_before(tmp_path: Path) -> None:
    channel = FileChannel(tmp_path)
    for number in range(3):
        with pytest.raises(GeofedError, match="CHANNEL_TIMEOUT"):
            list(channel.wait([f"a/{number}", "b/c"], 0.0))
        channel.put(f"a/{number}", [b"x"])
    (watch,) = channel._watches._spare
    assert watch.wait(0.0) == []
    channel.close()


@pytest.mark.processes
def test_a_forked_worker_does_not_take_what_its_parent_waits_for(tmp_path: Path) -> None:
    channel = FileChannel(tmp_path)
    with pytest.raises(GeofedError, match="CHANNEL_TIMEOUT"):
        list(channel.wait(["a/1"], 0.0))

    def wait_and_answer() -> None:
        assert dict(channel.wait(["a/1"], 30.0)) == {"a/1": b"x"}
        channel.put("a/2", [b"y"])

    worker = multiprocessing.get_context("fork").Process(target=wait_and_answer)
    worker.start()
    waiting = channel.wait(["a/1", "a/2"], 30.0)
    channel.put("a/1", [b"x"])
    assert dict(waiting) == {"a/1": b"x", "a/2": b"y"}
    worker.join()
    assert worker.exitcode == 0
    channel.close()
