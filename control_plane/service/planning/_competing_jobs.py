"""The jobs that compete for the workers of some regions: only these are planned together, however many there are.

A job competes with those that share a region with it, these with others, and so on. Beyond a number of jobs the rest
counts as it stands: the workers that it has, or was promised, are not available.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass

from control_plane.service.planning._gangs import capacities_of, preemptible_of
from control_plane.service.state._draft import Draft
from control_plane.service.state._entries import JobEntry
from control_plane.service.state._index import WorkerUse, regions_of
from scheduler.deadline import DeviceCapacity, Reservation

__all__ = ["CompetingJobs", "competing_jobs"]

_MOST_JOBS = 16
"""Number of jobs beyond which no further ones are planned together with those of the regions asked about."""


@dataclass(frozen=True)
class CompetingJobs:
    """Jobs that are planned together, in the order of their submission, and what is there for them."""

    entries: Mapping[str, JobEntry]
    lasting: Mapping[str, DeviceCapacity]
    """Regular workers of the usable regions, and their devices (`devices_of`), without those of other jobs."""
    preemptible: Mapping[str, DeviceCapacity]

    standing: Mapping[str, object]
    """How the jobs stand, by ID."""

    def same_as(self, other: CompetingJobs) -> bool:
        """Whether the same jobs stand as they did, and the same workers are there."""
        same = self.standing == other.standing
        return same and (self.lasting, self.preemptible) == (other.lasting, other.preemptible)


def competing_jobs(
    draft: Draft, regions: Iterable[str], held: Mapping[str, Reservation], jobs: Iterable[str] = ()
) -> CompetingJobs:
    """Return the jobs that compete for the workers of some regions.

    Args:
        held: workers reserved for promises.
        jobs: further jobs to plan together with these.
    """
    found: dict[str, JobEntry] = {}
    seen = dict.fromkeys(regions)
    waiting = list(seen)

    def add(name: str) -> None:
        entry = draft.job(name)
        if entry is None or entry.state.terminal or name in found:
            return
        found[name] = entry
        for region in sorted(regions_of(entry)):
            if region not in seen:
                seen[region] = None
                waiting.append(region)

    for name in jobs:
        add(name)
    first = len(waiting)
    rest = set[str]()
    for number, region in enumerate(waiting):
        names = draft.jobs_in(region)
        for place, name in enumerate(names):
            # All jobs of the regions themselves; of the others, up to a number.
            if number >= first and len(found) >= _MOST_JOBS:
                rest.update(names[place:])
                break
            add(name)
    rest.difference_update(found)
    known = [entry for region in seen if (entry := draft.region(region)) is not None]
    lasting, preemptible = capacities_of(known), preemptible_of(known)
    uses = {name: use for name in found if (use := draft.use(name)) is not None}
    if rest:
        lasting = _left(draft, lasting, uses, rest, held, preemptible=False)
        preemptible = _left(draft, preemptible, uses, rest, held, preemptible=True)
    order = {name: found[name] for name in sorted(found, key=lambda name: (found[name].row.created_at, name))}
    return CompetingJobs(order, lasting, preemptible, {name: use.standing for name, use in uses.items()})


def _left(
    draft: Draft,
    capacities: Mapping[str, DeviceCapacity],
    uses: Mapping[str, WorkerUse],
    rest: Set[str],
    held: Mapping[str, Reservation],
    *,
    preemptible: bool,
) -> dict[str, DeviceCapacity]:
    """Return the workers and devices that the other jobs leave."""
    if not capacities:
        return {}
    own: dict[str, int] = {}
    for use in uses.values():
        for region, count in use.workers.items() if use.preemptible == preemptible else ():
            own[region] = own.get(region, 0) + count
    left = {
        region: capacity.devices - (draft.busy(region, preemptible=preemptible) - own.get(region, 0))
        for region, capacity in capacities.items()
    }
    for name in rest & held.keys() if not preemptible else ():
        if name not in uses and (other := draft.use(name)) is not None:
            has = {} if other.preemptible else other.workers
            for region, workers in _promised(held[name]).items():
                if region in left:
                    left[region] -= max(0, workers - has.get(region, 0))
    return {region: DeviceCapacity(max(0, devices)) for region, devices in left.items()}


def _promised(held: Reservation) -> dict[str, int]:
    """Return the most workers by region, and devices, that a job is promised at any time."""
    most: dict[str, int] = {}
    for pace in set(held.pace_indices) - {-1} if held.ladder else ():
        for region, count in held.ladder[pace].needs.items():
            most[region] = max(most.get(region, 0), count)
    return most
