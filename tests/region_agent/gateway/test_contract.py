"""The OpenFaaS REST API as geofed uses it; the same tests hold the embedded gateway and a real one to it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import ssl
import uuid
from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime, timedelta

import httpx2
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from geofed_pb.errors import GeofedError
from region_agent.gateway import FunctionSpec, GatewayClient, fixed_scale_labels

pytestmark = [pytest.mark.anyio, pytest.mark.processes]
SOON = timedelta(seconds=20)


@pytest.fixture(autouse=True, scope="module")
def _started(request: pytest.FixtureRequest) -> None:
    """Start the shared gateways and probes before the first test looks at what it might leave behind."""
    request.getfixturevalue("standing")


async def test_deploy_list_get_delete(gateway) -> None:
    probe = await gateway.deploy(labels={**fixed_scale_labels(1), "team": "a"}, annotations={"topic": "t"})
    status = await gateway.client.get(probe.name)
    assert (status.name, status.replicas, status.available_replicas) == (probe.name, 1, 1)
    assert status.spec.image == gateway.image
    assert status.spec.labels["team"] == "a"
    assert status.created_at is not None
    assert probe.name in [item.name for item in await gateway.client.list()]
    await gateway.client.delete(probe.name)
    with pytest.raises(GeofedError) as caught:
        await gateway.client.delete(f"{probe.name}-none")
    assert caught.value.code == "FUNCTION_NOT_FOUND"


async def test_health_info_namespaces_metrics(gateway) -> None:
    assert await gateway.client.health()
    info = await gateway.client.info()
    assert {"provider", "version", "arch"} <= info.keys()
    namespaces = await gateway.client.namespaces()
    assert namespaces
    described = await gateway.http.get(f"/system/namespace/{namespaces[0]}", auth=_auth(gateway))
    assert described.status_code in (200, 404, 501)


async def test_system_routes_refuse_wrong_credentials(gateway) -> None:
    if gateway.auth is None:
        pytest.skip("this gateway has no authentication")
    for path in ("/system/functions", "/system/info", "/system/secrets", "/system/namespaces", "/system/logs?name=a"):
        assert (await gateway.http.get(path)).status_code == 401
        assert (await gateway.http.get(path, auth=("admin", "wrong"))).status_code == 401
    if gateway.embedded is not None:
        # OpenFaaS serves them at another port.
        assert (await gateway.http.get("/metrics")).status_code == 401
        assert (await gateway.http.get("/metrics", auth=_auth(gateway))).status_code == 200
    with pytest.raises(GeofedError) as caught:
        async with GatewayClient(str(gateway.http.base_url), verify=_no_verify()) as client:
            await client.list()
    assert caught.value.code == "UNAUTHENTICATED"


async def test_function_never_sees_the_gateways_credentials(probe) -> None:
    seen = json.loads((await probe("describe")).body)["headers"]
    assert "authorization" not in seen


async def test_invoke_carries_everything_both_ways(gateway, probe) -> None:
    call_id = str(uuid.uuid4())
    answer = await gateway.http.put(
        f"/function/{probe.name}/some/path?a=1&b=two",
        content=b"12345",
        headers={"X-Do": "describe?status=418", "X-Call-Id": call_id, "X-Own": "kept"},
    )
    seen = answer.json()
    assert answer.status_code == 418
    assert (seen["method"], seen["path"], seen["query"], seen["size"]) == (
        "PUT",
        "/some/path",
        {"a": "1", "b": "two"},
        5,
    )
    assert seen["headers"]["x-own"] == "kept"
    assert seen["headers"]["x-call-id"] == call_id
    assert answer.headers["X-Probe"] == "yes"
    assert answer.headers.get("X-Call-Id", call_id) == call_id
    assert float(answer.headers["X-Duration-Seconds"]) > 0
    assert abs(int(answer.headers["X-Start-Time"]) / 1e9 - datetime.now(UTC).timestamp()) < 60
    assert "X-OpenFaaS-Internal" not in answer.headers


async def test_gateway_makes_a_call_id_where_none_is_given(gateway, probe) -> None:
    answer = await gateway.http.post(f"/function/{probe.name}", content=b"x")
    assert uuid.UUID(answer.headers["X-Call-Id"])


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
async def test_every_method_passes_through(gateway, probe, method: str) -> None:
    answer = await gateway.http.request(method, f"/function/{probe.name}", headers={"X-Do": "describe"})
    assert answer.json()["method"] == method


async def test_namespace_suffix(gateway, probe) -> None:
    (namespace, *_) = await gateway.client.namespaces()
    answer = await gateway.http.post(f"/function/{probe.name}.{namespace}", content=b"x")
    assert answer.content == b"x"


async def test_the_functions_own_failure_is_an_answer(probe) -> None:
    answer = await probe("raise")
    assert answer.status == 500
    with pytest.raises(GeofedError) as caught:
        answer.raise_for_status()
    assert caught.value.code == "FUNCTION_FAILED"


async def test_none_is_an_empty_answer(probe) -> None:
    answer = await probe("none")
    assert (answer.status, answer.body) == (200, b"")


async def test_32_mb_body(probe) -> None:
    body = os.urandom(2**20) * 32
    assert (await probe("echo", body)).body == body


async def test_chunked_body_without_content_length(gateway, probe) -> None:

    async def chunks() -> AsyncIterator[bytes]:
        for number in range(100):
            yield bytes([number]) * 10_000

    answer = await gateway.http.post(f"/function/{probe.name}", content=chunks(), headers={"X-Do": "describe"})
    assert answer.json()["size"] == 1_000_000


async def test_unknown_function_is_an_infrastructure_error(gateway) -> None:
    answer = await gateway.http.post("/function/there-is-none", content=b"")
    assert answer.status_code >= 400
    assert "X-OpenFaaS-Internal" in answer.headers or answer.text.startswith("error finding function")
    with pytest.raises(GeofedError) as caught:
        await gateway.client.invoke("there-is-none")
    assert caught.value.code == "FUNCTION_NOT_FOUND"


async def test_a_functions_own_404_is_an_answer(probe) -> None:
    assert (await probe("describe?status=404")).status == 404


async def test_scale_up_and_down(gateway) -> None:
    probe = await gateway.deploy()
    most = (await gateway.client.edition()).replicas or 3
    await gateway.client.scale(probe.name, min(3, most))
    await gateway.client.wait_ready(probe.name, min(3, most), SOON)
    await gateway.client.scale(probe.name, 1)
    await gateway.client.wait_ready(probe.name, 1, SOON)
    assert (await probe("echo", b"x")).body == b"x"


async def test_update_replaces_replicas(gateway) -> None:
    probe = await gateway.deploy(env_vars={"COLOUR": "red"})
    first = await probe.process()
    changed = FunctionSpec(probe.name, gateway.image, env_vars={**probe.spec.env_vars, "COLOUR": "blue"})
    await gateway.client.deploy(changed)
    while (environ := json.loads((await probe("env", idempotent=True)).body)["environ"])["COLOUR"] != "blue":
        await gateway.client.get(probe.name)
    assert environ["COLOUR"] == "blue"
    await gateway.client.wait_ready(probe.name, 1, SOON)
    second = await probe.process()
    assert gateway.embedded is None or second != first
    # The same once more changes nothing, though the platform may restart a function for any request.
    created = (await gateway.client.get(probe.name)).created_at
    await gateway.client.deploy(changed)
    assert (await probe.process(), (await gateway.client.get(probe.name)).created_at) == (second, created)


async def test_a_function_is_ready_only_when_it_answers(gateway) -> None:
    probe = await gateway.deploy()
    for colour in ("red", "green", "blue"):
        await gateway.client.deploy(FunctionSpec(probe.name, gateway.image, env_vars={"COLOUR": colour}))
        await gateway.client.wait_ready(probe.name, 1, SOON)
        assert (await probe("echo", b"x")).status == 200


async def test_a_function_that_is_starting_can_be_deleted(gateway) -> None:
    probe = await gateway.deploy()
    await gateway.client.deploy(FunctionSpec(probe.name, gateway.image, env_vars={"COLOUR": "blue"}))
    await gateway.client.delete(probe.name)
    assert probe.name not in [one.name for one in await gateway.client.list()]


async def test_a_replica_is_free_again_when_its_caller_has_gone(gateway) -> None:
    probe = await gateway.deploy(env_vars={"max_inflight": "1"})
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1):
            await probe("wait?s=15")

    async def free() -> None:
        while True:
            with contextlib.suppress(GeofedError):
                await gateway.client.wait_answering(probe.name, SOON)
                assert (await probe("echo", b"x")).body == b"x"
                return
            await asyncio.sleep(0.1)

    await asyncio.wait_for(free(), 8)


async def test_call_beyond_its_timeout_is_a_504(gateway) -> None:
    probe = await gateway.deploy(env_vars={"exec_timeout": "500ms"})
    with pytest.raises(GeofedError) as caught:
        await probe("wait?s=30", timeout=timedelta(seconds=10))
    assert caught.value.code == "FUNCTION_TIMEOUT"


async def test_call_may_shorten_its_timeout(gateway) -> None:
    probe = await gateway.deploy()
    answer = await gateway.http.post(
        f"/function/{probe.name}", headers={"X-Do": "wait?s=30", "X-Timeout": "300ms"}, content=b""
    )
    assert answer.status_code == 504


async def test_max_inflight_is_a_429(gateway) -> None:
    probe = await gateway.deploy(env_vars={"max_inflight": "1"})
    outcomes = await asyncio.gather(probe("wait?s=0.5"), probe("wait?s=0.5"), return_exceptions=True)
    refused = [outcome for outcome in outcomes if isinstance(outcome, GeofedError)]
    assert [error.code for error in refused] == ["FUNCTION_BUSY"]


async def test_idempotent_call_waits_for_a_free_replica(gateway) -> None:
    probe = await gateway.deploy(env_vars={"max_inflight": "1"})
    outcomes = await asyncio.gather(*(probe("wait?s=0.2", idempotent=True) for _ in range(2)))
    assert [outcome.status for outcome in outcomes] == [200, 200]


async def test_replica_that_dies_is_replaced(gateway) -> None:
    probe = await gateway.deploy()
    before = await probe.pid()
    with pytest.raises(GeofedError) as caught:
        await probe("crash")
    assert caught.value.code in ("FUNCTION_FAILED", "GATEWAY_UNAVAILABLE")
    await gateway.client.wait_answering(probe.name, SOON)
    await gateway.client.wait_ready(probe.name, 1, SOON)
    after = json.loads((await probe("describe", idempotent=True)).body)["pid"]
    assert gateway.embedded is None or after != before


async def test_exceeded_memory_is_told(gateway) -> None:
    probe = await gateway.deploy(limits={"memory": "128Mi"})
    with pytest.raises(GeofedError) as caught:
        await probe("eat?mib=400&s=10")
    told = f"{caught.value.message} {caught.value.hint}"
    bare = (await gateway.client.edition()).bare
    assert caught.value.code == ("FUNCTION_FAILED" if bare else "FUNCTION_OUT_OF_MEMORY")
    assert "more memory than its limit" in told or "over its limit of 128 MiB" in told or "128 MiB" in told
    await gateway.client.wait_answering(probe.name, SOON)
    assert (await probe("echo", b"x", idempotent=True)).body == b"x"


async def test_secrets_live_and_reach_the_function(gateway) -> None:
    name = f"secret-{os.getpid()}"
    await gateway.client.create_secret(name, b"\x00one")
    try:
        assert name in await gateway.client.list_secrets()
        await gateway.client.update_secret(name, b"\x00two")
        if gateway.embedded is not None:
            probe = await gateway.deploy(secrets=(name,))
            assert (await probe(f"secret?name={name}")).body == b"\x00two"
    finally:
        await gateway.client.delete_secret(name)
    assert name not in await gateway.client.list_secrets()
    if gateway.embedded is not None:
        await gateway.client.delete_secret(name)


async def test_logs_follow(gateway, probe) -> None:
    await probe("print", b"before")
    texts: list[str] = []

    async def follow() -> None:
        async for line in gateway.client.logs(probe.name, tail=10, follow=True):
            texts.append(line.text)
            assert line.instance
            if "before" in line.text:
                await probe("print", b"while")
            if "while" in line.text:
                return

    await asyncio.wait_for(follow(), 15)
    assert any("before" in text for text in texts)


async def test_logs_tail_and_since(gateway, probe) -> None:

    async def has(text: str) -> None:
        while not [line async for line in gateway.client.logs(probe.name) if text in line.text]:
            pass

    for number in range(5):
        await probe("print", b"line %d" % number)
    # A line has the time at which the gateway read it.
    await asyncio.wait_for(has("line 4"), 10)
    start = datetime.now(UTC)
    await probe("print", b"the end")
    await asyncio.wait_for(has("the end"), 10)
    recent = [line.text async for line in gateway.client.logs(probe.name, since=start)]
    assert any("the end" in text for text in recent)
    assert not any("line 0" in text for text in recent)
    assert len([line async for line in gateway.client.logs(probe.name, tail=1)]) <= 2


async def test_asynchronous_call_calls_back(gateway, probe) -> None:
    public = os.environ.get("GEOFED_TEST_CALLBACK_URL")
    if gateway.embedded is None and not public:
        pytest.skip("GEOFED_TEST_CALLBACK_URL does not say how the gateway reaches this machine")
    results: asyncio.Queue[tuple[Mapping[str, str], bytes]] = asyncio.Queue()

    async def receive(request: Request) -> PlainTextResponse:
        await results.put((request.headers, await request.body()))
        return PlainTextResponse("", 202)

    listener = socket.create_server(("", 8765) if gateway.embedded is None else ("127.0.0.1", 0))
    bound = listener.getsockname()[1]
    app = Starlette(routes=[Route("/callback", receive, methods=["POST"])])
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, ws="none", lifespan="off"))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        url = (public or f"http://127.0.0.1:{bound}") + "/callback"
        call_id = await gateway.client.invoke_async(probe.name, b"payload", callback_url=url, call_id="call-1")
        headers, body = await asyncio.wait_for(results.get(), 20)
    finally:
        server.should_exit = True
        await serving
        listener.close()
    assert call_id == "call-1"
    assert (headers["X-Call-Id"], headers["X-Function-Status"], body) == ("call-1", "200", b"payload")
    assert headers["X-Function-Name"].startswith(probe.name)
    assert float(headers["X-Duration-Seconds"]) > 0


async def test_bad_requests_are_refused_with_a_reason(gateway) -> None:
    auth = _auth(gateway)
    answers = [
        await gateway.http.post("/system/functions", content=b"{", auth=auth),
        await gateway.http.post("/system/functions", json={"service": "Not A Name", "image": "x"}, auth=auth),
        await gateway.http.get("/system/logs", auth=auth),
    ]
    assert [answer.status_code for answer in answers[:2]] == [400, 400]
    assert answers[2].status_code in (200, 400, 422)
    assert all(answer.text for answer in answers[:2])


def _auth(gateway) -> httpx2.BasicAuth | None:
    return httpx2.BasicAuth(gateway.auth.user, gateway.auth.password) if gateway.auth else None


def _no_verify() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
