"""The time of a round's exchange over a given graph of regions.

Every region's update is encoded once and passed on unchanged (an *original*), store and forward, along the tree of
fewest hops from its region, ties broken by name. So each region receives each of the n - 1 other updates once, whatever
the graph; graphs differ in how many updates each link carries.

All updates are ready at time 0. Links are directed and independent of each other. Each sends one update after another,
in the order in which they arrived at its source, at the rate of TCP (`_link.pace`): the first takes c(p, q) seconds,
the following ones b(p, q), the second one a little more. Offers o(p, q) and propagation p(p, q) overlap with other
updates (the alpha-beta model, Hockney 1994, with store and forward, and a cold start).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from scheduler._link import PRIOR_MBPS, PRIOR_RTT_MS, LinkPace, LinkTable, paces
from scheduler._model import Region
from scheduler.topology._large_trees import tree_seconds_of_many

__all__ = [
    "MANY", "MISSING_SECONDS", "Bools", "Floats", "Hops", "Ints", "Links", "around", "carried_updates", "links_among",
    "links_of", "mesh_seconds", "ring_times", "tree_seconds", "trees_seconds",
]  # fmt: skip

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.intp]

MISSING_SECONDS = 1e12
"""Seconds of a missing link: finite, so that a search can move away from it."""
MANY = 128
"""Regions above which trees are evaluated without cold links (`_many`), and graphs are searched with less effort."""
BLOCK = 1024
"""Orders of a ring that are evaluated at a time: small enough for the cache."""
_MOST_FIGURES = 2_000_000
"""Numbers in an array of times, by tree, region and origin: 16 MB."""


@dataclass(frozen=True)
class Links:
    """The links among regions, whatever the size of an update; arrays of shape (n, n) by the regions' numbers."""

    names: Sequence[str]
    clouds: Mapping[str, str]
    """Cloud of each region, by name; may lack regions."""
    there: Bools
    """Symmetric: neighbours need both directions."""
    rtt: Floats
    """Round-trip times in seconds."""
    rate: Floats
    """Bytes per second."""
    usd_per_gb: Floats

    def hops(self, update_bytes: int) -> Hops:
        """Return the links for updates of a size."""
        found = paces(self.rtt, self.rate, update_bytes)
        if found.offer_seconds is self.rtt:
            found = replace(found, offer_seconds=self.rtt.copy())
        lacking = (0.0, *[MISSING_SECONDS] * 3, 0.0, MISSING_SECONDS)
        for own, none in zip(found.figures, lacking, strict=True):
            own[self._missing] = none
        return Hops(found, self.there)

    @cached_property
    def _missing(self) -> tuple[Ints, ...]:
        return np.nonzero(~self.there)


def links_among(names: Sequence[str], table: LinkTable, clouds: Mapping[str, str] | None = None) -> Links:
    """Return the links among regions."""
    size = len(names)
    there = np.zeros((size, size), np.bool_)
    rtt, rate, usd = np.ones((size, size)), np.ones((size, size)), np.zeros((size, size))
    for p, source in enumerate(names):
        for q, other in enumerate(names):
            path = table.get((source, other))
            if path is not None:
                there[p, q] = True
                rtt[p, q], rate[p, q], usd[p, q] = path.rtt_seconds, path.bytes_per_second, path.usd_per_gb
    return Links(names, clouds or {}, there & there.T, rtt, rate, usd)


def links_of(regions: Iterable[Region]) -> Links:
    """Return the links between regions as `link_table` has them, without an object for each."""
    held = sorted(regions, key=lambda region: region.name)
    size, number = len(held), {region.name: place for place, region in enumerate(held)}
    # The last column is for links to other regions.
    rtt, mbps = np.full((size, size + 1), PRIOR_RTT_MS), np.full((size, size + 1), PRIOR_MBPS)
    usd = np.zeros((size, size + 1))
    for row, region in enumerate(held):
        at = [number.get(link.destination, size) for link in region.links]
        rtt[row, at], mbps[row, at] = [link.rtt_ms for link in region.links], [link.mbps for link in region.links]
        if region.prices is not None:
            usd[row] = region.prices.egress_usd_per_gb
            named = region.prices.egress_to
            usd[row, [number.get(name, size) for name in named]] = list(named.values())
    there = mbps[:, :size] > 0
    np.fill_diagonal(there, val=False)
    return Links(
        [region.name for region in held],
        {region.name: region.cloud for region in held},
        there & there.T,
        np.where(there, rtt[:, :size] / 1e3, 1.0),
        np.where(there, mbps[:, :size] * 1e6 / 8, 1.0),
        np.where(there, usd[:, :size], 0.0),
    )


@dataclass(frozen=True)
class Hops:
    """The times of all links for one size of update, by the regions' numbers: arrays of shape (n, n)."""

    pace: LinkPace[Floats]
    there: Bools

    def __len__(self) -> int:
        return len(self.there)

    @cached_property
    def weights(self) -> Floats:
        """Seconds of one update over a pair of links, in the slower direction; 0 of a region with itself."""
        total = self.pace.total_seconds
        weights = np.where(self.there, np.maximum(total, total.T), MISSING_SECONDS)
        np.fill_diagonal(weights, 0.0)
        return weights


def originals(neighbours: Sequence[Sequence[int]]) -> dict[tuple[int, int], list[int]]:
    """Return the regions whose updates each directed link carries: breadth first from each, neighbours in order."""
    carried: dict[tuple[int, int], list[int]] = {(p, q): [] for p, others in enumerate(neighbours) for q in others}
    for origin in range(len(neighbours)):
        queue, seen = [origin], {origin}
        for here in queue:
            for there in sorted(neighbours[here]):
                if there not in seen:
                    seen.add(there)
                    queue.append(there)
                    carried[here, there].append(origin)
    return carried


def carried_updates(neighbours: Sequence[Sequence[int]]) -> dict[tuple[int, int], int]:
    """Return the number of updates that each directed link carries."""
    size, ends = len(neighbours), sum(map(len, neighbours))
    if ends == size * (size - 1):
        return {(p, q): 1 for p, others in enumerate(neighbours) for q in others}
    if all(len(others) == 2 for others in neighbours):
        return _carried_around(neighbours)
    if ends != 2 * (size - 1):
        return {link: len(sources) for link, sources in originals(neighbours).items()}
    parents, order = _rooted(neighbours)
    below = [1] * size
    for here in reversed(order[1:]):
        below[parents[here]] += below[here]
    up = {(here, parents[here]): below[here] for here in order[1:]}
    return up | {(p, q): size - count for (q, p), count in up.items()}


def _carried_around(neighbours: Sequence[Sequence[int]]) -> dict[tuple[int, int], int]:
    """Return the number of updates that each directed link of a ring carries.

    With an even number of regions, an update makes the last hop from the side of its origin's first neighbour.
    """
    order, size = around(neighbours), len(neighbours)
    carried = {(p, q): (size - 1) // 2 for p, others in enumerate(neighbours) for q in others}
    if size % 2 == 0:
        for place in range(size):
            step = 1 if order[(place + 1) % size] < order[place - 1] else -1
            last = order[(place + step * (size // 2 - 1)) % size]
            carried[last, order[(place + size // 2) % size]] += 1
    return carried


def around(neighbours: Sequence[Sequence[int]]) -> list[int]:
    """Return a ring's regions in order."""
    order, last = [0], -1
    while True:
        following = next(other for other in neighbours[order[-1]] if other != last)
        if following == 0:
            return order
        last = order[-1]
        order.append(following)


def _rooted(neighbours: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """Return the parent of each region in a tree, -1 of region 0, and the regions in an order with parents first."""
    parents, queue = [-1] * len(neighbours), [0]
    for here in queue:
        for there in neighbours[here]:
            if there != parents[here]:
                parents[there] = here
                queue.append(there)
    return parents, queue


def mesh_seconds(net: Hops, neighbours: Sequence[Sequence[int]] = ()) -> float:
    """Return the seconds of an exchange over a mesh, also with missing pairs: at most two hops between any two regions.
    Without ``neighbours`` no pair is missing.

    Link (p, q) carries p's own update first; then, where q has no path from some regions r, theirs, which are at p
    after o(r, p) + c(r, p) + p(r, p). Raises ValueError where two hops do not suffice.
    """
    total = net.pace.total_seconds
    if all(len(there) == len(neighbours) - 1 for there in neighbours):
        return float(total[net.there].max(initial=0.0))
    carried = originals(neighbours)
    if any(r != p and r not in neighbours[p] for (p, _), sources in carried.items() for r in sources):
        raise ValueError("more than two hops")
    ready = np.full((len(carried), max(map(len, carried.values()))), np.inf)
    for row, ((p, _), sources) in enumerate(carried.items()):
        ready[row, : len(sources)] = sorted(0.0 if r == p else total[r, p] for r in sources)
    source, target = np.array(list(carried)).T
    arrived = _arrivals(net, source, target, ready)
    return float(arrived[np.isfinite(arrived)].max())


def _arrivals(net: Hops, source: Ints, target: Ints, ready: Floats) -> Floats:
    """Return when updates have passed a link each row, in order; shape (links, updates).

    ``ready``: when they are at the source, sorted; infinite: there are no more.
    """
    offer, first, second, later, way, idle = (figure[source, target] for figure in net.pace.figures)
    arrived, free, fresh = np.empty_like(ready), np.full(len(ready), -np.inf), np.zeros(len(ready), np.bool_)
    with np.errstate(invalid="ignore"):  # differences of two infinite times
        for place in range(ready.shape[1]):
            begin = ready[:, place] + offer
            cold = begin - free > idle
            free = np.where(cold, begin + first, np.maximum(free, begin) + np.where(fresh, second, later))
            fresh = cold
            arrived[:, place] = free + way
    return arrived


def tree_seconds(net: Hops, neighbours: Sequence[Sequence[int]]) -> float:
    """Return the seconds of an exchange over a tree (`trees_seconds`)."""
    return float(trees_seconds(net, np.array([_rooted(neighbours)[0]]))[0])


def trees_seconds(net: Hops, parents: Ints) -> Floats:
    """Return the seconds of exchanges over trees, in which link (p, q) carries the updates of all regions on p's side.

    Let r(1) <= r(2) <= ... be when they are at p: 0 for p's own, the others as the links into p deliver them. The link
    has sent the k-th at f(k) = max(f(k - 1), r(k) + o) + b, with c for b where it was idle, and q has it at f(k) + p.

    Args:
        parents: of each region in each tree, shape (trees, n); of the root, any one, -1.
    """
    if len(net) > MANY:
        return np.array([tree_seconds_of_many(net.pace, tree) for tree in parents])
    size = max(1, _MOST_FIGURES // len(net) ** 2)
    return np.concatenate([_trees_seconds(net, parents[at : at + size]) for at in range(0, len(parents), size)])


def _trees_seconds(net: Hops, parents: Ints) -> Floats:
    rows, own = np.arange(len(parents))[:, None], np.arange(len(net))
    depth, above = np.zeros_like(parents), parents
    while (above >= 0).any():
        depth += above >= 0
        above = np.where(above >= 0, parents[rows, above], -1)
    levels = [np.nonzero(depth == level) for level in range(1, int(depth.max()) + 1)]
    # When each region has each other one's update, by tree, region and origin.
    at = np.full((len(parents), len(net), len(net)), np.inf)
    at[:, own, own] = 0.0

    def carry(tree: Ints, source: Ints, target: Ints, ready: Floats) -> None:
        order = ready.argsort(axis=1)[:, : int(np.isfinite(ready).sum(axis=1).max())]
        arrived = _arrivals(net, source, target, np.take_along_axis(ready, order, axis=1))
        link, place = np.nonzero(np.isfinite(arrived))
        at[tree[link], target[link], order[link, place]] = arrived[link, place]

    for tree, child in reversed(levels):
        carry(tree, child, parents[tree, child], at[tree, child])
    below = np.isfinite(at)
    for tree, child in levels:
        parent = parents[tree, child]
        carry(tree, parent, child, np.where(below[tree, child], np.inf, at[tree, parent]))
    return np.asarray(at.max(axis=(1, 2)))


def ring_times(net: Hops, orders: Ints) -> Floats:
    """Return the seconds for each order of a ring of three and more; orders has shape (m, n), the result (m,).

    A link sends its source's own update first and then those from behind, nearest first. So the k-th leaves link i at
    f(k, i) = max(f(k - 1, i), f(k - 1, i - 1) + p(i - 1) + o(i)) + b(i), with c for b where the link was idle, in each
    of the two directions, and travels up to half of the ring. With an even number the last of these hops is made only
    in the direction of the origin's first neighbour.
    """
    return np.concatenate([_block_times(net, orders[i : i + BLOCK]) for i in range(0, len(orders), BLOCK)])


def _block_times(net: Hops, orders: Ints) -> Floats:
    n = orders.shape[1]
    following, before = np.roll(orders, -1, axis=1), np.roll(orders, 1, axis=1)
    latest = np.zeros(orders.shape)
    for step, ahead, behind in ((1, following, before), (-1, before, following)):
        pairs = orders * n + ahead
        offer, first, second, later, way, idle = (figure.take(pairs) for figure in net.pace.figures)
        done, fresh = offer + first, np.ones(orders.shape, np.bool_)
        for hop in range(1, n // 2 + 1):
            arrived = np.roll(done + way, step, axis=1)
            if 2 * hop < n:
                np.maximum(latest, arrived, out=latest)
                begin = arrived + offer
                cold = begin - done > idle
                done = np.maximum(done, begin) + np.where(cold, first, np.where(fresh, second, later))
                fresh = cold
            else:
                # At each place, that of the origin on the other side of the ring, half the way back.
                this_way = np.roll(ahead < behind, step * hop, axis=1)
                np.maximum(latest, np.where(this_way, arrived, 0.0), out=latest)
    missing = ~net.there[orders, following]
    return np.asarray(latest.max(axis=1) + MISSING_SECONDS * missing.sum(axis=1))
