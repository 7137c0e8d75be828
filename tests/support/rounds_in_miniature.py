"""Rounds of regions that hear each other, or some of them, in a `Miniature`."""

from __future__ import annotations

from collections.abc import Iterable

from support.federation_in_miniature import Miniature, Site

from sync.ps.core.actions import Action, StartGrace, StartPatience, StartPause


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
    Patience begins, and lasts, and so do the grace window and the pause of one that is alone where it is said to."""
    kinds = ((StartPatience, True), (StartGrace, grace), (StartPause, pause))
    names, lasting = tuple(names), tuple(kind for kind, lasts in kinds if lasts)
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


def _work(site: Site, lasting: tuple[type[Action], ...]) -> None:
    kept: list[Action] = []
    while site.work:
        if isinstance(site.work[0], lasting):
            kept.append(site.work.pop(0))
        else:
            site.do_work()
    site.work = kept


def waits(site: Site) -> list[StartPatience]:
    return [action for action in site.work if isinstance(action, StartPatience)]


def lose_patience(site: Site) -> StartPatience:
    """What was waited for is not waited for any more."""
    (waited,) = waits(site)
    site.do_work()
    return waited


def round_of(site: Site) -> int:
    assert site.machine is not None
    return site.machine.progress.sequence
