"""Exchanges over trees of many regions: their time without a loop over the updates that a link carries.

The k-th update has left a link at f(k) = max(f(k - 1), r(k) + o) + b(k), so that with B(k) = b(1) + ... + b(k)

    f(k) = B(k) + max over j <= k of (r(j) + o - B(j - 1)),

which is a running maximum. Only the first update is counted as one over a cold link: links that carry hundreds of
updates hardly fall idle in between.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from scheduler._link import LinkPace

__all__ = ["tree_seconds_of_many"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.intp]


_MOST_AT_ONCE = 100_000
"""Numbers in an array of arrivals: 800 kB, so that it stays in a processor's cache."""


def tree_seconds_of_many(links: LinkPace[Floats], parents: Ints) -> float:
    """Return the seconds of an exchange over one tree.

    Args:
        links: their times, arrays of shape (n, n).
        parents: of each region; of the root -1.
    """
    size = len(parents)
    children: list[list[int]] = [[] for _ in range(size)]
    for child, parent in enumerate(parents.tolist()):
        if parent >= 0:
            children[parent].append(child)
    order = [int(np.flatnonzero(parents < 0)[0])]
    for here in order:
        order += children[here]
    # When each region has each other one's update, by region and origin.
    at = np.full((size, size), np.inf)
    np.fill_diagonal(at, 0.0)
    # The links of leaves carry one update each.
    leaves = np.array([child for child in order[1:] if not children[child]], np.intp)
    above = parents[leaves]
    at[above, leaves] = _of_links(links, leaves, above).total_seconds
    for child in reversed(order[1:]):
        if not children[child]:
            continue
        parent, origins = parents[child], np.flatnonzero(np.isfinite(at[child]))
        origins = origins[at[child, origins].argsort(kind="stable")]
        at[parent, origins] = _arrivals(links, child, int(parent), at[child, origins])
    latest = float(at[order[0]].max())
    inner = {here: np.isfinite(at[here]) for here in order if children[here]}
    for parent in inner:
        origins = at[parent].argsort(kind="stable")
        ready, place = at[parent, origins], np.empty(size, np.intp)
        place[origins] = np.arange(size)
        ends = np.array([child for child in children[parent] if not children[child]], np.intp)
        if len(ends):
            latest = max(latest, _latest_at_leaves(links, parent, ends, ready, place[ends]))
        for child in children[parent]:
            if children[child]:
                carried = ~inner[child][origins]
                arrived = _arrivals(links, parent, child, ready[carried])
                latest = max(latest, float(arrived.max()))
                at[child, origins[carried]] = arrived
    return latest


def _of_links(links: LinkPace[Floats], source: Ints, target: Ints) -> LinkPace[Floats]:
    return LinkPace(*(figure[source, target] for figure in links.figures))


def _arrivals(links: LinkPace[Floats], source: int, target: int, ready: Floats) -> Floats:
    """Return when updates have passed a link; ``ready``: when they are at its source, sorted; shape (updates,)."""
    offer, first, second, later, way, _ = (float(figure[source, target]) for figure in links.figures)
    busy = first + second + np.arange(-1.0, len(ready) - 1) * later
    # What the link was busy with before each.
    before = busy - later
    busy[0], before[0], before[1:2] = first, 0.0, busy[1:2] - second
    return np.asarray(busy + np.maximum.accumulate(ready + offer - before) + way)


def _latest_at_leaves(links: LinkPace[Floats], hub: int, leaves: Ints, ready: Floats, own: Ints) -> float:
    """Return when the last update has passed the links from a region to leaves, each of which gets all but its own.

    ``ready``: when the updates are at the hub, sorted. ``own``: the place among them of each leaf's.
    """
    size, count, latest = len(ready), max(1, _MOST_AT_ONCE // len(ready)), 0.0
    if size < 2:
        return 0.0
    place = np.arange(1, size)
    for begin in range(0, len(leaves), count):
        some = leaves[begin : begin + count]
        its = _of_links(links, np.full_like(some, hub), some)
        offer, first, second, later, way, _ = (figure[:, None] for figure in its.figures)
        busy = first + second + (place - 2) * later
        before = busy - later
        before[:, 0], before[:, 1:2] = 0.0, (first + second - second)[:, : size - 2]
        at_hub = np.where(place <= own[begin : begin + count, None], ready[:-1], ready[1:])
        begun = (at_hub + offer - before).max(axis=1)
        last = busy[:, -1] if size > 2 else first[:, 0]
        latest = max(latest, float((last + begun + way[:, 0]).max()))
    return latest
