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

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.intp]


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
    at[above, leaves] = links.total_seconds[leaves, above]
    for child in reversed(order[1:]):
        if not children[child]:
            continue
        parent, origins = parents[child], np.flatnonzero(np.isfinite(at[child]))
        origins = origins[at[child, origins].argsort(kind="stable")]
        only = np.array([child])
        arrived = _arrivals(links, only, parents[only], at[child, origins], np.ones((1, len(origins)), np.bool_))
        at[parent, origins] = arrived[0]
    latest, below = float(at[order[0]].max()), np.isfinite(at)
    for parent in order:
        there = np.array(children[parent], np.intp)
        if not len(there):
            continue
        origins = at[parent].argsort(kind="stable")
        carried = ~below[there][:, origins]
        arrived = _arrivals(links, np.full_like(there, parent), there, at[parent, origins], carried)
        latest = max(latest, float(np.where(carried, arrived, 0.0).max()))
        for row, child in enumerate(there.tolist()):
            if children[child]:
                at[child, origins[carried[row]]] = arrived[row, carried[row]]
    return latest


def _arrivals(links: LinkPace[Floats], source: Ints, target: Ints, ready: Floats, carried: Bools) -> Floats:
    """Return when updates have passed links; shape (links, updates).

    ``ready``: when they are at the source, sorted. ``carried``: those that a link carries; others count for nothing.
    """
    offer, first, second, later, way, _ = (figure[source, target][:, None] for figure in links.figures)
    place = carried.cumsum(axis=1)
    busy = first + np.minimum(np.maximum(place - 1, 0), 1) * second + np.maximum(place - 2, 0) * later
    # What the link was busy with before each.
    before = np.where(place > 1, busy - np.where(place == 2, second, later), 0.0)
    begun = np.maximum.accumulate(np.where(carried, ready + offer - before, -np.inf), axis=1)
    return np.asarray(busy + begun + way)
