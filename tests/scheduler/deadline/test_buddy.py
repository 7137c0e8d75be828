"""A request for what is free has room, after few have moved."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import budget

from scheduler.deadline import Buddy


def check(buddy: Buddy) -> None:
    taken: set[int] = set()
    for begin, size in buddy.blocks.values():
        assert begin % size == 0, "aligned"
        block = set(range(begin, begin + size))
        assert not block & taken, "nobody shares a device"
        assert max(block) < buddy.devices
        taken |= block


@settings(max_examples=budget(150), deadline=None)
@given(
    st.sampled_from((8, 16, 32, 64, 12, 24, 48)),
    st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.integers(0, 99)), max_size=60),
)
def test_any_power_of_two_that_is_free_has_room(devices: int, moves: list[tuple[bool, int, int]]) -> None:
    buddy = Buddy(devices)
    largest = 1 << (devices & -devices).bit_length() - 1
    for number, (ends, power, pick) in enumerate(moves):
        if ends and buddy.blocks:
            buddy.release(sorted(buddy.blocks)[pick % len(buddy.blocks)])
            continue
        size = 1 << power
        if size > buddy.free or size > largest:
            continue
        before = dict(buddy.blocks)
        placed = buddy.place(f"j{number}", size)
        check(buddy)
        assert {job: size for job, (_, size) in buddy.blocks.items()} == {
            **{job: size for job, (_, size) in before.items()},
            f"j{number}": size,
        }
        moved = {job for job in before if buddy.blocks[job] != before[job]}
        assert moved <= set(placed.moved)
        # Whoever moves is smaller than the block it makes room for, and only such can be inside a block.
        assert all(before[job][1] < size for job in placed.moved)
        assert len(placed.moved) <= sum(1 for _, length in before.values() if length < size)


def test_a_fragmented_region_moves_one_job_to_make_room() -> None:
    buddy = Buddy(8)
    for number in range(8):
        buddy.place(f"j{number}", 1)
    at = {begin: job for job, (begin, _) in buddy.blocks.items()}
    for device in (0, 2, 3, 5):
        buddy.release(at[device])
    placed = buddy.place("pair", 4)
    assert len(placed.moved) == 1
    check(buddy)


@pytest.mark.parametrize("size", [0, 3, 16])
def test_what_cannot_be_a_block_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=r"block|free"):
        Buddy(8).place("j", size)


def test_a_job_has_one_block() -> None:
    buddy = Buddy(8)
    buddy.place("j", 2)
    with pytest.raises(ValueError, match="no block"):
        buddy.place("j", 2)
