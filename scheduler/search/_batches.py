"""The batch of a worker, where the job file leaves it to the plan: a plan is searched with each of a few batches.

The batches are powers of two around those of which steps of the task were measured. Their plans are compared as all
plans of one search are: money or time for the same progress, where the samples that this takes grow with the global
batch by the gradient noise scale. Batches whose plan gives up more points than the tolerance count only where no other
keeps deadline and budget.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from scheduler._model import Alternative, Declined, Demand, Plan, Region, Snapshot
from scheduler._shard_moves import train_samples

__all__ = ["BatchPlanner", "TriedBatches", "differences", "tried_batches"]

_LEAST = 2
"""Samples of the smallest batch that is tried: BatchNorm cannot be trained with one."""
_BEYOND = 2
"""Factor by which a batch may differ from those that were measured: steps take the time of a line through these."""
_MOST_TRIED = 8
"""Batches that are tried at most, the largest: the search takes as many times as long as with a given batch."""
_MOST_ALTERNATIVES = 2
"""Other batches that a plan tells of."""
_VISIBLE = 0.0005
"""Relative difference below which two figures are told as equal: both are printed with three digits."""


@dataclass(frozen=True)
class TriedBatches:
    """Batches from which a plan may choose."""

    batches: tuple[int, ...]
    """Ascending; never empty."""
    why_no_larger: str
    """Why none is larger, as text for users."""


def tried_batches(snapshot: Snapshot, demand: Demand, measured: Collection[int]) -> TriedBatches:
    """Return the batches to plan with.

    Without a profile of every region, which tells what memory a step takes, none is larger than those ``measured``.
    """
    regions = [
        region
        for region in snapshot.regions
        if train_samples(region, demand.dataset)
        and region.name not in demand.avoid
        and (not demand.use or region.name in demand.use)
    ]
    known = sorted(measured) or [demand.batch]
    profiled = all(region.name in snapshot.profiles for region in regions)
    most = known[-1] * (_BEYOND if measured and profiled else 1)
    if not measured:
        why = "no step of the task was measured"
    elif profiled:
        why = f"larger than {_BEYOND} times the largest batch that was measured, {known[-1]}"
    else:
        why = f"larger than the largest batch that was measured, {known[-1]}; `geofed profile` measures larger ones"
    room = {region.name: train_samples(region, demand.dataset) // _workers(region, demand) for region in regions}
    smallest = min(room, key=lambda name: room[name], default=None)
    if smallest is not None and max(1, room[smallest]) < most:
        most, why = max(1, room[smallest]), f"larger than the shard of {smallest} allows: a step has more samples"
    least = known[0] // _BEYOND if measured else most
    powers = [1 << power for power in range(31) if min(max(least, _LEAST), most) <= 1 << power <= most]
    return TriedBatches(tuple(powers[-_MOST_TRIED:]) or (1 << (most.bit_length() - 1),), why)


def _workers(region: Region, demand: Demand) -> int:
    """Return the fewest workers that the plan may give a region."""
    stated = demand.workers
    return stated if isinstance(stated, int) else 1 if stated is None else max(1, stated.get(region.name, 1))


class GivenBatch(Protocol):
    """What plans demands with a given batch: a `Planner`."""

    placements: int
    """Number of shard layouts that were evaluated so far."""

    def plan(self, demand: Demand) -> Plan | Declined:
        """Return a plan."""


class BatchPlanner:
    """Plans demands whose batch is to be chosen, as `Planner` does those with a given one."""

    def __init__(self, planner: Callable[[int], GivenBatch], tried: TriedBatches) -> None:
        """``planner``: returns the planner with a batch, whose snapshot has the speeds with that batch."""
        self._by_batch: Mapping[int, GivenBatch] = {batch: planner(batch) for batch in tried.batches}
        self._tried = tried

    @property
    def placements(self) -> int:
        """Number of shard layouts that were evaluated; they take most of the time."""
        return sum(one.placements for one in self._by_batch.values())

    def plan(self, demand: Demand) -> Plan | Declined:
        """Return the best plan of all batches; if none has one, the refusal that is nearest to a plan."""
        least = self._tried.batches[0]
        found = {
            batch: one.plan(replace(demand, batch=batch, least_batch=least, chooses_batch=True, explained=False))
            for batch, one in self._by_batch.items()
        }
        plans = {batch: answer for batch, answer in found.items() if isinstance(answer, Plan)}
        if not plans:
            return min((answer for answer in found.values() if isinstance(answer, Declined)), key=_distance)
        order = sorted(plans, key=lambda batch: (not plans[batch].learning.tolerated, plans[batch].learning.score))
        others = tuple(self._others(order, found, demand))
        chosen = plans[order[0]]
        if demand.explained:
            asked = replace(demand, batch=order[0], least_batch=least, chooses_batch=True)
            explained = self._by_batch[order[0]].plan(asked)
            assert isinstance(explained, Plan)
            chosen = explained
        return replace(chosen, batches=self._tried.batches, alternatives=(*others, *chosen.alternatives))

    def _others(
        self, order: Sequence[int], found: Mapping[int, Plan | Declined], demand: Demand
    ) -> Iterator[Alternative]:
        """Return the best other batch and one that would save more but is not allowed, or in place of either another
        one; and why no larger one was tried if that may have decided."""
        own, decision = found[order[0]], f"batch {order[0]}"
        assert isinstance(own, Plan)
        refused = sorted(found.keys() - set(order), key=lambda batch: (abs(batch - order[0]), batch))
        tempting = [*(batch for batch in order[1:] if _saves(found[batch], own, demand)), *refused]
        told = dict.fromkeys([*order[1:2], *tempting[:1], *order[2:], *refused])
        for batch in [*told][:_MOST_ALTERNATIVES]:
            other = found[batch]
            if isinstance(other, Plan):
                took = other.estimate
                text = f"{batch}: {took.seconds.expected:.0f} s and ${took.usd.expected:.4f}"
                yield Alternative(text, _why_not(other, own, demand), decision)
            else:
                yield Alternative(str(batch), "; ".join(reason.text for reason in other.reasons), decision)
        largest = self._tried.batches[-1]
        if order[0] == largest:
            yield Alternative(str(2 * largest), f"not tried: {self._tried.why_no_larger}", decision)


def _saves(other: Plan | Declined, own: Plan, demand: Demand) -> bool:
    """Return whether a plan that gives up too much would save time or money."""
    if isinstance(other, Declined) or other.learning.tolerated:
        return False
    what = "seconds" if demand.minimise == "time" else "usd"
    return bool(getattr(other.estimate, what).expected < getattr(own.estimate, what).expected)


def _why_not(other: Plan, own: Plan, demand: Demand) -> str:
    """Return the mechanism that decided against the plan with another batch."""
    points = other.learning.points
    if own.learning.tolerated and not other.learning.tolerated:
        return f"may give up {points:.2g} points, objective.tolerance is {demand.tolerance:g}"
    assumed = ", by an assumed noise scale" if other.learning.basis == "prior" else ""
    more = f"more samples for the same progress{assumed}"
    words = differences(
        (other.estimate.usd.expected, own.estimate.usd.expected, "dearer"),
        (other.estimate.seconds.expected, own.estimate.seconds.expected, "slower"),
        (other.learning.samples_factor, own.learning.samples_factor, more),
        points=points - own.learning.points,
    )
    return words or "saves nothing that counts"


def differences(*pairs: tuple[float, float, str], points: float) -> str:
    """Return in what a plan is worse than the chosen one, as text for users; empty: in nothing that is visible.

    Args:
        pairs: a figure of the plan, that of the chosen one, and what the plan is if it has more.
        points: points of the metric that it gives up more.
    """
    words = [f"{a / b - 1:.1%} {what}" for a, b, what in pairs if b and a / b - 1 > _VISIBLE]
    words += [f"may give up {points:.2g} points more"] if points > 0.005 else []
    return " and ".join(words)


def _distance(declined: Declined) -> tuple[bool, float, float]:
    """Return how far a refusal is from a plan: whether a reason is no limit, and what the limits would have to be."""
    reasons = declined.reasons
    other = any(reason.earliest_seconds is None and reason.least_usd is None for reason in reasons)
    late = max((reason.earliest_seconds or 0.0 for reason in reasons), default=math.inf)
    return other, late, max((reason.least_usd or 0.0 for reason in reasons), default=math.inf)
