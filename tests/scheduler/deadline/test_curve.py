"""Curves hold what was measured, and what was learnt of them."""

from __future__ import annotations

import math

import pytest

from scheduler.deadline import SpeedCurve, curve_from_table
from scheduler.lab.one_region import JobStatistics


def test_only_levels_that_pay_are_kept() -> None:
    table = {1: 46.9, 2: 37.6, 4: 56.3, 8: 23.2, 16: math.nan, 32: 0.0}
    assert curve_from_table(table) == SpeedCurve((1, 4), (46.9, 56.3))
    assert curve_from_table({1: 0.0, 2: math.nan}) is None


@pytest.mark.parametrize(("levels", "rates"), [((), ()), ((1, 2), (2.0, 2.0)), ((2, 1), (1.0, 2.0)), ((1,), (0.0,))])
def test_a_curve_ascends(levels: tuple[int, ...], rates: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="curve"):
        SpeedCurve(levels, rates)


def test_nothing_is_read_between_or_beyond_levels() -> None:
    curve = SpeedCurve((2, 8), (1.0, 3.0))
    assert [curve.rate(share) for share in (0, 1, 2, 7, 8, 64)] == [0.0, 0.0, 1.0, 1.0, 3.0, 3.0]
    assert [curve.fitting(free) for free in (0, 1, 2, 7, 64)] == [0, 0, 2, 2, 8]
    assert curve.capped(4) == SpeedCurve((2,), (1.0,))
    assert curve.capped(1) is None


def test_caution_grows_with_the_error_that_was_seen_and_goes_with_it() -> None:
    curve = SpeedCurve((1, 2, 4), (1.0, 2.0, 3.5))
    statistics = JobStatistics()
    assert statistics.cautious(curve, {}) == curve
    for _ in range(20):
        statistics.record_rate(1.0, 0.9)
    assert statistics.cautious(curve, {}).rates == pytest.approx((0.9, 1.8, 3.15))
    assert statistics.cautious(curve, {2: 1.85}).rates == pytest.approx((0.9, 1.85, 3.15)), "what was seen is known"
    told = JobStatistics(curve_error=0.1)
    before = told.curve_error
    for _ in range(200):
        told.record_rate(1.0, 1.0)
    assert before == 0.1
    assert told.curve_error < 0.006


def test_prices_begin_where_demand_is_high() -> None:
    statistics = JobStatistics()
    for size in range(1, 12):
        statistics.record_request(0.0, 1000.0, 100.0 * size)
    assert math.isinf(statistics.usual_device_s(devices=100)), "a tenth of what is there"
    assert statistics.usual_device_s(devices=8) == 600.0


def test_pauses_are_forgotten() -> None:
    statistics = JobStatistics()
    statistics.record_pause(0.0, 90.0)
    assert statistics.pause_share(0.0) == pytest.approx(0.05)
    assert statistics.pause_share(3600.0) < 0.01
