"""Functions as invocations at Tencent Cloud SCF: what differs from AWS Lambda, whose tests cover what both share."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from geofed_pb.errors import GeofedError
from region_agent.config import RegionConfig, ScfGateway
from region_agent.doctor import examine
from region_agent.gateway import FunctionSpec

pytest.importorskip("tencentcloud.scf")

from support.lambda_service import Refusal, function_command
from support.processes import Start, execute
from support.scf_service import IMAGE, REGION, Service

from region_agent.gateway.embedded.serverless.api import Hosted, NoFunction
from region_agent.gateway.embedded.serverless.provider import memory_mb
from region_agent.gateway.embedded.serverless.tencent import ScfFunctions, error_of
from tests.region_agent.gateway.conftest import HANDLERS, Embedded, Target, open_target, until

pytestmark = [pytest.mark.anyio, pytest.mark.processes]
_numbers = itertools.count(1)


@pytest.fixture
def service(tmp_path: Path, start_function: Start) -> Iterator[Service]:
    (tmp_path / "scf").mkdir()
    images = {IMAGE: function_command("--handler", "gateway_probe:handle", path=str(HANDLERS))}
    with Service(tmp_path / "scf", images, start_function) as made:
        yield made


@pytest.fixture
def opened(service: Service, launch: Callable[..., Embedded]) -> Callable[..., Any]:
    @asynccontextmanager
    async def opened(**settings: Any) -> AsyncIterator[Target]:
        section = section_of(service) | settings
        embedded = launch(serverless=section, owner="mark", drain_timeout="1s", variables=service.variables)
        async with open_target(embedded) as target:
            target.image = IMAGE
            yield target
        embedded.stop()

    return opened


def section_of(service: Service) -> dict[str, Any]:
    return {"kind": "scf", "image": IMAGE, "tencentRegion": REGION, "endpoint": service.url}


async def refused(target: Target, **members: Any) -> GeofedError:
    """Deploy a function that cannot start; returns the error of waiting for it."""
    name = f"refused-{next(_numbers)}"
    await target.client.deploy(FunctionSpec(name, members.pop("image", IMAGE), **members))
    with pytest.raises(GeofedError) as caught:
        await target.client.wait_ready(name, 1, timedelta(seconds=60))
    await target.client.delete(name)
    return caught.value


def told(service: Service, action: str) -> list[dict[str, Any]]:
    return [given for name, given in service.requests if name == action]


async def test_a_replica_is_an_event_of_a_job_image(service: Service, opened: Any) -> None:
    # As at the platform: with an environment that the kernel keeps.
    service.start = execute
    given = {"vpc": "vpc-1a", "subnet": "subnet-2b", "reservedConcurrency": 4, "role": "geofed-worker"}
    async with opened(**given) as target:
        await target.client.create_secret("token", b"very secret")
        labels = {"geofed.region": "south", "geofed.job": "digits-1"}
        limits = {"memory": "500Mi"}
        probe = await target.deploy(
            replicas=2, secrets=("token",), labels=labels, limits=limits, env_vars={"PLAIN": "hidden"}
        )
        assert (await probe("secret?name=token")).body == b"very secret"
        seen = json.loads((await probe("env")).body)
        assert seen["environ"]["PLAIN"] == "hidden"
        assert not [name for name in seen["environ"] if name.startswith(("SCF_", "TENCENTCLOUD_"))]
        assert "SCF_CUSTOM" not in seen["initial"]
        (made,) = told(service, "CreateFunction")
        assert {one["Key"]: one["Value"] for one in made["Tags"]}.items() >= {
            **labels,
            "geofed.gateway": "mark",
        }.items()
        # A multiple of 128 MB.
        assert (made["MemorySize"], made["Timeout"], made["Role"]) == (512, 900, "geofed-worker")
        assert made["VpcConfig"] == {"VpcId": "vpc-1a", "SubnetId": "subnet-2b"}
        assert "hidden" not in json.dumps(made)
        (events,) = told(service, "UpdateFunctionEventInvokeConfig")
        assert events["AsyncTriggerConfig"] == {"RetryConfig": [{"RetryNum": 0}], "MsgTTL": 60}
        assert told(service, "PutReservedConcurrencyConfig")[0]["ReservedConcurrencyMem"] == 4 * 512
        assert [one["InvocationType"] for one in told(service, "Invoke")] == ["Event", "Event"]
    assert service.functions == {}
    until(lambda: not service.running, 90.0)  # as long as one lasts that the word of the end has not reached
    assert [kind for _, kind in service.ended] == ["success", "success"]


async def test_a_function_has_the_image_that_it_states(service: Service, opened: Any) -> None:
    other = IMAGE.replace("worker:1", "worker-of-a-team:1")
    service.images[other] = service.images[IMAGE]
    async with opened() as target:
        await target.deploy(image=other)
        (made,) = told(service, "CreateFunction")
        assert made["Code"]["ImageConfig"]["ImageUri"] == other


async def test_a_killed_invocation_is_replaced_and_its_call_told(service: Service, opened: Any) -> None:
    async with opened() as target:
        probe = await target.deploy()
        host, _ = await probe.process()
        call = asyncio.create_task(probe("wait?s=30"))
        await asyncio.sleep(0.5)
        service.running[0].process.kill()
        with pytest.raises(GeofedError) as caught:
            await call
        assert caught.value.code == "FUNCTION_EVICTED"
        await target.client.wait_ready(probe.name, 1, timedelta(seconds=20))
        assert (await probe.process())[0] != host


async def test_a_replica_is_replaced_before_the_platforms_limit(service: Service, opened: Any) -> None:
    async with opened(lifeSeconds=30) as target:
        probe = await target.deploy(env_vars={"exec_timeout": "4s"})
        first = (await probe.process())[0]
        begun = time.monotonic()
        while (await probe.process())[0] == first:
            assert time.monotonic() - begun < 30
            await asyncio.sleep(0.3)
    until(lambda: not service.running, 90.0)  # as long as one lasts that the word of the end has not reached
    assert {kind for _, kind in service.ended} == {"success"}


async def test_an_event_that_is_run_twice_is_one_replica(service: Service, opened: Any) -> None:
    service.twice = True
    async with opened() as target:
        probe = await target.deploy()
        await asyncio.to_thread(until, lambda: len(service.ended) == 1)
        assert len(service.running) == 1
        assert len({await probe.process() for _ in range(5)}) == 1


async def test_what_a_killed_gateway_has_left_is_deleted(service: Service, opened: Any) -> None:
    async with opened() as target:
        await target.deploy()
        assert target.embedded is not None
        target.embedded.kill()
        (left,) = service.functions
    strange = {**service.functions[left].given, "Tags": [{"Key": "geofed.gateway", "Value": "else"}]}
    service.functions["geofed-mark-other"] = type(service.functions[left])(strange, 0.0, status="Active")
    async with opened():
        await asyncio.to_thread(until, lambda: list(service.functions) == ["geofed-mark-other"], 20)


async def test_what_cannot_be_made_is_told(service: Service, opened: Any) -> None:
    async with opened(startSeconds=5) as target:
        assert (await refused(target, image=IMAGE.replace(":1", ":none"))).code == "IMAGE_UNAVAILABLE"
        service.failing = [{"ErrorCode": "FailedOperation.InsufficientResources", "ErrorMessage": "no room"}]
        assert (await refused(target)).code == "FUNCTION_UNSCHEDULABLE"
        service.failing, service.denied = [], {"CreateFunction"}
        assert (await refused(target)).code == "FORBIDDEN"
        service.denied, service.throttled = set(), 3
        await target.deploy()
        # No room for another event.
        service.memory_mb = 1024
        error = await refused(target)
        assert (error.code, "within 5 s" in error.message) == ("FUNCTION_UNSCHEDULABLE", True)
    async with opened(reservedConcurrency=200) as target:
        service.memory_mb = 128_000
        assert (await refused(target)).code == "QUOTA_EXCEEDED"


async def test_an_event_that_is_refused_for_a_moment_ends_no_other_of_its_function(
    service: Service, opened: Any
) -> None:
    async with opened() as target:
        probe = await target.deploy()
        service.refusing = {"Invoke": Refusal(0, "AuthFailure.SignatureExpire", "the signature is expired")}
        await target.client.scale(probe.name, 2)
        await asyncio.to_thread(until, lambda: service.refused)
        await asyncio.sleep(2)
        assert len(service.functions) == 1
        service.refusing = {}
        await target.client.wait_ready(probe.name, 2, timedelta(seconds=40))
        assert len(told(service, "CreateFunction")) == 1


def test_a_function_is_set_up_once_scf_has_made_it(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in service.variables.items():
        monkeypatch.setenv(name, value)
    service.unknown_seconds, service.conflicts = 0.3, 1
    functions = ScfFunctions(ScfGateway.model_validate(section_of(service)))
    function = Hosted("geofed-a-1-f1", IMAGE, 256, {"geofed.gateway": "a"})
    functions.create(function)
    functions.create(function)
    assert not functions.is_ready(function.name)
    until(lambda: functions.is_ready(function.name))
    assert (service.conflicts, service.functions[function.name].events["MsgTTL"]) == (0, 60)
    functions.delete(function.name)
    functions.delete(function.name)
    with pytest.raises(NoFunction) as caught:
        functions.start(function.name, b"{}")
    assert caught.value.code == "GATEWAY_UNAVAILABLE"


async def test_secrets_that_no_event_holds_are_told(opened: Any) -> None:
    async with opened() as target:
        for name in ("one", "two"):
            await target.client.create_secret(name, bytes(64 * 1024))
        error = await refused(target, secrets=("one", "two"))
        assert (error.code, "takes 130000" in error.message) == ("LIMIT_EXCEEDED", True)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("AuthFailure.SignatureExpire", "UNAUTHENTICATED"), ("UnauthorizedOperation.CAM", "FORBIDDEN"),
        ("AuthFailure.UnauthorizedOperation", "FORBIDDEN"), ("LimitExceeded.Function", "QUOTA_EXCEEDED"),
        ("FailedOperation.InsufficientBalance", "QUOTA_EXCEEDED"), ("InternalError.System", "GATEWAY_UNAVAILABLE"),
        ("RequestLimitExceeded", "GATEWAY_UNAVAILABLE"), ("InvalidParameterValue.ImageUri", "IMAGE_UNAVAILABLE"),
        ("InvalidParameterValue.Vpc", "CONFIG_INVALID"), ("ResourceNotFound.Role", "CONFIG_INVALID"),
        ("InvalidParameter.RequestTooLarge", "LIMIT_EXCEEDED"), ("ClientNetworkError", "GATEWAY_UNAVAILABLE"),
    ],
)  # fmt: skip
def test_errors_of_the_api(code: str, expected: str) -> None:
    assert error_of(code, "because", "a request failed").code == expected


def test_memory_is_a_multiple_of_128_mb() -> None:
    sizes = {"64Mi": 128, "128Mi": 128, "129Mi": 256, "3000Mi": 3072}
    for asked, given in sizes.items():
        assert memory_mb(FunctionSpec("a", "i", limits={"memory": asked}), (128, 3072), 128) == given


def test_the_service_of_these_tests_refuses_what_is_not_documented(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in service.variables.items():
        monkeypatch.setenv(name, value)
    functions = ScfFunctions(ScfGateway.model_validate(section_of(service)))
    right = {
        "FunctionName": "a1", "Type": "Event", "MemorySize": 128,
        "Code": {"ImageConfig": {"ImageType": "personal", "ImageUri": IMAGE, "ImagePort": -1}},
    }  # fmt: skip
    for wrong in (
        {"MemorySize": 200}, {"FunctionName": "a-"}, {"Timeout": 901}, {"Type": 1}, {"Tags": {"a": "b"}},
        {"Code": {"ImageConfig": {"ImageUri": IMAGE, "ImagePort": 9000}}},
    ):  # fmt: skip
        with pytest.raises((GeofedError, TypeError, AttributeError)):
            functions._ask("CreateFunction", "wrong", {**right, **wrong})
    assert not service.functions
    functions._ask("CreateFunction", "right", right)
    assert list(service.functions) == ["a1"]


def _region(service: Service, **changes: Any) -> RegionConfig:
    gateway = section_of(service) | changes.pop("gateway", {})
    return RegionConfig.model_validate(
        {
            "apiVersion": "geofed/v1", "kind": "Region", "metadata": {"name": "south"}, "cloud": "test",
            "capacity": {"workers": 4, "memoryMb": 1024}, "prices": None, "gateway": gateway, **changes,
        }
    )  # fmt: skip


def test_a_region_file_states_no_more_than_scf_has(service: Service) -> None:
    for changes, text in (
        ({"capacity": {"workers": 1, "memoryMb": 4096}}, "128 to 3072 MB"),
        ({"capacity": {"workers": 1, "preemptible": 1, "memoryMb": 1024}}, "has no preemptible capacity"),
        ({"channel": {"kind": "s3", "bucket": "b-125"}}, "workerCredentialsFile"),
        ({"gateway": {"vpc": "vpc-1"}}, "belong together"),
        ({"gateway": {"lifeSeconds": 901}}, "900"),
        ({"gateway": {"imageType": "enterprise"}}, "registryId"),
        ({"gateway": {"image": "docker.io/geofed/worker"}}, "image"),
    ):
        with pytest.raises(ValueError, match=text):
            _region(service, **changes)


async def test_doctor_makes_a_function_and_deletes_it(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in service.variables.items():
        monkeypatch.setenv(name, value)

    async def found(**changes: Any) -> Any:
        return {one.name: one for one in await examine(_region(service, **changes), tmp_path)}["gateway"]

    right = await found()
    assert right.ok, right
    assert "SCF in ap-guangzhou: may make functions, 128000 MB" in right.text
    assert told(service, "CreateFunction")[0]["MemorySize"] == 1024
    assert not service.functions
    assert not told(service, "Invoke")
    service.memory_mb = 8000
    assert "4 workers need 8192 MB" in (await found()).text
    service.memory_mb = 128_000
    for action in ("CreateFunction", "ListFunctions", "DeleteFunction", "UpdateFunctionEventInvokeConfig"):
        service.denied = {action}
        refused = await found()
        assert (refused.ok, f"scf:{action}" in refused.text) == (False, True), refused
        service.functions.clear()
    service.denied = set()
    assert "in plaintext; use https://" in (await found(gateway={"endpoint": "http://203.0.113.7"})).text
    service.key = "AKIDOTHER"
    assert "SecretId" in (await found()).text
