"""Tencent Cloud, through its SDK: what CVM quotes, and COS through its S3 interface."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

from tenacity import Retrying
from tencentcloud.common.credential import DefaultCredentialProvider
from tencentcloud.common.exception.tencent_cloud_sdk_exception import TencentCloudSDKException
from tencentcloud.common.profile.client_profile import ClientProfile
from tencentcloud.common.profile.http_profile import HttpProfile
from tencentcloud.cvm.v20170312 import models
from tencentcloud.cvm.v20170312.cvm_client import CvmClient

from control_plane.clouds._boto import client_for, session_for
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
    price_unknown,
    region_unknown,
)
from control_plane.clouds._retry import retries as default_retries
from control_plane.clouds._s3_shards import list_shards
from geofed_pb.errors import GeofedError

_INTERNATIONAL, _MAINLAND = "intl.tencentcloudapi.com", "tencentcloudapi.com"
_ANY_REGION = "ap-guangzhou"
"""Region for requests about all regions; every account has it."""
_SECONDS = 30
"""Timeout of one request in seconds.

A choice: half of the default of the SDK, so that a user does not wait a minute for an error.
"""
_PAGE = 100
"""Images that a request asks for, the most that DescribeImages returns at a time."""
_CHARGES = {Purchase.ON_DEMAND: "POSTPAID_BY_HOUR", Purchase.PREEMPTIBLE: "SPOTPAID"}
_LATER = ("RequestLimitExceeded", "ClientNetworkError", "ServerNetworkError", "InternalError", "InternalServerError")
_NO_REGION = ("UnsupportedRegion", "InvalidRegion")
_HIGHEST_BID = "1000"
"""A quote for a spot machine must name a bid; the quote is the market's price, whatever the bid above it."""


class TencentCloud:
    """Prices as CVM quotes them to this account; credentials from the SDK's chain.

    Accounts of the international site are quoted in USD, those of the site in mainland China in CNY. The answers do not
    contain the currency: ``usd_per_cny`` gives the rate, and means that quotes are in CNY.
    """

    name = "tencent"

    def __init__(
        self,
        *,
        region: str | None = None,
        endpoint_url: str | None = None,
        usd_per_cny: float | None = None,
        retries: Retrying | None = None,
    ) -> None:
        if usd_per_cny is not None and not usd_per_cny > 0:
            raise GeofedError("USAGE", f"--usd-per-cny must be above zero, not {usd_per_cny:g}")
        self._store_region, self._endpoint_url = region, endpoint_url
        self._usd_per_cny = usd_per_cny
        self._retries = retries or default_retries()
        self._credentials = _credentials()

    def regions(self) -> tuple[CloudRegion, ...]:
        """List CVM's regions by name."""
        answer = self._ask(_ANY_REGION, "DescribeRegions", {})
        return tuple(
            sorted((CloudRegion(held.Region, held.RegionName) for held in answer.RegionSet), key=lambda held: held.name)
        )

    def machine_price(self, region: str, machine_type: str, purchase: Purchase = Purchase.ON_DEMAND) -> Price:
        """Return the quote for the first zone that sells the type, with CVM's default system disk.

        On demand it is for the first 96 hours; CVM charges less for the hours after them on some types.
        """
        charge = _CHARGES[purchase]
        wanted = {
            "Placement": {"Zone": self._zone_that_sells(region, machine_type, charge)},
            "ImageId": self._image(region, machine_type),
            "InstanceType": machine_type,
            "InstanceChargeType": charge,
        }
        if purchase is Purchase.PREEMPTIBLE:
            bid = {"MaxPrice": _HIGHEST_BID, "SpotInstanceType": "one-time"}
            wanted["InstanceMarketOptions"] = {"MarketType": "spot", "SpotOptions": bid}
        quote = self._ask(region, "InquiryPriceRunInstances", wanted).Price.InstancePrice
        confidence = Confidence.QUOTED if purchase is Purchase.ON_DEMAND else Confidence.OBSERVED
        return self._price(quote, Unit.HOUR, f"{machine_type} with its system disk, {region}", confidence)

    def function_prices(self, region: str) -> FunctionPrices:
        """Raise ``GeofedError("PRICE_UNKNOWN")``: CVM quotes machines alone."""
        raise price_unknown("CVM", f"what functions (SCF) cost in {region}")

    def store_prices(self, region: str) -> StorePrices:
        """Raise ``GeofedError("PRICE_UNKNOWN")``: CVM quotes machines alone."""
        raise price_unknown("CVM", f"what requests to COS cost in {region}")

    def egress_price(self, region: str, destination: str | None = None) -> Price:
        """The quote for traffic of a machine to the Internet, billed by the GB."""
        if destination is not None:
            raise price_unknown("CVM", f"what traffic from {region} to {destination} costs")
        zones = [held.Zone for held in self._ask(region, "DescribeZones", {}).ZoneSet if held.ZoneState == "AVAILABLE"]
        if not zones:
            raise GeofedError("PRICE_UNKNOWN", f"{self.name} has no zone in {region} that is available")
        wanted = {
            "Placement": {"Zone": min(zones)},
            "ImageId": self._image(region, None),
            "InternetAccessible": {"InternetChargeType": "TRAFFIC_POSTPAID_BY_HOUR", "InternetMaxBandwidthOut": 1},
        }
        quote = self._ask(region, "InquiryPriceRunInstances", wanted).Price.BandwidthPrice
        return self._price(quote, Unit.GB, f"traffic to the Internet, {region}", Confidence.QUOTED)

    def shards(self, bucket: str, prefix: str) -> ShardList:
        """List the objects under a prefix of a COS bucket, whose name ends with the account's APPID."""
        region = self._store_region
        if region is None:
            raise GeofedError("USAGE", "COS answers in the bucket's region only", hint="name it with --region")
        keys = {"aws_access_key_id": self._credentials.secret_id, "aws_secret_access_key": self._credentials.secret_key}
        if self._credentials.token:
            keys["aws_session_token"] = self._credentials.token
        address = self._endpoint_url or f"https://cos.{region}.myqcloud.com"
        client = client_for(session_for("COS", **keys), "s3", region, address)
        return list_shards(client, "COS", bucket, prefix)

    def _zone_that_sells(self, region: str, machine_type: str, charge: str) -> str:
        filters = [
            {"Name": "instance-type", "Values": [machine_type]},
            {"Name": "instance-charge-type", "Values": [charge]},
        ]
        answer = self._ask(region, "DescribeZoneInstanceConfigInfos", {"Filters": filters})
        zones = [held.Zone for held in answer.InstanceTypeQuotaSet or () if held.Status == "SELL"]
        if not zones:
            hint = "check the type's name, or choose one that is sold there"
            raise GeofedError("PRICE_UNKNOWN", f"no zone of {region} sells {machine_type} ({charge})", hint=hint)
        return str(min(zones))

    def _image(self, region: str, machine_type: str | None) -> str:
        """A public image without a licence fee; a quote must name one."""
        for image in self._images(region, machine_type):
            if "windows" not in str(image.Platform or image.OsName).lower():
                return str(image.ImageId)
        raise GeofedError("PRICE_UNKNOWN", f"{self.name} has no public image of Linux in {region} to be quoted for")

    def _images(self, region: str, machine_type: str | None) -> Iterator[Any]:
        wanted: dict[str, Any] = {"Filters": [{"Name": "image-type", "Values": ["PUBLIC_IMAGE"]}], "Limit": _PAGE}
        if machine_type is not None:
            wanted["InstanceType"] = machine_type
        offset = 0
        while True:
            answer = self._ask(region, "DescribeImages", {**wanted, "Offset": offset})
            yield from answer.ImageSet or ()
            offset += len(answer.ImageSet or ())
            if not answer.ImageSet or offset >= answer.TotalCount:
                return

    def _price(self, quote: Any, unit: Unit, what: str, confidence: Confidence) -> Price:
        units = {"HOUR": Unit.HOUR, "GB": Unit.GB}
        amount = getattr(quote, "UnitPriceDiscount", None)
        if amount is None or units.get(quote.ChargeUnit) is not unit:
            raise GeofedError("PRICE_UNKNOWN", f"{self.name} quotes no price for a {unit} of {what}")
        source, usd = f"Tencent Cloud, {what}", float(amount)
        if self._usd_per_cny is not None:
            source, usd = f"{source}, {amount:g} CNY at {self._usd_per_cny:g} USD", usd * self._usd_per_cny
        return Price(usd, unit, PriceSource(source, datetime.now(UTC).date().isoformat(), confidence))

    def _ask(self, region: str, action: str, wanted: dict[str, Any]) -> Any:
        """Send one request to CVM in a region, with retries after temporary errors."""
        client = CvmClient(self._credentials, region, self._profile())
        request = getattr(models, f"{action}Request")()
        request.from_json_string(json.dumps(wanted))

        def once() -> Any:
            try:
                return getattr(client, action)(request)
            except TencentCloudSDKException as error:
                raise self._told(error, region) from error

        return self._retries(once)

    def _profile(self) -> Any:
        root = _INTERNATIONAL if self._usd_per_cny is None else _MAINLAND
        http = HttpProfile(rootDomain=root, reqTimeout=_SECONDS)
        if self._endpoint_url is not None:
            address = urlsplit(self._endpoint_url)
            if address.scheme not in ("http", "https") or not address.netloc:
                raise GeofedError("USAGE", f"--endpoint-url is no address: {self._endpoint_url}")
            http = HttpProfile(protocol=address.scheme, endpoint=address.netloc, reqTimeout=_SECONDS)
        return ClientProfile(httpProfile=http, language="en-US")

    def _told(self, error: Any, region: str) -> GeofedError:
        code, text = str(error.get_code()), f"{self.name} refused: {error.get_code()}: {error.get_message()}"
        if code.startswith(_LATER):
            return GeofedError("CLOUD_UNAVAILABLE", f"{self.name} does not answer: {code}: {error.get_message()}")
        if code.startswith(_NO_REGION):
            return region_unknown(self.name, region)
        if code.startswith("UnauthorizedOperation") or code == "AuthFailure.UnauthorizedOperation":
            return GeofedError("FORBIDDEN", text, hint="they need the right to describe and inquire in CVM")
        if code.startswith("AuthFailure"):
            return GeofedError("UNAUTHENTICATED", text, hint="correct the credentials that the SDK finds")
        return GeofedError("CLOUD_REFUSED", text)


def _credentials() -> Any:
    try:
        return DefaultCredentialProvider().get_credential()
    except Exception as error:
        # The SDK's chain raises whatever one of its links meets: an OSError, a KeyError, an error of its own.
        hint = "set TENCENTCLOUD_SECRET_ID and TENCENTCLOUD_SECRET_KEY, or give this machine a role"
        raise GeofedError(
            "UNAUTHENTICATED", f"no credentials for tencent; the last place that was looked at: {error}", hint=hint
        ) from error
