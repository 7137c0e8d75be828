"""The fronts of steps, and the published search, held against trying everything."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from bench.tuning_baselines import fasdl as fasdl_heuristic
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import budget
from support.tuning_draws import cheapest, drawn_limits, drawn_space, drawn_task, enumerated

from scheduler.tuning import Prediction, TuningLimits, step_choices

seeds = st.integers(0, 2**32)


def kept(one: object, limits: TuningLimits) -> bool:
    return one.seconds <= limits.deadline_seconds and one.usd <= limits.budget_usd  # type: ignore[attr-defined, no-any-return]


@settings(max_examples=budget(40), deadline=None)
@given(seeds)
def test_the_published_search_is_never_cheaper_and_sometimes_finds_nothing(seed: int) -> None:
    rng = random.Random(seed)
    task = replace(drawn_task(rng))
    space = replace(drawn_space(rng), collectives=("k-reduce",))
    limits = TuningLimits(drawn_limits(rng, enumerated(task, space)).deadline_seconds)
    theirs = fasdl_heuristic(task, space, limits, "near")
    ours = cheapest(task, replace(space, channels=("near",)), limits)
    if theirs is not None:
        assert ours is not None
        assert ours.usd <= theirs.usd * (1 + 1e-8)
        assert kept(theirs, limits)


def test_the_published_search_misses_a_plan_that_needs_few_chunks() -> None:
    """W and M are fixed with K = W, where the requests of a slow store cost the deadline; K = 1 would keep it."""
    rng = random.Random(1)
    while True:
        task, space = drawn_task(rng), replace(drawn_space(rng), collectives=("k-reduce",))
        every = [one for one in enumerated(task, space) if one.configuration.channel == "near"]
        if not every:
            continue
        limits = TuningLimits(min(one.seconds for one in every))
        if fasdl_heuristic(task, space, limits, "near") is None:
            break
    assert cheapest(task, space, limits) is not None


@pytest.mark.slow
@settings(max_examples=budget(60), deadline=None)
@given(seeds)
def test_of_each_number_of_workers_no_step_that_another_equals_or_beats_in_everything_is_kept(seed: int) -> None:
    rng = random.Random(seed)
    task, space = drawn_task(rng), drawn_space(rng)
    space = replace(space, batches=space.batches[:1])

    def figures(one: Prediction) -> tuple[float, float, float]:
        return one.compute_seconds + one.merge_seconds, one.configuration.memory_mb, one.requests_usd / one.iterations

    kept: dict[tuple[int, str], set[tuple[float, ...]]] = {}
    for one in sorted(enumerated(task, space), key=figures):
        told = tuple(round(figure, 15) for figure in figures(one))
        others = kept.setdefault((one.configuration.workers, one.configuration.channel), set())
        if not any(all(a <= b for a, b in zip(other, told, strict=True)) for other in others):
            others.add(told)
    for channel in task.channels:
        columns = step_choices(task, space, channel.name).front(task.compute, task.memory, *space.batches)
        found = [columns.one(at) for at in range(len(columns.workers))]
        assert [one.workers for one in found] == sorted(one.workers for one in found)
        for workers in space.workers:
            mine = [one for one in found if one.workers == workers]
            steps = [(one.compute_seconds + one.merge_seconds, one.memory_mb, one.merge_usd) for one in mine]
            assert steps == sorted(steps)
            told = {(round(a, 15), round(b, 15), round(c, 15)) for a, b, c in steps}
            assert len(told) == len(steps)
            assert told == kept.get((workers, channel.name), set())
