"""Query clouds for regions, prices and shards: one interface, `Cloud`, with an adapter for each SDK.

An adapter loads its SDK when it is opened, uses only the SDK's own credential chain, and returns the source of each
figure. An unknown price is a ``GeofedError``, never zero.
"""

from control_plane.clouds._contract import (
    Cloud,
    CloudRegion,
    Confidence,
    FunctionPrices,
    Price,
    PriceSource,
    Purchase,
    Shard,
    ShardList,
    StorePrices,
    Unit,
)
from control_plane.clouds._open import CLOUDS, open_cloud, open_price_file
from control_plane.clouds._region_prices import RegionPrices, region_prices

__all__ = [
    "CLOUDS",
    "Cloud",
    "CloudRegion",
    "Confidence",
    "FunctionPrices",
    "Price",
    "PriceSource",
    "Purchase",
    "RegionPrices",
    "Shard",
    "ShardList",
    "StorePrices",
    "Unit",
    "open_cloud",
    "open_price_file",
    "region_prices",
]
