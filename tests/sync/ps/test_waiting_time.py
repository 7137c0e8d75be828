"""What a partition stands still for."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.federation_in_miniature import Miniature, Site
from support.rounds_in_miniature import go

from sync.ps.core.events import PeerUnreachable
from sync.ps.core.machine import Machine
from sync.ps.waiting_time import WaitTimes, waits_only

ALL = ("r0", "r1", "r2")


def machine_of(site: Site) -> Machine:
    assert site.machine is not None
    return site.machine


def test_time_is_divided_by_how_things_stand() -> None:
    still = WaitTimes()
    still.seen(9.0, False, waits=False)
    still.seen(10.0, True, waits=False)
    still.seen(13.0, True, waits=True)
    still.seen(20.0, True, waits=False)
    still.seen(23.0, False, waits=False)
    still.seen(40.0, True, waits=True)
    still.seen(41.0, False, waits=False)
    assert (still.wait_seconds, still.exchange_seconds) == (pytest.approx(8.0), pytest.approx(6.0))
    assert still.seconds == pytest.approx(14.0)


def test_a_pause_in_step_with_slower_regions_is_waiting() -> None:
    made = Miniature(3, 1, 160, 1, 0, quorum=0)
    for name, seconds in zip(ALL, (1.0, 2.0, 1.5), strict=True):
        made.sites[name].round_seconds = seconds
    go(made, ALL, 10)
    for name in ALL:
        go(made, (name,), 3, pause=True)
    machine = machine_of(made.sites["r0"])
    assert (machine.progress.condition, machine.awaited) == ("in step with r1, r2", ())
    assert waits_only(machine, [("r1", 10**6)])


def standing_still() -> Machine:
    """A region that has ended its round before the others, in a synchronous exchange; they have its update."""
    made = Miniature(3, 1, 160, 1, 0)
    go(made, ALL, 4)
    go(made, ("r0",), 4)
    machine = machine_of(made.sites["r0"])
    assert machine.progress.phase == "exchanging"
    assert machine.awaited == ("r1", "r2")
    for name in machine.awaited:
        machine.ledger.note(name, "r0", machine.ledger.newest("r0"))
    return machine


def test_who_waits_has_sent_and_receives_nothing_from_one_of_the_others() -> None:
    machine = standing_still()
    following = machine.sequence + 1
    assert waits_only(machine, [])
    assert waits_only(machine, [("r1", following)]), "r2 is not ready"
    assert not waits_only(machine, [("r1", following), ("r2", following)])
    earlier = [(name, machine.sequence) for name in ("r1", "r2")]
    assert waits_only(machine, earlier), "the rest of an earlier transfer"


def test_an_own_update_that_still_moves_is_no_waiting() -> None:
    machine = standing_still()
    for name in ("r1", "r2"):
        machine.ledger.state_lost(name)
        assert machine.sends
        assert not waits_only(machine, [])
    machine.handle(PeerUnreachable("r2"))
    assert not waits_only(machine, []), "it moves to the other one"
    machine.handle(PeerUnreachable("r1"))
    assert waits_only(machine, []), "nothing moves to a region that is cut off"


def test_who_lacks_a_quorum_waits_until_an_update_of_any_region_comes() -> None:
    made = Miniature(3, 1, 160, 1, 0, quorum=2)
    for site in made.sites.values():
        site.setup = replace(site.setup, grace_seconds=60.0)
        site.crash()
        site.start()
    go(made, ALL, 6, grace=True)
    go(made, ("r0",), 6, grace=True)
    machine = machine_of(made.sites["r0"])
    assert (machine.progress.phase, machine.awaited) == ("exchanging", ())
    newest = machine.ledger.newest("r0")
    for name in ("r1", "r2"):
        machine.ledger.note(name, "r0", newest)
    assert waits_only(machine, [])
    assert not waits_only(machine, [("r2", machine.ledger.newest("r2") + 1)])
