"""The topology ``partial-mesh``: all direct paths, if some pairs have none and these reach each other in two hops."""

from __future__ import annotations

from itertools import combinations

from scheduler.topology._contract import Candidate, Network, TopologyKind
from scheduler.topology._exchange_time import MANY, mesh_seconds

__all__ = ["KIND"]


def _find(network: Network) -> Candidate | str:
    there, every = network.hops.there.tolist(), range(network.size)
    missing = network.missing
    if not missing:
        return "every pair has a direct path"
    if network.size > MANY:
        return f"it is evaluated for up to {MANY} regions"
    if not all(any(there[p][r] and there[r][q] for r in every) for p, q in missing):
        return "some pairs are more than two hops apart"
    return Candidate((), tuple((p, q) for p, q in combinations(every, 2) if there[p][q]))


KIND = TopologyKind("partial-mesh", _find, mesh_seconds, offered=False)
