"""Tencent Cloud: answers in the shape that CVM's documentation gives, through the SDK over HTTP; COS from moto."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import boto3
import pytest

from control_plane.clouds import CloudRegion, Confidence, Purchase, Shard, Unit, open_cloud
from control_plane.clouds._retry import retries
from control_plane.clouds._tencent import TencentCloud
from geofed_pb.errors import GeofedError
from tests.control_plane.clouds.recorded import Answer, Site, Wsgi, aws, serving

FRANKFURT = "eu-frankfurt"
AT_ONCE = retries(attempts=3, first_seconds=0.0)
WINDOWS = [{"ImageId": f"img-win{index}", "OsName": "Windows", "Platform": "Windows"} for index in range(150)]
IMAGES = [*WINDOWS, {"ImageId": "img-linux", "OsName": "TencentOS Server 4", "Platform": "TencentOS"}]
QUOTES = {"POSTPAID_BY_HOUR": 0.42, "SPOTPAID": 0.07}


class Cvm:
    """What CVM answers to each action, and what it was told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str, dict[str, Any]]] = []
        self.charge_unit = "HOUR"

    def answer(self, environ: dict[str, Any], body: bytes) -> tuple[str, Answer | Wsgi]:
        action, region = environ["HTTP_X_TC_ACTION"], environ["HTTP_X_TC_REGION"]
        assert environ["HTTP_AUTHORIZATION"].startswith("TC3-HMAC-SHA256 Credential=AKID/")
        wanted = json.loads(body)
        self.told.append((action, region, wanted))
        if region not in (FRANKFURT, "ap-guangzhou"):
            return action, refusal("UnsupportedRegion", "The request does not support this region.")
        return action, Answer({"Response": {**getattr(self, action)(wanted), "RequestId": "r"}})

    def DescribeRegions(self, _: Any) -> dict[str, Any]:
        named = [("eu-frankfurt", "Europe (Frankfurt)"), ("ap-guangzhou", "South China (Guangzhou)")]
        regions = [{"Region": r, "RegionName": n, "RegionState": "AVAILABLE"} for r, n in named]
        return {"TotalCount": 2, "RegionSet": regions}

    def DescribeZones(self, _: Any) -> dict[str, Any]:
        states = {"eu-frankfurt-1": "UNAVAILABLE", "eu-frankfurt-2": "AVAILABLE"}
        zones = [{"Zone": zone, "ZoneName": zone, "ZoneId": "1", "ZoneState": state} for zone, state in states.items()]
        return {"TotalCount": len(zones), "ZoneSet": zones}

    def DescribeZoneInstanceConfigInfos(self, wanted: Any) -> dict[str, Any]:
        filters = {held["Name"]: held["Values"][0] for held in wanted["Filters"]}
        status = {"eu-frankfurt-1": "SOLD_OUT", "eu-frankfurt-2": "SELL"}
        sold = [{"Zone": zone, "Status": told, "InstanceType": "S5.4XLARGE64"} for zone, told in status.items()]
        return {"InstanceTypeQuotaSet": sold if filters["instance-type"] == "S5.4XLARGE64" else []}

    def DescribeImages(self, wanted: Any) -> dict[str, Any]:
        begin = wanted["Offset"]
        return {"TotalCount": len(IMAGES), "ImageSet": IMAGES[begin : begin + wanted["Limit"]]}

    def InquiryPriceRunInstances(self, wanted: Any) -> dict[str, Any]:
        assert wanted["Placement"]["Zone"] == "eu-frankfurt-2"
        assert wanted["ImageId"] == "img-linux"
        usd = QUOTES[wanted.get("InstanceChargeType", "POSTPAID_BY_HOUR")]
        price = {"UnitPrice": 0.6, "UnitPriceDiscount": usd, "Discount": 70, "ChargeUnit": self.charge_unit}
        traffic = {"UnitPrice": 0.2, "UnitPriceDiscount": 0.12, "Discount": 60, "ChargeUnit": "GB"}
        given = {"BandwidthPrice": traffic} if "InternetAccessible" in wanted else {}
        return {"Price": {"InstancePrice": price, **given}}


def refusal(code: str, message: str = "no") -> Answer:
    return Answer({"Response": {"Error": {"Code": code, "Message": message}, "RequestId": "r"}})


@pytest.fixture
def cvm() -> Cvm:
    return Cvm()


@pytest.fixture
def site(cvm: Cvm, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setenv("TENCENTCLOUD_SECRET_ID", "AKID")
    monkeypatch.setenv("TENCENTCLOUD_SECRET_KEY", "secret")
    with serving(cvm.answer) as site:
        yield site


@pytest.fixture
def cloud(site: Site) -> TencentCloud:
    return TencentCloud(endpoint_url=site.url, retries=AT_ONCE)


def test_a_machine_costs_what_is_quoted_in_a_zone_that_sells_it(cloud: TencentCloud, cvm: Cvm) -> None:
    price = cloud.machine_price(FRANKFURT, "S5.4XLARGE64")
    assert (price.usd, price.unit) == (0.42, Unit.HOUR)
    assert price.provenance.confidence is Confidence.QUOTED
    today = datetime.now(UTC).date()
    assert price.provenance.as_of in {today.isoformat(), (today - timedelta(days=1)).isoformat()}
    assert cvm.told[-1][2]["InstanceType"] == "S5.4XLARGE64"


def test_a_spot_machine_is_quoted_as_such(cloud: TencentCloud, cvm: Cvm) -> None:
    price = cloud.machine_price(FRANKFURT, "S5.4XLARGE64", Purchase.PREEMPTIBLE)
    assert price.usd == 0.07
    assert price.provenance.confidence is Confidence.OBSERVED
    assert cvm.told[-1][2]["InstanceMarketOptions"]["MarketType"] == "spot"


def test_images_are_looked_through_page_by_page_for_one_without_a_licence(cloud: TencentCloud, site: Site) -> None:
    cloud.machine_price(FRANKFURT, "S5.4XLARGE64")
    assert site.asked.count("DescribeImages") == 2


def test_egress_is_quoted_by_the_gb(cloud: TencentCloud, cvm: Cvm) -> None:
    price = cloud.egress_price(FRANKFURT)
    assert (price.usd, price.unit) == (0.12, Unit.GB)
    assert cvm.told[-1][2]["InternetAccessible"]["InternetChargeType"] == "TRAFFIC_POSTPAID_BY_HOUR"


def test_quotes_in_cny_are_told_in_usd_with_their_rate(site: Site) -> None:
    cloud = TencentCloud(endpoint_url=site.url, usd_per_cny=0.14, retries=AT_ONCE)
    price = cloud.machine_price(FRANKFURT, "S5.4XLARGE64")
    assert price.usd == pytest.approx(0.42 * 0.14)
    assert "0.42 CNY at 0.14 USD" in price.provenance.source
    with pytest.raises(GeofedError) as caught:
        open_cloud("tencent", usd_per_cny=0.0)
    assert caught.value.code == "USAGE"


def test_the_account_s_site_decides_who_is_asked(site: Site) -> None:
    hosts = {
        rate: TencentCloud(usd_per_cny=rate)._profile().httpProfile.rootDomain  # what the SDK makes its address of
        for rate in (None, 0.14)
    }
    assert hosts == {None: "intl.tencentcloudapi.com", 0.14: "tencentcloudapi.com"}


def test_regions_have_names_for_people(cloud: TencentCloud) -> None:
    assert cloud.regions() == (
        CloudRegion("ap-guangzhou", "South China (Guangzhou)"),
        CloudRegion("eu-frankfurt", "Europe (Frankfurt)"),
    )


def test_what_cvm_does_not_tell_is_unknown(cloud: TencentCloud, cvm: Cvm) -> None:
    cvm.charge_unit = "MONTH"
    for question in (
        lambda: cloud.function_prices(FRANKFURT),
        lambda: cloud.store_prices(FRANKFURT),
        lambda: cloud.egress_price(FRANKFURT, "ap-guangzhou"),
        lambda: cloud.machine_price(FRANKFURT, "S5.HUGE"),
        lambda: cloud.machine_price(FRANKFURT, "S5.4XLARGE64"),
    ):
        with pytest.raises(GeofedError) as caught:
            question()
        assert caught.value.code == "PRICE_UNKNOWN"


def test_a_region_that_is_none(cloud: TencentCloud) -> None:
    with pytest.raises(GeofedError, match="no region 'eu-atlantis'") as caught:
        cloud.machine_price("eu-atlantis", "S5.4XLARGE64")
    assert caught.value.code == "CLOUD_REGION_UNKNOWN"


def test_later_is_asked_again(cloud: TencentCloud, site: Site) -> None:
    site.faults += [refusal("RequestLimitExceeded"), Answer("", 502)]
    assert len(cloud.regions()) == 2
    assert site.asked == ["DescribeRegions"] * 3
    site.faults += [refusal("RequestLimitExceeded.UinLimitExceeded")] * 3
    with pytest.raises(GeofedError) as caught:
        cloud.regions()
    assert (caught.value.code, caught.value.retryable) == ("CLOUD_UNAVAILABLE", True)


@pytest.mark.parametrize(
    ("told", "code"),
    [
        ("AuthFailure.SecretIdNotFound", "UNAUTHENTICATED"),
        ("AuthFailure.SignatureFailure", "UNAUTHENTICATED"),
        ("AuthFailure.UnauthorizedOperation", "FORBIDDEN"),
        ("UnauthorizedOperation", "FORBIDDEN"),
        ("InvalidParameterValue", "CLOUD_REFUSED"),
    ],
)
def test_a_refusal_has_a_code_and_is_not_asked_again(cloud: TencentCloud, site: Site, told: str, code: str) -> None:
    site.faults.append(refusal(told, "The SecretId is not found."))
    with pytest.raises(GeofedError, match="The SecretId is not found") as caught:
        cloud.regions()
    assert caught.value.code == code
    assert len(site.asked) == 1


def test_nobody_answers(site: Site) -> None:
    with pytest.raises(GeofedError) as caught:
        TencentCloud(endpoint_url="http://127.0.0.1:9", retries=retries(attempts=1)).regions()
    assert caught.value.code == "CLOUD_UNAVAILABLE"


@pytest.mark.parametrize("profile", [None, "[default]\nsecret_id = AKID\n", "[other]\nsecret_id = AKID\n"])
def test_without_credentials_nothing_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, profile: str | None
) -> None:
    # The last links of the SDK's chain ask the machine's metadata for a role; here nobody answers.
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    if profile is not None:
        (tmp_path / ".tencentcloud").mkdir()
        (tmp_path / ".tencentcloud" / "credentials").write_text(profile)
    with pytest.raises(GeofedError, match="no credentials for tencent") as caught:
        open_cloud("tencent")
    assert caught.value.code == "UNAUTHENTICATED"


def test_shards_of_cos_are_listed_with_the_sdk_s_credentials(site: Site) -> None:
    with serving(aws({})) as cos:
        keys = {"aws_access_key_id": "AKID", "aws_secret_access_key": "secret", "region_name": "ap-guangzhou"}
        client = boto3.client("s3", endpoint_url=cos.url, **keys)
        client.create_bucket(Bucket="shards-125", CreateBucketConfiguration={"LocationConstraint": "ap-guangzhou"})
        client.put_object(Bucket="shards-125", Key="digits/train.npz", Body=b"123")
        found = open_cloud("tencent", region="ap-guangzhou", endpoint_url=cos.url).shards("shards-125", "digits/")
        assert found.shards == (Shard("digits/train.npz", 3),)
        assert found.region == "ap-guangzhou"
        with pytest.raises(GeofedError, match="bucket's region") as caught:
            open_cloud("tencent", endpoint_url=cos.url).shards("shards-125", "")
        assert caught.value.code == "USAGE"
