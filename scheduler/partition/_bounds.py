"""What the layers before a label add at least, and which labels cannot reach the front any more."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from scheduler.partition._labels import Labels, Mask
from scheduler.partition._tables import Floats, Ints, Stages, Tables

__all__ = ["Bounds", "Front"]

LEVELS = 48 - 1
"""Steps of a way's rate, each as large as its cheapest function's; what is above the last one is counted as it."""
COARSE = 8
"""Levels that are looked at as one at first."""
NEVER = 1e99
"""Seconds of what does not fit. Not infinite, since it is multiplied by zero."""
ROUNDING = 1 - 1e-12


class Front:
    """The best pairs of seconds and USD so far."""

    def __init__(self) -> None:
        self.seconds, self.usd = np.array([-np.inf]), np.array([np.inf])
        """The fastest first, behind a pair that beats nothing."""
        self._source, self._row = np.array([-1]), np.array([-1])
        self._additions = 0

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

    def beats(self, seconds: Floats, usd: Floats, within: float = 0.0) -> Mask:
        """Whether something is as fast and as cheap, or worse by no more than this share."""
        factor = (1 + within) * ROUNDING
        place = np.searchsorted(self.seconds, seconds * factor, side="right") - 1
        beaten: Mask = self.usd[place] <= usd * factor
        return beaten


class Bounds:
    """Of one problem: tables by (way, layers that are left, rate level), each the least of all ways to cut these
    layers whose functions' rate is within the level. A rate is counted in whole steps, rounded down, so that a level
    is never left out. Hops between regions are taken as free."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        every = np.arange(len(tables.ways))
        per_replica = tables.rate[0] / tables.degree[0]
        step = float(per_replica.min()) or 1.0
        self._steps = np.minimum(np.floor(per_replica / step * (1 + 1e-9)), LEVELS).astype(int)
        self.levels = np.arange(LEVELS + 1) * step
        shape = (len(every), tables.length + 1, LEVELS + 1)
        names = ("forward", "fill", "finish", "ends", "beat_f", "beat")
        self._forward, self._fill, self._finish, self._ends, self._beat_f, self._beat = (
            np.full(shape, NEVER) for _ in names
        )
        for table in (self._forward, self._fill, self._finish, self._ends, self._beat_f, self._beat):
            table[:, 0] = 0.0
        # Stages that the layers before one need at least.
        self._fewest = np.full((len(every), tables.length + 1), NEVER)
        self._fewest[:, 0] = 0.0
        for first in range(tables.length):
            self._push(first, tables.starting(first, every))
        self._fitting = np.flatnonzero(self._fill[:, -1, -1] < NEVER)
        """Ways in which all layers fit somewhere."""
        self.possible = self._fitting
        """Those that can still reach the front."""
        self._number()

    def _number(self) -> None:
        self.row = np.full(len(self._tables.ways), -1)
        """By way: which of the possible ones it is."""
        self.row[self.possible] = np.arange(len(self.possible))

    def _push(self, first: int, stages: Stages) -> None:
        """Put every stage that begins with a layer behind the best cuts of the layers before it."""
        forward, backward, beat_f, beat, fits = self._costs(first, stages)
        merge, later = stages.merge, slice(first + 1, None)
        fewest = np.where(fits.any(axis=2), self._fewest[:, first, None] + 1, NEVER)
        np.minimum(self._fewest[:, later], fewest, out=self._fewest[:, later])
        for option, step in enumerate(self._steps):
            if not fits[:, :, option].any():
                continue  # Where it fits nowhere, or a smaller one is as good.
            # From each level to the one that the stage leads to; from the last one also back to itself.
            moves = [(slice(step, None), slice(0, LEVELS + 1 - step))]
            moves += [(slice(LEVELS, None), slice(LEVELS, None))] if step else []
            f, b, m = (part[:, :, option, None] for part in (forward, backward, merge))
            for to, since in moves:
                at, here = (slice(None), first, None, since), (slice(None), later, to)
                _lower(self._fill, here, self._fill[at] + (f + b))
                _lower(self._finish, here, f + b + np.maximum(m + self._forward[at], self._finish[at]))
                _lower(self._forward, here, self._forward[at] + f)
                _lower(self._ends, here, b + np.maximum(m, self._ends[at]))
                _lower(self._beat_f, here, np.maximum(self._beat_f[at], beat_f[:, :, option, None]))
                _lower(self._beat, here, np.maximum(self._beat[at], beat[:, :, option, None]))

    def _costs(self, first: int, stages: Stages) -> tuple[Floats, Floats, Floats, Floats, Mask]:
        """Fill forward and backward, and beats, forward and both; `NEVER` where a stage fits nowhere."""
        tables = self._tables
        after = np.arange(first + 1, tables.length + 1)
        both = tables.alternates[:, None, None]
        live = tables.count[:, None, None]
        live = np.where(both, np.minimum(live, 1 + (after < tables.length)[None, :, None]), live)
        kept = stages.fits >= live
        fits = kept | (stages.fits_again >= live) if tables.problem.rematerialise else kept
        fits = tables.needed(fits, kept)
        computed = stages.backward + np.where(kept, 0.0, stages.forward)
        lanes_f = (stages.forward, stages.get_in[:, None, :], stages.put_out)
        lanes_b = (computed, stages.put_back[:, None, :], stages.get_back)
        never = np.where(fits, 0.0, NEVER)
        forward, backward = sum(lanes_f) + never, sum(lanes_b) + never
        slow_f = np.maximum(np.maximum(lanes_f[0], lanes_f[1]), lanes_f[2])
        slow_b = np.maximum(np.maximum(lanes_b[0], lanes_b[1]), lanes_b[2])
        beat_f = np.where(both, forward + backward, slow_f) + never
        return forward, backward, beat_f, np.where(both, 0.0, slow_b) + beat_f, fits

    def close(self, front: Front, within: float) -> None:
        """Leave the ways out that cannot get ahead of the front by more than this share."""
        tables, ways = self._tables, self._fitting
        more = (tables.count[ways] - 1)[:, None]
        seconds = self._fill[ways, -1] + more * self._beat[ways, -1]
        seconds = np.maximum(seconds, self._finish[ways, -1] + more * self._beat_f[ways, -1])
        usd = seconds * tables.degree[ways][:, None] * self.levels
        lost = (front.beats(seconds, usd, within) | (seconds >= NEVER)).all(axis=1)
        self.possible = ways[~lost]
        self._number()

    def finishable(self, labels: Labels) -> Labels:
        """The labels in front of which there can be as many stages as are needed, and not too many."""
        problem = self._tables.problem
        least = labels.stages + self._fewest[labels.way, labels.first]
        possible = least < NEVER
        if problem.stages is not None:
            possible &= (least <= problem.stages) & (labels.stages + labels.first >= problem.stages)
        if problem.most_workers is not None:
            possible &= least * self._tables.degree[labels.way] <= problem.most_workers
        return labels.take(possible)

    def leading(self, labels: Labels, slack: float) -> Labels:
        """Of all pipelines of a way and a rate, the labels of those that are bounded best, or worse by this share."""
        seconds = self._least(labels, 1)
        step = self._tables.degree[labels.way] * self.levels[1]
        own = np.minimum(np.round(labels.rate / step), 2 * LEVELS).astype(int)
        rates = 3 * LEVELS + 1
        key = (labels.way * rates + own)[:, None] + np.arange(LEVELS + 1)
        best = np.full(len(self.row) * rates, np.inf)
        np.minimum.at(best, key, seconds)
        leads = (seconds <= best[key] * (1 + slack)) & (seconds < NEVER)
        return labels.take(leads.any(axis=1))

    def promising(self, labels: Labels, front: Front, within: float) -> tuple[Labels, Labels]:
        """The labels that can still get ahead of the front by more than this share; and the same ones, raised.

        Seconds of a completion are bounded from below for every rate that the functions before the label may have. At
        the rates at which the front does not beat this bound, the stages before also are so slow and merge so long
        that some of the label's times do not matter, if they are less: these are raised to what does.
        """
        labels = labels.take(np.flatnonzero(~self._lost(labels, front, within, COARSE).all(axis=1)))
        lost = self._lost(labels, front, within, 1)
        keep = np.flatnonzero(~lost.all(axis=1))
        kept, most = labels.take(keep), LEVELS - np.argmin(lost[keep][:, ::-1], axis=1)
        here = kept.way, kept.first, most
        least_ends = kept.fill_b + self._ends[here] + (self._tables.count[kept.way] - 1) * kept.beat_b
        raised = replace(
            kept, beat_f=np.maximum(kept.beat_f, self._beat_f[here]), ends=np.maximum(kept.ends, least_ends)
        )  # fmt: skip
        return kept, raised

    def _least(self, labels: Labels, width: int) -> Floats:
        """(label, run of levels): seconds of what comes of the label, at least."""
        at, more = (labels.way, labels.first), (self._tables.count[labels.way] - 1)[:, None]

        def least(table: Floats) -> Floats:
            return table[:, :, width - 1 :: width][at]

        fill, ends = (labels.fill_f + labels.fill_b)[:, None], (labels.fill_f + labels.ends)[:, None]
        beat_f = np.maximum(labels.beat_f[:, None], least(self._beat_f))
        beat = np.maximum((labels.beat_f + labels.beat_b)[:, None], least(self._beat))
        seconds = fill + least(self._fill) + more * beat
        seconds = np.maximum(seconds, fill + least(self._finish) + more * (beat_f + labels.beat_b[:, None]))
        found: Floats = np.maximum(seconds, ends + least(self._forward) + more * beat_f)
        return found

    def _lost(self, labels: Labels, front: Front, within: float, width: int) -> Mask:
        """(label, run of `width` levels): whether the front beats whatever comes of the label at such a rate.

        Of a run of levels, the seconds are those at its highest one, the price that at its lowest.
        """
        seconds = self._least(labels, width)
        rate = labels.rate[:, None] + self._tables.degree[labels.way][:, None] * self.levels[::width]
        usd = seconds * rate + labels.other_usd[:, None]
        lost: Mask = front.beats(seconds, usd, within) | (seconds >= NEVER)
        return lost


def _lower(table: Floats, where: tuple[slice, slice, slice], values: Floats) -> None:
    np.minimum(table[where], values, out=table[where])
