"""Every pattern of means, run by many workers over a modelled channel: the exact weighted mean, alike everywhere."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import budget
from support.memory_channel import MemoryChannel
from support.virtual_channel import Program, Virtual

from geofed_pb.errors import GeofedError
from sync.codec import merge_codecs, merged_size_factor
from sync.collective import ChannelCosts, Merged, Settings
from sync.layout import Vector
from sync.means import weighted_mean
from sync.merging import MeanCollective, Member
from sync.merging._arithmetic import MeanOf
from sync.merging._exchange import Given

QUICK = ChannelCosts(0.1, 0.02, 1e8, 1e8, list_seconds=0.05)
PATTERNS = ["all-reduce", "scatter-reduce", "pipelined-scatter-reduce", "k-reduce"]


def vectors_of(workers: int, size: int, step: int, seed: int = 0) -> list[Vector]:
    rng = np.random.default_rng([seed, step])
    return [(rng.standard_normal(size) * 10.0 ** rng.integers(-3, 3)).astype(np.float32) for _ in range(workers)]


def collectives(workers: int, size: int, given: Settings, attempt: int = 1) -> list[MeanCollective]:
    return [MeanCollective(given, Member(w, workers, attempt), MemoryChannel(), "c", size) for w in range(workers)]


def steps(
    one: MeanCollective, vectors: list[Vector], weights: list[float], taken: list[Merged], first: int = 1
) -> Program:
    """A worker that makes some steps and settles."""
    for number, (vector, weight) in enumerate(zip(vectors, weights, strict=True)):
        taken += yield one.part(first + number, vector, weight)
    taken += yield one.settling(first + len(vectors) - 1)


def run(
    workers: int,
    size: int,
    given: Settings,
    weights: list[list[float]],
    delay: Callable[[int, str], float] = lambda worker, key: 0.0,
) -> tuple[list[list[Merged]], list[list[Vector]], Virtual]:
    """What each worker takes up, what was handed in by step, and the channel."""
    virtual = Virtual(QUICK, delay=delay)
    handed = [vectors_of(workers, size, step) for step in range(len(weights))]
    taken: list[list[Merged]] = [[] for _ in range(workers)]
    for worker, one in enumerate(collectives(workers, size, given)):
        mine = [vectors[worker] for vectors in handed]
        program = steps(one, mine, [each[worker] for each in weights], taken[worker])
        virtual.add(program, serial=given.faithful)
    virtual.run()
    assert all(worker.ended for worker in virtual.workers)
    return taken, handed, virtual


@st.composite
def _cases(draw: st.DrawFn) -> tuple[int, int, Settings, list[list[float]], int]:
    workers = draw(st.one_of(st.integers(2, 8), st.sampled_from([16, 33, 64])))
    size = draw(st.one_of(st.integers(0, 50), st.integers(51, 20_000)))
    pattern: Any = draw(st.sampled_from(PATTERNS))
    chunks = draw(st.integers(1, workers)) if pattern == "k-reduce" else None
    staleness = draw(st.integers(0, 3)) if pattern == "k-reduce" else 0
    faithful = draw(st.booleans()) if workers <= 16 else False
    given = Settings(pattern, chunks=chunks, staleness=staleness, faithful=faithful)
    # Drawn apart from the rest, which hypothesis is slow at for many workers.
    rng = random.Random(draw(st.integers(0, 1 << 30)))
    weights = [
        [rng.choice([0.0, float(rng.randrange(1, 500)), rng.uniform(1e-3, 1e5)]) for _ in range(workers)]
        for _ in range(draw(st.integers(1, 3)))
    ]
    for each in weights:
        if not any(each):
            each[rng.randrange(workers)] = 1.0
    return workers, size, given, weights, draw(st.integers(0, 1 << 30))


@pytest.mark.slow
@settings(max_examples=budget(70), deadline=None)
@given(_cases())
def test_all_take_up_the_exact_weighted_means_in_order(
    case: tuple[int, int, Settings, list[list[float]], int],
) -> None:
    workers, size, given, weights, seed = case
    rng = random.Random(seed)
    slow = [rng.random() ** 4 * 2 for _ in range(workers)]
    taken, handed, _ = run(workers, size, given, weights, lambda worker, key: slow[worker] * rng.random())
    for mine in taken:
        assert [one.step for one in mine] == list(range(1, len(weights) + 1))
        for one, vectors, each in zip(mine, handed, weights, strict=True):
            assert one.vector.tobytes() == weighted_mean(vectors, each).tobytes()
            assert one.weight == float(sum(each))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_what_the_channel_holds_does_not_grow(pattern: Any) -> None:
    held = []
    for count in (6, 12):
        given = Settings(pattern, chunks=3 if pattern == "k-reduce" else None)
        _, _, virtual = run(6, 6000, given, [[1.0] * 6] * count)
        assert all("/m/" in key for key in virtual.values)
        held.append(len(virtual.values))
    assert held[0] == held[1] <= 2 * 6


def test_asking_for_one_value_saves_most_looks() -> None:
    """Over a channel that tells nobody: as many looks in vain as fetches, or little more, not as values."""
    workers, looks = 8, []
    for asked in (None, QUICK):
        virtual = Virtual(QUICK, pauses=(0.02, 1.5, 1.0))
        for one in collectives(workers, 8000, Settings("k-reduce", asked=asked)):
            virtual.add(steps(one, [np.ones(8000, np.float32)], [1.0], []))
        virtual.run()
        assert all(worker.ended for worker in virtual.workers)
        looks.append(sum(worker.meter.polls for worker in virtual.workers))
    assert looks[1] * 5 < looks[0]


@pytest.mark.parametrize("staleness", [1, 2])
def test_merged_chunks_are_kept_for_those_that_lag(staleness: int) -> None:
    given = Settings("k-reduce", chunks=2, staleness=staleness)
    # Workers 2 and on lag, and are slow to read.
    taken, _, virtual = run(
        6, 600, given, [[1.0] * 6] * 10, lambda worker, key: 5.0 * (worker % 3) if "/m/" in key else 0.0
    )
    assert all(len(mine) == 10 for mine in taken)
    assert len(virtual.values) == 2 * (2 + staleness)


def test_workers_that_lag_take_up_older_means_until_they_settle() -> None:
    workers, size = 4, 100
    ones = collectives(workers, size, Settings("k-reduce", chunks=2, staleness=1))
    virtual, seen = Virtual(QUICK), {worker: [] for worker in range(workers)}

    def program(worker: int) -> Program:
        for step in (1, 2, 3, 4):
            merged = yield ones[worker].part(step, np.full(size, worker * step, np.float32), 1.0)
            seen[worker].append([one.step for one in merged])
            if step in (2, 4):
                merged = yield ones[worker].settling(step)
                seen[worker].append([one.step for one in merged])

    for worker in range(workers):
        virtual.add(program(worker))
    virtual.run()
    owning = [[1], [2], [], [3], [4], []]
    lagging = [[], [1], [2], [], [3], [4]]
    assert sorted(seen.values()) == sorted([owning, owning, lagging, lagging])


def test_requests_are_those_of_k_reduce() -> None:
    for workers, chunks, faithful in [(8, 1, False), (8, 3, True), (8, 8, False), (5, 2, False)]:
        given = Settings("k-reduce", chunks=chunks, faithful=faithful)
        _, _, virtual = run(workers, 8000, given, [[1.0] * workers])
        assert sum(worker.meter.puts for worker in virtual.workers) == chunks * workers
        assert sum(worker.meter.gets for worker in virtual.workers) == 2 * chunks * (workers - 1)
        assert sum(worker.meter.bytes_in for worker in virtual.workers) == pytest.approx(workers * 32_000, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["bf16", "int8", "fp8", "int4"])
@pytest.mark.parametrize("chunks", [1, 3, 4])
def test_codecs_hold_nothing_back_for_good(codec: str, chunks: int) -> None:
    """Sent plus held back is all there was, up to the rounding of the float64 mean."""
    workers, size, trained, count = 4, 5000, 4900, 30
    ones = collectives(workers, size, Settings("k-reduce", chunks=chunks, codec=codec, trained=trained))
    virtual, taken = Virtual(QUICK), [[] for _ in range(workers)]
    handed = [vectors_of(workers, size, step) for step in range(count)]
    for worker, one in enumerate(ones):
        virtual.add(steps(one, [vectors[worker] for vectors in handed], [2.0] * count, taken[worker]))
    virtual.run()
    assert len({b"".join(one.vector.tobytes() for one in mine) for mine in taken}) == 1
    total = sum(np.mean(np.asarray(vectors, np.float64), axis=0) for vectors in handed)
    got = sum(one.vector.astype(np.float64) for one in taken[0])
    held = np.zeros(size)
    for one in ones:
        for name, residual in one.state().tensors.items():
            kind, _, chunk = name.partition(".")
            held[one.plan.bounds[int(chunk)]] += np.asarray(residual) / (workers if kind == "given" else 1)
    np.testing.assert_allclose(got + held, total, rtol=0, atol=1e-4 * np.abs(total).max())
    for one in ones:
        one.close()


@pytest.mark.slow
@pytest.mark.parametrize(("codec", "least"), [("int8", 3.5), ("fp8", 8.0), ("int4", 13.0)])
def test_of_sparse_gradients_only_what_there_is_travels(codec: str, least: float) -> None:
    """Rows of an embedding: each of 16 workers has one in ten, all of them together four in five."""
    workers, size, moved = 16, 80_000, []
    for form in ("fp32", codec):
        virtual = Virtual(QUICK)
        for worker, one in enumerate(collectives(workers, size, Settings("k-reduce", codec=form))):
            there = np.repeat(np.random.default_rng(worker).random(size // 8) < 0.1, 8)
            virtual.add(steps(one, [there * vectors_of(workers, size, step)[worker] for step in (1, 2)], [1.0] * 2, []))
        virtual.run()
        assert all(worker.ended for worker in virtual.workers)
        moved.append(sum(worker.meter.bytes_in + worker.meter.bytes_out for worker in virtual.workers))
    assert moved[0] > least * moved[1]


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("late", [0, 3])
def test_chunks_leave_as_soon_as_they_are_there(pattern: Any, late: int) -> None:
    workers, size = 4, 4096
    given = Settings(pattern, chunks=2 if pattern == "k-reduce" else None)
    ones, virtual = collectives(workers, size, given), Virtual(QUICK)
    handed, results = vectors_of(workers, size, 0), {}

    def program(worker: int) -> Program:
        results[worker] = yield ones[worker].part(1, handed[worker], 1.0 + worker, whole=False)

    for worker, one in enumerate(ones):
        member = virtual.add(program(worker))
        for chunk in range(len(one.plan.bounds)):
            when = 0.5 * (len(one.plan.bounds) - chunk) + (10.0 if worker == late else 0.0)
            virtual.at(when, lambda member=member, chunk=chunk: virtual.tell(member, Given(chunk)))
    virtual.run()
    expected = weighted_mean(handed, [1.0 + worker for worker in range(workers)])
    assert all(merged[0].vector.tobytes() == expected.tobytes() for merged in results.values())


def test_where_nobody_has_a_weight_all_are_told() -> None:
    _, _, virtual = run(3, 10, Settings("k-reduce", chunks=2), [[1.0] * 3])
    assert virtual.values
    with pytest.raises(GeofedError, match="no worker has a weight"):
        _one_each([0.0, 0.0])


def _one_each(weights: list[float]) -> None:
    ones, virtual, taken = collectives(2, 10, Settings()), Virtual(QUICK), [[], []]
    for worker, one in enumerate(ones):
        virtual.add(steps(one, [np.ones(10, np.float32)], [weights[worker]], taken[worker]))
    virtual.run()
    from sync.merging._mean_collective import with_weight

    for mine in taken:
        with_weight(tuple(mine))


def test_another_attempt_is_not_disturbed() -> None:
    """Two attempts at once in one channel: each merges its own."""
    virtual, taken = Virtual(QUICK), {1: [[] for _ in range(3)], 2: [[] for _ in range(3)]}
    handed = {attempt: vectors_of(3, 1000, 0, seed=attempt) for attempt in (1, 2)}
    for attempt in (1, 2):
        for worker, one in enumerate(collectives(3, 1000, Settings("k-reduce", chunks=2), attempt)):
            virtual.add(steps(one, [handed[attempt][worker]], [1.0], taken[attempt][worker]))
    virtual.run()
    for attempt in (1, 2):
        expected = weighted_mean(handed[attempt], [1.0] * 3)
        assert all(mine[0].vector.tobytes() == expected.tobytes() for mine in taken[attempt])


@settings(max_examples=budget(40), deadline=None)
@given(st.integers(0, 3), st.integers(1, 30), st.integers(1, 4))
def test_a_worker_that_dies_at_any_request_leaves_no_wrong_result(worker: int, request: int, chunks: int) -> None:
    """The others have every step's exact mean, or none of it; never another."""
    workers, size, count = 4, 400, 3
    virtual = Virtual(QUICK, dies=lambda who, number: who == worker and number == request)
    handed = [vectors_of(workers, size, step) for step in range(count)]
    taken: list[list[Merged]] = [[] for _ in range(workers)]
    for who, one in enumerate(collectives(workers, size, Settings("k-reduce", chunks=chunks))):
        virtual.add(steps(one, [vectors[who] for vectors in handed], [1.0] * count, taken[who]))
    virtual.run()
    for mine in taken:
        for number, one in enumerate(mine):
            assert one.vector.tobytes() == weighted_mean(handed[number], [1.0] * workers).tobytes()


@pytest.mark.parametrize("codec", ["fp8", "int4"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_told_before_it_is_coded(codec: str, value: float) -> None:
    values = np.ones(100, np.float32)
    values[7] = value
    with pytest.raises(GeofedError, match="TASK_FAILED"):
        MeanOf(codec, [slice(0, 100)], None).part(0, values)


@pytest.mark.parametrize("codec", merge_codecs())
def test_a_dense_vector_takes_the_bytes_that_planners_expect(codec: str) -> None:
    (vector,) = vectors_of(1, 1 << 16, 1)
    tensors = MeanOf(codec, [slice(0, vector.size)], None).part(0, vector)
    taken = sum(np.asarray(array).nbytes for array in tensors.values())
    assert taken / vector.nbytes == pytest.approx(merged_size_factor(codec), rel=1e-3)
