"""The controller keeps communication hidden at the least loss, and does not flap."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import budget

from sync.wan._controller import (
    Bounds,
    ControllerState,
    Decision,
    LinkSample,
    Observation,
    Setting,
    agreed_interval,
    initial,
    observe,
)
from sync.wan._streams import first_streams, next_streams

BOUNDS = Bounds(interval_steps=20, longest_steps=320)
MODEL_BYTES, STEP_SECONDS = 44_700_000, 0.1
"""ResNet-18: 2 s of compute in an interval; fp32 fits from 235 Mbit/s on, int8 from 68, topk from 2."""


def seen(mbps: float | None, **more: object) -> Observation:
    link = LinkSample(mbps, 50.0)
    values: dict[str, object] = {"step_seconds": STEP_SECONDS, "model_bytes": MODEL_BYTES, "links": {"eu": link}}
    return Observation(**(values | more))  # type: ignore[arg-type]


def run(
    rates: Sequence[float | None], state: ControllerState | None = None, **more: object
) -> tuple[ControllerState, list[tuple[int, Decision]], list[Setting]]:
    """Rounds one after another; streams are fixed, so that only codec and interval change."""
    state = state or initial(Bounds(20, 320, streams=2))
    told, chosen = [], []
    for number, mbps in enumerate(rates):
        state, decisions = observe(state, seen(mbps, **more))
        told += [(number, decision) for decision in decisions]
        chosen.append(state.setting)
    return state, told, chosen


def changes(chosen: Sequence[Setting]) -> list[int]:
    return [i for i in range(1, len(chosen)) if chosen[i] != chosen[i - 1]]


@pytest.mark.parametrize(
    ("mbps", "codec", "interval"),
    [
        (1000.0, "fp32", 20),
        (150.0, "bf16", 20),
        (80.0, "int8", 20),
        (5.0, "topk", 20),
        (1.5, "topk", 40),
        (0.5, "topk", 80),
        (0.001, "topk", 320),
    ],
)
def test_a_steady_link_gets_the_least_lossy_codec_that_fits_and_only_then_a_longer_interval(
    mbps: float, codec: str, interval: int
) -> None:
    _, told, chosen = run([mbps] * 60)
    assert (chosen[-1].codec, chosen[-1].interval_steps) == (codec, interval)
    moves = changes(chosen)
    assert len(moves) <= 1, "one decision is enough for a link that does not change"
    assert all(move >= 2 for move in moves), "a condition must hold for three rounds"
    assert [decision.what for _, decision in told if decision.what == "limit"] == (["limit"] if mbps < 0.01 else [])


def test_what_changes_says_why() -> None:
    _, told, _ = run([80.0] * 10)
    ((number, decision),) = told
    assert number >= 2
    assert decision.what == "codec"
    assert decision.text.startswith("int8 every 20 steps: fp32 every 20 steps takes ")
    assert "80 Mbit/s to eu" in decision.text


def test_a_link_that_collapses_and_recovers_gets_its_setting_back() -> None:
    _, told, chosen = run([1000.0] * 20 + [1.0] * 30 + [1000.0] * 60)
    assert [setting.codec for setting in (chosen[19], chosen[30], chosen[-1])] == ["fp32", "topk", "fp32"]
    assert chosen[49].interval_steps > 20
    assert chosen[-1].interval_steps == 20
    assert chosen[27].codec == "topk", "within three rounds of the collapse, and the pause"
    assert len(changes(chosen)) <= 4
    assert all("it fits now" in decision.text for number, decision in told if number > 50)


def test_a_single_bad_round_changes_nothing() -> None:
    _, told, _ = run(([1000.0] * 5 + [0.5]) * 20)
    assert not told


@settings(deadline=None, max_examples=budget(40))
@given(
    st.integers(1, 30),
    st.integers(1, 30),
    st.floats(0.5, 2000.0),
    st.floats(0.5, 2000.0),
)
def test_an_oscillating_link_does_not_make_it_flap(good: int, bad: int, high: float, low: float) -> None:
    rounds = 1200
    rates = [high if i % (good + bad) < good else low for i in range(rounds)]
    _, _, chosen = run(rates)
    moves = changes(chosen)
    assert all(b - a >= 5 for a, b in pairwise(moves))
    assert len(moves) <= 24, "each time that room was taken too early, it waits longer"
    assert len([move for move in moves if move > rounds // 2]) <= 12


@settings(deadline=None)
@given(st.lists(st.one_of(st.none(), st.floats(0.0, 5000.0)), max_size=120), st.data())
def test_whatever_is_measured_the_bounds_hold(rates: list[float | None], data: st.DataObject) -> None:
    codecs = data.draw(st.sampled_from([("fp32",), ("int8",), ("fp32", "int8"), ("fp32", "bf16", "int8", "topk")]))
    longest = data.draw(st.sampled_from([20, 50, 320]))
    fixed = data.draw(st.sampled_from([None, 4]))
    state, last = initial(Bounds(20, longest, codecs, fixed)), -100
    for number, mbps in enumerate(rates):
        before = state.setting
        norm = data.draw(st.one_of(st.none(), st.floats(0, 1e6), st.just(math.inf), st.just(math.nan)))
        cosine = data.draw(st.one_of(st.none(), st.floats(-1, 1)))
        observation = seen(mbps, update_norm=norm, cosine=cosine)
        again = observe(state, observation)
        state, decisions = observe(state, observation)
        assert (state, decisions) == again
        setting = state.setting
        assert setting.codec in codecs
        assert 20 <= setting.interval_steps <= longest
        assert setting.streams["eu"] == fixed if fixed else setting.streams["eu"] in (1, 2, 4, 8, 16)
        if number and (setting.codec, setting.interval_steps) != (before.codec, before.interval_steps):
            assert number - last >= 5
            assert [decision for decision in decisions if decision.what in ("codec", "interval", "quality")]
            last = number


def test_what_the_job_file_fixes_is_never_changed() -> None:
    state = initial(Bounds(20, 20, ("int8",), 4))
    state, told, chosen = run([1000.0] * 10 + [0.1] * 30 + [None] * 5, state, cosine=-0.9, update_norm=1.0)
    assert {(s.codec, s.interval_steps, s.streams["eu"]) for s in chosen} == {("int8", 20, 4)}
    assert [decision.what for _, decision in told] == ["limit"]


def test_a_fast_link_is_not_compressed_for_where_the_codec_takes_longer_than_the_bytes_it_saves() -> None:
    slow_codecs = {"bf16": 20e6, "int8": 20e6, "ternary": 20e6, "topk": 20e6}
    _, _, chosen = run([400.0] * 40, step_seconds=0.01, codec_bytes_per_second=slow_codecs)
    assert {setting.codec for setting in chosen} == {"fp32"}
    assert chosen[-1].interval_steps == 160, "so the interval must give room"
    state = initial(Bounds(20, 320, streams=2), "int8")
    _, _, chosen = run([1000.0] * 40, state, codec_bytes_per_second=slow_codecs)
    assert chosen[-1].codec == "fp32"


def test_the_slowest_link_and_what_it_passes_on_and_has_not_delivered_decide() -> None:
    state = initial(Bounds(20, 320, streams=2))
    for _ in range(10):
        links = {"near": LinkSample(5000.0, 5.0), "far": LinkSample(1000.0, 200.0, updates=8)}
        state, _ = observe(state, seen(None, links=links))
    assert state.setting.codec == "int8"
    state = initial(Bounds(20, 320, streams=2))
    for _ in range(10):
        state, _ = observe(state, seen(None, links={"far": LinkSample(400.0, 50.0, backlog_bytes=40_000_000)}))
    assert state.setting.codec != "fp32"


def test_a_link_that_was_not_used_keeps_what_was_known_of_it() -> None:
    state, _, _ = run([5.0] * 20)
    _, told, chosen = run([None] * 40, state)
    assert not told
    assert chosen[-1].codec == "topk"


def test_nothing_is_decided_without_links() -> None:
    state = initial(BOUNDS)
    assert observe(state, seen(None, links={}))[1] == ()
    assert state.setting == Setting(20, "fp32", {})


# --- the quality guard


@pytest.mark.parametrize("bad", [{"cosine": -0.5}, {"update_norm": 10.0}, {"update_norm": math.nan}])
def test_updates_that_go_wrong_step_back_to_less_loss_even_if_slower(bad: dict[str, object]) -> None:
    state, _, _ = run([5.0] * 20, update_norm=1.0, cosine=0.8)
    assert state.setting.codec == "topk"
    state, told, _ = run([5.0] * 2, state, **({"update_norm": 1.0} | bad))
    assert not told, "not for two rounds"
    state, told, chosen = run([5.0] * 4, state, **({"update_norm": 1.0} | bad))
    assert [decision.what for _, decision in told] == ["quality"]
    assert "even if slower" in told[0][1].text
    assert chosen[-1].codec == "ternary"
    state, _, chosen = run([5.0] * 40, state, update_norm=1.0, cosine=0.8)
    assert chosen[-1].codec == "ternary", "kept, although topk is what would fit"
    _, _, chosen = run([5.0] * 40, state, update_norm=1.0, cosine=0.8)
    assert chosen[-1].codec == "topk"


def test_a_longer_interval_is_the_first_to_be_taken_back() -> None:
    state, _, _ = run([1.5] * 20, cosine=0.8)
    assert state.setting.interval_steps == 40
    state, _, chosen = run([1.5] * 5, state, cosine=-0.5)
    assert (chosen[-1].codec, chosen[-1].interval_steps) == ("topk", 20)


def test_a_norm_that_grows_with_the_interval_is_no_alarm() -> None:
    state = initial(Bounds(20, 320, streams=2))
    told = []
    for number in range(80):
        state, decisions = observe(state, seen(1000.0 if number < 10 else 0.1, update_norm=state.rung[0] * 0.5))
        told += decisions
    assert state.setting.interval_steps == 320
    assert "quality" not in [decision.what for decision in told]


def test_a_new_level_of_norms_becomes_normal() -> None:
    state, _, _ = run([1000.0] * 40, update_norm=1.0)
    state, _, _ = run([1000.0] * 40, state, update_norm=20.0)
    assert state.suspect_rounds == 0


# --- streams


def settled(carries: Callable[[int], float], rtt_ms: float = 50.0) -> list[int]:
    link = first_streams(carries(2), rtt_ms, None)
    numbers = [link.streams]
    for _ in range(20):
        link, _ = next_streams(link, carries(link.streams), rtt_ms, None)
        numbers.append(link.streams)
    return numbers


@pytest.mark.parametrize(
    ("carries", "last", "most"),
    [
        (lambda n: 100.0, 2, 4),  # one fills the line
        (lambda n: min(25.0 * n, 150.0), 8, 16),
        (lambda n: 25.0 * n, 16, 16),
        (lambda n: 100.0 + n, 2, 4),
    ],
)
def test_streams_double_while_that_brings_a_tenth_more(carries: Callable[[int], float], last: int, most: int) -> None:
    numbers = settled(carries)
    assert (numbers[-1], max(numbers)) == (last, most)
    assert len(set(numbers[-10:])) == 1


def test_another_path_is_tried_out_anew_but_not_all_the_time() -> None:
    link = first_streams(100.0, 50.0, None)
    trials = 0
    for number in range(400):
        link, why = next_streams(link, 100.0, 50.0 if number // 10 % 2 else 120.0, None)
        trials += "again" in why
    assert 1 <= trials <= 8


def test_where_all_go_together_the_slowest_region_sets_the_interval() -> None:
    assert agreed_interval({"a": Setting(20, "fp32", {}), "b": Setting(80, "topk", {})}) == 80


@pytest.mark.parametrize(
    "wrong", [{"codecs": ("int8", "fp32")}, {"codecs": ()}, {"codecs": ("zip",)}, {"longest_steps": 5}]
)
def test_bounds_that_cannot_be_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        Bounds(**({"interval_steps": 20, "longest_steps": 320} | wrong))  # type: ignore[arg-type]


@pytest.mark.parametrize("begun", ["fp32", "ternary"])
def test_a_small_update_stays_whole_where_the_round_trip_is_most_of_it(begun: str) -> None:
    state = initial(Bounds(20, 320, streams=2), begun)
    _, _, chosen = run([100.0] * 60, state, model_bytes=1_800, step_seconds=0.0005)
    assert chosen[-1].codec == "fp32"
    assert chosen[-1].interval_steps == 160, "the round trip of 50 ms is hidden by more compute, not by fewer bits"
