"""The contract of the cloud adapters: what can be asked, and what an answer is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from geofed_pb.errors import GeofedError


class Confidence(StrEnum):
    """How sure a price is."""

    LIST = "list"
    """Of a published price list; what is billed may be less."""
    QUOTED = "quoted"
    """Named by the cloud for this very account and configuration."""
    OBSERVED = "observed"
    """What a market paid at that time; it moves."""


class Purchase(StrEnum):
    """On what terms a machine is had."""

    ON_DEMAND = "on_demand"
    PREEMPTIBLE = "preemptible"
    """The cloud may take it back: spot, low priority."""


class Unit(StrEnum):
    """What a price is paid for."""

    HOUR = "hour"
    GB_SECOND = "GB-second"
    REQUEST = "request"
    GB = "GB"
    """1e9 bytes."""


@dataclass(frozen=True)
class Provenance:
    """Where a figure comes from."""

    source: str
    """Who said it, about what."""
    as_of: str
    """ISO date of the source: when a list was published, when a quote was given."""
    confidence: Confidence


@dataclass(frozen=True)
class Price:
    """USD for one unit. Raises ``GeofedError("PRICE_UNKNOWN")`` unless it is above zero and finite."""

    usd: float
    unit: Unit
    provenance: Provenance

    def __post_init__(self) -> None:
        if not (math.isfinite(self.usd) and self.usd > 0):
            text = f"{self.provenance.source} gives {self.usd:g} USD for a {self.unit}, which is taken for unknown"
            raise GeofedError("PRICE_UNKNOWN", text)


@dataclass(frozen=True)
class FunctionPrices:
    """What invocations of functions cost."""

    gb_second: Price
    request: Price


@dataclass(frozen=True)
class StorePrices:
    """What requests to the cloud's object store cost."""

    put: Price
    """Also of a request that lists."""
    get: Price


@dataclass(frozen=True)
class CloudRegion:
    """A region as its cloud names it."""

    name: str
    title: str = ""
    """For people, where the cloud has one."""


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
    """Of the bucket, as the store names it."""
    shards: tuple[Shard, ...]

    @property
    def total_bytes(self) -> int:
        return sum(shard.size_bytes for shard in self.shards)


class Cloud(Protocol):
    """What an adapter answers. Every call may ask over the network, again and again until it has the whole answer.

    Raises ``GeofedError`` with one of these codes:

    - ``CLOUD_REGION_UNKNOWN``: the cloud has no such region.
    - ``PRICE_UNKNOWN``: there is no such price, or this cloud's interface does not tell it.
    - ``UNAUTHENTICATED``, ``FORBIDDEN``: the SDK finds no credentials, or they may not ask this.
    - ``CLOUD_UNAVAILABLE``: no answer, or none but "later", after several tries.
    - ``CLOUD_REFUSED``: the cloud does not take the question, for another reason.
    """

    @property
    def name(self) -> str: ...

    def regions(self) -> tuple[CloudRegion, ...]:
        """The regions, sorted by name."""

    def machine_price(self, region: str, machine_type: str, purchase: Purchase = Purchase.ON_DEMAND) -> Price:
        """An hour of a machine with Linux. What it covers beyond the bare machine stands in its source."""

    def function_prices(self, region: str) -> FunctionPrices:
        """Functions on x86, before any discount for volume."""

    def store_prices(self, region: str) -> StorePrices:
        """Requests to the object store's standard class."""

    def egress_price(self, region: str, destination: str | None = None) -> Price:
        """A GB that leaves the region: to another region of the same cloud, or to the Internet (None)."""

    def shards(self, bucket: str, prefix: str) -> ShardList:
        """The objects under a prefix.

        Raises also ``SHARD_UNREADABLE`` where there is no such bucket, ``LIMIT_EXCEEDED`` for more than can be
        one dataset's shards, and ``USAGE`` where the adapter knows no object store.
        """


def not_told(asked: str, what: str) -> GeofedError:
    """The error for a price that whoever is asked does not tell."""
    hint = "read it on the cloud's price page and state it in the region's file"
    return GeofedError("PRICE_UNKNOWN", f"{asked} does not tell {what}", hint=hint)


def no_such_region(cloud: str, region: str) -> GeofedError:
    """The error for a region that a cloud does not have."""
    hint = f"`control-plane catalogue regions --cloud {cloud}` shows them"
    return GeofedError("CLOUD_REGION_UNKNOWN", f"{cloud} has no region {region!r}", hint=hint)
