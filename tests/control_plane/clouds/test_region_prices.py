"""What a region's file needs, from whatever a cloud tells."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from control_plane.clouds import (
    CloudRegion,
    Confidence,
    FunctionPrices,
    Price,
    PriceSource,
    Purchase,
    ShardList,
    StorePrices,
    Unit,
    region_prices,
)
from geofed_pb.errors import GeofedError

PRICES = ("server", "gb_second", "request", "egress", "egress_to", "put", "get")
dates = st.dates().map(lambda day: day.isoformat())


@dataclass(frozen=True)
class TellingCloud:
    """Tells the prices that it has, by name; of the others it says why not."""

    as_of: dict[str, str]
    """ISO dates, by name of the price."""
    why: str = "PRICE_UNKNOWN"
    name: str = "telling"

    def price(self, name: str, unit: Unit) -> Price:
        if name not in self.as_of:
            raise GeofedError(self.why, f"no {name}")
        return Price(1.5, unit, PriceSource(name, self.as_of[name], Confidence.LIST))

    def regions(self) -> tuple[CloudRegion, ...]:
        return (CloudRegion("here"),)

    def machine_price(self, region: str, machine_type: str, purchase: Purchase = Purchase.ON_DEMAND) -> Price:
        return self.price("server", Unit.HOUR)

    def function_prices(self, region: str) -> FunctionPrices:
        return FunctionPrices(self.price("gb_second", Unit.GB_SECOND), self.price("request", Unit.REQUEST))

    def store_prices(self, region: str) -> StorePrices:
        return StorePrices(self.price("put", Unit.REQUEST), self.price("get", Unit.REQUEST))

    def egress_price(self, region: str, destination: str | None = None) -> Price:
        return self.price("egress" if destination is None else "egress_to", Unit.GB)

    def shards(self, bucket: str, prefix: str) -> ShardList:
        return ShardList(bucket, prefix, "here", ())


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(PRICES[1:]), dates), dates)
def test_every_price_is_told_or_missing_with_its_reason(told: dict[str, str], server: str) -> None:
    as_of = {**told, "server": server}
    found = region_prices(TellingCloud(as_of), "here", "machine", destinations={"virginia": "there"})
    names = {
        "functionUsdPerGbSecond": {"gb_second", "request"},
        "functionUsdPerRequest": {"gb_second", "request"},
        "serverUsdPerHour": {"server"},
        "egressUsdPerGb": {"egress"},
        "egressTo.virginia": {"egress_to"},
    }
    assert set(found.known) == {key for key, needed in names.items() if needed <= set(as_of)}
    assert set(found.unknown) == set(names) - set(found.known)
    assert isinstance(found.store, StorePrices) == ({"put", "get"} <= set(as_of))
    assert found.as_of == min(price.provenance.as_of for price in found.known.values())
    assert set(found.source.split("; ")) == {price.provenance.source for price in found.known.values()}


@pytest.mark.parametrize("code", ["CLOUD_UNAVAILABLE", "UNAUTHENTICATED", "CLOUD_REGION_UNKNOWN"])
def test_what_is_no_missing_price_is_raised(code: str) -> None:
    with pytest.raises(GeofedError) as caught:
        region_prices(TellingCloud({"server": "2026-11-21"}, code), "here", "machine")
    assert caught.value.code == code


def test_without_a_machine_there_is_no_answer() -> None:
    with pytest.raises(GeofedError, match="no server"):
        region_prices(TellingCloud(dict.fromkeys(PRICES[1:], "2026-11-21")), "here", "machine")
