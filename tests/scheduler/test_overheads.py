"""What a job in stages takes besides its steps: more bytes and more ends never take less, and the parts are the sum."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler import Plan, PlannedPartition, Snapshot
from scheduler._cost_model import slice_ends
from scheduler._link import PRIOR_RTT_MS
from scheduler._overheads import Overheads, overheads
from scheduler.tuning import TaskProfile
from tests.scheduler.test_pipelined import cut, deep, snapshot
from tests.scheduler.test_plan import demand, planned

RATES = {"stored_bytes_per_second": 3e8, "fresh_bytes_per_second": 1e9}
SECONDS = ("first_model", "first_step", "round_end", "leave", "enter", "again", "result")


def measured(profile: TaskProfile, *, state: float = 1.0, make: float = 0.1, **more: Any) -> TaskProfile:
    """One that says what storing takes."""
    layers = tuple(
        {**layer, "optimizer_bytes": state * float(layer["parameter_bytes"]), "make_seconds": make}
        for layer in profile.layers
    )
    return replace(profile, layers=layers, **{**RATES, **more})


def known(**more: Any) -> Snapshot:
    found = snapshot(900.0)
    profiles = {name: measured(one, **more) for name, one in found.profiles.items()}
    return replace(found, profiles=profiles, start_seconds=2.0, start_of_run=False)


def staged(found: Snapshot | None = None) -> PlannedPartition:
    return cut(planned(found or known(), demand(parallelism="pipeline", stages=3, workers=3)))[0]


def told(part: PlannedPartition, profile: TaskProfile) -> tuple[float, ...]:
    found = overheads(part.pipeline, profile)
    return tuple(float(getattr(found, name)) for name in SECONDS)


def test_nothing_is_predicted_of_what_was_not_measured() -> None:
    part = staged()
    assert overheads(part.pipeline, None) == Overheads()
    assert overheads(part.pipeline, deep("a")) == Overheads()
    whole = overheads(None, measured(deep("a")))
    assert whole == Overheads(again=deep("a").again_seconds)
    assert min(told(part, measured(deep("a")))) > 0.0


@given(
    more=st.floats(1.0, 50.0),
    cores=st.sampled_from([0.0, 1.0, 2.0, 16.0]),
    state=st.floats(0.0, 2.0),
    grown=st.sampled_from(["parameter_bytes", "optimizer_bytes", "make_seconds"]),
)
def test_it_grows_with_what_is_moved_and_with_slowness(more: float, cores: float, state: float, grown: str) -> None:
    part = staged()
    one = measured(deep("a"), state=state)
    one = replace(one, channel=replace(one.channel, cores=cores))
    layers = tuple({**layer, grown: more * float(layer[grown])} for layer in one.layers)
    before = told(part, one)
    for other in (
        replace(one, layers=layers),
        replace(one, stored_bytes_per_second=one.stored_bytes_per_second / more),
        replace(one, fresh_bytes_per_second=one.fresh_bytes_per_second / more),
        replace(one, channel=replace(one.channel, up_bytes_per_second=one.channel.up_bytes_per_second / more)),
    ):
        assert all(a <= b * (1 + 1e-9) for a, b in zip(before, told(part, other), strict=True))


@given(
    work=st.floats(0.0, 1e4),
    more=st.floats(0.0, 1e3),
    limit=st.floats(1.0, 900.0),
    longer=st.floats(0.0, 900.0),
    step=st.floats(0.01, 30.0),
    enter=st.floats(0.0, 60.0),
)
def test_more_work_and_shorter_slices_mean_no_fewer_ends(
    work: float, more: float, limit: float, longer: float, step: float, enter: float
) -> None:
    own = Overheads(enter=enter)
    ends = slice_ends(work, limit, step, own)
    assert 0 <= ends <= slice_ends(work + more, limit, step, own)
    assert ends >= slice_ends(work, limit + longer, step, own)
    assert ends <= slice_ends(work, limit, step, Overheads(enter=enter + more))
    # However short the slice, an invocation makes a step.
    assert ends <= math.ceil(work / step)


@pytest.mark.parametrize("slice_seconds", [20.0, 600.0])
@pytest.mark.parametrize("exchange", ["synchronous", "background"])
def test_the_parts_are_the_whole(slice_seconds: float, exchange: str) -> None:
    asked = demand(parallelism="pipeline", stages=3, workers=3, slice_seconds=slice_seconds, exchange=exchange)
    for found in (planned(known(), asked), planned(snapshot(900.0), asked), planned(snapshot(300.0), demand())):
        phases = found.estimate.phases
        assert sum(phase.seconds for phase in phases) == pytest.approx(found.estimate.seconds.expected)
        assert all(phase.seconds > 0.0 and phase.times >= 1 for phase in phases)


def seconds(found: Plan) -> dict[str, float]:
    return {phase.name: phase.seconds for phase in found.estimate.phases}


def test_what_each_part_follows_from() -> None:
    common = {"parallelism": "pipeline", "stages": 3, "workers": 3, "exchange": "synchronous"}
    asked = demand(**common, slice_seconds=600.0)
    plain = planned(known(), asked)
    assert {"first model", "ends of rounds", "result", "steps"} <= set(seconds(plain))
    assert "ends of invocations" not in seconds(plain)
    sliced = planned(known(), replace(asked, slice_seconds=5.0))
    assert seconds(sliced)["ends of invocations"] > 0.0
    assert sliced.estimate.usd.expected > plain.estimate.usd.expected, "more calls, and workers that load"
    often = planned(known(), replace(asked, interval=max(1, plain.interval // 4)))
    assert often.rounds > plain.rounds
    assert seconds(often)["ends of rounds"] == pytest.approx(
        seconds(plain)["ends of rounds"] * often.rounds / plain.rounds
    )
    beside = planned(known(), replace(asked, exchange="background"))
    assert "ends of rounds" not in seconds(beside)


def test_a_run_has_told_its_start_with_the_first_model() -> None:
    asked = demand(parallelism="pipeline", stages=3, workers=3)
    by_profile, by_run = planned(known(), asked), planned(replace(known(), start_of_run=True), asked)
    own = staged()
    more = overheads(own.pipeline, known().profiles["a"]).first_model
    contact = 3 * PRIOR_RTT_MS / 1e3
    assert seconds(by_profile)["first model"] == pytest.approx(more + contact)
    assert "first model" not in seconds(by_run)


def test_functions_are_not_paid_for_while_the_result_travels() -> None:
    asked = demand(parallelism="pipeline", stages=3, workers=3, slice_seconds=600.0)
    found = planned(known(), asked)
    spent = {item.item: item.quantity for item in found.estimate.items if item.region == "a"}
    part = next(part for part in found.partitions if part.region == "a")
    busy = found.estimate.seconds.expected - seconds(found)["start"] - seconds(found)["result"]
    assert spent["function-seconds"] == pytest.approx(part.workers * part.memory_mb / 1024 * busy)
