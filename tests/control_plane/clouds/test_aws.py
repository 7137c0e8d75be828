"""AWS: prices as the Price List API documents them, regions and S3 from moto, all through boto3 over HTTP."""

from __future__ import annotations

import boto3
import pytest
from botocore.exceptions import ClientError, EndpointConnectionError

from control_plane.clouds import Cloud, Confidence, Purchase, Shard, Unit, open_cloud
from control_plane.clouds._boto import told
from control_plane.clouds._s3_shards import list_shards
from geofed_pb.errors import GeofedError
from tests.control_plane.clouds.recorded import AWS_OFFERS, Answer, Site, aws, aws_refusal, offer, serving

FRANKFURT = "eu-central-1"


@pytest.fixture
def cloud(aws_site: Site) -> Cloud:
    return open_cloud("aws", endpoint_url=aws_site.url)


def test_a_machine_costs_what_the_plain_offer_says(cloud: Cloud, aws_site: Site) -> None:
    price = cloud.machine_price(FRANKFURT, "c5.4xlarge")
    assert (price.usd, price.unit) == (0.776, Unit.HOUR)
    assert price.provenance.confidence is Confidence.LIST
    assert price.provenance.as_of == "2026-11-18"
    assert price.provenance.source == "AWS price list, c5.4xlarge, eu-central-1"


@pytest.mark.slow
def test_a_spot_price_is_the_median_of_the_newest_of_each_zone(cloud: Cloud, aws_site: Site) -> None:
    price = cloud.machine_price(FRANKFURT, "c5.4xlarge", Purchase.PREEMPTIBLE)
    assert price.usd == 0.3010
    assert price.provenance.confidence is Confidence.OBSERVED
    assert aws_site.asked.count("spot") == 2


def test_functions_and_requests_cost_what_the_first_tier_says(cloud: Cloud) -> None:
    functions, store = cloud.function_prices(FRANKFURT), cloud.store_prices(FRANKFURT)
    assert (functions.gb_second.usd, functions.gb_second.unit) == (0.0000166667, Unit.GB_SECOND)
    assert (functions.request.usd, functions.request.unit) == (0.0000002, Unit.REQUEST)
    assert (store.put.usd, store.get.usd) == (0.0000054, 0.00000043)


def test_egress_skips_the_tier_that_is_free(cloud: Cloud) -> None:
    assert cloud.egress_price(FRANKFURT).usd == 0.09
    assert cloud.egress_price(FRANKFURT, "us-east-1").usd == 0.02


def test_every_page_of_offers_is_read(aws_keys: None) -> None:
    machine = AWS_OFFERS["AmazonEC2"][0]
    attributes = machine["product"]["attributes"]
    dearer = offer(attributes, [(0, "0.7770000000")])
    with serving(aws({"AmazonEC2": [machine, machine, dearer]}, page=1)) as site:
        assert open_cloud("aws", endpoint_url=site.url).machine_price(FRANKFURT, "c5.4xlarge").usd == 0.777
        assert site.asked == ["pricing"] * 3


@pytest.mark.slow
@pytest.mark.parametrize("purchase", list(Purchase))
def test_a_machine_type_that_is_none(cloud: Cloud, purchase: Purchase) -> None:
    with pytest.raises(GeofedError, match=r"no price for .*c5\.huge") as caught:
        cloud.machine_price(FRANKFURT, "c5.huge", purchase)
    assert caught.value.code == "PRICE_UNKNOWN"


@pytest.mark.slow
@pytest.mark.parametrize("purchase", list(Purchase))
def test_a_region_that_is_none(cloud: Cloud, purchase: Purchase) -> None:
    with pytest.raises(GeofedError, match="no region 'eu-atlantis-1'") as caught:
        cloud.machine_price("eu-atlantis-1", "c5.4xlarge", purchase)
    assert caught.value.code == "CLOUD_REGION_UNKNOWN"
    with pytest.raises(GeofedError, match="no region 'eu-atlantis-1'"):
        cloud.egress_price(FRANKFURT, "eu-atlantis-1")


@pytest.mark.slow
def test_zero_and_other_money_are_unknown(cloud: Cloud, aws_keys: None) -> None:
    with pytest.raises(GeofedError) as caught:
        cloud.machine_price(FRANKFURT, "free.large")
    assert caught.value.code == "PRICE_UNKNOWN"
    attributes = AWS_OFFERS["AmazonEC2"][0]["product"]["attributes"]
    yuan = aws({"AmazonEC2": [offer(attributes, [(0, "5.0")], currency="CNY")]})
    with serving(yuan) as site, pytest.raises(GeofedError) as caught:
        open_cloud("aws", endpoint_url=site.url).machine_price(FRANKFURT, "c5.4xlarge")
    assert caught.value.code == "PRICE_UNKNOWN"


@pytest.mark.slow
def test_regions_are_those_of_ec2(cloud: Cloud) -> None:
    names = [region.name for region in cloud.regions()]
    assert {FRANKFURT, "us-east-1", "ap-northeast-1"} <= set(names)
    assert names == sorted(names)


def test_later_is_asked_again(cloud: Cloud, aws_site: Site) -> None:
    aws_site.faults += [aws_refusal("ThrottlingException"), Answer("", 503)]
    assert cloud.machine_price(FRANKFURT, "c5.4xlarge").usd == 0.776
    assert aws_site.asked == ["pricing"] * 3


@pytest.mark.parametrize(
    ("refusal", "code"),
    [
        (aws_refusal("AccessDeniedException"), "FORBIDDEN"),
        (aws_refusal("UnrecognizedClientException"), "UNAUTHENTICATED"),
        (aws_refusal("ExpiredTokenException"), "UNAUTHENTICATED"),
        (aws_refusal("InvalidParameterException"), "CLOUD_REFUSED"),
    ],
)
def test_a_refusal_has_a_code(cloud: Cloud, aws_site: Site, refusal: Answer, code: str) -> None:
    aws_site.faults.append(refusal)
    with pytest.raises(GeofedError) as caught:
        cloud.machine_price(FRANKFURT, "c5.4xlarge")
    assert caught.value.code == code
    assert caught.value.hint


@pytest.mark.parametrize(
    "raised",
    [
        ClientError({"Error": {"Code": "Throttling"}, "ResponseMetadata": {"HTTPStatusCode": 400}}, "GetProducts"),
        ClientError({"Error": {"Code": "Oops"}, "ResponseMetadata": {"HTTPStatusCode": 500}}, "GetProducts"),
        EndpointConnectionError(endpoint_url="https://api.pricing.us-east-1.amazonaws.com"),
    ],
)
def test_what_boto3_has_given_up_on_may_be_asked_later(raised: Exception) -> None:
    with pytest.raises(GeofedError) as caught, told("aws"):
        raise raised
    assert (caught.value.code, caught.value.retryable) == ("CLOUD_UNAVAILABLE", True)


@pytest.mark.slow
def test_without_credentials_nothing_is_asked(monkeypatch: pytest.MonkeyPatch, aws_site: Site) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    with pytest.raises(GeofedError) as caught:
        open_cloud("aws", endpoint_url=aws_site.url).regions()
    assert caught.value.code == "UNAUTHENTICATED"
    assert not aws_site.asked


@pytest.mark.slow
def test_a_profile_that_is_none_and_an_address_that_is_none(aws_keys: None) -> None:
    with pytest.raises(GeofedError) as caught:
        open_cloud("aws", profile="nobody")
    assert caught.value.code == "CONFIG_INVALID"
    with pytest.raises(GeofedError) as caught:
        open_cloud("aws", endpoint_url="nowhere").regions()
    assert caught.value.code == "USAGE"


@pytest.mark.slow
def test_shards_are_listed_page_by_page(cloud: Cloud, aws_site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOTO_S3_DEFAULT_MAX_KEYS", "2")
    client = boto3.client("s3", endpoint_url=aws_site.url, region_name=FRANKFURT)
    client.create_bucket(Bucket="aws-shards", CreateBucketConfiguration={"LocationConstraint": FRANKFURT})
    for index in range(5):
        client.put_object(Bucket="aws-shards", Key=f"digits/train-{index}.npz", Body=b"x" * (index + 1))
    client.put_object(Bucket="aws-shards", Key="digits/", Body=b"")
    client.put_object(Bucket="aws-shards", Key="other/train.npz", Body=b"x")
    found = cloud.shards("aws-shards", "digits/")
    assert found.shards == tuple(Shard(f"digits/train-{index}.npz", index + 1) for index in range(5))
    assert (found.region, found.total_bytes) == (FRANKFURT, 15)
    assert cloud.shards("aws-shards", "nothing/").shards == ()


def test_a_bucket_of_the_first_region_and_one_that_is_none(cloud: Cloud, aws_site: Site) -> None:
    boto3.client("s3", endpoint_url=aws_site.url, region_name="us-east-1").create_bucket(Bucket="first")
    assert cloud.shards("first", "").region == "us-east-1"
    with pytest.raises(GeofedError) as caught:
        cloud.shards("no-such-bucket", "")
    assert caught.value.code == "SHARD_UNREADABLE"


def test_a_listing_has_an_end(aws_site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOTO_S3_DEFAULT_MAX_KEYS", "1")
    client = boto3.client("s3", endpoint_url=aws_site.url, region_name="us-east-1")
    client.create_bucket(Bucket="large")
    for index in range(4):
        client.put_object(Bucket="large", Key=str(index), Body=b"x")
    assert len(list_shards(client, "aws", "large", "", most=4).shards) == 4
    aws_site.asked.clear()
    with pytest.raises(GeofedError) as caught:
        list_shards(client, "aws", "large", "", most=2)
    assert caught.value.code == "LIMIT_EXCEEDED"
    assert len(aws_site.asked) == 4, "the bucket's place, and three pages"
