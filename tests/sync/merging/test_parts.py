"""Vectors that are handed in part by part: what leaves when, and what it takes, over a modelled channel."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.memory_channel import MemoryChannel
from support.virtual_channel import Program, Virtual

from sync.collective import ChannelCosts, Merged, Settings
from sync.means import weighted_mean
from sync.merging import MeanCollective, Member
from sync.merging._exchange import Given
from sync.merging._reduction_plan import plan_of

S3 = ChannelCosts(0.1, 0.02, 1e6, 1e6, parallel=16)
REDIS = ChannelCosts(0.001, 0.001, 1e6, 1e6, parallel=16)
PAUSES = (0.02, 1.5, 1.0)
SIZE, STEPS = 120_000, 4
"""As many bytes as take half a second on the link."""


def played(
    settings: Settings, costs: ChannelCosts, workers: int, backward: float, *, parts: bool, late: float = 0.0
) -> tuple[Virtual, list[list[Merged]]]:
    """Steps whose backward pass gives chunk after chunk, the last one first; ``late``: how much longer the last worker
    takes."""
    asked = costs.put_seconds > 0.01
    settings = replace(settings, in_parts=parts, asked=costs if asked else None)
    virtual, taken = Virtual(costs, pauses=PAUSES if asked else None), [[] for _ in range(workers)]

    def program(number: int, one: MeanCollective) -> Program:
        takes = backward * (1 + late * (number == workers - 1))
        for step in range(1, STEPS + 1):
            if not parts:
                yield takes
                taken[number] += yield one.part(step, vector_of(number, step), number + 1.0)
                continue
            me, bounds = virtual.workers[number], one.plan.bounds
            for chunk, part in enumerate(bounds):
                given = virtual.now + takes * (1 - part.start / SIZE)
                virtual.at(given, lambda chunk=chunk, me=me: virtual.tell(me, Given(chunk)))
            taken[number] += yield one.part(step, vector_of(number, step), number + 1.0, whole=False)

    plan = plan_of(Member(0, workers, 1), SIZE, settings, "c")
    for number in range(workers):
        one = MeanCollective(settings, Member(number, workers, 1), MemoryChannel(), "c", SIZE)
        virtual.add(program(number, one), uploads=plan.uploads_at_once)
    virtual.run()
    assert all(worker.ended for worker in virtual.workers)
    return virtual, taken


def vector_of(worker: int, step: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.random.default_rng([worker, step]).standard_normal(SIZE).astype(np.float32)


@pytest.mark.parametrize("costs", [S3, REDIS], ids=["asked", "told"])
@pytest.mark.parametrize(
    "settings", [Settings("pipelined-scatter-reduce"), Settings("scatter-reduce"), Settings("k-reduce", chunks=3)]
)
@pytest.mark.parametrize("late", [0.0, 1.5])
def test_the_mean_is_exact_however_late_one_is(costs: ChannelCosts, settings: Settings, late: float) -> None:
    _, taken = played(settings, costs, 4, 0.5, parts=True, late=late)
    for step in range(1, STEPS + 1):
        mean = weighted_mean([vector_of(worker, step) for worker in range(4)], [1.0, 2.0, 3.0, 4.0])
        assert all(one[step - 1].vector.tobytes() == mean.tobytes() for one in taken)


@pytest.mark.parametrize(("costs", "least"), [(S3, 0.1), (REDIS, 0.15)], ids=["asked", "told"])
def test_a_step_takes_less_than_without(costs: ChannelCosts, least: float) -> None:
    settings, workers, backward = Settings("pipelined-scatter-reduce"), 8, 1.0
    with_, _ = played(settings, costs, workers, backward, parts=True)
    without, _ = played(settings, costs, workers, backward, parts=False)
    assert with_.now < (1 - least) * without.now
    puts, gets = (
        [sum(getattr(worker.meter, kind) for worker in one.workers) for one in (with_, without)]
        for kind in ("puts", "gets")
    )
    assert puts[0] == puts[1]
    assert gets[0] == gets[1]
    # Each look in vain costs a twelfth of a put.
    looks = sum(worker.meter.polls for worker in with_.workers)
    assert looks < 3 * puts[0]
