"""Unfinished pipelines, as columns: stages from some layer to the last one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from scheduler.pipeline._tables import Floats, Ints

Mask = npt.NDArray[np.bool_]

FIRST_WINDOW, MOST_MORE = 2, 512
"""Labels that each is compared with at first, and how many more at most in each further turn, until with all."""


@dataclass(frozen=True, eq=False)
class Labels:
    """Choices of stages from layer `first` to the end, one a row. Times are sums and maxima over these stages."""

    way: Ints
    first: Ints
    place: Ints
    """Place of the first of the stages."""
    fill_f: Floats
    beat_f: Floats
    fill_b: Floats
    beat_b: Floats
    ends: Floats
    """max of: backward passes down to a stage done, and its gradients merged."""
    busy: Floats
    """Seconds that the cores of the first stage's place have to do for its stages; 0 where none are shared."""
    busiest: Floats
    """The most of any place behind it."""
    rate: Floats
    """USD per second of all functions."""
    other_usd: Floats
    stages: Ints
    before: Ints
    """Row of the label that this one puts a stage in front of; -1: none."""
    option: Ints
    """Option of the stage in front."""
    again: Mask
    """Whether it computes its forward pass again."""
    slowest: Floats
    """Seconds of the slowest lane, both ways, that a stage in front of it may have at most."""

    def __len__(self) -> int:
        return len(self.way)

    def take(self, rows: Ints | Mask) -> Labels:
        """Some of the rows."""
        rows = np.flatnonzero(rows) if rows.dtype == bool else rows
        return Labels(*(getattr(self, field.name).take(rows) for field in fields(self)))


def joined(parts: Sequence[Labels]) -> Labels:
    """Return labels concatenated."""
    return Labels(*(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(Labels)))


def ends_of(ways: Ints, slowest: Floats, length: int, place: int) -> Labels:
    """Return the empty label behind the last layer, in the last place that the last stage may have."""
    n = len(ways)
    none, zero = np.full(n, -1), np.zeros(n)
    return Labels(
        ways, np.full(n, length), np.full(n, place), zero, zero, zero, zero, zero, zero, zero, zero, zero,
        np.zeros(n, dtype=np.int64), none, none, np.zeros(n, dtype=bool), slowest,
    )  # fmt: skip


def seconds_of(labels: Labels, count: Floats) -> Floats:
    """Return the seconds of whole pipelines; `count` by row."""
    done: Floats = labels.fill_f + (count - 1) * labels.beat_f + labels.ends
    return np.maximum(done, np.maximum(labels.busy, labels.busiest))


def undominated(labels: Labels, raised: Labels, count: Floats, alike: bool = False) -> Labels:
    """Return the labels without those that another one of the same way and place surely equals or beats, with any
    stages in front.

    Seconds of any completion are max(u, a + ..) + max(x, v + .., b + ..), with u = fill_f + (n-1) beat_f, a = fill_f, x
    = ends, v = fill_b + (n-1) beat_b, b = fill_b and the same additions for all labels: one that is no larger in the
    six sums is no slower, unless it keeps shared cores busy for longer. It must also have no larger rate, price and
    number of stages. ``raised``: the least times of a label in every completion that matters; the other label is taken
    as it is. ``alike``: only labels of as many stages are compared, since their number is fixed.
    """
    return labels.take(_unbeaten(_measures(labels, count), _measures(raised, count), groups(labels, alike)))


def groups(labels: Labels, alike: bool = False) -> Ints:
    """Labels that continue alike: of one way, their first stage in one place; ``alike``: also of as many stages."""
    group: Ints = labels.way * (1 + labels.place.max(initial=0)) + labels.place
    return group * (1 + labels.stages.max(initial=0)) + labels.stages if alike else group


def _measures(labels: Labels, count: Floats) -> Floats:
    """Return the measures in which one label must be no larger than another, by row.

    In the first ones the raised are no smaller; of the others come first those in which the fastest labels are larger,
    so that few pairs are left for the rest.
    """
    a, b, x = labels.fill_f, labels.fill_b, labels.ends
    u, v = a + (count - 1) * labels.beat_f, b + (count - 1) * labels.beat_b
    others = labels.rate, labels.other_usd, a + b, a + x, u + b, a + v, u + v
    return np.stack([u + x, *others, labels.busy, labels.busiest, labels.stages.astype(float)])


def _unbeaten(low: Floats, high: Floats, group: Ints) -> Ints:
    """Return the rows that no earlier row of the group beats. A row that beats another precedes it, so that no two
    labels can beat each other."""
    order = np.lexsort((low[0] + low[3], low[0], group))
    low, high, group = low.take(order, axis=1), high.take(order, axis=1), group[order]
    before = np.arange(len(order)) - np.searchsorted(group, group)
    left = np.arange(len(order))
    nearer, far = 0, FIRST_WINDOW
    while (some := before[left] > nearer).any():
        begin = left[some] - np.minimum(before[left[some]], far)
        many = left[some] - nearer - begin
        first, then = ranges(begin, many), np.repeat(left[some], many)
        # By the first measure they are in order.
        for measure in range(1, len(low)):
            same = np.flatnonzero(low[measure].take(first) <= high[measure].take(then))
            first, then = first.take(same), then.take(same)
        worse = np.zeros(len(order), dtype=bool)
        worse[then] = True
        left = left[~worse[left]]
        nearer, far = far, min(4 * far, far + MOST_MORE)
    return np.sort(order[left])


def ranges(begin: Ints | int, many: Ints) -> Ints:
    """Return consecutive numbers from each begin on, concatenated."""
    found: Ints = np.arange(many.sum()) + np.repeat(begin - (np.cumsum(many) - many), many)
    return found
