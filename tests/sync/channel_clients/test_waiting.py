"""Waiting for values, whichever store is behind the channel."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from geofed_pb.errors import GeofedError

if TYPE_CHECKING:
    from .conftest import Store

LONG = 30.0


@contextlib.contextmanager
def beside(work: Callable[[], None]) -> Iterator[None]:
    """Run something in a thread while the block runs."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        thread.join()
    assert not failed


def test_values_that_are_there_come_at_once(reopen: Store) -> None:
    reopen().put_many({f"a/{number}": [b"%d" % number] for number in range(20)})
    assert dict(reopen().wait([f"a/{number}" for number in range(20)], 0.0)) == {
        f"a/{number}": b"%d" % number for number in range(20)
    }


@pytest.mark.parametrize("seed", range(4))
def test_every_value_comes_once_in_whatever_order_it_is_put(reopen: Store, seed: int) -> None:
    chance = random.Random(seed)
    sizes = [0, 1, 1000, 70_000, 300_000]
    values = {f"s{seed}/{number % 3}/{number}": chance.randbytes(chance.choice(sizes)) for number in range(12)}
    order = chance.sample(sorted(values), len(values))
    early = chance.randrange(len(order))
    writer = reopen()
    writer.put_many({key: [values[key]] for key in order[:early]})

    def put() -> None:
        for key in order[early:]:
            writer.put(key, [values[key]])

    with beside(put):
        came = list(reopen().wait(chance.sample(order, len(order)), LONG))
    assert len(came) == len(values)
    assert dict(came) == values


def test_each_value_is_put_when_the_one_before_has_come(reopen: Store) -> None:
    keys = [f"turn/{number}" for number in range(6)]
    come = {key: threading.Event() for key in keys}
    writer = reopen()

    def put() -> None:
        for before, key in zip([None, *keys], keys, strict=False):
            assert before is None or come[before].wait(LONG)
            writer.put(key, [b"x" * 100_000])

    with beside(put):
        for key, value in reopen().wait(keys, LONG):
            assert value.nbytes == 100_000
            come[key].set()
    assert all(event.is_set() for event in come.values())


def test_what_others_wait_for_is_not_taken_from_them(reopen: Store) -> None:
    keys = [f"shared/{number}" for number in range(5)]
    seen: list[dict[str, bytes]] = []

    def read() -> None:
        seen.append({key: bytes(value) for key, value in reopen().wait(keys, LONG)})

    with beside(read), beside(read):
        reopen().put_many({key: [key.encode()] for key in keys})
    assert seen == [{key: key.encode() for key in keys}] * 2


def test_the_time_to_wait_ends_and_what_is_missing_is_named(reopen: Store) -> None:
    channel = reopen()
    channel.put("there", [b"x"])
    came = []
    with pytest.raises(GeofedError) as raised:
        came.extend(channel.wait(["there", "never/1", "never/2"], 0.1))
    assert came == [("there", b"x")]
    assert raised.value.code == "CHANNEL_TIMEOUT"
    assert raised.value.retryable
    assert "never/1, never/2" in str(raised.value)
    assert "there" not in str(raised.value).replace("not in the channel", "")


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_without_time_there_is_one_look(reopen: Store, seconds: float) -> None:
    channel = reopen()
    with pytest.raises(GeofedError, match="CHANNEL_TIMEOUT"):
        list(channel.wait(["never"], seconds))
    assert channel.usage.requests <= 2


def test_waiting_asks_seldom(reopen: Store) -> None:
    channel = reopen()
    with pytest.raises(GeofedError, match="CHANNEL_TIMEOUT"):
        list(channel.wait(["never/1"], 0.5))
    assert channel.usage.requests < 15
    assert channel.usage.lists == 0


def test_a_key_that_is_named_twice_comes_once(reopen: Store) -> None:
    reopen().put("key", [b"x"])
    assert list(reopen().wait(["key", "key"], 0.0)) == [("key", b"x")]


def test_who_stops_early_can_go_on_with_the_channel(reopen: Store) -> None:
    channel = reopen()
    values = {f"early/{number}": [bytes([number]) * 200_000] for number in range(6)}
    channel.put_many(values)
    waiting = channel.wait(list(values), LONG)
    key, value = next(waiting)
    assert value == values[key][0]
    waiting.close()  # type: ignore[attr-defined]
    assert {key: channel.get(key) for key in values} == {key: value for key, (value,) in values.items()}
    assert dict(channel.wait(list(values), 0.0)) == {key: value for key, (value,) in values.items()}


def test_a_waiter_outlasts_those_who_delete_around_it(reopen: Store) -> None:
    done = threading.Event()
    putter, deleter = reopen(), reopen()

    def put() -> None:
        while not done.is_set():
            putter.put("g/1/2/wanted", [b"x"])

    def delete() -> None:
        while not done.is_set():
            deleter.delete_tree("g/1")

    with beside(put), beside(delete):
        try:
            came = dict(reopen().wait(["g/1/2/wanted", "g/1/2/wanted"], LONG))
        finally:
            done.set()
    assert came == {"g/1/2/wanted": b"x"}


def test_trees_are_deleted_while_others_are_put_and_waited_for(reopen: Store) -> None:
    """What lies outside of a deleted tree always arrives."""
    steps = 6 if reopen.is_slow else 30
    writer, cleaner = reopen(), reopen()

    def put() -> None:
        for step in range(steps):
            writer.put_many({f"run/{step}/{worker}": [b"%d" % step] for worker in range(3)})

    def clean() -> None:
        for step in range(steps):
            cleaner.delete_tree(f"run/{step}-old")
            cleaner.delete_many([f"run/{step}-old/{worker}" for worker in range(3)])

    with beside(put), beside(clean):
        keys = [f"run/{step}/{worker}" for step in range(steps) for worker in range(3)]
        came = dict(reopen().wait(keys, LONG))
    assert came == {f"run/{step}/{worker}": b"%d" % step for step in range(steps) for worker in range(3)}


def test_uploads_and_waiting_overlap_in_one_channel(reopen: Store) -> None:
    channel = reopen()
    keys = [f"own/{number}" for number in range(8)]

    def put() -> None:
        for key in keys:
            channel.put(key, [b"y" * 80_000])

    with beside(put):
        assert {key: value.nbytes for key, value in channel.wait(keys, LONG)} == dict.fromkeys(keys, 80_000)
    assert channel.usage.bytes_in == channel.usage.bytes_out == 8 * 80_000
