"""List prices of the requests to stores, and what the use of one costs by them."""

from __future__ import annotations

from dataclasses import dataclass

from geofed_pb.errors import GeofedError
from sync.channel import Usage

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


def _cos(region: str, per_10k: float) -> dict[str, RequestPrices]:
    # The document states no price for deleting, and that traffic within the region is free.
    prices = RequestPrices(
        source=f"Tencent Cloud international, COS price list, {region}",
        as_of="2021",
        confidence="low",
        put=per_10k / 10_000,
        get=per_10k / 10_000,
        list=per_10k / 10_000,
        delete=None,
        gb_in=0.0,
        gb_out=0.0,
    )
    return {f"cos/{region}": prices}


REQUEST_PRICES = {
    "redis": RequestPrices(
        source="requests to a node are not charged; the node is, by the hour",
        as_of="2025",
        confidence="high",
        put=0.0,
        get=0.0,
        list=0.0,
        delete=0.0,
        gb_in=0.0,
        gb_out=0.0,
    ),
    "s3/us-east-1": RequestPrices(
        source="AWS S3 price list, Standard, us-east-1",
        as_of="2025",
        confidence="high",
        put=5e-6,
        get=4e-7,
        list=5e-6,
        delete=0.0,
        gb_in=0.0,
        gb_out=0.0,
    ),
    "s3-express/us-east-1": RequestPrices(
        source="AWS S3 FAQ, Express One Zone, us-east-1",
        as_of="2025",
        confidence="high",
        put=1.13e-6,
        get=3e-8,
        list=None,
        delete=None,
        gb_in=0.0032,
        gb_out=0.0006,
    ),
    **{
        name: prices
        for region, per_10k in (
            ("beijing", 0.002),
            ("nanjing", 0.002),
            ("shanghai", 0.002),
            ("guangzhou", 0.002),
            ("chengdu", 0.002),
            ("chongqing", 0.002),
            ("hong-kong", 0.002),
            ("singapore", 0.003),
            ("tokyo", 0.002),
            ("frankfurt", 0.002),
            ("toronto", 0.002),
            ("silicon-valley", 0.002),
            ("virginia", 0.002),
            ("seoul", 0.002),
            ("mumbai", 0.003),
        )
        for name, prices in _cos(region, per_10k).items()
    },
}
"""By store and region, of a request from within the region, over its own network."""
