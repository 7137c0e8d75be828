"""A faster region keeps in step with a slower one, and waits for nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.federation_in_miniature import Miniature, Site
from support.rounds_in_miniature import go, policy_of, round_of, timers

from sync.ps.core.actions import WaitReason
from sync.ps.core.background import Background
from sync.ps.core.events import BoundaryArrived, Configured
from sync.ps.core.machine import Recovered, Setup
from sync.ps.core.timing import RoundClock, RoundDurations
from sync.ps.core.waiting_settings import WaitingSettings

ALL = ("r0", "r1", "r2")
SETTINGS = WaitingSettings()


def _durations(**seconds: float) -> RoundDurations:
    durations = RoundDurations(SETTINGS)
    for region, took in seconds.items():
        for _ in range(3):
            durations.ended(region, took)
    return durations


def _pause_seconds(clock: RoundClock, sequence: int, round_seconds: float, way_seconds: float, now: float) -> float:
    return max(0.0, clock.in_step_at(sequence, "b", round_seconds, way_seconds) - now)


def test_slower_is_who_takes_longer_by_more_than_rounds_differ() -> None:
    durations = _durations(a=1.0, b=1.09, c=1.5, d=0.5)
    assert durations.slower_than("a", ["b", "c", "d", "unknown"]) == {"c": 1.5}
    assert durations.slower_than("unknown", ["c"]) == {}


@given(st.lists(st.tuples(*[st.floats(0.96, 1.05)] * 3), min_size=5, max_size=40))
def test_regions_of_one_pace_do_not_wait_for_each_others_bad_rounds(rounds: list[tuple[float, float, float]]) -> None:
    durations = RoundDurations(SETTINGS)
    for took in rounds:
        for region, seconds in zip("abc", took, strict=True):
            durations.ended(region, seconds)
        assert all(not durations.slower_than(region, set("abc") - {region}) for region in "abc")


def test_a_region_that_does_not_say_how_long_it_takes_is_not_slower() -> None:
    durations = _durations(a=1.0)
    for _ in range(9):
        durations.ended("old", 0.0)
    assert durations.slower_than("a", ["old"]) == {}


def test_one_round_with_a_stopped_worker_is_no_habit() -> None:
    durations = _durations(a=1.0, b=1.0)
    durations.ended("b", 60.0)
    durations.ended("b", 60.0)
    assert durations.slower_than("a", ["b"]) == {}
    durations.ended("b", 60.0)
    assert durations.slower_than("a", ["b"]) == {"b": 60.0}


def test_what_workers_are_held_up_is_not_of_their_round() -> None:
    clock = RoundClock(SETTINGS)
    assert clock.next_round(10.0) == 0.0, "nobody knows when the first one began"
    for now, held in ((11.0, True), (11.5, True), (12.0, False), (13.0, True)):
        clock.held(now, held)
    assert clock.next_round(14.0) == pytest.approx(2.0)
    clock.held(15.0, held=True)
    assert clock.next_round(15.5) == pytest.approx(1.0)


@given(st.lists(st.floats(0.0, 9.0), min_size=1, max_size=20), st.floats(0.0, 2.0))
def test_a_round_takes_as_long_whatever_holds_its_workers_up(holds: list[float], beside: float) -> None:
    """Rounds of four seconds, of which they make the first beside what holds them up at the end of the one before."""
    clock, end = RoundClock(SETTINGS), 0.0
    clock.next_round(0.0, beside)
    for held in holds:
        end += 4.0
        clock.held(end, held=True)
        assert clock.next_round(end + held, beside) == pytest.approx(4.0)
        end += max(0.0, held - beside)


def test_a_round_ends_when_that_of_the_slower_region_does() -> None:
    clock = RoundClock(SETTINGS)
    clock.next_round(100.0)
    clock.came("b", 7, 100.5)
    # Its round 7 was made at 100.2, and the next one will be 2 s later.
    assert _pause_seconds(clock, 8, 2.0, 0.3, 101.0) == pytest.approx(1.2)
    # It is there already.
    assert _pause_seconds(clock, 7, 2.0, 0.3, 101.0) == 0.0
    # What is sent again, or for the first time after others, tells nothing.
    clock.came("b", 6, 103.0)
    assert _pause_seconds(clock, 8, 2.0, 0.3, 101.0) == pytest.approx(1.2)


def test_nobody_keeps_step_with_a_region_of_which_nothing_has_come() -> None:
    clock = RoundClock(SETTINGS)
    assert _pause_seconds(clock, 4, 9.0, 0.0, 1.0) == 0.0
    clock.next_round(0.0)
    assert _pause_seconds(clock, 4, 9.0, 0.0, 1.0) == 0.0


@given(
    seconds=st.floats(0.05, 100.0),
    behind=st.integers(0, 1000),
    worked=st.floats(0.0, 1.0),
    since=st.floats(0.0, 1e4),
    way=st.floats(0.0, 100.0),
)
def test_no_round_takes_longer_than_a_quarter_more_than_that_of_the_slower(
    seconds: float, behind: int, worked: float, since: float, way: float
) -> None:
    """However far it is behind, or gone."""
    clock, now = RoundClock(SETTINGS), 1e5
    clock.came("b", 5, now - since)
    clock.next_round(now)
    pause = _pause_seconds(clock, 5 + behind, seconds, way, now + worked * seconds)
    assert pause >= 0.0
    assert worked * seconds + pause <= 1.25 * seconds + 1e-6


@given(faster=st.floats(0.5, 0.95), lead=st.floats(0.0, 2.0), way=st.floats(0.0, 1.0))
def test_a_faster_region_comes_into_step_and_is_never_later_than_the_slower_one(
    faster: float, lead: float, way: float
) -> None:
    """It also begins earlier; the other's rounds take a second, and its updates their way."""
    clock, ends = RoundClock(SETTINGS), [lead + number for number in range(80)]
    now, told = 0.0, 1
    clock.next_round(now)
    for sequence in range(1, 61):
        now += faster
        while ends[told] + way <= now:
            clock.came("b", told, ends[told] + way)
            told += 1
        now += _pause_seconds(clock, sequence, 1.0, way, now)
        clock.next_round(now)
        assert now <= ends[sequence] + 1e-6
    assert now == pytest.approx(ends[60])


# In the machine


@pytest.fixture
def regions() -> Miniature:
    """r1 is the slowest of three."""
    made = Miniature(3, 1, 160, 1, 0, quorum=0)
    for name, seconds in zip(ALL, (1.0, 2.0, 1.5), strict=True):
        made.sites[name].round_seconds = seconds
    go(made, ALL, 10)
    return made


def _pause(site: Site) -> tuple[tuple[str, float], ...]:
    """With whom it keeps step now."""
    pause = policy_of(site)._pause
    return pause.slower if pause is not None and timers(site, WaitReason.IN_STEP) else ()


def test_a_region_keeps_step_with_all_that_are_slower(regions: Miniature) -> None:
    for name in ALL:
        go(regions, (name,), 3, pause=True)
    assert _pause(regions.sites["r0"]) == (("r1", pytest.approx(2.0)), ("r2", pytest.approx(1.5)))
    assert _pause(regions.sites["r2"]) == (("r1", pytest.approx(2.0)),)
    assert _pause(regions.sites["r1"]) == ()
    machine = regions.sites["r0"].machine
    assert machine is not None
    assert machine.held_up
    assert machine.progress.phase == "exchanging"
    assert machine.progress.condition == "in step with r1, r2"


def test_it_goes_on_once_they_end_their_round_too(regions: Miniature) -> None:
    here = regions.sites["r0"]
    go(regions, ("r0",), 3, pause=True)
    before = round_of(here)
    go(regions, ("r0",), 5, pause=True)
    assert round_of(here) == before
    go(regions, ALL, 8, pause=True)
    assert round_of(here) > before


def test_nobody_keeps_step_with_a_region_that_does_not_come(regions: Miniature) -> None:
    go(regions, ("r0", "r2"), 20)
    for name in ("r0", "r2"):
        assert policy_of(regions.sites[name]).membership.absent == ("r1",)
        go(regions, (name,), 3, pause=True)
    assert _pause(regions.sites["r0"]) == (("r2", pytest.approx(1.5)),)
    assert _pause(regions.sites["r2"]) == ()


def test_a_quorum_says_how_far_a_region_may_be_ahead() -> None:
    made = Miniature(3, 1, 160, 1, 0, quorum=2)
    for name, seconds in zip(ALL, (1.0, 2.0, 1.5), strict=True):
        made.sites[name].round_seconds = seconds
    go(made, ALL, 12, pause=True)
    assert not any(timers(site, WaitReason.IN_STEP, WaitReason.ALONE) for site in made.sites.values())
    assert round_of(made.sites["r0"]) > 4


def test_an_exchange_is_hidden_by_the_rounds_of_the_slowest_with_a_quorum_too() -> None:
    made = Miniature(3, 1, 160, 1, 0, quorum=2)
    for name, seconds in zip(ALL, (1.0, 2.0, 1.5), strict=True):
        made.sites[name].round_seconds = seconds
    go(made, ALL, 12, pause=True)
    here = made.sites["r0"].machine
    assert isinstance(here, Background)
    assert here.hiding_seconds() == pytest.approx(2.0)


def test_merges_among_workers_hide_an_exchange_as_compute_does() -> None:
    machine = Background(Setup("a", ("a",), 2, 40, 4, 0, background=True), Recovered(0, model_key="model/0"))
    machine.handle(Configured(1, 1, ()))
    for worker, (computing, merging) in enumerate([(2.0, 1.0), (1.5, 1.5)]):
        machine.handle(
            BoundaryArrived(
                1 + worker, worker, 1, 1, 4, "d", "model", "state", 1.0, 0.5, computing, merge_seconds=merging
            )
        )
    assert machine.step_seconds == pytest.approx(0.75)
