"""What every channel must do, whichever store is behind it."""

from __future__ import annotations

import mmap
import multiprocessing
import random
import threading
from typing import TYPE_CHECKING

import pytest

from geofed_pb.errors import GeofedError
from sync.channel import Usage

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .conftest import Store


def _write_for_ever(reopen: Store, letter: bytes, stop: object) -> None:
    channel = reopen()
    while not stop.is_set():  # type: ignore[attr-defined]
        channel.put("shared/value", [letter * 100_000, letter * 100_000])


class TestEveryChannel:
    def test_a_value_comes_back_whole(self, reopen: Store) -> None:
        reopen().put("a/b-1/c_2.x", [b"one", memoryview(b""), bytearray(b"two")])
        assert reopen().get("a/b-1/c_2.x") == b"onetwo"
        assert reopen().has("a/b-1/c_2.x")

    def test_an_empty_value_is_a_value(self, reopen: Store) -> None:
        reopen().put("empty", [])
        assert reopen().get("empty") == b""

    def test_many_pieces_make_one_value(self, reopen: Store) -> None:
        pieces = [b"%d," % number for number in range(3000)]
        reopen().put("many", pieces)
        assert reopen().get("many") == b"".join(pieces)

    def test_a_value_is_put_while_it_is_made(self, reopen: Store) -> None:
        held = bytearray(3)

        def made() -> Iterator[memoryview]:
            for number in range(5):
                held[:] = bytes([number]) * 3
                yield memoryview(held)

        channel = reopen()
        channel.put_made("a/made", lambda: (15, made()))
        assert bytes(channel.get("a/made") or b"") == b"".join(bytes([number]) * 3 for number in range(5))
        assert (channel.usage.puts, channel.usage.bytes_in) == (1, 15)

    def test_what_is_not_there_is_no_error(self, reopen: Store) -> None:
        channel = reopen()
        assert channel.get("nothing") is None
        assert not channel.has("nothing")
        channel.delete("nothing")
        channel.delete_tree("nothing")

    def test_the_last_put_counts(self, reopen: Store) -> None:
        for value in (b"long before", b"x"):
            reopen().put("key", [value])
        assert reopen().get("key") == b"x"

    def test_delete_forgets(self, reopen: Store) -> None:
        reopen().put("key", [b"x"])
        reopen().delete("key")
        assert reopen().get("key") is None

    def test_delete_tree_forgets_what_lies_under_it_and_nothing_else(self, reopen: Store) -> None:
        for key in ("g/1/2/a", "g/1/2/b", "g/1/20", "g/1/3/a"):
            reopen().put(key, [b"x"])
        reopen().delete_tree("g/1/2")
        assert [reopen().has(key) for key in ("g/1/2/a", "g/1/2/b", "g/1/20", "g/1/3/a")] == [False, False, True, True]

    def test_a_reader_keeps_what_it_read(self, reopen: Store) -> None:
        reopen().put("key", [b"x" * 10_000])
        value = reopen().get("key")
        reopen().put("key", [b"y" * 10])
        reopen().delete("key")
        assert value == b"x" * 10_000

    @pytest.mark.parametrize(
        "key",
        ["", "/", "/a", "a/", "a//b", ".", "..", "../a", "a/../b", "a/./b", ".a", "a/.b", "a b", "ä", "a\0", "a\n"],
    )
    def test_a_bad_key_is_refused(self, reopen: Store, key: str) -> None:
        channel = reopen()
        for call in (
            lambda: channel.put(key, [b"x"]),
            lambda: channel.get(key),
            lambda: channel.has(key),
            lambda: channel.delete(key),
            lambda: channel.delete_tree(key),
            lambda: channel.put_many({"good": [b"x"], key: [b"x"]}),
            lambda: channel.wait(["good", key], 0.0),
            lambda: channel.delete_many(["good", key]),
        ):
            with pytest.raises(GeofedError) as raised:
                call()
            assert raised.value.code == "FRAME_INVALID"
        assert channel.usage == Usage()

    def test_use_is_metered_where_it_happens(self, reopen: Store) -> None:
        channel = reopen()
        channel.put("a", [b"12", b"345"])
        channel.get("a")
        channel.get("b")
        channel.delete("a")
        usage = channel.usage
        assert (usage.puts, usage.gets, usage.misses, usage.deletes) == (1, 1, 1, 1)
        assert (usage.bytes_in, usage.bytes_out) == (5, 5)
        assert usage.requests == 4
        assert reopen().usage.puts == 0

    @pytest.mark.processes
    def test_readers_of_a_value_that_others_replace_see_one_or_the_other(self, reopen: Store) -> None:
        context = multiprocessing.get_context("fork")
        stop = context.Event()
        writers = [context.Process(target=_write_for_ever, args=(reopen, letter, stop)) for letter in (b"a", b"b")]
        for writer in writers:
            writer.start()
        try:
            seen: set[bytes] = set()
            channel, reads = reopen(), 0
            while reads < (30 if reopen.is_slow else 300) or len(seen) < 2:
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

    def test_a_value_is_put_while_others_delete_the_tree_around_it(self, reopen: Store) -> None:
        stop = threading.Event()

        def delete() -> None:
            channel = reopen()
            while not stop.is_set():
                channel.delete_tree("g/1")

        deleting = threading.Thread(target=delete)
        deleting.start()
        try:
            channel = reopen()
            for number in range(50 if reopen.is_slow else 500):
                channel.put(f"g/1/{number % 3}/{number}", [b"x"])
        finally:
            stop.set()
            deleting.join()
        reopen().put("g/1/0/last", [b"x"])
        assert reopen().has("g/1/0/last")

    def test_threads_that_put_one_key_do_not_mix(self, reopen: Store) -> None:
        channel = reopen()

        def put(letter: bytes) -> None:
            for _ in range(10 if reopen.is_slow else 100):
                channel.put("key", [letter * 5000, letter * 5000])

        threads = [threading.Thread(target=put, args=(letter,)) for letter in (b"a", b"b", b"c")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        value = channel.get("key")
        assert value is not None
        assert bytes(value) in {letter * 10_000 for letter in (b"a", b"b", b"c")}

    def test_threads_share_a_channel_and_its_meter(self, reopen: Store) -> None:
        channel = reopen()
        rounds = 10 if reopen.is_slow else 100

        def use(name: str) -> None:
            for number in range(rounds):
                channel.put(f"{name}/{number}", [b"12345"])
                value = channel.get(f"{name}/{number}")
                assert value == b"12345"
                assert channel.get(f"{name}/none") is None

        threads = [threading.Thread(target=use, args=(f"t{number}",)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        usage, calls = channel.usage, 4 * rounds
        assert (usage.puts, usage.gets, usage.misses) == (calls, calls, calls)
        assert (usage.bytes_in, usage.bytes_out, usage.failures) == (5 * calls, 5 * calls, 0)

    def test_many_values_are_put_and_deleted_together(self, reopen: Store) -> None:
        values = {f"many/{number}": bytes([number]) * number * 100 for number in range(40)}
        reopen().put_many({key: [value[:7], value[7:]] for key, value in values.items()})
        channel = reopen()
        assert {key: channel.get(key) for key in values} == values
        channel.delete_many([key for key in values if key != "many/7"] + ["many/none"])
        assert [key for key in values if channel.has(key)] == ["many/7"]

    def test_nothing_is_put_deleted_or_waited_for_without_a_request(self, reopen: Store) -> None:
        channel = reopen()
        channel.put_many({})
        channel.delete_many([])
        assert list(channel.wait([], 0.0)) == []
        assert channel.usage == Usage()

    def test_a_value_above_the_limit_is_refused_before_it_is_sent(self, reopen: Store) -> None:
        channel = reopen()
        most = channel.limits.value_bytes
        before = channel.usage
        # One gigabyte that nobody touches, many times over: it takes no memory.
        piece = memoryview(mmap.mmap(-1, 1 << 30))
        with pytest.raises(GeofedError) as raised:
            channel.put("large", [piece] * (most // (1 << 30) + 1))
        assert raised.value.code == "LIMIT_EXCEEDED"
        assert str(most) in str(raised.value)
        assert channel.usage == before

    def test_a_large_value_comes_back_whole(self, reopen: Store) -> None:
        value = random.Random(1).randbytes(3_000_000)
        channel = reopen()
        channel.put("large", [value[:10], memoryview(value)[10:1_000_000], bytearray(value[1_000_000:])])
        assert channel.get("large") == value
        assert dict(channel.wait(["large"], 0.0)) == {"large": value}
        assert channel.usage.bytes_out == 2 * len(value)

    def test_a_closed_channel_leaves_its_values(self, reopen: Store) -> None:
        channel = reopen()
        channel.put("key", [b"x"])
        channel.close()
        assert reopen().get("key") == b"x"
