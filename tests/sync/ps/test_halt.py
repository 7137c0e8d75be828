"""A region stays away: the others end with the last round that they have merged, and merge nothing more."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from support.budget import budget
from support.federation_in_miniature import Miniature
from support.server_process import NumpyWorker, Server, wait_until

from geofed_pb.v1 import sync_pb2
from sync.file_transfer.manifest import Manifest, PeerAddress, Verdict
from sync.ps.core.actions import Reply, StoreMetrics, StoreOwnUpdate
from sync.ps.core.answers import AttachAnswer, BoundaryAnswer
from sync.ps.core.events import (
    Attached,
    BoundaryArrived,
    CallGone,
    Configured,
    Evaluated,
    Event,
    MetricsStored,
    OwnUpdateStored,
    UpdateStored,
)
from sync.ps.core.machine import Recovered, Setup
from sync.ps.core.synchronous import Synchronous

SHARES = {"east": 0.3, "north": 0.3, "south": 0.2, "west": 0.2}


def _manifest(region: str, sequence: int) -> Manifest:
    return Manifest(region, 1, sequence, f"{region}{sequence}", 1, 1.0)


def _ended_round(call: int, sequence: int) -> BoundaryArrived:
    return BoundaryArrived(call, 0, 1, sequence, sequence, "d", "model", "state", 1.0, 0.5)


def test_the_update_of_a_region_that_is_left_out_is_not_merged_when_it_comes() -> None:
    setup = Setup("a", ("a", "b"), 1, 9, 1, 0)
    machine = Synchronous(setup, Recovered(3, step=3, outbox=(_manifest("a", 3),), model_key="model/3"))
    machine.handle(Configured(1, 1, (PeerAddress("b", 1, "b:1"),)))
    assert any(isinstance(action, StoreOwnUpdate) for action in machine.handle(_ended_round(1, 4)))
    told = machine.handle(Configured(1, 1, (), finish=True, halt=True))
    (answer,) = [action.answer for action in told if isinstance(action, Reply)]
    assert isinstance(answer, BoundaryAnswer)
    assert (answer.sequence, answer.model_key, answer.finished, answer.evaluate) == (3, "model/3", True, True)
    late = _manifest("b", 4)
    assert machine.verdict(late) is Verdict.LATER
    events: tuple[Event, ...] = (UpdateStored(late), _ended_round(2, 4), Configured(2, 2, ()))
    for event in events:
        machine.handle(event)
        assert machine.sequence == 3


def test_after_a_restart_it_ends_before_anything_is_merged() -> None:
    setup = Setup("a", ("a", "b"), 1, 9, 1, 0)
    both = Recovered(3, step=3, inbox=(_manifest("b", 4),), outbox=(_manifest("a", 4),))
    machine = Synchronous(setup, both)
    assert not [one for one in machine.handle(Configured(1, 2, (), halt=True)) if hasattr(one, "manifests")]
    assert machine.progress.sequence == 3


@pytest.mark.parametrize("restarted", [False, True])
def test_a_worker_that_comes_after_the_halt_evaluates_the_last_merged_model(restarted: bool) -> None:
    setup, peers = Setup("a", ("a", "b"), 1, 9, 1, 0), (PeerAddress("b", 1, "b:1"),)
    machine = Synchronous(setup, Recovered(3, step=3, outbox=(_manifest("a", 3),), model_key="model/3"))
    machine.handle(Configured(1, 1, peers))
    machine.handle(_ended_round(1, 4))
    machine.handle(OwnUpdateStored(_manifest("a", 4)))
    assert machine.handle(CallGone(1)) == [], "its slice is over"
    if restarted:
        machine = Synchronous(setup, Recovered(3, step=3, outbox=(_manifest("a", 4),), model_key="model/3"))
    machine.handle(Configured(1, 1, (), finish=True, halt=True))
    assert machine.progress.phase != "finished", "nobody has evaluated it"
    (answer,) = [action.answer for action in machine.handle(Attached(2, 0, 1, "")) if isinstance(action, Reply)]
    assert isinstance(answer, AttachAnswer)
    assert (answer.sequence, answer.model_key, answer.boundary) == (3, "model/3", False)
    assert (answer.finished, answer.evaluate) == (True, True)
    evaluated = machine.handle(Evaluated(3, 0, 1, 3, 10.0, {"accuracy": 0.5}))
    (keep,) = [action for action in evaluated if isinstance(action, StoreMetrics)]
    machine.handle(MetricsStored(keep))
    assert (machine.progress.phase, machine.sequence) == ("finished", 3)


def _give_all_the_first_model(everything: Miniature) -> None:
    """Without one a region cannot end."""
    while not all(site.machine is not None and site.machine.sequence >= 0 for site in everything.sites.values()):
        for name, site in everything.sites.items():
            everything.configure(name)
            for index in range(len(site.workers)):
                site.let_work(index)
            while site.work:
                site.do_work()
            everything.send(name)
        while everything.wan:
            everything.deliver(everything.wan.pop(0))


@pytest.mark.parametrize("seed", range(budget(150)))
def test_whatever_has_happened_the_others_end_at_most_one_round_apart(seed: int) -> None:
    chance = random.Random(seed)
    regions, workers = chance.randint(2, 4), chance.randint(1, 2)
    pairs = {4: (("r0", "r1"), ("r0", "r2"), ("r0", "r3"))}.get(regions, ()) if chance.random() < 0.3 else ()
    everything = Miniature(regions, workers, 50, chance.randint(1, 2), chance.randint(0, 2), neighbours=pairs)
    names = sorted(everything.sites)
    # A hub that is gone takes the updates that it passes on with it.
    gone = chance.choice(names[1:] if pairs else names)
    _give_all_the_first_model(everything)
    for _ in range(chance.randint(100, 400)):
        name = chance.choice(names)
        site = everything.sites[name]
        if site.machine is None:
            site.start()
        match chance.randint(0, 9):
            case 0:
                everything.configure(name)
            case 1 if chance.random() < 0.1:
                site.crash()
            case 2 | 3:
                everything.send(name)
            case 4 | 5 if everything.wan:
                everything.deliver(everything.wan.pop(chance.randrange(len(everything.wan))))
            case 6 | 7:
                index = chance.randrange(workers)
                if not site.workers[index].call:
                    site.let_work(index)
            case _:
                if site.work:
                    site.do_work()
        everything.check()
    everything.finish_without(gone)
    ended = [site.machine.sequence for name, site in everything.sites.items() if name != gone and site.machine]
    assert len(ended) == regions - 1
    assert max(ended) - min(ended) <= 1


@pytest.mark.processes
def test_masked_rounds_end_with_the_last_one_that_all_have_made(
    servers: Callable[..., list[Server]], workers: Callable[..., NumpyWorker]
) -> None:
    secure = {"wan_settings": {"secure": 3.0}, "codec": "int8-masked", "shares": SHARES}
    *others, west = made = servers(*SHARES, rounds=500, **secure)
    pool = [workers(server, push) for server, push in zip(made, (1e-3, 2e-3, 3e-3, 4e-3), strict=True)]
    wait_until(lambda: all(server.status().round >= 2 for server in made), "two rounds")
    west.kill()
    pool[-1].stop.set()
    waiting = "waiting for the update of round"
    wait_until(lambda: any(waiting in server.status().condition for server in others), "a region to wait")

    def ends(server: Server) -> sync_pb2.PsStatus | None:
        status = server.configure_peers(halt=True, finish=True)
        return status if status.phase == "finished" else None

    statuses = [wait_until(lambda server=server: ends(server), f"{server.region} to end") for server in others]
    rounds = [status.round for status in statuses]
    assert max(rounds) - min(rounds) <= 1
    assert len({(status.round, status.model_digest) for status in statuses}) == len(set(rounds))
    for worker in pool[:-1]:
        worker.join(20)
        assert (worker.is_alive(), worker.failure) == (False, None)
    # The model that the next job begins with is a whole round's.
    assert others[rounds.index(max(rounds))].model()
