"""The boto3 client of an object store: its configuration, the metering of its requests, and its errors."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from urllib.parse import urlsplit

import boto3
import botocore.exceptions
import botocore.session
from botocore.config import Config

from geofed_pb.errors import GeofedError
from sync.channel_clients._address import Address
from sync.channel_clients._meter import Meter

__all__ = ["catalogue_errors", "client_for"]

_TRIES = 6
"""Attempts of a request, by boto3."""
_CONNECT_SECONDS, _READ_SECONDS = 5, 30
_KINDS = {
    "PutObject": "puts",
    "CreateMultipartUpload": "puts",
    "UploadPart": "puts",
    "CompleteMultipartUpload": "puts",
    "GetObject": "gets",
    "HeadObject": "looks",
    "DeleteObject": "deletes",
    "DeleteObjects": "deletes",
    "AbortMultipartUpload": "deletes",
    "ListObjectsV2": "lists",
}
_NOT_FOUND, _REPLACED, _NOTHING_IN_RANGE = 404, 412, 416
_NEVER_SENT = (
    botocore.exceptions.EndpointConnectionError,
    botocore.exceptions.ConnectTimeoutError,
    botocore.exceptions.ProxyConnectionError,
    botocore.exceptions.SSLError,
)
_UNAUTHENTICATED_CODES = frozenset({"InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken"})
_FULL_CODES = frozenset({"QuotaExceeded", "XMinioStorageFull", "InsufficientStorage", "StorageFull"})


def client_for(address: Address, meter: Meter, connections: int) -> Any:
    """Return a client that meters every request, including boto3's own retries. Thread-safe."""
    endpoint = address.options.get("endpoint")
    on_aws = endpoint is None or (urlsplit(endpoint).hostname or "").endswith((".amazonaws.com", ".amazonaws.com.cn"))
    options: dict[str, Any] = {}
    if not on_aws:
        # Other stores don't support the checksums that boto3 sends and expects since version 1.36.
        options = {"request_checksum_calculation": "when_required", "response_checksum_validation": "when_required"}
    if address.options.get("path_style", "0") not in ("0", "1"):
        raise GeofedError("CONFIG_INVALID", "path_style of the channel's address is 0 or 1")
    style = "path" if address.options.get("path_style") == "1" else "auto"
    config = Config(
        max_pool_connections=connections,
        connect_timeout=_CONNECT_SECONDS,
        read_timeout=_READ_SECONDS,
        retries={"mode": "standard", "total_max_attempts": _TRIES},
        tcp_keepalive=True,
        s3={"addressing_style": style},
        **options,
    )
    core = botocore.session.get_session()
    core.register_component("data_loader", _descriptions())
    session = boto3.session.Session(botocore_session=core)
    region = address.options.get("region") or session.region_name or ("us-east-1" if endpoint else None)
    try:
        client = session.client("s3", endpoint_url=endpoint, region_name=region, config=config)
    except ValueError as error:
        raise GeofedError("CONFIG_INVALID", f"the channel's endpoint is invalid: {error}") from None
    events = client.meta.events
    events.register("response-received.s3", lambda **facts: meter.count(**{_kind(**facts): 1}) if _came(**facts) else 0)
    if not on_aws:
        events.register("before-call.s3.DeleteObjects", _with_md5)
    return client


@cache
def _descriptions() -> Any:
    """Return the loader of the service descriptions, which are read once per process and its forks: 0.4 s per client
    otherwise."""
    return botocore.session.get_session().get_component("data_loader")


def _came(exception: Exception | None, **_: Any) -> bool:
    """Whether the store received the request."""
    return not isinstance(exception, _NEVER_SENT)


def _kind(event_name: str, response_dict: dict[str, Any] | None, **_: Any) -> str:
    status = response_dict["status_code"] if response_dict is not None else 0
    kind = _KINDS.get(event_name.rpartition(".")[2], "looks")
    if kind == "looks" and status == _NOT_FOUND:
        return kind
    if kind == "gets" and status in (_NOT_FOUND, _REPLACED):
        return "misses"
    return kind if 200 <= status < 300 or (kind == "gets" and status == _NOTHING_IN_RANGE) else "failures"


def _with_md5(params: dict[str, Any], **_: Any) -> None:
    """Add the checksum that boto3 no longer sends and that some other stores require, such as Tencent's COS."""
    digest = hashlib.md5(params["body"], usedforsecurity=False).digest()
    params["headers"].setdefault("Content-MD5", base64.b64encode(digest).decode())


@contextmanager
def catalogue_errors(shown: str) -> Iterator[None]:
    """Raise errors of the catalogue instead of boto3's."""
    try:
        yield
    except botocore.exceptions.ClientError as error:
        raise _refusal(error, shown) from error
    except (botocore.exceptions.NoCredentialsError, botocore.exceptions.PartialCredentialsError) as error:
        hint = "give the worker credentials where boto3 looks for them: environment, profile, or role"
        raise GeofedError("UNAUTHENTICATED", f"no credentials for {shown}: {error}", hint=hint) from error
    except botocore.exceptions.BotoCoreError as error:
        raise GeofedError("CHANNEL_UNAVAILABLE", f"{shown} does not answer: {error}") from error


def _refusal(error: Any, shown: str) -> GeofedError:
    code = error.response["Error"].get("Code", "")
    status = error.response["ResponseMetadata"].get("HTTPStatusCode", 0)
    text = f"{shown} refused: {error}"
    if code == "NoSuchBucket":
        return GeofedError("CONFIG_INVALID", f"{shown}: the bucket does not exist", hint="create the bucket first")
    if code in _UNAUTHENTICATED_CODES or status == 401:
        return GeofedError("UNAUTHENTICATED", text, hint="correct the credentials that boto3 finds")
    if code in _FULL_CODES or status == 507:
        return GeofedError("DISK_FULL", text, hint="raise the store's quota, or free space in it")
    if status == 403:
        # Without permission to list, a store returns this for every missing key.
        hint = "the workers need s3:GetObject, s3:PutObject, s3:DeleteObject and s3:ListBucket"
        return GeofedError("FORBIDDEN", text, hint=hint)
    return GeofedError("CHANNEL_UNAVAILABLE", text)
