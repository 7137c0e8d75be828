"""What the active jobs occupy, by region and by user, so that nothing has to be summed over all jobs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from control_plane.service.jobs._result import unpromised_worker_seconds
from control_plane.service.planning._gangs import may_scale
from control_plane.service.planning._planning import devices_held, on_preemptible, workers_now
from control_plane.service.state._entries import JobEntry
from scheduler.deadline import devices_of

__all__ = ["JobIndex", "WorkerUse", "regions_of", "use_of"]


@dataclass(frozen=True)
class WorkerUse:
    """What one job occupies. Its workers do not count any more once it uploads its model."""

    workers: dict[str, int]
    """Workers by region that it has or was commanded to have; and their devices, by `devices_of` the region."""
    preemptible: bool
    """Whether these are preemptible."""
    fixed: bool
    """Whether it keeps them to its end."""
    user: str
    unpromised_seconds: float
    """Worker seconds without a promised deadline."""
    standing: object
    """What the allocation of workers depends on, except for progress and speed."""


def regions_of(entry: JobEntry) -> set[str]:
    """Return the regions that run a partition of a job or send a shard for it."""
    return {part.region for part in entry.state.partitions} | {copy.source for copy in entry.state.copies}


def use_of(entry: JobEntry) -> WorkerUse:
    """Return what a job occupies."""
    state = entry.state
    parts = tuple((p.workers, p.link, p.preemptible, p.preempted, p.state == "finished") for p in state.partitions)
    workers = {} if state.phase == "finishing" else workers_now(entry)
    devices = devices_held(entry.plan, workers)
    return WorkerUse(
        {**workers, **{devices_of(region): count for region, count in devices.items()}},
        on_preemptible(entry),
        not may_scale(entry.spec, entry.plan),
        entry.row.user,
        unpromised_worker_seconds(state, entry.plan),
        (state.phase, state.gave_way, parts),
    )


class JobIndex:
    """The active jobs by region, with the sums of what they occupy."""

    def __init__(self, entries: Iterable[JobEntry] = ()) -> None:
        self._jobs: dict[str, dict[str, None]] = {}
        self._uses: dict[str, WorkerUse] = {}
        self._lasting: dict[str, int] = {}
        self._preemptible: dict[str, int] = {}
        self._fixed: dict[str, int] = {}
        self._models: dict[str, int] = {}
        self.unpromised_seconds: dict[str, float] = {}
        """Worker seconds of active jobs without a promised deadline, by user."""
        self.waiting_for_lost: dict[str, None] = {}
        """Jobs of which a region is lost: they fail if it stays lost for too long."""
        self.may_be_replanned: dict[str, None] = {}
        """Jobs that wait for their successors, or are replanned without being asked."""
        self.may_be_rerouted: dict[str, None] = {}
        """Jobs whose files leave the topology to the plan."""
        self.touched: dict[str, None] = {}
        """Regions of which the workers in use, or the jobs, have changed; whoever allocates workers takes them out."""
        for entry in entries:
            self.put(entry)

    def jobs_in(self, region: str) -> tuple[str, ...]:
        """Return the IDs of a region's jobs, in the order in which they came."""
        return tuple(self._jobs.get(region, ()))

    def lasting(self, region: str) -> int:
        """Return the regular workers that a region's jobs have or were commanded to have."""
        return self._lasting.get(region, 0)

    def preemptible(self, region: str) -> int:
        """Return the same of preemptible workers."""
        return self._preemptible.get(region, 0)

    def fixed(self, region: str) -> int:
        """Return the workers of jobs that keep them to their end."""
        return self._fixed.get(region, 0)

    def all_fixed(self) -> dict[str, int]:
        """Return these by region, and their devices."""
        return dict(self._fixed)

    def starts_from(self, digest: str) -> bool:
        """Whether a job starts from a model."""
        return digest in self._models

    def use(self, job: str) -> WorkerUse | None:
        """Return what a job occupies; None if it is not active."""
        return self._uses.get(job)

    def put(self, entry: JobEntry) -> None:
        """Add a job, or replace it; an ended one is removed."""
        job = entry.row.id
        if entry.state.terminal:
            self.remove(entry)
            return
        before, use = self._uses.get(job), use_of(entry)
        if before is None and (model := entry.state.initial_model) is not None:
            for digest in model.uploaded:
                self._models[digest] = self._models.get(digest, 0) + 1
        if before is None or before.standing != use.standing:
            self._count(before, -1)
            self._count(use, 1)
            for region in sorted(regions_of(entry)):
                self._jobs.setdefault(region, {})[job] = None
                self.touched[region] = None
            if "lost" in [part.link for part in entry.state.partitions] + [copy.link for copy in entry.state.copies]:
                self.waiting_for_lost[job] = None
            else:
                self.waiting_for_lost.pop(job, None)
        if entry.state.awaits_successor or entry.spec.regions.replan == "auto":
            self.may_be_replanned[job] = None
        if entry.plan.wan_settings.get("choose_topology"):
            self.may_be_rerouted[job] = None
        self._spend(before, -1)
        self._spend(use, 1)
        self._uses[job] = use

    def remove(self, entry: JobEntry) -> None:
        """Remove a job, if it is there."""
        job = entry.row.id
        if (before := self._uses.pop(job, None)) is None:
            return
        self._count(before, -1)
        self._spend(before, -1)
        for jobs in (self.waiting_for_lost, self.may_be_replanned, self.may_be_rerouted):
            jobs.pop(job, None)
        if (model := entry.state.initial_model) is not None:
            for digest in model.uploaded:
                self._models[digest] -= 1
                if not self._models[digest]:
                    del self._models[digest]
        for region in sorted(regions_of(entry)):
            self._jobs[region].pop(job, None)
            self.touched[region] = None

    def _count(self, use: WorkerUse | None, sign: int) -> None:
        if use is None:
            return
        kind = self._preemptible if use.preemptible else self._lasting
        for region, workers in use.workers.items():
            kind[region] = kind.get(region, 0) + sign * workers
            if use.fixed:
                self._fixed[region] = self._fixed.get(region, 0) + sign * workers

    def _spend(self, use: WorkerUse | None, sign: int) -> None:
        if use is not None and use.unpromised_seconds:
            known = self.unpromised_seconds.get(use.user, 0.0)
            self.unpromised_seconds[use.user] = max(0.0, known + sign * use.unpromised_seconds)
