"""What the layers before a label add at least, and which labels cannot reach the front any more."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from scheduler.partition._labels import Labels, Mask
from scheduler.partition._tables import Floats, Ints, Stages, Tables

__all__ = ["Bounds", "Front"]

LEVELS = 48 - 1
"""Steps of a way's rate, each as large as its cheapest function's; what is above the last one is counted as it."""
NEVER = 1e15
"""Seconds of what does not fit. Not infinite, since it is multiplied by zero."""
ROUNDING = 1 - 1e-12
SINGLE = 1 - 3e-5
"""Tables are kept in single precision: what sums of some dozens of numbers may be off by."""
CELLS = 1 << 14
"""Steps in seconds of a front that is looked up instead of searched."""
HALVINGS = 24
"""Of a search for the slowest lane that is of use."""
PAIRS = 1 << 17
"""Labels times completions, of the coarsest, that are looked at in one go."""
RUNS = (LEVELS + 1, 6, 1)
"""Levels that are looked at as one, with the least of each: first all of them, then fewer."""

Singles = npt.NDArray[np.float32]


class Front:
    """The best pairs of seconds and USD so far."""

    def __init__(self) -> None:
        self.seconds, self.usd = np.array([-np.inf]), np.array([np.inf])
        """The fastest first, behind a pair that beats nothing."""
        self._source, self._row = np.array([-1]), np.array([-1])
        self._additions = 0
        self._look_up()

    @property
    def sources(self) -> list[tuple[int, int]]:
        """Of each pair, the number of the addition that brought it, and its row there."""
        return [(int(source), int(row)) for source, row in zip(self._source[1:], self._row[1:], strict=True)]

    def add(self, seconds: Floats, usd: Floats, rows: Ints) -> None:
        """Pairs that were reached, with numbers by which they are known."""
        source = np.full(len(rows), self._additions)
        self._additions += 1
        columns = [(self.seconds, seconds), (self.usd, usd), (self._source, source), (self._row, rows)]
        joined = [np.concatenate(column) for column in columns]
        order = np.lexsort((joined[2], joined[1], joined[0]))
        joined = [column[order] for column in joined]
        least = np.minimum.accumulate(joined[1])
        keep = np.ones(len(order), dtype=bool)
        keep[1:] = joined[1][1:] < least[:-1]
        self.seconds, self.usd, self._source, self._row = (column[keep] for column in joined)
        self._look_up()

    def _look_up(self) -> None:
        """The price that was known at the beginning of each of many steps of seconds."""
        first, last = (self.seconds[1], self.seconds[-1]) if len(self.seconds) > 1 else (0.0, 0.0)
        self._begin, self._step = float(first), max(float(last - first), 1e-9) / (CELLS - 2)
        begins = self._begin + self._step * np.arange(-1, CELLS - 1)
        begins[-1] = max(begins[-1], last)
        self._known = self.usd[np.searchsorted(self.seconds, begins, side="right") - 1]
        self._known[0] = np.inf

    def beats(self, seconds: Floats, usd: Floats, within: float = 0.0) -> Mask:
        """Whether something is as fast and as cheap, or worse by no more than this share."""
        factor = (1 + within) * ROUNDING
        place = np.searchsorted(self.seconds, seconds * factor, side="right") - 1
        beaten: Mask = self.usd[place] <= usd * factor
        return beaten

    def surely_beats(self, seconds: Floats | Singles, usd: Floats | Singles, within: float) -> Mask:
        """The same, and faster; now and then not where it just does."""
        factor = (1 + within) * SINGLE
        # One step less than where the seconds are, so that no rounding leads to a later price.
        cell = np.clip((seconds * factor - self._begin) / self._step, -1.0, CELLS - 1.0).astype(np.int64)
        beaten: Mask = self._known[np.maximum(cell, 0)] <= usd * factor
        return beaten


@dataclass(frozen=True, eq=False)
class _Arcs:
    """Stages that begin with one layer, in single precision, by (way, last layer, option); `NEVER`: fits nowhere."""

    first: int
    spans: tuple[tuple[int, int], ...]
    """By option: from which to before which of the last layers it is of use to any way."""
    added: Singles
    """(3, ..): seconds forward and backward, seconds forward, USD of requests."""
    beats: Singles
    """(2, ..): the slowest lane forward, and both ways."""
    merge: Singles


FILLED, ENDED, MORE, BOTH, BEAT_B, BUSY, RATE, OTHER_USD, STAGES, MOST_STAGES = range(10)
"""What a pair of a label and a completion is judged by, of the label."""
FILL, FORWARD, OTHER, BEAT_F, BEAT, FINISH, ALONE = range(7)
"""The same, of the completion: the tables of bounds. Of them FINISH is forward passes up to a stage, what it merges and
backward passes back to the first one; ALONE is what these stages would take as a pipeline, at least. It ties fill and
beat together: of the cuts with the least fill, and with the least beat, neither has the least of both."""
TABLES = 7


@dataclass(frozen=True, eq=False)
class _Completions:
    """What may stand in front of the labels that begin with one layer: of some ways, numbers of stages and levels, or
    of runs of levels."""

    stages: Singles
    rate: Singles
    """USD per second, at least."""
    values: Singles
    """(table, completion)."""
    begin: Ints
    """Where those begin that each of the next coarser completions is made of, and at last where all end; of the
    coarsest, where those of each way begin."""


class Bounds:
    """Of one problem: by (stages, way, layers that are left, rate level), each of some sums and maxima at its least
    over all ways to cut these layers into so many stages whose functions' rate has the level. A rate is counted in
    whole steps, each stage's rounded down. Hops between regions are taken as free.

    What cannot get ahead of the front by more than a share, whatever comes behind it, is left out.
    """

    def __init__(self, tables: Tables, front: Front, within: float) -> None:
        self._tables, self._front, self._within = tables, front, within
        per_replica = tables.rate[0] / tables.degree[0]
        self._unit = float(per_replica.min()) or 1.0
        self._steps = np.minimum(np.floor(per_replica / self._unit * (1 + 1e-9)), LEVELS).astype(int)
        every = np.arange(len(tables.ways))
        self._arcs = [self._arcs_from(first, tables.starting(first, every)) for first in range(tables.length)]
        self._after = self._suffixes()
        self._most = self._useful_stages()
        self._by_stages = list(self._prefixes())
        whole = [rows[(table[FILL][:, -1] < NEVER / 2).any(axis=1)] for rows, table in self._by_stages]
        self.possible = np.unique(np.concatenate([*whole, np.zeros(0, dtype=np.int64)]))
        """Ways that can still reach the front."""
        self.row = np.full(len(every), -1)
        """By way: which of the possible ones it is."""
        self.row[self.possible] = np.arange(len(self.possible))
        self._slowest = self._slowest_beats()

    def _arcs_from(self, first: int, stages: Stages) -> _Arcs:
        tables = self._tables
        after = np.arange(first + 1, tables.length + 1)
        both = tables.alternates[:, None, None]
        live = tables.count[:, None, None]
        live = np.where(both, np.minimum(live, 1 + (after < tables.length)[None, :, None]), live)
        kept = stages.fits >= live
        fits = kept | (stages.fits_again >= live) if tables.problem.rematerialise else kept
        # More micro-batches may be under way than are counted here, so that an option is of use for its room alone.
        slow = np.where(fits, 0.0, NEVER)
        fits = tables.needed(fits, kept)
        computed = stages.backward + np.where(kept, 0.0, stages.forward)
        lanes_f = (stages.forward, stages.get_in[:, None, :], stages.put_out)
        lanes_b = (computed, stages.put_back[:, None, :], stages.get_back)
        never = np.where(fits, 0.0, NEVER)
        forward, backward = sum(lanes_f), sum(lanes_b)
        slow_f = np.maximum(np.maximum(lanes_f[0], lanes_f[1]), lanes_f[2])
        slow_b = np.maximum(np.maximum(lanes_b[0], lanes_b[1]), lanes_b[2])
        beat_f = np.where(both, forward + backward, slow_f)
        beat = np.where(both, 0.0, slow_b) + beat_f
        spans = []
        for option in range(fits.shape[2]):
            some = np.flatnonzero(fits[:, :, option].any(axis=0))
            spans.append((int(some[0]), int(some[-1]) + 1) if len(some) else (0, 0))
        return _Arcs(
            first,
            tuple(spans),
            _single(forward + backward + never, forward + never, stages.other_usd + never),
            _single(beat_f + slow, beat + slow),
            _single(stages.merge)[0],
        )

    def _suffixes(self) -> Singles:
        """(number of stages, table, way, first layer): the least of what the layers from one on take in so many.

        The tables are seconds both ways, the slowest lane both ways, USD of requests, the rate, and what these layers
        would take as a pipeline.
        """
        tables, length = self._tables, self._tables.length
        most = min(self._most_stages(), length)
        after = np.full((most + 1, 5, len(tables.ways), length + 1), NEVER, dtype=np.float32)
        after[0, :, :, -1] = 0.0
        rate = tables.rate.astype(np.float32)[:, None, :]
        more = (tables.count - 1).astype(np.float32)[:, None]
        for arcs in reversed(self._arcs):
            fits = arcs.added[0] < NEVER / 2
            fill, other = arcs.added[0].min(axis=2), arcs.added[2].min(axis=2)
            beat = np.where(fits, arcs.beats[1], np.float32(NEVER)).min(axis=2)
            cheapest = np.where(fits, rate, np.float32(NEVER)).min(axis=2)
            own = (arcs.added[0] + more[..., None] * arcs.beats[1]).min(axis=2)
            # Behind this stage there are at most so many.
            later = after[: min(most, length - arcs.first), :, :, arcs.first + 1 :]
            here = after[1 : len(later) + 1, :, :, arcs.first]
            np.min(later[:, 0] + fill, axis=2, out=here[:, 0])
            np.min(np.maximum(later[:, 1], beat), axis=2, out=here[:, 1])
            np.min(later[:, 2] + other, axis=2, out=here[:, 2])
            np.min(later[:, 3] + cheapest, axis=2, out=here[:, 3])
            alone = np.maximum(own, fill + more * later[:, 1]) + later[:, 0]
            np.min(np.maximum(alone, later[:, 4] + fill), axis=2, out=here[:, 4])
        return np.minimum(after, np.float32(NEVER))

    def _useful_stages(self) -> int:
        """No pipeline of more stages gets ahead of the front."""
        fill, beat, other, rate, alone = self._after[:, :, :, 0].astype(float).swapaxes(0, 1) * SINGLE
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

    def _prefixes(self) -> Iterator[tuple[Ints, Singles]]:
        """For ever more stages: ways, and by (table, way, layers, level) the least."""
        tables = self._tables
        rows = np.arange(len(tables.ways))
        table = np.full((TABLES, len(rows), tables.length + 1, LEVELS + 1), NEVER, dtype=np.float32)
        table[:, :, 0, 0] = 0.0
        for stages in range(self._most):
            if tables.problem.most_workers is not None:
                may = (stages + 1) * tables.degree[rows] <= tables.problem.most_workers
                rows, table = rows[may], table[:, may]
            if not len(rows):
                return
            table = self._one_more(rows, table, whole=stages == 0)
            self._leave_out(rows, table, stages + 1)
            alive = (table[FILL] < NEVER / 2).any(axis=(1, 2))
            rows, table = rows[alive], table[:, alive]
            yield rows, table

    def _one_more(self, rows: Ints, table: Singles, whole: bool) -> Singles:
        """Every stage behind the best cuts of the layers before it; `whole`: it is the first."""
        found = np.full_like(table, NEVER)
        at_all = table[FILL] < NEVER / 2
        for first in np.flatnonzero(at_all.any(axis=(0, 2))[:-1]):
            arcs = self._arcs[first]
            some = np.flatnonzero(at_all[:, first].any(axis=1))
            mine = slice(int(some[0]), int(some[-1]) + 1)
            levels = np.flatnonzero(at_all[:, first].any(axis=0))
            low, high = int(levels[0]), int(levels[-1]) + 1
            source = table[:, mine, first, None]
            ways = rows[mine]
            more = (self._tables.count - 1).astype(np.float32)[ways, None, None]
            for option, step in enumerate(self._steps):
                begin, end = arcs.spans[option]
                if begin == end:
                    continue
                added, beats = (part[:, :, begin:end, option][:, ways, :, None] for part in (arcs.added, arcs.beats))
                merge = arcs.merge[:, begin:end, option][ways, :, None]
                both, merged = added[0].copy(), merge + added[0]
                last = merged + more * (beats[1] - beats[0])
                if whole:
                    added[0] += merge
                for to, since in _moves(int(step), low, high):
                    old = source[..., since]
                    new = np.empty((TABLES, len(ways), end - begin, old.shape[-1]), dtype=np.float32)
                    np.add(old[FILL : OTHER + 1], added, out=new[FILL : OTHER + 1])
                    np.maximum(old[BEAT_F : BEAT + 1], beats, out=new[BEAT_F : BEAT + 1])
                    np.add(old[FINISH : ALONE + 1], both, out=new[FINISH : ALONE + 1])
                    np.maximum(new[FINISH], old[FORWARD] + merged, out=new[FINISH])
                    # Of this stage with those before it, from its own merge; and from the first one's.
                    slowest = more * new[BEAT_F : BEAT + 1]
                    slowest[0] += old[FORWARD] + last
                    slowest[1] += new[FILL]
                    np.maximum(new[ALONE], slowest[0], out=new[ALONE])
                    np.maximum(new[ALONE], slowest[1], out=new[ALONE])
                    here = (slice(None), mine, slice(first + 1 + begin, first + 1 + end), to)
                    np.minimum(found[here], new, out=found[here])
        return found

    def _leave_out(self, rows: Ints, table: Singles, stages: int) -> None:
        """What the front beats whatever comes behind it."""
        tables, problem = self._tables, self._tables.problem
        row, layer, level = np.nonzero(table[FILL] < NEVER / 2)
        way = rows[row]
        more, degree = (part.astype(np.float32)[way] for part in (tables.count - 1, tables.degree))
        fill, beat, other = (table[name][row, layer, level] for name in (FILL, BEAT, OTHER))
        rate = degree * level.astype(np.float32) * np.float32(self._unit)
        alone = table[ALONE][row, layer, level]
        busy = tables.least_busy.astype(np.float32)[way]
        lost = np.arange(len(row))
        for number, after in enumerate(self._after[: max(self._most - stages, 0) + 1]):
            if problem.stages is not None and stages + number != problem.stages:
                continue
            behind = after[:, way[lost], layer[lost]]
            seconds = fill[lost] + behind[0] + more[lost] * np.maximum(beat[lost], behind[1])
            np.maximum(seconds, busy[lost], out=seconds)
            np.maximum(seconds, alone[lost] + behind[0], out=seconds)
            np.maximum(seconds, fill[lost] + behind[4], out=seconds)
            usd = seconds * (rate[lost] + behind[3]) + other[lost] + behind[2]
            beaten = self._front.surely_beats(seconds * SINGLE, usd * SINGLE, self._within)
            beaten |= behind[0] >= NEVER / 2
            if problem.most_workers is not None:
                beaten |= (stages + number) * degree[lost] > problem.most_workers
            lost = lost[beaten]
        table[:, row[lost], layer[lost], level[lost]] = NEVER

    def _slowest_beats(self) -> Floats:
        """By way: no pipeline whose slowest lanes, forward and backward, come to more gets ahead of the front."""
        tables, slowest = self._tables, np.zeros(len(self._tables.ways))
        for rows, table in self._by_stages:
            row, level = np.nonzero(table[FILL][:, -1] < NEVER / 2)
            way, values = rows[row], table[:, row, -1, level].astype(float) * SINGLE
            more, rate = tables.count[way] - 1, tables.degree[way] * level * self._unit
            low, high = values[BEAT], np.full(len(row), NEVER)
            for _ in range(HALVINGS):
                # By factors: the upper end begins far away.
                middle = np.sqrt(low * high)
                seconds = values[FILL] + more * middle
                lost = self._front.surely_beats(seconds, seconds * rate + values[OTHER], self._within)
                low, high = np.where(lost, low, middle), np.where(lost, middle, high)
            np.maximum.at(slowest, way, np.where(more > 0, high, np.inf))
        return slowest

    def useful(self, first: int) -> Mask:
        """(possible way, last layer, option): stages that begin with a layer and are not too slow for the front."""
        useful: Mask = self._arcs[first].beats[1][self.possible] <= self._slowest[self.possible, None, None]
        return useful

    def promising(self, labels: Labels) -> tuple[Labels, Labels]:
        """Of labels that begin with one layer, those that can still get ahead of the front by more than the share; and
        the same ones, raised.

        Seconds and USD of a completion are bounded from below for every number of stages and rate that the layers
        before may have. In those that the front does not beat, the stages before have a lane so slow forward that the
        label's own slowest one does not matter, if it is faster: it is raised to what does.
        """
        if not len(labels):
            return labels, labels
        before = self._completions(int(labels.first[0]))
        own = self._columns(labels)
        many = np.diff(before[0].begin)[labels.way]
        turns = (np.cumsum(many) - 1) // PAIRS
        parts = []
        for turn in np.unique(turns[many > 0]):
            rows = np.flatnonzero((turns == turn) & (many > 0))
            row, at = rows, labels.way[rows]
            for finer in before:
                row, at = self._open(own, finer, row, at)
            if len(row):
                begins = np.flatnonzero(np.diff(row, prepend=-1))
                values = before[-1].values[:, at]
                parts.append((row[begins], np.minimum.reduceat(values[BEAT_F], begins)))
        if not parts:
            return labels.take(np.zeros(0, dtype=np.int64)), labels.take(np.zeros(0, dtype=np.int64))
        keep, beat_f = (np.concatenate(column) for column in zip(*parts, strict=True))
        kept = labels.take(keep)
        return kept, replace(kept, beat_f=np.maximum(kept.beat_f, beat_f))

    def _completions(self, first: int) -> list[_Completions]:
        """The coarsest first."""
        parts = []
        for stages, (rows, table) in enumerate(self._by_stages, 1):
            row, level = np.nonzero(table[FILL][:, first] < NEVER / 2)
            parts.append((rows[row], np.full(len(row), stages), level, table[:, row, first, level]))
        way, number, level, values = (np.concatenate(part, axis=-1) for part in zip(*parts, strict=True))
        order = np.lexsort((level, number, way))
        way, number, level, values = way[order], number[order], level[order], values[:, order] * np.float32(SINGLE)
        found: list[_Completions] = []
        coarser = way[:0]
        for width in RUNS:
            key = (way * (len(self._by_stages) + 1) + number) * (LEVELS + 1) + level // width
            begins = np.flatnonzero(np.diff(key, prepend=-1))
            least = np.minimum.reduceat(values, begins, axis=1) if len(begins) else values
            rate = (level[begins] * self._unit * self._tables.degree[way[begins]] * SINGLE).astype(np.float32)
            if found:
                begin = np.searchsorted(begins, np.append(coarser, len(level)))
            else:
                begin = np.searchsorted(way[begins], np.arange(len(self._tables.ways) + 1))
            found.append(_Completions(number[begins].astype(np.float32), rate, least, begin))
            coarser = begins
        return found

    def _columns(self, labels: Labels) -> Singles:
        """What a pair of label and completion is judged by, by label."""
        tables = self._tables
        most = (tables.problem.most_workers or 0) // tables.degree[labels.way] - labels.stages
        busy = np.maximum(tables.least_busy[labels.way], np.maximum(labels.busy, labels.busiest)) * SINGLE
        columns = {
            FILLED: labels.fill_f + labels.fill_b, ENDED: labels.fill_f + labels.ends,
            MORE: tables.count[labels.way] - 1, BOTH: labels.beat_f + labels.beat_b, BEAT_B: labels.beat_b,
            BUSY: busy, RATE: labels.rate, OTHER_USD: labels.other_usd, STAGES: labels.stages, MOST_STAGES: most,
        }  # fmt: skip
        return np.stack([columns[number] for number in range(len(columns))]).astype(np.float32)

    def _open(self, own: Singles, before: _Completions, row: Ints, coarser: Ints) -> tuple[Ints, Ints]:
        """Pairs of a label and what one of the coarser completions is made of that the front does not beat."""
        begin = before.begin[coarser]
        many = before.begin[coarser + 1] - begin
        row = np.repeat(row, many)
        at = np.arange(len(row)) + np.repeat(begin - (np.cumsum(many) - many), many)
        # The first of three bounds alone leaves few, so that the others are asked of these.
        values = before.values
        beat, more = np.maximum(own[BOTH, row], values[BEAT, at]), own[MORE, row]
        seconds = np.maximum(own[FILLED, row] + values[FILL, at] + more * beat, own[BUSY, row])
        np.maximum(seconds, own[FILLED, row] + values[ALONE, at], out=seconds)
        left = self._left(own, before, row, at, seconds)
        row, at, seconds = row[left], at[left], seconds[left]
        more, beat_b = own[MORE, row], own[BEAT_B, row]
        slowest = more * np.maximum(own[BOTH, row] - beat_b, values[BEAT_F, at])
        np.maximum(seconds, own[FILLED, row] + values[FINISH, at] + slowest + more * beat_b, out=seconds)
        np.maximum(seconds, own[ENDED, row] + values[FORWARD, at] + slowest, out=seconds)
        left = self._left(own, before, row, at, seconds)
        return row[left], at[left]

    def _left(self, own: Singles, before: _Completions, row: Ints, at: Ints, seconds: Singles) -> Mask:
        """Of such pairs, those of so many seconds at least that the front does not beat, and that may be."""
        problem = self._tables.problem
        usd = seconds * (own[RATE, row] + before.rate[at]) + own[OTHER_USD, row] + before.values[OTHER, at]
        left = ~self._front.surely_beats(seconds, usd, self._within)
        if problem.stages is not None:
            left &= own[STAGES, row] + before.stages[at] == problem.stages
        if problem.most_workers is not None:
            left &= before.stages[at] <= own[MOST_STAGES, row]
        return left


def _moves(step: int, low: int, high: int) -> Iterator[tuple[slice, slice]]:
    """From each level to the one that a stage of so many steps leads to, to and since; the last one takes all above."""
    top = max(low, min(high, LEVELS + 1 - step))
    if low < top:
        yield slice(low + step, top + step), slice(low, top)
    for level in range(top, high):
        yield slice(LEVELS, LEVELS + 1), slice(level, level + 1)


def _single(*tables: Floats) -> Singles:
    return np.stack([np.minimum(table, NEVER) for table in np.broadcast_arrays(*tables)]).astype(np.float32)
