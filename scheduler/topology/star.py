"""The topology ``star``: every region exchanges with one hub, the best of all or, of many, of the nearest to the
others."""

from __future__ import annotations

import numpy as np

from scheduler.topology._contract import Candidate, Network, TopologyKind
from scheduler.topology._flood import trees_seconds

__all__ = ["KIND"]

_MOST_HUBS = 32
"""Number of hubs whose stars are compared in full; of more regions these are the ones with the least sum of times to
all others."""


def _find(network: Network) -> Candidate | str:
    net, every = network.hops, np.arange(network.size)
    hubs = np.nonzero(net.there.sum(axis=1) >= network.size - 1)[0]
    if not len(hubs):
        return "no region has a direct path to all others"
    if len(hubs) > _MOST_HUBS:
        hubs = np.sort(hubs[net.weights[hubs].sum(axis=1).argsort(kind="stable")[:_MOST_HUBS]])
    parents = np.where(every == hubs[:, None], -1, hubs[:, None])
    hub = int(hubs[trees_seconds(net, parents).argmin()])
    return Candidate((hub,), tuple((hub, other) for other in range(network.size) if other != hub))


KIND = TopologyKind("star", _find)
