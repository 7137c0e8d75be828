"""Regions with background exchange in virtual time: real state machines, simulated workers, disks, links and faults.

Nothing sleeps and nothing is measured: the same seed gives the same figures on any machine. What a round takes varies
by `JITTER`; a link carries one update at a time.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from sync.file_transfer.manifest import Manifest, PeerAddress, Verdict
from sync.ps.core.actions import (
    Action,
    Failed,
    LogRoundEnd,
    MergeUpdates,
    Refuse,
    Reply,
    Restart,
    SendUpdates,
    SetTimer,
    StoreMetrics,
    StoreOwnUpdate,
    SumUp,
)  # fmt: skip
from sync.ps.core.answers import AttachAnswer, BoundaryAnswer
from sync.ps.core.background import Background
from sync.ps.core.events import (
    Attached,
    BoundaryArrived,
    Configured,
    Evaluated,
    Event,
    Measured,
    MetricsStored,
    OwnUpdateStored,
    PeerHas,
    PeerUnreachable,
    Restarted,
    RoundEndLogged,
    SendAttempted,
    Summed,
    TimerFired,
    UpdatesMerged,
    UpdateStored,
)  # fmt: skip
from sync.ps.core.machine import Setup
from sync.ps.core.waiting_settings import WaitingSettings
from sync.wan import LinkSample, overlapped_steps

__all__ = ["REGIONS", "Fault", "Outcome", "Scenario", "simulated"]

REGIONS = ("east", "north", "west")
STEPS_PER_ROUND, JITTER = 10, 0.03
MODEL_BYTES = 4_000_000
RATE_MBPS, RTT_SECONDS, DISK_SECONDS = 100.0, 0.03, 0.005
RETRY_SECONDS = 0.5
"""Between two attempts at a link that is down."""


@dataclass(frozen=True)
class Fault:
    """What is wrong for a time."""

    kind: str
    """``cut``: nothing reaches or leaves the region; ``flapping``: every other second; ``one way``: nothing passes
    between it and the first other region; ``lossy``: that pair's link carries `rate_mbps`; ``server`` or ``worker``:
    it does nothing."""
    region: str
    begins: float
    seconds: float
    rate_mbps: float = 0.5

    def active(self, now: float) -> bool:
        if not self.begins <= now < self.begins + self.seconds:
            return False
        return self.kind != "flapping" or int(now - self.begins) % 2 == 0


@dataclass(frozen=True)
class Scenario:
    """A job and what happens to it."""

    name: str
    rounds: int = 120
    step_seconds: float = 0.05
    factors: Mapping[str, float] = field(default_factory=dict)
    """How many times as long a region's steps take as usual."""
    faults: tuple[Fault, ...] = ()
    update_bytes: int = 1_000_000
    """Size of an update: that of a million coordinates as int8, as in `wan_resilience.py`, or less."""
    late_model_seconds: float = 0.0
    """By how much later the last region's workers begin."""


@dataclass
class Outcome:
    """Of one job."""

    end_seconds: float
    """When all were done."""
    others_slower_percent: float
    """Time that workers did nothing, in the region without a fault that lost most, from the first fault until 10 s
    after the last one; without faults, and at the latest, until the last quarter of the job."""
    rejoin_seconds: float
    """From the end of the last fault until all have what all had made by then."""
    distance_rounds: float
    """Mean over all merged remote updates: rounds between the update and the merging region."""


class _Site:
    def __init__(self, world: _World, name: str) -> None:
        self.world, self.name = world, name
        scenario, waiting = world.scenario, world.waiting
        self.step_seconds = scenario.step_seconds * scenario.factors.get(name, 1.0)
        setup = Setup(
            name, REGIONS, 1, scenario.rounds, STEPS_PER_ROUND, 0, background=True, waiting=waiting, sums=True
        )
        self.machine = Background(setup)
        self.queues: dict[str, tuple[Manifest, ...]] = {}
        self.busy: set[str] = set()
        self.timer = 0
        self.round, self.until, self.call = 0, STEPS_PER_ROUND, 0
        self.submitted = 0.0
        self.idle: list[tuple[float, float]] = []
        """When each round ended, and how long the workers had then done nothing."""
        self.distances: list[int] = []
        self.done = False

    def stopped(self, kind: str) -> Fault | None:
        return next((f for f in self.world.active() if f.kind == kind and f.region == self.name), None)

    def feed(self, event: Event) -> None:
        if (fault := self.stopped("server")) is not None:
            self.world.at(fault.begins + fault.seconds, lambda: self.feed(event))
            return
        rtt = LinkSample(RATE_MBPS, 1e3 * RTT_SECONDS)
        links = {other: rtt for other in REGIONS if other != self.name}
        for action in self.machine.handle(event, Measured(self.world.now, links)):
            self._do(action)
        if isinstance(event, UpdatesMerged):
            self.world.applied()

    def _after(self, event: Event, seconds: float = DISK_SECONDS) -> None:
        self.world.after(seconds, lambda: self.feed(event))

    def _do(self, action: Action) -> None:
        match action:
            case Reply():
                self._answered(action.answer)
            case Failed() | Refuse():
                raise AssertionError(action)
            case LogRoundEnd():
                self._after(RoundEndLogged(action))
            case Restart():
                self._after(Restarted(action.attempt, "start", ""))
            case StoreOwnUpdate():
                digest, size = f"{self.name}{action.sequence}", self.world.scenario.update_bytes
                made = Manifest(
                    self.name, action.epoch, action.sequence, digest, size, action.weight, action.seen, action.last,
                    takes_sums=True, round_seconds=action.round_seconds,
                )  # fmt: skip
                self._after(OwnUpdateStored(made))
            case MergeUpdates():
                ended = self.machine._ended_sequence
                remote = [m.sequence for m in action.manifests if m.region != self.name and m.sequence]
                self.distances += [abs(ended - sequence) for sequence in remote]
                self._after(UpdatesMerged(action, "", "model", "", "correction", model_bytes=MODEL_BYTES))
            case StoreMetrics():
                self._after(MetricsStored(action))
            case SumUp():
                parts = action.manifests
                made = replace(parts[-1], digest=f"sum{len(parts)}", first=parts[0].begins)
                self._after(Summed(action.peer, made))
            case SetTimer():
                self.timer += 1
                self.world.at(action.at, lambda number=self.timer: self._fire(number))
            case SendUpdates():
                self.queues[action.peer.region] = action.manifests
                self._send(action.peer.region)

    def _fire(self, number: int) -> None:
        if number == self.timer:
            self.feed(TimerFired())

    # Links

    def _send(self, to: str) -> None:
        if to in self.busy or not self.queues.get(to):
            return
        self.busy.add(to)
        rate = self.world.rate_mbps(self.name, to)
        if not rate:
            self.feed(PeerUnreachable(to))
            self.world.after(RETRY_SECONDS, lambda: self._again(to))
            return
        manifest = self.queues[to][0]
        self.feed(SendAttempted(to, manifest))
        takes = 8e-6 * manifest.total_bytes / rate + RTT_SECONDS / 2
        self.world.after(takes, lambda: self._arrive(to, manifest))

    def _again(self, to: str) -> None:
        self.busy.discard(to)
        self._send(to)

    def _arrive(self, to: str, manifest: Manifest) -> None:
        there = self.world.sites[to]
        if not self.world.rate_mbps(self.name, to) or there.stopped("server"):
            self.world.after(RETRY_SECONDS, lambda: self._again(to))
            return
        verdict = there.machine.verdict(manifest, self.name)
        if verdict is Verdict.WANT:
            there.feed(UpdateStored(manifest))
        known = manifest.sequence if verdict is not Verdict.LATER else there.machine.ledger.newest(manifest.region)
        if manifest in self.queues.get(to, ()) and verdict is not Verdict.LATER:
            self.queues[to] = tuple(one for one in self.queues[to] if one is not manifest)
        self.world.after(RTT_SECONDS / 2, lambda: self._acknowledged(to, manifest.region, known))

    def _acknowledged(self, to: str, origin: str, sequence: int) -> None:
        self.feed(PeerHas(to, sequence, origin))
        self._again(to)

    # Its worker

    def begin(self) -> None:
        peers = tuple(PeerAddress(name, 1, name) for name in REGIONS if name != self.name)
        self.feed(Configured(1, 1, peers))
        self.call += 1
        self.feed(Attached(self.call, 0, 1, "init"))

    def _answered(self, answer: object) -> None:
        if not isinstance(answer, AttachAnswer | BoundaryAnswer):
            self.done = True
            return
        if answer.finished:
            self.call += 1
            self._after(Evaluated(self.call, 0, 1, answer.sequence, 1.0, {"loss": 0.0}), 0.0)
            return
        takes = STEPS_PER_ROUND * self.step_seconds * self.world.random.uniform(1 - JITTER, 1 + JITTER)
        if isinstance(answer, BoundaryAnswer):
            waited = self.world.now - self.submitted
            overlap = min(waited, self.step_seconds * overlapped_steps(STEPS_PER_ROUND))
            self.idle.append((self.world.now, waited - overlap))
            takes -= overlap
        self.round, self.until = answer.sequence, answer.until_step
        self.world.after(takes, self._end_round)

    def _end_round(self) -> None:
        if (fault := self.stopped("worker")) is not None:
            self.world.at(fault.begins + fault.seconds, self._end_round)
            return
        self.call += 1
        self.submitted = self.world.now
        computed = STEPS_PER_ROUND * self.step_seconds
        end = BoundaryArrived(self.call, 0, 1, self.round + 1, self.until, "digest", "model", "", 1.0, 0.5, computed)
        self.feed(end)


class _World:
    def __init__(self, scenario: Scenario, waiting: WaitingSettings, seed: int) -> None:
        self.scenario, self.waiting, self.random = scenario, waiting, random.Random(seed)
        self.now, self._count = 0.0, 0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self.sites = {name: _Site(self, name) for name in REGIONS}
        self.over = max((fault.begins + fault.seconds for fault in scenario.faults), default=0.0)
        self.made: dict[str, int] = {}
        """Rounds of each region when the last fault was over."""
        self.rejoined_at = self.over

    def at(self, when: float, what: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._heap, (max(when, self.now), self._count, what))

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        self.at(self.now + seconds, what)

    def active(self) -> list[Fault]:
        return [fault for fault in self.scenario.faults if fault.active(self.now)]

    def rate_mbps(self, one: str, other: str) -> float:
        """What their link carries now; 0: nothing."""
        rate = RATE_MBPS
        for fault in self.active():
            if fault.region not in (one, other):
                continue
            first = next(name for name in REGIONS if name != fault.region)
            if fault.kind in ("cut", "flapping") or (fault.kind == "one way" and first in (one, other)):
                return 0.0
            if fault.kind == "lossy" and first in (one, other):
                rate = fault.rate_mbps
        return rate

    def _fault_is_over(self) -> None:
        self.made = {name: site.machine._ended_sequence for name, site in self.sites.items()}

    def applied(self) -> None:
        """A region has merged something: has it all that there was when the last fault was over?"""
        if not self.made:
            return
        marks = [site.machine.ledger.marks for site in self.sites.values()]
        if all(mark[name] >= made for mark in marks for name, made in self.made.items()):
            self.rejoined_at, self.made = self.now, {}

    def run(self) -> None:
        if self.scenario.faults:
            self.at(self.over, self._fault_is_over)
        for name, site in self.sites.items():
            late = self.scenario.late_model_seconds if name == REGIONS[-1] else 0.0
            self.at(late, site.begin)
        while not all(site.done for site in self.sites.values()):
            self.now, _, what = heapq.heappop(self._heap)
            what()


def simulated(scenario: Scenario, waiting: WaitingSettings, seed: int) -> Outcome:
    """Run a job to its end."""
    world = _World(scenario, waiting, seed)
    world.run()
    sites, faults = world.sites.values(), scenario.faults
    assert all(mark == scenario.rounds for site in sites for mark in site.machine.ledger.marks.values()), "lost"
    struck = {fault.region for fault in faults}
    slower = []
    for site in sites:
        if site.name not in struck:
            begin = min((fault.begins for fault in faults), default=0.0)
            last_quarter = site.idle[int(0.75 * len(site.idle))][0]
            end = min(world.over + 10.0, last_quarter) if faults else last_quarter
            slower.append(100 * sum(idle for at, idle in site.idle if begin <= at < end) / (end - begin))
    distances = [distance for site in sites for distance in site.distances]
    rejoin = world.rejoined_at - world.over
    return Outcome(world.now, max(slower), rejoin, sum(distances) / len(distances))
