"""What befalls the federation, and how long it takes to come to itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from wan_resilience_federation import REGIONS, RTT_MS, Federation

__all__ = ["FAULTS", "Fault", "Window", "strike"]

_LOOKS = (0.0, 1.0, 3.0, 6.0, 10.0, 15.0, 20.0, 25.0, 30.0)
"""Seconds after the healing at which is noted what the slow ones wait for."""


@dataclass
class Window:
    """A fault and its healing."""

    fault: str
    victim: str
    begun: float
    patience: float
    """Seconds after which nobody waits for a rejoin any more."""
    healed: float = 0.0
    rejoin_seconds: dict[str, float | None] = field(default_factory=dict)
    """By "who<whose"; None: not within the patience."""
    backlog_bytes: dict[str, int] = field(default_factory=dict)
    """By link: updates that the other side had not merged when the fault was over."""
    rejoin_wire_bytes: dict[str, int] = field(default_factory=dict)
    """By link: beyond what it carries when nothing happens."""
    sockets: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    """By seconds after the healing and region: what waits for a timer of the kernel."""
    conditions: dict[str, dict[str, str]] = field(default_factory=dict)
    """By seconds after the healing and region: what the servers say of themselves."""

    @property
    def worst(self) -> float:
        """Seconds until everybody had everything."""
        return max((self.patience if took is None else took for took in self.rejoin_seconds.values()), default=0.0)

    @property
    def moved(self) -> int:
        """Bytes for the rejoin on the link that carried most; where it was not followed to its end, those due."""
        links = {f"{whose}-{who}": s for who, whose, s in ((*k.split("<"), s) for k, s in self.rejoin_seconds.items())}
        due = [self.backlog_bytes[link] for link, took in links.items() if took is None]
        return max([0, *due, *self.rejoin_wire_bytes.values()])

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "worst_rejoin_seconds": self.worst}


@contextmanager
def _partition(federation: Federation, victim: str) -> Iterator[None]:
    federation.emulator.partition(victim)
    yield
    federation.emulator.heal()


@contextmanager
def _one_way(federation: Federation, victim: str) -> Iterator[None]:
    federation.emulator.cut(victim, _other(victim))
    yield
    federation.emulator.heal()


@contextmanager
def _loss(federation: Federation, victim: str) -> Iterator[None]:
    federation.emulator.set_link(victim, _other(victim), both=True, loss=0.01, delay_ms=150.0)
    yield
    federation.emulator.set_link(victim, _other(victim), both=True, loss=0.0, delay_ms=RTT_MS / 2)


@contextmanager
def _killed(federation: Federation, victim: str) -> Iterator[None]:
    federation.regions[victim].kill_server()
    yield
    federation.regions[victim].start_server()


@contextmanager
def _stopped_server(federation: Federation, victim: str) -> Iterator[None]:
    region = federation.regions[victim]
    region.pause(region.server)
    yield
    region.go_on(region.server)


@contextmanager
def _stopped_worker(federation: Federation, victim: str) -> Iterator[None]:
    region = federation.regions[victim]
    region.pause(region.site)
    yield
    region.go_on(region.site)


@dataclass(frozen=True)
class Fault:
    """One that lasts."""

    apply: Callable[[Federation, str], Any]
    flaps: bool = False
    restarts: bool = False


FAULTS = {
    "partition": Fault(_partition),
    "one way": Fault(_one_way),
    "flapping": Fault(_partition, flaps=True),
    "loss": Fault(_loss),
    "killed server": Fault(_killed, restarts=True),
    "stopped server": Fault(_stopped_server),
    "stopped worker": Fault(_stopped_worker),
}


def _other(victim: str) -> str:
    return next(region for region in REGIONS if region != victim)


def strike(
    federation: Federation,
    name: str,
    victim: str,
    seconds: float,
    rest: float,
    quiet: dict[str, float],
    patience: float,
) -> Window:
    """Let a fault last, heal it, and wait ``rest`` seconds; what the rejoin takes is noted also when it takes longer.

    ``quiet``: bytes a second of each link when nothing happens. ``patience``: seconds that a rejoin is followed.
    """
    fault, window = FAULTS[name], Window(name, victim, time.monotonic(), patience)
    until = time.monotonic() + seconds
    while fault.flaps and time.monotonic() + 1.0 < until:
        with fault.apply(federation, victim):
            federation.wait(1.0)
        federation.wait(1.0)
    with fault.apply(federation, victim):
        federation.wait(max(0.0, 1.0 if fault.flaps else until - time.monotonic()))
        before = federation.wire_bytes()
        window.healed = time.monotonic()
    targets = federation.ended()
    for who, region in federation.regions.items():
        for other in REGIONS:
            if other != who:
                mark = federation.regions[other].journal.marks.get(who, 0)
                window.backlog_bytes[f"{who}-{other}"] = region.journal.backlog(other, mark)
    _follow(federation, window, targets, before, quiet, restarted=fault.restarts)
    federation.wait(rest)
    return window


def _follow(
    federation: Federation, window: Window, targets: dict[str, int], before: dict[str, int], quiet: dict[str, float],
    *, restarted: bool,
) -> None:  # fmt: skip
    """Have it noted when each region has what the others had made by the time of the healing."""
    pending = {(who, whose) for who in REGIONS for whose in REGIONS if who != whose and window.victim in (who, whose)}
    introduce, looks = restarted, list(_LOOKS)

    def settled() -> bool:
        nonlocal introduce
        victim = federation.regions[window.victim]
        if introduce and victim.ready and not victim.stopped:
            introduce = "unreached" in victim.ask("introduce")
        now = time.monotonic() - window.healed
        for who, whose in sorted(pending):
            if federation.holds(who, whose, targets[whose]):
                window.rejoin_seconds[f"{who}<{whose}"] = now
                pending.discard((who, whose))
                link = f"{whose}-{who}"
                usual = quiet.get(link, 0.0) * now
                window.rejoin_wire_bytes[link] = int(federation.wire_bytes()[link] - before[link] - usual)
        if pending and looks and now > looks[0]:
            at = f"{looks.pop(0):.0f}"
            window.sockets[at] = {name: region.sockets() for name, region in federation.regions.items()}
            if not restarted:
                told = {name: region.ask("status") for name, region in federation.regions.items()}
                window.conditions[at] = {
                    name: f"{s.get('condition') or s.get('unreached')} links_down={s.get('links_down')}"
                    for name, s in told.items()
                }
        return not pending or now > window.patience

    for who, whose in pending:
        window.rejoin_seconds[f"{who}<{whose}"] = None
    federation.followers.append(settled)
