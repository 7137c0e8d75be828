"""The channel ``s3``: values are objects of an S3-compatible object store, which bills every request for them."""

from __future__ import annotations

from sync.channel._contract import ChannelKind
from sync.channel._price import RequestPrices

__all__ = ["METHODS"]


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


_PRICES = {
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

METHODS = (ChannelKind("s3", "sync.store._s3:S3Channel", client="boto3", announces=False, request_prices=_PRICES),)
