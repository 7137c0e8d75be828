"""The configurations of a region that a profile tells of: columns, and an object of each that is asked for."""

from __future__ import annotations

import random
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
from support.planner_draws import drawn_federation

from scheduler import Demand, Plan, plan
from scheduler._configurations import configurations, merge_of
from scheduler._estimate import figures_of
from scheduler.tuning import MergePoint

WANTED = Demand("job", "data", batch=32, epochs=10.0, steps=None, seed=1)


@pytest.mark.parametrize("divides", [False, True])
@pytest.mark.parametrize("ratio", [1.0, 1.5])
def test_columns_are_those_of_the_objects(ratio: float, *, divides: bool) -> None:
    compared = 0
    for seed in range(12):
        snapshot = drawn_federation(random.Random(seed), 3, most=16)
        for region in snapshot.regions:
            demand = replace(WANTED, collective="k-reduce", merging={"ratio": ratio}) if ratio != 1.0 else WANTED
            demand = replace(demand, divides_batch=divides)
            found = configurations(region, snapshot, demand)
            each = list(found)
            assert len(each) == len(found)
            assert found[:] == each
            assert [one.part.workers for one in each] == found.workers.tolist()
            assert [one.part.memory_mb for one in each] == found.memory_mb.tolist()
            assert [one.part.batch for one in each] == found.batches.tolist()
            assert [one.merging for one in each] == [merge_of(number) for number in found.merges.tolist()]
            figures = figures_of([one.part for one in each], region, snapshot)
            assert np.array_equal(found.figures, np.array(figures).T)
            compared += len(found) if snapshot.profiles else 0
    assert compared > 100


def test_batches_are_divided_into_equal_parts() -> None:
    """By as many workers as there are, which together take no more than the shard, or one batch."""
    divided = 0
    for seed in range(12):
        snapshot = replace(drawn_federation(random.Random(seed), 3, most=16), model_bytes=1000)
        if not snapshot.profiles:
            measured = (MergePoint("server-reduce", 2, 1, 1000.0, 0.004),)
            snapshot = replace(snapshot, merges={one.name: measured for one in snapshot.regions})
        for region in snapshot.regions:
            whole, found = (configurations(region, snapshot, replace(WANTED, divides_batch=d)) for d in (False, True))
            samples = region.datasets[0].splits["train"].samples
            assert found.workers.tolist() == sorted(found.workers.tolist())
            for part in (one.part for one in found):
                assert part.batch * part.divided == WANTED.batch
                assert part.workers % part.divided == 0
                assert part.workers <= region.capacity.workers
                assert part.step_samples <= max(samples, WANTED.batch)
                divided += part.divided > 1
            assert [one for one in found if one.part.divided == 1] == list(whole)
    assert divided > 100


def test_of_as_many_workers_and_as_much_memory_the_fastest_merge_is_found() -> None:
    chosen = 0
    for seed in range(12):
        snapshot = drawn_federation(random.Random(seed), 3, most=16)
        for region in snapshot.regions:
            found = configurations(region, snapshot, WANTED)
            for at, one in enumerate(found):
                alike = [
                    other
                    for other in found
                    if (other.part.workers, other.part.memory_mb) == (one.part.workers, one.part.memory_mb)
                ]
                assert found.fastest_merging(at) == min(alike, key=lambda other: other.part.merge_seconds or 0.0)
                chosen += len(alike) > 1
    assert chosen > 10


def test_the_bytes_of_links_are_a_mapping_that_copies_share() -> None:
    found = plan(drawn_federation(random.Random(3), 3), WANTED)
    assert isinstance(found, Plan)
    told = found.estimate.link_bytes
    assert dict(told) == {link: told[link] for link in told}
    assert len(told) == len(set(told)) == 6
    assert sum(told.values()) == found.estimate.wan_bytes.expected
    assert deepcopy(told) == told
    with pytest.raises(KeyError):
        told["r0>nowhere"]
