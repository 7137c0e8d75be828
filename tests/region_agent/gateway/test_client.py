"""The client's own rules: when it retries, what it refuses, how it reads notations; and the callback receiver."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from tenacity import RetryCallState, retry_always

import region_agent.gateway
from geofed_pb.errors import CATALOGUE, GeofedError
from region_agent.gateway import (
    FunctionSpec,
    FunctionStatus,
    GatewayClient,
    RetryPolicy,
    fixed_scale_labels,
    timeout_env,
)
from region_agent.gateway.embedded.config import Config, parse
from region_agent.gateway.quantities import format_duration, parse_cpu, parse_duration, parse_memory_bytes

FAST = RetryPolicy(deadline=timedelta(seconds=1), first=timedelta(milliseconds=1))


@asynccontextmanager
async def gateway_that(answers: Callable[[Request], Response]) -> AsyncIterator[tuple[GatewayClient, list[Request]]]:
    """A client of a gateway that answers as told, and what it was asked."""
    seen: list[Request] = []

    async def endpoint(request: Request) -> Response:
        seen.append(request)
        return answers(request)

    app = Starlette(routes=[Route("/{rest:path}", endpoint, methods=["GET", "POST", "PUT", "DELETE"])])
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, ws="none", lifespan="off"))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        async with GatewayClient(f"http://127.0.0.1:{listener.getsockname()[1]}", retry=FAST) as client:
            yield client, seen
        server.should_exit = True
        await serving


def failing(times: int, status: int, headers: dict[str, str]) -> Callable[[Request], Response]:
    remaining = iter([True] * times)
    return lambda _: PlainTextResponse("no", status, headers) if next(remaining, False) else PlainTextResponse("yes")


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("status", "headers", "retried"),
    [
        (429, {}, True),
        (502, {}, True),
        (503, {}, True),
        (504, {}, True),
        (500, {"X-OpenFaaS-Internal": "proxy"}, True),
        (404, {"X-OpenFaaS-Internal": "gateway"}, False),
        (500, {}, False),
        (500, {"X-OpenFaaS-Internal": "proxy", "X-Geofed-Exit": "memory"}, False),
        (504, {"X-OpenFaaS-Internal": "proxy", "X-Geofed-Exit": "timeout"}, False),
    ],
)
async def test_idempotent_calls_are_retried_where_it_may_help(
    status: int, headers: dict[str, str], retried: bool
) -> None:
    async with gateway_that(failing(2, status, headers)) as (client, seen):
        if retried:
            assert (await client.invoke("f", idempotent=True)).body == b"yes"
            assert len({request.headers["X-Call-Id"] for request in seen}) == 1
        elif status == 500 and not headers:
            assert (await client.invoke("f", idempotent=True)).status == 500
        else:
            with pytest.raises(GeofedError):
                await client.invoke("f", idempotent=True)
        assert len(seen) == (3 if retried else 1)


@pytest.mark.anyio
async def test_other_calls_are_never_retried() -> None:
    async with gateway_that(failing(9, 503, {"X-OpenFaaS-Internal": "proxy"})) as (client, seen):
        with pytest.raises(GeofedError) as caught:
            await client.invoke("f")
        assert caught.value.code == "GATEWAY_UNAVAILABLE"
        assert len(seen) == 1


@pytest.mark.anyio
async def test_retries_end_at_the_deadline() -> None:
    async with gateway_that(lambda _: PlainTextResponse("busy", 429)) as (client, seen):
        began = asyncio.get_running_loop().time()
        with pytest.raises(GeofedError) as caught:
            await client.invoke("f", idempotent=True)
        assert caught.value.code == "FUNCTION_BUSY"
        assert len(seen) > 3
        assert asyncio.get_running_loop().time() - began < 3


@pytest.mark.anyio
async def test_gateway_that_is_not_there_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    async with GatewayClient(f"http://127.0.0.1:{port}", retry=FAST) as client:
        with pytest.raises(GeofedError, match=str(port)) as caught:
            await client.list()
        assert caught.value.code == "GATEWAY_UNAVAILABLE"
        assert caught.value.retryable


@pytest.mark.anyio
async def test_something_else_that_answers_is_not_taken_for_a_gateway() -> None:
    async with gateway_that(lambda _: PlainTextResponse("<html>")) as (client, _):
        with pytest.raises(GeofedError, match="is it a gateway"):
            await client.info()


def test_plaintext_beyond_this_machine_is_refused() -> None:
    with pytest.raises(GeofedError) as caught:
        GatewayClient("http://gateway.example:8080")
    assert caught.value.code == "PLAINTEXT_REFUSED"
    with pytest.raises(GeofedError) as caught:
        GatewayClient("gateway.example")
    assert caught.value.code == "CONFIG_INVALID"


@given(st.integers(0, 50))
def test_waits_grow_within_their_bounds(attempt: int) -> None:
    policy = RetryPolicy()
    state = RetryCallState(policy.retrying(retry_always), None, (), {})
    state.attempt_number = attempt + 1
    assert timedelta(0) <= timedelta(seconds=policy.waits(state)) <= min(policy.longest, policy.first * 2**attempt)


# notations


def test_quantities() -> None:
    assert parse_memory_bytes("128Mi") == 128 * 2**20
    assert parse_memory_bytes("1.5G") == 1_500_000_000
    assert parse_cpu("100m") == 0.1
    assert parse_duration("1m30s") == timedelta(seconds=90)
    assert parse_duration("2") == timedelta(seconds=2)
    assert timeout_env(timedelta(minutes=2))["exec_timeout"] == "120s"
    for parse_one in (parse_memory_bytes, parse_cpu, parse_duration):
        with pytest.raises(ValueError, match="write it like"):
            parse_one("lots")


@given(st.integers(1, 10**9))
def test_durations_survive_their_notation(milliseconds: int) -> None:
    duration = timedelta(milliseconds=milliseconds)
    assert abs(parse_duration(format_duration(duration)) - duration) < timedelta(milliseconds=1)


def test_specification_survives_json() -> None:
    spec = FunctionSpec("f", "i", "ns", "p", {"A": "1"}, fixed_scale_labels(2), {"t": "u"}, ("s",), {"memory": "1Gi"})
    assert FunctionSpec.from_json(spec.as_json()) == spec
    status = FunctionStatus(spec, 2, 1, 7, None)
    assert FunctionStatus.from_json(status.as_json()) == status


# configuration


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        ({}, "CONFIG_INVALID"),
        ({"state_dir": "/s", "colour": 1}, "CONFIG_INVALID"),
        ({"state_dir": "/s", "max_inflight": "two"}, "CONFIG_INVALID"),
        ({"state_dir": "/s", "cold_start": "soon"}, "CONFIG_INVALID"),
        ({"state_dir": "/s", "profile": "pro"}, "CONFIG_INVALID"),
        ({"state_dir": "/s", "tls_cert": "/c"}, "CONFIG_INVALID"),
        ({"state_dir": "/s", "listen": "0.0.0.0:80"}, "PLAINTEXT_REFUSED"),
        ({"state_dir": "/s", "listen": "0.0.0.0:80", "tls_cert": "/c", "tls_key": "/k"}, "CONFIG_INVALID"),
    ],
)
def test_configuration_that_cannot_be(raw: dict, code: str) -> None:
    with pytest.raises(GeofedError) as caught:
        parse(raw, "here")
    assert caught.value.code == code


def test_configuration_that_can() -> None:
    config = parse({"state_dir": "/s", "cold_start": "1s", "hide_paths": ["/k"], "write_timeout": 5}, "here")
    assert isinstance(config, Config)
    assert (config.cold_start, config.write_timeout) == (timedelta(seconds=1), timedelta(seconds=5))
    assert config.hide_paths == ("/k",)


def test_public_surface_and_error_codes() -> None:
    assert sorted(region_agent.gateway.__all__) == [
        *("BasicAuth", "FunctionSpec", "FunctionStatus", "GatewayClient"),
        *("LogLine", "Response", "RetryPolicy", "fixed_scale_labels", "timeout_env"),
    ]
    for code in ("FUNCTION_NOT_FOUND", "FUNCTION_BUSY", "FUNCTION_TIMEOUT", "FUNCTION_OUT_OF_MEMORY"):
        assert code in CATALOGUE


def test_a_call_that_is_cancelled_as_its_answer_arrives_leaves_no_error(tmp_path: Path) -> None:
    """As when several workers fail at once, and the first answer ends the calls of the others."""

    async def act() -> list[dict[str, object]]:
        loop, errors = asyncio.get_running_loop(), list[dict[str, object]]()
        loop.set_exception_handler(lambda _, context: errors.append(context))
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(tmp_path / "api"))
            listener.listen()
            listener.setblocking(False)
            async with GatewayClient(f"unix://{tmp_path}/api", retry=FAST) as client:
                for answer in (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", b""):
                    call = asyncio.create_task(client.invoke("f", b"x" * 100, timeout=timedelta(seconds=30)))
                    line, _ = await loop.sock_accept(listener)
                    with line:
                        assert await loop.sock_recv(line, 1 << 16)
                        await asyncio.sleep(0.05)
                        line.send(answer) if answer else line.shutdown(socket.SHUT_RDWR)
                        loop.call_soon(call.cancel)
                        with pytest.raises(asyncio.CancelledError):
                            await call
                        await asyncio.sleep(0.05)
        return errors

    assert asyncio.run(act()) == []
