"""The routes below ``/system/``."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import json
import platform
from collections.abc import AsyncIterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from geofed_pb.bounds import parts_of
from region_agent.gateway.embedded.logs import LogQuery
from region_agent.gateway.embedded.provider import Provider
from region_agent.gateway.embedded.replica_table import Refused, ScaleFunction
from region_agent.gateway.functions import FunctionSpec, LogLine, parse_timestamp

__all__ = ["NAMESPACE", "SystemRoutes", "function_name"]

NAMESPACE = "openfaas-fn"
"""The only namespace of the embedded gateway, with the name of the default one of OpenFaaS."""
_MAX_BODY_BYTES = 2 * 2**20
"""Largest body of a request."""
_LOG_PART_CHARACTERS = 64 << 10
"""Characters of log lines that are sent at a time."""
_LOG_PART_LINES = 500
"""Log lines that are sent at a time."""


class SystemRoutes:
    """Routes for the gateway's operator."""

    def __init__(self, provider: Provider) -> None:
        self._provider = provider

    def routes(self) -> list[Route]:
        """Routes for the application."""
        return [
            Route("/system/info", self.info),
            Route("/system/functions", self.list),
            Route("/system/functions", self.deploy, methods=["POST"]),
            Route("/system/functions", self.update, methods=["PUT"]),
            Route("/system/functions", self.delete, methods=["DELETE"]),
            Route("/system/function/{name}", self.get),
            Route("/system/scale-function/{name}", self.scale, methods=["POST"]),
            Route("/system/secrets", self.list_secrets),
            Route("/system/secrets", self.change_secret, methods=["POST", "PUT", "DELETE"]),
            Route("/system/logs", self.logs),
            Route("/system/namespaces", self.namespaces),
            Route("/system/namespace/{name}", self.namespace),
            Route("/system/namespace/{name}", self.change_namespace, methods=["POST", "PUT", "DELETE"]),
        ]

    async def info(self, request: Request) -> Response:
        """Provider, version, architecture, and how functions are isolated."""
        try:
            release = version("geofed")
        except PackageNotFoundError:
            release = "unknown"
        bare = self._provider.table.limits.bare
        return JSONResponse(
            {
                "provider": {
                    "provider": "faasd" if bare else "geofed-embedded",
                    "orchestration": "containerd" if bare else self._provider.orchestration,
                    "host": self._provider.host,
                    "version": {"sha": "", "release": release},
                    "isolation": dataclasses.asdict(self._provider.isolation),
                    **({} if bare else {"profile": self._provider.config.profile}),
                },
                "version": {"sha": "", "release": release, "commit_message": ""},
                "arch": platform.machine(),
            }
        )

    async def list(self, request: Request) -> Response:
        """All functions."""
        check_namespace(request.query_params.get("namespace"))
        return JSONResponse([self._status(name) for name in self._provider.table.names()])

    async def get(self, request: Request) -> Response:
        """One function, with its usage if asked."""
        check_namespace(request.query_params.get("namespace"))
        name = function_name(request.path_params["name"])
        body = self._status(name)
        if request.query_params.get("usage") in ("1", "true"):
            body["usage"] = self._provider.usage(name)
        return JSONResponse(body)

    async def deploy(self, request: Request) -> Response:
        """Create a function, or change it if it exists."""
        self._provider.deploy(_spec(await _json(request)))
        return Response(b"", 202)

    async def update(self, request: Request) -> Response:
        """Change a function that exists."""
        spec = _spec(await _json(request))
        self._provider.table.spec(spec.service)
        self._provider.deploy(spec)
        return Response(b"", 202)

    async def delete(self, request: Request) -> Response:
        """Remove a function."""
        body = await _json(request)
        check_namespace(body.get("namespace"))
        self._provider.delete(_member(body, "functionName"))
        return Response(b"", 202)

    async def scale(self, request: Request) -> Response:
        """Set the number of replicas."""
        body = await _json(request)
        check_namespace(body.get("namespace"))
        replicas = body.get("replicas")
        if not isinstance(replicas, int) or isinstance(replicas, bool):
            raise Refused(400, f"replicas {replicas!r} is not a whole number")
        self._provider.apply(ScaleFunction(function_name(request.path_params["name"]), replicas))
        return Response(b"", 202)

    async def list_secrets(self, request: Request) -> Response:
        """Names of all secrets."""
        check_namespace(request.query_params.get("namespace"))
        return JSONResponse([{"name": name, "namespace": NAMESPACE} for name in self._provider.secrets.names()])

    async def change_secret(self, request: Request) -> Response:
        """Create, replace or remove a secret."""
        body = await _json(request)
        check_namespace(body.get("namespace"))
        name = _member(body, "name")
        match request.method:
            case "POST":
                self._provider.secrets.create(name, _secret_value(body))
                return Response(b"", 201)
            case "PUT":
                self._provider.secrets.update(name, _secret_value(body))
                return Response(b"", 200)
            case _:
                self._provider.secrets.delete(name)
                return Response(b"", 204)

    async def logs(self, request: Request) -> Response:
        """Lines of a function's replicas as NDJSON."""
        if self._provider.table.limits.bare and not request.query_params.get("name"):
            return Response(b"", media_type="application/x-ndjson")
        query = _log_query(request)
        self._provider.table.spec(query.name)
        return StreamingResponse(self._ndjson(query), media_type="application/x-ndjson")

    async def namespaces(self, request: Request) -> Response:
        """The one namespace."""
        return JSONResponse([NAMESPACE])

    async def namespace(self, request: Request) -> Response:
        """The one namespace, described."""
        if request.path_params["name"] != NAMESPACE or self._provider.table.limits.bare:
            raise Refused(404, f"namespace {request.path_params['name']} does not exist")
        return JSONResponse({"name": NAMESPACE, "annotations": {"openfaas": "1"}, "labels": {}})

    async def change_namespace(self, request: Request) -> Response:
        """Answer 501: there is only one namespace."""
        return PlainTextResponse("the embedded gateway has one namespace", 501)

    def _status(self, name: str) -> dict[str, Any]:
        return {**self._provider.status(name).as_json(), "namespace": NAMESPACE}

    async def _ndjson(self, query: LogQuery) -> AsyncIterator[bytes]:
        async for lines in self._provider.logs.read(query):
            for part in parts_of(lines, lambda line: len(line.text), _LOG_PART_CHARACTERS, _LOG_PART_LINES):
                yield b"".join(json.dumps(_log_json(line)).encode() + b"\n" for line in part)


def function_name(route: str) -> str:
    """Return the function in a route, which may have the namespace after a dot; raises ``Refused`` 404."""
    name, _, namespace = route.partition(".")
    check_namespace(namespace)
    return name


def check_namespace(namespace: object) -> None:
    """Raise ``Refused`` 404 for any namespace but the only one."""
    if namespace and namespace != NAMESPACE:
        raise Refused(404, f"namespace {namespace} does not exist; the embedded gateway has only {NAMESPACE}")


async def _json(request: Request) -> dict[str, Any]:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > _MAX_BODY_BYTES:
            raise Refused(413, f"the body exceeds {_MAX_BODY_BYTES} bytes")
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise Refused(400, "the body must be a JSON object")
    return parsed


def _spec(body: dict[str, Any]) -> FunctionSpec:
    check_namespace(body.get("namespace"))
    try:
        return FunctionSpec.from_json({**body, "namespace": NAMESPACE})
    except ValueError as error:
        raise Refused(400, str(error)) from error


def _member(body: dict[str, Any], key: str) -> str:
    value = body.get(key)
    if not isinstance(value, str) or not value:
        raise Refused(400, f"{key} is missing")
    return value


def _secret_value(body: dict[str, Any]) -> bytes:
    if isinstance(raw := body.get("rawValue"), str) and raw:
        try:
            return base64.b64decode(raw, validate=True)
        except binascii.Error as error:
            raise Refused(400, f"rawValue is not base64: {error}") from error
    return _member(body, "value").encode()


def _log_query(request: Request) -> LogQuery:
    given = request.query_params
    try:
        tail, since = given.get("tail"), given.get("since")
        query = LogQuery(
            name=function_name(given.get("name", "")),
            instance=given.get("instance", ""),
            tail=int(tail) if tail else None,
            since=parse_timestamp(since) if since else None,
            follow=given.get("follow", "").lower() in ("1", "true"),
        )
        if not query.name or (query.tail is not None and query.tail < 0):
            raise ValueError("name is missing, or tail is negative")
        if query.since is not None and query.since.tzinfo is None:
            raise ValueError("since needs a time zone")
    except ValueError as error:
        raise Refused(422, f"the query cannot be read: {error}") from error
    return query


def _log_json(line: LogLine) -> dict[str, str]:
    return {
        "name": line.name,
        "namespace": NAMESPACE,
        "instance": line.instance,
        "timestamp": line.timestamp.isoformat().replace("+00:00", "Z"),
        "text": line.text,
    }
