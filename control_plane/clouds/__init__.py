"""What clouds say about themselves: regions, prices, shards; one contract, one adapter for each way to ask.

An adapter loads its SDK when it is opened, takes credentials from nowhere but the SDK's own chain, and answers with
where each figure comes from. What a cloud does not tell is an error of the catalogue, never zero.
"""

from control_plane.clouds._contract import (
    Cloud,
    CloudRegion,
    Confidence,
    FunctionPrices,
    Price,
    Provenance,
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
    "Provenance",
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
