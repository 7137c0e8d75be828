"""Lower bounds on what the layers before a label add; they show which labels can still reach the front."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from scheduler.pipeline._known import SINGLE, Front, Singles
from scheduler.pipeline._labels import Labels, ranges
from scheduler.pipeline._lower_bounds import (
    ALONE,
    BEAT,
    BEAT_F,
    FILL,
    FINISH,
    FORWARD,
    LEVELS,
    OTHER,
    Beginnings,
    ChainPrefixes,
)
from scheduler.pipeline._tables import Floats, Ints, Tables

__all__ = ["LabelBounds"]

PAIRS_AT_ONCE = 1 << 17
"""Number of pairs of a label and a coarsest completion that are examined at once; limits the memory."""
RUN_LEVELS = (LEVELS + 1, 6, 1)
"""Numbers of consecutive levels that are combined into one completion with their minima, the coarsest first."""

FILLED, ENDED, MORE, BOTH, BEAT_B, BUSY, RATE, OTHER_USD, STAGES, MOST_STAGES = range(10)
"""Columns of a label that the bound of a pair of a label and a completion is computed from."""


@dataclass(frozen=True, eq=False)
class _Completions:
    """Lower bounds on the stages before labels that begin with one layer, by way, number of stages, and run of
    levels."""

    stages: Singles
    rate: Singles
    """Lower bound, in USD per second."""
    values: Singles
    """(table, completion)."""
    begin: Ints
    """Offset of the first part of each completion of the next coarser kind, and the end of the last; for the coarsest
    kind, the offsets of each way."""


class LabelBounds:
    """Selects the labels of one problem that can still improve the front by more than a share."""

    def __init__(self, tables: Tables, front: Front, within: float) -> None:
        self._tables, self._front, self._within = tables, front, within
        self._begun = Beginnings(tables, front, within)
        self.possible = np.unique(self._begun.up_to[-1].way)
        """Ways with which the front can still be reached."""
        self.alike = np.unique(tables.alike[self.possible])
        """One way of each set of possible ways that are `alike`."""
        self.row = np.searchsorted(self.alike, tables.alike)
        """Index of a possible way's set in `alike`, by way."""
        self.slowest = self._slowest_of_possible()
        """Upper limit of the seconds of a stage's slowest lane, forward plus backward, by possible way."""
        self._of_first: dict[int, list[_Completions]] = {}

    def _slowest_of_possible(self) -> Floats:
        tables, whole = self._tables, self._begun.up_to[-1]
        if not len(whole.way):
            return np.zeros(0)
        values = whole.values.astype(float) * SINGLE
        slowest = self._slowest(values[FILL], tables.count[whole.way] - 1, self._rates(whole), values[OTHER])
        found: Floats = np.maximum.reduceat(slowest, np.flatnonzero(np.diff(whole.way, prepend=-1)))
        return found

    def _slowest(self, fill: Floats, more: Floats, rate: Floats, other_usd: Floats) -> Floats:
        """Return the sum of the slowest lanes, forward and backward, above which no pipeline with at least this fill,
        rate and price improves the front."""
        spare = self._front.beats_from(rate, other_usd, self._within) - fill
        return np.where(more > 0, spare / np.maximum(more, 1.0), np.inf)

    def _rates(self, begun: ChainPrefixes) -> Floats:
        """Return lower bounds in USD per second."""
        rates: Floats = self._tables.degree[begun.way] * begun.level.astype(float) * self._begun.unit
        return rates

    def beats(self, first: int) -> Singles:
        """Return the seconds of the slowest lane, forward plus backward, of stages that begin with a layer, by (last
        layer, way, option)."""
        beats: Singles = self._begun.beats[first]
        return beats

    def promising(self, labels: Labels) -> tuple[Labels, Labels]:
        """Return the labels that can still improve the front by more than the share, and the same labels raised.

        All labels begin with the same layer. Seconds and USD of every completion are bounded from below, for each
        number of stages and each rate that the layers before may have. The completions that the front does not beat
        all have a forward lane of at least some time. A label's own slowest forward lane has no effect below this
        time, and is raised to it. The limit of the next stage's slowest lane (`slowest`) is the time above which the
        front beats all these completions.
        """
        if not len(labels):
            return labels, labels
        first = int(labels.first[0])
        if first not in self._of_first:
            self._of_first[first] = self._completions(first)
        before = self._of_first[first]
        own = self._columns(labels)
        many = np.diff(before[0].begin)[labels.way]
        turns = (np.cumsum(many) - 1) // PAIRS_AT_ONCE
        parts = []
        for turn in np.unique(turns[many > 0]):
            rows = np.flatnonzero((turns == turn) & (many > 0))
            row, at = rows, labels.way[rows]
            for finer in before:
                row, at = self._unbeaten_parts(own, finer, row, at)
            if len(row):
                begins = np.flatnonzero(np.diff(row, prepend=-1))
                least = np.stack([*before[-1].values[[FILL, OTHER, BEAT_F]], before[-1].rate]).take(at, axis=1)
                parts.append((row[begins], np.minimum.reduceat(least, begins, axis=1)))
        if not parts:
            return labels.take(np.zeros(0, dtype=np.int64)), labels.take(np.zeros(0, dtype=np.int64))
        keep, least = (np.concatenate(column, axis=-1) for column in zip(*parts, strict=True))
        kept, (filled, _, more, *_), (fill, other, beat_f, rate) = labels.take(keep), own.take(keep, axis=1), least
        slowest = self._slowest(filled + fill, more, own[RATE, keep] + rate, own[OTHER_USD, keep] + other)
        kept = replace(kept, slowest=slowest)
        return kept, replace(kept, beat_f=np.maximum(kept.beat_f, beat_f))

    def _completions(self, first: int) -> list[_Completions]:
        """Return the completions of labels that begin with a layer, the coarsest kind first."""
        begun = self._begun.up_to[first]
        way, level, values = begun.way, begun.level, begun.values * np.float32(SINGLE)
        rates = self._rates(begun)
        found: list[_Completions] = []
        coarser = way[:0]
        for width in RUN_LEVELS:
            key = (way * (self._tables.length + 1) + begun.stages) * (LEVELS + 1) + level // width
            begins = np.flatnonzero(np.diff(key, prepend=-1))
            least = np.minimum.reduceat(values, begins, axis=1) if len(begins) else values
            rate = (rates[begins] * SINGLE).astype(np.float32)
            if found:
                begin = np.searchsorted(begins, np.append(coarser, len(level)))
            else:
                begin = np.searchsorted(way[begins], np.arange(len(self._tables.ways) + 1))
            found.append(_Completions(begun.stages[begins].astype(np.float32), rate, least, begin))
            coarser = begins
        return found

    def _columns(self, labels: Labels) -> Singles:
        """Return the columns of labels from which bounds are computed, by (column, label)."""
        tables = self._tables
        most = (tables.problem.most_workers or 0) // tables.degree[labels.way] - labels.stages
        busy = np.maximum(tables.least_busy[labels.way], np.maximum(labels.busy, labels.busiest)) * SINGLE
        columns = {
            FILLED: labels.fill_f + labels.fill_b, ENDED: labels.fill_f + labels.ends,
            MORE: tables.count[labels.way] - 1, BOTH: labels.beat_f + labels.beat_b, BEAT_B: labels.beat_b,
            BUSY: busy, RATE: labels.rate, OTHER_USD: labels.other_usd, STAGES: labels.stages, MOST_STAGES: most,
        }  # fmt: skip
        return np.stack([columns[number] for number in range(len(columns))]).astype(np.float32)

    def _unbeaten_parts(self, own: Singles, before: _Completions, row: Ints, coarser: Ints) -> tuple[Ints, Ints]:
        """Return the pairs of a label and a part of its coarser completion that the front does not beat."""
        begin = before.begin[coarser]
        many = before.begin[coarser + 1] - begin
        row = np.repeat(row, many)
        at = ranges(begin, many)
        # The first bound leaves few pairs, for which the other two are then computed.
        values = before.values
        beat, more = np.maximum(own[BOTH].take(row), values[BEAT].take(at)), own[MORE].take(row)
        seconds = np.maximum(own[FILLED].take(row) + values[FILL].take(at) + more * beat, own[BUSY].take(row))
        np.maximum(seconds, own[FILLED].take(row) + values[ALONE].take(at), out=seconds)
        left = self._unbeaten(own, before, row, at, seconds)
        row, at, seconds = row.take(left), at.take(left), seconds.take(left)
        more, beat_b = own[MORE].take(row), own[BEAT_B].take(row)
        slowest = more * np.maximum(own[BOTH].take(row) - beat_b, values[BEAT_F].take(at))
        np.maximum(seconds, own[FILLED].take(row) + values[FINISH].take(at) + slowest + more * beat_b, out=seconds)
        np.maximum(seconds, own[ENDED].take(row) + values[FORWARD].take(at) + slowest, out=seconds)
        left = self._unbeaten(own, before, row, at, seconds)
        return row.take(left), at.take(left)

    def _unbeaten(self, own: Singles, before: _Completions, row: Ints, at: Ints, seconds: Singles) -> Ints:
        """Return the indices of the pairs that are allowed, and that the front does not beat; ``seconds``: their lower
        bounds."""
        problem = self._tables.problem
        usd = seconds * (own[RATE].take(row) + before.rate.take(at))
        usd += own[OTHER_USD].take(row) + before.values[OTHER].take(at)
        left = ~self._front.surely_beats(seconds, usd, self._within)
        if problem.stages is not None:
            left &= own[STAGES].take(row) + before.stages.take(at) == problem.stages
        if problem.most_workers is not None:
            left &= before.stages.take(at) <= own[MOST_STAGES].take(row)
        return np.flatnonzero(left)
