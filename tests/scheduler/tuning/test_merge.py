"""Merges of a tuned task: groups, chains of iterations, many at once."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import budget
from support.tuning_draws import drawn_task

from sync.collective import (
    ChannelCosts,
    Correction,
    Merge,
    Merges,
    best_groups,
    collective_named,
    collectives,
    estimate,
    merge_terms,
)


@settings(max_examples=budget(300), deadline=None)
@given(
    st.integers(0, 2**32),
    st.sampled_from(collectives(lambda method: method.predictable)),
    st.integers(1, 24),
    st.integers(1, 24),
    st.floats(1e3, 1e8),
    st.booleans(),
)
def test_a_chain_of_iterations_is_at_most_one_part_faster(
    seed: int, collective: str, workers: int, chunks: int, size: float, faithful: bool
) -> None:
    channel = drawn_task(random.Random(seed)).channels[0]
    method = collective_named(collective)
    k = method.owners(workers, chunks)
    merge = Merge(collective, workers, size, k, faithful)
    if method.takes_groups and not faithful:
        merge = replace(merge, groups=best_groups(merge, channel))
    one = estimate(merge, channel)
    chained = merge_terms(Merges.of([(collective, workers, k, 1.0)]), size, channel, faithful=faithful)
    assert (chained.puts[0], chained.gets[0]) == (one.puts, one.gets)
    seconds = chained.seconds(Correction())[0]
    if 1 < k < workers and merge.in_groups == 1 and not faithful and not channel.cores:
        # In a chain of iterations the owners are ahead by the reading of one part.
        ahead = size / k / channel.down_bytes_per_second
        assert one.seconds - ahead * (1 + 1e-9) <= seconds <= one.seconds * (1 + 1e-9)
        return
    assert seconds == pytest.approx(one.seconds, rel=1e-9)
    assert chained.usd(channel)[0] == pytest.approx(one.requests_usd, rel=1e-6)


def test_groups_are_what_workers_without_staleness_merge_in() -> None:
    costs = ChannelCosts(0.1, 0.02, 1e8, 1e8, put_usd=5e-6, get_usd=4e-7, parallel=16)
    row = Merges.of([("k-reduce", 16, 4, 1.0)])
    flat, grouped = (merge_terms(row, 47e6, costs, grouped=way).seconds()[0] for way in (False, True))
    merge = Merge("k-reduce", 16, 47e6, 4)
    assert best_groups(merge, costs) == 4
    assert grouped == pytest.approx(estimate(replace(merge, groups=4), costs).seconds)
    assert flat > 1.2 * grouped


def test_many_merges_at_once_are_each_by_itself() -> None:
    rng = random.Random(3)
    channel = drawn_task(rng).channels[0]
    rows = [("k-reduce", w, k, rng.uniform(0.1, 1)) for w in range(1, 9) for k in range(1, w + 1)]
    rows += [("server-reduce", w, w, 1.0) for w in range(1, 9)]
    rows += [("isp", w, k, 1.0) for w in range(1, 9) for k in (0, w)]
    together = merge_terms(Merges.of(rows), 3e6, channel).seconds(Correction(merge_seconds=0.01))
    for row, seconds in zip(rows, together, strict=True):
        alone = merge_terms(Merges.of([row]), 3e6, channel).seconds(Correction(merge_seconds=0.01))
        assert alone[0] == pytest.approx(seconds)
        assert (seconds == 0) == (row[1] == 1)
