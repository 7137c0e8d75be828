"""The topology ``mesh``: every region exchanges with every other one."""

from __future__ import annotations

from scheduler.topology._contract import Candidate, Network, TopologyKind
from scheduler.topology._exchange_time import mesh_seconds

__all__ = ["KIND"]


def _find(network: Network) -> Candidate | str:
    if not network.missing:
        return Candidate()
    p, q = network.missing[0]
    more = f", nor have {len(network.missing) - 1} more pairs" if len(network.missing) > 1 else ""
    return f"{network.names[p]} and {network.names[q]} have no direct path{more}"


KIND = TopologyKind("mesh", _find, mesh_seconds)
