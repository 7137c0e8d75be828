"""Collect all prices that a region file needs, as far as the cloud provides them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from control_plane.clouds._contract import Cloud, FunctionPrices, Price, Purchase, StorePrices
from geofed_pb.errors import GeofedError

_Answer = TypeVar("_Answer")


@dataclass(frozen=True)
class RegionPrices:
    """Prices of one region; a missing one is the error that explains why."""

    cloud: str
    region: str
    machine_type: str
    purchase: Purchase
    server: Price
    functions: FunctionPrices | GeofedError
    egress: Price | GeofedError
    egress_to: Mapping[str, Price | GeofedError]
    """Egress prices by the federation's name of the other region."""
    store: StorePrices | GeofedError

    @property
    def known(self) -> dict[str, Price]:
        """Known prices by their key in the region file, in the file's order; "egressTo.NAME" for other regions."""
        found: dict[str, Price] = {}
        if isinstance(self.functions, FunctionPrices):
            found["functionUsdPerGbSecond"] = self.functions.gb_second
            found["functionUsdPerRequest"] = self.functions.request
        found["serverUsdPerHour"] = self.server
        if isinstance(self.egress, Price):
            found["egressUsdPerGb"] = self.egress
        found |= {f"egressTo.{name}": price for name, price in self.egress_to.items() if isinstance(price, Price)}
        return found

    @property
    def unknown(self) -> dict[str, GeofedError]:
        """Errors of the missing prices by their key."""
        found: dict[str, GeofedError] = {}
        if isinstance(self.functions, GeofedError):
            found |= dict.fromkeys(("functionUsdPerGbSecond", "functionUsdPerRequest"), self.functions)
        if isinstance(self.egress, GeofedError):
            found["egressUsdPerGb"] = self.egress
        found |= {f"egressTo.{name}": why for name, why in self.egress_to.items() if isinstance(why, GeofedError)}
        return found

    @property
    def source(self) -> str:
        """All sources, without duplicates."""
        return "; ".join(dict.fromkeys(price.provenance.source for price in self.known.values()))

    @property
    def as_of(self) -> str:
        """ISO date of the oldest source."""
        return min(price.provenance.as_of for price in self.known.values())


def region_prices(
    cloud: Cloud,
    region: str,
    machine_type: str,
    purchase: Purchase = Purchase.ON_DEMAND,
    destinations: Mapping[str, str] | None = None,
) -> RegionPrices:
    """Query a cloud for all prices of a region.

    Args:
        machine_type: machine of the parameter server; its price is required.
        destinations: regions of the same cloud, by the federation's names for them.

    Raises the errors of ``Cloud``, except ``PRICE_UNKNOWN`` of prices other than the machine's, which is returned.
    """
    return RegionPrices(
        cloud=cloud.name,
        region=region,
        machine_type=machine_type,
        purchase=purchase,
        server=cloud.machine_price(region, machine_type, purchase),
        functions=_or_error(partial(cloud.function_prices, region)),
        egress=_or_error(partial(cloud.egress_price, region)),
        egress_to={
            name: _or_error(partial(cloud.egress_price, region, place)) for name, place in (destinations or {}).items()
        },
        store=_or_error(partial(cloud.store_prices, region)),
    )


def _or_error(question: Callable[[], _Answer]) -> _Answer | GeofedError:
    try:
        return question()
    except GeofedError as error:
        if error.code != "PRICE_UNKNOWN":
            raise
        return error
