"""Addresses of the other regions' parameter servers: names are resolved again and again, since they may move."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import structlog

from geofed_pb.errors import GeofedError
from geofed_pb.v1 import agent_pb2
from region_agent.link.networks import resolved
from region_agent.partition.events import PeersKnown, PsPeer, PsTopology

__all__ = ["follow_peers"]

_log = structlog.get_logger("geofed.partition")
_RESOLVE_SECONDS = 60.0
"""Interval at which the host names of other regions' servers are resolved again."""
_RESOLVE_AGAIN_SECONDS = 5.0
"""Pause after a name could not be resolved."""


async def follow_peers(
    message: agent_pb2.Peers,
    region: str,
    networks: Sequence[str] | None,
    feed: Callable[[PeersKnown], None],
    ended: Callable[[], bool],
) -> None:
    """Resolve the other regions' addresses, again every minute until ``ended``, and feed those that may be connected
    to, whenever they change.

    Args:
        region: the own region, whose address is not resolved.
        networks: where other regions' servers may be; None: anywhere but in private networks that they were not seen
            in.

    Raises ``GeofedError``: CONFIG_INVALID for an address that is invalid or may not be connected to.
    """
    if message.halt:
        # No peer is needed any more, and the name of the one that stays away may have no address.
        feed(PeersKnown((), finish=message.finish, halt=True))
        return
    neighbours, former = (tuple((pair.a, pair.b) for pair in ps) for ps in (message.neighbours, message.former))
    topology, last = PsTopology(message.routes, neighbours, former), None
    while not ended():
        try:
            peers = []
            for p in message.peers:
                address = p.address if p.region == region else await resolved(p.address, p.region, p.seen, networks)
                peers.append(PsPeer(p.region, p.epoch, address, p.unsigned))
        except GeofedError as error:
            if not error.retryable:
                raise
            _log.warning("the addresses of a job's regions are not known", job=message.job, error=str(error))
        else:
            if peers != last:
                last = peers
                feed(PeersKnown(tuple(peers), topology, message.finish))
        await asyncio.sleep(_RESOLVE_SECONDS if last else _RESOLVE_AGAIN_SECONDS)
