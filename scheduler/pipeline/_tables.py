"""All possible stages as arrays: for each way, first layer, last layer and function size.

One axis is of ways (degree and micro-batch: the order changes nothing here), one of options (a place and one of its
sizes), and for a first layer one of the layers after it. `_evaluate` says what the numbers mean; here they are only
computed for many stages at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scheduler.pipeline._evaluate import hop_between
from scheduler.pipeline._model import MIB, LinearCost, PipelineOptions, PipelineProblem

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

ROUNDING = 1e-9
"""Relative difference of a sum of bytes in another order of addition."""


@dataclass(frozen=True, eq=False)
class Stages:
    """All stages that begin with one layer. Axes are (way, last layer, option) unless said otherwise."""

    first: int
    fits: Floats
    """Micro-batches that may be in flight at once, not rounded down."""
    fits_again: Floats
    """The same, where the forward pass is computed again."""
    forward: Floats
    backward: Floats
    get_in: Floats
    """(way, option): the input; 0 for the first layer."""
    put_back: Floats
    """(way, option): the input's gradient."""
    put_out: Floats
    get_back: Floats
    merge: Floats
    """Seconds, with the optimiser's step."""
    core: Floats
    """(way, last layer, option): seconds for which all replicas keep one of the place's cores busy, divided by its
    cores."""
    core_again: Floats
    """Additional core seconds where the forward pass is computed again."""
    other_usd: Floats
    """Requests of one iteration."""


class Tables:
    """The tables of one problem."""

    def __init__(self, problem: PipelineProblem, ways: Sequence[PipelineOptions]) -> None:
        self.problem, self.ways = problem, tuple(ways)
        self.options = [(p, s) for p, place in enumerate(problem.places) for s in range(len(place.sizes))]
        self.place = np.array([p for p, _ in self.options])
        self._layers()
        self._options()
        self.degree = np.array([float(way.degree) for way in ways])
        self.micro = np.array([float(way.micro_batch) for way in ways])
        self.count = np.array([float(way.micro_batches(problem.batch)) for way in ways])
        self.alternates = np.array([way.order == "1f1b" for way in ways])
        alike = {(way.degree, way.micro_batch): number for number, way in reversed(list(enumerate(ways)))}
        self.alike = np.array([alike[way.degree, way.micro_batch] for way in ways])
        """By way: the first one that differs only in order, whose stages are the same."""
        self.rate = self.degree[:, None] * self._gb_usd
        """(way, option): USD per second of a stage."""
        self.least_busy = self._least_busy()
        self._hops()

    def _layers(self) -> None:
        profile, sums = self.problem.profile, self.problem.profile.sums
        layers = profile.layers
        self.length = len(layers)
        self.parameters = np.array(sums.parameter_bytes, dtype=float)
        self.activations = np.array(sums.activation_bytes, dtype=float)
        self.forward_base, self.forward_sample = _columns(sums.forward)
        self.backward_base, self.backward_sample = _columns(sums.backward)
        self.update = np.array(sums.update_s)
        self.passed = np.array([profile.input_bytes, *(layer.output_bytes for layer in layers)], dtype=float)
        """Bytes of a sample that enter a layer; the last entry leaves the model."""

    def _options(self) -> None:
        places = self.problem.places
        sizes = [places[p].sizes[s] for p, s in self.options]
        channels = [places[p].channel for p, _ in self.options]
        self.speed = np.array([size.speed for size in sizes])
        self._gb_usd = np.array([size.memory_mb / 1024 * size.usd_per_gb_second for size in sizes])
        self._room = np.array([size.memory_mb * MIB for size in sizes]) * (1 + ROUNDING)
        self._room -= self.problem.profile.base_mb * MIB
        pairs = list(zip(channels, sizes, strict=True))
        self._up = np.array([channel.up_bytes_per_s * size.bandwidth for channel, size in pairs])
        self._down = np.array([channel.down_bytes_per_s * size.bandwidth for channel, size in pairs])
        self._put_s = np.array([channel.put_s for channel in channels])
        self._get_s = np.array([channel.get_s for channel in channels])
        self._parallel = np.array([channel.parallel for channel in channels])
        self._request_core_s = np.array([channel.request_core_s for channel in channels])
        self._byte_core_s = np.array([channel.byte_core_s for channel in channels])
        self._per_core = np.array([1 / places[p].cores if places[p].cores else 0.0 for p, _ in self.options])
        """0: each function has its own."""
        self._put_usd = np.array([channel.put_usd for channel in channels])
        self._get_usd = np.array([channel.get_usd for channel in channels])
        gains = np.stack([self.speed, self._up, self._down, -self._gb_usd])
        self.better = [
            [
                i
                for i in range(len(sizes))
                if i != j and self.place[i] == self.place[j] and self._as_good(gains[:, i] - gains[:, j], i < j)
            ]
            for j in range(len(sizes))
        ]
        """By option: those of its place that are at least as fast and as cheap in all; of equal ones, the first."""

    @staticmethod
    def _as_good(ahead: Floats, earlier: bool) -> bool:
        return bool((ahead >= 0).all() and (earlier or (ahead > 0).any()))

    def needed(self, fits: Mask, kept: Mask) -> Mask:
        """Return which of the options (first axis) that fit are not redundant; `kept`: without computing again.

        A function that is as fast, as cheap and fits as well gives a stage that is no worse in anything that a pipeline
        consists of. An option that makes another one redundant is needed itself, or a better one is.
        """
        left = fits.copy()
        for j, others in enumerate(self.better):
            for i in others:
                left[j] &= ~fits[i] | kept[j] & ~kept[i]
        return left

    def _hops(self) -> None:
        """(place, place): latency and seconds per byte both ways, USD per byte both ways; infinite: no way."""
        n = len(self.problem.places)
        self.hop_s, self.hop_byte_s = np.full((2, n, n), np.inf), np.zeros((2, n, n))
        self.hop_byte_usd = np.zeros((n, n))
        for a in range(n):
            for b in range(a, n):
                ways = hop_between(self.problem, a, b), hop_between(self.problem, b, a)
                for k, hop in enumerate(ways):
                    if ways[0] is not None and ways[1] is not None and hop is not None:
                        self.hop_s[k, a, b] = hop.latency_s
                        self.hop_byte_s[k, a, b] = 1 / hop.bytes_per_s
                        self.hop_byte_usd[a, b] += hop.usd_per_gb / 1e9

    def compute(self, ways: Ints, first: int | Ints, after: Ints) -> tuple[Floats, Floats]:
        """(way, stage): forward and backward seconds at speed 1 of layers from `first` up to `after`."""
        micro = self.micro[ways][:, None]
        forward = self.forward_base[after] - self.forward_base[first]
        backward = self.backward_base[after] - self.backward_base[first]
        forward = forward + micro * (self.forward_sample[after] - self.forward_sample[first])
        backward = backward + micro * (self.backward_sample[after] - self.backward_sample[first])
        return forward, backward

    def starting(self, first: int, ways: Ints) -> Stages:
        """Return all stages that begin with a layer, for some ways; one of each set that is `alike` suffices."""
        after = np.arange(first + 1, self.length + 1)
        fits, fits_again = self.most_live(first, ways)
        alone = [one[:, :, None] for one in self.compute(ways, first, after)]
        forward, backward = (one / self.speed for one in alone)
        update = (self.update[after] - self.update[first])[None, :, None]
        leaving = np.where(after < self.length, self.passed[after], 0.0)
        inner = (after < self.length).astype(float)[None, :, None]
        shape = len(ways), len(after), len(self.options)
        share = self.problem.sent_share
        bytes_out = share * self.micro[ways][:, None, None] * leaving[None, :, None]
        bytes_in = share * self.micro[ways][:, None] * self.passed[first]
        entered = float(first > 0)
        return Stages(
            first=first,
            fits=fits,
            fits_again=fits_again,
            forward=forward,
            backward=backward,
            get_in=entered * (self._get_s + bytes_in / self._down),
            put_back=entered * (self._put_s + bytes_in / self._up),
            put_out=inner * self._put_s + bytes_out / self._up,
            get_back=inner * self._get_s + bytes_out / self._down,
            merge=self._merging(ways, self.parameters[after] - self.parameters[first], first, backward, update),
            core=np.broadcast_to(self._cores(ways, first, alone, update, entered + inner, leaving), shape),
            core_again=np.broadcast_to(self._cores_again(ways, alone[0]), shape),
            other_usd=self._requests(ways, entered + inner),
        )

    def most_live(self, first: int, ways: Ints) -> tuple[Floats, Floats]:
        """Return the micro-batches that may be in flight at once in stages from `first` on: kept, and computed
        again."""
        after = np.arange(first + 1, self.length + 1)
        own = 2.0 + self.problem.profile.state_factor
        copies = own + np.where(self.degree[ways] > 1, self.problem.merge_copies, 0.0)
        parameters = self.parameters[after] - self.parameters[first]
        activations = (self.activations[after] - self.activations[first])[None, :, None]
        leaving = np.where(after < self.length, self.passed[after], 0.0)
        entering = self.passed[first]
        left = self._room - (copies[:, None] * parameters)[:, :, None]
        left = left / self.micro[ways][:, None, None] - 2 * (entering + leaving)[None, :, None]
        kept = left / np.maximum(activations, 1e-9)
        free = np.flatnonzero(activations[0, :, 0] <= 0)
        kept[:, free] = np.where(left[:, free] >= 0, np.inf, -1.0)
        left = left - activations
        again = left / entering if entering > 0 else np.where(left >= 0, np.inf, -1.0)
        return kept, again

    def _merging(self, ways: Ints, sizes: Floats, first: int, backward: Floats, update: Floats) -> Floats:
        """(way, stage, option): `merge_seconds` of many sizes, or what is exposed of that, and the optimiser's step."""
        degrees, rows = np.unique(self.degree[ways], return_inverse=True)
        d = degrees[:, None, None]
        whole = self.problem.merged_share * sizes[None, :, None]
        merged, update = self._merge_of(whole, d), update / self.speed
        if not self.problem.merges_early:
            return (merged + update).take(rows, axis=0)
        merged = merged[rows]
        own = self.problem.merged_share * (self.parameters[first + 1] - self.parameters[first])
        late = np.maximum(own, whole / d)
        if self.problem.merges_apart:
            last = self._left_early(ways, d, rows, whole, late, first, backward) + self._merge_of(late, d)[rows]
        else:
            one_up, one_down, gets = self._one_part(whole / d, d)
            last = np.maximum(self._put_s + late / self._up + one_down, one_up + gets)
            last = np.where(d > 1, last + one_up + self._get_s + late / self._down, 0.0)[rows]
        return np.minimum(merged, np.maximum(merged - backward, last)) + update

    def _one_part(self, part: Floats, d: Floats | Ints) -> tuple[Floats, Floats, Floats]:
        """Seconds to put one owner's part, to get it, and to get all others' of it."""
        others = d - 1
        one_up, one_down = self._put_s + part / self._up, self._get_s + part / self._down
        turns = np.ceil(others / self._parallel)
        return one_up, one_down, np.maximum(self._get_s + others * part / self._down, turns * one_down)

    def _merge_of(self, whole: Floats, d: Floats | Ints) -> Floats:
        """`merge_seconds`."""
        part, others = whole / d, d - 1
        one_up, one_down, gets = self._one_part(part, d)
        puts = np.maximum(self._put_s + others * part / self._up, np.ceil(others / self._parallel) * one_up)
        found: Floats = np.where(d > 1, np.maximum(puts + one_down, one_up + gets) + one_up + gets, 0.0)
        return found

    def _left_early(
        self, ways: Ints, d: Ints, rows: Ints, whole: Floats, late: Floats, first: int, backward: Floats
    ) -> Floats:
        """Return the seconds that are left when the last backward pass ends, of what leaves early:
        `exposed_apart_seconds`."""
        # Layers that are whole in what is merged apart.
        reach = self.parameters[first] + late / max(self.problem.merged_share, 1e-300) * (1 + ROUNDING)
        within = np.searchsorted(self.parameters, reach[:, :, 0], side="right") - 1
        after = np.arange(first + 1, self.length + 1)
        within = np.minimum(within, after[None, :])[rows]
        micro = self.micro[ways][:, None]
        late_s = self.backward_base[within] - self.backward_base[first]
        late_s = (late_s + micro * (self.backward_sample[within] - self.backward_sample[first]))[
            :, :, None
        ] / self.speed
        early = (whole - late) / d
        one_up, _, gets = (one[rows] for one in self._one_part(early, d))
        down = (early / self._down)[rows]
        start = 2 * one_up + gets
        rest = (d - 1)[rows] * down - np.maximum(0.0, backward - late_s - start)
        left = np.maximum(0.0, start + self._get_s + np.maximum(down, rest) - late_s)
        found: Floats = np.where((d > 1)[rows] & (late < whole)[rows], left, 0.0)
        return found

    def _cores(
        self, ways: Ints, first: int, alone: Sequence[Floats], update: Floats, sides: Floats, leaving: Floats
    ) -> Floats:
        """`core_seconds` of all replicas, by the cores that they share."""
        if not self._per_core.any():
            return np.zeros(1)
        d, count, micro = (column[ways][:, None, None] for column in (self.degree, self.count, self.micro))
        passed = (self.passed[first] if first else 0.0) + leaving[None, :, None]
        merged = self.problem.merged_share * (self.parameters[first + 1 :] - self.parameters[first])[None, :, None]
        several = d > 1
        times = 2 if self.problem.merges_apart else 1
        requests = 2 * count * sides + np.where(several, times * (d + 2 * (d - 1)), 0.0)
        sent = 2 * count * micro * self.problem.sent_share * passed
        sent = sent + np.where(several, merged * (1 + 2 * (d - 1) / d), 0.0)
        moved = requests * self._request_core_s + sent * self._byte_core_s
        found: Floats = d * (count * (alone[0] + alone[1]) + update + moved) * self._per_core
        return found

    def _cores_again(self, ways: Ints, forward: Floats) -> Floats:
        if not self._per_core.any():
            return np.zeros(1)
        found: Floats = (self.degree * self.count)[ways][:, None, None] * forward * self._per_core
        return found

    def _least_busy(self) -> Floats:
        """Return by way the seconds for which all layers keep the cores of a single place busy, whatever the cuts."""
        if len(self.problem.places) > 1:
            return np.zeros(len(self.ways))
        forward, backward = self.compute(np.arange(len(self.ways)), 0, np.array([self.length]))
        found: Floats = self.degree * (self.count * (forward + backward)[:, 0] + self.update[-1]) * self._per_core[0]
        return found

    def _requests(self, ways: Ints, sides: Floats) -> Floats:
        # There are two numbers of sides at most: of all stages but the last one, and of that.
        few, rows = np.unique(sides, return_inverse=True)
        d, count = self.degree[ways][:, None, None], self.count[ways][:, None, None]
        passed = few[None, :, None] * d * count
        times = 2 if self.problem.merges_apart else 1
        merged = np.where(d > 1, times * d * d, 0.0), times * 2 * d * (d - 1)
        found: Floats = (passed + merged[0]) * self._put_usd + (passed + merged[1]) * self._get_usd
        return found.take(rows.ravel(), axis=1)


def _columns(lines: Sequence[LinearCost]) -> tuple[Floats, Floats]:
    return np.array([line.base_s for line in lines]), np.array([line.sample_s for line in lines])
