"""Who may call the servers of a region: one rule for each RPC, and the checks by certificate or token."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from geofed_pb.errors import GeofedError
from geofed_pb.rpc import peer_region, peer_serial
from geofed_pb.security.access import AccessInterceptor, Rule
from sync.tcp_streams.receiver import BulkPort
from sync.tcp_streams.revoked import RevokedSerials

__all__ = ["EXCHANGE_RULES", "PeerCheck", "end_revoked"]

_PEER = Rule(("peer",), note="only for the job that the server runs")
EXCHANGE_RULES = {
    **{
        f"/geofed.v1.Exchange/{name}": _PEER for name in ("Offer", "Send", "Collect", "Rejoin", "Fetch", "ExchangeKeys")
    },
    "/geofed.v1.ShardPort/Introduce": Rule(("peer",), note="only a region whose shard the job waits for here"),
    **{f"/geofed.v1.PsAdmin/{name}": Rule(("own agent",)) for name in ("Configure", "Watch", "GetModel")},
}
"""Rules of a parameter server's exchange port, and of the port at which an agent receives shards."""
_POLL_SECONDS = 1.0
"""Interval at which open connections are checked for revoked certificates."""


class PeerCheck:
    """Checks calls of other regions, and of the region's own agent, by their certificates."""

    def __init__(self, region: str, peers: Callable[[], frozenset[str]], revoked: RevokedSerials) -> None:
        """``peers`` returns the other regions of the job."""
        self._region, self._peers, self._revoked = region, peers, revoked

    async def __call__(self, rule: Rule, context: Any, request: Any, *, again: bool) -> None:
        """Raise ``GeofedError("FORBIDDEN")`` unless the certificate is of a region that the rule allows."""
        caller = peer_region(context) or ""
        self._revoked.require(peer_serial(context), caller)
        role = "own agent" if caller == self._region else "peer" if caller in self._peers() else ""
        if role not in rule.callers:
            what = "the agent" if rule.callers == ("own agent",) else "a peer"
            raise GeofedError("FORBIDDEN", f"{caller or 'the caller'} is not {what} of {self._region} in this job")


async def end_revoked(revoked: RevokedSerials, access: AccessInterceptor, bulk: Callable[[], BulkPort | None]) -> None:
    """End calls and bulk streams whose certificates get revoked, until cancelled."""
    known = revoked.serials
    while True:
        await asyncio.sleep(_POLL_SECONDS)
        if known != revoked.serials:
            known = revoked.serials
            await access.recheck()
            if (port := bulk()) is not None:
                port.end_revoked()
