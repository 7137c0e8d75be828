"""The topology ``ring``: each region exchanges with two others, in the best order; of up to nine regions that of all
orders, of up to twenty by search, beyond that from region to nearest region."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import combinations, permutations

import numpy as np

from scheduler.topology._contract import Candidate, Network, TopologyKind
from scheduler.topology._exchange_time import Hops, Ints, around, ring_times

__all__ = ["KIND"]

_EXACT_RING = 9
"""Number of regions up to which all orders of a ring are compared: 20,160."""
_MOST_IMPROVED = 20
"""Number of regions up to which a ring is improved by 2-opt, whose time grows with the fourth power. An update passes
half of a ring one after the other, so larger rings lose to other topologies however they are ordered."""
_MOST_STARTS = 8
"""Number of regions from which the order of a larger ring is begun."""
_MOST_SWEEPS = 20
"""Largest number of reversals by 2-opt, which bounds the time of the search."""


def _find(network: Network) -> Candidate | str:
    net, n = network.hops, network.size
    if n < 3:
        return "two regions make no ring"
    if n <= _EXACT_RING:
        orders = _all_orders(n)
    elif n <= _MOST_IMPROVED:
        orders = _improved(net, _greedy_orders(net, n))
    else:
        orders = _greedy_orders(net, _MOST_STARTS)
    times = ring_times(net, orders)
    order = [int(place) for place in orders[times.argmin()]]
    links = tuple((order[i], order[(i + 1) % n]) for i in range(n))
    if not all(net.there[p, q] for p, q in links):
        return "no way around with direct paths was found"
    return Candidate((), links)


@lru_cache(maxsize=_EXACT_RING)
def _all_orders(n: int) -> Ints:
    """Return every ring once: from region 0, in one of the two directions."""
    rings = [(0, *rest) for rest in permutations(range(1, n)) if n < 3 or rest[0] < rest[-1]]
    return np.asarray(rings)


def _greedy_orders(net: Hops, starts: int) -> Ints:
    """Return, from so many of the regions, the ring that always continues to the nearest region left."""
    n = len(net)
    orders = np.arange(0, n, max(1, n // starts))[:, None]
    rows, left = np.arange(len(orders)), np.ones((len(orders), n), np.bool_)
    for _ in range(n - 1):
        left[rows, orders[:, -1]] = False
        nearest = np.where(left, net.weights[orders[:, -1]], np.inf).argmin(axis=1)
        orders = np.hstack([orders, nearest[:, None]])
    return orders


def _improved(net: Hops, orders: Ints) -> Ints:
    """Return the best two orders improved by 2-opt: the best reversal of a stretch, until none helps (Croes 1958)."""
    n = orders.shape[1]
    places = np.arange(n)
    # Row (i, j) lists the places of a ring after the stretch i..j is reversed.
    moves = np.asarray(
        [np.where((places < i) | (places > j), places, i + j - places) for i, j in combinations(range(1, n), 2)]
    )
    times = ring_times(net, orders)
    best = np.argsort(times)[:2]
    orders, times, rows = orders[best], times[best], np.arange(2)
    for _ in range(_MOST_SWEEPS):
        tried = orders[:, moves]
        after = ring_times(net, tried.reshape(-1, n)).reshape(len(orders), -1)
        helped = after.min(axis=1) < times
        if not helped.any():
            break
        orders = np.where(helped[:, None], tried[rows, after.argmin(axis=1)], orders)
        times = np.where(helped, after.min(axis=1), times)
    return orders


def _seconds(net: Hops, neighbours: Sequence[Sequence[int]]) -> float:
    return float(ring_times(net, np.asarray([around(neighbours)]))[0])


KIND = TopologyKind("ring", _find, _seconds)
