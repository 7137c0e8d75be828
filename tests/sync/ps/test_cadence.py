"""A faster region keeps in step with a slower one, and waits for nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.federation_in_miniature import Miniature, Site
from support.rounds_in_miniature import go, lose_patience, round_of

from sync.ps.core.actions import StartPause
from sync.ps.core.cadence import Cadence, Tempo

ALL = ("r0", "r1", "r2")


def _tempo(**seconds: float) -> Tempo:
    tempo = Tempo()
    for region, took in seconds.items():
        for _ in range(3):
            tempo.made(region, took)
    return tempo


def test_slower_is_who_takes_longer_by_more_than_rounds_differ() -> None:
    tempo = _tempo(a=1.0, b=1.09, c=1.5, d=0.5)
    assert tempo.slower_than("a", ["b", "c", "d", "unknown"]) == {"c": 1.5}
    assert tempo.slower_than("unknown", ["c"]) == {}


@given(st.lists(st.tuples(*[st.floats(0.96, 1.05)] * 3), min_size=5, max_size=40))
def test_regions_of_one_pace_do_not_wait_for_each_others_bad_rounds(rounds: list[tuple[float, float, float]]) -> None:
    tempo = Tempo()
    for took in rounds:
        for region, seconds in zip("abc", took, strict=True):
            tempo.made(region, seconds)
        assert all(not tempo.slower_than(region, set("abc") - {region}) for region in "abc")


def test_a_region_that_does_not_say_how_long_it_takes_is_not_slower() -> None:
    tempo = _tempo(a=1.0)
    for _ in range(9):
        tempo.made("old", 0.0)
    assert tempo.slower_than("a", ["old"]) == {}


def test_one_round_with_a_stopped_worker_is_no_habit() -> None:
    tempo = _tempo(a=1.0, b=1.0)
    tempo.made("b", 60.0)
    tempo.made("b", 60.0)
    assert tempo.slower_than("a", ["b"]) == {}
    tempo.made("b", 60.0)
    assert tempo.slower_than("a", ["b"]) == {"b": 60.0}


def test_what_workers_are_held_up_is_not_of_their_round() -> None:
    cadence = Cadence()
    assert cadence.next_round(10.0) == 0.0, "nobody knows when the first one began"
    for now, held in ((11.0, True), (11.5, True), (12.0, False), (13.0, True)):
        cadence.held_up(now, held)
    assert cadence.next_round(14.0) == pytest.approx(2.0)
    cadence.held_up(15.0, held=True)
    assert cadence.next_round(15.5) == pytest.approx(1.0)


@given(st.lists(st.floats(0.0, 9.0), min_size=1, max_size=20), st.floats(0.0, 2.0))
def test_a_round_takes_as_long_whatever_holds_its_workers_up(holds: list[float], beside: float) -> None:
    """Rounds of four seconds, of which they make the first beside what holds them up at the end of the one before."""
    cadence, end = Cadence(), 0.0
    cadence.next_round(0.0, beside)
    for held in holds:
        end += 4.0
        cadence.held_up(end, held=True)
        assert cadence.next_round(end + held, beside) == pytest.approx(4.0)
        end += max(0.0, held - beside)


def test_a_round_ends_when_that_of_the_slower_region_does() -> None:
    cadence = Cadence()
    cadence.next_round(100.0)
    cadence.came("b", 7, 100.5)
    # Its round 7 was made at 100.2, and the next one will be 2 s later.
    assert cadence.pause_seconds(8, "b", 2.0, 0.3, 101.0) == pytest.approx(1.2)
    # It is there already.
    assert cadence.pause_seconds(7, "b", 2.0, 0.3, 101.0) == 0.0
    # What is sent again, or for the first time after others, tells nothing.
    cadence.came("b", 6, 103.0)
    assert cadence.pause_seconds(8, "b", 2.0, 0.3, 101.0) == pytest.approx(1.2)


def test_nobody_keeps_step_with_a_region_of_which_nothing_has_come() -> None:
    cadence = Cadence()
    assert cadence.pause_seconds(4, "b", 9.0, 0.0, 1.0) == 0.0
    cadence.next_round(0.0)
    assert cadence.pause_seconds(4, "b", 9.0, 0.0, 1.0) == 0.0


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
    cadence, now = Cadence(), 1e5
    cadence.came("b", 5, now - since)
    cadence.next_round(now)
    pause = cadence.pause_seconds(5 + behind, "b", seconds, way, now + worked * seconds)
    assert pause >= 0.0
    assert worked * seconds + pause <= 1.25 * seconds + 1e-6


@given(faster=st.floats(0.5, 0.95), lead=st.floats(0.0, 2.0), way=st.floats(0.0, 1.0))
def test_a_faster_region_comes_into_step_and_is_never_later_than_the_slower_one(
    faster: float, lead: float, way: float
) -> None:
    """It also begins earlier; the other's rounds take a second, and its updates their way."""
    cadence, ends = Cadence(), [lead + number for number in range(80)]
    now, told = 0.0, 1
    cadence.next_round(now)
    for sequence in range(1, 61):
        now += faster
        while ends[told] + way <= now:
            cadence.came("b", told, ends[told] + way)
            told += 1
        now += cadence.pause_seconds(sequence, "b", 1.0, way, now)
        cadence.next_round(now)
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
    paused = [action for action in site.work if isinstance(action, StartPause)]
    return paused[0].slower if paused else ()


def test_a_region_keeps_step_with_all_that_are_slower(regions: Miniature) -> None:
    go(regions, ALL, 3, pause=True)
    assert _pause(regions.sites["r0"]) == (("r1", 2.0), ("r2", 1.5))
    assert _pause(regions.sites["r2"]) == (("r1", 2.0),)
    assert _pause(regions.sites["r1"]) == ()
    machine = regions.sites["r0"].machine
    assert machine is not None
    assert machine.held_up
    assert machine.progress.phase == "exchanging"
    assert machine.progress.condition == "in step with r1, r2"


def test_it_goes_on_once_they_end_their_round_too(regions: Miniature) -> None:
    here = regions.sites["r0"]
    go(regions, ALL, 1, pause=True)
    before = round_of(here)
    go(regions, ALL, 5, pause=True)
    assert round_of(here) == before
    here.do_work()
    go(regions, ALL, 1, pause=True)
    assert round_of(here) == before + 1
    assert here.machine is not None
    assert not here.machine.held_up


def test_nobody_keeps_step_with_a_region_that_does_not_come(regions: Miniature) -> None:
    go(regions, ("r0", "r2"), 10)
    for name in ("r0", "r2"):
        assert lose_patience(regions.sites[name]).regions == ("r1",)
    go(regions, ("r0", "r2"), 3, pause=True)
    assert _pause(regions.sites["r0"]) == (("r2", 1.5),)
    assert _pause(regions.sites["r2"]) == ()


def test_a_quorum_says_how_far_a_region_may_be_ahead() -> None:
    made = Miniature(3, 1, 160, 1, 0, quorum=2)
    for name, seconds in zip(ALL, (1.0, 2.0, 1.5), strict=True):
        made.sites[name].round_seconds = seconds
    go(made, ALL, 12, pause=True)
    assert not any(isinstance(action, StartPause) for site in made.sites.values() for action in site.work)
    assert round_of(made.sites["r0"]) > 4
