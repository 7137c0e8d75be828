"""Functions as invocations at AWS Lambda: what they are made of, how long they live, and what becomes of failures."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import shlex
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from geofed_pb.errors import GeofedError
from geofed_pb.v1 import agent_pb2
from region_agent.config import LambdaGateway, RegionConfig
from region_agent.doctor import examine
from region_agent.gateway import FunctionSpec
from region_agent.gateway.dial_out import _KEEPALIVE, GONE_SECONDS
from region_agent.gateway.serverless import invocation
from region_agent.gateway.serverless.order import Order, order_of
from region_agent.policy import check_partition

pytest.importorskip("boto3")

from botocore import xform_name
from support.lambda_service import IMAGE, ROLE, Refusal, Service, _Function, function_command
from support.processes import Start, execute

from region_agent.gateway.embedded.config import Config
from region_agent.gateway.embedded.dialled import DialledConnections
from region_agent.gateway.embedded.replica_table import Expired, ReplicaNearTimeLimit, ScaleFunction
from region_agent.gateway.embedded.replicas.running import Running
from region_agent.gateway.embedded.serverless import provider as provider_module
from region_agent.gateway.embedded.serverless.api import Hosted, NoFunction
from region_agent.gateway.embedded.serverless.aws import _LOG_GROUP, LambdaFunctions, error_of, failure_of
from region_agent.gateway.embedded.serverless.provider import ServerlessProvider, memory_mb
from tests.region_agent.gateway.conftest import HANDLERS, Embedded, Target, open_target, until

pytestmark = [pytest.mark.anyio, pytest.mark.processes]
_numbers = itertools.count(1)
SETTINGS: dict[str, Any] = {"kind": "lambda", "image": IMAGE, "role": ROLE}
MOTO = """
import logging
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server
logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = make_server("127.0.0.1", 0, DomainDispatcherApplication(create_backend_app), threaded=True)
print(server.server_port, flush=True)
server.serve_forever()
"""

GONE, KEEPALIVE = 8, (4, 1, 4)
"""A shorter time than the product's, made of parts in the same way."""
SILENCE = f"""
import asyncio, json, subprocess, threading, time
from region_agent.gateway import dial_out
from region_agent.gateway.embedded.dialled import DialledConnections, Listener

dial_out.GONE_SECONDS, dial_out._KEEPALIVE = {GONE}, {KEEPALIVE}

def loopback(state):
    subprocess.run(["ip", "link", "set", "lo", state], check=True)

async def main():
    loopback("up")
    dialled = DialledConnections(lambda _: None)
    await dialled.start("127.0.0.1", 0)
    dial = dialled.expect("one", Listener(lambda _: None, lambda *_: None))
    connections = {{one: await asyncio.to_thread(dial.connect, dial.context) for one in ("idle", "sending")}}
    while not dialled.connected("one"):
        await asyncio.sleep(0.05)
    loopback("down")
    begun, seconds = time.monotonic(), {{}}
    def wait(name):
        try:
            connections[name].recv(1)
        except OSError:
            pass
        seconds[name] = time.monotonic() - begun
    connections["sending"].sendall(b"never arrives")
    for name in connections:
        threading.Thread(target=wait, args=(name,), daemon=True).start()
    while len(seconds) < 3 and time.monotonic() - begun < {GONE + 20}:
        await asyncio.sleep(0.1)
        if not dialled.connected("one"):
            seconds.setdefault("gateway", time.monotonic() - begun)
    print(json.dumps(seconds))

asyncio.run(main())
"""


@pytest.fixture
def service(tmp_path: Path, start_function: Start) -> Iterator[Service]:
    (tmp_path / "lambda").mkdir()
    images = {IMAGE: function_command("--handler", "gateway_probe:handle", path=str(HANDLERS))}
    with Service(tmp_path / "lambda", images, start_function) as made:
        yield made


@pytest.fixture
def opened(service: Service, launch: Callable[..., Embedded]) -> Callable[..., Any]:
    @asynccontextmanager
    async def opened(**settings: Any) -> AsyncIterator[Target]:
        section = SETTINGS | settings
        embedded = launch(serverless=section, owner="mark", drain_timeout="1s", variables=service.variables)
        async with open_target(embedded) as target:
            target.image = IMAGE
            yield target
        embedded.stop()

    return opened


async def refused(target: Target, seconds: float = 60.0, **members: Any) -> GeofedError:
    """Deploy a function that cannot start; returns the error of waiting for it."""
    name = f"refused-{next(_numbers)}"
    await target.client.deploy(FunctionSpec(name, members.pop("image", IMAGE), **members))
    with pytest.raises(GeofedError) as caught:
        await target.client.wait_ready(name, 1, timedelta(seconds=seconds))
    await target.client.delete(name)
    return caught.value


async def failure_told(target: Target, name: str, text: str) -> None:
    """Wait for a function that is not ready yet until the reason for that is told."""
    message = ""
    async with asyncio.timeout(40):
        while text not in message:
            with pytest.raises(GeofedError) as caught:
                await target.client.wait_ready(name, 1, timedelta(seconds=0.5))
            message = caught.value.message


def told(service: Service, operation: str) -> list[dict[str, Any]]:
    return [given for name, given in service.requests if name == operation]


# What a replica is made of


async def test_a_replica_is_an_invocation_with_no_right_of_the_agent(service: Service, opened: Any) -> None:
    given = {
        "subnets": ["subnet-0a1"], "securityGroups": ["sg-0b2"], "reservedConcurrency": 4, "scratchMb": 1024,
        "architecture": "arm64",
    }  # fmt: skip
    # As at the platform: with an environment that the kernel keeps.
    service.start = execute
    async with opened(**given) as target:
        await target.client.create_secret("token", b"very secret")
        labels = {"geofed.region": "east", "geofed.job": "digits-1"}
        probe = await target.deploy(
            replicas=2, secrets=("token",), labels=labels, limits={"memory": "512Mi"}, env_vars={"PLAIN": "hidden"}
        )
        assert (await probe("secret?name=token")).body == b"very secret"
        seen = json.loads((await probe("env")).body)
        assert seen["environ"]["PLAIN"] == "hidden"
        assert not [name for name in seen["environ"] if name.startswith("AWS_")]
        assert "AWS_" not in seen["initial"]
        # One function for both replicas, each an event that is not repeated.
        (made,) = told(service, "CreateFunction")
        assert made["Tags"].items() >= {**labels, "geofed.gateway": "mark"}.items()
        assert (made["MemorySize"], made["Timeout"], made["Role"], made["Architectures"]) == (512, 900, ROLE, ["arm64"])
        assert made["VpcConfig"] == {"SubnetIds": ["subnet-0a1"], "SecurityGroupIds": ["sg-0b2"]}
        assert made["EphemeralStorage"] == {"Size": 1024}
        assert made["LoggingConfig"] == {"LogGroup": "/geofed/worker"}
        assert "Environment" not in made
        assert "hidden" not in json.dumps(made)
        (events,) = told(service, "PutFunctionEventInvokeConfig")
        assert events == {"MaximumRetryAttempts": 0, "MaximumEventAgeInSeconds": 60}
        assert told(service, "PutFunctionConcurrency")[0]["ReservedConcurrentExecutions"] == 4
        assert [one["InvocationType"] for one in told(service, "Invoke")] == ["Event", "Event"]
        assert len(service.working()) == 2
    assert service.functions == {}
    # They are told, or, on a machine so loaded that a word does not reach them, end a minute after their gateway.
    until(lambda: not service.working(), 90.0)
    assert [kind for _, kind in service.ended] == ["success", "success"]


async def test_a_changed_function_keeps_its_cloud_function_and_another_memory_makes_another(
    service: Service, opened: Any
) -> None:
    async with opened() as target:
        probe = await target.deploy(limits={"memory": "256Mi"})
        name = probe.name
        for env, memory, functions in (({"A": "1"}, "256Mi", 1), ({"A": "1"}, "300Mi", 2)):
            await target.client.deploy(FunctionSpec(name, IMAGE, env_vars=env, limits={"memory": memory}))
            async with asyncio.timeout(30):
                while json.loads((await probe("env", idempotent=True)).body)["environ"].get("A") != "1":
                    pass
            await target.client.wait_ready(name, 1, timedelta(seconds=30))
            await asyncio.to_thread(until, lambda: len(service.working()) == 1)
            assert len(told(service, "CreateFunction")) == functions
        await asyncio.to_thread(until, lambda: len(service.functions) == 1)
        (left,) = service.functions.values()
        assert left.configuration["MemorySize"] == 300
        await target.client.delete(name)
        await asyncio.to_thread(until, lambda: not service.functions)


def test_memory_is_within_the_platforms_limits() -> None:
    limits = (128, 10240)
    assert memory_mb(FunctionSpec("a", "i", limits={"memory": "64Mi"}), limits) == 128
    assert memory_mb(FunctionSpec("a", "i", limits={"memory": "1000M"}), limits) == 954
    assert memory_mb(FunctionSpec("a", "i"), limits) == 1024
    with pytest.raises(ValueError, match="10240 MB are the most"):
        memory_mb(FunctionSpec("a", "i", limits={"memory": "11Gi"}), limits)


async def test_more_than_the_platform_has_is_refused(opened: Any) -> None:
    async with opened() as target:
        for spec, text in (
            (FunctionSpec("a", IMAGE, limits={"memory": "11Gi"}), "10240 MB are the most"),
            (FunctionSpec("a", IMAGE, env_vars={"exec_timeout": "15m", "write_timeout": "15m"}), ""),
        ):
            answer = await target.http.post("/system/functions", json=spec.as_json())
            # The gateway of this test bounds calls by 60 s.
            assert answer.status_code == (400 if text else 202), answer.text
            assert text in answer.text
        await target.client.delete("a")
    async with opened(lifeSeconds=60) as target:
        spec = FunctionSpec("a", IMAGE, env_vars={"exec_timeout": "1m", "write_timeout": "1m"})
        answer = await target.http.post("/system/functions", json=spec.as_json())
        assert (answer.status_code, "its calls take 60 s, and its replicas live for 60 s" in answer.text) == (400, True)


async def test_secrets_that_no_event_holds_are_told(opened: Any) -> None:
    async with opened() as target:
        names = tuple(f"s{number}" for number in range(13))
        for name in names:
            await target.client.create_secret(name, bytes(64 * 1024))
        error = await refused(target, secrets=names)
        assert error.code == "LIMIT_EXCEEDED"
        assert "AWS Lambda takes 1000000" in error.message


# How long it lives


async def test_a_replica_is_replaced_before_the_platforms_limit_without_a_failed_call(
    service: Service, opened: Any
) -> None:
    # A part of its time is over when its program gets the event.
    service.spent_seconds = 12
    async with opened(lifeSeconds=34) as target:
        probe = await target.deploy(env_vars={"exec_timeout": "3s", "max_inflight": "2"})
        first, seen, long = (await probe.process())[0], set[str](), 0
        begun, after = time.monotonic(), 0
        # Until the first one has ended, and two calls longer.
        while time.monotonic() - begun < 22 and after < 2:
            after += bool(service.ended)
            answer = asyncio.create_task(probe("wait?s=1.5"))
            seen.add((await probe.process())[0])
            await asyncio.sleep(0.3)
            assert (await answer).body == b"woke"
            long += 1
        assert first in seen
        assert len(seen) >= 2, "it was replaced"
        assert (after, long > 3) == (2, True), "calls went on before and after it ended"
        (name,) = service.functions
    # Ended by the gateway: never by the platform.
    until(lambda: not service.working())
    assert {kind for one, kind in service.ended if one == name} == {"success"}


async def test_a_replica_that_has_waited_for_room_is_not_replaced_early(service: Service, opened: Any) -> None:
    service.quota = 0
    async with opened(lifeSeconds=30) as target:
        deployed = asyncio.create_task(target.deploy(env_vars={"exec_timeout": "11s"}))
        await asyncio.to_thread(until, lambda: told(service, "Invoke"))
        # If this counted, too little time for calls would be left, and the replica would be refused.
        await asyncio.sleep(6.5)
        service.quota = 1000
        probe = await deployed
        host, _ = await probe.process()
        await asyncio.sleep(1)
        assert (await probe.process())[0] == host
        assert len(told(service, "Invoke")) == 1


async def test_calls_that_the_platforms_limit_has_no_time_for_are_told(service: Service, opened: Any) -> None:
    service.spent_seconds = 35
    async with opened(lifeSeconds=60) as target:
        error = await refused(target, env_vars={"exec_timeout": "20s", "write_timeout": "20s"})
        assert (error.code, "function.slice" in error.hint) == ("LIMIT_EXCEEDED", True)
        assert "its calls take 20 s, but AWS Lambda ends it 2" in error.message
        await asyncio.to_thread(until, lambda: not service.working())


async def test_replicas_that_started_together_are_replaced_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider = ServerlessProvider(
        Config(state_dir=tmp_path, serverless=LambdaGateway.model_validate(SETTINGS), owner="m")
    )
    (tmp_path / "r").mkdir()
    due: dict[type, list[float]] = {ReplicaNearTimeLimit: [], Expired: []}
    monkeypatch.setattr(provider, "_after", lambda wait, _, event: due[type(event)].append(wait))
    for number in range(16):
        running = Running.create(f"a-{number}", FunctionSpec("a", IMAGE), provider.config, None)
        provider._replace_in_time(running, 700.0)
    aged = sorted(due[ReplicaNearTimeLimit])
    assert set(due[Expired]) == {700.0}
    assert 0.74 * 690 < aged[0] < aged[-1] < 690
    # A start takes 20 s.
    assert max(sum(one <= other < one + 20 for other in aged) for one in aged) <= 3


async def test_an_event_that_was_dropped_is_sent_again(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in service.variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(provider_module, "EVENT_SECONDS", 1)
    monkeypatch.setattr(provider_module, "_LEAST_LEAD_SECONDS", 1)
    provider = ServerlessProvider(
        Config(state_dir=tmp_path, serverless=LambdaGateway.model_validate(SETTINGS), owner="m")
    )
    await provider.start()
    try:
        provider.deploy(FunctionSpec("a", IMAGE))
        await asyncio.to_thread(until, lambda: provider.table.available("a") == 1, 30)
        service.quota = 1
        provider.apply(ScaleFunction("a", 2))
        await asyncio.to_thread(until, lambda: len(told(service, "Invoke")) == 3, 60)
        failure = provider.status("a").failure
        assert failure is not None
        assert (failure.code, "has not run an event" in failure.message) == ("GATEWAY_UNAVAILABLE", True)
        service.quota = 1000
        await asyncio.to_thread(until, lambda: provider.table.available("a") == 2, 30)
        assert len(told(service, "CreateFunction")) == 1
    finally:
        await provider.stop()
    assert not service.functions


async def test_a_replica_leaves_before_the_platform_ends_it(service: Service, opened: Any) -> None:
    # The platform counts from an earlier moment than the gateway: it says so in each event.
    service.spent_seconds = 10
    async with opened(lifeSeconds=30) as target:
        await target.deploy(env_vars={"exec_timeout": "1s"})
        (environment,) = service.working()
        environment.deadline = time.monotonic() + 20
        os.kill(target.embedded.pid, signal.SIGSTOP)
        try:
            await asyncio.to_thread(until, lambda: service.ended, 40)
        finally:
            os.kill(target.embedded.pid, signal.SIGCONT)
        assert [kind for _, kind in service.ended] == ["success"]


async def test_a_function_has_the_image_that_it_states(service: Service, opened: Any) -> None:
    other = IMAGE.replace("worker:1", "worker-of-a-team:1")
    service.images[other] = service.images[IMAGE]
    async with opened() as target:
        await target.deploy(image=other)
        (made,) = told(service, "CreateFunction")
        assert made["Code"]["ImageUri"] == other


async def test_a_killed_invocation_is_replaced_and_its_call_told(service: Service, opened: Any) -> None:
    async with opened() as target:
        probe = await target.deploy()
        host, _ = await probe.process()
        call = asyncio.create_task(probe("wait?s=30"))
        await asyncio.sleep(0.5)
        service.working()[0].process.kill()
        with pytest.raises(GeofedError) as caught:
            await call
        assert caught.value.code == "FUNCTION_EVICTED"
        assert "ended without a word" in caught.value.message
        await target.client.wait_ready(probe.name, 1, timedelta(seconds=20))
        assert (await probe.process())[0] != host


async def test_an_idle_invocation_that_is_killed_is_replaced(service: Service, opened: Any) -> None:
    async with opened() as target:
        probe = await target.deploy()
        host, _ = await probe.process()
        service.working()[0].process.kill()
        await asyncio.to_thread(until, lambda: len(told(service, "Invoke")) == 2)
        await target.client.wait_ready(probe.name, 1, timedelta(seconds=20))
        assert (await probe.process())[0] != host


async def test_an_event_that_is_run_twice_is_one_replica(service: Service, opened: Any) -> None:
    service.twice = True
    async with opened() as target:
        probe = await target.deploy()
        await asyncio.to_thread(until, lambda: len(service.ended) == 1)
        assert len(service.working()) == 1
        assert len({await probe.process() for _ in range(5)}) == 1


async def test_another_invocation_of_the_same_function_starts_in_its_environment(service: Service, opened: Any) -> None:
    async with opened() as target:
        probe = await target.deploy()
        await target.client.scale(probe.name, 0)
        await asyncio.to_thread(until, lambda: not service.working())
        await target.client.scale(probe.name, 1)
        await target.client.wait_ready(probe.name, 1, timedelta(seconds=20))
        assert (await probe("echo", b"x")).body == b"x"
        assert len(service.environments) == 1


async def test_what_a_killed_gateway_has_left_ends_and_is_deleted(service: Service, opened: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    async with opened(port=port) as target:
        await target.deploy()
        assert target.embedded is not None
        target.embedded.kill()
        (left,) = service.functions
    known = service.functions[left].configuration
    strange = known | {
        "FunctionName": "geofed-mark-other",
        "FunctionArn": known["FunctionArn"].replace(left, "geofed-mark-other"),
    }
    service.functions["geofed-mark-other"] = type(service.functions[left])(strange, {"geofed.gateway": "else"}, 0.0)
    async with opened(port=port):
        # Its gateway is not the one that listens there now.
        await asyncio.to_thread(until, lambda: not service.working(), 20)
        await asyncio.to_thread(until, lambda: list(service.functions) == ["geofed-mark-other"], 20)


async def test_a_gateway_that_stops_leaves_no_function_that_is_being_made(service: Service, opened: Any) -> None:
    service.pending_seconds = 1.5
    async with opened() as target:
        await target.client.deploy(FunctionSpec("late", IMAGE))
        until(lambda: told(service, "CreateFunction"))
        target.embedded.stop()
    until(lambda: not service.functions, 5)


async def test_a_gateway_that_stops_waits_for_no_function_to_become_active(service: Service, opened: Any) -> None:
    async with opened() as target:
        await target.deploy()
        service.pending_seconds = 60
        await target.client.deploy(FunctionSpec("pending", IMAGE))
        await asyncio.to_thread(until, lambda: len(service.functions) == 2)
        service.slow = {"CreateFunction": 1.5}
        await target.client.deploy(FunctionSpec("under-way", IMAGE))
        await asyncio.sleep(0.5)
        begun = time.monotonic()
        await asyncio.to_thread(target.embedded.stop)
        assert time.monotonic() - begun < 30
        assert not service.functions
        assert len(told(service, "CreateFunction")) == 3


async def test_what_an_earlier_gateway_has_left_is_looked_for_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed: list[list[str]] = [[], ["geofed-mark-old-f1"]]
    deleted: list[str] = []

    class Cloud:
        def names(self, mark: str) -> list[str]:
            return listed.pop(0)

        def delete(self, name: str) -> None:
            deleted.append(name)

    monkeypatch.setattr(provider_module, "functions_of", lambda _: Cloud())
    monkeypatch.setattr(provider_module, "_CLEAR_AGAIN_SECONDS", 0.5)
    settings = LambdaGateway.model_validate(SETTINGS)
    provider = ServerlessProvider(Config(state_dir=tmp_path, serverless=settings, owner="mark"))
    await provider.start()
    try:
        await asyncio.to_thread(until, lambda: deleted, 20)
    finally:
        await provider.stop()
    assert (deleted, listed) == (["geofed-mark-old-f1"], [])


async def test_a_function_that_cannot_be_deleted_keeps_no_other(service: Service, opened: Any) -> None:
    left = [f"geofed-mark-old-f{number}" for number in range(6)]
    for name in left:
        configuration = {
            "FunctionName": name,
            "FunctionArn": f"arn:aws:lambda:eu-central-1:123456789012:function:{name}",
        }
        service.functions[name] = _Function({**configuration, "State": "Active"}, {"geofed.gateway": "mark"}, 0.0)
    service.undeletable = {*left[:3], *left[4:]}
    async with opened():
        await asyncio.to_thread(until, lambda: left[3] not in service.functions, 20)
        assert len(service.functions) == 5
        service.undeletable = set()
        await asyncio.to_thread(until, lambda: not service.functions, 40)


async def test_a_killed_invocation_is_noticed_while_the_api_does_not_answer(service: Service, opened: Any) -> None:
    async with opened() as target:
        probe, other = await target.deploy(), await target.deploy()
        service.slow = {"DeleteFunction": 18.0}
        await target.client.delete(other.name)
        await asyncio.to_thread(until, lambda: len(service.working()) == 1)
        await asyncio.sleep(1.5)
        service.working()[0].process.kill()
        await asyncio.to_thread(until, lambda: len(told(service, "Invoke")) == 3, 12)
        await target.client.wait_ready(probe.name, 1, timedelta(seconds=30))
        service.slow = {}


def test_an_invocation_without_a_gateway_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invocation, "_ALONE_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    from support.pki import Authority

    pem = Authority("gateway").pem.decode()
    # Its memory is that of this process and all of its children, which other tests have started, too.
    order = Order(
        address=f"127.0.0.1:{port}", replica="a", token="t", certificate=pem, life_seconds=60, memory_mb=1 << 20
    )
    monkeypatch.setenv("PYTHONPATH", str(HANDLERS))
    assert invocation.serve(order, time.monotonic() + 60, "gateway_probe:handle") == "alone"


@pytest.mark.netns
@pytest.mark.slow
def test_both_sides_notice_within_a_time_that_the_other_is_gone_without_a_word() -> None:
    import subprocess
    import sys

    # In a network of its own, in which nothing arrives any more after a moment: no end of a connection, no reset.
    alone = ["unshare", "--user", "--map-root-user", "--net"]
    if subprocess.run([*alone, "ip", "link", "set", "lo", "up"], capture_output=True, check=False).returncode:
        pytest.skip("this machine gives no network namespace")
    done = subprocess.run([*alone, sys.executable, "-c", SILENCE], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    seconds = json.loads(done.stdout)
    assert sorted(seconds) == ["gateway", "idle", "sending"]
    assert all(4 < one < GONE + 8 for one in seconds.values()), seconds
    for gone, (idle, interval, probes) in ((GONE, KEEPALIVE), (GONE_SECONDS, _KEEPALIVE)):
        assert idle + interval * probes == gone


# What fails


async def test_what_cannot_be_made_is_told(service: Service, opened: Any) -> None:
    other = IMAGE.replace(":1", ":none")
    async with opened() as target:
        error = await refused(target, image=other)
        assert (error.code, other in error.message) == ("IMAGE_UNAVAILABLE", True)
        service.failing = {"StateReasonCode": "ImageAccessDenied", "StateReason": "Lambda may not pull it"}
        assert (await refused(target)).code == "IMAGE_UNAVAILABLE"
        service.failing = {"StateReasonCode": "SubnetOutOfIPAddresses", "StateReason": "no address is left"}
        assert (await refused(target)).code == "FUNCTION_UNSCHEDULABLE"
        service.failing = {}
        await asyncio.to_thread(until, lambda: not service.functions)
        service.allowed.discard("CreateFunction")
        denied = await refused(target)
        assert (denied.code, "docs/lambda.md" in denied.hint) == ("FORBIDDEN", True)
        service.allowed.add("CreateFunction")
        service.key = "AKIAOTHER"
        assert (await refused(target)).code == "UNAUTHENTICATED"


async def test_a_role_and_a_reservation_that_do_not_work_are_told(service: Service, opened: Any) -> None:
    async with opened(role=ROLE + "-none") as target:
        error = await refused(target)
        assert (error.code, "cannot be assumed" in error.message) == ("CONFIG_INVALID", True)
    async with opened(reservedConcurrency=950) as target:
        assert (await refused(target)).code == "QUOTA_EXCEEDED"
    assert not service.functions


async def test_no_room_for_an_invocation_is_told_after_a_time(service: Service, opened: Any) -> None:
    service.quota = 0
    async with opened(startSeconds=5) as target:
        error = await refused(target)
        assert error.code == "FUNCTION_UNSCHEDULABLE"
        assert "within 5 s" in error.message
        # Invocations that begin late are not expected any more, and end.
        service.quota = 1000
        await target.deploy()
        await asyncio.to_thread(until, lambda: len(service.working()) == 1)
    # They end a minute after their gateway where its word does not reach them.
    until(lambda: not service.working(), 90.0)


async def test_a_throttled_request_is_repeated_with_a_bound(service: Service, opened: Any) -> None:
    async with opened() as target:
        service.throttled = 3
        await target.deploy()
        service.throttled = 10_000
        await target.client.deploy(FunctionSpec("throttled", IMAGE))
        await failure_told(target, "throttled", "TooManyRequestsException")
        used = 10_000 - service.throttled
        assert 5 <= used <= 15, used
        service.throttled = 0
        await target.client.wait_ready("throttled", 1, timedelta(seconds=30))


async def test_an_invocation_that_cannot_be_started_for_a_moment_ends_no_other_of_its_function(
    service: Service, opened: Any
) -> None:
    async with opened() as target:
        probe = await target.deploy()
        # An event waits for room, and the next request is refused.
        service.quota = 1
        await target.client.scale(probe.name, 2)
        await asyncio.to_thread(until, lambda: len(told(service, "Invoke")) == 2)
        service.refusing = {"Invoke": Refusal(403, "ExpiredTokenException", "The security token is expired")}
        await target.client.scale(probe.name, 3)
        await asyncio.to_thread(until, lambda: service.refused)
        await asyncio.sleep(2)
        service.refusing, service.quota = {}, 1000
        await target.client.wait_ready(probe.name, 3, timedelta(seconds=40))
        assert (len(told(service, "CreateFunction")), len(told(service, "Invoke"))) == (1, 3)
        assert not told(service, "DeleteFunction")


async def test_a_function_that_was_deleted_by_others_is_made_again(service: Service, opened: Any) -> None:
    async with opened() as target:
        probe = await target.deploy()
        host, _ = await probe.process()
        service.functions.clear()
        await target.client.scale(probe.name, 2)
        await target.client.wait_ready(probe.name, 2, timedelta(seconds=40))
        assert len(told(service, "CreateFunction")) == 2
        assert host in {(await probe.process())[0] for _ in range(10)}


def test_a_function_is_set_up_once_lambda_has_made_it(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in service.variables.items():
        monkeypatch.setenv(name, value)
    service.pending_seconds, service.unknown_seconds = 0.6, 0.3
    functions = LambdaFunctions(LambdaGateway.model_validate(SETTINGS | {"reservedConcurrency": 5}))
    function = Hosted("geofed-a-1-f1", IMAGE, 256, {"geofed.gateway": "a"})
    functions.create(function)
    # As a request that is repeated after a lost answer.
    functions.create(function)
    assert not functions.is_ready(function.name)
    assert not told(service, "PutFunctionEventInvokeConfig")
    until(lambda: functions.is_ready(function.name))
    made = service.functions[function.name]
    assert (made.event_config["MaximumRetryAttempts"], made.concurrency) == (0, 5)
    conflict = Refusal(409, "ResourceConflictException", "An update is in progress")
    for operation in ("PutFunctionEventInvokeConfig", "PutFunctionConcurrency"):
        service.refusing = {operation: conflict}
        assert not functions.is_ready(function.name)
    service.refusing = {}
    assert functions.is_ready(function.name)
    service.functions.clear()
    with pytest.raises(NoFunction) as caught:
        functions.start(function.name, b"{}")
    assert caught.value.code == "GATEWAY_UNAVAILABLE"


async def test_an_outage_of_the_api_stops_no_call(service: Service, opened: Any) -> None:
    async with opened() as target:
        probe = await target.deploy()
        service.down = True
        await asyncio.sleep(2.5)
        assert (await probe("echo", b"x")).body == b"x"
        await target.client.delete(probe.name)
        await asyncio.to_thread(until, lambda: not service.working())
        assert service.functions
        service.down = False
        await asyncio.to_thread(until, lambda: not service.functions, 40)


async def test_a_handler_that_cannot_be_loaded_is_told(service: Service, opened: Any) -> None:
    service.images[IMAGE] = function_command("--handler", "no_such_module:handle")
    async with opened() as target:
        await target.client.deploy(FunctionSpec("broken", IMAGE))
        await failure_told(target, "broken", "could not be loaded")
        assert [line.text async for line in target.client.logs("broken") if "no_such_module" in line.text]


@pytest.mark.parametrize(
    ("code", "message", "status", "expected"),
    [
        ("ExpiredTokenException", "expired", 403, "UNAUTHENTICATED"),
        ("AccessDeniedException", "not authorized to perform: lambda:CreateFunction", 403, "FORBIDDEN"),
        ("InvalidParameterValueException", "Source image x does not exist. Provide a valid source image.", 400,
         "IMAGE_UNAVAILABLE"),
        ("InvalidParameterValueException", "Lambda does not have permission to access the ECR image.", 403,
         "IMAGE_UNAVAILABLE"),
        ("InvalidParameterValueException", "The role defined cannot be assumed", 400, "CONFIG_INVALID"),
        ("InvalidParameterValueException", "decreases account's UnreservedConcurrentExecution below", 400,
         "QUOTA_EXCEEDED"),
        ("CodeStorageExceededException", "full", 400, "QUOTA_EXCEEDED"),
        ("TooManyRequestsException", "Rate Exceeded.", 429, "GATEWAY_UNAVAILABLE"),
        ("ServiceException", "internal", 500, "GATEWAY_UNAVAILABLE"),
        ("RequestTooLargeException", "too large", 413, "LIMIT_EXCEEDED"),
        ("ResourceConflictException", "Pending", 409, "GATEWAY_UNAVAILABLE"),
    ],
)  # fmt: skip
def test_errors_of_the_api(code: str, message: str, status: int, expected: str) -> None:
    assert error_of(code, message, status, "a request failed").code == expected


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("ImageDeleted", "IMAGE_UNAVAILABLE"), ("EniLimitExceeded", "FUNCTION_UNSCHEDULABLE"),
        ("InvalidSubnet", "CONFIG_INVALID"), ("InternalError", "GATEWAY_UNAVAILABLE"),
    ],
)  # fmt: skip
def test_failed_states_of_functions(reason: str, expected: str) -> None:
    found = failure_of({"State": "Failed", "StateReasonCode": reason, "StateReason": "because"})
    assert (found.code, "because" in found.message) == (expected, True)


def test_the_service_of_these_tests_refuses_what_its_model_does_not_allow(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    import boto3
    from botocore.exceptions import ClientError

    for name, value in service.variables.items():
        monkeypatch.setenv(name, value)
    client = boto3.client("lambda")
    right = {"FunctionName": "a", "Role": ROLE, "Code": {"ImageUri": IMAGE}, "PackageType": "Image"}
    # Of what the service alone checks: a pattern, an enumeration, and a bound.
    for wrong in ({"Role": "worker"}, {"Architectures": ["riscv"]}, {"MemorySize": 20480}, {"FunctionName": "a b"}):
        with pytest.raises(ClientError):
            client.create_function(**{**right, **wrong})
    assert not service.functions


# Against moto, whose Lambda is another double: names, tags, concurrency and deletion.


@pytest.fixture
def moto(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    import subprocess
    import sys

    server = subprocess.Popen([sys.executable, "-c", MOTO], stdout=subprocess.PIPE)
    assert server.stdout is not None
    url = f"http://127.0.0.1:{int(server.stdout.readline())}"
    for name, value in {
        "AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_DEFAULT_REGION": "eu-central-1",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    yield url
    server.kill()
    server.wait()
    server.stdout.close()


def test_functions_are_made_found_and_deleted_at_moto(moto: str) -> None:
    import boto3

    iam = boto3.client("iam")
    role = iam.create_role(RoleName="geofed-worker", AssumeRolePolicyDocument="{}")["Role"]["Arn"]
    settings = LambdaGateway.model_validate(SETTINGS | {"role": role, "reservedConcurrency": 5})
    functions = LambdaFunctions(settings)
    for number in range(60):
        owner = "east" if number % 2 else "west"
        functions.create(Hosted(f"geofed-{owner}-1-f{number}", IMAGE, 256, {"geofed.gateway": owner}))
    assert functions.is_ready("geofed-east-1-f1")
    assert len(functions.names("east")) == 30
    client = boto3.client("lambda")
    held = client.get_function(FunctionName="geofed-east-1-f1")
    assert (held["Configuration"]["MemorySize"], held["Concurrency"]) == (256, {"ReservedConcurrentExecutions": 5})
    assert held["Configuration"]["Timeout"] == 900
    for name in functions.names("east"):
        functions.delete(name)
    functions.delete("geofed-east-1-f1")
    assert functions.names("east") == []
    assert len(functions.names("west")) == 30


def test_the_commands_of_the_page_set_up_what_functions_need(moto: str) -> None:
    import boto3

    root = Path(__file__).parents[3]
    page = (root / "docs" / "lambda.md").read_text()
    section = page.partition("## Setting up")[2].partition("\n## ")[0].replace("\\\n", " ")
    commands = [shlex.split(line) for line in section.splitlines() if line.startswith("    aws ") and "|" not in line]
    iam, logs, ecr = boto3.client("iam"), boto3.client("logs"), boto3.client("ecr")
    iam.create_role(RoleName="geofed-agent", AssumeRolePolicyDocument="{}")
    for _, service, command, *options in commands:
        client = boto3.client(service)
        operation = command.replace("-", "_")
        shape = client.meta.service_model.operation_model(client.meta.method_to_api_mapping[operation]).input_shape
        members = {xform_name(member, "-"): member for member in shape.members}
        given: dict[str, Any] = {}
        for option, value in zip(options[::2], options[1::2], strict=True):
            member = members[option.removeprefix("--")]
            text = (root / value.removeprefix("file://")).read_text() if value.startswith("file://") else value
            given[member] = int(text) if shape.members[member].type_name == "integer" else text
        getattr(client, operation)(**given)
    (repository,) = json.loads(ecr.get_repository_policy(repositoryName="geofed-worker")["policyText"])["Statement"]
    assert repository["Principal"] == {"Service": "lambda.amazonaws.com"}
    assert set(repository["Action"]) == {"ecr:BatchGetImage", "ecr:GetDownloadUrlForLayer"}
    (group,) = logs.describe_log_groups(logGroupNamePrefix="/geofed/worker")["logGroups"]
    assert group["retentionInDays"] == 14
    assert group["logGroupName"] == _LOG_GROUP
    assert not iam.list_attached_role_policies(RoleName="geofed-worker")["AttachedPolicies"]
    policies = {
        name: iam.get_role_policy(RoleName="geofed-worker", PolicyName=name)["PolicyDocument"]["Statement"]
        for name in iam.list_role_policies(RoleName="geofed-worker")["PolicyNames"]
    }
    assert policies.keys() == {"logs", "network"}
    (log,) = policies["logs"]
    assert fnmatch(f"arn:aws:logs:eu-central-1:123456789012:log-group:{_LOG_GROUP}:log-stream:a", log["Resource"])
    assert not fnmatch(
        "arn:aws:logs:eu-central-1:123456789012:log-group:/aws/lambda/other:log-stream:a", log["Resource"]
    )
    assert set(log["Action"]) == {"logs:CreateLogStream", "logs:PutLogEvents"}
    # Whoever asks for a network interface in the name of a function is job code.
    allowed, denied = policies["network"]
    (condition,) = denied["Condition"].values()
    assert (allowed["Effect"], denied["Effect"], denied["Action"]) == ("Allow", "Deny", "ec2:*")
    assert {one.partition(":")[0] for one in allowed["Action"]} == {"ec2"}
    function = "arn:aws:lambda:eu-central-1:123456789012:function:geofed-mark-1-f1"
    assert denied["Condition"].keys() == {"ArnLike"}
    assert fnmatch(function, condition["lambda:SourceFunctionArn"])
    assert iam.get_role_policy(RoleName="geofed-agent", PolicyName="functions")["PolicyDocument"]["Statement"]


# The event


def test_an_event_of_another_kind_is_refused_without_its_values() -> None:
    for event in (b"{}", b"[]", b"nothing", b'{"version": 2, "token": "very secret"}'):
        with pytest.raises(GeofedError) as caught:
            order_of(event)
        assert caught.value.code == "CONFIG_INVALID"
        assert "secret" not in str(caught.value)
    given = {"address": "a:1", "replica": "r", "token": "t", "certificate": "c", "life_seconds": 1, "memory_mb": 1}
    with pytest.raises(GeofedError):
        order_of(json.dumps({**given, "secrets": {"../etc": "eA=="}}).encode())
    assert order_of(json.dumps({**given, "secrets": {"one": "eA=="}}).encode()).secrets == {"one": b"x"}


async def test_a_second_process_of_a_replica_is_not_expected() -> None:
    from region_agent.gateway.dial_out import END, OUTPUT, ReplicaRefused
    from region_agent.gateway.embedded.dialled import Listener

    parts: list[bytes] = []
    ends: list[tuple[str, str]] = []
    dialled = DialledConnections(lambda _: None)
    await dialled.start("127.0.0.1", 0)
    try:
        dial = dialled.expect("one", Listener(parts.append, lambda reason, text: ends.append((reason, text))))
        context = dial.context
        output = await asyncio.to_thread(dial.connect, context, instance="first", use=OUTPUT)
        with pytest.raises(ReplicaRefused):
            await asyncio.to_thread(dial.connect, context, instance="second")
        for wrong in ({"use": "other"}, {"left": "soon"}, {"left": "nan"}, {"left": "-1"}):
            with pytest.raises(OSError):
                await asyncio.to_thread(partial(dial.connect, context, instance="first", **wrong))
        await asyncio.to_thread(output.sendall, b"a line\n")
        (await asyncio.to_thread(dial.connect, context, instance="first", use=END, reason="time", text="over")).close()
        await asyncio.sleep(0.2)
        assert (parts, ends, dialled.connected("one")) == ([b"a line\n"], [("time", "over")], True)
        output.close()
        await asyncio.sleep(0.2)
        assert not dialled.connected("one")
        # A platform that tells by itself gives no listener: nothing but calls is accepted.
        other = dialled.expect("two")
        with pytest.raises(OSError):
            await asyncio.to_thread(other.connect, context, use=OUTPUT)
    finally:
        await dialled.stop()


async def test_a_replica_that_was_given_up_a_moment_before_the_gateway_ends_is_told() -> None:
    from region_agent.gateway.dial_out import END, OUTPUT, ReplicaRefused
    from region_agent.gateway.embedded.dialled import Listener

    dialled = DialledConnections(lambda _: None)
    await dialled.start("127.0.0.1", 0)
    listener = Listener(lambda _: None, lambda *_: None)
    dial, ended = dialled.expect("one", listener), dialled.expect("two", listener)
    connections = [await asyncio.to_thread(one.connect, one.context) for one in (dial, ended)]
    (await asyncio.to_thread(ended.connect, ended.context, use=END, reason="time", text="over")).close()
    dialled.forget("one")
    stopping = asyncio.create_task(dialled.stop())
    # Output that nobody takes ends no invocation, and who knows the replica's name is not the replica: only what asks
    # for calls with its token has been told.
    stranger = replace(dial, token="0" * 64)
    for who, use in ((dial, OUTPUT), (stranger, ""), (dial, "")):
        await asyncio.sleep(0.2)
        assert not stopping.done()
        with pytest.raises(ReplicaRefused):
            await asyncio.to_thread(partial(who.connect, who.context, use=use))
    # The other one, which has said that it has ended, is not waited for.
    begun = time.monotonic()
    await stopping
    assert time.monotonic() - begun < 1.5
    for connection in connections:
        connection.close()


# The region file, the agent's policy and doctor


def _region(**changes: Any) -> RegionConfig:
    gateway = SETTINGS | changes.pop("gateway", {})
    return RegionConfig.model_validate(
        {
            "apiVersion": "geofed/v1", "kind": "Region", "metadata": {"name": "east"}, "cloud": "test",
            "capacity": {"workers": 4, "memoryMb": 1024}, "prices": None, "gateway": gateway, **changes,
        }
    )  # fmt: skip


def test_a_region_file_states_no_more_than_lambda_has() -> None:
    assert _region().life_seconds == 900
    _region(gateway={"reservedConcurrency": 5})
    for changes, text in (
        ({"capacity": {"workers": 1, "memoryMb": 12000}}, "128 to 10240 MB"),
        ({"capacity": {"workers": 1, "preemptible": 1}}, "has no preemptible capacity"),
        ({"gateway": {"subnets": ["subnet-1"]}}, "belong together"),
        ({"gateway": {"reservedConcurrency": 4}}, "must be at least 5"),
        ({"gateway": {"reservedConcurrency": 2}, "policy": {"maxWorkersPerJob": 2}}, "must be at least 3"),
        ({"gateway": {"lifeSeconds": 901}}, "900"),
        ({"gateway": {"scratchMb": 100}}, "512"),
        ({"gateway": {"image": "docker.io/geofed/worker"}}, "image"),
        ({"gateway": {"role": "geofed-worker"}}, "role"),
    ):
        with pytest.raises(ValueError, match=text):
            _region(**changes)


def test_a_slice_that_an_invocation_has_no_time_for_is_refused() -> None:
    datasets = {"d": {"splits": {"train": {"uri": "s3://b/d"}}}}
    region = _region(datasets=datasets)
    command = agent_pb2.StartPartition(
        job="a-1", region="east",
        task=agent_pb2.TaskRef(bundle_digest=f"sha256:{'0' * 64}", dataset="d"),
        plan=agent_pb2.PartitionPlan(workers=1, memory_mb=512, slice_seconds=585),
    )  # fmt: skip
    check_partition(region, command)
    for slice_seconds, gateway, longest in (
        (586, {}, 585), (586, {"startSeconds": 600}, 585), (406, {"startSeconds": 60, "lifeSeconds": 600}, 405),
        (585, {"lifeSeconds": 400}, 85), (30, {"lifeSeconds": 60}, 0),
    ):  # fmt: skip
        command.plan.slice_seconds = slice_seconds
        with pytest.raises(GeofedError) as caught:
            check_partition(_region(datasets=datasets, gateway=gateway), command)
        assert caught.value.code == "LIMIT_EXCEEDED"
        assert f"at most {longest}s there" in caught.value.hint


def test_the_shipped_policy_names_what_the_agent_asks_and_no_more(service: Service) -> None:
    from support.lambda_service import allowed_operations

    source = (Path(__file__).parents[3] / "region_agent" / "gateway" / "embedded" / "serverless" / "aws.py").read_text()
    asked = {_camel(one) for one in re.findall(r"self\._client\.([a-z_]+)\(", source)} - {"GetPaginator"}
    # Tags are given when a function is made.
    assert allowed_operations() == asked | {"ListFunctions", "TagResource"}


def _camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


async def test_doctor_makes_a_function_and_deletes_it(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in service.variables.items():
        monkeypatch.setenv(name, value)

    async def found(**changes: Any) -> Any:
        return {one.name: one for one in await examine(_region(**changes), tmp_path)}["gateway"]

    right = await found()
    assert right.ok, right
    assert "AWS Lambda in eu-central-1: may run functions, 1000 invocations" in right.text
    assert [given.get("InvocationType") for given in told(service, "Invoke")] == ["DryRun"]
    assert told(service, "CreateFunction")[0]["MemorySize"] == 1024
    assert not service.functions
    assert not service.ended
    service.quota = 7
    short = await found()
    assert (short.ok, "4 workers need 8" in short.text) == (False, True)
    service.quota = 1000
    service.failing = {"StateReasonCode": "InvalidImage", "StateReason": "not an image for Lambda"}
    assert "not an image for Lambda" in (await found()).text
    assert not service.functions
    service.failing = {}
    for operation in ("CreateFunction", "Invoke", "ListFunctions", "DeleteFunction", "PutFunctionEventInvokeConfig"):
        service.allowed.discard(operation)
        refused = await found()
        assert (refused.ok, f"lambda:{operation}" in refused.text) == (False, True), refused
        service.allowed.add(operation)
        service.functions.clear()
    service.pending_seconds = 60
    late = await found(gateway={"startSeconds": 1})
    assert (late.ok, "within 1 s" in late.text) == (False, True)
    service.key = "AKIAOTHER"
    assert "security token" in (await found()).text
