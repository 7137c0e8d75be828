"""AWS Lambda through boto3: the functions that replicas are invocations of, and what its errors mean."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from geofed_pb.errors import GeofedError, install_hint
from region_agent.config import LambdaGateway
from region_agent.gateway.embedded.serverless.api import EVENT_SECONDS, GATEWAY_TAG, Hosted, NoFunction

if TYPE_CHECKING:
    from botocore.client import BaseClient

__all__ = ["LambdaFunctions", "error_of", "failure_of"]

_ATTEMPTS = 5
"""Attempts of a request that Lambda throttles or fails to answer, with growing pauses."""
_TIMEOUT_SECONDS = 20
"""Longest time until a connection is made, and until a request is answered."""
_ENTRY_POINT = ("python", "-m", "region_agent.gateway.serverless.aws")
"""Entry point of the worker's image for Lambda."""
_LOG_GROUP = "/geofed/worker"
"""Log group of all functions, which the operator makes: each would leave one of its own behind, without an end."""
_UNAUTHENTICATED = frozenset({
    "ExpiredTokenException", "IncompleteSignature", "InvalidClientTokenId", "InvalidSignatureException",
    "MissingAuthenticationToken", "UnrecognizedClientException",
})  # fmt: skip
_QUOTA = frozenset({"CodeStorageExceededException", "ServiceQuotaExceededException"})
_NO_IMAGE = frozenset({"ImageAccessDenied", "ImageDeleted", "InvalidImage"})
_NO_ROOM = frozenset({"EniLimitExceeded", "InsufficientCapacity", "SubnetOutOfIPAddresses", "VcpuLimitExceeded"})
_PASSING = frozenset({"InternalError"})
"""Reasons of a state of Lambda's functions."""
_MOST_TEXT = 500
"""Longest text of an error that is passed on, in characters."""


class LambdaFunctions:
    """The region's functions at AWS Lambda."""

    def __init__(self, settings: LambdaGateway) -> None:
        try:
            import boto3
            from botocore.config import Config
            from botocore.exceptions import BotoCoreError
        except ImportError:
            raise GeofedError(
                "CONFIG_INVALID", "the package boto3 is not installed", hint=install_hint("aws")
            ) from None
        self._settings = settings
        config = Config(
            retries={"mode": "standard", "total_max_attempts": _ATTEMPTS},
            connect_timeout=_TIMEOUT_SECONDS,
            read_timeout=_TIMEOUT_SECONDS,
            max_pool_connections=16,
        )
        try:
            self._client: BaseClient = boto3.session.Session().client(
                "lambda", region_name=settings.aws_region, config=config
            )
        except (BotoCoreError, ValueError) as error:
            hint = "set `gateway.awsRegion`, or a region in the agent's AWS configuration"
            raise GeofedError("CONFIG_INVALID", f"AWS cannot be used: {error}", hint=hint) from error

    def create(self, function: Hosted) -> None:
        """Make a function; the rest is set when it is active."""
        settings = self._settings
        vpc = {"SubnetIds": list(settings.subnets), "SecurityGroupIds": list(settings.security_groups)}
        # A name is used once: a function that is there was made by a request whose answer was lost.
        with _told("a function could not be made"), contextlib.suppress(self._conflict):
            self._client.create_function(
                FunctionName=function.name,
                PackageType="Image",
                Code={"ImageUri": function.image},
                ImageConfig={"EntryPoint": list(_ENTRY_POINT), "Command": []},
                Role=settings.role,
                MemorySize=function.memory_mb,
                Timeout=settings.life_seconds,
                Architectures=[settings.architecture],
                EphemeralStorage={"Size": settings.scratch_mb},
                LoggingConfig={"LogGroup": _LOG_GROUP},
                Tags=dict(function.tags),
                **({"VpcConfig": vpc} if settings.subnets else {}),
            )

    def is_ready(self, name: str) -> bool:
        """Whether a function that was made is active; its events are then not repeated, and its concurrency is set.

        Lambda refuses both while it makes the function, and may not know the function yet just after it was made.
        """
        try:
            with _told(f"function {name} could not be looked at", self._missing):
                found = self._client.get_function_configuration(FunctionName=name)
            if found.get("State") == "Failed":
                raise failure_of(found)
            if found.get("State") != "Active" or found.get("LastUpdateStatus") == "InProgress":
                return False
            with _told(f"function {name} could not be set up", self._missing, self._conflict):
                self._client.put_function_event_invoke_config(
                    FunctionName=name, MaximumRetryAttempts=0, MaximumEventAgeInSeconds=EVENT_SECONDS
                )
                if (reserved := self._settings.reserved_concurrency) is not None:
                    self._client.put_function_concurrency(FunctionName=name, ReservedConcurrentExecutions=reserved)
        except (self._missing, self._conflict):
            return False
        return True

    def start(self, name: str, event: bytes) -> None:
        """Start an invocation asynchronously."""
        try:
            with _told("an invocation could not be started", self._missing):
                self._client.invoke(FunctionName=name, InvocationType="Event", Payload=event)
        except self._missing as error:
            raise NoFunction("GATEWAY_UNAVAILABLE", f"AWS Lambda has no function {name} any more") from error

    def delete(self, name: str) -> None:
        """Delete a function, if it is there."""
        with _told(f"function {name} could not be deleted"), contextlib.suppress(self._missing):
            self._client.delete_function(FunctionName=name)

    def names(self, mark: str) -> list[str]:
        """Return the names of a gateway's functions: their names say whose they may be, their tags whose they are."""
        with _told("the functions could not be listed"):
            pages = self._client.get_paginator("list_functions").paginate()
            found = [
                one for page in pages for one in page["Functions"] if one["FunctionName"].startswith(f"geofed-{mark}-")
            ]
            return [one["FunctionName"] for one in found if self._tags(one["FunctionArn"]).get(GATEWAY_TAG) == mark]

    def examine(self, function: Hosted, workers: int, wait: Callable[[], None]) -> str:
        """Make a function, have Lambda check an invocation (`DryRun`), and delete it."""
        with _told("the account could not be asked for"):
            limit = self._client.get_account_settings()["AccountLimit"]
        free, reserved = int(limit["UnreservedConcurrentExecutions"]), self._settings.reserved_concurrency
        if reserved is None and free < 2 * workers:
            text = f"AWS runs {free} invocations at the same time; {workers} workers need {2 * workers} when replaced"
            hint = "have the account's quota of concurrent executions raised, or lower `capacity`"
            raise GeofedError("LIMIT_EXCEEDED", text, hint=hint)
        try:
            self.create(function)
            while not self.is_ready(function.name):
                wait()
            with _told("an invocation may not be started"):
                self._client.invoke(FunctionName=function.name, InvocationType="DryRun")
            self.names(function.tags[GATEWAY_TAG])
        except GeofedError:
            with contextlib.suppress(GeofedError):
                self.delete(function.name)
            raise
        self.delete(function.name)
        return f"AWS Lambda in {self._client.meta.region_name}: may run functions, {free} invocations at the same time"

    @property
    def _missing(self) -> type[Exception]:
        found: type[Exception] = self._client.exceptions.ResourceNotFoundException
        return found

    @property
    def _conflict(self) -> type[Exception]:
        found: type[Exception] = self._client.exceptions.ResourceConflictException
        return found

    def _tags(self, arn: str) -> Mapping[str, str]:
        try:
            return dict(self._client.list_tags(Resource=arn)["Tags"])
        except self._missing:
            return {}


def failure_of(configuration: Mapping[str, Any]) -> GeofedError:
    """Return why a function that Lambda has made can never run."""
    code, told = str(configuration.get("StateReasonCode", "")), _short(str(configuration.get("StateReason", "")))
    text = f"AWS Lambda cannot run the function: {code}: {told}"
    if code in _NO_IMAGE:
        return GeofedError("IMAGE_UNAVAILABLE", text)
    if code in _NO_ROOM:
        return GeofedError("FUNCTION_UNSCHEDULABLE", text)
    return GeofedError("GATEWAY_UNAVAILABLE" if code in _PASSING else "CONFIG_INVALID", text)


def error_of(code: str, message: str, status: int, what: str) -> GeofedError:
    """Return an error of Lambda's API as one of ours."""
    text = f"{what}: AWS Lambda answers {code}: {_short(message)}"
    if code in _UNAUTHENTICATED:
        return GeofedError("UNAUTHENTICATED", text, hint="renew the agent's AWS credentials")
    if code in ("AccessDeniedException", "AccessDenied"):
        return GeofedError("FORBIDDEN", text, hint="give the agent's identity the rights in docs/lambda.md")
    if code in _QUOTA or "UnreservedConcurrentExecution" in message:
        hint = "have the account's quota raised, delete functions, or lower `gateway.reservedConcurrency`"
        return GeofedError("QUOTA_EXCEEDED", text, hint=hint)
    if code == "InvalidParameterValueException" and re.search(r"\b(source )?image\b", message, re.IGNORECASE):
        return GeofedError("IMAGE_UNAVAILABLE", text)
    if code == "RequestTooLargeException":
        return GeofedError("LIMIT_EXCEEDED", text, hint="the job's environment and secrets are too large")
    if code == "TooManyRequestsException" or code.startswith("Throttl") or status >= 500:
        return GeofedError("GATEWAY_UNAVAILABLE", text)
    if code == "ResourceConflictException":
        return GeofedError("GATEWAY_UNAVAILABLE", text)
    return GeofedError("CONFIG_INVALID", text, hint="correct `gateway` in the region file")


@contextlib.contextmanager
def _told(what: str, *but: type[Exception]) -> Iterator[None]:
    """Raise errors of Lambda's API as ours, ``but`` for these."""
    from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, PartialCredentialsError

    try:
        yield
    except ClientError as error:
        if isinstance(error, but):
            raise
        told, status = (
            error.response.get("Error", {}),
            error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0),
        )
        raise error_of(str(told.get("Code", "")), str(told.get("Message", "")), int(status), what) from error
    except (NoCredentialsError, PartialCredentialsError) as error:
        hint = "give the agent AWS credentials: a role of its machine, or a profile"
        raise GeofedError("UNAUTHENTICATED", f"{what}: {error}", hint=hint) from error
    except BotoCoreError as error:
        raise GeofedError("GATEWAY_UNAVAILABLE", f"{what}: AWS Lambda does not answer: {_short(str(error))}") from error


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MOST_TEXT else f"{line[: _MOST_TEXT - 1]}…"
