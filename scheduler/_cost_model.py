"""The cost model of a job: seconds and USD of one plan, or of many at once.

There is no other: plans, `explain`, `submit`, replanning and the search all call `course`. It bills what the meter
bills: functions by time and memory and by call, parameter servers, requests of the channel, egress. The bill of a plan,
line by line, is made of it in `scheduler/_estimate.py`. Arrays have the axes (assignments, intervals, exchanges), with
a last one for regions where a figure is a region's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from scheduler._model import PlannedPartition, Prices
from scheduler._overheads import Overheads

__all__ = [
    "Assignments",
    "Bools",
    "Exchanges",
    "Floats",
    "JobConstants",
    "JobTimeline",
    "course",
    "slice_ends",
    "standing_seconds",
    "step_seconds",
    "whole_model_step_seconds",
]  # fmt: skip

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Figure = TypeVar("Figure", float, Floats)

MERGE_SECONDS = 0.004
"""Seconds that the workers of a partition take to merge one step, for a small model on one machine."""
_LEAST_ROOM_SECONDS = 1e-3
"""Least time of an invocation, in seconds: time is billed in milliseconds."""
_SECONDS_PER_HOUR = 3600.0
"""Seconds of an hour: prices of machines are by the hour."""


def step_seconds(part: PlannedPartition) -> float:
    """Return the seconds of one local step: compute of the worker with most samples, and the merge among the
    partition's workers."""
    if part.pipeline is not None:
        return part.pipeline.step_seconds
    usual = MERGE_SECONDS if part.merge_seconds is None else part.merge_seconds
    return whole_model_step_seconds(part.workers, part.batch, part.largest_share, part.samples_per_second, usual)


def whole_model_step_seconds(
    workers: Figure, batch: Figure, largest_share: Figure, samples_per_second: Figure, merge_seconds: Figure
) -> Figure:
    """Return the same for workers that hold the whole model, of one configuration or of many."""
    return batch * largest_share / samples_per_second + merge_seconds * (workers > 1)


@dataclass(frozen=True)
class Assignments:
    """Assignments of configurations to the same regions: arrays of shape (assignments, regions)."""

    step_samples: Floats
    """Samples of all replicas in one step."""
    step_seconds: Floats
    worker_usd: Floats
    """USD per second of all workers."""
    server_usd: Floats
    """USD per second of the parameter server."""
    call_usd: Floats
    """USD of one invocation of every worker."""
    merge_usd: Floats
    """USD of the requests that merge one step."""
    first_model: Floats
    first_step: Floats
    round_end: Floats
    round_work: Floats
    enter: Floats
    slice_end: Floats
    result: Floats
    """As in `Overheads`, in seconds."""

    @staticmethod
    def figures(part: PlannedPartition, prices: Prices, besides: Overheads) -> tuple[float, ...]:
        """Return one region's figures in the order of the fields."""
        worker_usd = prices.worker_usd_per_second(part.memory_mb, part.devices)
        return Assignments.told(
            part.workers, part.step_samples, step_seconds(part), worker_usd, part.merge_usd, prices, besides
        )

    @staticmethod
    def told(
        workers: Figure,
        step_samples: Figure,
        step_seconds: Figure,
        worker_usd: Figure,
        merge_usd: Figure,
        prices: Prices,
        besides: Overheads,
    ) -> tuple[Figure | float, ...]:
        """Return the figures of one configuration of a region or of many. ``worker_usd``: per second of one worker."""
        return (
            step_samples,
            step_seconds,
            workers * worker_usd,
            prices.server_usd_per_hour / _SECONDS_PER_HOUR,
            workers * prices.function_usd_per_request,
            merge_usd,
            besides.first_model, besides.first_step, besides.round_end, besides.round_work, besides.enter,
            besides.slice_end, besides.result,
        )  # fmt: skip

    @classmethod
    def of(cls, table: Floats) -> Assignments:
        """Return assignments from `figures`, shape (assignments, regions, figures)."""
        # Each region's figures lie together: sums and maxima over few regions are several times as fast.
        return cls(*(np.asfortranarray(figure) for figure in np.moveaxis(table, -1, 0)))

    @classmethod
    def told_once(cls) -> frozenset[int]:
        """Return the numbers of the figures that may be one row for all assignments: what is paid besides workers, and
        overheads, of which only the largest counts."""
        names = [field.name for field in fields(cls)]
        return frozenset(names.index(name) for name in ("server_usd", "call_usd", *names[names.index("first_model") :]))


@dataclass(frozen=True)
class Exchanges:
    """Ways to exchange updates between regions: arrays of shape (exchanges,)."""

    seconds: Floats
    """Seconds of one round's exchange, including everything that workers wait for where they wait."""
    usd: Floats
    """USD of egress in a round."""
    background: Bools
    """Whether training continues meanwhile."""
    apart: Floats
    """Seconds between two of them at least, where training continues: less than `seconds` where several are under way
    at once."""
    contact: Floats
    """Seconds until all regions have contact."""
    links: Floats
    """Seconds of it that updates are on their way."""
    beyond: Floats
    """Seconds of a round for which workers stand still beyond what follows from the others, as runs have told; below
    0: so much less."""

    @classmethod
    def one(
        cls, seconds: float, *, background: bool, apart: float, contact: float, links: float, beyond: float
    ) -> Exchanges:
        """Return a single one, whose egress is billed link by link (`scheduler/_estimate.py`)."""
        return cls(*(np.array([value]) for value in (seconds, 0.0, background, apart, contact, links, beyond)))

    def at(self, places: Sequence[int]) -> Exchanges:
        """Return some of them."""
        return Exchanges(*(getattr(self, field.name)[list(places)] for field in fields(self)))


@dataclass(frozen=True)
class JobConstants:
    """What all plans of a job over the same shards have in common."""

    slice_seconds: float
    start: float
    """Seconds from submission to the start of the workers."""
    copying: float
    """Seconds until the last shard has arrived where it is processed."""
    rest: float
    """Seconds from the end of the training to that of the job, while its functions and servers are billed still."""
    first_model_known: bool
    """Whether `start` includes contact, and the time to create the first model."""
    served_late: Bools
    """By region: whether its parameter server starts only when all shards have arrived."""
    started: Floats
    """Seconds of the start for which a worker's function is billed, by region."""
    served: Floats
    """The same for the parameter server."""


@dataclass(frozen=True)
class JobTimeline:
    """The seconds of a job's phases, and what it costs: arrays that broadcast to the shape of all plans."""

    compute: Floats
    """Seconds that a round's steps take the slowest region."""
    first_model: Floats
    first_step: Floats
    steps: Floats
    round_ends: Floats
    round_work: Floats
    between: Floats
    """Seconds of exchange that steps do not hide."""
    ends: Floats
    """Invocation ends of each worker without its last one; by region, or one for all."""
    slice_ends: Floats
    """Seconds that these take in the region where they take longest."""
    busy: Floats
    """Seconds for which functions are billed."""
    result: Floats
    """Seconds after all functions have ended."""
    seconds: Floats
    """Seconds of the whole job."""
    usd: Floats
    """USD of the whole job, without copies of shards."""


def course(
    assignments: Assignments, constants: JobConstants, rounds: Floats, steps: Floats, exchanges: Exchanges
) -> JobTimeline:
    """Predict jobs.

    A round takes as long as its slowest region: compute, then the exchange as far as its workers stand still for it
    (`standing_seconds`). In the background one exchange follows at the end.

    Args:
        rounds: shape (assignments, intervals).
        steps: steps of a round, shape (assignments, intervals, regions).
    """
    each = steps * assignments.step_seconds[:, None, :]
    compute = each.max(-1)[..., None]
    many, back = rounds[..., None], exchanges.background
    training = many * compute
    # A single region exchanges nothing.
    stands = np.maximum(0.0, standing_seconds(each, exchanges) + exchanges.beyond)
    between = many * stands + np.where(back, exchanges.seconds, 0.0)
    # With background exchange a round's end overlaps with the next one's steps.
    round_ends = np.where(back, 0.0, many * _slowest(assignments.round_end))
    known = constants.first_model_known
    none = np.zeros((1, 1, 1))
    first_model = none if known else exchanges.contact + _slowest(assignments.first_model)
    first_step, round_work = _slowest(assignments.first_step), many * _slowest(assignments.round_work)
    work = first_model + first_step + training + between + round_ends + round_work + constants.rest
    room = _room(assignments.step_seconds, constants.slice_seconds, assignments.enter)
    slice_end, call_usd = assignments.slice_end, assignments.call_usd
    if room.shape[1] == 1 or (room == room[:, :1]).all():
        # All regions' invocations end at once, as mostly: their axis would make most of the arithmetic.
        room, slice_end = room[:, :1], slice_end.max(-1, keepdims=True)
        call_usd = _total(call_usd, assignments)[:, None]
    ends = np.maximum(0.0, np.ceil(work[..., None] / room[:, None, None, :] - 1e-9) - 1)
    # Reductions of an axis of one are slow.
    one = room.shape[1] == 1
    each_lost = ends * slice_end[:, None, None, :]
    lost = each_lost[..., 0] if one else each_lost.max(-1)
    busy = work + lost
    result = _slowest(assignments.result)
    seconds = constants.start + constants.copying + busy + result
    usd = busy * assignments.worker_usd.sum(-1)[:, None, None]
    ahead, served = seconds - constants.start, constants.served - constants.copying * constants.served_late
    usd = usd + ahead * _total(assignments.server_usd, assignments)[:, None, None]
    if constants.started.any() or served.any():
        started_usd = assignments.worker_usd * constants.started + assignments.server_usd * served
        usd = usd + started_usd.sum(-1)[:, None, None]
    usd = usd + _below_zero(assignments.worker_usd, busy, constants.started)
    usd = usd + _below_zero(assignments.server_usd, ahead, served)
    calls_usd = (1 + ends) * call_usd[:, None, None, :]
    usd = usd + (calls_usd[..., 0] if one else calls_usd.sum(-1))
    merges_usd = (steps * assignments.merge_usd[:, None, :]).sum(-1)[..., None] if assignments.merge_usd.any() else none
    usd = usd + many * (merges_usd + exchanges.usd)
    return JobTimeline(
        compute, first_model, first_step, training, round_ends, round_work, between, ends, lost, busy, result,
        seconds, usd,
    )  # fmt: skip


def standing_seconds(each: Floats, exchanges: Exchanges) -> Floats:
    """Return the seconds of a round for which the slowest region's workers stand still for the exchange.

    In the background that is by how much exchanges are further apart than the compute takes. Where regions wait for
    each other, the updates of faster ones travel while the slowest one computes. A round then takes the largest mean of
    compute and way over all cycles of regions (max-plus algebra; Baccelli et al., Synchronization and Linearity, 1992,
    section 3.2): that of the two slowest, or the compute of the slowest one alone.

    Args:
        each: seconds of a round's steps, shape (..., regions); the result has the shape (..., exchanges).
    """
    compute = each.max(-1)[..., None]
    # A single region exchanges nothing, and in the background none waits for the next.
    alone = each.shape[-1] < 2 or exchanges.background.all()
    second = compute if alone else np.partition(each, -2, axis=-1)[..., -2, None]
    waited = exchanges.seconds - np.minimum((compute - second) / 2, exchanges.links)
    return np.asarray(np.where(exchanges.background, np.maximum(0.0, exchanges.apart - compute), waited))


def slice_ends(work_seconds: float, slice_seconds: float, step_seconds: float, own: Overheads) -> int:
    """Return the number of invocation ends, without the last one, of a worker with so much work."""
    room = float(_room(np.array(step_seconds), slice_seconds, np.array(own.enter)))
    return max(0, int(np.ceil(work_seconds / room - 1e-9)) - 1)


def _room(step_seconds: Floats, slice_seconds: float, enter: Floats) -> Floats:
    """Return the seconds of work of one invocation: its begin counts in its slice, and it makes at least one step.

    Where they are equal, the result has one row and one region for all.
    """
    room = np.maximum(slice_seconds - enter, _LEAST_ROOM_SECONDS)
    least = room.min()
    if room.ndim and least == room.max() and least >= step_seconds.max():
        return np.asarray(room[:1, :1])
    return np.asarray(np.maximum(room, step_seconds))


def _total(by_region: Floats, assignments: Assignments) -> Floats:
    """Return the sums over all regions of a figure that may have one row for all assignments."""
    if len(by_region) == len(assignments.step_samples):
        return np.asarray(by_region.sum(-1))
    # Rounded as the sums of several rows are: these are made region by region.
    return np.asarray(np.repeat(by_region.T, 2, axis=1).T.sum(-1)[:1])


def _below_zero(usd: Floats, seconds: Floats, besides: Floats) -> Floats:
    """Return by how many USD the regions are below zero whose seconds and those besides, by region, are negative: no
    item of a bill is. ``usd``: per second, shape (assignments, regions)."""
    found = np.zeros((1, 1, 1))
    # Only what passes after the functions have ended is taken off: an axis for all regions would be mostly zeros.
    for place in np.flatnonzero(besides < 0.0):
        found = found + usd[:, place, None, None] * np.maximum(0.0, -besides[place] - seconds)
    return found


def _slowest(by_region: Floats) -> Floats:
    """Return the largest of each assignment, with axes for intervals and exchanges."""
    return np.asarray(by_region.max(-1)[:, None, None])
