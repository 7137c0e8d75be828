"""What is reserved meets the deadlines it was reserved for, and never exceeds what is there."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import budget

from scheduler.deadline import DeadlineJob, DeviceCapacity, Overhead, Rules, SpeedCurve
from scheduler.lab.one_region import admit, least_device_seconds
from scheduler.lab.one_region._capacity import CapacityLedger, DeviceReservation

R = "r"
FREE_CHANGES = Rules(Overhead(0.0, 0.0), margin=0.0, kept_margin=0.0)


@st.composite
def curves(draw: st.DrawFn) -> SpeedCurve:
    """Ascending, not always concave."""
    count = draw(st.integers(1, 6))
    steps = draw(st.lists(st.floats(0.05, 3.0), min_size=count, max_size=count))
    return SpeedCurve(tuple(2**i for i in range(count)), tuple(float(rate) for rate in np.cumsum(steps)))


@st.composite
def regions(draw: st.DrawFn) -> tuple[DeviceCapacity, list[DeadlineJob]]:
    capacity = DeviceCapacity(draw(st.integers(1, 48)), ((500.0, draw(st.integers(1, 48))),))
    jobs = []
    for number in range(draw(st.integers(1, 12))):
        curve = draw(curves())
        window = draw(st.floats(20, 3000))
        work = draw(st.floats(0.02, 1.3)) * window * curve.rate(draw(st.sampled_from(curve.levels)))
        share = draw(st.sampled_from((0, 0, *curve.levels)))
        jobs.append(DeadlineJob(f"j{number}", {R: curve}, work, window, R, share, user=draw(st.sampled_from("ab"))))
    return capacity, jobs


def done_by(held: DeviceReservation, curve: SpeedCurve, now: float, until_s: float) -> float:
    """Steps that a reservation makes, by its shares at every instant at which they may change."""
    points = [now, held.switch_s, held.end_s, until_s, *([] if held.times is None else held.times.tolist())]
    times = sorted({at for at in points if now <= at <= until_s and math.isfinite(at)})
    return sum((b - a) * curve.rate(held.share_at((a + b) / 2)) for a, b in pairwise(times))


def check(ledger: CapacityLedger, capacity: DeviceCapacity, jobs: list[DeadlineJob]) -> None:
    assert ledger.free.min() >= 0
    for at in ledger.times:
        there = capacity.changes[0][1] if at >= capacity.changes[0][0] else capacity.devices
        held = sum(ledger.reservations[job.name].share_at(float(at)) for job in jobs)
        index = int(ledger.times.searchsorted(at))
        assert held + ledger.free[index] == there
    for job in jobs:
        held = ledger.reservations[job.name]
        if not held.late:
            assert done_by(held, job.curves[R], ledger.now, job.deadline_s) >= job.work * (1 - 1e-9)


@settings(max_examples=budget(60), deadline=None)
@given(regions(), st.booleans())
def test_every_promise_is_covered_and_nothing_is_given_twice(
    region: tuple[DeviceCapacity, list[DeadlineJob]], pauses: bool
) -> None:
    capacity, jobs = region
    rules = Rules(Overhead(everyone=pauses)) if pauses else FREE_CHANGES
    answer = admit(0.0, {R: capacity}, (), [replace(job, share=0) for job in jobs], rules)
    promised = list(answer.promised)
    check(answer.ledgers[R], capacity, promised)
    # The same holds when all is filled again, with shares that run already.
    shares = {job.name: job.share for job in jobs}
    running = [replace(job, share=min(shares[job.name], capacity.devices)) for job in promised]
    again = admit(0.0, {R: capacity}, running, (), rules)
    check(again.ledgers[R], capacity, running)


@settings(max_examples=budget(60), deadline=None)
@given(curves(), st.floats(50, 5000), st.floats(0.05, 0.98))
def test_alone_a_job_takes_no_more_than_any_single_level(curve: SpeedCurve, window: float, part: float) -> None:
    job = DeadlineJob("j", {R: curve}, part * window * curve.rates[-1], window)
    answer = admit(0.0, {R: DeviceCapacity(64)}, (), [job], FREE_CHANGES)
    taken = answer.ledgers[R].reservations["j"].device_seconds(0.0)
    for level, rate in zip(curve.levels, curve.rates, strict=True):
        if job.work / rate <= window:
            # A rise that would be soon comes at once, which takes a little more.
            assert taken <= level * max(job.work / rate, 0.0) * 1.06 + 0.03 * window * curve.levels[-1] + 5 * level


def test_two_neighbouring_levels_the_smaller_first() -> None:
    curve = SpeedCurve((1, 2, 4), (1.0, 1.8, 3.0))
    job = DeadlineJob("j", {R: curve}, 1400.0, 1000.0)
    answer = admit(0.0, {R: DeviceCapacity(8)}, (), [job], FREE_CHANGES)
    held = answer.ledgers[R].reservations["j"]
    assert (held.first, held.switch_s, held.second) == (1, 500.0, 2)
    assert held.device_seconds(0.0) == 1500.0
    assert held.increase_s(1) == 500.0
    assert math.isinf(held.increase_s(2))


def test_a_running_job_keeps_the_larger_level_first_and_changes_once() -> None:
    curve = SpeedCurve((1, 2, 4), (1.0, 1.8, 3.0))
    job = DeadlineJob("j", {R: curve}, 1400.0, 1000.0, R, share=2)
    held = admit(0.0, {R: DeviceCapacity(8)}, [job], (), FREE_CHANGES).ledgers[R].reservations["j"]
    assert held.share() == 2


def test_levels_that_a_mixture_beats_are_passed_over() -> None:
    table = SpeedCurve((1, 2, 4), (0.7, 1.2, 2.6))
    assert table.lean == (0, 2)
    assert least_device_seconds(DeadlineJob("j", {R: table}, 1200.0, 1000.0), table, 0.0) < 2 * 1000.0


def test_what_changes_take_is_in_the_plan() -> None:
    curve = SpeedCurve((1,), (1.0,))
    overhead = Overhead(base_s=10.0, doubling_s=0.0)
    rules = Rules(overhead, margin=0.0, kept_margin=0.0)
    assert not admit(0.0, {R: DeviceCapacity(1)}, (), [DeadlineJob("j", {R: curve}, 95.0, 100.0)], rules).promised
    assert admit(0.0, {R: DeviceCapacity(1)}, (), [DeadlineJob("j", {R: curve}, 89.0, 100.0)], rules).promised


def test_a_promise_in_danger_gets_what_there_is() -> None:
    curve = SpeedCurve((1, 2), (1.0, 2.0))
    lost = DeadlineJob("lost", {R: curve}, 500.0, 100.0, R, share=2)
    other = DeadlineJob("other", {R: curve}, 50.0, 400.0, R, share=1)
    ledger = admit(0.0, {R: DeviceCapacity(3)}, [lost, other], (), FREE_CHANGES).ledgers[R]
    assert ledger.reservations["lost"].late
    assert ledger.reservations["lost"].share() == 2
    assert ledger.reservations["lost"].end_s == 250.0
    assert not ledger.reservations["other"].late


def test_capacity_that_will_go_is_not_promised() -> None:
    curve = SpeedCurve((1, 2, 4), (1.0, 2.0, 4.0))
    job = DeadlineJob("j", {R: curve}, 400.0, 100.0)
    assert admit(0.0, {R: DeviceCapacity(4)}, (), [job], FREE_CHANGES).promised
    assert not admit(0.0, {R: DeviceCapacity(4, ((50.0, 1),))}, (), [job], FREE_CHANGES).promised


@pytest.mark.slow
def test_many_jobs_on_a_grid_of_instants_are_covered_too() -> None:
    draw = np.random.default_rng(4)
    curve = SpeedCurve((1, 2, 4, 8), (1.0, 1.9, 3.4, 5.0))
    windows = draw.lognormal(8.0, 1.0, 1800) + 30.0
    parts, levels = draw.uniform(0.3, 0.9, 1800), draw.choice(curve.levels[:3], 1800)
    jobs = [
        DeadlineJob(
            f"j{i}", {R: curve}, float(part * window * curve.rate(int(level))), float(window), R, int(draw.integers(2))
        )
        for i, (window, part, level) in enumerate(zip(windows, parts, levels, strict=True))
    ]
    capacity = DeviceCapacity(4500, ((1e9, 4500),))
    ledger = admit(0.0, {R: capacity}, jobs, (), Rules()).ledgers[R]
    assert not ledger.without_margin
    assert len(ledger.times) < 3000, "a grid"
    check(ledger, capacity, jobs)


@pytest.mark.parametrize("seed", range(3))
def test_giving_back_undoes_taking(seed: int) -> None:
    draw = np.random.default_rng(seed)
    curve = SpeedCurve((1, 2, 4), (1.0, 1.9, 3.1))
    jobs = [
        DeadlineJob(f"j{i}", {R: curve}, float(draw.uniform(50, 900)), float(draw.uniform(300, 2000)))
        for i in range(12)
    ]
    answer = admit(0.0, {R: DeviceCapacity(9)}, (), jobs, FREE_CHANGES)
    ledger = answer.ledgers[R]
    for job in answer.promised:
        ledger.release(job.name)
    assert (ledger.free == 9).all()
