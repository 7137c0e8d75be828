"""All that a region's file must state about prices, as far as its cloud tells it."""

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
    """The prices of one region; each is there, or the reason why not is."""

    cloud: str
    region: str
    machine_type: str
    purchase: Purchase
    server: Price
    functions: FunctionPrices | GeofedError
    egress: Price | GeofedError
    egress_to: Mapping[str, Price | GeofedError]
    """By the name that the federation has for the other region."""
    store: StorePrices | GeofedError

    @property
    def known(self) -> dict[str, Price]:
        """By the key that a region's file has for it, in the file's order; of other regions "egressTo.NAME"."""
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
        """Why a price is missing, by its key."""
        found: dict[str, GeofedError] = {}
        if isinstance(self.functions, GeofedError):
            found |= dict.fromkeys(("functionUsdPerGbSecond", "functionUsdPerRequest"), self.functions)
        if isinstance(self.egress, GeofedError):
            found["egressUsdPerGb"] = self.egress
        found |= {f"egressTo.{name}": why for name, why in self.egress_to.items() if isinstance(why, GeofedError)}
        return found

    @property
    def source(self) -> str:
        """All sources, each once."""
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
    """Ask a cloud for all prices of a region.

    ``machine_type`` is the machine of the parameter server; without its price there is no answer. ``destinations``
    names regions of the same cloud by what the federation calls them. Of the errors of ``Cloud``, ``PRICE_UNKNOWN`` is
    kept as the answer for the other prices; the rest is raised.
    """
    return RegionPrices(
        cloud=cloud.name,
        region=region,
        machine_type=machine_type,
        purchase=purchase,
        server=cloud.machine_price(region, machine_type, purchase),
        functions=_or_why(partial(cloud.function_prices, region)),
        egress=_or_why(partial(cloud.egress_price, region)),
        egress_to={
            name: _or_why(partial(cloud.egress_price, region, place)) for name, place in (destinations or {}).items()
        },
        store=_or_why(partial(cloud.store_prices, region)),
    )


def _or_why(question: Callable[[], _Answer]) -> _Answer | GeofedError:
    try:
        return question()
    except GeofedError as error:
        if error.code != "PRICE_UNKNOWN":
            raise
        return error
