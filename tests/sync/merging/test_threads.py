"""Collectives as workers call them: threads over a channel, faults, invocations one after the other."""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.memory_channel import MemoryChannel

from geofed_pb.errors import GeofedError
from sync import framing
from sync.channel import Channel
from sync.channel_clients import FileChannel
from sync.collective import ChannelCosts, Collective, Settings, State
from sync.layout import Vector
from sync.means import weighted_mean
from sync.merging import MeanCollective, Member, _driver, open_collective

SIZE, WORKERS = 3000, 3
ALL = [
    Settings("all-reduce"),
    Settings("scatter-reduce"),
    Settings("pipelined-scatter-reduce"),
    Settings("k-reduce", chunks=2),
    Settings("k-reduce", chunks=2, faithful=True, poll_seconds=0.001),
    Settings("k-reduce", chunks=1, staleness=1),
    Settings("k-reduce", chunks=2, codec="bf16"),
    Settings("k-reduce", codec="int8", trained=2900),
]


def names(settings: Settings) -> str:
    return "-".join(str(x) for x in (settings.pattern, settings.chunks, settings.codec, settings.staleness))


@pytest.fixture(params=["memory", "file", "shared"])
def reopen(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], Channel]]:
    """``memory`` and ``file``: threads put and get. ``shared``: files in shared memory, which the caller's own does."""
    memory = MemoryChannel()
    if request.param == "memory":
        yield memory.another
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm" if request.param == "shared" else tmp_path) as folder:
        assert FileChannel(folder).in_memory == (request.param == "shared")
        yield lambda: FileChannel(Path(folder) / "channel")


def vector_of(worker: int, step: int) -> Vector:
    return np.random.default_rng([worker, step]).standard_normal(SIZE).astype(np.float32)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[Any]]]:
    """Opens a collective for each worker; closes them."""
    ones: list[Collective] = []
    # Who is closed while it waits ends when it looks again.
    monkeypatch.setattr(_driver, "_CHECK_SECONDS", 0.2)

    def all_of(
        settings: Settings, reopen: Callable[[], Channel], workers: int = WORKERS, attempt: int = 1
    ) -> list[Any]:
        new = [open_collective(settings, Member(w, workers, attempt), reopen(), "c", SIZE) for w in range(workers)]
        ones.extend(new)
        return new

    yield all_of
    for one in ones:
        one.close()


def together(ones: list[Any], work: Callable[[int, Any], object]) -> list[Any]:
    """Each worker in a thread of its own."""
    with ThreadPoolExecutor(len(ones)) as pool:
        return [future.result(30) for future in [pool.submit(work, n, one) for n, one in enumerate(ones)]]


@pytest.mark.parametrize("settings", ALL, ids=names)
def test_workers_merge(settings: Settings, reopen: Callable[[], Channel], opened: Callable[..., list[Any]]) -> None:
    def work(worker: int, one: Collective) -> list[Vector]:
        taken = []
        vector = np.empty(SIZE, np.float32)
        for step in range(1, 6):
            # The vector is the caller's again when the merge has returned.
            vector[:] = vector_of(worker, step)
            taken += one.merge(step, vector, 1.0 + worker)
        taken += one.settle(5, vector).merged
        assert [merged.step for merged in taken] == [1, 2, 3, 4, 5]
        return [merged.vector for merged in taken]

    results = together(opened(settings, reopen), work)
    for number, step in enumerate(range(1, 6)):
        assert len({mine[number].tobytes() for mine in results}) == 1
        exact = weighted_mean([vector_of(w, step) for w in range(WORKERS)], [1.0 + w for w in range(WORKERS)])
        if settings.codec == "fp32":
            assert results[0][number].tobytes() == exact.tobytes()
        else:
            assert np.abs(results[0][number] - exact).max() < 0.15


@pytest.mark.parametrize("chunks", [None, 2])
def test_workers_share_changes(
    chunks: int | None, reopen: Callable[[], Channel], opened: Callable[..., list[Any]]
) -> None:
    def work(worker: int, one: Collective) -> bytes:
        model = np.ones(SIZE, np.float32)
        for step in range(1, 5):
            change = 0.1 * vector_of(worker, step)
            model += change
            for merged in one.merge(step, change, 10.0, model):
                model += merged.vector
        settled = one.settle(4, model)
        assert settled.model is not None
        return settled.model.tobytes()

    models = together(opened(Settings("isp", chunks=chunks, significance=0.2), reopen), work)
    assert len(set(models)) == 1
    exact = 1.0 + 0.1 * sum(vector_of(w, step).astype(np.float64) for w in range(WORKERS) for step in range(1, 5))
    np.testing.assert_allclose(np.frombuffer(models[0], np.float32), exact, atol=1e-4)


@pytest.mark.parametrize(
    "settings", [ALL[1], ALL[2], ALL[3], ALL[5], Settings("isp", significance=0.7, chunks=2)], ids=names
)
def test_a_channel_that_tells_nobody_is_asked_for_one_value(
    settings: Settings, opened: Callable[..., list[Any]]
) -> None:
    """The others are looked for once that one is there."""
    costs = ChannelCosts(0.02, 0.001, 1e9, 1e9)
    channel = MemoryChannel()
    ones = opened(replace(settings, asked=costs), channel.another)

    def work(worker: int, one: Collective) -> bytes:
        model = np.zeros(SIZE, np.float32)
        for step in (1, 2, 3):
            vector = vector_of(worker, step)
            if one.shares == "changes":
                model += vector
            for merged in one.merge(step, vector, 1.0, model):
                model += merged.vector
        settled = one.settle(3, model)
        for merged in settled.merged:
            model += merged.vector
        return (model if settled.model is None else settled.model).tobytes()

    assert len(set(together(ones, work))) == 1


@pytest.mark.parametrize("settings", ALL[:6], ids=names)
def test_a_vector_is_handed_in_part_by_part(settings: Settings, opened: Callable[..., list[Any]]) -> None:
    def work(worker: int, one: MeanCollective) -> list[Vector]:
        taken = []
        for step in (1, 2):
            vector = vector_of(worker, step)
            buckets = one.begin(step, 2.0)
            # As the backward pass does: the last layers first, in pieces that know nothing of chunks.
            for stop in range(SIZE, 0, -700):
                start = max(0, stop - 700)
                buckets.give(start, vector[start:stop])
            taken += buckets.result()
        return [merged.vector for merged in [*taken, *one.settle(2, vector).merged]]

    for results in together(opened(settings, MemoryChannel().another), work):
        for step, merged in zip((1, 2), results, strict=True):
            assert merged.tobytes() == weighted_mean([vector_of(w, step) for w in range(3)], [2.0] * 3).tobytes()


@pytest.mark.slow
def test_the_first_bucket_leaves_before_the_last_is_there(opened: Callable[..., list[Any]]) -> None:
    channel = MemoryChannel()
    one = opened(Settings("k-reduce", chunks=2), channel.another)[0]
    buckets = one.begin(1, 1.0)
    buckets.give(1536, np.ones(SIZE - 1536, np.float32))
    deadline = time.monotonic() + 5
    while not channel.values and one.plan.own != 1:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    with pytest.raises(GeofedError, match="1536 elements are missing"):
        buckets.result()
    with pytest.raises(GeofedError, match="were passed twice"):
        buckets.give(2000, np.ones(10, np.float32))
    with pytest.raises(GeofedError, match="elements 2990 to 3090"):
        buckets.give(2990, np.ones(100, np.float32))


def test_who_waits_in_vain_is_told(opened: Callable[..., list[Any]]) -> None:
    one = opened(Settings("k-reduce", chunks=2, timeout_seconds=0.2), MemoryChannel().another)[0]
    with pytest.raises(GeofedError, match=r"timed out after 0.2 s waiting for values from workers? .*[012]") as raised:
        one.merge(1, np.ones(SIZE, np.float32), 1.0)
    assert raised.value.code == "CHANNEL_TIMEOUT"
    assert f"worker {one._member.worker}" not in raised.value.message
    slow = opened(Settings("k-reduce", faithful=True, poll_seconds=0.01, timeout_seconds=0.1), MemoryChannel().another)
    with pytest.raises(GeofedError) as raised:
        slow[0].merge(1, np.ones(SIZE, np.float32), 1.0)
    assert raised.value.code == "CHANNEL_TIMEOUT"


@pytest.mark.slow
@pytest.mark.parametrize("what", ["put", "get"])
def test_what_the_channel_raises_reaches_the_caller(what: str, opened: Callable[..., list[Any]]) -> None:
    def broken(kind: str, key: str) -> None:
        if kind == what:
            raise GeofedError("CHANNEL_UNAVAILABLE", "gone")

    ones = opened(Settings("k-reduce", chunks=1, timeout_seconds=2), MemoryChannel(before=broken).another)

    def work(worker: int, one: Collective) -> str:
        with pytest.raises(GeofedError) as raised:
            one.merge(1, np.ones(SIZE, np.float32), 1.0)
        return raised.value.code

    assert "CHANNEL_UNAVAILABLE" in together(ones, work)


def test_a_failed_delete_does_no_harm(opened: Callable[..., list[Any]]) -> None:
    def broken(kind: str, key: str) -> None:
        if kind == "delete":
            raise GeofedError("CHANNEL_UNAVAILABLE", "gone")

    ones = opened(Settings("k-reduce", chunks=2), MemoryChannel(before=broken).another)
    for step in (1, 2, 3):
        together(ones, lambda w, one, step=step: one.merge(step, vector_of(w, step), 1.0))


def test_a_damaged_part_is_told(opened: Callable[..., list[Any]]) -> None:
    channel = MemoryChannel()
    one = opened(Settings("all-reduce", timeout_seconds=5), channel.another)
    owner = next(each for each in one if each.plan.own == 0)
    for worker in range(WORKERS):
        channel.put(f"c/1/g1/p/0.{worker}", framing.encode({"delta": np.ones(SIZE - 1, np.float32)}, {"weight": 1.0}))
    with pytest.raises(GeofedError) as raised:
        owner.merge(1, np.ones(SIZE, np.float32), 1.0)
    assert raised.value.code == "FRAME_INVALID"


@pytest.mark.slow
def test_closing_ends_what_still_waits(opened: Callable[..., list[Any]]) -> None:
    one = opened(Settings("k-reduce", chunks=2), MemoryChannel().another)[0]
    buckets = one.begin(1, 1.0)
    buckets.give(0, np.ones(SIZE, np.float32))
    began = time.monotonic()
    one.close()
    assert time.monotonic() - began < 5
    with pytest.raises(GeofedError, match="closed during a merge"):
        buckets.result()


@pytest.mark.parametrize(
    "settings",
    [ALL[3], ALL[5], ALL[6], ALL[7], Settings("isp", significance=0.7), Settings("isp", chunks=2)],
    ids=names,
)
def test_another_invocation_goes_on_where_the_last_one_stopped(
    settings: Settings, opened: Callable[..., list[Any]]
) -> None:
    """A chain of invocations, each with what the last one left, ends where one long invocation does."""

    def chain(lives: list[list[int]]) -> list[bytes]:
        channel, states, models = MemoryChannel(), [State()] * WORKERS, [np.ones(SIZE, np.float32)] * WORKERS
        for steps in lives:

            def work(worker: int, one: Any, steps: list[int] = steps) -> None:
                if steps[0] > 1:
                    one.restore(states[worker])
                model = models[worker].copy()
                for step in steps:
                    change = vector_of(worker, step)
                    if one.shares == "changes":
                        model += change
                    for merged in one.merge(step, change, 1.0, model):
                        model += merged.vector
                if steps[-1] == 6:
                    settled = one.settle(6, model)
                    for merged in settled.merged:
                        model += merged.vector
                    model = model if settled.model is None else settled.model
                else:
                    frame = framing.decode(b"".join(framing.encode(one.state().tensors, one.state().facts)))
                    states[worker] = State(frame.tensors, frame.facts)
                models[worker] = model

            ones = opened(settings, channel.another)
            together(ones, work)
            for one in ones:
                one.close()
        assert len(channel.values) <= 4 * WORKERS
        return [model.tobytes() for model in models]

    long = chain([[1, 2, 3, 4, 5, 6]])
    assert len(set(long)) == 1
    assert chain([[1, 2], [3], [4, 5, 6]]) == long


@pytest.mark.slow
@pytest.mark.parametrize(("chunks", "codec"), [(1, "fp32"), (2, "int8"), (3, "fp32")])
def test_the_others_go_on_without_one_that_is_lost(codec: str, chunks: int, opened: Callable[..., list[Any]]) -> None:
    """Whoever it is, an owner too; its step does not count, and nothing counts twice."""
    # Waited for in full, twice; a machine that stands still for longer than this would look like a lost worker.
    settings = Settings("k-reduce", chunks=chunks, codec=codec, timeout_seconds=1.5)
    groups = [opened(settings, MemoryChannel().another) for _ in range(WORKERS)]
    # Each is lost in a group of its own: they wait beside each other.
    together(groups, lambda lost, ones: _others_go_on(ones, lost, codec))


def _others_go_on(ones: list[Any], lost: int, codec: str) -> None:
    first = together(ones, lambda w, one: one.merge(1, vector_of(w, 1), 1.0)[0].vector)
    left = [(w, one) for w, one in enumerate(ones) if w != lost]

    def broken(number: int, one: Any) -> Vector:
        worker = left[number][0]
        with pytest.raises(GeofedError) as raised:
            one.merge(2, vector_of(worker, 2), 1.0)
        assert raised.value.code == "CHANNEL_TIMEOUT"
        one.without([lost])
        return one.merge(2, vector_of(worker, 2), 1.0)[0].vector

    merged = together([one for _, one in left], broken)
    assert merged[0].tobytes() == merged[1].tobytes()
    exact = weighted_mean([vector_of(w, 2) for w, _ in left], [1.0, 1.0])
    if codec == "fp32":
        assert merged[0].tobytes() == exact.tobytes()
    else:
        before = weighted_mean([vector_of(w, 1) for w in range(WORKERS)], [1.0] * WORKERS)
        assert np.abs(merged[0] - exact).max() + np.abs(first[0] - before).max() < 0.15
    # It comes back, and may even merge what was put for it; the others do not notice.
    with contextlib.suppress(GeofedError):
        ones[lost].merge(2, vector_of(lost, 2), 1.0)
    merged = together([one for _, one in left], lambda n, one: one.merge(3, vector_of(left[n][0], 3), 1.0))
    if codec == "fp32":
        exact = weighted_mean([vector_of(w, 3) for w, _ in left], [1.0, 1.0])
        assert all(mine[0].vector.tobytes() == exact.tobytes() for mine in merged)


def test_with_staleness_nobody_can_be_left_out(opened: Callable[..., list[Any]]) -> None:
    one = opened(Settings("k-reduce", chunks=1, staleness=1), MemoryChannel().another)[0]
    with pytest.raises(GeofedError) as raised:
        one.without([1])
    assert raised.value.code == "CONFIG_INVALID"


def test_a_worker_alone_needs_no_channel(opened: Callable[..., list[Any]]) -> None:
    def nothing(kind: str, key: str) -> None:
        raise AssertionError(f"{kind} {key}")

    one = opened(Settings(), MemoryChannel(before=nothing).another, workers=1)[0]
    vector = vector_of(0, 1)
    merged = one.merge(1, vector, 5.0)
    assert merged[0].vector.tobytes() == vector.tobytes()
    assert merged[0].weight == 5.0
    buckets = one.begin(2, 5.0)
    buckets.give(0, vector)
    assert buckets.result()[0].vector.tobytes() == vector.tobytes()
    assert one.settle(2, vector).merged == ()


@pytest.mark.parametrize(
    "settings",
    [
        Settings("ring"),  # type: ignore[arg-type]
        Settings(codec="topk"),
        Settings("isp", significance=0.7, codec="int8"),
        Settings(chunks=4),
        Settings(chunks=0),
        Settings("all-reduce", chunks=2),
        Settings(staleness=-1),
        Settings("scatter-reduce", staleness=1),
        Settings("isp", significance=float("nan")),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: Settings) -> None:
    with pytest.raises(GeofedError) as raised:
        open_collective(settings, Member(0, 3, 1), MemoryChannel(), "c", 10)
    assert raised.value.code == "CONFIG_INVALID"


@pytest.mark.parametrize(("vector", "weight"), [(np.ones(3, np.float32), 1.0), (np.ones(SIZE), 1.0)])
def test_vectors_that_do_not_fit_are_refused(vector: Any, weight: float, opened: Callable[..., list[Any]]) -> None:
    one = opened(Settings(), MemoryChannel().another)[0]
    with pytest.raises(GeofedError) as raised:
        one.merge(1, vector, weight)
    assert raised.value.code == "FRAME_INVALID"


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_weights_that_are_none_are_refused(weight: float, opened: Callable[..., list[Any]]) -> None:
    one = opened(Settings(), MemoryChannel().another)[0]
    with pytest.raises(GeofedError, match="a weight of"):
        one.merge(1, np.ones(SIZE, np.float32), weight)


def test_no_thread_is_left(opened: Callable[..., list[Any]]) -> None:
    before = threading.active_count()
    ones = opened(Settings("k-reduce", chunks=2), MemoryChannel().another)
    together(ones, lambda w, one: one.merge(1, vector_of(w, 1), 1.0))
    for one in ones:
        one.close()
    assert threading.active_count() == before


def test_uploads_that_only_wait_their_turn_keep_the_order() -> None:
    """As many puts are on their way as keep the link busy: an owner is sent its part first, whatever the latencies."""
    # 600 parts fit into the latency of a put, or four fifths of one.
    small, large = (ChannelCosts(0.1, 0.02, rate, rate, parallel=16) for rate in (3e6, 4e3))
    begun: list[str] = []
    most, now, lock = 0, 0, threading.Lock()

    def put(what: str, key: str) -> None:
        nonlocal most, now
        if what != "put" or "/p/" not in key:
            return
        with lock:
            begun.append(key)
            now += 1
            most = max(most, now)
        time.sleep(0.02)
        with lock:
            now -= 1

    for asked, at_once in ((small, 16), (large, 2)):
        settings = Settings("pipelined-scatter-reduce", asked=asked, timeout_seconds=0.3)
        one = MeanCollective(settings, Member(0, 24, 1), MemoryChannel(before=put), "c", SIZE)
        assert one.plan.uploads_at_once == at_once
        begun.clear()
        most = 0
        with pytest.raises(GeofedError):
            one.merge(1, vector_of(0, 1), 1.0)
        one.close()
        expected = [one.plan.part_key("g1", chunk, 0) for chunk in one.plan.order if chunk != one.plan.own]
        assert len(begun) == 23
        assert most <= at_once
        if at_once == 2:
            assert all(abs(begun.index(key) - place) <= 1 for place, key in enumerate(expected))
