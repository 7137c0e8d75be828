"""K-REDUCE in groups: the same for all, the weighted mean but for one rounding more, with the same requests."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from support.budget import budget
from support.memory_channel import MemoryChannel
from support.virtual_channel import Program, Virtual

from geofed_pb.errors import GeofedError
from sync.collective import ChannelCosts, Merge, Merged, Settings, best_groups, choose, estimate
from sync.layout import Vector
from sync.means import weighted_mean
from sync.merging import MeanCollective, Member, open_collective
from sync.merging._exchange import Given
from sync.merging._mean_collective import plan_of

S3 = ChannelCosts(0.1, 0.02, 1e8, 1e8, put_usd=5e-6, get_usd=4e-7, parallel=16)


def vector_of(worker: int, step: int, size: int) -> Vector:
    return np.random.default_rng([worker, step]).standard_normal(size).astype(np.float32)


def played(
    workers: int, size: int, settings: Settings, weights: list[float], steps: int = 2
) -> tuple[Virtual, list[list[Merged]]]:
    virtual = Virtual(settings.asked or S3, pauses=None if settings.asked is None else (0.02, 1.5, 1.0))
    taken: list[list[Merged]] = [[] for _ in range(workers)]

    def program(number: int, one: MeanCollective) -> Program:
        for step in range(1, steps + 1):
            for chunk in range(len(one.plan.bounds) if settings.in_parts else 0):
                me, when = virtual.workers[number], virtual.now + 0.1 * (len(one.plan.bounds) - chunk)
                virtual.at(when, lambda chunk=chunk, me=me: virtual.tell(me, Given(chunk)))
            taken[number] += yield one.part(
                step, vector_of(number, step, size), weights[number], whole=not settings.in_parts
            )

    uploads = plan_of(Member(0, workers, 1), size, settings, "c").uploads_at_once
    for number in range(workers):
        virtual.add(
            program(number, MeanCollective(settings, Member(number, workers, 1), MemoryChannel(), "c", size)),
            uploads=uploads,
        )
    virtual.run()
    assert all(worker.ended for worker in virtual.workers)
    return virtual, taken


@examples(max_examples=budget(60), deadline=None)
@given(
    workers=st.integers(2, 11),
    chunks=st.integers(1, 4),
    groups=st.integers(2, 6),
    asked=st.booleans(),
    in_parts=st.booleans(),
    data=st.data(),
)
def test_all_hold_the_weighted_mean(
    workers: int, chunks: int, groups: int, asked: bool, in_parts: bool, data: st.DataObject
) -> None:
    chunks, size = min(chunks, workers), 1100
    weights = data.draw(st.lists(st.sampled_from([0.0, 1.0, 3.0]), min_size=workers - 1, max_size=workers - 1))
    weights = [2.0, *weights]
    settings = Settings("k-reduce", chunks=chunks, groups=groups, in_parts=in_parts, asked=S3 if asked else None)
    virtual, taken = played(workers, size, settings, weights)
    for step in (1, 2):
        vectors = [vector_of(worker, step, size) for worker in range(workers)]
        held = [one[step - 1] for one in taken]
        assert len({one.vector.tobytes() for one in held}) == 1
        assert held[0].weight == sum(weights)
        most = max(float(np.abs(vector).max()) for vector in vectors)
        np.testing.assert_allclose(held[0].vector, weighted_mean(vectors, weights), rtol=0, atol=2e-7 * most)
    total = [worker.meter for worker in virtual.workers]
    assert sum(meter.puts for meter in total) == 2 * chunks * workers
    assert sum(meter.gets for meter in total) == 2 * 2 * chunks * (workers - 1)
    assert {key.split("/")[3] for key in virtual.values} == {"m"}


@pytest.mark.slow
def test_owners_read_less_and_all_are_done_sooner() -> None:
    slow = replace(S3, up_bytes_per_second=2e7, down_bytes_per_second=2e7)
    flat, grouped = (
        played(16, 2_000_000, Settings("k-reduce", chunks=4, groups=groups, asked=slow), [1.0] * 16, 1)[0]
        for groups in (1, 4)
    )
    most = [max(worker.meter.bytes_out for worker in one.workers) for one in (flat, grouped)]
    # Of eight megabytes: (15 + 3) quarters, or (3 + 3 + 3).
    assert most[1] == pytest.approx(most[0] / 2, rel=0.01)
    assert grouped.now < 0.8 * flat.now


@pytest.mark.parametrize("codec", ["bf16", "int8", "fp8", "int4"])
def test_what_the_codec_holds_back_comes_later_and_outlives_an_invocation(codec: str) -> None:
    settings, workers, size, steps = Settings("k-reduce", chunks=2, groups=2, codec=codec), 4, 600, 40
    memory, vectors = MemoryChannel(), [vector_of(worker, 0, 600) for worker in range(4)]

    def work(worker: int) -> Vector:
        one = MeanCollective(settings, Member(worker, workers, 1), memory.another(), "c", size)
        total = np.zeros(size)
        for step in range(1, steps + 1):
            (merged,) = one.merge(step, vectors[worker], 1.0 + worker)
            total += merged.vector
            if step == steps // 2:
                state = one.state()
                assert any(name.startswith("joined.") for name in state.tensors) == (one.plan.own is None)
                one.close()
                one = MeanCollective(settings, Member(worker, workers, 1), memory.another(), "c", size)
                one.restore(state)
        one.close()
        return (total / steps).astype(np.float32)

    with ThreadPoolExecutor(workers) as pool:
        means = list(pool.map(work, range(workers)))
    exact = weighted_mean(vectors, [1.0, 2.0, 3.0, 4.0])
    once = np.abs(exact).max() / {"bf16": 256, "int8": 127, "fp8": 16, "int4": 7}[codec]
    # Every rounding is made up for in the next step: of forty steps one is still owed, on each of three ways.
    assert np.abs(means[0] - exact).max() < 4 * once / steps


def test_they_go_on_without_one_that_is_lost() -> None:
    settings, memory, size = Settings("k-reduce", chunks=2, groups=2), MemoryChannel(), 600
    ones = [MeanCollective(settings, Member(worker, 5, 1), memory.another(), "c", size) for worker in range(5)]
    lost = next(worker for worker, one in enumerate(ones) if one.plan.merges is not None and one.plan.own is None)
    left = [worker for worker in range(5) if worker != lost]

    def work(worker: int) -> Vector:
        ones[worker].without((lost,))
        (merged,) = ones[worker].merge(1, vector_of(worker, 1, size), 1.0)
        return merged.vector

    with ThreadPoolExecutor(4) as pool:
        held = list(pool.map(work, left))
    exact = weighted_mean([vector_of(worker, 1, size) for worker in left], [1.0] * 4)
    assert len({one.tobytes() for one in held}) == 1
    np.testing.assert_allclose(held[0], exact, rtol=0, atol=1e-6)
    for one in ones:
        one.close()


@pytest.mark.parametrize(("workers", "chunks", "groups"), [(8, 4, 2), (16, 4, 4), (16, 3, 4), (12, 5, 2)])
def test_the_closed_form_foretells_it(workers: int, chunks: int, groups: int) -> None:
    size = 12_000_000 // 16
    slow = replace(S3, up_bytes_per_second=1e8 / 16, down_bytes_per_second=1e8 / 16)
    settings = Settings("k-reduce", chunks=chunks, groups=groups, asked=slow)
    virtual, _ = _over(slow, workers, size, settings)
    told = estimate(Merge("k-reduce", workers, 4.0 * size, chunks, groups=groups), slow)
    took = max(worker.spans[-1][1] for worker in virtual.workers)
    assert told.seconds == pytest.approx(took, rel=0.08)
    assert told.down_bytes == pytest.approx(max(worker.meter.bytes_out for worker in virtual.workers), rel=0.35)


def _over(costs: ChannelCosts, workers: int, size: int, settings: Settings) -> tuple[Virtual, list[Merged]]:
    virtual, taken = Virtual(costs, pauses=(0.02, 1.5, 1.0)), list[Merged]()

    def program(number: int) -> Program:
        one = MeanCollective(settings, Member(number, workers, 1), MemoryChannel(), "c", size)
        taken.extend((yield one.part(1, np.zeros(size, np.float32), 1.0)))

    uploads = plan_of(Member(0, workers, 1), size, settings, "c").uploads_at_once
    for number in range(workers):
        virtual.add(program(number), uploads=uploads)
    virtual.run()
    return virtual, taken


def test_groups_are_taken_where_they_save_time_and_not_in_shared_memory() -> None:
    merge = Merge("k-reduce", 16, 47e6, 4)
    assert best_groups(merge, S3) > 1
    assert best_groups(merge, replace(S3, cores=2.0)) == 1
    assert best_groups(Merge("k-reduce", 4, 0.25e6, 1), S3) == 1
    best = choose(32, 47e6, S3, usd_per_worker_second=3.3e-5, minimise="cost")
    flat = min(estimate(Merge("k-reduce", 32, 47e6, chunks), S3).usd(32, 3.3e-5) for chunks in range(1, 33))
    assert best.merge.in_groups > 1
    assert best.usd < 0.85 * flat


@pytest.mark.parametrize("settings", [Settings("all-reduce", groups=2), Settings("k-reduce", staleness=1, groups=2)])
def test_what_cannot_be_in_groups_is_refused(settings: Settings) -> None:
    with pytest.raises(GeofedError) as raised:
        open_collective(settings, Member(0, 4, 1), MemoryChannel(), "c", 10)
    assert raised.value.code == "CONFIG_INVALID"
