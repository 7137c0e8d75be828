"""Whom merges wait for."""

from __future__ import annotations

import pytest

from sync.ps.attendance import Attendance, Punctuality


def test_a_region_is_waited_for_again_once_it_has_kept_up() -> None:
    attendance = Attendance()
    attendance.gave_up(["b"])
    assert attendance.absent == ("b",)
    attendance.merged("b", in_time=False)
    assert attendance.absent == ("b",)
    attendance.merged("b", in_time=True)
    assert attendance.absent == ()


def test_each_absence_doubles_the_rounds_in_a_row_that_it_must_keep_up_for() -> None:
    attendance = Attendance()
    for absence in range(8):
        attendance.gave_up(["b"])
        attendance.merged("b", in_time=True)
        if absence:
            attendance.merged("b", in_time=False)
        rounds = 0
        while attendance.absent:
            attendance.merged("b", in_time=True)
            rounds += 1
        assert rounds == (min(2**absence, 32) if absence else 0)


def test_patience_lasts_two_and_a_half_of_the_usual_gaps() -> None:
    punctuality = Punctuality()
    for now in range(10):
        punctuality.came("b", float(now))
    assert punctuality.patience_seconds(["b"], 9.5) == pytest.approx(2.0)
    assert punctuality.patience_seconds(["b"], 60.0) == pytest.approx(0.1)


def test_an_absence_is_no_habit() -> None:
    punctuality = Punctuality()
    for now in (0.0, 1.0, 2.0, 1000.0):
        punctuality.came("b", now)
    assert punctuality.patience_seconds(["b"], 1000.0) < 5.0


def test_a_region_that_has_not_begun_gets_some_seconds() -> None:
    assert Punctuality().patience_seconds(["b"], 5.0) == pytest.approx(10.0)
