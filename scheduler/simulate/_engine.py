"""Event simulation with one clock, of jobs that run at the shares that a policy gives them."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from scheduler.deadline import Overhead, SpeedCurve
from scheduler.simulate._nodes import ClusterNodes
from scheduler.simulate._outcome import JobOutcome, SimulationRun
from scheduler.simulate._trace import TraceJob


@dataclass(slots=True, eq=False)
class RunningJob:
    """One job while it is in the system."""

    spec: TraceJob
    believed: SpeedCurve
    """Curve that the policy sees."""
    left: float
    """Steps."""
    share: int = 0
    ready_s: float = -math.inf
    """Instant until which it is paused."""
    promised_s: float = math.inf
    """The deadline that it was promised; infinite: none."""
    started_s: float = math.inf
    ended_s: float = math.inf
    device_s: float = 0.0
    seen_share: int = 0
    """The share on which it has made steps last; 0: none yet."""
    slowness: float = 1.0
    """Ratio of the measured time of a step there to the one of the policy's curve."""
    blocks: tuple[tuple[int, int], ...] = ()
    """Location of its devices: (first device, number)."""

    @property
    def name(self) -> str:
        """Name of the job in its trace."""
        return self.spec.name

    def rate(self) -> float:
        """Steps a second now, really."""
        return self.spec.table.get(self.share) or self.spec.curve.rate(self.share)


@dataclass(frozen=True)
class PolicyDecision:
    """The answer of a policy to an event."""

    shares: Mapping[str, int]
    """Devices by job; missing jobs have none."""
    declined: Sequence[str] = ()
    """New jobs that are sent away."""
    promised: Mapping[str, float] = field(default_factory=dict)
    """Deadlines promised now, by new job."""
    wake_s: float = math.inf
    """Instant of the next call at the latest."""


class SimulatedPolicy(Protocol):
    """A policy that assigns devices; called at every event, or at most once a slot."""

    name: str
    slot_s: float
    """Events within this time after a decision are decided on together at its end; 0: at once."""
    at_edges: bool
    """True: that a job has ended is only seen at the edge of a slot."""

    def decide(
        self, now: float, devices: int, active: Sequence[RunningJob], arrived: Sequence[RunningJob]
    ) -> PolicyDecision:
        """Shares from now on. `active` are all jobs, the ones that have `arrived` since included."""
        ...


@dataclass(frozen=True)
class Pauses:
    """The cost of changes in the simulation."""

    overhead: Overhead = field(default_factory=lambda: Overhead(everyone=True))


@dataclass(frozen=True)
class Incidents:
    """Failures of nodes."""

    failures_per_device_hour: float = 0.0
    repair_s: float = 1800.0
    lost_s: float = 120.0
    """Largest run time that a job loses with a node: what it did since its last checkpoint."""
    seed: int = 1


def simulate(
    jobs: Sequence[TraceJob],
    policy: SimulatedPolicy,
    nodes: int,
    devices_per_node: int,
    pauses: Pauses | None = None,
    incidents: Incidents | None = None,
    curve_error: float = 0.0,
    seed: int = 1,
    progress: Callable[[int, int], None] = lambda done, jobs: None,
) -> SimulationRun:
    """Simulate a trace under a policy, to the end of the last job that ends.

    With a `curve_error` of e the policy sees curves whose rates are off by a factor drawn for each job and level
    between 1 - e and 1 + e. `progress` is called with the number of finished jobs. Jobs must have distinct names.
    """
    return _Simulation(jobs, policy, nodes, devices_per_node, pauses, incidents, curve_error, seed, progress).run()


class _Simulation:
    def __init__(
        self,
        jobs: Sequence[TraceJob],
        policy: SimulatedPolicy,
        nodes: int,
        devices_per_node: int,
        pauses: Pauses | None,
        incidents: Incidents | None,
        curve_error: float,
        seed: int,
        progress: Callable[[int, int], None],
    ) -> None:
        self.policy, self.pauses, self.incidents = policy, pauses or Pauses(), incidents or Incidents()
        self.cluster = ClusterNodes(nodes, devices_per_node)
        self.draw = random.Random(seed)
        self.chance = random.Random(self.incidents.seed)
        self.curve_error = curve_error
        self.waiting = sorted(jobs, key=lambda job: job.submit_s, reverse=True)
        self.total = len(jobs)
        self.progress = progress
        self.active: list[RunningJob] = []
        self.outcomes: list[JobOutcome] = []
        self.timeline: list[tuple[float, int, int]] = []
        self.now = self.waiting[-1].submit_s if jobs else 0.0
        self.decisions = self.changes = self.moved = self.failures = 0
        self.next_failure_s = self._failure_after(self.now)
        self.repairs: list[tuple[float, int]] = []

    def run(self) -> SimulationRun:
        wake_s, decided_s = math.inf, -math.inf
        while self.waiting or self.active:
            due = min(self._next_event(decided_s), wake_s)
            if math.isinf(due):
                break
            at = max(due, decided_s + self.policy.slot_s, self.now)
            self._advance(at)
            self._incidents(at)
            arrived = self._arrivals(at)
            decision = self.policy.decide(at, self.cluster.devices, self.active, arrived)
            self._apply(decision, arrived)
            decided_s, wake_s = at, decision.wake_s
            if wake_s <= at:
                wake_s = math.inf
        for job in self.active:
            self._close(job, declined=False)
        return SimulationRun(
            self.policy.name, self.cluster.all_devices, tuple(sorted(self.outcomes, key=lambda o: o.submit_s)),
            self.decisions, self.changes, self.moved, self.failures, tuple(self.timeline),
        )  # fmt: skip

    def _next_event(self, decided_s: float) -> float:
        due = math.inf
        for job in self.active:
            if job.share:
                end_s = max(self.now, job.ready_s) + job.left / job.rate()
                if end_s < due:
                    due = end_s
        if self.policy.at_edges and math.isfinite(due):
            due = decided_s + math.ceil((due - decided_s) / self.policy.slot_s) * self.policy.slot_s
        if self.waiting:
            due = min(due, self.waiting[-1].submit_s)
        if math.isfinite(due) or self.repairs:
            due = min(due, self.next_failure_s, self.repairs[0][0] if self.repairs else math.inf)
        return due

    def _advance(self, at: float) -> None:
        """Advance time: all jobs run, and finished ones leave."""
        done = False
        for job in self.active:
            if not job.share:
                continue
            begin, rate = max(self.now, job.ready_s), job.rate()
            end_s = begin + job.left / rate
            if end_s <= at + 1e-9:
                job.device_s += job.share * (end_s - self.now)
                job.left, job.ended_s = 0.0, end_s
                done = True
                continue
            job.device_s += job.share * (at - self.now)
            if at > begin:
                job.left -= (at - begin) * rate
                believed = job.believed.rate(job.share)
                job.seen_share, job.slowness = job.share, believed / rate if believed else 1.0
        self.now = at
        if done:
            for job in self.active:
                if job.left <= 0.0:
                    self.cluster.release(job.name)
                    self._close(job, declined=False)
            self.active = [job for job in self.active if job.left > 0.0]
            self.progress(len(self.outcomes), self.total)

    def _arrivals(self, at: float) -> list[RunningJob]:
        arrived = []
        while self.waiting and self.waiting[-1].submit_s <= at + 1e-9:
            spec = self.waiting.pop()
            arrived.append(RunningJob(spec, self._believed(spec.curve), spec.work))
        self.active.extend(arrived)
        return arrived

    def _believed(self, curve: SpeedCurve) -> SpeedCurve:
        if not self.curve_error:
            return curve
        rates: list[float] = []
        levels: list[int] = []
        for level, rate in zip(curve.levels, curve.rates, strict=True):
            seen = rate * (1 + self.draw.uniform(-self.curve_error, self.curve_error))
            if not rates or seen > rates[-1]:
                levels.append(level)
                rates.append(seen)
        return SpeedCurve(tuple(levels), tuple(rates))

    def _apply(self, decision: PolicyDecision, arrived: Sequence[RunningJob]) -> None:
        self.decisions += 1
        if decision.declined:
            gone = set(decision.declined)
            for job in self.active:
                if job.name in gone:
                    self._close(job, declined=True)
            self.active = [job for job in self.active if job.name not in gone]
            self.progress(len(self.outcomes), self.total)
        for job in self.active:
            if job.name in decision.promised:
                job.promised_s = decision.promised[job.name]
        changed = []
        for job in self.active:
            share = decision.shares.get(job.name, 0)
            if share != job.share:
                job.share = share
                changed.append(job)
        in_use = sum(job.share for job in self.active)
        if in_use > self.cluster.devices:
            raise ValueError(f"{self.policy.name} gave {in_use} of {self.cluster.devices} devices")
        moved = self.cluster.arrange([(job.name, job.share) for job in changed])
        for job in self.active:
            if job.share or job.blocks:
                job.blocks = self.cluster.blocks(job.name)
        self.moved += len(moved)
        self.changes += bool(changed)
        self._pause(changed, moved)
        self.timeline.append((self.now, in_use, len(self.active)))

    def _pause(self, changed: Sequence[RunningJob], moved: set[str]) -> None:
        overhead = self.pauses.overhead
        if not changed:
            return
        hit = {job.name for job in changed} | moved
        for job in self.active:
            if not job.share:
                continue
            if job.name in hit:
                job.ready_s = max(job.ready_s, self.now + overhead.seconds(job.share))
                job.started_s = min(job.started_s, self.now)
            elif overhead.everyone:
                job.ready_s = max(job.ready_s, self.now + overhead.base_s)

    # --- failures

    def _failure_after(self, at: float) -> float:
        rate = self.incidents.failures_per_device_hour * self.cluster.all_devices / 3600
        return at + self.chance.expovariate(rate) if rate else math.inf

    def _incidents(self, at: float) -> None:
        while self.repairs and self.repairs[0][0] <= at:
            self.cluster.mend(heapq.heappop(self.repairs)[1])
        while self.next_failure_s <= at:
            node = self.chance.randrange(self.cluster.nodes)
            hit = self.cluster.fail(node)
            if hit is not None:
                self.failures += 1
                heapq.heappush(self.repairs, (at + self.incidents.repair_s, node))
                for job in self.active:
                    if job.name in hit:
                        lost_s = self.chance.uniform(0, self.incidents.lost_s)
                        job.left = min(job.spec.work, job.left + lost_s * job.rate())
                        job.share, job.blocks = 0, ()
            self.next_failure_s = self._failure_after(at)

    def _close(self, job: RunningJob, declined: bool) -> None:
        spec = job.spec
        if declined:
            self.cluster.release(job.name)
        outcome = JobOutcome(
            spec.name, spec.submit_s, spec.deadline_s, job.promised_s, declined, job.started_s, job.ended_s,
            job.device_s, spec.value_at(job.ended_s), not spec.deadlines, spec.user,
        )  # fmt: skip
        self.outcomes.append(outcome)
