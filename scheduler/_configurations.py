"""The configurations of one region: workers, memory, collective and K, or the replicas of a pipeline.

Only those are kept that no other with as many workers beats in time, in money while it waits and in money of a step.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import numpy.typing as npt

from scheduler._cost_model import Assignments, Bools, Floats, step_seconds, whole_model_step_seconds
from scheduler._estimate import figures_of, overheads_of_whole_models, prices_of, worker_speed
from scheduler._model import Demand, PlannedPartition, Region, Snapshot
from scheduler._pipelined import Staged, staged
from scheduler._published_rules import METHODS
from scheduler._shard_moves import train_clients, train_samples
from scheduler.search import Ints
from scheduler.tuning._profile import MEMORIES_MB, compute_of, worker_counts
from sync.channel import channel_kinds
from sync.collective import DEFAULT, collective_named, collectives
from sync.policy import clients_of_round

if TYPE_CHECKING:
    from scheduler.tuning import MergePoint, Step, StepChoices, Steps, TaskModel, TaskProfile

__all__ = [
    "ConfiguredPartition", "RegionConfigurations", "configurations", "in_stages", "merge_of",
    "merging_of", "needed_mb", "unmeasured_mb",
]  # fmt: skip

DEFAULT_MEMORY_MB = 1024
"""Memory of one worker in MiB where the job file says `auto` and the region's capacity allows it: torch with a small
model fits. A choice, not measured."""
TORCH_MB = 320
"""Memory of a worker that has imported PyTorch and done nothing else, in MB, as measured with torch 2 for CPUs."""
_MORE_VECTORS = 6
"""Vectors of what is trained that a worker has at its peak besides the model's tensors and gradients: two values of the
optimiser for each parameter, as Adam has, the merge's and the snapshot's, and what a step needs for a while. Measured
with Adam and 40 million parameters, above PyTorch alone: 26 bytes a parameter after two steps and a snapshot, 30 with a
gradient vector for a merge; 38 in a step made while all vectors of the exchange before it are kept."""
_MOST_DIVIDING = 128
"""Regions up to which plans divide batches: to find how, in a thousand with a profile each, takes 0.7 s, a third of
the plan's time."""
_FIXED_SHARE = 0.5
"""Part of a step's seconds that is taken not to depend on its samples, where nothing tells."""
_MOST_CHUNKS = 1 << 32
"""More than any number of chunks of a merge, so that a collective and its K make one number."""


@dataclass(frozen=True)
class ConfiguredPartition:
    """One configuration."""

    part: PlannedPartition
    """With one step a round."""
    merging: tuple[str, int] | None = None
    """Collective, and K where it takes one (else 0); None: nothing merges, or no measurements say how."""


class RegionConfigurations(Sequence[ConfiguredPartition]):
    """The configurations of one region; arrays have one figure of each, in their order."""

    workers: Ints
    stages: Ints
    """Of a pipeline; 1: its workers hold the whole model."""
    memory_mb: Ints
    batches: Ints
    """Samples of a worker in a step; of a pipeline, of a replica."""
    holds_step: bool
    """Whether functions have memory for a step, as far as a profile tells that."""

    @property
    @abstractmethod
    def merges(self) -> Ints:
        """A number for each way to merge, the same in all regions (`merge_of`)."""

    @property
    @abstractmethod
    def figures(self) -> Floats:
        """`Assignments.figures` of each; shape (figures, configurations)."""

    @abstractmethod
    def fastest_merging(self, at: int) -> ConfiguredPartition:
        """Return the one that merges fastest of those with the same workers, batch and memory as the one at a place."""

    def __len__(self) -> int:
        return len(self.workers)

    @overload
    def __getitem__(self, at: int) -> ConfiguredPartition: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[ConfiguredPartition]: ...
    def __getitem__(self, at: int | slice) -> ConfiguredPartition | Sequence[ConfiguredPartition]:
        return [self._one(n) for n in range(len(self))[at]] if isinstance(at, slice) else self._one(at)

    @abstractmethod
    def _one(self, at: int) -> ConfiguredPartition:
        """Return the one at a place."""

    def _alike(self, at: int) -> list[int]:
        same = (self.workers == self.workers[at]) & (self.memory_mb == self.memory_mb[at])
        same &= self.batches == self.batches[at]
        return [int(place) for place in np.flatnonzero(same)]


class _Listed(RegionConfigurations):
    """A few configurations, as objects."""

    def __init__(
        self, each: Sequence[ConfiguredPartition], region: Region, snapshot: Snapshot, *, holds_step: bool = True
    ) -> None:
        self._each, self._region, self._snapshot, self.holds_step = each, region, snapshot, holds_step
        self.workers = np.array([one.part.workers for one in each], np.int64)
        self.stages = np.array([one.part.workers // max(1, one.part.replicas) for one in each], np.int64)
        self.memory_mb = np.array([one.part.memory_mb for one in each], np.int64)
        self.batches = np.array([one.part.batch for one in each], np.int64)

    @cached_property
    def merges(self) -> Ints:
        known = collectives()
        return np.array(
            [
                -1 if one.merging is None else known.index(one.merging[0]) * _MOST_CHUNKS + one.merging[1]
                for one in self._each
            ],
            np.int64,
        )

    @cached_property
    def figures(self) -> Floats:
        return np.array(figures_of([one.part for one in self._each], self._region, self._snapshot)).T

    def fastest_merging(self, at: int) -> ConfiguredPartition:
        return min((self._each[n] for n in self._alike(at)), key=lambda one: one.part.merge_seconds or 0.0)

    def _one(self, at: int) -> ConfiguredPartition:
        return self._each[at]


class _Measured(RegionConfigurations):
    """Configurations whose steps a profile has measured: a region may have hundreds, of which a plan takes one."""

    def __init__(
        self, steps: Steps, divided: Ints, region: Region, samples: int, snapshot: Snapshot, demand: Demand
    ) -> None:
        """``divided``: of each, `PlannedPartition.divided`."""
        self._divided, self.batches = divided, demand.batch // divided
        self._steps, self._region, self._snapshot, self.holds_step = steps, region, snapshot, True
        self._samples, self._demand, self._made = samples, demand, dict[int, ConfiguredPartition]()
        self.workers, self._devices = steps.workers, region.worker_devices(demand.gpus)
        self.stages = np.ones_like(steps.workers)
        sizes = sorted(set(steps.memory_mb.tolist()))
        self._given, self._size = (
            [region.capacity.function_mb(mb) for mb in sizes],
            np.searchsorted(sizes, steps.memory_mb),
        )
        self.memory_mb = np.array(self._given, np.int64)[self._size]

    @cached_property
    def merges(self) -> Ints:
        steps = self._steps
        chunks = np.where(_take_k()[steps.collective], steps.chunks, 0)
        return np.where(steps.workers > 1, steps.collective * _MOST_CHUNKS + chunks, -1)

    @cached_property
    def figures(self) -> Floats:
        steps, batch, prices = self._steps, self.batches.astype(float), prices_of(self._region)
        workers = steps.workers.astype(float)
        seconds = whole_model_step_seconds(
            workers, batch, self._largest_shares, batch / steps.compute_seconds, steps.merge_seconds
        )
        usd = np.array([prices.worker_usd_per_second(mb, self._devices) for mb in self._given])[self._size]
        besides = overheads_of_whole_models(self._region, self._snapshot)
        told = Assignments.told(workers, workers * batch, seconds, usd, steps.merge_usd, prices, besides)
        found = np.empty((len(told), len(self)))
        for row, figure in enumerate(told):
            found[row] = figure
        return found

    @cached_property
    def _largest_shares(self) -> Floats:
        if self._demand.merging.get("ratio", 1.0) == 1.0:
            return np.ones(len(self))
        pairs = zip(self.workers.tolist(), self._steps.chunks.tolist(), strict=True)
        return np.array([_largest_share(workers, chunks, self._demand) for workers, chunks in pairs])

    def fastest_merging(self, at: int) -> ConfiguredPartition:
        same = self._alike(at)
        return self._one(same[int(self._steps.merge_seconds[same].argmin())])

    def _one(self, at: int) -> ConfiguredPartition:
        if at not in self._made:
            one, divided = self._steps.one(at), int(self._divided[at])
            self._made[at] = _measured_one(one, self._region, self._samples, self._demand, divided)
        return self._made[at]


@cache
def _take_k() -> npt.NDArray[np.bool_]:
    """Return of each collective whether it takes a K."""
    return np.array([collective_named(name).takes_k for name in collectives()])


def configurations(region: Region, snapshot: Snapshot, demand: Demand) -> RegionConfigurations:
    """Return the configurations of a region, those with the fewest workers first; never none.

    What a published rule chooses for the region alone is before all others. A number of workers that the demand states
    is taken as it is, even if the region does not have so many; but no more than clients of a round, or replicas.
    """
    samples, cut = train_samples(region, demand.dataset), staged(region, snapshot, demand)
    stated = demand.workers if isinstance(demand.workers, int | None) else demand.workers[region.name]
    free = snapshot.free_workers(region, demand.gpus)
    if cut is not None:
        most = min(free // cut.stages, cut.most_replicas, max(1, samples // demand.batch))
        counts = worker_counts(most) if stated is None else (min(stated // cut.stages, cut.most_replicas),)
        pairs = [(cut, count) for count in counts]
        for other in cut.others:
            most = min((free if stated is None else stated) // other.stages, other.most_replicas)
            most = min(most, max(1, samples // demand.batch)) if stated is None else most
            # A few, since the schedule of each is played.
            tried = {1, (most + 1) // 2, most} if stated is None else {most}
            pairs += [(other, count) for count in sorted(tried) if count > 0]
        pairs.sort(key=lambda pair: pair[0].stages * pair[1])
        cuts = [ConfiguredPartition(in_stages(region, samples, one, count, demand)) for one, count in pairs]
        return _Listed(cuts, region, snapshot)
    rounds = _client_rounds(region, samples, demand)
    most = rounds.clients if rounds else samples // demand.batch
    counts = worker_counts(max(1, min(free, most)))
    if stated is not None:
        most = min(stated, rounds.clients) if rounds else stated
        counts = (most,)
    known = _profiled(region, snapshot, demand)
    divisions = _divisions(free, snapshot, demand)
    if len(divisions) > 1:
        # What workers together take in a step must not be more than the shard, not what each would take undivided.
        counts = worker_counts(max(1, free))
    measured, divided = None, np.ones(0, np.int64)
    if known is not None:
        measured, divided = _measured(region, known, counts, divisions, most, snapshot, demand)
    # Workers whose functions would not hold a step are left out, if others' do.
    holds = measured is None or len(measured.workers) > 0
    found: list[ConfiguredPartition] = []
    if known is not None and demand.method is not None and METHODS[demand.method].by_region:
        found.append(_measured_one(_alone(known, region, counts, snapshot, demand), region, samples, demand))
    elif measured is not None and holds and rounds is None:
        return _Measured(measured, divided, region, samples, snapshot, demand)
    if measured is not None and holds:
        found += [_measured_one(measured.one(at), region, samples, demand) for at in range(len(measured.workers))]
    else:
        found += _unmeasured(region, samples, counts, divisions, most, snapshot, demand)
    found = found if rounds is None else [_in_rounds(one, rounds) for one in found]
    return _Listed(found, region, snapshot, holds_step=holds)


@dataclass(frozen=True)
class _ClientRounds:
    """Rounds of a region's clients."""

    total: int
    """Clients of the region."""
    clients: int
    """Clients of a round."""
    samples: float
    """Samples that they are expected to process."""


def _client_rounds(region: Region, samples: int, demand: Demand) -> _ClientRounds | None:
    """Return the rounds of a region's clients; None: the job has none."""
    wanted = demand.clients
    if wanted is None:
        return None
    total = train_clients(region, demand.dataset)
    drawn, each = clients_of_round(total, wanted.fraction, wanted.least), samples / total
    trained = wanted.steps * min(float(demand.batch), each) if wanted.steps else wanted.epochs * each
    return _ClientRounds(total, drawn, drawn * trained)


def _in_rounds(one: ConfiguredPartition, rounds: _ClientRounds) -> ConfiguredPartition:
    """Return a configuration whose step is a round of clients, which its workers divide among themselves."""
    batch = max(1, math.ceil(rounds.samples / one.part.workers - 1e-9))
    part = replace(
        one.part, batch=batch, clients=rounds.total, clients_per_round=rounds.clients, clients_samples=rounds.samples
    )
    return replace(one, part=part)


def merge_of(number: int) -> tuple[str, int] | None:
    """Return what a number of `RegionConfigurations.merges` stands for, as `ConfiguredPartition.merging`."""
    return None if number < 0 else (collectives()[number // _MOST_CHUNKS], number % _MOST_CHUNKS)


def merging_of(chosen: Sequence[ConfiguredPartition]) -> tuple[str, int] | None:
    """Return how all partitions with several workers merge, where their profiles choose the same for all."""
    ways = {one.merging for one in chosen if one.part.workers > 1 and one.part.pipeline is None}
    return ways.pop() if len(ways) == 1 else None


def _profiled(region: Region, snapshot: Snapshot, demand: Demand) -> TaskProfile | None:
    """Return the profile that tells of a region's configurations; None: it is of another channel, or of no use."""
    profile, wanted = snapshot.profiles.get(region.name), demand.collective
    if profile is None or region.prices is None or profile.channel.name != region.channel:
        return None
    return profile if wanted is None or collective_named(wanted).predictable else None


def _divisions(free: int, snapshot: Snapshot, demand: Demand) -> tuple[int, ...]:
    """Return among how many workers a batch may be divided; 1: each takes one. The parts are equal, so powers of two
    are tried."""
    divides = demand.divides_batch and demand.workers is None and not snapshot.normalises_by_batches
    if not divides or len(snapshot.regions) > _MOST_DIVIDING:
        return (1,)
    return tuple(two for power in range(31) if (two := 1 << power) <= max(1, free) and demand.batch % two == 0)


def _unmeasured(
    region: Region,
    samples: int,
    counts: Sequence[int],
    divisions: Sequence[int],
    most: int,
    snapshot: Snapshot,
    demand: Demand,
) -> list[ConfiguredPartition]:
    """Return the configurations of which no profile tells.

    ``most``: batches of a step at most. Workers divide batches only where they are faster so, and where runs have
    measured what the many merges take.
    """
    memory_mb, speed = unmeasured_mb(region, snapshot, demand), worker_speed(region, snapshot)
    fixed, devices = snapshot.fixed_shares.get(region.name, _FIXED_SHARE), region.worker_devices(demand.gpus)
    found, fastest, owners = list[ConfiguredPartition](), dict[float, float](), int(demand.merging.get("k", 0))
    for count in counts:
        merge = _ran_merge(region, count, snapshot, demand)
        for divided in divisions:
            if count % divided or count // divided > max(1, most) or (divided > 1 and merge is None):
                continue
            part = PlannedPartition(
                region.name, samples, count, demand.batch // divided, memory_mb, 1,
                speed / (fixed * divided + 1.0 - fixed), divided, merge_seconds=merge,
                largest_share=_largest_share(count, owners, demand), devices=devices,
            )  # fmt: skip
            if len(divisions) > 1:
                best, seconds = fastest.get(part.step_samples, math.inf), step_seconds(part)
                if divided > 1 and seconds >= best:
                    continue
                fastest[part.step_samples] = min(seconds, best)
            found.append(ConfiguredPartition(part))
    return found


def _measured_one(one: Step, region: Region, samples: int, demand: Demand, divided: int = 1) -> ConfiguredPartition:
    """Return the configuration whose step is known. ``divided``: workers that divide a batch."""
    batch = demand.batch // divided
    part = PlannedPartition(
        region.name, samples, one.workers, batch, region.capacity.function_mb(one.memory_mb), 1,
        batch / one.compute_seconds, divided, merge_seconds=one.merge_seconds, merge_usd=one.merge_usd,
        largest_share=_largest_share(one.workers, one.chunks, demand), devices=region.worker_devices(demand.gpus),
    )  # fmt: skip
    return ConfiguredPartition(part, _way(one) if one.workers > 1 else None)


def _way(one: Step) -> tuple[str, int]:
    return one.collective, one.chunks if collective_named(one.collective).takes_k else 0


def _largest_share(workers: int, owners: int, demand: Demand) -> float:
    """Return the samples of a worker that merges no chunk, as a multiple of an equal part, if ``owners`` of all workers
    merge one; 1 where all do, or 0 are known to."""
    if not 0 < owners < workers:
        return 1.0
    ratio = demand.merging.get("ratio", 1.0)
    return ratio * workers / (owners + (workers - owners) * ratio)


def _ran_merge(region: Region, workers: int, snapshot: Snapshot, demand: Demand) -> float | None:
    """Return the seconds of a merge by runs of the task without a profile: those of the nearest number of workers, in
    proportion to the others that each worker merges with; of one worker, that of the nearest, which it would take with
    others. None: no run tells."""
    points = snapshot.merges.get(region.name, ())
    if not points or demand.merging_codec != "fp32" or demand.merging.get("staleness"):
        return None
    usual = collectives(lambda method: method.predictable)
    wanted = usual if demand.collective is None else (demand.collective,)
    told = [point for point in points if point.collective in wanted]
    if not told:
        return None
    nearest = min((point.workers for point in told), key=lambda count: (abs(count - workers), count))
    its = [point.seconds for point in told if point.workers == nearest]
    return float(np.median(its)) * ((workers - 1) / (nearest - 1) if workers > 1 else 1.0)


def needed_mb(snapshot: Snapshot, demand: Demand) -> float:
    """Return the memory in MB that a worker needs for a whole model, as counted by an agent; of one that none has
    counted, PyTorch's alone."""
    held = snapshot.held_bytes
    if held is None:
        return TORCH_MB
    # Frozen weights have neither gradients nor vectors: only what is trained has, which is what regions exchange. With
    # `train.local` they exchange less than that, and all that is held counts: 8 bytes a parameter, with clients 24.
    trained = held / (24 if demand.clients else 8) * 4 if demand.local else snapshot.model_bytes or 0
    return TORCH_MB + (held + _MORE_VECTORS * trained) / 2**20


def unmeasured_mb(region: Region, snapshot: Snapshot, demand: Demand) -> int:
    """Return the memory in MB of a worker whose steps no profile has measured: more than usual for a model that an
    agent has counted and that needs it, at most what the region allows."""
    needed = needed_mb(snapshot, demand)
    wanted = next((mb for mb in MEMORIES_MB if mb >= max(DEFAULT_MEMORY_MB, needed)), math.ceil(needed))
    return region.capacity.function_mb(demand.memory_mb or min(wanted, region.capacity.memory_mb))


def in_stages(region: Region, samples: int, cut: Staged, replicas: int, demand: Demand) -> PlannedPartition:
    """Return a partition that runs a pipeline. Raises ValueError where its functions cannot hold it."""
    shape = cut.shape(replicas)
    return PlannedPartition(
        region=region.name,
        samples=samples,
        workers=replicas * cut.stages,
        batch=demand.batch,
        memory_mb=region.capacity.function_mb(cut.memory_mb),
        steps_per_round=1,
        samples_per_second=demand.batch / shape.step_seconds / cut.stages,
        pipeline=shape,
        devices=region.worker_devices(demand.gpus),
    )


def _measured(
    region: Region,
    profile: TaskProfile,
    counts: tuple[int, ...],
    divisions: Sequence[int],
    most: int,
    snapshot: Snapshot,
    demand: Demand,
) -> tuple[Steps, Ints]:
    """Return the steps that a profile tells of, and among how many workers a batch is divided in each. ``most``:
    batches of a step at most."""
    wanted = demand.collective
    if wanted is None and region.channel in channel_kinds(lambda kind: kind.in_memory):
        # There the region's parameter server merges, where the plan leaves it open.
        wanted = DEFAULT
    chunks = demand.merging.get("k") if wanted is not None else None
    task, choices = _choices(
        profile, counts, demand.memory_mb, region.capacity.memory_mb, wanted, None if chunks is None else int(chunks),
        int(demand.merging.get("staleness", 0)), snapshot.merges.get(region.name, ()),
    )  # fmt: skip
    compute = compute_of(profile, snapshot.speeds.get(region.name))
    whole = choices.front(compute, task.memory, demand.batch)
    if len(divisions) > 1:
        whole = _of_steps(whole, whole.workers <= max(1, most))
    found, numbers = [whole], [np.ones_like(whole.workers)]
    for divided in divisions[1:]:
        steps = choices.front(compute, task.memory, demand.batch // divided)
        steps = _of_steps(steps, (steps.workers % divided == 0) & (steps.workers // divided <= max(1, most)))
        steps = _of_steps(steps, ~_equalled(steps, divided, whole, region))
        found.append(steps)
        numbers.append(np.full_like(steps.workers, divided))
    if len(found) == 1:
        return whole, numbers[0]
    columns: Any = (np.concatenate(each) for each in zip(*found, strict=True))
    joined, number = type(whole)(*columns), np.concatenate(numbers)
    order = np.lexsort((number, joined.workers))
    return _of_steps(joined, order), number[order]


def _of_steps(steps: Steps, which: Ints | Bools) -> Steps:
    columns: Any = (column[which] for column in steps)
    return type(steps)(*columns)


def _equalled(steps: Steps, divided: int, whole: Steps, region: Region) -> Bools:
    """Return of steps whose batches ``divided`` workers divide each whether workers that divide none make as many
    samples as fast, for no more."""

    def paid_mb(one: Steps) -> Ints:
        sizes, places = np.unique(one.memory_mb, return_inverse=True)
        given = [region.capacity.function_mb(mb) for mb in sizes.tolist()]
        return np.array(given, np.int64)[places] * one.workers

    fewer = whole.workers == steps.workers[:, None] // divided
    fewer &= whole.compute_seconds + whole.merge_seconds <= (steps.compute_seconds + steps.merge_seconds)[:, None]
    fewer &= (paid_mb(whole) <= paid_mb(steps)[:, None]) & (whole.merge_usd <= steps.merge_usd[:, None])
    return np.asarray(fewer.any(axis=1))


def _alone(profile: TaskProfile, region: Region, counts: tuple[int, ...], snapshot: Snapshot, demand: Demand) -> Step:
    """Return the workers, and their step, that FasDL's search chooses for one region: within the deadline if it can."""
    from scheduler.tuning import PlatformCosts, Step, TuningLimits, fasdl_heuristic, space_of, task_of

    prices = region.prices
    assert prices is not None, "a region without prices takes no part"
    platform = PlatformCosts(
        usd_per_gb_second=prices.function_usd_per_gb_second, usd_per_call=prices.function_usd_per_request,
        server_usd_per_hour=prices.server_usd_per_hour, slice_seconds=demand.longest_slice([region]),
        usd_per_second=region.worker_devices(demand.gpus) * prices.device_usd_per_second,
    )  # fmt: skip
    task = task_of(
        profile, platform, epochs=demand.epochs, steps=demand.steps,
        samples_per_second=snapshot.speeds.get(region.name), merges=snapshot.merges.get(region.name, ()),
    )  # fmt: skip
    space = space_of(
        profile, workers=counts, most_memory_mb=region.capacity.memory_mb, batch=demand.batch,
        memory_mb=demand.memory_mb,
    )  # fmt: skip
    limits = TuningLimits(demand.deadline_seconds or math.inf)
    found = [
        one
        for limit in (limits, TuningLimits())
        if (one := fasdl_heuristic(task, space, limit, profile.channel.name, demand.batch)) is not None
    ]
    if not found:
        memory_mb = demand.memory_mb or region.capacity.memory_mb
        return Step(counts[-1], memory_mb, DEFAULT, 0, profile.step_seconds, 0.0, 0.0)
    best, way = found[0], found[0].configuration
    requests = best.requests_usd / best.iterations
    return Step(
        way.workers, way.memory_mb, way.collective, way.chunks, best.compute_seconds, best.merge_seconds, requests
    )


@lru_cache(maxsize=2048)
def _choices(
    profile: TaskProfile,
    counts: tuple[int, ...],
    memory_mb: int | None,
    most_memory_mb: int,
    collective: str | None,
    chunks: int | None,
    staleness: int,
    merges: tuple[MergePoint, ...],
) -> tuple[TaskModel, StepChoices]:
    """Return the configurations that may be best with some batch; cached, since a plan tries several, and jobs that
    wait are replanned often."""
    from scheduler.tuning import PlatformCosts, space_of, step_choices, task_of

    task = task_of(profile, PlatformCosts(0.0), epochs=None, steps=1, staleness=staleness, merges=merges)
    space = space_of(
        profile, workers=counts, most_memory_mb=most_memory_mb, batch=1, collective=collective, chunks=chunks,
        memory_mb=memory_mb,
    )  # fmt: skip
    return task, step_choices(task, space, profile.channel.name)
