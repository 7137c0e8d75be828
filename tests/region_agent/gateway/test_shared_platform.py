"""What regions that share a platform need: names and labels of functions, and the limits of its edition."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from geofed_pb.errors import GeofedError
from geofed_pb.platforms import EDITIONS, edition_of
from region_agent import doctor
from region_agent.config import RegionConfig
from region_agent.doctor import Finding, examine
from region_agent.gateway import FunctionSpec, FunctionStatus
from region_agent.gateway.functions import is_dns_label
from region_agent.gateway.owner import Owner
from region_agent.state.store import AgentStore
from tests.region_agent.gateway.test_client import gateway_that

EAST, WEST = Owner.of("east", b"key"), Owner.of("west", b"key")
JOB = "a-name-of-forty-characters-at-the-very-m-0123abcd"


def _deployed(name: str, labels: dict[str, str]) -> FunctionStatus:
    return FunctionStatus(FunctionSpec(name, "image", labels=labels), 1, 1, 0, None)


def test_no_two_regions_have_a_function_of_one_name() -> None:
    owners = [EAST, WEST, Owner.of("east", b"another federation"), Owner("east")]
    names = {owner.name(job, part) for owner in owners for job in (JOB, JOB[:-1] + "e") for part in (0, 1, 12)}
    assert len(names) == len(owners) * 2 * 3
    assert all(is_dns_label(name) and "0123abc" in name for name in names)


def test_only_ones_own_functions_without_a_job_are_orphans() -> None:
    functions = [_deployed(f"{one.region}-{job}", one.labels(job)) for one in (EAST, WEST) for job in ("a", "b", JOB)]
    functions += [_deployed("strange", {}), _deployed("other", {"geofed.owner": EAST.mark})]
    assert EAST.orphans(functions, {"b", JOB}) == ["east-a"]
    assert EAST.of_job(functions, JOB) == [f"east-{JOB}"]
    assert all(len(value) <= 63 for value in EAST.labels("x" * 80).values())
    assert Owner("east").orphans(functions, ()) == []


def test_only_ones_own_secrets_without_a_job_are_orphans() -> None:
    names = ["token", "x" * 63, "x" * 62 + "y"]
    owners = [EAST, WEST, Owner.of("east", b"another federation")]
    jobs = [(owner, job) for owner in owners for job in (JOB, "b")]
    copies = {(owner.mark, job, name): owner.secret(name, job) for owner, job in jobs for name in names}
    assert len(set(copies.values())) == len(copies)
    assert all(is_dns_label(name) for name in copies.values())
    there = [*copies.values(), *names, f"token-{EAST.mark}"]
    assert EAST.secrets_of(there, "b") == [copies[EAST.mark, "b", name] for name in names]
    assert EAST.orphan_secrets(there, {"b"}) == [copies[EAST.mark, JOB, name] for name in names]
    assert EAST.orphan_secrets(there, {"b", JOB}) == []
    assert len(EAST.orphan_secrets(there, ())) == 6
    own = Owner("east")
    assert (own.secret("token", JOB), own.secrets_of(there, JOB), own.orphan_secrets(there, ())) == ("token", [], [])


def test_a_regions_mark_stays_when_the_authority_changes(tmp_path: Path) -> None:
    for made in (EAST.mark, WEST.mark):
        store = AgentStore(tmp_path / "agent.db")
        assert store.owner_mark(made) == EAST.mark
        store.close()


@pytest.mark.parametrize(
    ("provider", "configured", "edition"),
    [
        ({"provider": "faasd", "orchestration": "containerd"}, "auto", "faasd"),
        ({"provider": "faas-netes", "orchestration": "kubernetes"}, "auto", "ce"),
        ({"provider": "faas-netes", "orchestration": "kubernetes"}, "pro", "pro"),
        ({"provider": "geofed-embedded", "profile": "none"}, "auto", "none"),
        ({}, "auto", "ce"),
    ],
)
def test_which_edition_a_gateway_is(provider: dict[str, str], configured: str, edition: str) -> None:
    assert edition_of(provider, configured).name == edition


def test_workers_are_shared_out_to_functions() -> None:
    assert EDITIONS["none"].shares(7) == EDITIONS["pro"].shares(7) == [7]
    assert EDITIONS["ce"].shares(7) == [5, 2]
    assert EDITIONS["faasd"].shares(3) == [1, 1, 1]
    assert EDITIONS["ce"].shares(0) == []


@pytest.mark.anyio
async def test_what_does_not_listen_yet_is_waited_for() -> None:
    answers = iter([(500, {"X-OpenFaaS-Internal": "proxy"}), (503, {}), (200, {})])

    def answer(request: Request) -> Response:
        if request.url.path.startswith("/system"):
            return JSONResponse({"name": "f", "image": "i", "replicas": 1, "availableReplicas": 1})
        status, headers = next(answers)
        return PlainTextResponse("Can't reach service for: f.", status, headers)

    async with gateway_that(answer) as (client, seen):
        await client.wait_ready("f", 1, timedelta(seconds=5))
        assert [one.url.path for one in seen].count("/function/f/_/ready") == 3


@pytest.mark.anyio
async def test_a_function_that_ended_during_a_call_is_told_with_what_to_do() -> None:
    headers = {"X-OpenFaaS-Internal": "proxy"}
    async with gateway_that(lambda _: PlainTextResponse("Can't reach service for: f.", 500, headers)) as (client, _):
        with pytest.raises(GeofedError) as caught:
            await client.invoke("f")
        assert (caught.value.code, "function.memoryMb" in caught.value.hint) == ("FUNCTION_FAILED", True)
        with pytest.raises(GeofedError, match="does not answer at /_/ready"):
            await client.wait_answering("f", timedelta(milliseconds=200))


@pytest.mark.anyio
async def test_a_deletion_that_fails_is_repeated() -> None:
    answers = iter([500, 500, 200])
    async with gateway_that(lambda _: PlainTextResponse("cannot delete running task", next(answers))) as (client, seen):
        await client.delete("f")
        assert [one.method for one in seen] == ["DELETE"] * 3


def _region(folder: Path, **more: Any) -> RegionConfig:
    body = {
        "apiVersion": "geofed/v1", "kind": "Region", "metadata": {"name": "east"}, "cloud": "test",
        "capacity": {"workers": 80, "memoryMb": 1024},
        "datasets": {"d": {"splits": {"train": {"uri": str(folder / "data.npz"), "samples": 4}}}}, **more,
    }  # fmt: skip
    return RegionConfig.model_validate(body)


def test_doctor_looks_from_where_functions_are(tmp_path: Path) -> None:
    (tmp_path / "data.npz").write_bytes(b"x")

    async def findings() -> dict[str, Finding]:
        told = {"provider": {"provider": "faas-netes", "orchestration": "kubernetes"}}
        async with gateway_that(lambda _: JSONResponse(told)) as (client, _):
            gateway = {"kind": "openfaas", "url": client._url, "image": "i"}
            return {one.name: one for one in await examine(_region(tmp_path, gateway=gateway), tmp_path)}

    found = asyncio.run(findings())
    for name, told, to_do in (
        ("gateway", "75 at most: 15 functions with 5 replicas each", "edition: pro"),
        ("data d", "which functions of OpenFaaS do not see", "s3://"),
        ("channel", "which functions of OpenFaaS do not see", "Redis"),
        ("ports", "`server.workerHost` is 127.0.0.1", "network of the functions"),
    ):
        assert not found[name].ok
        assert told in found[name].text
        assert to_do in found[name].hint
    channel = {"kind": "redis", "url": "redis://127.0.0.1:1"}
    gateway = {"kind": "openfaas", "url": "http://127.0.0.1:1", "image": "i"}
    with pytest.raises(GeofedError, match=r"address 127.0.0.1:1 is of this machine only"):
        asyncio.run(doctor._channel(_region(tmp_path, channel=channel, gateway=gateway), tmp_path))
