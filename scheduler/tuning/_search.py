"""The best configuration of all that there are: every dimension at once, exactly.

FasDL's search fixes the number of workers and the memory before it looks at K, and so misses what only the three
together make possible. Here all combinations are evaluated. A merge depends on memory only through bandwidth, so that
its closed form is computed once for each (collective, workers, K, share) and then combined with every memory and batch
in arrays.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from scheduler.tuning._model import ChannelProfile, Configuration, Prediction, Space, TaskModel, TuningLimits
from scheduler.tuning._predict import Grid, MergeCosts, Outcomes, costs_over, outcomes, prediction, share_of
from sync.collective import Correction, Merges, collective_named, collectives

_MUCH = 1e-9
"""Of two that differ relatively by less, the one that is better otherwise."""


@dataclass(frozen=True)
class _Evaluated:
    """All configurations of one channel with what they take; only those that fit."""

    grid: Grid
    told: Outcomes
    at: npt.NDArray[np.int64]
    """Places of the grid that fit."""
    names: tuple[str, ...] = field(default_factory=collectives)
    """Collectives by number."""


def configurations(task: TaskModel, space: Space) -> Iterator[Configuration]:
    """All of them, whether they fit or not."""
    for channel in _channels(task, space):
        for collective, workers, chunks in _merges(space):
            for memory_mb in space.memories_mb:
                for batch in space.batches:
                    yield Configuration(memory_mb, workers, batch, collective, chunks, channel)


def cheapest(task: TaskModel, space: Space, limits: TuningLimits = TuningLimits()) -> Prediction | None:  # noqa: B008 - frozen
    """The cheapest configuration that keeps the limits, of equals the fastest; None: there is none."""
    return _best(task, space, limits, by_cost=True)


def fastest(task: TaskModel, space: Space, limits: TuningLimits = TuningLimits()) -> Prediction | None:  # noqa: B008 - frozen
    """The fastest configuration that keeps the limits, of equals the cheapest; None: there is none."""
    return _best(task, space, limits, by_cost=False)


def front(task: TaskModel, space: Space, limits: TuningLimits = TuningLimits()) -> tuple[Prediction, ...]:  # noqa: B008 - frozen
    """The Pareto front of time and money, the fastest first: nothing else is better than one of these in both."""
    found: list[tuple[float, float, _Evaluated, int]] = []
    for evaluated in _evaluate(task, space):
        seconds, usd = evaluated.told.seconds[evaluated.at], evaluated.told.usd[evaluated.at]
        keep = (seconds <= limits.deadline_seconds) & (usd <= limits.budget_usd)
        found += [
            (float(evaluated.told.seconds[at]), float(evaluated.told.usd[at]), evaluated, int(at))
            for at in evaluated.at[keep][_undominated(seconds[keep], usd[keep])]
        ]
    told: list[Prediction] = []
    for _, usd_of_one, evaluated, at in sorted(found, key=lambda one: one[:2]):
        if not told or usd_of_one < told[-1].usd:
            told.append(prediction(_named(evaluated, at), evaluated.told, at))
    return tuple(told)


def step_front(task: TaskModel, space: Space) -> tuple[Prediction, ...]:
    """For each number of workers the configurations that no other beats in the seconds of a step, in memory and in the
    USD of its requests together; those with the fewest workers first."""
    found: list[Prediction] = []
    for evaluated in _evaluate(task, space):
        told, grid = evaluated.told, evaluated.grid
        told = replace(told, requests_usd=told.requests_usd / told.iterations)
        figures = np.stack([told.compute_seconds + told.merge_seconds, grid.memories_mb, told.requests_usd], axis=1)
        for workers in np.unique(grid.merges.workers[evaluated.at]):
            places = evaluated.at[grid.merges.workers[evaluated.at] == workers]
            found += [prediction(_named(evaluated, at), told, at) for at in places[_unbeaten(figures[places])]]
    return tuple(sorted(found, key=lambda one: one.configuration.workers))


def _unbeaten(figures: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Places of rows that no other row equals or beats in every figure; of equal rows the first."""
    left = np.lexsort(figures.T[::-1])
    kept: list[int] = []
    while len(left):
        kept.append(int(left[0]))
        left = left[(figures[left] < figures[left[0]]).any(axis=1)]
    return np.array(kept, np.int64)


def _best(task: TaskModel, space: Space, limits: TuningLimits, *, by_cost: bool) -> Prediction | None:
    best: tuple[float, float, _Evaluated, int] | None = None
    for evaluated in _evaluate(task, space):
        seconds, usd = evaluated.told.seconds[evaluated.at], evaluated.told.usd[evaluated.at]
        keep = (seconds <= limits.deadline_seconds) & (usd <= limits.budget_usd)
        if not keep.any():
            continue
        first, then = (usd, seconds) if by_cost else (seconds, usd)
        least = first[keep].min()
        as_good = keep & (first <= least * (1 + _MUCH))
        at = np.flatnonzero(as_good)[np.argmin(then[as_good])]
        one = (float(first[at]), float(then[at]), evaluated, int(evaluated.at[at]))
        if best is None or one[:2] < best[:2]:
            best = one
    return None if best is None else prediction(_named(best[2], best[3]), best[2].told, best[3])


def _evaluate(task: TaskModel, space: Space) -> Iterator[_Evaluated]:
    for name in _channels(task, space):
        grid, costs = _grid(task, space, name)
        evaluated = outcomes(task, grid, costs)
        yield _Evaluated(grid, evaluated, np.flatnonzero(evaluated.fits))


def _grid(task: TaskModel, space: Space, name: str) -> tuple[Grid, MergeCosts]:
    """Every combination for one channel, with what its merge takes."""
    channel = next(one for one in task.channels if one.name == name)
    shares = tuple(share_of(memory_mb, channel.full_rate_mb) for memory_mb in space.memories_mb)
    combined = _combined(space, name, shares)
    correction = task.corrections.get(name, Correction())
    grouped = not task.progress.staleness
    costs = _costs(space, channel, shares, task.model_bytes, correction, faithful=task.faithful, grouped=grouped)
    return combined.grid, costs.at(combined.at)


@dataclass(frozen=True)
class _Combined:
    """Every combination of a space over one channel."""

    grid: Grid
    once: Merges
    """Merges that differ; they depend on memory only through the share of the bandwidth."""
    at: npt.NDArray[np.int64]
    """Place in ``once`` of each one's merge."""


@lru_cache(maxsize=256)
def _costs(
    space: Space,
    channel: ChannelProfile,
    shares: tuple[float, ...],
    model_bytes: float,
    correction: Correction,
    *,
    faithful: bool,
    grouped: bool,
) -> MergeCosts:
    """Return what the merges of a space take; cached, since regions with equal channels merge alike."""
    return costs_over(channel, _combined(space, channel.name, shares).once, model_bytes, correction, faithful, grouped)


@lru_cache(maxsize=256)
def _combined(space: Space, name: str, shares: tuple[float, ...]) -> _Combined:
    """Return the combinations; cached, since most regions have the same. ``shares``: of the bandwidth, by memory."""
    kinds, ways = list(dict.fromkeys(shares)), _merges(space)
    once = Merges.of([(*way, share) for share in kinds for way in ways])
    memory, batch, way = (
        axis.ravel()
        for axis in np.meshgrid(
            np.arange(len(space.memories_mb)), np.arange(len(space.batches)), np.arange(len(ways)), indexing="ij"
        )
    )
    at = np.array([kinds.index(share) for share in shares])[memory] * len(ways) + way
    merges = Merges(once.collective[at], once.workers[at], once.chunks[at], once.share[at])
    grid = Grid(name, np.array(space.memories_mb, float)[memory], np.array(space.batches, float)[batch], merges)
    return _Combined(grid, once, at)


def _merges(space: Space) -> list[tuple[str, int, int]]:
    """Every (collective, workers, K), those that are the same merge once."""
    ways: dict[tuple[str, int, int], None] = {}
    for workers in space.workers:
        for collective in space.collectives:
            method = collective_named(collective)
            if method.takes_k:
                chunks = space.chunks or tuple(range(1, workers + 1))
                ways.update(dict.fromkeys((collective, workers, k) for k in chunks if k <= workers))
            else:
                ways[collective, workers, method.owners(workers, None)] = None
    return list(ways)


def _channels(task: TaskModel, space: Space) -> tuple[str, ...]:
    known = tuple(channel.name for channel in task.channels)
    return known if space.channels is None else tuple(name for name in known if name in space.channels)


def _undominated(seconds: npt.NDArray[np.float64], usd: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Places that no other beats in both."""
    order = np.lexsort((usd, seconds))
    if not len(order):
        return order
    cheapest_before = np.minimum.accumulate(np.concatenate(([np.inf], usd[order][:-1])))
    return order[usd[order] < cheapest_before]


def _named(evaluated: _Evaluated, at: int) -> Configuration:
    grid, merges = evaluated.grid, evaluated.grid.merges
    return Configuration(
        memory_mb=int(grid.memories_mb[at]),
        workers=int(merges.workers[at]),
        batch=int(grid.batches[at]),
        collective=evaluated.names[merges.collective[at]],
        chunks=int(merges.chunks[at]),
        channel=grid.channel,
    )
