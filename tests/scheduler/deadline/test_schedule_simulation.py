"""What will happen is played to the end with every pause; each case can be reckoned by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import budget

from scheduler.deadline import Overhead
from scheduler.deadline._schedule_simulation import Plan, ScheduledJob, simulate_schedule

ALL = Overhead(2.0, 0.0, everyone=True)
OWN = Overhead(2.0, 0.0)


def going(
    name: str, left: float, deadline_s: float = 1e6, level: int = 0, plan: Plan = (), ready_s: float = -math.inf
) -> ScheduledJob:
    """One step a second for each device."""
    return ScheduledJob(name, left, deadline_s, level, ready_s, plan, float, lambda level: ((0, level),))


def devices(count: int, *later: tuple[float, int]) -> tuple[tuple[float, tuple[int, ...]], ...]:
    return ((0.0, (count,)), *((at, (more,)) for at, more in later))


class Moves:
    """Moves the same jobs at every change."""

    def __init__(self, moved: Sequence[str]) -> None:
        self.moved = moved

    def copy(self) -> Moves:
        return self

    def release(self, job: str) -> None:
        pass

    def arrange(self, changed: Sequence[tuple[str, int]]) -> set[str]:
        return set(self.moved) - {name for name, _ in changed}


def test_a_change_pauses_who_changes_and_where_it_is_so_everybody() -> None:
    jobs = [going("old", 100.0, level=1), going("new", 10.0, plan=((20.0, 1),))]
    own = simulate_schedule(0.0, devices(2), jobs, {"old": 1}, OWN)
    assert own.ends == {"old": 100.0, "new": 32.0}
    assert own.next_s == 20.0
    every = simulate_schedule(0.0, devices(2), jobs, {"old": 1}, ALL)
    assert every.ends == {"old": 102.0, "new": 32.0}
    assert every.plans == {"old": ((0.0, 1),), "new": ((0.0, 0), (20.0, 1))}


def test_pauses_at_the_same_time_are_not_added() -> None:
    jobs = [going("a", 10.0, level=1, ready_s=5.0), going("b", 10.0, plan=((4.0, 1),)), going("c", 10.0, level=1)]
    every = simulate_schedule(0.0, devices(3), jobs, {"a": 1, "c": 1}, ALL)
    assert every.ends == {"a": 16.0, "b": 16.0, "c": 12.0}


def test_whom_a_change_moves_pauses_too() -> None:
    jobs = [going("old", 100.0, level=1), going("new", 10.0)]
    assert simulate_schedule(0.0, devices(2), jobs, {"old": 1, "new": 1}, OWN, Moves(["old"])).ends["old"] == 102.0


def test_who_has_more_than_is_planned_falls_when_it_is_needed_and_best_effort_first() -> None:
    first = going("first", 40.0, level=2, plan=((0.0, 1),))
    rest = going("rest", 40.0, math.inf, level=1)
    rises = going("rises", 8.0, plan=((10.0, 1),))
    two = simulate_schedule(0.0, devices(3), [first, rest, rises], {"first": 2, "rest": 1}, OWN)
    assert two.plans["rest"][:2] == ((0.0, 1), (10.0, 0))
    assert two.ends["first"] == 20.0
    larger = simulate_schedule(
        0.0, devices(3), [first, rest, going("rises", 8.0, plan=((10.0, 2),))], {"first": 2, "rest": 1}, OWN
    )
    assert larger.plans["first"] == ((0.0, 2), (10.0, 1))
    assert larger.ends["first"] == 10.0 + 2.0 + 20.0


def test_who_finds_no_room_rises_when_somebody_is_done() -> None:
    jobs = [going("over", 10.5, level=1, plan=((0.0, 1),)), going("next", 5.0, 18.0, plan=((10.0, 1),))]
    schedule = simulate_schedule(0.0, devices(1), jobs, {"over": 1}, OWN)
    assert schedule.plans["next"] == ((0.0, 0), (10.5, 1))
    assert schedule.ends["next"] == 17.5
    assert schedule.holds


def test_less_room_lets_fall_and_what_cannot_be_is_told() -> None:
    grown = simulate_schedule(0.0, devices(2, (10.0, 1)), [going("a", 40.0, level=2, plan=((0.0, 1),))], {"a": 2}, OWN)
    assert grown.plans["a"] == ((0.0, 2), (10.0, 1))
    assert grown.holds
    assert not simulate_schedule(
        0.0, devices(2, (10.0, 1)), [going("a", 40.0, level=2, plan=((0.0, 2),))], {"a": 2}, OWN
    ).fits


def test_late_is_who_ends_after_the_promise_and_by_how_much() -> None:
    schedule = simulate_schedule(
        0.0, devices(2), [going("a", 10.0, 9.0, 1), going("b", 10.0, 11.0, 1)], {"a": 1, "b": 1}, OWN
    )
    assert schedule.late == {"a": pytest.approx(1.0)}
    assert not schedule.holds
    stuck = simulate_schedule(0.0, devices(2), [going("a", 10.0, 9.0)], {}, OWN)
    assert stuck.late == {"a": math.inf}


@st.composite
def planned(draw: st.DrawFn) -> list[ScheduledJob]:
    """Up to six jobs whose plans together fit six devices, as each has one at most."""
    jobs = []
    for number in range(draw(st.integers(1, 6))):
        instants = sorted(draw(st.lists(st.integers(0, 60), max_size=3, unique=True)))
        plan = tuple((float(at), draw(st.integers(0, 1))) for at in instants)
        left, level = float(draw(st.integers(1, 60))), draw(st.integers(0, 1))
        jobs.append(going(f"j{number}", left, draw(st.sampled_from([50.0, 1e6, math.inf])), level, plan))
    return jobs


@settings(max_examples=budget(300), deadline=None)
@given(planned(), st.booleans())
def test_from_any_instant_on_the_rest_of_a_schedule_is_as_the_whole_said(
    jobs: list[ScheduledJob], everyone: bool
) -> None:
    """Played step by step, each time from the state reached, it ends as when played at once."""
    overhead = Overhead(2.0, 1.0, everyone=everyone)
    whole = simulate_schedule(0.0, devices(6), jobs, {job.name: job.level for job in jobs}, overhead)
    assert whole.fits
    at, state, plans = 0.0, {job.name: job for job in jobs}, whole.plans
    while math.isfinite(
        due := simulate_schedule(at, devices(6), list(state.values()), _levels(plans, at), overhead).next_s
    ):
        turned = simulate_schedule(at, devices(6), list(state.values()), _levels(plans, at), overhead)
        changed = any(state[name].level != level for name, level in _levels(plans, at).items() if name in state)
        following = {}
        for name, job in state.items():
            level, ready_s = _levels(plans, at)[name], job.ready_s
            if level and level != job.level:
                ready_s = max(ready_s, at + overhead.seconds(level))
            elif level and changed and everyone:
                ready_s = max(ready_s, at + overhead.base_s)
            left = job.left - level * max(0.0, due - max(at, ready_s))
            if turned.ends[name] > due + 1e-6:
                following[name] = ScheduledJob(
                    name, left, job.deadline_s, level, ready_s, plans[name], job.rate, job.need
                )  # fmt: skip
            else:
                assert turned.ends[name] == pytest.approx(whole.ends[name])
        at, state = due, following
    for name, end_s in simulate_schedule(
        at, devices(6), list(state.values()), _levels(plans, at), overhead
    ).ends.items():
        if math.isfinite(state[name].deadline_s):
            assert end_s == pytest.approx(whole.ends[name])


def _levels(plans: dict[str, Plan] | object, at: float) -> dict[str, int]:
    assert isinstance(plans, dict)
    return {name: [0, *(level for since_s, level in plan if since_s <= at + 1e-9)][-1] for name, plan in plans.items()}
