"""Clouds on this machine: recorded answers over real HTTP, and moto for what it serves of AWS.

Nothing of ours is replaced: the SDKs are told another address, or their transport is.
"""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from werkzeug.serving import WSGIRequestHandler, make_server

Wsgi = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]
JSON = "application/json"


@dataclass(frozen=True)
class Answer:
    """One HTTP answer."""

    body: Any
    """Bytes, text, or what becomes JSON."""
    status: int = 200
    kind: str = JSON


@dataclass
class Site:
    """Where a cloud is served, what it was asked, and what it answers first, before it answers rightly."""

    url: str = ""
    asked: list[str] = field(default_factory=list)
    faults: list[Answer] = field(default_factory=list)


class _Quiet(WSGIRequestHandler):
    def log_request(self, *_: Any, **__: Any) -> None:
        pass


@contextmanager
def serving(answer: Callable[[dict[str, Any], bytes], tuple[str, Answer | Wsgi]]) -> Iterator[Site]:
    """Serve HTTP; `answer` gives a request's name and its answer, or the application that answers it."""
    site = Site()

    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        name, found = answer(environ, body)
        site.asked.append(name)
        if site.faults:
            found = site.faults.pop(0)
        if not isinstance(found, Answer):
            return found({**environ, "wsgi.input": io.BytesIO(body)}, start_response)
        content = (
            found.body
            if isinstance(found.body, bytes)
            else found.body.encode()
            if isinstance(found.body, str)
            else json.dumps(found.body).encode()
        )
        start_response(f"{found.status} told", [("Content-Type", found.kind), ("Content-Length", str(len(content)))])
        return [content]

    server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=_Quiet)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    site.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield site
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def offer(attributes: dict[str, str], tiers: Sequence[tuple[float, str]], currency: str = "USD") -> dict[str, Any]:
    """A product as the Price List API gives it; `tiers` are where each begins and its price."""
    bounds = [*(begin for begin, _ in tiers[1:]), "Inf"]
    dimensions = {
        f"SKU.TERM.{index}": {
            "unit": "unit",
            "beginRange": f"{begin:g}",
            "endRange": str(end),
            "pricePerUnit": {currency: usd},
            "appliesTo": [],
        }
        for index, ((begin, usd), end) in enumerate(zip(tiers, bounds, strict=True))
    }
    return {
        "product": {"productFamily": "any", "sku": "SKU", "attributes": attributes},
        "terms": {"OnDemand": {"SKU.TERM": {"priceDimensions": dimensions, "effectiveDate": "2026-11-01T00:00:00Z"}}},
        "version": "20261118000000",
        "publicationDate": "2026-11-18T17:25:06Z",
    }


_PLAIN = {"operatingSystem": "Linux", "tenancy": "Shared", "preInstalledSw": "NA", "capacitystatus": "Used"}
_FRANKFURT = {"regionCode": "eu-central-1"}


def _machine(machine_type: str, usd: str, **other: str) -> dict[str, Any]:
    usage = {"usagetype": f"EUC1-BoxUsage:{machine_type}"}
    return offer({**_FRANKFURT, **_PLAIN, "instanceType": machine_type, **usage, **other}, [(0, usd)])


AWS_OFFERS = {
    "AmazonEC2": [
        _machine("c5.4xlarge", "0.7760000000"),
        _machine("c5.4xlarge", "1.5120000000", operatingSystem="Windows"),
        _machine("c5.4xlarge", "0.8230000000", tenancy="Dedicated", usagetype="EUC1-DedicatedUsage:c5.4xlarge"),
        _machine("c5.4xlarge", "0.7760000000", capacitystatus="UnusedCapacityReservation"),
        _machine("free.large", "0.0000000000"),
    ],
    "AWSLambda": [
        offer(
            {**_FRANKFURT, "group": "AWS-Lambda-Duration", "usagetype": "EUC1-Lambda-GB-Second"},
            [(0, "0.0000166667"), (6e9, "0.0000150000"), (15e9, "0.0000133334")],
        ),
        offer(
            {**_FRANKFURT, "group": "AWS-Lambda-Duration", "usagetype": "EUC1-Lambda-Edge-GB-Second"},
            [(0, "0.0000500100")],
        ),
        offer({**_FRANKFURT, "group": "AWS-Lambda-Requests", "usagetype": "EUC1-Request"}, [(0, "0.0000002000")]),
        offer(
            {**_FRANKFURT, "group": "AWS-Lambda-Requests", "usagetype": "EUC1-Lambda-Edge-Request"},
            [(0, "0.0000006000")],
        ),
    ],
    "AmazonS3": [
        offer({**_FRANKFURT, "group": "S3-API-Tier1", "usagetype": "EUC1-Requests-Tier1"}, [(0, "0.0000054000")]),
        offer({**_FRANKFURT, "group": "S3-API-Tier1", "usagetype": "EUC1-Requests-GLACIER-Tier1"}, [(0, "0.00006")]),
        offer({**_FRANKFURT, "group": "S3-API-Tier2", "usagetype": "EUC1-Requests-Tier2"}, [(0, "0.0000004300")]),
    ],
    "AWSDataTransfer": [
        offer(
            {
                "fromRegionCode": "eu-central-1",
                "toLocation": "External",
                "transferType": "AWS Outbound",
                "usagetype": "EUC1-DataTransfer-Out-Bytes",
            },
            [(0, "0.0000000000"), (1, "0.0900000000"), (10240, "0.0850000000")],
        ),
        offer(
            {
                "fromRegionCode": "eu-central-1",
                "fromLocationType": "AWS Local Zone",
                "toLocation": "External",
                "transferType": "AWS Outbound",
                "usagetype": "EUC1-HAM1-DataTransfer-Out-Bytes",
            },
            [(0, "0.1200000000")],
        ),
        offer(
            {
                "fromRegionCode": "eu-central-1",
                "fromLocationType": "AWS Region",
                "toRegionCode": "us-east-1",
                "transferType": "InterRegion Outbound",
                "usagetype": "EUC1-USE1-AWS-Out-Bytes",
            },
            [(0, "0.0200000000")],
        ),
    ],
}

_SPOT = """<DescribeSpotPriceHistoryResponse xmlns="http://ec2.amazonaws.com/doc/2016-11-15/"><requestId>r</requestId>
<spotPriceHistorySet>{items}</spotPriceHistorySet><nextToken>{token}</nextToken></DescribeSpotPriceHistoryResponse>"""
_SPOT_ITEM = """<item><instanceType>c5.4xlarge</instanceType><productDescription>Linux/UNIX</productDescription>
<spotPrice>{usd}</spotPrice><timestamp>{at}</timestamp><availabilityZone>{zone}</availabilityZone></item>"""
SPOT_PAGES = [
    [("eu-central-1a", "2026-11-20T10:00:00Z", "0.3010"), ("eu-central-1b", "2026-11-20T11:00:00Z", "0.2950")],
    [("eu-central-1c", "2026-11-20T12:00:00Z", "0.3120"), ("eu-central-1a", "2026-11-20T09:00:00Z", "0.9990")],
]
"""Zone, time, USD/hour; the last is older than the first of its zone."""


def aws(offers: dict[str, list[dict[str, Any]]], *, page: int = 1) -> Callable[..., tuple[str, Answer | Wsgi]]:
    """Prices from `offers`, a page at a time, spot prices as recorded, and all else from moto."""
    rest = _moto()

    def answer(environ: dict[str, Any], body: bytes) -> tuple[str, Answer | Wsgi]:
        scope = environ.get("HTTP_AUTHORIZATION", "").partition("Credential=")[2].split("/")
        service = scope[3] if len(scope) > 3 else ""
        if service == "pricing":
            return "pricing", _products(offers, json.loads(body), page)
        if b"Action=DescribeSpotPriceHistory" in body:
            return "spot", _spot(body)
        return service, rest

    return answer


@cache
def _moto() -> Wsgi:
    """One for all: what it is told lasts as long as the process anyway, and each of its services takes a second."""
    from moto.server import DomainDispatcherApplication, create_backend_app

    served: Wsgi = DomainDispatcherApplication(create_backend_app)
    return served


def _products(offers: dict[str, list[dict[str, Any]]], wanted: dict[str, Any], page: int) -> Answer:
    found = [
        json.dumps(product)
        for product in offers[wanted["ServiceCode"]]
        if all(product["product"]["attributes"].get(f["Field"]) == f["Value"] for f in wanted["Filters"])
    ]
    begin = int(wanted.get("NextToken") or 0)
    more = {"NextToken": str(begin + page)} if begin + page < len(found) else {}
    body = {"FormatVersion": "aws_v1", "PriceList": found[begin : begin + page], **more}
    return Answer(body, kind="application/x-amz-json-1.1")


def _spot(body: bytes) -> Answer:
    index = 1 if b"NextToken=more" in body else 0
    rows = SPOT_PAGES[index] if b"InstanceType.1=c5.4xlarge" in body else []
    items = "".join(_SPOT_ITEM.format(zone=zone, at=at, usd=usd) for zone, at, usd in rows)
    return Answer(_SPOT.format(items=items, token="more" if rows and index == 0 else ""), kind="text/xml")


def aws_refusal(code: str, status: int = 400) -> Answer:
    return Answer({"__type": code, "message": code}, status, "application/x-amz-json-1.1")
