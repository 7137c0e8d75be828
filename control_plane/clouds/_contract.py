"""Interface of the cloud adapters, and the types of their answers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from geofed_pb.errors import GeofedError


class Confidence(StrEnum):
    """How certain a price is."""

    LIST = "list"
    """From a published price list; the bill may be lower."""
    QUOTED = "quoted"
    """Quoted by the cloud for this account and configuration."""
    OBSERVED = "observed"
    """A market price at that time, which changes."""


class Purchase(StrEnum):
    """How a machine is bought."""

    ON_DEMAND = "on_demand"
    PREEMPTIBLE = "preemptible"
    """The cloud may preempt it: spot, low priority."""


class Unit(StrEnum):
    """Unit of a price."""

    HOUR = "hour"
    GB_SECOND = "GB-second"
    REQUEST = "request"
    GB = "GB"
    """1e9 bytes."""


@dataclass(frozen=True)
class PriceSource:
    """Source of a price."""

    source: str
    """Who states the price, and what it is for."""
    as_of: str
    """ISO date of the price list's publication or of the quote."""
    confidence: Confidence


@dataclass(frozen=True)
class Price:
    """Price of one unit in USD. Raises ``GeofedError("PRICE_UNKNOWN")`` unless it is positive and finite."""

    usd: float
    unit: Unit
    provenance: PriceSource

    def __post_init__(self) -> None:
        if not (math.isfinite(self.usd) and self.usd > 0):
            text = f"{self.provenance.source} states {self.usd:g} USD per {self.unit}, which counts as unknown"
            raise GeofedError("PRICE_UNKNOWN", text)


@dataclass(frozen=True)
class FunctionPrices:
    """Prices of function invocations."""

    gb_second: Price
    request: Price


@dataclass(frozen=True)
class StorePrices:
    """Prices of requests to the object store."""

    put: Price
    """Price of a PUT or LIST request."""
    get: Price
    """Price of a GET request."""


@dataclass(frozen=True)
class CloudRegion:
    """A cloud's region."""

    name: str
    title: str = ""
    """Human-readable name; may be empty."""


@dataclass(frozen=True)
class Shard:
    """One object of a dataset."""

    key: str
    size_bytes: int


@dataclass(frozen=True)
class ShardList:
    """All objects under a prefix of a bucket, in the order of their keys."""

    bucket: str
    prefix: str
    region: str
    """Region of the bucket, by the store's name for it."""
    shards: tuple[Shard, ...]

    @property
    def total_bytes(self) -> int:
        """Sum of the objects' sizes."""
        return sum(shard.size_bytes for shard in self.shards)


class Cloud(Protocol):
    """Interface of an adapter. Each method may send several network requests, with retries.

    Raises ``GeofedError`` with one of these codes:

    - ``CLOUD_REGION_UNKNOWN``: the cloud has no such region.
    - ``PRICE_UNKNOWN``: the price does not exist, or the cloud's API does not provide it.
    - ``UNAUTHENTICATED``, ``FORBIDDEN``: the SDK finds no credentials, or they lack the permission.
    - ``CLOUD_UNAVAILABLE``: the cloud does not answer, or throttles requests, after several attempts.
    - ``CLOUD_REFUSED``: the cloud rejects the request for another reason.
    """

    @property
    def name(self) -> str:
        """Name of the cloud, such as "aws": the one of `--cloud`, and in messages."""

    def regions(self) -> tuple[CloudRegion, ...]:
        """Return the regions, sorted by name."""

    def machine_price(self, region: str, machine_type: str, purchase: Purchase = Purchase.ON_DEMAND) -> Price:
        """Return the price per hour of a Linux machine; its source states what else it includes."""

    def function_prices(self, region: str) -> FunctionPrices:
        """Return the prices of functions on x86, without volume discounts."""

    def store_prices(self, region: str) -> StorePrices:
        """Return the prices of requests to the object store's standard class."""

    def egress_price(self, region: str, destination: str | None = None) -> Price:
        """Return the price per GB of egress to another region of the same cloud, or to the Internet (None)."""

    def shards(self, bucket: str, prefix: str) -> ShardList:
        """Return the objects under a prefix.

        Also raises ``SHARD_UNREADABLE`` if the bucket does not exist, ``LIMIT_EXCEEDED`` for too many objects, and
        ``USAGE`` if the adapter does not support an object store.
        """


def price_unknown(asked: str, what: str) -> GeofedError:
    """Return the error for a price that a source does not provide."""
    hint = "look it up on the cloud's price page and enter it in the region file"
    return GeofedError("PRICE_UNKNOWN", f"{asked} does not provide {what}", hint=hint)


def region_unknown(cloud: str, region: str) -> GeofedError:
    """Return the error for a region that a cloud does not have."""
    hint = f"`geofed catalogue regions --cloud {cloud}` lists them"
    return GeofedError("CLOUD_REGION_UNKNOWN", f"{cloud} has no region {region!r}", hint=hint)
