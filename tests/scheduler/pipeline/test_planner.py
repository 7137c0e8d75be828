"""That the front is the front: against trying everything, and what holds of every plan."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import budget
from support.pipeline_choices import cheapest, fastest, uniform

from scheduler.pipeline import (
    FunctionSize,
    NothingFitsError,
    _search,
    evaluate,
    explain,
    front,
)
from scheduler.pipeline._explain import cuts_of
from scheduler.pipeline._planner import pipeline_options

from .plain import plain_front
from .problems import MB, brute_force, problem

pytestmark = pytest.mark.slow

QUICK = settings(max_examples=budget(25), deadline=None)
SEEDS = st.integers(0, 100_000)


def points(plans: object) -> list[tuple[float, float]]:
    return [(plan.seconds, plan.usd) for plan in plans]  # type: ignore[attr-defined]


def same(found: list[tuple[float, float]], wanted: list[tuple[float, float]]) -> bool:
    """Equal but for rounding; where two points are nearly one, either may stand."""

    def covered(point: tuple[float, float], by: list[tuple[float, float]]) -> bool:
        return any(s <= point[0] * (1 + 1e-9) and u <= point[1] * (1 + 1e-9) for s, u in by)

    return all(covered(p, found) for p in wanted) and all(covered(p, wanted) for p in found)


@pytest.mark.parametrize("seed", range(32))
def test_it_is_what_trying_everything_finds_also_where_it_begins_with_shorter_chains(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = problem(seed, layers=4, sizes=2, places=1 + seed % 3 // 2)
    if seed % 4 == 3:
        asked = replace(asked, stages=2)
    wanted = brute_force(asked, pipeline_options(asked))
    for fewest in (_search.DIRECT_LAYERS, 1):
        monkeypatch.setattr(_search, "DIRECT_LAYERS", fewest)
        if wanted:
            assert same(points(front(asked)), wanted)
        else:
            with pytest.raises(NothingFitsError):
                front(asked)


@pytest.mark.parametrize("seed", range(12))
def test_of_longer_chains_it_is_what_plain_dynamic_programming_finds(seed: int) -> None:
    asked = problem(seed, layers=10, sizes=2)
    layers = asked.profile.layers
    # At least nine of them, so that two shorter chains come first.
    asked = replace(asked, profile=replace(asked.profile, layers=(layers * 9)[: max(9, len(layers))]))
    if seed % 4 == 3:
        asked = replace(asked, stages=3)
    wanted = plain_front(asked, pipeline_options(asked))
    if not wanted:
        with pytest.raises(NothingFitsError):
            front(asked)
        return
    assert same(points(front(asked)), wanted)


@pytest.mark.parametrize("seed", range(12))
def test_functions_that_differ_in_room_alone_are_each_of_use(seed: int) -> None:
    """A stage holds the more micro-batches the more stages follow."""
    asked = problem(seed, layers=8, sizes=3)
    asked = replace(asked, batch=8, orders=("1f1b",), degrees=(1,), micro_batches=(1,), rematerialise=seed % 2 == 0)
    sizes = tuple(replace(size, speed=1.0, bandwidth=1.0) for size in asked.places[0].sizes)
    layers = tuple(replace(layer, activation_bytes=3 * layer.activation_bytes) for layer in asked.profile.layers)
    asked = replace(
        asked, profile=replace(asked.profile, layers=layers), places=(replace(asked.places[0], sizes=sizes),)
    )
    wanted = plain_front(asked, pipeline_options(asked))
    if not wanted:
        with pytest.raises(NothingFitsError):
            front(asked)
        return
    assert same(points(front(asked)), wanted)


def test_where_no_two_layers_fit_a_function_each_gets_one_of_its_own() -> None:
    asked = problem(4, sizes=2)
    layer = replace(asked.profile.layers[0], parameter_bytes=40 * MB, activation_bytes=MB, output_bytes=MB)
    sizes = tuple(FunctionSize(mb, mb / 300, 2e-5) for mb in (256, 300))
    asked = replace(
        asked,
        profile=replace(asked.profile, layers=(layer,) * 7, state_factor=1.0, base_mb=100.0),
        places=(replace(asked.places[0], sizes=sizes),),
        degrees=(1,),
        most_workers=None,
    )
    plans = front(asked)
    assert {len(plan.stages) for plan in plans} == {7}
    assert same(points(plans), plain_front(asked, pipeline_options(asked)))


@QUICK
@given(SEEDS)
def test_plans_fit_and_beat_each_other_in_one_thing(seed: int) -> None:
    asked = problem(seed, layers=6, places=1 + seed % 2)
    try:
        plans = front(asked)
    except NothingFitsError:
        return
    for before, after in pairwise(plans):
        assert before.seconds < after.seconds
        assert before.usd > after.usd
    for plan in plans:
        assert all(stage.needed_mb <= stage.memory_mb for stage in plan.stages)
        assert plan.stages[0].place == asked.places[0].name
        assert asked.most_workers is None or plan.workers <= asked.most_workers
        if not asked.ends_last:
            assert evaluate(asked, plan.way, cuts_of(asked, plan)) == plan


@QUICK
@given(SEEDS)
def test_a_larger_function_to_choose_from_never_hurts(seed: int) -> None:
    asked = problem(seed)
    size = asked.places[0].sizes[-1]
    more = FunctionSize(2 * size.memory_mb, size.speed * 1.5, size.usd_per_gb_second, size.bandwidth)
    wider = replace(asked, places=(replace(asked.places[0], sizes=(*asked.places[0].sizes, more)),))
    try:
        plans = front(asked)
    except NothingFitsError:
        return
    larger = points(front(wider))
    assert all(any(s <= p.seconds and u <= p.usd * (1 + 1e-9) for s, u in larger) for p in plans)


@QUICK
@given(SEEDS)
def test_more_memory_at_the_same_price_is_never_worse(seed: int) -> None:
    asked = problem(seed)
    try:
        plans = front(asked)
    except NothingFitsError:
        return
    less = replace(asked, profile=replace(asked.profile, base_mb=asked.profile.base_mb / 2))
    roomier = points(front(less))
    assert all(any(s <= p.seconds * (1 + 1e-9) and u <= p.usd * (1 + 1e-9) for s, u in roomier) for p in plans)


@QUICK
@given(SEEDS, st.sampled_from([0.01, 0.05, 0.3]), st.integers(1, 2))
def test_a_front_within_a_share_covers_the_exact_one(seed: int, within: float, places: int) -> None:
    asked = problem(seed, layers=8, places=places)
    try:
        exact = points(front(asked))
    except NothingFitsError:
        with pytest.raises(NothingFitsError):
            front(asked, within)
        return
    found = points(front(asked, within))
    share = (1 + within) * (1 + 1e-9)
    assert all(any(s <= seconds * share and u <= usd * share for s, u in found) for seconds, usd in exact)
    # And none of them is better than what there is.
    assert all(any(s <= seconds * (1 + 1e-9) and u <= usd * (1 + 1e-9) for s, u in exact) for seconds, usd in found)


def test_a_share_below_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="within"):
        front(problem(3), -0.01)


@QUICK
@given(SEEDS)
def test_the_baseline_is_never_better(seed: int) -> None:
    asked = problem(seed)
    base = uniform(asked)
    if base:
        exact = points(front(asked))
        assert all(any(s <= p.seconds * (1 + 1e-9) and u <= p.usd * (1 + 1e-9) for s, u in exact) for p in base)


def test_limits_pick_from_the_front() -> None:
    plans = front(problem(3))
    assert cheapest(plans, plans[0].seconds) == plans[0]
    assert cheapest(plans, 1e9) == plans[-1]
    assert cheapest(plans, plans[0].seconds / 2) is None
    assert fastest(plans, plans[-1].usd) == plans[-1]
    assert fastest(plans, 1e9) == plans[0]
    assert fastest(plans, 0.0) is None


def test_it_says_which_layer_is_too_large() -> None:
    asked = problem(1)
    layers = list(asked.profile.layers)
    layers[1] = replace(layers[1], parameter_bytes=1 << 40)
    with pytest.raises(NothingFitsError, match="layer 1"):
        front(replace(asked, profile=replace(asked.profile, layers=tuple(layers))))


def test_every_cut_is_explained() -> None:
    plan = next(plan for plan in front(problem(5)) if len(plan.stages) > 1)
    said = explain(problem(5), plan)
    assert len(said) == 2 * len(plan.stages)
    for stage in plan.stages[:-1]:
        assert any(f"cut after layer {stage.last} " in text for text in said)
