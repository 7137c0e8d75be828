"""Client of the OpenFaaS REST API, for the embedded gateway and for OpenFaaS itself."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ipaddress
import json
import ssl
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import httpx2
from tenacity import retry_if_exception, retry_if_result
from tenacity.retry import retry_base

from geofed_pb.errors import GeofedError
from geofed_pb.platforms import EDITIONS, Edition, edition_of
from region_agent.gateway.functions import (
    DIGEST_ANNOTATION,
    EXIT_HEADER,
    INTERNAL_HEADER,
    BasicAuth,
    FunctionSpec,
    FunctionStatus,
    LogLine,
    Response,
    parse_timestamp,
)
from region_agent.gateway.quantities import format_duration
from region_agent.gateway.retry import RetryPolicy, is_retryable
from region_agent.gateway.unix_sockets import UnixTransport

__all__ = ["GatewayClient"]

_SYSTEM_TIMEOUT = timedelta(seconds=30)
"""Timeout of a request to a system route."""
_DELETE_TIMEOUT = timedelta(seconds=60)
"""Timeout of a request to delete or replace a function: a platform may wait 30 s for its container."""
_DELETE_RETRY = RetryPolicy(deadline=timedelta(seconds=90), first=timedelta(milliseconds=500))
"""When a deletion that failed is repeated: a platform may fail to delete what was still running a moment ago."""
_CONNECT_TIMEOUT_S = 10.0
"""Timeout of a connection."""
_PROBE_TIMEOUT = timedelta(seconds=5)
"""Timeout of the question whether a function is ready."""
_ANSWER_GRACE = timedelta(seconds=5)
"""Time beyond a call's timeout for the gateway's own 504 to arrive."""
_MAY_PASS = retry_if_exception(
    lambda error: isinstance(error, GeofedError) and error.code == "GATEWAY_UNAVAILABLE"
) | retry_if_result(lambda answer: is_retryable(answer.status_code, answer.headers))
"""Failures of a request that may be temporary."""
_SERVER_FAILED = retry_if_result(lambda answer: answer.status_code >= 500)
_HOPELESS = frozenset(
    {
        "CONFIG_INVALID", "FORBIDDEN", "FUNCTION_UNSCHEDULABLE", "IMAGE_UNAVAILABLE", "LIMIT_EXCEEDED",
        "QUOTA_EXCEEDED", "UNAUTHENTICATED",
    }
)  # fmt: skip
"""Codes of replicas that will not start soon by themselves."""
_UNREACHABLE = "Can't reach service"
"""Text of OpenFaaS for a function that does not listen yet, or has ended during a call."""
_UNKNOWN = "error finding function"
"""Text of OpenFaaS for a function that is not deployed, in an answer without its header."""
_ENDED_HINT = (
    "its container does not listen, or has ended during the call, as one does that uses more memory than its limit: "
    "see its log, and raise function.memoryMb if that is the reason"
)


class GatewayClient:
    """Client of one gateway, with pooled connections; an async context manager.

    ``url`` is ``https://host:port``, ``http://`` on a loopback address only, or ``unix:///path``. ``verify`` is
    an SSL context or the path of the CA's PEM file; ``None`` uses the system's authorities. Credentials are sent to
    the system routes only, never to a function.

    Every method raises ``GeofedError``: ``GATEWAY_UNAVAILABLE``, ``UNAUTHENTICATED``, ``FUNCTION_NOT_FOUND``,
    ``FUNCTION_BUSY``, ``FUNCTION_TIMEOUT``, ``FUNCTION_OUT_OF_MEMORY``, ``FUNCTION_FAILED``, ``LIMIT_EXCEEDED``.
    """

    def __init__(
        self,
        url: str,
        *,
        auth: BasicAuth | None = None,
        verify: ssl.SSLContext | str | Path | None = None,
        namespace: str = "",
        retry: RetryPolicy | None = None,
        edition: str = "auto",
    ) -> None:
        """``edition``: of OpenFaaS, a name in `EDITIONS`; "auto": by what the gateway says."""
        base, uds = _endpoint(url)
        self._url = url
        self._namespace = namespace
        self._retry = retry or RetryPolicy()
        self._configured_edition, self._edition = edition, None if edition == "auto" else EDITIONS[edition]
        self._auth = httpx2.BasicAuth(auth.user, auth.password) if auth else None
        context: ssl.SSLContext | bool = False
        if base.startswith("https"):
            context = verify if isinstance(verify, ssl.SSLContext) else ssl.create_default_context(cafile=verify)
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=64)
        over_tcp = httpx2.AsyncHTTPTransport(verify=context, limits=limits) if uds is None else None
        self._http = httpx2.AsyncClient(
            base_url=base,
            transport=over_tcp or UnixTransport(uds or "", limits),
            timeout=httpx2.Timeout(_SYSTEM_TIMEOUT.total_seconds(), connect=_CONNECT_TIMEOUT_S, pool=None),
            trust_env=False,
        )

    async def __aenter__(self) -> GatewayClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the pooled connections."""
        await self._http.aclose()

    # functions

    async def deploy(self, spec: FunctionSpec) -> None:
        """Create the function or bring it to this specification; returns before its replicas are ready.

        One that has the specification already is left alone, since a platform may restart it for any request.
        """
        spec = spec.marked()
        body = spec.as_json()
        if self._namespace and not spec.namespace:
            body["namespace"] = self._namespace
        answer = await self._send("GET", f"/system/function/{quote(spec.service)}", params=self._query(), accept=(404,))
        if answer.status_code != 404:
            there = _status(_json(answer)).spec.annotations.get(DIGEST_ANNOTATION)
            if there == spec.annotations[DIGEST_ANNOTATION]:
                return
            answer = await self._send(
                "PUT",
                "/system/functions",
                json_body=body,
                accept=(404,),
                timeout=_DELETE_TIMEOUT,
                repeat=_SERVER_FAILED,
            )
        if answer.status_code == 404:
            await self._send("POST", "/system/functions", json_body=body)

    async def delete(self, name: str) -> None:
        """Remove the function; one that does not exist is ``FUNCTION_NOT_FOUND``."""
        body = {"functionName": name, "namespace": self._namespace}
        await self._send("DELETE", "/system/functions", json_body=body, timeout=_DELETE_TIMEOUT, repeat=_SERVER_FAILED)

    async def put_secret(self, name: str, value: bytes) -> None:
        """Create a secret or replace its value; replicas that start afterwards have it."""
        text = base64.b64encode(value).decode()
        body = {"name": name, "namespace": self._namespace, "rawValue": text}
        answer = await self._send("PUT", "/system/secrets", json_body=body, accept=(404,))
        if answer.status_code == 404:
            await self._send("POST", "/system/secrets", json_body=body)

    async def delete_secret(self, name: str) -> None:
        """Remove a secret, if there is one of this name; replicas that run keep it."""
        body = {"name": name, "namespace": self._namespace}
        await self._send("DELETE", "/system/secrets", json_body=body, accept=(404,))

    async def list_secrets(self) -> tuple[str, ...]:
        """Names of all secrets of the namespace; a platform never returns values."""
        found = _json(await self._send("GET", "/system/secrets", params=self._query())) or ()
        return tuple(str(one["name"]) for one in found if isinstance(one, dict) and "name" in one)

    async def list(self) -> tuple[FunctionStatus, ...]:
        """All functions of the namespace."""
        answer = await self._send("GET", "/system/functions", params=self._query())
        return tuple(_status(item) for item in _json(answer) or ())

    async def get(self, name: str) -> FunctionStatus:
        """One function."""
        return _status(_json(await self._send("GET", f"/system/function/{quote(name)}", params=self._query())))

    async def scale(self, name: str, replicas: int) -> None:
        """Set the number of replicas; the community edition clamps it to 1..5, so ``get`` returns the actual number."""
        body = {"serviceName": name, "namespace": self._namespace, "replicas": replicas}
        await self._send("POST", f"/system/scale-function/{quote(name)}", json_body=body)

    async def wait_ready(self, name: str, replicas: int, timeout: timedelta) -> FunctionStatus:
        """Poll until exactly this number of replicas is available, and the function answers that it is ready.

        Platforms report a container as available before it listens. Raises ``FUNCTION_FAILED`` after the timeout, or
        the error of the replicas if the gateway tells it, and at once if they will not start without a change.
        """
        deadline = time.monotonic() + timeout.total_seconds()
        pause_s, failures = 0.01, -1
        while True:
            status = await self.get(name)
            failure = status.failure
            if failure is not None and failure.code in _HOPELESS and 0 <= failures < failure.count:
                raise failure.error
            # What is there at the beginning may be of an earlier attempt.
            failures = max(failures, 0 if failure is None else failure.count)
            there = status.replicas == replicas and status.available_replicas == replicas
            # A function without replicas is started by a call.
            answers = (there or (replicas > 0 and not status.replicas)) and await self.answers(name)
            if there and (answers or not replicas):
                return status
            if time.monotonic() + pause_s > deadline:
                if failure is not None and not there:
                    raise failure.error
                raise GeofedError(
                    "FUNCTION_FAILED",
                    f"function {name}: {status.available_replicas} of {replicas} replicas are available "
                    f"after {timeout.total_seconds():g} s (the gateway wants {status.replicas})"
                    + (", but it does not answer at /_/ready" if there else ""),
                )
            await asyncio.sleep(pause_s)
            pause_s = min(0.5, pause_s * 1.5)

    async def wait_answering(self, name: str, timeout: timedelta) -> None:
        """Poll until a replica answers that it is ready, or that it is busy; raises ``FUNCTION_FAILED``."""
        deadline, pause_s = time.monotonic() + timeout.total_seconds(), 0.01
        while not await self.answers(name):
            if time.monotonic() + pause_s > deadline:
                text = f"function {name} does not answer at /_/ready after {timeout.total_seconds():g} s"
                raise GeofedError("FUNCTION_FAILED", text, hint=_ENDED_HINT)
            await asyncio.sleep(pause_s)
            pause_s = min(0.5, pause_s * 1.5)

    async def answers(self, name: str) -> bool:
        """Whether the function itself answers; raises ``FUNCTION_NOT_FOUND`` and ``GATEWAY_UNAVAILABLE``."""
        url = f"/function/{self._route(name)}/_/ready"
        with self._transport_errors():
            answer = await self._http.get(url, timeout=_call_timeout(_PROBE_TIMEOUT))
        if answer.status_code == 404 and _is_infrastructure(answer):
            raise self._failure(answer, name)
        return answer.status_code == 429 or not _is_infrastructure(answer)

    # calls

    async def invoke(
        self,
        name: str,
        body: bytes = b"",
        *,
        headers: Mapping[str, str] | None = None,
        timeout: timedelta = timedelta(seconds=60),
        call_id: str | None = None,
        idempotent: bool = False,
    ) -> Response:
        """Call the function and wait for its answer.

        A status that the function itself chose comes back as a ``Response``, whatever it is; failures of the
        infrastructure raise. They are retried only if ``idempotent``, within the retry policy's deadline.
        """
        call_id = call_id or str(uuid.uuid4())
        sent = {**(headers or {}), "X-Call-Id": call_id, "X-Timeout": format_duration(timeout)}
        request = self._http.build_request(
            "POST", f"/function/{self._route(name)}", content=body, headers=sent, timeout=_call_timeout(timeout)
        )
        answer = await self._attempts(request, idempotent=idempotent)
        if _is_infrastructure(answer):
            raise self._failure(answer, name)
        return Response(name, answer.status_code, dict(answer.headers), answer.content, call_id)

    async def logs(
        self, name: str, *, tail: int | None = None, since: datetime | None = None, follow: bool = False
    ) -> AsyncIterator[LogLine]:
        """Lines of all replicas in order of arrival; with ``follow`` it ends when the function is deleted."""
        query: dict[str, str] = {**self._query(), "name": name, "follow": "true" if follow else "false"}
        if tail is not None:
            query["tail"] = str(tail)
        if since is not None:
            query["since"] = since.isoformat()
        request = self._http.build_request("GET", "/system/logs", params=query)
        if follow:
            request.extensions["timeout"] = {**request.extensions["timeout"], "read": None}
        with self._transport_errors():
            answer = await self._http.send(request, auth=self._auth, stream=True)
            try:
                if answer.status_code != 200:
                    await answer.aread()
                    raise self._failure(answer, name)
                async for line in answer.aiter_lines():
                    if line.strip():
                        yield _log_line(line)
            finally:
                await answer.aclose()

    # the gateway itself

    async def info(self) -> dict[str, Any]:
        """Provider, version and architecture."""
        return dict(_json(await self._send("GET", "/system/info")))

    async def edition(self) -> Edition:
        """The gateway's edition, asked for once."""
        if self._edition is None:
            provider = (await self.info()).get("provider")
            self._edition = edition_of(provider if isinstance(provider, dict) else {}, self._configured_edition)
        return self._edition

    # requests

    async def _send(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        json_body: object = None,
        accept: tuple[int, ...] = (),
        timeout: timedelta = _SYSTEM_TIMEOUT,
        repeat: retry_base | None = None,
    ) -> httpx2.Response:
        """Send a request to a system route, with retries, since all of them are idempotent.

        ``repeat``: answers that are worth repeated requests for a while longer.
        """
        request = self._http.build_request(
            method, path, params=params, json=json_body,
            timeout=httpx2.Timeout(timeout.total_seconds(), connect=_CONNECT_TIMEOUT_S, pool=None),
        )  # fmt: skip
        answer = await self._attempts(request, idempotent=True, auth=self._auth, repeat=repeat)
        if answer.is_success or answer.status_code in accept:
            return answer
        raise self._failure(answer, _subject(json_body) or path)

    async def _attempts(
        self,
        request: httpx2.Request,
        *,
        idempotent: bool,
        auth: httpx2.BasicAuth | None = None,
        repeat: retry_base | None = None,
    ) -> httpx2.Response:
        async def once() -> httpx2.Response:
            with self._transport_errors():
                return await self._http.send(request, auth=auth)

        if not idempotent:
            return await once()
        retrying = self._retry.retrying(_MAY_PASS)
        return await (retrying(once) if repeat is None else _DELETE_RETRY.retrying(repeat)(retrying, once))

    @contextlib.contextmanager
    def _transport_errors(self) -> Any:
        try:
            yield
        except httpx2.ReadTimeout as error:
            raise GeofedError("FUNCTION_TIMEOUT", f"the gateway at {self._url} did not answer in time") from error
        except (httpx2.HTTPError, OSError) as error:
            text = str(error) or type(error).__name__
            raise GeofedError("GATEWAY_UNAVAILABLE", f"the gateway at {self._url} does not answer: {text}") from error

    def _failure(self, answer: httpx2.Response, subject: str) -> GeofedError:
        text = answer.text[:500].strip() or f"status {answer.status_code}"
        status = answer.status_code
        if status in (401, 403):
            return GeofedError("UNAUTHENTICATED", f"the gateway at {self._url} refused the user or password")
        if answer.headers.get(EXIT_HEADER) == "memory":
            return GeofedError("FUNCTION_OUT_OF_MEMORY", text)
        if answer.headers.get(EXIT_HEADER) == "evicted":
            return GeofedError("FUNCTION_EVICTED", text)
        if status == 413:
            return GeofedError("LIMIT_EXCEEDED", text)
        codes = {404: "FUNCTION_NOT_FOUND", 429: "FUNCTION_BUSY", 504: "FUNCTION_TIMEOUT"}
        if status in codes:
            return GeofedError(codes[status], text)
        if status == 500 and _UNREACHABLE in text:
            return GeofedError("FUNCTION_FAILED", f"{subject}: {text}", hint=_ENDED_HINT)
        if status in (502, 503):
            return GeofedError("GATEWAY_UNAVAILABLE", f"{subject}: {text}")
        return GeofedError("FUNCTION_FAILED", f"{subject}: {text}")

    def _query(self) -> dict[str, str]:
        return {"namespace": self._namespace} if self._namespace else {}

    def _route(self, name: str) -> str:
        return quote(f"{name}.{self._namespace}" if self._namespace else name)


def _endpoint(url: str) -> tuple[str, str | None]:
    """Return the base URL and the path of the unix socket; raises if data would leave this machine in plaintext."""
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return "http://gateway", parts.path
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise GeofedError("CONFIG_INVALID", f"{url!r} is not the address of a gateway; write https://host:port")
    if parts.scheme == "http" and not is_loopback(parts.hostname):
        raise GeofedError("PLAINTEXT_REFUSED", f"{url} would send credentials and data in plaintext; use https://")
    return url.rstrip("/"), None


def is_loopback(host: str) -> bool:
    """True for an address that never leaves this machine."""
    if host == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


def _call_timeout(timeout: timedelta) -> httpx2.Timeout:
    """Return a timeout slightly longer than the gateway's, so that its own 504 arrives first."""
    return httpx2.Timeout((timeout + _ANSWER_GRACE).total_seconds(), connect=_CONNECT_TIMEOUT_S, pool=None)


def _is_infrastructure(answer: httpx2.Response) -> bool:
    status = answer.status_code
    if status == 401 or status in (429, 502, 503, 504):
        return True
    if status == 404 and answer.text.startswith(_UNKNOWN):
        return True
    return status >= 400 and (INTERNAL_HEADER in answer.headers or EXIT_HEADER in answer.headers)


def _json(answer: httpx2.Response) -> Any:
    try:
        return answer.json()
    except ValueError as error:
        raise GeofedError("GATEWAY_UNAVAILABLE", f"{answer.url} did not answer with JSON; is it a gateway?") from error


def _status(body: Mapping[str, Any]) -> FunctionStatus:
    try:
        return FunctionStatus.from_json(body)
    except (ValueError, TypeError) as error:
        raise GeofedError("GATEWAY_UNAVAILABLE", f"the gateway's answer cannot be read: {error}") from error


def _log_line(text: str) -> LogLine:
    body = json.loads(text)
    return LogLine(body["name"], body.get("instance", ""), parse_timestamp(body["timestamp"]), body.get("text", ""))


def _subject(body: object) -> str:
    """Return the function or secret that a request names."""
    names = ("service", "functionName", "serviceName", "name")
    return next((str(body[name]) for name in names if name in body), "") if isinstance(body, dict) else ""
