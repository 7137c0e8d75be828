"""The closed forms, held against the roles themselves over a modelled channel, and against search."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.memory_channel import MemoryChannel
from support.virtual_channel import Program, Virtual

from sync.channel import FileChannel
from sync.collective import (
    PATTERNS,
    ChannelCosts,
    Member,
    Merge,
    Reducing,
    Settings,
    best_chunks,
    choose,
    estimate,
    least_seconds,
    probe,
    unequal_batches,
)
from sync.layout import Vector

S3 = ChannelCosts(0.1, 0.02, 1e8, 1e8, 0.0, 0.02, 8, 5e-6, 4e-7, 5e-6)
REDIS = ChannelCosts(0.001, 0.001, 1.25e8, 1.25e8, 0.0, 0.001, 8)


def played(merge: Merge, costs: ChannelCosts) -> Virtual:
    """One merge, by the roles."""
    import numpy as np

    size = int(merge.size_bytes // 4)
    vector: Vector = np.zeros(size, np.float32)
    given_settings = Settings(merge.pattern, chunks=merge.chunks, faithful=merge.faithful)  # type: ignore[arg-type]
    virtual = Virtual(costs)

    def program(one: Reducing) -> Program:
        yield one.part(1, vector, 1.0)

    for worker in range(merge.workers):
        one = Reducing(given_settings, Member(worker, merge.workers, 1), MemoryChannel(), "c", size)
        virtual.add(program(one), serial=merge.faithful)
    virtual.run()
    return virtual


@pytest.mark.parametrize("costs", [S3, REDIS], ids=["s3", "redis"])
@pytest.mark.parametrize("faithful", [True, False])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_forms_say_what_the_roles_do(pattern: str, faithful: bool, costs: ChannelCosts) -> None:
    for workers, size in [(2, 250_000), (4, 4_000_000), (8, 250_000), (8, 4_000_000)]:
        for chunks in (1, max(1, workers // 3), workers) if pattern == "k-reduce" else (None,):
            merge = Merge(pattern, workers, size, chunks, faithful)
            virtual, told = played(merge, costs), estimate(merge, costs)
            ends = max(worker.spans[0][1] for worker in virtual.workers)
            assert told.puts == sum(worker.meter.puts for worker in virtual.workers)
            assert told.gets == sum(worker.meter.gets for worker in virtual.workers)
            assert told.up_bytes <= max(worker.meter.bytes_in for worker in virtual.workers) * 1.001
            assert told.down_bytes == pytest.approx(max(w.meter.bytes_out for w in virtual.workers), rel=0.02)
            assert told.seconds == pytest.approx(ends, rel=0.25), (merge, told.seconds, ends)
            assert ends >= least_seconds(workers, size, costs)


def draw_costs(rng: random.Random) -> ChannelCosts:
    return ChannelCosts(
        10 ** rng.uniform(-3, -0.7), 10 ** rng.uniform(-3, -1), 10 ** rng.uniform(6.5, 9), 10 ** rng.uniform(6.5, 9),
        put_usd=10 ** rng.uniform(-7, -5), get_usd=10 ** rng.uniform(-8, -6),
    )  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(st.integers(2, 64), st.floats(4, 9), st.integers(0, 1 << 30), st.booleans())
def test_the_closed_form_finds_the_best_chunks(workers: int, log_size: float, seed: int, by_cost: bool) -> None:
    costs, size, rate = draw_costs(random.Random(seed)), 10**log_size, 3e-5
    best = best_chunks(workers, size, costs, usd_per_worker_second=rate if by_cost else None)

    def worth(chunks: int) -> float:
        one = estimate(Merge("k-reduce", workers, size, chunks, faithful=True), replace(costs, list_seconds=0.0))
        return one.usd(workers, rate) if by_cost else one.seconds

    assert worth(best) == pytest.approx(min(worth(chunks) for chunks in range(1, workers + 1)), rel=1e-9)


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 32), st.floats(4, 9), st.integers(0, 1 << 30), st.sampled_from(["time", "cost"]))
def test_nothing_beats_the_choice(workers: int, log_size: float, seed: int, minimise: str) -> None:
    costs, size, rate = draw_costs(random.Random(seed)), 10**log_size, 3e-5
    choice = choose(workers, size, costs, usd_per_worker_second=rate, minimise=minimise)  # type: ignore[arg-type]
    for pattern in PATTERNS:
        for chunks in range(1, workers + 1) if pattern == "k-reduce" else (None,):
            other = estimate(Merge(pattern, workers, size, chunks), costs)
            if minimise == "time":
                assert choice.estimate.seconds <= other.seconds
            else:
                assert choice.usd <= other.usd(workers, rate)


def test_a_little_time_may_buy_many_requests() -> None:
    fast = choose(32, 14e6, S3, usd_per_worker_second=3e-5)
    thrifty = choose(32, 14e6, S3, usd_per_worker_second=3e-5, slack=0.1)
    assert thrifty.estimate.seconds <= 1.1 * fast.estimate.seconds
    assert thrifty.usd < fast.usd


def test_alone_nothing_is_taken() -> None:
    assert estimate(Merge("k-reduce", 1, 1e6), S3).seconds == 0
    assert least_seconds(1, 1e6, S3) == 0


def test_ranges_read_less_than_lists_from_all_to_all() -> None:
    lists = estimate(Merge("isp", 16, 5e5), S3)
    ranges = estimate(Merge("isp", 16, 5e5, 4, merged_bytes=2e6), S3)
    assert (lists.puts, lists.gets) == (16, 240)
    assert (ranges.puts, ranges.gets) == (64, 120)
    assert ranges.down_bytes * 2 < lists.down_bytes


def test_unequal_batches() -> None:
    def batch(**given: float) -> int:
        base = {"aggregation_seconds": 2.0, "seconds_per_sample": 0.01, "most": 1024}
        return unequal_batches(32, 4, 16, **{**base, **given})  # type: ignore[arg-type]

    # (1024 - 32 * 4) / 12 = 74 is the cap; below it, 32 + 2 s / 10 ms = 232 samples take as long.
    assert batch() == 74
    assert batch(aggregation_seconds=0.2) == 52
    assert batch(most=100) == 1
    assert unequal_batches(32, 16, 16, aggregation_seconds=1, seconds_per_sample=1, most=1024) == 32


def test_the_probe_measures_a_channel(tmp_path: Path) -> None:
    channel = FileChannel(tmp_path)
    costs = probe(channel, "probe", large_bytes=1 << 20, repeats=3)
    assert 0 < costs.put_seconds + costs.get_seconds < 1
    assert min(costs.up_bytes_per_second, costs.down_bytes_per_second) > 1e6
    assert 0 <= costs.poll_seconds < 5
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_the_probe_finds_latencies() -> None:
    import time

    channel = MemoryChannel(before=lambda what, key: time.sleep({"put": 0.02, "get": 0.01}.get(what, 0.0)))
    costs = probe(channel, "probe", large_bytes=1 << 16, repeats=3)
    assert costs.put_seconds == pytest.approx(0.02, abs=0.01)
    assert costs.get_seconds == pytest.approx(0.01, abs=0.008)
    assert channel.values == {}
