"""AWS, through boto3: the Price List API, EC2's spot market, S3."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from statistics import median
from typing import Any

from control_plane.clouds._boto import client_for, session_for, told
from control_plane.clouds._contract import (
    CloudRegion,
    Confidence,
    FunctionPrices,
    Price,
    PriceSource,
    Purchase,
    ShardList,
    StorePrices,
    Unit,
    region_unknown,
)
from control_plane.clouds._s3_shards import list_shards
from geofed_pb.errors import GeofedError

_HOME = "us-east-1"
"""AWS region that answers for all regions: prices, and the list of regions."""
_LINUX = {
    "operatingSystem": "Linux",
    "tenancy": "Shared",
    "preInstalledSw": "NA",
    "capacitystatus": "Used",
}
"""Filters for plain on-demand Linux offers of EC2: without them, reservations and licences are among the answers."""
_SPOT_PRODUCTS = ["Linux/UNIX", "Linux/UNIX (Amazon VPC)"]


class AwsCloud:
    """Prices as AWS lists them in USD, of the commercial regions; credentials from boto3's chain."""

    name = "aws"

    def __init__(
        self, *, region: str | None = None, endpoint_url: str | None = None, profile: str | None = None
    ) -> None:
        self._session = session_for(self.name, profile)
        self._store_region = region or self._session.region_name or _HOME
        self._endpoint_url = endpoint_url
        self._clients: dict[tuple[str, str], Any] = {}

    def regions(self) -> tuple[CloudRegion, ...]:
        """List all regions, whether enabled for this account or not."""
        with told(self.name):
            answer = self._client("ec2", _HOME).describe_regions(AllRegions=True)
        return tuple(
            sorted((CloudRegion(held["RegionName"]) for held in answer["Regions"]), key=lambda held: held.name)
        )

    def machine_price(self, region: str, machine_type: str, purchase: Purchase = Purchase.ON_DEMAND) -> Price:
        """Return the price of a machine by the hour: on demand from the price list; preemptible the median of the
        zones' present spot prices."""
        if purchase is Purchase.PREEMPTIBLE:
            return self._spot_price(region, machine_type)
        wanted = {"regionCode": region, "instanceType": machine_type, **_LINUX}
        return self._listed("AmazonEC2", wanted, region, Unit.HOUR, "BoxUsage:" + machine_type, machine_type)

    def function_prices(self, region: str) -> FunctionPrices:
        """Return the prices of Lambda on x86, those of the first tier, which is the most expensive."""

        def listed(group: str, usage: str, unit: Unit) -> Price:
            return self._listed("AWSLambda", {"regionCode": region, "group": group}, region, unit, usage, "Lambda")

        return FunctionPrices(
            gb_second=listed("AWS-Lambda-Duration", "Lambda-GB-Second", Unit.GB_SECOND),
            request=listed("AWS-Lambda-Requests", "Request", Unit.REQUEST),
        )

    def store_prices(self, region: str) -> StorePrices:
        """Return the prices of S3's standard class."""

        def listed(tier: str) -> Price:
            wanted = {"regionCode": region, "group": f"S3-API-{tier}"}
            return self._listed("AmazonS3", wanted, region, Unit.REQUEST, f"Requests-{tier}", "S3")

        return StorePrices(put=listed("Tier1"), get=listed("Tier2"))

    def egress_price(self, region: str, destination: str | None = None) -> Price:
        """The first tier that is billed; the account's free 100 GB a month are left out."""
        if destination is None:
            where = {"transferType": "AWS Outbound", "toLocation": "External"}
            usage, what = "DataTransfer-Out-Bytes", "egress to the Internet"
        else:
            where = {"transferType": "InterRegion Outbound", "toRegionCode": destination}
            usage, what = "AWS-Out-Bytes", f"egress to {destination}"
        wanted = {"fromRegionCode": region, **where}
        return self._listed("AWSDataTransfer", wanted, region, Unit.GB, usage, what, destination)

    def shards(self, bucket: str, prefix: str) -> ShardList:
        """List the objects under a prefix of a bucket."""
        return list_shards(self._client("s3", self._store_region), self.name, bucket, prefix)

    def _client(self, service: str, region: str) -> Any:
        with told(self.name):
            if (service, region) not in self._clients:
                self._clients[service, region] = client_for(self._session, service, region, self._endpoint_url)
        return self._clients[service, region]

    def _listed(
        self,
        service: str,
        wanted: Mapping[str, str],
        region: str,
        unit: Unit,
        usage: str,
        what: str,
        destination: str | None = None,
    ) -> Price:
        """The price of the offers with the wanted attributes whose usage type ends with ``usage``.

        A price in tiers is that of the first one that is not free. Of several offers the dearest counts, so that no
        plan promises less than will be billed.
        """
        filters = [{"Type": "TERM_MATCH", "Field": key, "Value": value} for key, value in wanted.items()]
        with told(self.name):
            pages = self._client("pricing", _HOME).get_paginator("get_products")
            answer = [
                json.loads(text)
                for page in pages.paginate(ServiceCode=service, Filters=filters, FormatVersion="aws_v1")
                for text in page["PriceList"]
            ]
        found = [
            (usd, str(offer.get("publicationDate", ""))[:10])
            for offer in answer
            if _is_plain(offer, usage)
            for usd in _first_tier_usd(offer)
        ]
        if not found:
            raise self._nothing_for(what, region, destination)
        usd, published = max(found)
        source = f"AWS price list, {what}, {region}"
        return Price(usd, unit, PriceSource(source, published or _today(), Confidence.LIST))

    def _spot_price(self, region: str, machine_type: str) -> Price:
        self._check(region)
        try:
            with told(self.name):
                pages = self._client("ec2", region).get_paginator("describe_spot_price_history")
                history = [
                    entry
                    for page in pages.paginate(
                        InstanceTypes=[machine_type],
                        ProductDescriptions=_SPOT_PRODUCTS,
                        # From now on: the price that holds in each zone, and no older one.
                        StartTime=datetime.now(UTC),
                    )
                    for entry in page["SpotPriceHistory"]
                ]
        except GeofedError as error:
            if error.code == "CLOUD_REFUSED":
                raise self._nothing_for(machine_type, region) from error
            raise
        newest: dict[str, tuple[datetime, float]] = {}
        for entry in history:
            told_at, usd = entry["Timestamp"], float(entry["SpotPrice"])
            zone = entry["AvailabilityZone"]
            newest[zone] = max(newest.get(zone, (told_at, usd)), (told_at, usd))
        if not newest:
            raise self._nothing_for(f"a spot price of {machine_type}", region)
        usd = median(usd for _, usd in newest.values())
        source = f"AWS spot market, {machine_type}, median of the zones of {region}"
        return Price(usd, Unit.HOUR, PriceSource(source, _today(), Confidence.OBSERVED))

    def _nothing_for(self, what: str, *regions: str | None) -> GeofedError:
        """Return the error for a missing price: the region does not exist, or AWS does not list the price."""
        for region in regions:
            if region is not None:
                self._check(region)
        hint = "check the name, or whether it is offered there; or state the price in the region's file"
        return GeofedError("PRICE_UNKNOWN", f"AWS names no price for {what} in {regions[0]}", hint=hint)

    def _check(self, region: str) -> None:
        if all(known.name != region for known in self.regions()):
            raise region_unknown(self.name, region)


def _is_plain(offer: Any, usage: str) -> bool:
    """Whether an offer is for what was asked, in a region proper: not at the edge, nor in a local zone."""
    attributes = offer["product"]["attributes"]
    told = str(attributes.get("usagetype", ""))
    place = attributes.get("fromLocationType") or attributes.get("locationType") or "AWS Region"
    return told.endswith(usage) and "Edge" not in told and place == "AWS Region"


def _first_tier_usd(offer: Any) -> list[float]:
    """Return for each term of an offer the price of the first tier with a cost; none where it is not in USD."""
    found = []
    for term in offer.get("terms", {}).get("OnDemand", {}).values():
        tiers = [
            (float(tier.get("beginRange") or 0), float(tier["pricePerUnit"].get("USD", 0)))
            for tier in term["priceDimensions"].values()
        ]
        found += [usd for _, usd in sorted(tiers) if usd > 0][:1]
    return found


def _today() -> str:
    return datetime.now(UTC).date().isoformat()
