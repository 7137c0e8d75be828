"""One bucket of an object store, over boto3: where it is, what each request was, and what its errors mean."""

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
from sync.channel._address import Address
from sync.channel._meter import Meter

__all__ = ["client_for", "told"]

_TRIES = 6
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
_NOT_THERE, _REPLACED, _NOTHING_IN_RANGE = 404, 412, 416
_NEVER_ARRIVED = (
    botocore.exceptions.EndpointConnectionError,
    botocore.exceptions.ConnectTimeoutError,
    botocore.exceptions.ProxyConnectionError,
    botocore.exceptions.SSLError,
)
_STRANGERS = frozenset({"InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken"})
_FULL = frozenset({"QuotaExceeded", "XMinioStorageFull", "InsufficientStorage", "StorageFull"})


def client_for(address: Address, meter: Meter, connections: int) -> Any:
    """A client whose every request is metered, those that it repeats by itself too. Thread-safe."""
    endpoint = address.options.get("endpoint")
    on_aws = endpoint is None or (urlsplit(endpoint).hostname or "").endswith((".amazonaws.com", ".amazonaws.com.cn"))
    options: dict[str, Any] = {}
    if not on_aws:
        # Other stores do not know the checksums that boto3 sends and expects since 1.36.
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
        raise GeofedError("CONFIG_INVALID", f"the channel's endpoint is not one: {error}") from None
    events = client.meta.events
    events.register("response-received.s3", lambda **facts: meter.count(**{_kind(**facts): 1}) if _came(**facts) else 0)
    if not on_aws:
        events.register("before-call.s3.DeleteObjects", _with_md5)
    return client


@cache
def _descriptions() -> Any:
    """The files that describe the services, read once for a process and those forked from it: 0.4 s for each client."""
    return botocore.session.get_session().get_component("data_loader")


def _came(exception: Exception | None, **_: Any) -> bool:
    """Whether the store got the request."""
    return not isinstance(exception, _NEVER_ARRIVED)


def _kind(event_name: str, response_dict: dict[str, Any] | None, **_: Any) -> str:
    status = response_dict["status_code"] if response_dict is not None else 0
    kind = _KINDS.get(event_name.rpartition(".")[2], "looks")
    if kind == "looks" and status == _NOT_THERE:
        return kind
    if kind == "gets" and status in (_NOT_THERE, _REPLACED):
        return "misses"
    return kind if 200 <= status < 300 or (kind == "gets" and status == _NOTHING_IN_RANGE) else "failures"


def _with_md5(params: dict[str, Any], **_: Any) -> None:
    """Give the checksum that boto3 no longer gives and that other stores insist on, Tencent's COS among them."""
    digest = hashlib.md5(params["body"], usedforsecurity=False).digest()
    params["headers"].setdefault("Content-MD5", base64.b64encode(digest).decode())


@contextmanager
def told(shown: str) -> Iterator[None]:
    """Turns what boto3 raises into errors of the catalogue."""
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
        return GeofedError("CONFIG_INVALID", f"{shown}: there is no such bucket", hint="make the bucket first")
    if code in _STRANGERS or status == 401:
        return GeofedError("UNAUTHENTICATED", text, hint="correct the credentials that boto3 finds")
    if code in _FULL or status == 507:
        return GeofedError("DISK_FULL", text, hint="raise the store's quota, or free space in it")
    if status == 403:
        # Without the right to list, a store says this for every key that is not there.
        hint = "the workers need s3:GetObject, s3:PutObject, s3:DeleteObject and s3:ListBucket"
        return GeofedError("FORBIDDEN", text, hint=hint)
    return GeofedError("CHANNEL_UNAVAILABLE", text)
