"""Named users: their tokens, what is theirs, what may be promised to them; over real TLS sockets, by played agents."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from control_plane.cli.commands import user as user_commands
from control_plane.client import ControlClient
from control_plane.server import ServeConfig
from control_plane.service.state._callers import ROLES
from control_plane.spec import load, pack
from geofed_pb.errors import GeofedError
from geofed_pb.v1 import common_pb2
from tests.control_plane.conftest import Stage, staged
from tests.control_plane.scenario import bring_up, run, train

SOON = "objective.deadline=10m"
ONE = "train.workers=1"


@asynccontextmanager
async def as_user(stage: Stage, token: str) -> AsyncIterator[ControlClient]:
    async with ControlClient(stage.context.address, stage.context.ca_file.read_bytes(), token) as client:
        yield client


async def submitted(client: ControlClient, job_file: Path, request_id: str, *overrides: str) -> Any:
    loaded = load(job_file, overrides)
    packed = pack(loaded.folder, loaded.spec.task.module)
    content, digest = packed.content, packed.digest
    await client.put_bundle(content, digest)
    return (await client.submit(loaded.json, digest, request_id)).job


async def refused(call: Any, code: str, text: str = "") -> GeofedError:
    with pytest.raises(GeofedError, match=text or code) as caught:
        await call
    assert caught.value.code == code
    return caught.value


async def _soon(condition: Callable[[], Awaitable[bool]]) -> None:
    """What changes without an event."""
    async with asyncio.timeout(15):
        while not await condition():  # noqa: ASYNC110 - only the control plane knows
            await asyncio.sleep(0.1)


@pytest.mark.slow
def test_users_come_and_go_and_their_tokens_are_not_kept(serve_config: ServeConfig) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            told = await stage.client.add_user("ann", 4)
            assert (told.user.name, told.user.promised_workers) == ("ann", 4)
            bob = (await stage.client.add_user("bob")).token
            await refused(stage.client.add_user("ann"), "ILLEGAL_STATE", "user ann exists already")
            for name in ("operator", "Ann", "", "-a"):
                await refused(stage.client.add_user(name), "CONFIG_INVALID", "is not a valid user name")
            async with as_user(stage, told.token) as ann:
                assert [user.name for user in await ann.users()] == ["ann"]
                await refused(ann.add_user("eve"), "FORBIDDEN")
                await refused(ann.change_user("ann", no_quota=True), "FORBIDDEN")
                await refused(ann.remove_user("bob"), "FORBIDDEN")
                await refused(ann.invite("c"), "FORBIDDEN", "only the operator may do that, not ann")
                new = (await stage.client.change_user("ann", new_token=True)).token
                await refused(ann.jobs(), "UNAUTHENTICATED")
            changed = (await stage.client.change_user("ann", 0)).user
            assert changed.HasField("promised_workers")
            assert changed.promised_workers == 0
            assert not (await stage.client.change_user("ann", no_quota=True)).user.HasField("promised_workers")
            assert [user.name for user in await stage.client.users()] == ["ann", "bob"]
            await refused(stage.client.remove_user("eve"), "USER_NOT_FOUND")
        stored = b"".join(path.read_bytes() for path in serve_config.state_dir.glob("state.db*"))
        assert not any(token.encode() in stored for token in (told.token, bob, new))
        async with staged(serve_config) as stage, as_user(stage, new) as ann:
            assert await ann.jobs() == []
            await stage.client.remove_user("ann")
            await refused(ann.jobs(), "UNAUTHENTICATED")
            kinds = [event.kind async for event in stage.client.watch("", follow=False)]
            assert [kind for kind in kinds if kind.startswith("user.")] == [
                "user.added", "user.added", "user.changed", "user.changed", "user.changed", "user.removed",
            ]  # fmt: skip

    run(scenario())


def test_a_token_is_valid_for_its_time_also_where_a_call_lasts(serve_config: ServeConfig) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            told = await stage.client.add_user("ann", role="auditor", token_seconds=3.0)
            assert told.user.token_expires_at == pytest.approx(told.user.created_at + 3)
            async with as_user(stage, told.token) as ann:
                assert await ann.jobs() == []

                async def follow() -> None:
                    async for _ in ann.watch("", follow=True):
                        pass

                following = asyncio.ensure_future(follow())
                await asyncio.sleep(max(0.0, told.user.token_expires_at - time.time()) + 0.1)
                error = await refused(ann.jobs(), "UNAUTHENTICATED", "the token of ann expired on ")
                assert "geofed user change ann --new-token" in error.hint
                await stage.client.add_user("bob")
                await refused(asyncio.wait_for(following, 10), "UNAUTHENTICATED", "the token of ann expired on ")
            new = await stage.client.change_user("ann", new_token=True)
            assert new.user.token_expires_at == 0
            async with as_user(stage, new.token) as ann:
                assert await ann.jobs() == []
            for seconds in (-1.0, 1e12, float("nan")):
                await refused(stage.client.add_user("cyd", token_seconds=seconds), "CONFIG_INVALID", "valid for")
            await refused(stage.client.add_user("cyd", role="root"), "CONFIG_INVALID", "'root' is not a role")

    run(scenario())


def test_the_command_names_the_roles_that_there_are() -> None:
    assert set(user_commands._ROLES) == set(ROLES)


_told: list[str] = []


async def _all_of(events: AsyncIterator[Any]) -> None:
    _told.clear()
    async for event in events:
        _told.append(event.kind)


def test_an_auditor_sees_what_all_jobs_are_and_a_named_operator_rules(
    serve_config: ServeConfig, job_file: Path
) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            await bring_up(stage)
            job = await submitted(stage.client, job_file, "r1")
            eve = (await stage.client.add_user("eve", role="auditor")).token
            oli = (await stage.client.add_user("oli", role="operator")).token
            async with as_user(stage, eve) as auditor, as_user(stage, oli) as operator:
                assert [one.id for one in await auditor.jobs()] == [job.id]
                assert (await auditor.job(job.id)).spec_json == (await stage.client.job(job.id)).spec_json
                assert [event.kind async for event in auditor.watch("", follow=False)]
                assert [user.name for user in await auditor.users()] == ["eve", "oli"]
                assert [line async for line in auditor.audit()]
                await refused(auditor.cancel(job.id), "FORBIDDEN", "an auditor")
                following = asyncio.ensure_future(_all_of(auditor.watch("", follow=True)))
                await asyncio.sleep(0.2)
                await stage.client.change_user("eve", role="viewer")
                await operator.cancel(job.id)
                await operator.invite("y")
                await operator.change_user("eve", new_token=True)
                await refused(following, "UNAUTHENTICATED")
                assert "job.cancelling" not in _told, "a viewer sees no event of jobs that are not shared with it"
                told = {event.kind: json.loads(event.data_json).get("by")
                        async for event in stage.client.watch("", follow=False) if event.data_json}  # fmt: skip
                assert (told["user.changed"], told["region.invited"]) == ("oli", "oli")
                cancelled = [event async for event in operator.watch(job.id, follow=False)]
                assert "oli" in [json.loads(event.data_json).get("by") for event in cancelled if event.data_json]
                own = await submitted(operator, job_file, "r2", "train.seed=2")
                assert own.user == "oli"
                await stage.client.change_user("oli", role="viewer")
                await refused(operator.cancel(own.id), "FORBIDDEN", "a viewer")
                await refused(operator.invite("z"), "FORBIDDEN", "only the operator may do that, not oli, a viewer")

    run(scenario())


def test_a_job_is_its_users_and_nobody_elses(serve_config: ServeConfig, job_file: Path) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            a, b = await bring_up(stage)
            tokens = [(await stage.client.add_user(name)).token for name in ("ann", "bob")]
            async with as_user(stage, tokens[0]) as ann, as_user(stage, tokens[1]) as bob:
                job = await submitted(ann, job_file, "r1")
                assert job.user == "ann"
                assert (await submitted(ann, job_file, "r1")).id == job.id
                await refused(submitted(bob, job_file, "r1"), "REQUEST_CONFLICT", "by another user")
                await train(job.id, a, b)
                for agent in (a, b):
                    agent.report(job.id, "training", workers=2)
                    await agent.settled()
                for call in reading(bob, job.id):
                    await refused(call, "FORBIDDEN", f"{job.id} is another user's job")
                await refused(bob.job(job.name), "JOB_NOT_FOUND")
                assert await bob.jobs_and_occupied(ended=True) == ([], {"a": 2, "b": 2})
                assert [event async for event in bob.watch("", follow=False)] == []
                for call in changing(bob, job.id):
                    await refused(call, "FORBIDDEN", "another user's job")
                await stage.client.scale(job.id, {"a": 1})
                operators = await submitted(stage.client, job_file, "r2", "train.seed=2")
                assert operators.user == ""
                await refused(ann.cancel(operators.id), "FORBIDDEN", "another user's job")
                assert "1 job of other users" not in operators.condition
                events = [event async for event in ann.watch(job.id, follow=False)]
                assert events[0].text == f"job {job.id} was submitted by ann"
                assert json.loads(events[0].data_json)["user"] == "ann"
                assert {event.job for event in [one async for one in ann.watch("", follow=False)]} == {job.id}
                assert {shown.id for shown in await stage.client.jobs()} == {job.id, operators.id}
                await ann.cancel(job.id)
                events = [event async for event in ann.watch(job.id, follow=False)]
                done = {event.kind: json.loads(event.data_json).get("by") for event in events}
                assert (done["partition.scaling"], done["job.cancelling"]) == ("operator", "ann"), (
                    "events name the user"
                )
                await stage.client.remove_user("bob")
                await refused(bob.job(job.id), "UNAUTHENTICATED")
                assert (await stage.client.cancel(operators.id)).state in ("cancelling", "cancelled")
            for agent in (a, b):
                await agent.close()

    run(scenario())


def test_a_shared_job_may_be_read_until_it_is_not_shared_any_more(serve_config: ServeConfig, job_file: Path) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            a, b = await bring_up(stage)
            tokens = [(await stage.client.add_user(name)).token for name in ("ann", "bob")]
            async with as_user(stage, tokens[0]) as ann, as_user(stage, tokens[1]) as bob:
                job = await submitted(ann, job_file, "r1")
                await refused(bob.share(job.id, "bob"), "FORBIDDEN")
                await refused(ann.share(job.id, "eve"), "USER_NOT_FOUND")
                assert list((await ann.share(job.id, "bob")).shared_with) == ["bob"]
                assert (await bob.job(job.name)).id == job.id
                assert [shown.id for shown in await bob.jobs()] == [job.id]
                assert {event.job for event in [one async for one in bob.watch("", follow=False)]} == {job.id}
                for call in changing(bob, job.id):
                    await refused(call, "FORBIDDEN", f"{job.id} is the job of ann; bob may only read it")
                followed = asyncio.create_task(drained(bob.watch(job.id)))
                await _soon(lambda: started(followed))
                await ann.share(job.id, "bob", end=True)
                await refused(followed, "FORBIDDEN", "another user's job")
                await refused(bob.job(job.id), "FORBIDDEN")
                assert "job.shared" in await stage.events(job.id)
            for agent in (a, b):
                await agent.close()

    run(scenario())


async def started(task: asyncio.Task[Any]) -> bool:
    await asyncio.sleep(0.2)
    return not task.done()


async def drained(stream: AsyncIterator[Any]) -> None:
    async for _ in stream:
        pass


def reading(client: ControlClient, job: str) -> list[Any]:
    return [
        client.job(job), drained(client.watch(job, follow=False)), drained(client.logs(job)), drained(client.model(job))
    ]  # fmt: skip


def changing(client: ControlClient, job: str) -> list[Any]:
    return [
        client.cancel(job), client.finish(job), client.replan(job), client.scale(job, {"a": 1}), client.share(job, "x")
    ]  # fmt: skip


def test_who_is_removed_hears_nothing_more(serve_config: ServeConfig, job_file: Path) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            a, b = await bring_up(stage)
            token = (await stage.client.add_user("ann")).token
            async with as_user(stage, token) as ann:
                job = await submitted(ann, job_file, "r1")

                async def follow() -> None:
                    async for _ in ann.watch(job.id):
                        pass

                following = asyncio.create_task(follow())
                await asyncio.sleep(0)
                await stage.client.remove_user("ann")
                await stage.client.cancel(job.id)
                await refused(following, "UNAUTHENTICATED")
            for agent in (a, b):
                await agent.close()

    run(scenario())


@pytest.mark.slow
def test_a_quota_bounds_what_is_promised_over_all_regions_and_restarts(
    serve_config: ServeConfig, job_file: Path
) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            a, b = await bring_up(stage)
            token = (await stage.client.add_user("ann", 2)).token
            async with as_user(stage, token) as ann:
                held = await submitted(ann, job_file, "r1", ONE, "train.end={epochs: 900}", "objective.deadline=3h")
                told = await refused(
                    submitted(ann, job_file, "r2", ONE, SOON), "QUOTA_EXCEEDED", "exceed the quota of 2 workers"
                )
                assert (await stage.client.users())[0].promised_now == 2
        async with staged(serve_config) as stage:
            for agent in (a, b):
                agent.identity = agent.identity.__class__(
                    agent.identity.region, f"127.0.0.1:{stage.ports.agent}", *_pems(agent.identity)
                )
                await agent.connect()
            async with as_user(stage, token) as ann:
                again = await refused(submitted(ann, job_file, "r2", ONE, SOON), "QUOTA_EXCEEDED")
                assert again.message == told.message
                explained = await ann.plan(load(job_file, (ONE, SOON)).json)
                reasons = json.loads(explained.plan_json)["reasons"]
                assert not explained.admissible
                assert [reason["code"] for reason in reasons] == ["QUOTA_EXCEEDED"]
                assert "wait until one of your jobs has ended" in str(again.hint), (
                    "with fixed workers it begins at once"
                )
                elastic = await refused(submitted(ann, job_file, "r2", SOON), "QUOTA_EXCEEDED")
                seconds = re.search(r"of (\d+) s from now", str(elastic.hint))
                assert seconds is not None, elastic.hint
                later = await submitted(ann, job_file, "r3", f"objective.deadline={int(seconds[1]) + 5}s")
                assert later.deadline_at > 0, "what is named can be promised"
                free = await submitted(ann, job_file, "r4", ONE, "train.seed=4")
                assert free.deadline_at == 0, "best effort takes nothing of a quota"
                soft = await submitted(ann, job_file, "r5", ONE, SOON, "objective.soft=[{deadline: 11m, value: 0.5}]")
                assert soft.deadline_at == 0
                for job in (free, soft):
                    await ann.cancel(job.id)
            assert (await submitted(stage.client, job_file, "r7", ONE, SOON)).deadline_at > 0, "the operator has none"
            await stage.client.cancel(held.id)
            await stage.client.change_user("ann", 1)
            async with as_user(stage, token) as ann:
                none = await refused(submitted(ann, job_file, "r8", ONE, SOON), "QUOTA_EXCEEDED")
                assert "the job needs at least 2 workers" in str(none.hint)
            for agent in (a, b):
                await agent.close()

    run(scenario())


def _pems(identity: Any) -> tuple[bytes, bytes, bytes]:
    return identity.ca_pem, identity.certificate_pem, identity.key_pem


@pytest.mark.slow
def test_whose_jobs_have_had_less_comes_first_in_line(serve_config: ServeConfig, job_file: Path) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            a, b = await bring_up(stage)
            tokens = [(await stage.client.add_user(name)).token for name in ("ann", "bob")]
            async with as_user(stage, tokens[0]) as ann, as_user(stage, tokens[1]) as bob:
                had = await submitted(ann, job_file, "r1", "train.workers=2")
                await train(had.id, a, b)
                used = common_pb2.Money(item="function-seconds", quantity=500.0, unit="GB-s", usd=0.1, source="test")
                a.report(had.id, "training", round=1, step=2, samples=20, totals={"money": [used]})
                await a.settled()
                early = await submitted(ann, job_file, "r2", "train.workers=2", "train.seed=2")
                late = await submitted(bob, job_file, "r3", "train.workers=2", "train.seed=3")
                assert late.condition == "waiting for workers in a, b, behind 1 job of other users"

                async def told() -> bool:
                    condition = (await ann.job(early.id)).condition
                    return had.id in condition and "1 job of other users" in condition

                await _soon(told)
                await stage.client.cancel(had.id)
                for agent in (a, b):
                    await agent.command("stop")
                    agent.report(had.id, "stopped")
                starts = [await agent.command("start", 2) for agent in (a, b)]
                assert {start.job for start in starts} == {late.id}
            for agent in (a, b):
                await agent.close()
        async with staged(serve_config) as stage:
            # What ended jobs have had is kept; jobs of before count still.
            for agent in (a, b):
                agent.identity = agent.identity.__class__(
                    agent.identity.region, f"127.0.0.1:{stage.ports.agent}", *_pems(agent.identity)
                )
                await agent.connect()
            await submitted(stage.client, job_file, "r4", "train.workers=2", "train.seed=4")

            async def behind() -> bool:
                return "2 jobs of other users" in (await stage.client.job(early.id)).condition

            await _soon(behind)
            for agent in (a, b):
                await agent.close()

    run(scenario())
