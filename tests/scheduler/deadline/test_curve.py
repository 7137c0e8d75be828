"""Curves hold what was measured."""

from __future__ import annotations

import math

import pytest

from scheduler.deadline import SpeedCurve, curve_from_table


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
