"""While one job is planned, which may take long, all others are served; what has changed meanwhile counts."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from control_plane.cli._job_file import read_job
from control_plane.server import ServeConfig
from control_plane.service.planning._admission import Answer, PendingAdmission
from control_plane.service.rpc import _control
from control_plane.spec import JobSpec, parse_request
from control_plane.store import Change, Committed, Store
from geofed_pb.errors import GeofedError
from scheduler import Capacity
from tests.control_plane.conftest import staged
from tests.control_plane.scenario import run


class Slow:
    """Has the first answer to a new job wait."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.may_end, self.answers = threading.Event(), threading.Event(), 0
        answer = PendingAdmission.answer

        def waiting(asked: PendingAdmission) -> Answer:
            self.answers += 1
            if self.answers == 1:
                self.begun.set()
                assert self.may_end.wait(30)
            return answer(asked)

        monkeypatch.setattr(PendingAdmission, "answer", waiting)


def test_a_large_job_file_is_read_beside_the_event_loop(
    serve_config: ServeConfig, job_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[bool] = []

    def parsed(text: str) -> JobSpec:
        threads.append(threading.current_thread() is threading.main_thread())
        return parse_request(text)

    monkeypatch.setattr(_control, "parse_request", parsed)

    async def scenario() -> None:
        async with staged(serve_config) as stage:
            with pytest.raises(GeofedError, match=r"INADMISSIBLE|DATASET_UNKNOWN"):
                await stage.submit(job_file)
            wrong = json.dumps({f"key{number}": 1 for number in range(1000)})
            with pytest.raises(GeofedError, match="SPEC_INVALID"):
                await stage.client.plan(wrong)
            with pytest.raises(GeofedError, match="SPEC_INVALID"):
                _ = [news async for news in stage.client.profile(wrong, "", "p")]

    run(scenario())
    assert threads == [False] * 3


def test_a_region_that_changes_while_a_job_is_planned_is_heard_and_the_job_planned_again(
    serve_config: ServeConfig, job_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            agent = await stage.agent("a")
            await agent.connect()
            slow = Slow(monkeypatch)
            submitted = asyncio.create_task(stage.submit(job_file))
            assert await asyncio.to_thread(slow.begun.wait, 30)
            async with asyncio.timeout(15):
                await agent.close()
                agent.catalogue = replace(agent.catalogue, capacity=Capacity(1, 2048, 500.0))
                await agent.connect()
                assert await stage.phase_is("a", "live")
            assert not submitted.done()
            slow.may_end.set()
            reply = await submitted
            assert (slow.answers, reply.created) == (2, True)
            start = await agent.command("start")
            assert start.job == reply.job.id
            assert [part.workers for part in reply.job.partitions] == [1]
            await agent.close()

    run(scenario())


def test_of_two_that_ask_for_the_last_room_at_once_one_gets_it_and_a_request_makes_one_job(
    serve_config: ServeConfig, job_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            agent = await stage.agent("a")
            await agent.connect()
            slow = Slow(monkeypatch)
            tight = ("objective.deadline=19s", "train.workers=2")
            asks = [asyncio.create_task(stage.submit(job_file, name, tight)) for name in ("r1", "r1", "r2")]
            assert await asyncio.to_thread(slow.begun.wait, 30)
            slow.may_end.set()
            told = await asyncio.gather(*asks, return_exceptions=True)
            taken = [reply for reply in told if not isinstance(reply, BaseException)]
            refused = [error.code for error in told if isinstance(error, GeofedError)]
            assert len({reply.job.id for reply in taken}) == 1
            assert [reply.created for reply in taken].count(True) == 1
            assert len(taken) + len(refused) == 3
            assert set(refused) == {"INADMISSIBLE"}
            await agent.close()

    run(scenario())


class SlowStore:
    """Has the first new job wait until it is stored."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()
        commit = Store.commit_all

        def waiting(store: Store, changes: Sequence[Change]) -> list[Committed]:
            if any(change.jobs for change in changes) and not self.begun.is_set():
                self.begun.set()
                assert self.may_end.wait(30)
            return commit(store, changes)

        monkeypatch.setattr(Store, "commit_all", waiting)


def test_while_a_job_is_stored_the_next_is_planned_and_knows_of_it(
    serve_config: ServeConfig, job_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two jobs with secure aggregation, that differ by one region, the second would tell that region's updates."""
    secure = ("train.end={steps: 20}", "privacy.secureAggregation=true", "privacy.minRegions=3")

    async def scenario() -> None:
        async with staged(serve_config) as stage:
            agents = [await stage.agent(name) for name in "abcd"]
            for agent in agents:
                await agent.connect()
            slow = SlowStore(monkeypatch)
            first = asyncio.create_task(stage.submit(job_file, "r1", secure))
            assert await asyncio.to_thread(slow.begun.wait, 30)
            again = asyncio.create_task(stage.submit(job_file, "r1", secure))
            async with asyncio.timeout(15):
                with pytest.raises(GeofedError, match="differs by d"):
                    await stage.submit(job_file, "r2", (*secure, "regions.avoid=[d]"))
            assert not first.done()
            assert not again.done()
            slow.may_end.set()
            replies = [await first, await again]
            assert replies[0].job.id == replies[1].job.id
            assert [reply.created for reply in replies].count(True) == 1
            for agent in agents:
                await agent.close()

    run(scenario())


def test_code_that_was_removed_after_a_submission_is_asked_for_again(serve_config: ServeConfig, job_file: Path) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            loaded, packed = read_job(job_file, None)
            for there in (True, False, True):
                if there:
                    await stage.client.put_bundle(packed.content, packed.digest)
                else:
                    (found,) = serve_config.state_dir.rglob(packed.digest.removeprefix("sha256:"))
                    found.unlink()
                expected = r"INADMISSIBLE|DATASET_UNKNOWN" if there else "has not arrived"
                with pytest.raises(GeofedError, match=expected):
                    await stage.client.submit(loaded.json, packed.digest, f"request-{there}")

    run(scenario())
