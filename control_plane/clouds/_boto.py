"""boto3 as the adapters use it: how clients are made, and what its errors mean."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import boto3
import botocore.exceptions
from botocore.config import Config

from geofed_pb.errors import GeofedError

_TRIES = 5
"""Attempts of a request in all, with boto's exponential backoff between them.

A choice: short throttling passes within them, and a user need not wait longer for an error.
"""
_CONNECT_SECONDS, _READ_SECONDS = 10, 30
_LATER = frozenset(
    {"Throttling", "ThrottlingException", "ThrottledException", "RequestLimitExceeded", "SlowDown", "TooManyRequests"}
)
_STRANGERS = frozenset(
    {
        "AuthFailure",
        "ExpiredToken",
        "ExpiredTokenException",
        "IncompleteSignature",
        "InvalidAccessKeyId",
        "InvalidClientTokenId",
        "InvalidToken",
        "SignatureDoesNotMatch",
        "UnrecognizedClientException",
    }
)
_NO_CREDENTIALS = (
    botocore.exceptions.NoCredentialsError,
    botocore.exceptions.PartialCredentialsError,
    botocore.exceptions.CredentialRetrievalError,
    botocore.exceptions.TokenRetrievalError,
    botocore.exceptions.SSOError,
)


def session_for(cloud: str, profile: str | None = None, **credentials: str) -> Any:
    """A session with the credentials that boto3's own chain finds, unless another SDK has found some."""
    with told(cloud):
        return boto3.Session(profile_name=profile, **credentials)


def client_for(session: Any, service: str, region: str, endpoint_url: str | None) -> Any:
    """Return a client that retries after throttling and other temporary errors.

    Raises ``GeofedError("USAGE")`` for an invalid address.
    """
    options: dict[str, Any] = {}
    host = urlsplit(endpoint_url or "").hostname or ""
    if service == "s3" and endpoint_url and not host.endswith((".amazonaws.com", ".amazonaws.com.cn")):
        # Other stores do not know the checksums that boto3 sends and expects since 1.36.
        options = {"request_checksum_calculation": "when_required", "response_checksum_validation": "when_required"}
    config = Config(
        connect_timeout=_CONNECT_SECONDS,
        read_timeout=_READ_SECONDS,
        retries={"mode": "standard", "total_max_attempts": _TRIES},
        **options,
    )
    try:
        return session.client(service, region_name=region, endpoint_url=endpoint_url, config=config)
    except ValueError as error:
        raise GeofedError("USAGE", f"--endpoint-url is no address: {error}") from None


@contextmanager
def told(cloud: str) -> Iterator[None]:
    """Turns what boto3 raises into errors of the catalogue."""
    try:
        yield
    except botocore.exceptions.ClientError as error:
        raise _refusal(error, cloud) from error
    except _NO_CREDENTIALS as error:
        hint = "give them where the SDK looks for them: environment, profile, or role"
        raise GeofedError("UNAUTHENTICATED", f"no credentials for {cloud}: {error}", hint=hint) from error
    except (botocore.exceptions.ProfileNotFound, botocore.exceptions.ConfigParseError) as error:
        raise GeofedError("CONFIG_INVALID", f"{cloud}: {error}", hint="correct the SDK's configuration") from error
    except (botocore.exceptions.ParamValidationError, botocore.exceptions.InvalidRegionError) as error:
        raise GeofedError("CLOUD_REFUSED", f"{cloud}: {error}") from error
    except botocore.exceptions.BotoCoreError as error:
        raise GeofedError("CLOUD_UNAVAILABLE", f"{cloud} does not answer: {error}") from error


def _refusal(error: Any, cloud: str) -> GeofedError:
    code = error.response["Error"].get("Code", "")
    status = error.response["ResponseMetadata"].get("HTTPStatusCode", 0)
    if code in ("NoSuchBucket", "404"):
        hint = "check the bucket's name, and the store's address and region"
        return GeofedError("SHARD_UNREADABLE", f"{cloud} has no such bucket: {error}", hint=hint)
    if code in _STRANGERS or status == 401:
        hint = "correct the credentials that the SDK finds"
        return GeofedError("UNAUTHENTICATED", f"{cloud} does not know these credentials: {error}", hint=hint)
    if code in _LATER or status in (429, 503) or status >= 500:
        return GeofedError("CLOUD_UNAVAILABLE", f"{cloud} has not answered in {_TRIES} tries: {error}")
    if status == 403 or code in ("AccessDenied", "AccessDeniedException", "UnauthorizedOperation"):
        hint = "these credentials need the right to read prices, regions, or the bucket"
        return GeofedError("FORBIDDEN", f"{cloud} refused: {error}", hint=hint)
    return GeofedError("CLOUD_REFUSED", f"{cloud} refused: {error}")
