"""Whom a region with background exchange continues without, in which order, and whom it waits for again."""

from __future__ import annotations

import pytest
from support.federation_in_miniature import Miniature, Site
from support.rounds_in_miniature import give_up, go, round_of, timers, waits

from sync.file_transfer.manifest import Manifest, PeerAddress
from sync.ps.core.actions import Action, Failed, LogRoundEnd, MergeUpdates, SetTimer, WaitReason
from sync.ps.core.background import Background
from sync.ps.core.events import (
    BoundaryArrived,
    Configured,
    OwnUpdateStored,
    RoundEndLogged,
    UpdatesMerged,
    UpdateStored,
)
from sync.ps.core.machine import Recovered, Setup

ALL = ("r0", "r1", "r2")
ROUNDS = 160


@pytest.fixture
def regions() -> Miniature:
    """Three of them; all have made some rounds."""
    made = Miniature(3, 1, ROUNDS, 1, 0, quorum=0)
    go(made, ALL, 6)
    return made


def test_a_region_says_so_where_it_would_go_on_alone(regions: Miniature) -> None:
    go(regions, ("r0", "r1"), 10)
    go(regions, ("r0",), 10)
    here = regions.sites["r0"]
    held = round_of(here)
    first = give_up(here)
    assert (first.regions, first.alone) == (("r2",), False)
    assert here.machine.progress.condition == "continuing without r2"
    go(regions, ("r0",), 10)
    second = give_up(here)
    assert (second.regions, second.alone) == (("r1",), True)
    assert round_of(here) <= held + 4, "it continued before it had lost patience with both"
    go(regions, ("r0",), 10)
    assert round_of(here) > held + 5


def test_a_region_knows_of_whom_it_hears_nothing_that_others_do(regions: Miniature) -> None:
    go(regions, ALL, 10, deaf=("r0", "r2"))
    told = give_up(regions.sites["r0"])
    assert (told.regions, told.elsewhere) == (("r2",), ("r2",))


def test_of_one_that_nobody_hears_a_region_knows_nothing(regions: Miniature) -> None:
    go(regions, ("r0", "r1"), 10)
    told = give_up(regions.sites["r0"])
    assert (told.regions, told.elsewhere) == (("r2",), ())


def test_a_region_that_is_alone_makes_no_round_before_its_pause_is_over(regions: Miniature) -> None:
    here = regions.sites["r0"]
    _alone(regions)
    here.round_seconds /= 10
    go(regions, ("r0",), 10, pause=True)
    for _ in range(5):
        assert len(_pauses(here)) == 1
        held = round_of(here)
        go(regions, ("r0",), 10, pause=True)
        assert round_of(here) == held
        here.do_work()
        go(regions, ("r0",), 10, pause=True)
        assert round_of(here) == held + 1


def test_a_region_that_is_alone_pauses_no_more_once_it_hears_that_others_are_further(regions: Miniature) -> None:
    here, there = regions.sites["r0"], regions.sites["r1"]
    _alone(regions)
    go(regions, ("r1", "r2"), 20)
    for name in ("r1", "r2"):
        assert give_up(regions.sites[name]).regions == ("r0",)
    go(regions, ("r1", "r2"), 40)
    behind = round_of(there) - round_of(here)
    assert behind >= 4
    while there.peer_senders.get("r0"):
        regions.send("r1")
        while regions.wan:
            regions.deliver(regions.wan.pop(0))
    go(regions, ("r0",), 40, pause=True)
    assert round_of(here) >= round_of(there) - 1


def _alone(regions: Miniature) -> None:
    """r0 hears nobody and waits for nobody."""
    go(regions, ("r0",), 10)
    assert give_up(regions.sites["r0"]).alone


def _pauses(site: Site) -> list[SetTimer]:
    return timers(site, WaitReason.ALONE)


def test_those_that_hear_each_other_stay_together_when_a_third_is_cut_off(regions: Miniature) -> None:
    both = regions.sites["r0"], regions.sites["r1"]
    go(regions, ("r0", "r1"), 10)
    for site in both:
        assert give_up(site).regions == ("r2",)
        go(regions, (site.name,), 10)
    for _ in range(20):
        go(regions, ("r0", "r1"), 1)
        assert abs(round_of(both[0]) - round_of(both[1])) <= 2
    assert min(map(round_of, both)) > 10


def test_a_region_that_is_a_little_late_holds_nobody_up(regions: Miniature) -> None:
    here = regions.sites["r0"]
    before = round_of(here)
    go(regions, ALL, 20)
    usual, before = round_of(here) - before, round_of(here)
    go(regions, ("r0", "r1"), 6)
    assert _lag(regions) == 3
    go(regions, ALL, 14)
    assert not waits(here)
    assert round_of(here) - before == usual
    assert 2 <= _lag(regions) <= 3


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Each time that r0's workers have ended a round: whether the merge of the one before has waited for that long."""
    found: list[bool] = []
    real = Background._try_log

    def looked_at(machine: Background) -> list[Action]:
        arrived, busy = machine._boundary.arrived, machine._logging or machine._boundary.applying
        if machine.setup.region == "r0" and arrived and not busy:
            made = machine.ledger.own(machine._ended_sequence) is not None
            found.append(machine._pending is not None and made)
        return real(machine)

    monkeypatch.setattr(Background, "_try_log", looked_at)
    return found


def test_what_a_region_lacks_round_by_round_no_merge_waits_for(regions: Miniature, waited: list[bool]) -> None:
    """It would wait in vain, and be made while the workers wait for it."""
    go(regions, ("r0", "r1"), 6)
    assert any(waited), "r2 was in time until then"
    go(regions, ALL, 4)
    waited.clear()
    go(regions, ALL, 20)
    assert _lag(regions) >= 2
    assert waited
    assert not any(waited)


def test_for_a_region_that_has_fallen_silent_one_merge_waits(regions: Miniature, waited: list[bool]) -> None:
    go(regions, ("r0", "r1"), 20)
    here = regions.sites["r0"]
    assert [wait.regions for wait in waits(here)] == [("r2",)], "three rounds later"
    assert waited.count(True) == 1


def test_regions_begin_side_by_side() -> None:
    """However much later one gets the first model."""
    made = Miniature(3, 1, ROUNDS, 1, 0, quorum=0)
    go(made, ALL, 1)
    go(made, ("r0", "r1"), 20)
    here = made.sites["r0"]
    assert round_of(here) <= 1
    assert [wait.regions for wait in waits(here)] == [("r2",)]
    go(made, ALL, 10)
    assert _lag(made) <= 1


def test_nobody_waits_at_the_start_for_one_that_does_not_come() -> None:
    made = Miniature(3, 1, ROUNDS, 1, 0, quorum=0)
    go(made, ALL, 1)
    go(made, ("r0", "r1"), 20)
    for name in ("r0", "r1"):
        give_up(made.sites[name])
    before = round_of(made.sites["r0"])
    go(made, ("r0", "r1"), 20)
    assert round_of(made.sites["r0"]) >= before + 8


def test_a_region_that_is_a_little_late_catches_up_in_the_grace_windows(regions: Miniature) -> None:
    go(regions, ("r0", "r1"), 6)
    assert _lag(regions) == 3
    go(regions, ALL, 20, grace=True)
    assert _lag(regions) <= 1


def test_a_region_that_is_back_is_waited_for_in_the_grace_windows_alone(regions: Miniature) -> None:
    behind = _without_r2(regions, 4)
    assert 6 <= behind <= 16
    here = regions.sites["r0"]
    go(regions, ALL, 6)
    before = round_of(here)
    go(regions, ALL, 20)
    assert not waits(here)
    assert round_of(here) == before + 10
    for site in regions.sites.values():
        site.now += 60.0  # what the wait for r2 took of the budget is earned back
    go(regions, ALL, 40, grace=True)
    assert _lag(regions) <= 2


def test_a_region_that_was_away_may_not_fall_further_behind(regions: Miniature) -> None:
    behind = _without_r2(regions, 4)
    here = regions.sites["r0"]
    go(regions, ALL, 5)
    go(regions, ("r0", "r1"), 20)
    assert [wait.regions for wait in waits(here)] == [("r2",)]
    assert _lag(regions) <= behind + 5


def test_a_region_that_is_far_behind_is_not_waited_for(regions: Miniature) -> None:
    behind = _without_r2(regions, 40)
    assert behind >= 30
    go(regions, ALL, 30)
    assert _lag(regions) >= behind - 3


def test_a_region_that_is_far_behind_merges_what_has_come_at_once(regions: Miniature) -> None:
    behind = _without_r2(regions, 40)
    while any(regions.sites[name].peer_senders.get("r2") for name in ("r0", "r1")):
        for name in ("r0", "r1"):
            regions.send(name)
        while regions.wan:
            regions.deliver(regions.wan.pop(0))
    go(regions, ALL, 4)
    here = regions.sites["r2"].machine
    assert here is not None
    ahead = regions.sites["r0"]
    assert round_of(ahead) - here.ledger.marks["r0"] <= 4 < behind
    assert _lag(regions) >= behind - 3, "it has made up for nothing"


def _without_r2(regions: Miniature, times: int) -> int:
    go(regions, ("r0", "r1"), 10)
    for name in ("r0", "r1"):
        give_up(regions.sites[name])
    go(regions, ("r0", "r1"), 2 * times)
    return _lag(regions)


def _lag(regions: Miniature) -> int:
    return round_of(regions.sites["r0"]) - round_of(regions.sites["r2"])


def test_workers_that_hold_different_models_after_a_merge_end_the_job_once() -> None:
    setup = Setup("a", ("a", "b"), 2, 40, 1, 0, background=True)
    machine = Background(setup, Recovered(sequence=0, version=0, marks=(("b", 0),), model_bytes=4))
    machine.handle(Configured(1, 1, (PeerAddress("b", 1, "b"),)))

    def ends(sequence: int, *digests: str) -> list[Action]:
        found: list[Action] = []
        for worker, digest in enumerate(digests):
            call = 10 * sequence + worker
            end = BoundaryArrived(call, worker, 1, sequence, sequence, digest, "b", "", 1.0, 0.5, 0.1)
            found += machine.handle(end)
        return found

    (log,) = (action for action in ends(1, "same", "same") if isinstance(action, LogRoundEnd))
    machine.handle(RoundEndLogged(log))
    machine.handle(OwnUpdateStored(Manifest("a", 1, 1, "d", 1, 1.0)))
    (apply,) = (
        a for a in machine.handle(UpdateStored(Manifest("b", 1, 1, "e", 1, 1.0))) if isinstance(a, MergeUpdates)
    )
    assert ends(2, "one", "other") == []
    told = machine.handle(UpdatesMerged(apply, "", "", "", "correction/1", model_bytes=4))
    assert sum(isinstance(action, Failed) for action in told) == 1
