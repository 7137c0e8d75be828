"""The proofs of one region as a policy of the simulator. It doesn't run live: `scheduler.simulate.Live` does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from scheduler.deadline import DeadlineJob, DeviceCapacity, Rules, SimulatedSchedule, SpeedCurve
from scheduler.lab.one_region._job_statistics import JobStatistics
from scheduler.lab.one_region._minimum_share import least_device_seconds
from scheduler.lab.one_region._verified_decisions import verified_decision
from scheduler.simulate._engine import PolicyDecision, RunningJob
from scheduler.simulate._nodes import ClusterNodes

_REGION = "here"


class OneRegionPolicy:
    """Job-by-job promises without slots, spare devices by marginal return; see ``scheduler.deadline``.

    `keep` best effort: jobs whose deadline is refused run on what is left instead of being declined.
    """

    name = "geofed"
    slot_s = 0.0
    at_edges = False

    def __init__(self, rules: Rules, curve_error: float = 0.0, keep: bool = False) -> None:
        self.rules, self.keep = rules, keep
        self.statistics = JobStatistics(curve_error)
        self.seen: dict[str, dict[int, float]] = {}
        self.served_s: dict[str, float] = {}
        self.schedule: SimulatedSchedule | None = None
        self.most = 0
        """Largest number of devices so far."""

    def decide(
        self, now: float, devices: int, active: Sequence[RunningJob], arrived: Sequence[RunningJob]
    ) -> PolicyDecision:
        """Promise the deadlines that can be proven, and give spare devices by marginal return."""
        self._learn(active)
        self.most = max(self.most, devices)
        new = {job.name for job in arrived}
        jobs = [self._job(job, job.name in new) for job in active]
        asked = [job for job in jobs if job.name in new and math.isfinite(job.deadline_s)]
        rules = self._with_pauses(now)
        asking = self._for_admission(now, devices, asked, rules)
        # Which jobs broken nodes move is unknown.
        blocks = {job.name: job.blocks for job in active if job.blocks}
        placement = ClusterNodes.of(devices, blocks) if devices == self.most else None
        found = verified_decision(
            now, DeviceCapacity(devices), _REGION, jobs, new, rules, asking, self.schedule, placement, self.keep
        )  # fmt: skip
        self.schedule = found.schedule
        promised = {job.name: job.deadline_s for job in found.promised}
        gone = () if self.keep else tuple(job.name for job in asked if job.name not in promised)
        if rules.overhead.everyone and any(job.share != found.shares.get(job.name, 0) for job in active):
            self.statistics.record_pause(now, rules.overhead.base_s)
        return PolicyDecision(found.shares, gone, promised, found.schedule.next_s)

    def _with_pauses(self, now: float) -> Rules:
        """Return the rules; where any change pauses all jobs, with margins for the pauses of the recent time."""
        rules, paused = self.rules, self.statistics.pause_share(now)
        if not rules.overhead.everyone:
            return rules
        return replace(
            rules,
            margin=max(rules.margin, 1.5 * paused),
            kept_margin=max(rules.kept_margin, 1.2 * paused),
        )

    def _for_admission(self, now: float, devices: int, asked: Sequence[DeadlineJob], rules: Rules) -> Rules:
        if not asked:
            return rules
        for job in asked:
            size = least_device_seconds(job, job.curves[_REGION], now)
            self.statistics.record_request(now, job.deadline_s, size, job.value)
        return replace(
            rules,
            change_pause_s=rules.overhead.base_s if rules.overhead.everyone else 0.0,
            usual_device_s=self.statistics.usual_device_s(devices),
        )

    def _learn(self, active: Sequence[RunningJob]) -> None:
        """Record what was measured: rates on levels that jobs have run on, and what users' best effort has had."""
        self.served_s.clear()
        for job in active:
            self.served_s[job.spec.user] = self.served_s.get(job.spec.user, 0.0) + job.device_s
            if job.seen_share:
                rates = self.seen.setdefault(job.name, {})
                if job.seen_share not in rates:
                    told = job.believed.rate(job.seen_share)
                    rates[job.seen_share] = told / job.slowness
                    self.statistics.record_rate(told, told / job.slowness)

    def _curve(self, job: RunningJob) -> SpeedCurve:
        return self.statistics.cautious(
            job.believed, self.seen.get(job.name, {}) if self.statistics.curve_error else {}
        )

    def _job(self, job: RunningJob, is_new: bool) -> DeadlineJob:
        spec = job.spec
        first, *later = spec.deadlines if is_new and spec.deadlines else ((job.promised_s, 0.0),)
        value = spec.deadlines[0][1] if spec.deadlines else 0.0
        return DeadlineJob(
            job.name, {_REGION: self._curve(job)}, job.left, first[0], _REGION, job.share, job.ready_s,
            value, tuple(later), spec.user, served_s=self.served_s.get(spec.user, 0.0),
        )  # fmt: skip
