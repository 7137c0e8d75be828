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

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING

from scheduler._link import LinkPace, LinkTable, pace

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["MISSING_SECONDS", "Hops", "hops", "mesh_seconds", "originals", "ring_times", "tree_seconds"]

MISSING_SECONDS = 1e12
"""Seconds of a missing link: finite, so that a search can move away from it."""
BLOCK = 1024
"""Orders of a ring that are evaluated at a time: small enough for the cache."""
_MISSING = LinkPace(0.0, MISSING_SECONDS, MISSING_SECONDS, MISSING_SECONDS, 0.0, MISSING_SECONDS)


@dataclass(frozen=True)
class Hops:
    """The times of all links for one size of update, by the regions' numbers."""

    paces: tuple[tuple[LinkPace, ...], ...]
    there: tuple[tuple[bool, ...], ...]
    """Symmetric: neighbours need both directions."""

    def __len__(self) -> int:
        return len(self.paces)

    @cached_property
    def figures(self) -> tuple[npt.NDArray[np.float64], ...]:
        """The fields of the paces in their order, each of shape (n, n)."""
        import numpy as np

        return tuple(
            np.array([[getattr(link, field.name) for link in row] for row in self.paces]) for field in fields(LinkPace)
        )

    @cached_property
    def missing(self) -> npt.NDArray[np.bool_]:
        """Whether each link is missing, shape (n, n)."""
        import numpy as np

        return ~np.asarray(self.there)

    def weight(self, p: int, q: int) -> float:
        """Seconds of one update over a pair of links, in the slower direction."""
        if not self.there[p][q]:
            return MISSING_SECONDS
        return max(self.paces[p][q].total_seconds, self.paces[q][p].total_seconds)


def hops(regions: Sequence[str], table: LinkTable, update_bytes: int) -> Hops:
    """Return the links among regions, for updates of a size."""
    paths = [[table.get((p, q)) for q in regions] for p in regions]
    paces = tuple(tuple(pace(path, update_bytes) if path else _MISSING for path in row) for row in paths)
    return Hops(paces, tuple(tuple((p, q) in table and (q, p) in table for q in regions) for p in regions))


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


def mesh_seconds(net: Hops, neighbours: Sequence[Sequence[int]]) -> float:
    """Return the seconds of an exchange over a mesh, also with missing pairs: at most two hops between any two regions.

    Link (p, q) carries p's own update first; then, where q has no path from some regions r, theirs, which are at p
    after o(r, p) + c(r, p) + p(r, p). Raises ValueError where two hops do not suffice.
    """
    slowest = 0.0
    for (p, q), carried in originals(neighbours).items():
        if any(r != p and r not in neighbours[p] for r in carried):
            raise ValueError("more than two hops")
        ready = [0.0 if r == p else net.paces[r][p].total_seconds for r in carried]
        slowest = max(slowest, _arrivals(ready, net.paces[p][q])[-1])
    return slowest


def _arrivals(ready: Sequence[float], link: LinkPace) -> list[float]:
    """Return when updates that are ready at given times have passed a link, in order."""
    offer, idle, way = link.offer_seconds, link.idle_seconds, link.way_seconds
    free, sent, out = -math.inf, 0, []
    for at in sorted(ready):
        begin = at + offer
        if begin - free > idle:
            free, sent = begin + link.first_seconds, 1
        else:
            free, sent = max(free, begin) + (link.second_seconds if sent == 1 else link.next_seconds), sent + 1
        out.append(free + way)
    return out


def tree_seconds(net: Hops, neighbours: Sequence[Sequence[int]]) -> float:
    """Return the seconds of an exchange over a tree, in which link (p, q) carries the updates of all regions on p's
    side.

    Let r(1) <= r(2) <= ... be when they are at p: 0 for p's own, the others as the links into p deliver them. The link
    has sent the k-th at f(k) = max(f(k - 1), r(k) + o) + b, with c for b where it was idle, and q has it at f(k) + p.
    """
    arrivals: dict[tuple[int, int], list[float]] = {}

    def carried(p: int, q: int) -> list[float]:
        """Return when q receives the updates that are sent over (p, q), in order."""
        if (p, q) not in arrivals:
            ready = [0.0]
            for r in neighbours[p]:
                if r != q:
                    ready += carried(r, p)
            arrivals[p, q] = _arrivals(ready, net.paces[p][q])
        return arrivals[p, q]

    for p, others in enumerate(neighbours):
        for q in others:
            carried(p, q)
    return max((out[-1] for out in arrivals.values()), default=0.0)


def ring_times(net: Hops, orders: npt.NDArray[np.intp]) -> npt.NDArray[np.float64]:
    """Return the seconds for each order of a ring of three and more; orders has shape (m, n), the result (m,).

    A link sends its source's own update first and then those from behind, nearest first. So the k-th leaves link i at
    f(k, i) = max(f(k - 1, i), f(k - 1, i - 1) + p(i - 1) + o(i)) + b(i), with c for b where the link was idle, in each
    of the two directions, and travels up to half of the ring. With an even number the last of these hops is made only
    in the direction of the origin's first neighbour.
    """
    import numpy as np

    return np.concatenate([_block_times(net, orders[i : i + BLOCK]) for i in range(0, len(orders), BLOCK)])


def _block_times(net: Hops, orders: npt.NDArray[np.intp]) -> npt.NDArray[np.float64]:
    import numpy as np

    n = orders.shape[1]
    following, before = np.roll(orders, -1, axis=1), np.roll(orders, 1, axis=1)
    latest = np.zeros(orders.shape)
    for step, ahead, behind in ((1, following, before), (-1, before, following)):
        pairs = orders * n + ahead
        offer, first, second, later, way, idle = (figure.take(pairs) for figure in net.figures)
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
    missing = net.missing[orders, following]
    return np.asarray(latest.max(axis=1) + MISSING_SECONDS * missing.sum(axis=1))
