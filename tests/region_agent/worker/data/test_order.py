"""The order of a split that is read in blocks: each sample once in an epoch, whoever draws, from wherever."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import budget

from region_agent.worker.data import order
from region_agent.worker.data.index import Block, BlockIndex
from region_agent.worker.data.order import BlockOrder
from region_agent.worker.data.shard import BatchStream, weighted_share_of


def _index(sizes: list[int], held: int = 1 << 20) -> BlockIndex:
    return BlockIndex.of([Block(0, 0, 1, size, held) for size in sizes], {})


def _large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "SMALL_BYTES", 0)


@settings(deadline=None, max_examples=budget(60))
@given(
    sizes=st.lists(st.integers(0, 30), min_size=1, max_size=300).filter(sum),
    batch=st.integers(1, 130),
    small=st.booleans(),
)
def test_an_epoch_has_every_sample_once(sizes: list[int], batch: int, small: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if not small:
            _large(patch)
        drawn = BlockOrder(_index(sizes), [3, 1], batch)
    for epoch in range(2):
        assert sorted(drawn.at(epoch, 0, sum(sizes))) == list(range(sum(sizes)))


def test_positions_do_not_depend_on_how_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    _large(monkeypatch)
    whole = BlockOrder(_index([7] * 200), [3, 1], 32).at(1, 0, 1400)
    parts = BlockOrder(_index([7] * 200), [3, 1], 32)
    assert [one for at in range(1390, -1, -10) for one in parts.at(1, at, at + 10)[::-1]] == whole[::-1]
    assert BlockOrder(_index([7] * 200), [3, 1], 32).at(0, 0, 1400) != whole


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2, 3, 4, 7, 8])
def test_each_block_is_read_by_one_worker(monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    _large(monkeypatch)
    blocks, batch = 4096, 56
    index = _index([9] * blocks)
    drawn = BlockOrder(index, [3, 1], batch)
    assert drawn.lanes == batch
    readers: Counter[int] = Counter()
    for worker in range(workers):
        mine = set()
        for row in range(0, 9 * blocks - batch, batch):
            begin, end = row + worker * batch // workers, row + (worker + 1) * batch // workers
            mine |= set(drawn.blocks_of(drawn.at(0, begin, end)).tolist())
        readers.update(mine)
    # Twice where one lane ends and the next begins.
    assert sum(readers.values()) <= 1.02 * blocks


def test_the_samples_of_a_step_come_from_many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of data that is sorted by its label, a step has about as many labels as of shuffled data."""
    _large(monkeypatch)
    blocks, of_block = 6400, 20
    drawn = BlockOrder(_index([of_block] * blocks), [3, 1], 64)
    labels = np.array(drawn.at(0, 0, 64 * 500)) * 10 // (blocks * of_block)
    counts = np.stack([np.bincount(step, minlength=10) for step in labels.reshape(-1, 64)])
    # A step of independent draws varies by sqrt(64 * 0.1 * 0.9) = 2.4 samples of a label.
    assert counts.std(axis=0).mean() < 3.0


def test_large_blocks_make_few_lanes() -> None:
    assert BlockOrder(_index([5] * 1000, held=100 << 20), [0], 64).lanes == 2
    assert BlockOrder(_index([5] * 3, held=100 << 20), [0], 64).lanes == 1


@settings(deadline=None, max_examples=budget(60))
@given(weights=st.lists(st.floats(1, 64), min_size=1, max_size=20), more=st.integers(0, 500))
def test_weights_divide_the_samples_of_a_step(weights: list[float], more: int) -> None:
    batch = len(weights) + more
    shares = [weighted_share_of(worker, weights, batch) for worker in range(len(weights))]
    assert [index for share in shares for index in share] == list(range(batch))
    for share, weight in zip(shares, weights, strict=True):
        assert abs(len(share) - 1 - more * weight / sum(weights)) <= 1 + 1e-6
        assert len(share) >= 1


def test_a_stream_draws_the_same_samples_however_they_are_divided() -> None:
    def drawn(weights: list[float], step: int) -> list[int]:
        found: list[int] = []
        for worker in range(3):
            stream = BatchStream(range(50), 5, "east", worker, 3, 30)
            stream.divide(weights)
            assert stream.count(step) == len(stream.indices(step))
            found += stream.indices(step)
        return found

    for step in (1, 2, 7):
        assert drawn([1.0, 4.0, 4.0], step) == drawn([], step)
