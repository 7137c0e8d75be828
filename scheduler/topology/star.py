"""The topology ``star``: every region exchanges with one hub, the best of all or, of many, of the nearest to the
others."""

from __future__ import annotations

import numpy as np

from scheduler.topology._contract import Candidate, Network, TopologyKind
from scheduler.topology._exchange_time import MANY, trees_seconds

__all__ = ["KIND"]

_MOST_HUBS, _MOST_OF_MANY = 32, 2
"""Number of hubs whose stars are compared in full; of more regions these are the ones with the least sum of times to
all others. The second number is for more than `MANY` regions."""


def _find(network: Network) -> Candidate | str:
    net, every = network.hops, np.arange(network.size)
    hubs = np.nonzero(net.there.sum(axis=1) >= network.size - 1)[0]
    if not len(hubs):
        return "no region has a direct path to all others"
    most = _MOST_HUBS if network.size <= MANY else _MOST_OF_MANY
    if len(hubs) > most:
        hubs = np.sort(hubs[net.weights[hubs].sum(axis=1).argsort(kind="stable")[:most]])
    parents = np.where(every == hubs[:, None], -1, hubs[:, None])
    hub = int(hubs[trees_seconds(net, parents).argmin()])
    return Candidate((hub,), tuple((hub, other) for other in range(network.size) if other != hub))


KIND = TopologyKind("star", _find)
