"""Lower bounds of what the first layers of a chain take: beginnings of pipelines."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

import numpy as np

from scheduler.pipeline._known import SINGLE, Front, Singles
from scheduler.pipeline._labels import Mask, ranges
from scheduler.pipeline._tables import Floats, Ints, Stages, Tables

__all__ = [
    "ALONE",
    "BEAT",
    "BEAT_F",
    "FILL",
    "FINISH",
    "FORWARD",
    "LEVELS",
    "NEVER",
    "OTHER",
    "Beginnings",
    "ChainPrefixes",
]

LEVELS = 48 - 1
"""Steps of a way's rate, each as large as its cheapest function's; larger rates count as the last step."""
NONE, NEVER = np.float32(0.0), np.float32(1e15)
"""Seconds of what does not fit. Not infinite, since it is multiplied by zero."""
NUMBERS = 4
"""Numbers of stages behind a beginning that are tried at once."""
PAIRS = 1 << 14
"""Beginnings that are extended by one stage at a time, for each of its choices: what the caches hold."""
BEATS = 1 << 7
"""Steps of a stage's slowest lane, by factors, from the fastest one's to the slowest one's."""

FILL, FORWARD, OTHER, BEAT_F, BEAT, FINISH, ALONE = range(7)
"""Tables of lower bounds for a beginning. FINISH is the forward passes up to a stage, its merge, and the backward
passes back to the first stage; ALONE is the least that these stages would take as a pipeline. It ties fill and beat
together: of the cuts with the least fill, and those with the least beat, neither has the least of both."""
TABLES = 7
"""Number of the tables of bounds above, `FILL` to `ALONE`."""


@dataclass(frozen=True, eq=False)
class ChainPrefixes:
    """All cuts of the first layers, up to one layer: by way, number of stages and rate level, in this order, each with
    the least of some sums and maxima. A rate is counted in whole steps, each stage's rounded down."""

    way: Ints
    stages: Ints
    level: Ints
    values: Singles
    """(table, row)."""

    def take(self, rows: Ints) -> ChainPrefixes:
        """Some of the rows."""
        return ChainPrefixes(self.way[rows], self.stages[rows], self.level[rows], self.values.take(rows, axis=1))


@dataclass(frozen=True, eq=False)
class _Arcs:
    """Stages that begin with one layer, in single precision, by (last layer, way, option); `NEVER`: fits nowhere."""

    first: int
    added: Singles
    """(3, ..): seconds forward and backward, seconds forward, USD of requests."""
    beats: Singles
    """(2, ..): the slowest lane forward, and both ways."""
    merge: Singles


class Beginnings:
    """All beginnings of one problem. Hops between regions count as free.

    A beginning is omitted if it cannot improve the front by more than a share, with any stages behind it.
    """

    def __init__(self, tables: Tables, front: Front, within: float) -> None:
        self._tables, self._front, self._within = tables, front, within
        per_replica = tables.rate[0] / tables.degree[0]
        self.unit = float(per_replica.min()) or 1.0
        """USD per second of a level and replica."""
        self._steps = np.minimum(np.floor(per_replica / self.unit * (1 + 1e-9)), LEVELS).astype(int)
        every = np.unique(tables.alike)
        row = np.searchsorted(every, tables.alike)
        arcs = [self._arcs_from(first, tables.starting(first, every), row) for first in range(tables.length)]
        self.beats = [one.beats[1] for one in arcs]
        """Slowest lane both ways of the stages that begin with each layer, by (last layer, way, option)."""
        self._after = self._suffixes(arcs)
        self._most = self._useful_stages()
        self.up_to = self._prefixes(arcs)
        """Prefixes by number of layers."""

    def _arcs_from(self, first: int, stages: Stages, row: Ints) -> _Arcs:
        """Return the stages that begin with a layer. `row`: by way, the index of the stages' way that it equals."""
        tables = self._tables
        after = np.arange(first + 1, tables.length + 1)
        both = tables.alternates[:, None]
        live = tables.count[:, None]
        live = np.where(both, np.minimum(live, 1 + (after < tables.length)[:, None, None]), live)

        def single(one: Floats) -> Singles:
            return np.minimum(one, NEVER).astype(np.float32).swapaxes(0, 1).take(row, axis=1)

        kept, again = (one.swapaxes(0, 1).take(row, axis=1) >= live for one in (stages.fits, stages.fits_again))
        fits = kept | again if tables.problem.rematerialise else kept
        # More micro-batches may be under way than are counted here, so that an option is of use for its room alone.
        slow = np.where(fits, NONE, NEVER)
        by_option = (np.ascontiguousarray(np.moveaxis(one, -1, 0)) for one in (fits, kept))
        never = np.where(np.moveaxis(tables.needed(*by_option), 0, -1), NONE, NEVER)
        get_in, put_back = stages.get_in[:, None, :], stages.put_back[:, None, :]
        forward = single(stages.forward + get_in + stages.put_out)
        slow_f = single(np.maximum(np.maximum(stages.forward, get_in), stages.put_out))
        computed = single(stages.backward) + np.where(kept, NONE, single(stages.forward))
        backward = computed + single(put_back + stages.get_back)
        slow_b = np.maximum(computed, single(np.maximum(put_back, stages.get_back)))
        beat_f = np.where(both, forward + backward, slow_f)
        beat = np.where(both, NONE, slow_b) + beat_f
        return _Arcs(
            first,
            np.stack([forward + backward + never, forward + never, single(stages.other_usd) + never]),
            np.stack([beat_f + slow, beat + slow]),
            single(stages.merge),
        )

    def _suffixes(self, every: list[_Arcs]) -> Singles:
        """Return by (number of stages, table, first layer, way) the least of what the layers from one on take in that
        many stages.

        The tables are seconds both ways, the slowest lane both ways, USD of requests, the rate, and what these layers
        would take as a pipeline.
        """
        tables, length = self._tables, self._tables.length
        most = min(self._most_stages(), length)
        after = np.full((most + 1, 5, length + 1, len(tables.ways)), NEVER, dtype=np.float32)
        after[0, :, -1] = 0.0
        rate = tables.rate.astype(np.float32)
        more = (tables.count - 1).astype(np.float32)
        for arcs in reversed(every):
            fits = arcs.added[0] < NEVER / 2
            fill, other = _least(arcs.added[0]), _least(arcs.added[2])
            beat = _least(np.where(fits, arcs.beats[1], NEVER))
            cheapest = _least(np.where(fits, rate, NEVER))
            own = _least(arcs.added[0] + more[:, None] * arcs.beats[1])
            # At most this number of stages follows this one.
            later = after[: min(most, length - arcs.first), :, arcs.first + 1 :]
            here = after[1 : len(later) + 1, :, arcs.first]
            np.min(later[:, 0] + fill, axis=1, out=here[:, 0])
            np.min(np.maximum(later[:, 1], beat), axis=1, out=here[:, 1])
            np.min(later[:, 2] + other, axis=1, out=here[:, 2])
            np.min(later[:, 3] + cheapest, axis=1, out=here[:, 3])
            alone = np.maximum(own, fill + more * later[:, 1]) + later[:, 0]
            np.min(np.maximum(alone, later[:, 4] + fill), axis=1, out=here[:, 4])
        return np.minimum(after, NEVER)

    def _useful_stages(self) -> int:
        """Return the number of stages beyond which no pipeline improves the front."""
        fill, beat, other, rate, alone = self._after[:, :, 0].astype(float).swapaxes(0, 1) * SINGLE
        seconds = np.maximum(alone, fill + (self._tables.count - 1) * beat)
        seconds = np.maximum(seconds, self._tables.least_busy * SINGLE)
        beaten = self._front.surely_beats(seconds, seconds * rate + other, self._within)
        return int(np.flatnonzero(~beaten.all(axis=1) & (fill < NEVER / 2).any(axis=1)).max(initial=0))

    def _most_stages(self) -> int:
        problem = self._tables.problem
        most = problem.stages or self._tables.length
        if problem.most_workers is not None:
            most = min(most, problem.most_workers // int(self._tables.degree.min()))
        return most

    def _prefixes(self, every: list[_Arcs]) -> list[ChainPrefixes]:
        tables, most = self._tables, max(self._most, 1)
        ways = np.arange(len(tables.ways))
        none = np.zeros(len(ways), dtype=np.int64)
        found = [ChainPrefixes(ways, none, none, np.zeros((TABLES, len(ways)), dtype=np.float32))]
        pool, slowest = _Pool(tables, self._steps, most), np.full(len(ways), BEATS - 1)
        beats = [one.beats[1][one.added[0] < NEVER / 2] for one in every]
        top = max(max(float(some.max(initial=0.0)) for some in beats), 1e-9)
        least = min(float(some.min(initial=top)) for some in beats)
        edges = np.geomspace(max(least, 1e-6 * top), top, BEATS).astype(np.float32)
        for at, arcs in enumerate(every, 1):
            pool.add(found[-1], slowest, arcs, edges)
            begun, slowest = self._left(at, self._one_more(pool, pool.ending(at)), edges)
            found.append(begun)
        return found

    def _one_more(self, pool: _Pool, ends: _Ends) -> ChainPrefixes:
        """Return every stage that ends before a layer, appended to all beginnings that may precede it."""
        least = pool.least
        least.fill(NEVER)
        turns = (np.cumsum(ends.many) - 1) // PAIRS
        for turn in range(int(turns.max(initial=-1)) + 1):
            arcs = slice(*np.searchsorted(turns, [turn, turn + 1]))
            times = ends.many[arcs]
            row = ranges(ends.begin[arcs], times)
            new = pool.values.take(row, axis=1)
            _behind(new, np.repeat(ends.stage[:, arcs], times, axis=1))
            level = np.minimum(pool.level.take(row) + np.repeat(ends.steps[arcs], times), LEVELS)
            key = pool.key.take(row) + level
            for table in range(TABLES):
                np.minimum.at(least[table], key, new[table])
        key = np.flatnonzero(least[FILL] < NEVER / 2)
        values = least.take(key, axis=1)
        if self._tables.problem.stages is None:
            # Of the same rate and with a stage less, what is no worse in anything makes them needless.
            fewer = least.take(key - (LEVELS + 1), axis=1, mode="clip")
            better = (fewer <= values).all(axis=0) & (key % (pool.most * (LEVELS + 1)) >= LEVELS + 1)
            key, values = key[~better], values[:, ~better]
        some, level = np.divmod(key, LEVELS + 1)
        way, before = np.divmod(some, pool.most)
        return ChainPrefixes(way, before + 1, level, values)

    def _left(self, at: int, begun: ChainPrefixes, edges: Singles) -> tuple[ChainPrefixes, Ints]:
        """Return the beginnings of a number of layers that the front does not beat with any stages behind them.

        And for each, how slow the next stage may be, as a step of the stages' beats.
        """
        trial = self._trial(at, begun)
        fewest, left = np.full(len(begun.way), -1), np.arange(len(begun.way))
        for number in range(0, self._most + 1, NUMBERS):
            # Most that are beaten at all are so by the least of all numbers.
            left = left[trial.room.take(left) >= number]
            left = left[~trial.beaten(left, trial.at_least, number)]
            if not len(left):
                break
            numbers = np.arange(number, min(number + NUMBERS, self._most + 1))[:, None]
            lost = trial.beaten(left, trial.exactly, numbers) | (trial.room.take(left) < numbers)
            if (fixed := self._tables.problem.stages) is not None:
                lost |= begun.stages.take(left) + numbers != fixed
            none = lost.all(axis=0)
            fewest[left[~none]] = number + lost.argmin(axis=0)[~none]
            left = left[none]
        rows = np.flatnonzero(fewest >= 0)
        slowest = np.searchsorted(edges, trial.slowest(rows, fewest.take(rows)), side="right") - 1
        return begun.take(rows), np.maximum(slowest, 0)

    def _trial(self, at: int, begun: ChainPrefixes) -> _Trial:
        tables, problem, way = self._tables, self._tables.problem, begun.way
        degree, more, busy = (
            part.astype(np.float32).take(way) for part in (tables.degree, tables.count - 1, tables.least_busy)
        )
        room = np.full(len(way), self._most)
        if problem.most_workers is not None:
            room = np.minimum(room, (problem.most_workers // tables.degree).astype(np.int64).take(way))
        after = self._after[: self._most + 1, :, at]
        at_least = np.minimum.accumulate(after[::-1])[::-1]
        return _Trial(
            front=self._front,
            within=self._within,
            ways=len(tables.ways),
            begun=begun,
            more=more,
            busy=busy,
            rate=degree * begun.level.astype(np.float32) * np.float32(self.unit),
            room=room - begun.stages,
            exactly=after.swapaxes(0, 1).reshape(len(after[0]), -1),
            at_least=at_least.swapaxes(0, 1).reshape(len(after[0]), -1),
        )


@dataclass(frozen=True, eq=False)
class _Trial:
    """Beginnings of one number of layers, and what may follow them, compared with a front."""

    front: Front
    within: float
    ways: int
    begun: ChainPrefixes
    more: Singles
    busy: Singles
    rate: Singles
    """USD per second."""
    room: Ints
    """Stages that may come behind."""
    exactly: Singles
    """(table, number of stages and way): the least of what follows in that many stages."""
    at_least: Singles
    """The same, in at least as many stages."""

    def beaten(self, rows: Ints, after: Singles, number: int | Ints) -> Mask:
        """Return the beginnings that the front beats with a number of stages behind; by row, or by number and row."""
        fill, beat, other, alone = (self.begun.values[name].take(rows) for name in (FILL, BEAT, OTHER, ALONE))
        behind = after.take(number * self.ways + self.begun.way.take(rows), axis=1)
        seconds = fill + behind[0] + self.more.take(rows) * np.maximum(beat, behind[1])
        np.maximum(seconds, self.busy.take(rows), out=seconds)
        np.maximum(seconds, alone + behind[0], out=seconds)
        np.maximum(seconds, fill + behind[4], out=seconds)
        usd = seconds * (self.rate.take(rows) + behind[3]) + other + behind[2]
        beaten = self.front.surely_beats(seconds * SINGLE, usd * SINGLE, self.within)
        beaten |= behind[0] >= NEVER / 2
        return beaten

    def slowest(self, rows: Ints, fewest: Ints) -> Singles:
        """Return the seconds of the slowest lane that the next stage may have, with at least a number of stages
        behind."""
        behind = self.at_least.take(fewest * self.ways + self.begun.way.take(rows), axis=1)
        fill, other = (self.begun.values[name].take(rows) for name in (FILL, OTHER))
        rate, more = self.rate.take(rows) + behind[3], self.more.take(rows)
        seconds = self.front.beats_from(rate, (other + behind[2]) * SINGLE, self.within) / SINGLE
        return np.where(more > 0, (seconds - fill - behind[0]) / np.maximum(more, 1), np.inf)


@dataclass(frozen=True, eq=False)
class _Ends:
    """Stages that fit and may stand behind some beginnings in a pool."""

    begin: Ints
    """The first of these."""
    many: Ints
    steps: Ints
    """Steps of the rate."""
    stage: Singles
    """(what, row): what such a stage adds, as in `_behind`."""


class _Pool:
    """Beginnings of all numbers of layers so far, concatenated: by way, and those first that the slowest stages may
    follow; with the stages that may follow."""

    def __init__(self, tables: Tables, steps: Ints, most: int) -> None:
        self.most, self._length = most, 0
        self._ways, self._steps, self._more = len(tables.ways), steps, (tables.count - 1).astype(np.float32)
        self.key, self.level = np.zeros((2, PAIRS), dtype=np.int64)
        """Keys of way and number of stages, and levels of the rate."""
        self.values = np.zeros((TABLES, PAIRS), dtype=np.float32)
        self.least = np.empty((TABLES, self._ways * most * (LEVELS + 1)), dtype=np.float32)
        """Room for the least of the next number of layers."""
        self._next: list[tuple[_Ends, Ints]] = []
        """By number of layers: the stages that may follow, sorted by the layer before which they end, and the offsets
        of each such layer."""

    def add(self, begun: ChainPrefixes, slowest: Ints, arcs: _Arcs, edges: Singles) -> None:
        """Add the beginnings of the next number of layers, with the stages that may follow and how slow, as a step of
        the edges."""
        end = self._length + len(begun.way)
        while end > len(self.key):
            self.key, self.level = (np.concatenate([old, old]) for old in (self.key, self.level))
            self.values = np.concatenate([self.values, self.values], axis=1)
        kinds = begun.way * BEATS + BEATS - 1 - slowest
        order, here = np.argsort(kinds, kind="stable"), slice(self._length, end)
        self.key[here] = ((begun.way * self.most + begun.stages) * (LEVELS + 1))[order]
        self.level[here], self.values[:, here] = begun.level[order], begun.values.take(order, axis=1)
        many = np.bincount(kinds, minlength=self._ways * BEATS).reshape(self._ways, BEATS).cumsum(axis=1)
        self._next.append(self._following(many, arcs, edges))
        self._length = end

    def _following(self, many: Ints, arcs: _Arcs, edges: Singles) -> tuple[_Ends, Ints]:
        """`many`: by way and by a stage's beat, the slowest first, how many of the last ones it may follow."""
        begin = self._length + np.cumsum(many[:, -1]) - many[:, -1]
        fits = (arcs.added[0] < NEVER / 2) & (many[:, -1:] > 0)
        flat = np.flatnonzero(fits)
        way = flat // fits.shape[2] % self._ways
        beat = np.searchsorted(edges, arcs.beats[1].reshape(-1).take(flat), side="right") - 1
        times = many[way, BEATS - 1 - np.maximum(beat, 0)]
        some = np.flatnonzero(times)
        flat, way, times = flat.take(some), way.take(some), times.take(some)
        added, beats = (one.reshape(len(one), -1).take(flat, axis=1) for one in (arcs.added, arcs.beats))
        more, merged = self._more.take(way), arcs.merge.reshape(-1).take(flat) + added[0]
        # A pipeline is not over before its first stage has merged.
        fill = merged if arcs.first == 0 else added[0]
        stage = np.stack([fill, *added[1:], *beats, added[0], merged, merged + more * (beats[1] - beats[0]), more])
        ends = _Ends(begin.take(way), times, self._steps.take(flat % fits.shape[2]), stage)
        return ends, np.searchsorted(flat, np.arange(len(fits) + 1) * fits[0].size)

    def ending(self, at: int) -> _Ends:
        """Return all stages that end before a layer."""
        parts = [(ends, slice(*begin[at - first - 1 :][:2])) for first, (ends, begin) in enumerate(self._next)]
        return _Ends(
            np.concatenate([ends.begin[here] for ends, here in parts]),
            np.concatenate([ends.many[here] for ends, here in parts]),
            np.concatenate([ends.steps[here] for ends, here in parts]),
            np.concatenate([ends.stage[:, here] for ends, here in parts], axis=1),
        )


def _behind(old: Singles, stage: Singles) -> None:
    """Append a stage, in place, by table and row."""
    both, merged, last, more = stage[TABLES - 2 :]
    forward = old[FORWARD].copy()
    np.add(old[FILL : OTHER + 1], stage[FILL : OTHER + 1], out=old[FILL : OTHER + 1])
    np.maximum(old[BEAT_F : BEAT + 1], stage[BEAT_F : BEAT + 1], out=old[BEAT_F : BEAT + 1])
    np.add(old[FINISH : ALONE + 1], both, out=old[FINISH : ALONE + 1])
    np.maximum(old[FINISH], forward + merged, out=old[FINISH])
    # Of this stage with those before it, from its own merge; and from the first one's.
    np.maximum(old[ALONE], forward + last + more * old[BEAT_F], out=old[ALONE])
    np.maximum(old[ALONE], old[FILL] + more * old[BEAT], out=old[ALONE])


def _least(of_options: Singles) -> Singles:
    """(last layer, way), of (last layer, way, option): `min` is slow along a short axis."""
    return reduce(np.minimum, np.moveaxis(of_options, -1, 0))
