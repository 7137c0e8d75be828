"""The channel ``redis``: values are keys of a Redis server, which announces them to waiting workers."""

from __future__ import annotations

from sync.channel._contract import ChannelKind
from sync.channel._price import NodePrice, RequestPrices

__all__ = ["METHODS"]

_PRICES = {
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
}

_NODES = {
    f"elasticache/us-east-1/{kind}": NodePrice(
        source="public catalogues of AWS ElastiCache, on demand, us-east-1", as_of="2025", confidence="high", hour=hour
    )
    for kind, hour in (
        ("cache.t3.micro", 0.017),
        ("cache.t3.small", 0.034),
        ("cache.t3.medium", 0.068),
        ("cache.m5.large", 0.156),
    )
}

METHODS = (
    ChannelKind("redis", "sync.store._redis:RedisChannel", client="redis", request_prices=_PRICES, node_prices=_NODES),
)
