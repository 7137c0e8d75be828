"""The price of devices in plans."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from support.planner_draws import drawn_federation

from scheduler import Declined, Demand, Plan, Snapshot, plan
from scheduler._model import Devices

MEMORY_MB = 1024


def _plan(snapshot: Snapshot, minimise: str) -> Plan:
    found = plan(
        snapshot,
        Demand("job", "data", batch=32, epochs=4.0, steps=None, seed=1, memory_mb=MEMORY_MB, minimise=minimise),
    )
    assert isinstance(found, Plan), found
    return found


@pytest.mark.parametrize("minimise", ["cost", "time"])
@pytest.mark.parametrize("seed", range(6))
def test_a_device_costs_what_a_function_of_that_price_would(seed: int, minimise: str) -> None:
    """With one size of functions, both are prices of a worker's second: the plans and their costs are equal."""
    drawn, usd = drawn_federation(random.Random(seed), 3, most=6), 1e-4
    with_devices, dearer = [], []
    for region in drawn.regions:
        assert region.prices is not None
        capacity = replace(region.capacity, devices=Devices("a GPU", region.capacity.workers))
        prices = replace(region.prices, device_usd_per_second=usd)
        with_devices.append(replace(region, capacity=capacity, prices=prices))
        more = region.prices.function_usd_per_gb_second + usd * 1024 / MEMORY_MB
        dearer.append(replace(region, prices=replace(region.prices, function_usd_per_gb_second=more)))
    ours = _plan(replace(drawn, regions=tuple(with_devices)), minimise)
    theirs = _plan(replace(drawn, regions=tuple(dearer)), minimise)
    plain = _plan(drawn, minimise)
    assert [replace(part, devices=0) for part in ours.partitions] == list(theirs.partitions)
    assert ours.estimate is not None
    assert theirs.estimate is not None
    assert plain.estimate is not None
    assert ours.estimate.usd.expected == pytest.approx(theirs.estimate.usd.expected)
    assert ours.estimate.seconds.expected == pytest.approx(theirs.estimate.seconds.expected)
    items = {cost.item: cost for cost in ours.estimate.items}
    assert items["device-seconds"].usd > 0
    assert "device-seconds" not in {cost.item for cost in plain.estimate.items}


def test_workers_with_several_devices_are_as_many_as_there_are_devices_for() -> None:
    drawn = drawn_federation(random.Random(1), 2, most=8)
    regions = []
    for region in drawn.regions:
        assert region.prices is not None
        capacity = replace(region.capacity, workers=8, devices=Devices("a GPU", 8))
        regions.append(replace(region, capacity=capacity, prices=replace(region.prices, device_usd_per_second=1e-4)))
    busy = {regions[0].name: 3}
    snapshot = replace(drawn, regions=tuple(regions), busy_workers=busy, busy_devices=busy)
    demand = Demand("job", "data", batch=32, epochs=4.0, steps=None, seed=1, memory_mb=MEMORY_MB, minimise="time")
    for gpus, devices, most in ((1, 1, (5, 8)), (2, 2, (2, 4)), (3, 3, (1, 2)), (None, 8, (0, 1))):
        assert tuple(snapshot.free_workers(region, gpus) for region in regions) == most
        found = plan(snapshot, replace(demand, gpus=gpus, workers=None if most[0] else 1))
        if not most[0]:
            assert isinstance(found, Declined)
            continue
        assert isinstance(found, Plan)
        assert all(part.devices == devices for part in found.partitions)
        assert all(part.workers <= limit for part, limit in zip(found.partitions, most, strict=True))
    found = plan(snapshot, replace(demand, gpus=9))
    assert isinstance(found, Declined)
    assert "have 8 devices, 9 are asked for" in found.reasons[0].text


@pytest.mark.parametrize(
    ("taken", "batch", "needed"),
    [
        ({}, 32, 0.0),
        ({32: 4000}, 32, 4000.0),
        ({32: 4000}, 64, 4000.0),
        ({32: 4000}, 16, 0.0),
        ({32: 4000, 8: 2500}, 64, 6000.0),
        ({32: 4000, 8: 2500}, 16, 3000.0),
        ({32: 4000, 8: 4100}, 64, 4000.0),
    ],
)
def test_a_step_that_takes_more_than_a_gpu_has_is_declined(taken: dict[int, int], batch: int, needed: float) -> None:
    drawn = drawn_federation(random.Random(1), 2, most=8).regions
    regions = tuple(
        replace(one, capacity=replace(one.capacity, workers=4, devices=Devices("a GPU", 4, memory_mb)))
        for one, memory_mb in zip(drawn, (2999, 80_000), strict=True)
    )
    snapshot = Snapshot(regions, gpu_bytes={size: mb << 20 for size, mb in taken.items()})
    assert snapshot.gpu_mb(batch) == needed
    demand = Demand("job", "data", batch=batch, epochs=4.0, steps=None, seed=1, memory_mb=MEMORY_MB)
    found = plan(snapshot, demand)
    assert isinstance(found, Declined) == (needed > 2999)
    if isinstance(found, Declined):
        (reason,) = found.reasons
        assert reason.code == "GPU_MEMORY"
        text = f"a step of {batch} samples takes {needed:.0f} MB of a GPU's memory, as a probe tells"
        assert reason.text == f"{text}, and one in region {regions[0].name} has 2999 MB"
        assert isinstance(plan(snapshot, replace(demand, avoid=(regions[0].name,))), Plan)


@pytest.mark.parametrize(
    ("taken", "ranks", "needed"),
    [({}, 2, 0.0), ({32: 4000}, 2, 2000.0), ({32: 4000, 8: 2500}, 1, 4000.0), ({32: 4000, 8: 2500}, 2, 3000.0),
     ({32: 4000, 8: 2500}, 4, 2500.0), ({32: 4000, 8: 4100}, 2, 2000.0)],
)  # fmt: skip
def test_what_no_sample_takes_is_divided_among_the_gpus_of_a_worker_that_hold_parts(
    taken: dict[int, int], ranks: int, needed: float
) -> None:
    drawn = drawn_federation(random.Random(1), 2, most=8).regions
    devices = Devices("a GPU", 4, 2999)
    regions = tuple(replace(one, capacity=replace(one.capacity, workers=4, devices=devices)) for one in drawn)
    snapshot = Snapshot(regions, gpu_bytes={size: mb << 20 for size, mb in taken.items()})
    assert snapshot.gpu_mb(32, ranks) == needed
    demand = Demand("job", "data", batch=32, epochs=4.0, steps=None, seed=1, memory_mb=MEMORY_MB, workers=1)
    found = plan(snapshot, replace(demand, gpus=ranks, sharded=ranks > 1))
    assert isinstance(found, Declined) == (needed > 2999), found


def test_a_region_whose_gpu_was_too_small_is_declined_at_that_batch_and_larger_ones() -> None:
    snapshot = drawn_federation(random.Random(1), 2, most=8)
    name = snapshot.regions[0].name
    snapshot = replace(snapshot, gpu_lacks={name: (32, "the GPU ran out of memory in loss")})
    demand = Demand("job", "data", batch=32, epochs=4.0, steps=None, seed=1, memory_mb=MEMORY_MB)
    found = plan(snapshot, demand)
    assert isinstance(found, Declined)
    assert [reason.code for reason in found.reasons] == ["GPU_MEMORY"]
    assert f"does not fit into a GPU of region {name}: the GPU ran out of memory in loss" in found.reasons[0].text
    assert isinstance(plan(snapshot, replace(demand, batch=31)), Plan)


@pytest.mark.parametrize(
    ("busy_workers", "busy_devices", "preemptible", "free"),
    [(0, 0, 0, 2), (1, 4, 0, 1), (1, 5, 0, 0), (2, 8, 0, 0), (0, 0, 1, 1), (4, 4, 0, 1), (8, 0, 0, 0)],
)
def test_devices_of_busy_workers_are_not_given_twice(
    busy_workers: int, busy_devices: int, preemptible: int, free: int
) -> None:
    """Each of eight devices has one holder: workers with four, or what is kept for preemptible workers."""
    (drawn,) = drawn_federation(random.Random(1), 1, most=8).regions
    capacity = replace(drawn.capacity, workers=8, preemptible=preemptible, devices=Devices("a GPU", 8))
    region = replace(drawn, capacity=capacity)
    name = region.name
    snapshot = Snapshot((region,), busy_workers={name: busy_workers}, busy_devices={name: busy_devices})
    assert snapshot.free_workers(region, 4) == free
