"""Workers share no device, whoever comes and goes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import budget

from region_agent.gateway.device_blocks import DeviceBlocks

Live = dict[tuple[str, int], tuple[int, ...]]


def aligned_room(devices: int, free: set[int], size: int) -> bool:
    """Whether an aligned block of a power of two is free."""
    return any(free.issuperset(range(begin, begin + size)) for begin in range(0, devices, size))


@settings(max_examples=budget(200), deadline=None)
@given(
    st.sampled_from((1, 4, 6, 8, 12, 16, 24)),
    st.lists(st.tuples(st.booleans(), st.integers(1, 12), st.integers(0, 99)), max_size=50),
)
def test_no_device_is_shared_and_what_is_free_is_given(devices: int, moves: list[tuple[bool, int, int]]) -> None:
    blocks, live = DeviceBlocks(devices), Live()
    for number, (ends, size, pick) in enumerate(moves):
        if ends and live:
            owner = sorted(live)[pick % len(live)]
            blocks.release(*owner)
            del live[owner]
            continue
        owner, free = (f"job-{pick % 5}", number), set(range(devices)).difference(*live.values())
        numbers = blocks.take(*owner, size)
        assert bool(numbers) == (size <= len(free)), "a request is served whenever so many are free"
        if not numbers:
            continue
        assert len(set(numbers)) == size
        assert free.issuperset(numbers), "two live workers share no device"
        if size & (size - 1) == 0 and aligned_room(devices, free, size):
            assert (numbers[0] % size, numbers[-1] - numbers[0]) == (0, size - 1), "neighbours from a multiple on"
        live[owner] = numbers
        assert all(blocks.take(*one, len(held)) == held for one, held in live.items()), "and keeps what it has"
    for job in {job for job, _ in live}:
        assert sorted(blocks.workers(job)) == sorted(worker for of_job, worker in live if of_job == job)


def test_a_block_breaks_up_the_least() -> None:
    blocks = DeviceBlocks(8)
    assert blocks.take("a", 0, 1) == (0,)
    assert blocks.take("b", 0, 4) == (4, 5, 6, 7)
    assert blocks.take("c", 0, 1) == (1,), "beside the first, since two neighbours are left"
    assert blocks.take("d", 0, 2) == (2, 3)
    blocks.release("b", 0)
    assert blocks.take("e", 0, 3) == (4, 5, 6)
    blocks.release("a", 0)
    assert blocks.take("f", 0, 2) == (0, 7), "no neighbours are free"
    assert blocks.take("g", 0, 1) == ()


@pytest.mark.parametrize("size", [0, -1, 9])
def test_what_can_never_be_is_not_given(size: int) -> None:
    assert DeviceBlocks(8).take("a", 0, size) == ()
    assert DeviceBlocks(0).take("a", 0, 1) == ()


def test_a_worker_that_needs_another_number_gets_other_devices() -> None:
    blocks = DeviceBlocks(4)
    assert blocks.take("a", 0, 1) == (0,)
    assert blocks.take("a", 0, 4) == (0, 1, 2, 3)
    assert blocks.workers("a") == (0,)
