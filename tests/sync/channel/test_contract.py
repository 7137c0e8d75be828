"""What every channel must do, whichever store is behind it."""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.small_disk import small_disk

from geofed_pb.errors import GeofedError
from sync.channel import Channel, FileChannel, open_channel

Open = Callable[[], Channel]


@pytest.fixture(params=["disk", "shared memory"])
def reopen(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    """Opens the same channel again and again, as different workers would."""
    if request.param == "disk":
        yield lambda: FileChannel(tmp_path / "channel")
        return
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("this machine has no /dev/shm")
    folder = Path("/dev/shm") / f"geofed-test-{uuid.uuid4().hex}"
    yield lambda: FileChannel(folder)
    shutil.rmtree(folder, ignore_errors=True)


def _write_for_ever(reopen: Open, letter: bytes, stop: object) -> None:
    channel = reopen()
    while not stop.is_set():  # type: ignore[attr-defined]
        channel.put("shared/value", [letter * 100_000, letter * 100_000])


class TestEveryChannel:
    def test_a_value_comes_back_whole(self, reopen: Open) -> None:
        reopen().put("a/b-1/c_2.x", [b"one", memoryview(b""), bytearray(b"two")])
        assert reopen().get("a/b-1/c_2.x") == b"onetwo"
        assert reopen().has("a/b-1/c_2.x")

    def test_an_empty_value_is_a_value(self, reopen: Open) -> None:
        reopen().put("empty", [])
        assert reopen().get("empty") == b""

    def test_many_pieces_make_one_value(self, reopen: Open) -> None:
        pieces = [b"%d," % number for number in range(3000)]
        reopen().put("many", pieces)
        assert reopen().get("many") == b"".join(pieces)

    def test_what_is_not_there_is_no_error(self, reopen: Open) -> None:
        channel = reopen()
        assert channel.get("nothing") is None
        assert not channel.has("nothing")
        channel.delete("nothing")
        channel.delete_tree("nothing")

    def test_the_last_put_counts(self, reopen: Open) -> None:
        for value in (b"long before", b"x"):
            reopen().put("key", [value])
        assert reopen().get("key") == b"x"

    def test_delete_forgets(self, reopen: Open) -> None:
        reopen().put("key", [b"x"])
        reopen().delete("key")
        assert reopen().get("key") is None

    def test_delete_tree_forgets_what_lies_under_it_and_nothing_else(self, reopen: Open) -> None:
        for key in ("g/1/2/a", "g/1/2/b", "g/1/20", "g/1/3/a"):
            reopen().put(key, [b"x"])
        reopen().delete_tree("g/1/2")
        assert [reopen().has(key) for key in ("g/1/2/a", "g/1/2/b", "g/1/20", "g/1/3/a")] == [False, False, True, True]

    def test_a_reader_keeps_what_it_read(self, reopen: Open) -> None:
        reopen().put("key", [b"x" * 10_000])
        value = reopen().get("key")
        reopen().put("key", [b"y" * 10])
        reopen().delete("key")
        assert value == b"x" * 10_000

    @pytest.mark.parametrize(
        "key",
        ["", "/", "/a", "a/", "a//b", ".", "..", "../a", "a/../b", "a/./b", ".a", "a/.b", "a b", "ä", "a\0", "a\n"],
    )
    def test_a_bad_key_is_refused(self, reopen: Open, key: str) -> None:
        channel = reopen()
        for call in (
            lambda: channel.put(key, [b"x"]),
            lambda: channel.get(key),
            lambda: channel.has(key),
            lambda: channel.delete(key),
            lambda: channel.delete_tree(key),
        ):
            with pytest.raises(GeofedError) as raised:
                call()
            assert raised.value.code == "FRAME_INVALID"

    def test_use_is_metered_where_it_happens(self, reopen: Open) -> None:
        channel = reopen()
        channel.put("a", [b"12", b"345"])
        channel.get("a")
        channel.get("b")
        channel.delete("a")
        usage = channel.usage
        assert (usage.puts, usage.gets, usage.misses, usage.deletes) == (1, 1, 1, 1)
        assert (usage.bytes_in, usage.bytes_out) == (5, 5)
        assert reopen().usage.puts == 0

    def test_readers_of_a_value_that_others_replace_see_one_or_the_other(self, reopen: Open) -> None:
        context = multiprocessing.get_context("fork")
        stop = context.Event()
        writers = [context.Process(target=_write_for_ever, args=(reopen, letter, stop)) for letter in (b"a", b"b")]
        for writer in writers:
            writer.start()
        try:
            seen: set[bytes] = set()
            channel, reads = reopen(), 0
            while reads < 300 or len(seen) < 2:
                value = channel.get("shared/value")
                if value is not None:
                    assert len(value) == 200_000
                    assert bytes(value).count(value[0]) == 200_000
                    seen.add(bytes(value[:1]))
                    reads += 1
        finally:
            stop.set()
            for writer in writers:
                writer.join()

    def test_a_value_is_put_while_others_delete_the_tree_around_it(self, reopen: Open) -> None:
        stop = threading.Event()

        def delete() -> None:
            channel = reopen()
            while not stop.is_set():
                channel.delete_tree("g/1")

        deleting = threading.Thread(target=delete)
        deleting.start()
        try:
            channel = reopen()
            for number in range(500):
                channel.put(f"g/1/{number % 3}/{number}", [b"x"])
        finally:
            stop.set()
            deleting.join()
        reopen().put("g/1/0/last", [b"x"])
        assert reopen().has("g/1/0/last")

    def test_threads_that_put_one_key_do_not_mix(self, reopen: Open) -> None:
        channel = reopen()

        def put(letter: bytes) -> None:
            for _ in range(100):
                channel.put("key", [letter * 5000, letter * 5000])

        threads = [threading.Thread(target=put, args=(letter,)) for letter in (b"a", b"b", b"c")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        value = channel.get("key")
        assert value is not None
        assert bytes(value) in {letter * 10_000 for letter in (b"a", b"b", b"c")}


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


def test_other_errors_are_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise OSError(errno.EIO, "the disk is broken")

    channel = FileChannel(tmp_path)
    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises(OSError, match="the disk is broken"):
        channel.put("key", [b"x"])
    assert list(tmp_path.iterdir()) == []


def test_channels_are_opened_by_the_name_in_the_plan(tmp_path: Path) -> None:
    assert isinstance(open_channel("file", str(tmp_path)), FileChannel)
    with pytest.raises(GeofedError, match="unknown channel 'x'"):
        open_channel("x", "")
