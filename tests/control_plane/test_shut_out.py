"""Regions that the operator drains, shuts out or removes; sessions that say nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from control_plane.server import ServeConfig
from control_plane.service.rpc import _agents
from geofed_pb.errors import GeofedError
from geofed_pb.rpc import error_of
from geofed_pb.v1 import agent_pb2_grpc
from tests.control_plane.conftest import Stage, staged
from tests.control_plane.fake_agent import FakeAgent, join
from tests.control_plane.scenario import bring_up, run, train


async def refused(call: Any, code: str, text: str = "") -> None:
    with pytest.raises(GeofedError, match=text or code) as caught:
        await call
    assert caught.value.code == code


async def told(agent: FakeAgent) -> None:
    """Connect until the answer arrives: gRPC loses it where the server has ended the call during a write."""
    for _ in range(20):
        try:
            await agent.connect()
        except GeofedError as error:
            if error.code != "UNAVAILABLE":
                raise
        else:
            return


async def state_of(stage: Stage, region: str) -> str:
    return {found.name: found.state for found in await stage.client.regions()}.get(region, "")


@pytest.mark.slow
def test_a_revoked_region_is_out_at_once_everywhere(serve_config: ServeConfig, job_file: Path) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            a, b = await bring_up(stage)
            assert a.revoked == []
            job = await stage.submit(job_file)
            await train(job.job.id, a, b)
            unused = (await stage.client.invite("b")).token
            await stage.client.change_region("b", "revoke", "its disk was stolen")
            assert (await b.ended()).code == "FORBIDDEN"
            await refused(told(b), "FORBIDDEN", "not valid any more")
            await refused(join(unused), "TOKEN_INVALID")
            await a._until(lambda: len(a.revoked) == 1)
            ended = await stage.client.job(job.job.id)
            assert (ended.state, ended.error.code) == ("failed", "REGION_LOST")
            assert "b was shut out by the operator" in ended.error.message
            await a.told_to_stop(job.job.id)
            assert await state_of(stage, "b") == "revoked"
            kinds = [event.kind async for event in stage.client.watch("", follow=False)]
            assert kinds.count("region.revoked") == 1
            await stage.client.change_region("b", "revoke")
            late = FakeAgent(await join((await stage.client.invite("b")).token))
            await late.connect()
            assert late.revoked == a.revoked, "who comes later is told, too"
            assert await state_of(stage, "b") == "live"
            for agent in (a, late):
                await agent.close()
        async with staged(serve_config) as stage:
            await refused(moved(b, stage).connect(), "FORBIDDEN")
            again = moved(late, stage)
            await again.connect()
            assert again.revoked == a.revoked
            await again.close()

    run(scenario())


def moved(agent: FakeAgent, stage: Stage) -> FakeAgent:
    known = agent.identity
    address = f"127.0.0.1:{stage.ports.agent}"
    return FakeAgent(type(known)(known.region, address, known.ca_pem, known.certificate_pem, known.key_pem), "later")


def test_whoever_joins_again_has_its_former_certificate_revoked(serve_config: ServeConfig) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            a, b = await bring_up(stage)
            again = await stage.agent("b")
            await a._until(lambda: len(a.revoked) == 1)
            await refused(b.fetch(f"sha256:{'0' * 64}"), "FORBIDDEN", "not valid any more")
            await again.connect()
            for agent in (a, b, again):
                await agent.close()

    run(scenario())


def test_a_drained_region_gets_no_new_jobs_and_keeps_those_it_has(serve_config: ServeConfig, job_file: Path) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            a, b = await bring_up(stage)
            job = await stage.submit(job_file)
            await train(job.job.id, a, b)
            waiting = await stage.submit(job_file, "r2", ("train.seed=2", "train.workers=2"))
            assert waiting.job.state == "queued"
            drained = await stage.client.change_region("b", "drain", move=True)
            assert drained.state == "draining"
            assert (await stage.client.job(job.job.id)).state == "running"
            await refused(stage.submit(job_file, "r3", ("regions.use=[b]",)), "INADMISSIBLE")
            await refused(stage.client.change_region("b", "remove"), "ILLEGAL_STATE", "has jobs")
            await stage.client.cancel(job.job.id)
            for agent in (a, b):
                await agent.told_to_stop(job.job.id)
                agent.report(job.job.id, "stopped")
                await agent.settled()

            async def held() -> bool:
                return (await stage.client.job(waiting.job.id)).condition == "waiting for b (draining) to take new jobs"

            await until(held)
            await stage.client.change_region("b", "undrain")
            assert (await a.command("start", 2)).job == waiting.job.id
            for agent in (a, b):
                await agent.close()

    run(scenario())


async def until(condition: Any) -> None:
    async with asyncio.timeout(15):
        while not await condition():  # noqa: ASYNC110 - only the control plane knows
            await asyncio.sleep(0.1)


@pytest.mark.slow
def test_a_removed_region_is_forgotten_but_not_forgiven(serve_config: ServeConfig) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            a, b = await bring_up(stage)
            await stage.client.change_region("b", "remove")
            assert (await b.ended()).code == "FORBIDDEN"
            await a._until(lambda: len(a.revoked) == 1)
            assert [region.name for region in await stage.client.regions()] == ["a"]
            await refused(b.connect(), "FORBIDDEN", "not part of this federation")
            await refused(stage.client.change_region("b", "drain"), "REGION_NOT_FOUND")
            await a.close()
        async with staged(serve_config) as stage:
            assert [region.name for region in await stage.client.regions()] == ["a"]

    run(scenario())


def test_a_session_without_a_word_ends(serve_config: ServeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_agents, "_HELLO_SECONDS", 0.3)

    async def scenario() -> None:
        async with staged(serve_config) as stage:
            agent = await stage.agent("a")
            async with agent.identity.open() as connection:
                call = agent_pb2_grpc.AgentHubStub(connection).Session()
                await call.wait_for_connection()
                with pytest.raises(grpc.RpcError) as caught:
                    await asyncio.wait_for(call.read(), 10)
            assert "no hello within" in error_of(caught.value).message

    run(scenario())
