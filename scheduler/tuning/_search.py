"""The steps of all configurations of a region, of which plans choose: workers, memory, collective and K together.

A merge depends on memory only through bandwidth, so that its closed form is computed once for each (collective,
workers, K, share) and then combined with every memory in arrays.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from scheduler.tuning._model import (
    ChannelProfile,
    Compute,
    Memory,
    Space,
    TaskModel,
)
from scheduler.tuning._predict import (
    ConfigurationGrid,
    MergeCosts,
    costs_over,
    needed_mb,
    share_of,
    step_seconds,
)
from sync.collective import Correction, Merges, collective_named, collectives


class Step(NamedTuple):
    """One step with a configuration."""

    workers: int
    memory_mb: int
    collective: str
    chunks: int
    compute_seconds: float
    merge_seconds: float
    merge_usd: float
    """Of the channel's requests."""


class Steps(NamedTuple):
    """Steps with many configurations, as columns."""

    workers: npt.NDArray[np.int64]
    memory_mb: npt.NDArray[np.int64]
    collective: npt.NDArray[np.int64]
    """Number among `collectives()`."""
    chunks: npt.NDArray[np.int64]
    compute_seconds: npt.NDArray[np.float64]
    merge_seconds: npt.NDArray[np.float64]
    merge_usd: npt.NDArray[np.float64]

    def one(self, at: int) -> Step:
        """Return the step at a place."""
        workers, memory_mb, number, *rest = (column[at].item() for column in self)
        return Step(workers, memory_mb, collectives()[number], *rest)


@dataclass(frozen=True, eq=False)
class StepChoices:
    """Configurations from which a front of steps is taken, of one channel and all batches: arrays with a row for each
    number of workers, ascending, in the order of memory and USD; shorter rows are filled up with any."""

    workers: npt.NDArray[np.int64]
    memory_mb: npt.NDArray[np.int64]
    collective: npt.NDArray[np.int64]
    chunks: npt.NDArray[np.int64]
    merge_seconds: npt.NDArray[np.float64]
    usd: npt.NDArray[np.float64]
    """Of a merge's requests; infinite where a row is filled up."""
    level: npt.NDArray[np.int64]
    """Of each, its memory as a place among ``sizes_mb``."""
    sizes_mb: npt.NDArray[np.float64]
    model_bytes: float

    def front(self, compute: Compute, memory: Memory, batch: int) -> Steps:
        """For each number of workers the configurations that no other equals or beats in the seconds of a step, in
        memory and in the USD of its requests together, of equal ones the first; those with the fewest workers first.

        In the order of seconds, memory and USD one is beaten if any before it has no more memory and costs no more. So
        the least USD of all before it is kept for each size of memory.
        """
        computed = step_seconds(compute, batch, self.sizes_mb)[self.level]
        there = self._filled & (needed_mb(memory, batch, self.model_bytes, self._owned) <= self._size_mb)
        # Places in the columns' memory, which is indexed faster so.
        order = self._first + np.where(there, computed + self.merge_seconds, np.inf).argsort(axis=-1, kind="stable")
        paid, level = np.where(there, self.usd, np.inf).take(order), self.level.take(order)
        up_to = np.where(level <= np.arange(len(self.sizes_mb))[:, None, None], paid, np.inf)
        same = level[:, 1:] * level.size + self._first + np.arange(level.shape[1] - 1)
        found = there.take(order)
        found[:, 1:] &= np.minimum.accumulate(up_to, axis=-1).take(same) > paid[:, 1:]
        at = order[found]
        return Steps(
            self.workers.take(at), self.memory_mb.take(at), self.collective.take(at), self.chunks.take(at),
            computed.take(at), self.merge_seconds.take(at), self.usd.take(at),
        )  # fmt: skip

    @cached_property
    def _filled(self) -> npt.NDArray[np.bool_]:
        return self.usd < np.inf

    @cached_property
    def _size_mb(self) -> npt.NDArray[np.float64]:
        return self.sizes_mb[self.level]

    @cached_property
    def _first(self) -> npt.NDArray[np.int64]:
        """Place of each row's first."""
        rows, columns = self.usd.shape
        return np.arange(0, rows * columns, columns)[:, None]

    @cached_property
    def _owned(self) -> npt.NDArray[np.float64]:
        return self.chunks.astype(float)


def step_choices(task: TaskModel, space: Space, name: str) -> StepChoices:
    """Return the configurations of one channel that may be in a front of steps, whatever a worker's step and its memory
    take."""
    costs = _merge_costs(task, space, name)
    combined = _useful(replace(space, batches=(1,)), name, _shares(task, space, name), costs)
    merges = combined.grid.merges
    usd = np.where(combined.there, costs.usd[combined.at][combined.by_workers], np.inf)
    rows = np.arange(len(usd))[:, None], np.lexsort((usd, combined.level), axis=-1)
    places, level = combined.by_workers[rows], combined.level[rows]
    workers, memory_mb, collective, chunks = (
        figure.astype(np.int64)[places]
        for figure in (merges.workers, combined.grid.memories_mb, merges.collective, merges.chunks)
    )
    seconds = costs.seconds[combined.at][places]
    return StepChoices(
        workers, memory_mb, collective, chunks, seconds, usd[rows], level, combined.sizes_mb, task.model_bytes
    )


def _shares(task: TaskModel, space: Space, name: str) -> tuple[float, ...]:
    channel = next(one for one in task.channels if one.name == name)
    return tuple(share_of(memory_mb, channel.full_rate_mb) for memory_mb in space.memories_mb)


def _merge_costs(task: TaskModel, space: Space, name: str) -> MergeCosts:
    channel = next(one for one in task.channels if one.name == name)
    correction = task.corrections.get(name, Correction())
    grouped = not task.progress.staleness
    # They do not depend on the batch.
    return _costs(
        replace(space, batches=(1,)), channel, _shares(task, space, name), task.model_bytes, correction,
        faithful=task.faithful, grouped=grouped,
    )  # fmt: skip


@dataclass(frozen=True)
class _Combined:
    """Every combination of a space over one channel."""

    grid: ConfigurationGrid
    once: Merges
    """Merges that differ; they depend on memory only through the share of the bandwidth."""
    at: npt.NDArray[np.int64]
    """Place in ``once`` of each one's merge."""
    by_workers: npt.NDArray[np.int64]
    """Places of the combinations, a row for each number of workers; shorter rows are filled up with any."""
    there: npt.NDArray[np.bool_]
    """Which are not only filled up with."""
    level: npt.NDArray[np.int64]
    """Of each in ``by_workers``, its memory as a place among ``sizes_mb``."""
    sizes_mb: npt.NDArray[np.float64]
    """The different memories, ascending."""


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
    grid = ConfigurationGrid(
        name, np.array(space.memories_mb, float)[memory], np.array(space.batches, float)[batch], merges
    )
    return _in_rows(grid, once, at)


@lru_cache(maxsize=1024)
def _useful(space: Space, name: str, shares: tuple[float, ...], costs: MergeCosts) -> _Combined:
    """Return the combinations without those whose merge another one of as many workers equals or beats in seconds, USD
    and the memory of an owner."""
    every = _combined(space, name, shares)
    once, keeps = every.once, np.ones(len(every.once.workers), bool)
    for share, workers in {*zip(once.share.tolist(), once.workers.tolist(), strict=True)}:
        own = np.flatnonzero((once.share == share) & (once.workers == workers))
        seconds, usd, chunks = costs.seconds[own], costs.usd[own], once.chunks[own]
        # Of equal ones the first stays.
        beats = (usd[:, None] < usd) | ((usd[:, None] == usd) & np.triu(np.ones((len(own), len(own)), bool), 1))
        beats &= (seconds[:, None] <= seconds) & (chunks[:, None] >= chunks)
        keeps[own] = ~beats.any(axis=0)
    left = keeps[every.at]
    grid, merges = every.grid, every.grid.merges
    kept = Merges(merges.collective[left], merges.workers[left], merges.chunks[left], merges.share[left])
    return _in_rows(ConfigurationGrid(name, grid.memories_mb[left], grid.batches[left], kept), once, every.at[left])


def _in_rows(grid: ConfigurationGrid, once: Merges, at: npt.NDArray[np.int64]) -> _Combined:
    merges = grid.merges
    rows = [np.flatnonzero(merges.workers == workers) for workers in np.unique(merges.workers)]
    by_workers, there = np.zeros((2, len(rows), max(map(len, rows), default=0)), np.int64)
    for number, places in enumerate(rows):
        by_workers[number, : len(places)], there[number, : len(places)] = places, 1
    sizes, level = np.unique(grid.memories_mb, return_inverse=True)
    return _Combined(grid, once, at, by_workers, there > 0, level.reshape(-1)[by_workers], sizes)


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
