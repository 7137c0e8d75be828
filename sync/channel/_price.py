"""Costs of using a store. No side effects."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta

from geofed_pb.errors import GeofedError
from sync.channel._usage import Usage

__all__ = ["NodePrice", "RequestPrices", "cost_usd", "node_cost_usd"]

_GB = 1e9
"""Bytes of a GB, as clouds bill it."""


@dataclass(frozen=True)
class RequestPrices:
    """Prices of a store for requests and for bytes moved within its region, in USD. None: unknown, never zero."""

    source: str
    """Where the figures come from."""
    as_of: str
    """Date of the source (ISO), as precise as it is known."""
    confidence: str
    """high: the provider's own page, or several sources agree. low: one source, or an old one."""
    put: float | None
    """One request that stores a value."""
    get: float | None
    """One request for a value, found or not, or about one."""
    list: float | None
    delete: float | None
    gb_in: float | None
    """One GB (1e9 bytes) put."""
    gb_out: float | None
    """One GB got."""


@dataclass(frozen=True)
class NodePrice:
    """Price of one node of a cache while it is held, in USD, independent of requests."""

    source: str
    as_of: str
    confidence: str
    hour: float


def cost_usd(usage: Usage, prices: RequestPrices) -> float:
    """Return the cost of requests and bytes, without storage and nodes. Refused requests are not charged.

    Raises ``GeofedError("PRICE_UNKNOWN")`` if the price of something that was used is unknown.
    """
    used = {
        "put": usage.puts,
        "get": usage.gets + usage.misses + usage.looks + usage.waits,
        "list": usage.lists,
        "delete": usage.deletes,
        "gb_in": usage.bytes_in / _GB,
        "gb_out": usage.bytes_out / _GB,
    }
    total = 0.0
    for name, amount in used.items():
        price: float | None = getattr(prices, name)
        if amount and price is None:
            raise GeofedError("PRICE_UNKNOWN", f"the price of {name!r} is not known ({prices.source})")
        total += amount * (price or 0.0)
    return total


def node_cost_usd(price: NodePrice, held: timedelta, nodes: int = 1) -> float:
    """Return the cost of nodes that are held for one job alone: each started hour is charged in full."""
    return math.ceil(held / timedelta(hours=1)) * nodes * price.hour
