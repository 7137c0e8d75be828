"""Jobs that run are weighed again as their speeds turn out, and given other numbers of workers where that is worth it.

The decision is the scheduler's (`scheduler.restaff`); here is when to ask it, and of what. It is asked for jobs whose
file leaves the number of workers to the plan, while all their regions train and can be reached.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime

from control_plane.core import Partition, Report, ScaleAsked
from control_plane.service._draft import Draft, JobEntry
from control_plane.service._planning import workers_now
from control_plane.spec import to_demand
from scheduler import Region, Restaffing, Staffed, restaff

__all__ = ["Elasticity"]

REVIEW_SECONDS = 5.0
FEWEST_ROUNDS = 3
"""Of every region since the last change, before its speed counts as known."""
AGREEING = 2
"""Reviews in turn that must want the same change."""
FIRST_REST_SECONDS = 10.0
"""After a change; twice as long after each further one, so that a job does not go to and fro."""
_WEIGHT = 0.3
"""Of the newest round in a region's speed."""


@dataclass
class _Pace:
    """One region's speed since the last change."""

    seen_round: int = -1
    rounds: int = 0
    samples_per_second: float = 0.0

    def heard(self, report: Report) -> None:
        speed = report.round_samples_per_second
        if report.round <= self.seen_round or speed <= 0:
            return
        if self.seen_round >= 0:
            # What is there at the first look may be of before the change.
            known = self.samples_per_second or speed
            self.samples_per_second = (1 - _WEIGHT) * known + _WEIGHT * speed
            self.rounds += 1
        self.seen_round = report.round


@dataclass
class _Watched:
    """One job."""

    paces: dict[str, _Pace] = field(default_factory=dict)
    reviewed: float = 0.0
    changes: int = 0
    changed: float = 0.0
    wanted: dict[str, int] = field(default_factory=dict)
    agreeing: int = 0

    def has_changed(self, at: float) -> None:
        self.changes, self.changed = self.changes + 1, at
        self.paces.clear()
        self.wanted, self.agreeing = {}, 0


class Elasticity:
    """Looks at the jobs as time passes. What it has seen of their speeds is not kept over a restart."""

    def __init__(self) -> None:
        self._jobs: dict[str, _Watched] = {}

    def review(self, draft: Draft) -> None:
        """Have jobs scaled for which it is worth it."""
        for gone in set(self._jobs) - set(draft.jobs):
            del self._jobs[gone]
        for job_id, entry in draft.jobs.items():
            if not _elastic(entry):
                continue
            watched = self._jobs.setdefault(job_id, _Watched())
            for part in entry.state.partitions:
                if part.report is not None:
                    watched.paces.setdefault(part.region, _Pace()).heard(part.report)
            if self._due(watched, entry, draft.at):
                watched.reviewed = draft.at
                self._consider(watched, entry, draft)

    @staticmethod
    def _due(watched: _Watched, entry: JobEntry, at: float) -> bool:
        rest = FIRST_REST_SECONDS * 2 ** (watched.changes - 1) if watched.changes else 0.0
        known = all(
            (pace := watched.paces.get(part.region)) is not None and pace.rounds >= FEWEST_ROUNDS
            for part in entry.state.partitions
        )
        return known and at >= watched.changed + rest and at >= watched.reviewed + REVIEW_SECONDS

    def _consider(self, watched: _Watched, entry: JobEntry, draft: Draft) -> None:
        change = _change(entry, watched, draft)
        wanted = dict(change.workers) if change is not None else {}
        watched.agreeing = watched.agreeing + 1 if wanted and wanted == watched.wanted else bool(wanted)
        watched.wanted = wanted
        if change is not None and watched.agreeing >= AGREEING:
            draft.tell_job(entry.row.id, ScaleAsked(draft.at, wanted, change.reason))
            watched.has_changed(draft.at)


def _elastic(entry: JobEntry) -> bool:
    parts = entry.state.partitions
    return (
        entry.state.phase == "running"
        and entry.spec.train.workers == "auto"
        and all(part.link == "live" and part.state == "training" and part.report is not None for part in parts)
    )


def _change(entry: JobEntry, watched: _Watched, draft: Draft) -> Restaffing | None:
    demand = to_demand(entry.spec, entry.row.id, datetime.fromtimestamp(entry.row.created_at, UTC))
    passed = draft.at - entry.row.created_at
    staffed = [_staffed(part, entry, watched, draft) for part in entry.state.partitions]
    if any(region is None for region in staffed):
        return None
    reports = [part.report for part in entry.state.partitions if part.report is not None]
    paid = sum(charge.usd for report in reports for charge in report.money)
    return restaff(
        [region for region in staffed if region is not None],
        rounds_left=entry.plan.rounds - min(report.round for report in reports),
        exchange_seconds=entry.plan.exchange_seconds,
        background=entry.plan.background,
        minimise=demand.minimise,
        deadline_seconds=None if demand.deadline_seconds is None else max(0.0, demand.deadline_seconds - passed),
        budget_usd=None if demand.budget_usd is None else max(0.0, demand.budget_usd - paid),
    )


def _staffed(part: Partition, entry: JobEntry, watched: _Watched, draft: Draft) -> Staffed | None:
    """None: the region cannot be judged."""
    known = draft.region(part.region)
    catalogue: Region | None = known.catalogue if known is not None else None
    if catalogue is None or catalogue.prices is None:
        return None
    planned = next(p for p in entry.plan.partitions if p.region == part.region)
    mine = workers_now(entry)[part.region]
    others = sum(workers_now(job).get(part.region, 0) for job in draft.jobs.values() if job is not entry)
    # While somebody waits nobody grows.
    queued = any(job.state.phase == "queued" for job in draft.jobs.values())
    return Staffed(
        region=part.region,
        workers=mine,
        planned=planned.workers,
        free=mine if queued else max(mine, catalogue.capacity.workers - others),
        batch=planned.workers * planned.batch,
        steps_per_round=planned.steps_per_round,
        samples_per_second=watched.paces[part.region].samples_per_second,
        worker_usd_per_second=planned.memory_mb / 1024 * catalogue.prices.function_usd_per_gb_second,
        usd_per_second=catalogue.prices.server_usd_per_hour / 3600,
    )
