"""The closed forms, held against the roles themselves over a modelled channel, and against search."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from bench.collectives_published import best_chunks, least_seconds, unequal_batches
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import budget
from support.memory_channel import MemoryChannel
from support.virtual_channel import Program, Virtual

from sync.channel_clients import FileChannel
from sync.collective import (
    ChannelCosts,
    Merge,
    Settings,
    choose,
    collectives,
    estimate,
    owners_of_lists,
)
from sync.layout import Vector
from sync.merging import MeanCollective, Member, probe
from sync.merging._exchange import Arrived, Event, Fetch, Put, Request, ValuesStored

PATTERNS = collectives(lambda method: method.worker and method.shares == "mean")
S3 = ChannelCosts(0.1, 0.02, 1e8, 1e8, 0.0, 0.02, 8, 5e-6, 4e-7, 5e-6)
REDIS = ChannelCosts(0.001, 0.001, 1.25e8, 1.25e8, 0.0, 0.001, 8)


def played(merge: Merge, costs: ChannelCosts) -> Virtual:
    """One merge, by the roles."""
    import numpy as np

    size = int(merge.size_bytes // 4)
    vector: Vector = np.zeros(size, np.float32)
    given_settings = Settings(merge.pattern, chunks=merge.chunks, faithful=merge.faithful)  # type: ignore[arg-type]
    virtual = Virtual(costs)

    def program(one: MeanCollective) -> Program:
        yield one.part(1, vector, 1.0)

    for worker in range(merge.workers):
        one = MeanCollective(given_settings, Member(worker, merge.workers, 1), MemoryChannel(), "c", size)
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


@settings(max_examples=budget(200), deadline=None)
@given(st.integers(2, 64), st.floats(4, 9), st.integers(0, 1 << 30), st.booleans())
def test_the_closed_form_finds_the_best_chunks(workers: int, log_size: float, seed: int, by_cost: bool) -> None:
    costs, size, rate = draw_costs(random.Random(seed)), 10**log_size, 3e-5
    best = best_chunks(workers, size, costs, usd_per_worker_second=rate if by_cost else None)

    def worth(chunks: int) -> float:
        one = estimate(Merge("k-reduce", workers, size, chunks, faithful=True), replace(costs, list_seconds=0.0))
        return one.usd(workers, rate) if by_cost else one.seconds

    assert worth(best) == pytest.approx(min(worth(chunks) for chunks in range(1, workers + 1)), rel=1e-9)


@settings(max_examples=budget(60), deadline=None)
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


@pytest.mark.slow
@settings(max_examples=budget(60), deadline=None)
@given(st.integers(2, 16), st.floats(4, 8.5), st.integers(0, 1 << 30))
def test_the_owners_of_lists_are_far_from_the_best_for_no_length(workers: int, log_size: float, seed: int) -> None:
    costs, size = draw_costs(random.Random(seed)), 10**log_size

    def seconds(k: int, share: float) -> float:
        merge = Merge("isp", workers, share * size, k, merged_bytes=size * min(1, share * workers))
        return estimate(merge, costs).seconds

    taken = [[seconds(k, 4.0**-power) for k in range(workers + 1)] for power in range(7)]
    worst = [max(each[k] / min(each) for each in taken) for k in range(workers + 1)]
    chosen = owners_of_lists("isp", workers, size, costs)
    assert worst[chosen] == pytest.approx(min(worst))


def test_few_workers_send_their_lists_to_all_and_many_merge_them_by_ranges() -> None:
    for costs in (S3, REDIS):
        assert owners_of_lists("isp", 2, 4e7, costs) == owners_of_lists("isp", 3, 4e6, costs) == 0
        assert owners_of_lists("isp", 16, 4e8, costs) > 1


class Puts:
    """Somebody who puts a vector, once it has what it waits for, and then may wait for one."""

    def __init__(self, size: int, awaits: tuple[str, ...], gives: str, takes: str | None) -> None:
        self._value, self._left, self._gives, self._takes = memoryview(bytes(size)), set(awaits), gives, takes
        self._stored = False
        self.result = None

    def start(self) -> list[Request]:
        return [Fetch(tuple(self._left))] if self._left else [Put({self._gives: [self._value]})]

    def handle(self, event: Event) -> list[Request]:
        if isinstance(event, ValuesStored):
            self._stored = True
            return [Fetch((self._takes,))] if self._takes else []
        assert isinstance(event, Arrived)
        if event.key == self._takes:
            self._takes = None
            return []
        self._left.discard(event.key)
        return [] if self._left else [Put({self._gives: [self._value]})]

    @property
    def done(self) -> bool:
        return self._stored and self._takes is None


@settings(max_examples=budget(40), deadline=None)
@given(st.integers(2, 24), st.floats(3, 6.3), st.integers(0, 1 << 30))
def test_a_parameter_server_takes_what_the_form_says(workers: int, log_size: float, seed: int) -> None:
    costs, size = replace(draw_costs(random.Random(seed)), parallel=workers), int(10**log_size)
    virtual = Virtual(costs)

    def program(part: Puts) -> Program:
        yield part

    for worker in range(workers):
        virtual.add(program(Puts(size, (), f"p/{worker}", "mean")))
    virtual.add(program(Puts(size, tuple(f"p/{worker}" for worker in range(workers)), "mean", None)))
    virtual.run()
    told = estimate(Merge("server-reduce", workers, size), costs)
    assert told.seconds == pytest.approx(max(worker.spans[0][1] for worker in virtual.workers), rel=0.02)
    assert told.puts == sum(worker.meter.puts for worker in virtual.workers)
    assert told.gets == sum(worker.meter.gets for worker in virtual.workers)
    assert told.requests_usd == pytest.approx(told.puts * costs.put_usd + told.gets * costs.get_usd)


def test_the_parameter_server_may_be_chosen() -> None:
    patterns = (*PATTERNS, "server-reduce")
    # With few cores and a server that adds by itself, many workers would only take them from each other.
    shared = ChannelCosts(1e-3, 1e-3, 1e9, 3e9, merge_seconds_per_byte=1e-9, cores=2)
    assert choose(16, 1e3, shared, patterns=patterns).merge.pattern in ("all-reduce", "server-reduce")
    assert choose(16, 1e3, shared).merge.pattern == "all-reduce"
    # Through a store elsewhere it is one vector's way behind.
    assert choose(8, 14e6, S3, patterns=patterns).merge.pattern != "server-reduce"


def test_workers_on_one_machine_share_its_cores() -> None:
    own = ChannelCosts(1e-4, 1e-4, 1e9, 2e9, merge_seconds_per_byte=1e-9, parallel=1)
    one, two, many = (replace(own, cores=cores) for cores in (1.0, 2.0, 64.0))
    for pattern in PATTERNS:
        merge = Merge(pattern, 8, 14e6, 2 if pattern == "k-reduce" else None)
        seconds = [estimate(merge, costs).seconds for costs in (one, two, many)]
        assert seconds == sorted(seconds, reverse=True)
        assert seconds[0] <= 8 * seconds[2] * 1.001
    # One core: the fewest bytes and requests are best. Many: all of them add.
    assert choose(8, 14e6, one).merge.owners == 1
    assert choose(8, 14e6, many).merge.owners > 1


def test_whoever_waits_for_many_waits_for_the_latest() -> None:
    costs = replace(S3, jitter=0.2)
    # The largest of 15, 1, 15 and 15 normal ones: 1.74, 0, 1.74, 1.74 standard deviations; of gets as well.
    one = estimate(Merge("all-reduce", 16, 4.0), costs).seconds - estimate(Merge("all-reduce", 16, 4.0), S3).seconds
    # 15 gets take two turns of 8, the one get of all others a single.
    assert one == pytest.approx((0.1 + 3 * 0.02) * (2.718 ** (0.2 * 1.736) - 1), rel=0.02)
    assert choose(16, 4e4, costs).merge.owners <= choose(16, 4e4, S3).merge.owners
    published = Merge("k-reduce", 16, 4e4, 4, faithful=True)
    assert estimate(published, costs) == estimate(published, S3)


def test_requests_that_keep_a_core_busy_are_not_made_side_by_side() -> None:
    costs = replace(S3, request_cpu_seconds=0.05)
    merge = Merge("scatter-reduce", 16, 1e5)
    assert estimate(merge, costs).seconds - estimate(merge, S3).seconds == pytest.approx(3 * 15 * 0.05, rel=0.3)
    assert choose(16, 1e6, costs).merge.owners <= choose(16, 1e6, S3).merge.owners


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
