"""Rounds of regions that hear each other, or some of them, in a `Miniature`."""

from __future__ import annotations

from collections.abc import Iterable

from support.federation_in_miniature import Miniature, Site

from sync.ps.core.actions import Action, SetTimer, WaitReason
from sync.ps.core.background import Background
from sync.ps.core.waiting import WaitingPolicy, WorkerWait


def go(
    all_: Miniature,
    names: Iterable[str],
    times: int,
    *,
    grace: bool = False,
    pause: bool = False,
    deaf: tuple[str, ...] = (),
) -> None:
    """These regions work and hear each other, but for a pair that is ``deaf`` to each other; the others stand still.
    Waiting for late regions begins, and does not end; so do grace times and pauses where it is said."""
    kinds = {WaitReason.LATE: True, WaitReason.GRACE: grace, WaitReason.QUORUM: grace}
    kinds |= dict.fromkeys((WaitReason.IN_STEP, WaitReason.ALONE), pause)
    names, lasting = tuple(names), {reason for reason, lasts in kinds.items() if lasts}
    for _ in range(times):
        for name in names:
            site = all_.sites[name]
            all_.configure(name)
            if not site.workers[0].call:
                site.let_work(0)
            _work(site, lasting)
            all_.send(name)
        ways = ({message.source, message.to} for message in all_.wan)
        there = [m for m, way in zip(all_.wan, ways, strict=True) if way <= set(names) and way != {*deaf}]
        all_.wan = []
        for message in there:
            all_.deliver(message)


def _work(site: Site, lasting: set[WaitReason]) -> None:
    kept: list[Action] = []
    while site.work:
        first = site.work[0]
        if isinstance(first, SetTimer) and first.reason in lasting:
            kept = [site.work.pop(0)]
        else:
            site.do_work()
    site.work = kept


def policy_of(site: Site) -> WaitingPolicy:
    assert isinstance(site.machine, Background)
    return site.machine.waiting


def timers(site: Site, *reasons: WaitReason) -> list[SetTimer]:
    """Those that are set for one of these reasons: one or none."""
    return [action for action in site.work if isinstance(action, SetTimer) and action.reason in reasons]


def waits(site: Site) -> list[WorkerWait]:
    """For whom its workers wait until they are late, if for any."""
    hold = policy_of(site).hold
    return [hold] if hold is not None and timers(site, WaitReason.LATE) else []


def give_up(site: Site) -> WorkerWait:
    """What was waited for is not waited for any more."""
    (waited,) = waits(site)
    while policy_of(site).hold is waited:
        site.do_work()
    return waited


def round_of(site: Site) -> int:
    assert site.machine is not None
    return site.machine.progress.sequence
