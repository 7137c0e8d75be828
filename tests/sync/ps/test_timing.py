"""The times that the waiting policy remembers."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sync.ps.core.timing import SoloPacing, UpdateGaps, WaitBudget
from sync.ps.core.waiting_settings import WaitingSettings

SETTINGS = WaitingSettings()
NO_MINIMUM = WaitingSettings(min_late_seconds=0.0, min_budget_seconds=0.0)


def test_patience_lasts_two_and_a_half_of_the_usual_gaps() -> None:
    gaps = UpdateGaps(NO_MINIMUM)
    for now in range(10):
        gaps.came("b", float(now))
    assert gaps.late_at(["b"], 9.5) - 9.5 == pytest.approx(2.0)
    assert gaps.late_at(["b"], 60.0) - 60.0 < 0


def test_nobody_is_held_up_at_once_for_much_longer_than_a_round_of_the_slowest() -> None:
    gaps = UpdateGaps(NO_MINIMUM)
    assert gaps.longest_hold_seconds("a", ["b"]) == math.inf, "nobody's pace is known"
    for now in range(10):
        gaps.came("a", float(now))
    assert gaps.longest_hold_seconds("a", ["b"]) == math.inf, "the late one's pace is not known"
    for now in range(10):
        gaps.came("b", 2.0 * now)
        gaps.came("c", 9.0 * now)
    assert gaps.longest_hold_seconds("a", ["b"]) == pytest.approx(2.5)
    assert gaps.longest_hold_seconds("b", ["a"]) == pytest.approx(2.5)
    longer = UpdateGaps(WaitingSettings(min_late_seconds=4.0))
    for now in range(10):
        longer.came("a", float(now))
        longer.came("b", 2.0 * now)
    assert longer.longest_hold_seconds("a", ["b"]) == 4.0


def test_an_absence_is_no_habit() -> None:
    gaps = UpdateGaps(NO_MINIMUM)
    for now in (0.0, 1.0, 2.0, 1000.0):
        gaps.came("b", now)
    assert gaps.late_at(["b"], 1000.0) - 1000.0 < 5.0


def test_where_nothing_has_come_yet_regions_get_some_seconds_from_when_they_are_waited_for() -> None:
    gaps = UpdateGaps(NO_MINIMUM)
    assert gaps.late_at(["b"], 5.0) - 5.0 == pytest.approx(10.0)
    assert gaps.late_at(["b"], 14.0) - 14.0 == pytest.approx(1.0)


def test_a_region_whose_pace_is_not_known_has_that_of_the_others() -> None:
    gaps = UpdateGaps(NO_MINIMUM)
    for now in range(10):
        gaps.came("c", float(now))
    gaps.came("b", 9.0)
    assert gaps.late_at(["b"], 9.0) - 9.0 == pytest.approx(2.5)


def test_grace_times_take_little_of_the_time_and_of_a_round_at_once() -> None:
    budget, now, held = WaitBudget(NO_MINIMUM), 0.0, 0.0
    for _ in range(5000):
        now += 0.5
        seconds = budget.grace_seconds(now, 0.5)
        assert seconds <= 0.03
        now, held = now + seconds, held + seconds
        budget.end(now)
    assert held == pytest.approx(0.005 * now, rel=0.05)


def test_what_was_not_taken_is_there_for_the_next() -> None:
    budget = WaitBudget(NO_MINIMUM)
    assert budget.hold_seconds(0.0, 10.0, 0.0) == pytest.approx(2.5), "a quarter of a round is there at first"
    budget.end(2.5)
    assert budget.hold_seconds(100.0, 10.0, 100.0) == pytest.approx(0.5)
    budget.end(100.0)
    budget.end(300.0)
    assert budget.hold_seconds(200.0, 10.0, 200.0) == pytest.approx(1.0)


def test_grace_times_leave_most_of_the_budget_for_regions_that_would_be_left_out() -> None:
    budget = WaitBudget(NO_MINIMUM)
    assert budget.grace_seconds(0.0, 10.0) == pytest.approx(0.6)
    budget.end(0.6)
    assert budget.grace_seconds(1.0, 10.0) == pytest.approx(0.005)
    assert budget.hold_seconds(1.0, 10.0, 1.0) == pytest.approx(1.905)
    budget.end(3.0)
    assert budget.grace_seconds(3.0, 10.0) == 0.0
    budget.end(3.0)
    assert budget.grace_seconds(600.0, 10.0) == pytest.approx(0.6)


def test_only_what_passes_after_an_update_was_due_counts() -> None:
    budget = WaitBudget(NO_MINIMUM)
    for begun in range(0, 100, 10):
        assert budget.hold_seconds(begun, 10.0, begun + 5.0) == pytest.approx(2.5)
        budget.end(begun + 4.9)
    budget.hold_seconds(100.0, 10.0, 105.0)
    budget.end(106.0)
    assert budget.hold_seconds(108.0, 10.0, 108.0) == pytest.approx(1.54)


@given(
    st.lists(
        st.tuples(st.floats(0.0, 100.0), st.floats(0.0, 30.0), st.floats(0.0, 5.0), st.floats(0.0, 2.0), st.booleans()),
        max_size=60,
    ),
    st.floats(0.0, 1.0),
)
def test_all_the_while_no_more_passes_than_a_quarter_of_a_round_and_a_two_hundredth(
    holds: list[tuple[float, float, float, float, bool]], least: float
) -> None:
    budget, now, held, longest = WaitBudget(WaitingSettings(min_budget_seconds=least)), 0.0, 0.0, 0.0
    for between, round_seconds, due, taken, grace in holds:
        now, longest = now + between, max(longest, round_seconds)
        if grace:
            allowed, due = budget.grace_seconds(now, round_seconds), 0.0
        else:
            allowed = budget.hold_seconds(now, round_seconds, now + due)
        passes = min(allowed, taken)
        now, held = now + due + passes, held + passes
        budget.end(now)
        assert held <= max(least, 0.25 * longest) + 0.005 * now + 1e-6


def test_the_next_update_is_due_after_one_and_a_half_of_the_usual_gaps() -> None:
    gaps = UpdateGaps(NO_MINIMUM)
    assert gaps.due_at(["b"], 3.0) == 3.0, "its pace is not known"
    for now in range(10):
        gaps.came("b", float(now))
        gaps.came("c", 2.0 * now)
    assert gaps.due_at(["b"], 9.5) == pytest.approx(10.5)
    assert gaps.due_at(["b"], 12.0) == 12.0
    assert gaps.due_at(["b", "c"], 12.0) == pytest.approx(21.0)
    assert gaps.due_at([], 12.0) == 12.0


def test_only_what_is_slow_is_due_later_than_now() -> None:
    """Who keeps our pace and is late has been away: waiting for it is lost for good."""
    gaps = UpdateGaps(NO_MINIMUM)
    for now in range(10):
        gaps.came("b", float(now))
        gaps.came("c", 2.0 * now)
    assert gaps.due_at(["b"], 9.5, round_seconds=1.0) == 9.5
    assert gaps.due_at(["b"], 9.5, round_seconds=0.8) == pytest.approx(10.5)
    assert gaps.due_at(["b", "c"], 9.5, round_seconds=1.0) == pytest.approx(21.0)


def test_an_absence_makes_nobody_slow() -> None:
    gaps = UpdateGaps(NO_MINIMUM)
    for now in (0.0, 1.0, 2.0, 3.0, 9.0, 10.0):
        gaps.came("b", now)
    assert gaps.due_at(["b"], 10.1, round_seconds=1.0) == 10.1
    assert gaps.due_at(["b"], 10.1) == pytest.approx(11.5)


def _pause_seconds(pace: SoloPacing, sequence: int, now: float, gap_seconds: float) -> float:
    return max(0.0, pace.round_at(sequence, now, gap_seconds) - now)


def test_rounds_made_alone_are_a_tenth_nearer_than_usual_at_most() -> None:
    pace, now = SoloPacing(SETTINGS), 100.0
    for sequence in range(7, 107):
        now += _pause_seconds(pace, sequence, now, 2.0) + 0.1
    assert now - 100.0 == pytest.approx(99 * 1.8 + 0.1)


def test_rounds_that_take_as_long_alone_as_with_others_are_not_held_up() -> None:
    pace, now, held = SoloPacing(SETTINGS), 0.0, 0.0
    for sequence in range(100):
        now += 2.5 if sequence % 2 else 1.5
        pause = _pause_seconds(pace, sequence, now, 2.0)
        now, held = now + pause, held + pause
    assert held == 0.0


def test_a_region_that_is_alone_again_begins_again() -> None:
    pace = SoloPacing(SETTINGS)
    assert _pause_seconds(pace, 1, 10.0, 2.0) == 0.0
    assert _pause_seconds(pace, 2, 10.0, 2.0) == pytest.approx(1.8)
    assert _pause_seconds(pace, 9, 10.5, 4.0) == 0.0
    assert _pause_seconds(pace, 10, 10.5, 4.0) == pytest.approx(3.6)


def test_where_no_pace_is_known_it_is_that_of_the_own_work() -> None:
    gaps = UpdateGaps(NO_MINIMUM)
    assert gaps.late_at(["b"], 0.0, round_seconds=60.0) == pytest.approx(150.0)
    assert UpdateGaps(NO_MINIMUM).late_at(["b"], 0.0, round_seconds=0.1) == pytest.approx(10.0)


def test_a_pace_that_is_not_known_is_taken_up_once_it_is() -> None:
    pace = SoloPacing(SETTINGS)
    assert _pause_seconds(pace, 3, 0.0, 0.0) == 0.0
    assert _pause_seconds(pace, 4, 1.0, 10.0) == 0.0
    assert _pause_seconds(pace, 5, 2.0, 10.0) == pytest.approx(8.0)
    assert _pause_seconds(pace, 6, 10.0, 90.0) == pytest.approx(9.0)
