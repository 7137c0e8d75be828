"""Background exchange in which each merge holds the same round of all regions, as a robust rule needs it."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import budget
from support.federation_in_miniature import Miniature, Site

from sync.ps.core.background import Background

ROUNDS = 12


def _federation(regions: int = 3, workers: int = 1) -> Miniature:
    return Miniature(regions, workers, ROUNDS, 1, 0, quorum=0, same_round=True)


def _lets_work(federation: Miniature, site: Site) -> None:
    federation.configure(site.name)
    for index in range(len(site.workers)):
        if not site.workers[index].call:
            site.let_work(index)
    while site.work:
        site.do_work()
    federation.send(site.name)


def _something(federation: Miniature, draw: random.Random) -> None:
    """One step of one region, or of one message on its way; sometimes a process dies or comes back."""
    site = draw.choice(list(federation.sites.values()))
    chance = draw.random()
    if site.machine is None:
        if chance < 0.3:
            site.start()
    elif chance < 0.02:
        site.crash()
    elif chance < 0.03:
        site.next_attempt()
    elif chance < 0.5:
        _lets_work(federation, site)
    for _ in range(draw.randrange(4)):
        if federation.wan:
            message = federation.wan.pop(draw.randrange(len(federation.wan)))
            if draw.random() > 0.2:
                federation.deliver(message, then_crash=draw.random() < 0.02)


@settings(max_examples=budget(60))
@given(st.integers(0, 1 << 32), st.integers(2, 4), st.integers(1, 2), st.booleans())
def test_all_regions_make_the_same_merges(seed: int, regions: int, workers: int, ends_early: bool) -> None:
    """Whatever comes late, twice, or not at all, and whoever dies: the n-th merge is the same everywhere."""
    federation, draw = _federation(regions, workers), random.Random(seed)
    for turn in range(200):
        _something(federation, draw)
        federation.check()
        if ends_early and turn > 100:
            draw.choice(list(federation.sites.values())).told_to_end = True
    federation.finish()
    ends = {site.disk.checkpoints[-1].digest for site in federation.sites.values()}
    assert len(ends) == 1


def test_without_a_region_the_others_train_one_round_and_wait_for_it_however_long_it_takes() -> None:
    federation = _federation()
    r0, r1, r2 = federation.sites.values()
    while r2.disk.checkpoints[-1].sequence < 6:
        for site in federation.sites.values():
            _lets_work(federation, site)
        while federation.wan:
            federation.deliver(federation.wan.pop(0))
    r2.crash()
    for _ in range(50):
        for site in (r0, r1):
            _lets_work(federation, site)
            site.now += 600.0
        while federation.wan:
            federation.deliver(federation.wan.pop(0))
    for site in (r0, r1):
        assert isinstance(site.machine, Background)
        last = r2.disk.ended
        assert last is not None
        assert site.disk.ended is not None
        assert site.disk.ended.sequence <= last.sequence + 1, "its workers wait at the end of the next round"
        assert not site.machine.waiting.membership.absent
        assert site.machine.awaited == ("r2",)
        assert "of r2" in site.machine.progress.condition
    federation.finish()
    assert {site.machine.sequence for site in federation.sites.values() if site.machine} == {ROUNDS}


def test_workers_do_not_wait_for_updates_on_their_way() -> None:
    """The workers end a round, and the next one begins, before anybody's update of it has arrived."""
    federation = _federation()
    for _ in range(30):
        for site in federation.sites.values():
            _lets_work(federation, site)
        if all(site.disk.ended is not None for site in federation.sites.values()):
            break
        for message in [one for one in federation.wan if not isinstance(one.what, tuple) and one.what.sequence == 0]:
            federation.wan.remove(message)
            federation.deliver(message)
    for site in federation.sites.values():
        assert site.disk.ended is not None
        assert site.disk.ended.sequence == 1
        assert site.disk.checkpoints[-1].sequence == 0
        assert site.workers[0].round == 1, "told to go on"
