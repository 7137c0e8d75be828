"""The scheduler's forms of a merge, held against those of the room that merges."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import budget
from support.tuning_draws import drawn_task

from scheduler.tuning import ChannelProfile, Correction, Merges, merged
from sync.collective import ChannelCosts, Merge, best_groups, estimate

SHARED = [name for name in ChannelCosts.__dataclass_fields__ if name in ChannelProfile.__dataclass_fields__]


def test_a_channel_has_all_that_is_probed() -> None:
    assert set(SHARED) == set(ChannelCosts.__dataclass_fields__)


@settings(max_examples=budget(300), deadline=None)
@given(
    st.integers(0, 2**32),
    st.sampled_from(["server-reduce", "all-reduce", "scatter-reduce", "pipelined-scatter-reduce", "k-reduce"]),
    st.integers(1, 24),
    st.integers(1, 24),
    st.floats(1e3, 1e8),
    st.booleans(),
)
def test_both_rooms_say_the_same(
    seed: int, collective: str, workers: int, chunks: int, size: float, faithful: bool
) -> None:
    channel = drawn_task(random.Random(seed)).channels[0]
    costs = ChannelCosts(**{name: getattr(channel, name) for name in SHARED})
    k = {"all-reduce": 1, "k-reduce": min(chunks, workers)}.get(collective, workers)
    faithful = faithful and collective in ("all-reduce", "scatter-reduce", "k-reduce")
    merge = Merge(collective, workers, size, k, faithful)
    if collective == "k-reduce" and not faithful:
        merge = replace(merge, groups=best_groups(merge, costs))
    theirs = estimate(merge, costs)
    ours = merged(Merges.of([(collective, workers, k, 1.0)]), size, channel, faithful=faithful)
    assert (ours.puts[0], ours.gets[0]) == (theirs.puts, theirs.gets)
    seconds = ours.seconds(Correction())[0]
    if 1 < k < workers and merge.in_groups == 1 and not faithful and not channel.cores:
        # In a chain of iterations the owners are ahead by the reading of one part.
        ahead = size / k / channel.down_bytes_per_second
        assert theirs.seconds - ahead * (1 + 1e-9) <= seconds <= theirs.seconds * (1 + 1e-9)
        return
    assert seconds == pytest.approx(theirs.seconds, rel=1e-9)
    assert ours.polls[0] == pytest.approx(theirs.polls, rel=1e-6)
    if collective != "server-reduce" and workers > 1:
        assert ours.usd(channel, faithful=faithful)[0] == pytest.approx(theirs.requests_usd, rel=1e-6)


def test_groups_are_what_workers_without_staleness_merge_in() -> None:
    costs = ChannelCosts(0.1, 0.02, 1e8, 1e8, put_usd=5e-6, get_usd=4e-7, parallel=16)
    channel = ChannelProfile("s3", **{name: getattr(costs, name) for name in SHARED})
    row = Merges.of([("k-reduce", 16, 4, 1.0)])
    flat, grouped = (merged(row, 47e6, channel, grouped=way).seconds(Correction())[0] for way in (False, True))
    merge = Merge("k-reduce", 16, 47e6, 4)
    assert best_groups(merge, costs) == 4
    assert grouped == pytest.approx(estimate(replace(merge, groups=4), costs).seconds)
    assert flat > 1.2 * grouped


def test_many_merges_at_once_are_each_by_itself() -> None:
    rng = random.Random(3)
    channel = drawn_task(rng).channels[0]
    rows = [("k-reduce", w, k, rng.uniform(0.1, 1)) for w in range(1, 9) for k in range(1, w + 1)]
    rows += [("server-reduce", w, w, 1.0) for w in range(1, 9)]
    together = merged(Merges.of(rows), 3e6, channel).seconds(Correction(merge_seconds=0.01))
    for row, seconds in zip(rows, together, strict=True):
        alone = merged(Merges.of([row]), 3e6, channel).seconds(Correction(merge_seconds=0.01))
        assert alone[0] == pytest.approx(seconds)
        assert (seconds == 0) == (row[1] == 1)
