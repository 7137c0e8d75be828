"""Who merges what, and who follows whom."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from geofed_pb.errors import GeofedError
from sync.means import weighted_mean
from sync.merging import Member, OrderedSum, chunk_bounds, owners


@given(st.integers(0, 10_000), st.integers(1, 64), st.sampled_from([1, 64, 256]))
def test_chunks_cover_the_vector_once(size: int, chunks: int, align: int) -> None:
    bounds = chunk_bounds(size, chunks, align)
    assert bounds[0].start == 0
    assert bounds[-1].stop == size
    assert 1 <= len(bounds) <= chunks
    for before, after in itertools.pairwise(bounds):
        assert before.stop == after.start
        assert after.start % align == 0
    lengths = [part.stop - part.start for part in bounds]
    assert max(lengths) - min(lengths) <= 2 * align
    assert size == 0 or min(lengths) > 0


@given(st.integers(0, 10_000), st.integers(2, 64), st.sampled_from([1, 64, 256]))
def test_the_first_chunk_may_be_half_as_long_as_the_others(size: int, chunks: int, align: int) -> None:
    bounds = chunk_bounds(size, chunks, align, half_first=True)
    lengths = [part.stop - part.start for part in bounds]
    assert sum(lengths) == size
    assert bounds[0].start == 0
    if size >= align * (2 * chunks - 1):
        assert len(bounds) == chunks
        assert all(before.stop == after.start for before, after in itertools.pairwise(bounds))
        assert max(lengths[1:]) - min(lengths[1:]) <= 2 * align
        assert abs(2 * lengths[0] - max(lengths)) <= 4 * align


@given(st.integers(1, 64), st.data())
def test_every_owner_has_one_chunk(workers: int, data: st.DataObject) -> None:
    chunks = data.draw(st.integers(1, workers))
    who = owners(chunks, range(workers), "7")
    assert len(set(who)) == chunks
    assert set(who) <= set(range(workers))
    assert who == owners(chunks, list(reversed(range(workers))), "7")
    lost = data.draw(st.integers(0, workers - 1))
    if lost not in who:
        assert owners(chunks, [w for w in range(workers) if w != lost], "7") == who


def test_attempts_have_other_owners() -> None:
    assert len({owners(2, range(16), str(attempt)) for attempt in range(20)}) > 10


@pytest.mark.parametrize(
    "call",
    [
        lambda: Member(3, 3, 1),
        lambda: Member(1, 3, 1, lost=(1,)),
        lambda: owners(4, range(3), ""),
        lambda: owners(0, range(3), ""),
        lambda: chunk_bounds(10, 0),
    ],
)
def test_what_cannot_be_is_refused(call: object) -> None:
    with pytest.raises(GeofedError) as raised:
        call()  # type: ignore[operator]
    assert raised.value.code == "CONFIG_INVALID"


@given(st.integers(1, 8), st.integers(0, 100), st.randoms(use_true_random=False), st.integers(0, 99))
def test_sums_do_not_depend_on_who_came_first(workers: int, size: int, order: object, seed: int) -> None:
    rng = np.random.default_rng(seed)
    vectors = [rng.standard_normal(size).astype(np.float32) for _ in range(workers)]
    weights = [float(w) for w in rng.integers(1, 100, workers)]
    fold, turns = OrderedSum(size, range(workers)), list(range(workers))
    order.shuffle(turns)  # type: ignore[attr-defined]
    for worker in turns:
        assert worker in fold.missing
        fold.add(worker, vectors[worker], weights[worker])
    mean, weight = fold.mean()
    assert weight == sum(weights)
    if workers > 1:
        assert mean.tobytes() == weighted_mean(vectors, weights).tobytes()


def test_nobody_is_counted_twice() -> None:
    fold, one = OrderedSum(2, [0, 1, 2]), np.ones(2, np.float32)
    fold.add(1, one, 1.0)
    for worker, vector, weight in [(1, one, 1.0), (3, one, 1.0), (0, one[:1], 1.0), (0, one, -1.0), (0, one, np.nan)]:
        with pytest.raises(GeofedError):
            fold.add(worker, vector, weight)
    with pytest.raises(RuntimeError):
        fold.mean()
    fold.add(0, one, 1.0)
    with pytest.raises(GeofedError):
        fold.add(0, one, 1.0)
    assert fold.missing == (2,)
