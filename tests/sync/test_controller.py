"""The controller keeps communication hidden at the least loss, and does not flap."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import budget

from sync.wan._controller import (
    Bounds,
    ControllerState,
    LinkSample,
    Observation,
    Setting,
    initial,
    observe,
)

BOUNDS = Bounds(interval_steps=20, longest_steps=320)
MODEL_BYTES, STEP_SECONDS = 44_700_000, 0.1
"""ResNet-18: 2 s of compute in an interval; fp32 fits from 235 Mbit/s on, int8 from 68, topk from 2."""


LIMIT = "is the most that may be chosen"


def seen(mbps: float | None, **more: object) -> Observation:
    link = LinkSample(mbps, 50.0)
    values: dict[str, object] = {"step_seconds": STEP_SECONDS, "model_bytes": MODEL_BYTES, "links": {"eu": link}}
    return Observation(**(values | more))  # type: ignore[arg-type]


def run(
    rates: Sequence[float | None], state: ControllerState | None = None, **more: object
) -> tuple[ControllerState, list[tuple[int, str]], list[Setting]]:
    """Rounds one after another."""
    state = state or initial(BOUNDS)
    told, chosen = [], []
    for number, mbps in enumerate(rates):
        state, change = observe(state, seen(mbps, **more))
        told += [(number, change)] if change else []
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
    assert sum(LIMIT in text for _, text in told) == (mbps < 0.01)


def test_what_changes_says_why() -> None:
    _, told, _ = run([80.0] * 10)
    ((number, text),) = told
    assert number >= 2
    assert text.startswith("int8 every 20 steps: fp32 every 20 steps takes ")
    assert "80 Mbit/s to eu" in text


def test_a_link_that_collapses_and_recovers_gets_its_setting_back() -> None:
    _, told, chosen = run([1000.0] * 20 + [1.0] * 30 + [1000.0] * 60)
    assert [setting.codec for setting in (chosen[19], chosen[30], chosen[-1])] == ["fp32", "topk", "fp32"]
    assert chosen[49].interval_steps > 20
    assert chosen[-1].interval_steps == 20
    assert chosen[27].codec == "topk", "within three rounds of the collapse, and the pause"
    assert len(changes(chosen)) <= 4
    assert all("it fits now" in text for number, text in told if number > 50)


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
    state, last = initial(Bounds(20, longest, codecs)), -100
    for number, mbps in enumerate(rates):
        before = state.setting
        again = observe(state, seen(mbps))
        state, change = observe(state, seen(mbps))
        assert (state, change) == again
        setting = state.setting
        assert setting.codec in codecs
        assert 20 <= setting.interval_steps <= longest
        if number and (setting.codec, setting.interval_steps) != (before.codec, before.interval_steps):
            assert number - last >= 5
            assert change
            last = number


def test_what_the_job_file_fixes_is_never_changed() -> None:
    state = initial(Bounds(20, 20, ("int8",)))
    _, told, chosen = run([1000.0] * 10 + [0.1] * 30 + [None] * 5, state)
    assert set(chosen) == {Setting(20, "int8")}
    ((_, text),) = told
    assert LIMIT in text


def test_a_fast_link_is_not_compressed_for_where_the_codec_takes_longer_than_the_bytes_it_saves() -> None:
    slow_codecs = {"bf16": 20e6, "int8": 20e6, "ternary": 20e6, "topk": 20e6}
    _, _, chosen = run([400.0] * 40, step_seconds=0.01, codec_bytes_per_second=slow_codecs)
    assert {setting.codec for setting in chosen} == {"fp32"}
    assert chosen[-1].interval_steps == 160, "so the interval must give room"
    state = initial(BOUNDS, "int8")
    _, _, chosen = run([1000.0] * 40, state, codec_bytes_per_second=slow_codecs)
    assert chosen[-1].codec == "fp32"


def test_the_slowest_link_and_what_it_has_not_delivered_decide() -> None:
    state = initial(BOUNDS)
    for _ in range(10):
        links = {"near": LinkSample(5000.0, 5.0), "far": LinkSample(125.0, 200.0)}
        state, _ = observe(state, seen(None, links=links))
    assert state.setting.codec == "int8"
    state = initial(BOUNDS)
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
    assert observe(state, seen(None, links={}))[1] == ""
    assert state.setting == Setting(20, "fp32")


@pytest.mark.parametrize(
    "wrong", [{"codecs": ("int8", "fp32")}, {"codecs": ()}, {"codecs": ("zip",)}, {"longest_steps": 5}]
)
def test_bounds_that_cannot_be_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        Bounds(**({"interval_steps": 20, "longest_steps": 320} | wrong))  # type: ignore[arg-type]


@pytest.mark.parametrize("begun", ["fp32", "ternary"])
def test_a_small_update_stays_whole_where_the_round_trip_is_most_of_it(begun: str) -> None:
    state = initial(BOUNDS, begun)
    _, _, chosen = run([100.0] * 60, state, model_bytes=1_800, step_seconds=0.0005)
    assert chosen[-1].codec == "fp32"
    assert chosen[-1].interval_steps == 160, "the round trip of 50 ms is hidden by more compute, not by fewer bits"
