"""Tencent Cloud SCF through Tencent's SDK: the functions that replicas are invocations of, and what its errors mean."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_random_exponential

from geofed_pb.errors import GeofedError, install_hint
from region_agent.config import ScfGateway
from region_agent.gateway.client import is_loopback
from region_agent.gateway.embedded.serverless.api import EVENT_SECONDS, GATEWAY_TAG, Hosted, NoFunction

__all__ = ["ScfFunctions", "error_of"]

_ATTEMPTS = 5
"""Attempts of a request that SCF refuses for its rate or fails to answer, with growing pauses."""
_TIMEOUT_SECONDS = 20
"""Longest time until a request is answered."""
_PAGE = 100
"""Functions of a page of a listing: the most that SCF sends."""
_ARGUMENTS = "-m region_agent.gateway.serverless.tencent"
_UNAUTHENTICATED = "AuthFailure"
_FORBIDDEN = ("UnauthorizedOperation", "AuthFailure.UnauthorizedOperation")
_QUOTA = (
    "LimitExceeded", "FailedOperation.InsufficientBalance", "FailedOperation.AccountInsufficient",
    "FailedOperation.ReservedExceedTotal", "ResourceUnavailable.InsufficientBalance",
)  # fmt: skip
_PASSING = (
    "InternalError", "RequestLimitExceeded", "FailedOperation.OperationConflict", "FailedOperation.ReservedInProgress",
    "FailedOperation.FunctionStatusError", "FailedOperation.FunctionNameStatusError", "ClientNetworkError",
    "ServerNetworkError",
)  # fmt: skip
_NO_IMAGE = ("InvalidParameterValue.ImageUri", "InvalidParameterValue.RegistryId", "ResourceNotFound.ImageConfig")
_NO_ROOM = ("FailedOperation.InsufficientResources",)
_TOO_LARGE = ("InvalidParameter.RequestTooLarge", "InvalidParameter.Payload", "InvalidParameterValue.ClientContext")
_REPEATED = ("RequestLimitExceeded", "InternalError", "ClientNetworkError", "ServerNetworkError")
_GONE = ("ResourceNotFound.Function", "ResourceNotFound.FunctionName")
_IN_USE = (
    "ResourceInUse.Function", "FailedOperation.FunctionStatusError", "FailedOperation.OperationConflict",
    "FailedOperation.ReservedInProgress",
)  # fmt: skip
"""The function is there already, or SCF is changing it."""
_MOST_TEXT = 500
"""Longest text of an error that is passed on, in characters."""


class _InUse(GeofedError):
    """A request that SCF does not take in the function's present state."""


class ScfFunctions:
    """The region's functions at SCF."""

    def __init__(self, settings: ScfGateway) -> None:
        try:
            from tencentcloud.common.credential import DefaultCredentialProvider
            from tencentcloud.common.exception import TencentCloudSDKException
            from tencentcloud.common.profile.client_profile import ClientProfile
            from tencentcloud.common.profile.http_profile import HttpProfile
            from tencentcloud.scf.v20180416 import models, scf_client
        except ImportError:
            raise GeofedError(
                "CONFIG_INVALID", "the package tencentcloud-sdk-python-scf is missing", hint=install_hint("tencent")
            ) from None
        address = urlsplit(settings.endpoint)
        if address.scheme != "https" and not is_loopback(address.hostname or ""):
            raise GeofedError("PLAINTEXT_REFUSED", f"{settings.endpoint} would send secrets in plaintext; use https://")
        try:
            credentials = DefaultCredentialProvider().get_credential()
        except (TencentCloudSDKException, OSError) as error:
            hint = "give the agent credentials: a role of its machine, TENCENTCLOUD_SECRET_ID, or a profile"
            raise GeofedError("UNAUTHENTICATED", f"no credentials for Tencent Cloud: {error}", hint=hint) from error
        http = HttpProfile(protocol=address.scheme, endpoint=address.netloc, reqTimeout=_TIMEOUT_SECONDS)
        self._settings, self._models = settings, models
        self._credentials, self._profile, self._client_type = credentials, ClientProfile(httpProfile=http), scf_client

    def create(self, function: Hosted) -> None:
        """Make a function; the rest is set when it is active."""
        settings = self._settings
        image = {"ImageType": settings.image_type, "ImageUri": function.image, "Command": "python", "Args": _ARGUMENTS}
        image |= {"RegistryId": settings.registry_id} if settings.registry_id else {}
        given: dict[str, Any] = {
            **self._named(function.name),
            # The port that names a job image: nothing listens.
            "Code": {"ImageConfig": {**image, "ImagePort": -1}},
            "Type": "Event",
            "MemorySize": function.memory_mb,
            "Timeout": settings.life_seconds,
            "Tags": [{"Key": key, "Value": value} for key, value in function.tags.items()],
        }
        if settings.vpc:
            given["VpcConfig"] = {"VpcId": settings.vpc, "SubnetId": settings.subnet}
        if settings.role:
            given["Role"] = settings.role
        # A name is used once: a function that is there was made by a request whose answer was lost.
        with contextlib.suppress(_InUse):
            self._ask("CreateFunction", "a function could not be made", given)

    def is_ready(self, name: str) -> bool:
        """Whether a function that was made is active; its events are then not repeated, and its concurrency is set."""
        try:
            return self._is_set_up(name)
        except (NoFunction, _InUse):
            return False

    def _is_set_up(self, name: str) -> bool:
        named = self._named(name)
        found = self._ask("GetFunction", f"function {name} could not be looked at", {**named, "ShowCode": "FALSE"})
        if found.Status in ("CreateFailed", "UpdateFailed"):
            reasons = "; ".join(f"{one.ErrorCode}: {one.ErrorMessage}" for one in found.StatusReasons or ())
            code = next((one.ErrorCode for one in found.StatusReasons or ()), "")
            raise error_of(code, reasons or str(found.StatusDesc), "SCF cannot run the function")
        if found.Status != "Active":
            return False
        once = {"RetryConfig": [{"RetryNum": 0}], "MsgTTL": EVENT_SECONDS}
        what = "the repetition of events could not be switched off"
        self._ask("UpdateFunctionEventInvokeConfig", what, {**named, "AsyncTriggerConfig": once})
        if self._settings.reserved_concurrency is not None:
            memory = self._settings.reserved_concurrency * int(found.MemorySize)
            what = "concurrency could not be reserved"
            self._ask("PutReservedConcurrencyConfig", what, {**named, "ReservedConcurrencyMem": memory})
        return True

    def start(self, name: str, event: bytes) -> None:
        """Start an invocation asynchronously."""
        given = {**self._named(name), "InvocationType": "Event", "ClientContext": event.decode()}
        self._ask("Invoke", "an invocation could not be started", given)

    def delete(self, name: str) -> None:
        """Delete a function, if it is there."""
        with contextlib.suppress(NoFunction):
            self._ask("DeleteFunction", f"function {name} could not be deleted", self._named(name))

    def names(self, mark: str) -> list[str]:
        """Return the names of a gateway's functions, by their tag."""
        found: list[str] = []
        given: dict[str, Any] = {
            "Namespace": self._settings.namespace, "SearchKey": f"geofed-{mark}-", "Offset": 0, "Limit": _PAGE,
        }  # fmt: skip
        while True:
            page = self._ask("ListFunctions", "the functions could not be listed", given)
            held = page.Functions or []
            found += [one.FunctionName for one in held if _tag(one.Tags, GATEWAY_TAG) == mark]
            given["Offset"] += len(held)
            if not held or given["Offset"] >= (page.TotalCount or 0):
                return found

    def examine(self, function: Hosted, workers: int, wait: Callable[[], None]) -> str:
        """Make a function and delete it. SCF checks no invocation without running it."""
        usage = self._ask("GetAccount", "the account could not be asked for", {}).AccountUsage
        free = int(usage.TotalConcurrencyMem) - int(usage.TotalAllocatedConcurrencyMem or 0)
        wanted = 2 * workers * function.memory_mb
        if self._settings.reserved_concurrency is None and free < wanted:
            text = f"SCF has {free} MB for concurrent invocations; {workers} workers need {wanted} MB when replaced"
            hint = "have the account's concurrency raised, or lower `capacity`"
            raise GeofedError("LIMIT_EXCEEDED", text, hint=hint)
        try:
            self.create(function)
            while not self.is_ready(function.name):
                wait()
            self.names(function.tags[GATEWAY_TAG])
        except GeofedError:
            with contextlib.suppress(GeofedError):
                self.delete(function.name)
            raise
        self.delete(function.name)
        return f"SCF in {self._settings.tencent_region}: may make functions, {free} MB for concurrent invocations"

    def _named(self, name: str) -> dict[str, str]:
        return {"FunctionName": name, "Namespace": self._settings.namespace}

    def _ask(self, action: str, what: str, given: Mapping[str, Any]) -> Any:
        from tencentcloud.common.exception import TencentCloudSDKException

        request = getattr(self._models, f"{action}Request")()
        request._deserialize(dict(given))

        def once() -> Any:
            # A client of its own for each: the SDK's keeps state of a request.
            client = self._client_type.ScfClient(self._credentials, self._settings.tencent_region, self._profile)
            return getattr(client, action)(request)

        repeated = retry_if_exception(
            lambda error: isinstance(error, TencentCloudSDKException) and str(error.code).startswith(_REPEATED)
        )
        wait = wait_random_exponential(multiplier=0.5, max=8)
        try:
            return Retrying(retry=repeated, wait=wait, stop=stop_after_attempt(_ATTEMPTS), reraise=True)(once)
        except TencentCloudSDKException as error:
            code, told = str(error.code), error_of(str(error.code), str(error.message), what)
            if code.startswith(_GONE):
                raise NoFunction("GATEWAY_UNAVAILABLE", told.message) from error
            if code.startswith(_IN_USE):
                raise _InUse("GATEWAY_UNAVAILABLE", told.message) from error
            raise told from error


def error_of(code: str, message: str, what: str) -> GeofedError:
    """Return an error of SCF's API as one of ours."""
    line = " ".join(message.split())
    text = f"{what}: SCF answers {code}: {line if len(line) <= _MOST_TEXT else line[: _MOST_TEXT - 1] + '…'}"
    if code.startswith(_FORBIDDEN):
        return GeofedError("FORBIDDEN", text, hint="give the agent's identity the rights in docs/scf.md")
    if code.startswith(_UNAUTHENTICATED):
        return GeofedError("UNAUTHENTICATED", text, hint="renew the agent's credentials for Tencent Cloud")
    if code.startswith(_NO_IMAGE) or "image" in message.lower():
        return GeofedError("IMAGE_UNAVAILABLE", text)
    if code.startswith(_NO_ROOM):
        return GeofedError("FUNCTION_UNSCHEDULABLE", text)
    if code.startswith(_TOO_LARGE):
        return GeofedError("LIMIT_EXCEEDED", text, hint="the job's environment and secrets are too large")
    if code.startswith(_QUOTA):
        hint = "have the account's quota raised, delete functions, or lower `gateway.reservedConcurrency`"
        return GeofedError("QUOTA_EXCEEDED", text, hint=hint)
    if code.startswith(_PASSING):
        return GeofedError("GATEWAY_UNAVAILABLE", text)
    return GeofedError("CONFIG_INVALID", text, hint="correct `gateway` in the region file")


def _tag(tags: Any, key: str) -> str:
    return next((str(one.Value) for one in tags or () if one.Key == key), "")
