"""Jobs over real TLS sockets, with agents played by a script."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from control_plane.server import ServeConfig
from control_plane.spec import load
from control_plane.store import Change, Committed, Store
from geofed_pb.errors import GeofedError
from geofed_pb.v1 import agent_pb2, common_pb2
from tests.control_plane.conftest import TASK, staged
from tests.control_plane.fake_agent import FakeAgent, digest_of
from tests.control_plane.scenario import MODEL, bring_up, finish, run, train


def test_a_job_runs_to_its_model(serve_config: ServeConfig, job_file: Path) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            a, b = await bring_up(stage)
            reply = await stage.submit(job_file)
            job = reply.job.id
            assert reply.created
            assert reply.job.state == "starting"
            assert "a, b" in reply.job.condition
            await train(job, a, b)
            a.send(
                agent_pb2.FromAgent(
                    logs=agent_pb2.LogBatch(
                        records=[agent_pb2.LogRecord(job=job, at=1.0, source="worker 1", text="hello")]
                    )
                )
            )
            await finish(job, a, b)
            done = await stage.client.job(job)
            assert done.state == "succeeded"
            result = json.loads(done.result_json)
            assert result["wan_bytes"] == {"a>b": 2000, "b>a": 2000}
            assert result["usd"] == 0.5
            assert abs(result["metrics"]["accuracy"] - (0.9 * 30 + 0.6 * 10) / 40) < 1e-9
            assert result["model"] == {"digest": digest_of(MODEL), "bytes": len(MODEL), "format": "safetensors"}
            assert result["predicted"]["usd"]["low"] <= result["predicted"]["usd"]["high"]
            assert b"".join([chunk.data async for chunk in stage.client.model(job)]) == MODEL
            assert [line.text async for line in stage.client.logs(job)] == ["hello"]
            assert [line.text async for line in stage.client.logs("digits", region="b", follow=True)] == []
            with pytest.raises(GeofedError, match="REGION_NOT_FOUND"):
                [line async for line in stage.client.logs(job, region="nope")]
            kinds = [event.kind async for event in stage.client.watch(job)]
            assert kinds[0] == "job.submitted"
            assert kinds[-1] == "job.succeeded"
            assert [kind for kind in kinds if kind.startswith("job.")] == [
                "job.submitted",
                "job.planned",
                "job.starting",
                "job.running",
                "job.finishing",
                "job.publishing",
                "job.succeeded",
            ]
            assert (await a.command("stop")).discard
            again = json.loads((await stage.client.plan(load(job_file).json)).plan_json)
            assert again["estimate"]["basis"] == "measured"
            for agent in (a, b):
                await agent.close()

    asyncio.run(scenario())


def test_one_request_id_makes_one_job(serve_config: ServeConfig, job_file: Path) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            a, b = await bring_up(stage)
            first, second = await asyncio.gather(stage.submit(job_file), stage.submit(job_file))
            assert first.job.id == second.job.id
            assert sorted([first.created, second.created]) == [False, True]
            with pytest.raises(GeofedError, match="REQUEST_CONFLICT"):
                await stage.submit(job_file, overrides=("train.seed=9",))
            (job_file.parent / "task.py").write_text(TASK + "# other code\n")
            with pytest.raises(GeofedError, match="REQUEST_CONFLICT"):
                await stage.submit(job_file)
            assert len(await stage.client.jobs(ended=True)) == 1
            for agent in (a, b):
                await agent.close()

    run(scenario())


def test_what_cannot_be_planned_is_declined_with_its_reasons(serve_config: ServeConfig, job_file: Path) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            with pytest.raises(GeofedError, match="DATASET_UNKNOWN"):
                await stage.submit(job_file)
            a, b = await bring_up(stage)
            with pytest.raises(GeofedError, match="region c is not part"):
                await stage.submit(job_file, overrides=("regions.use=[a, c]",))
            await stage.client.invite("c")
            with pytest.raises(GeofedError, match="INADMISSIBLE: region c is not connected"):
                await stage.submit(job_file, overrides=("regions.use=[a, c]",))
            with pytest.raises(GeofedError) as caught:
                await stage.submit(job_file, overrides=("objective.budget=0.0000001", "objective.deadline=1ms"))
            assert caught.value.code == "INADMISSIBLE"
            assert "deadline" in caught.value.message
            assert "budget" in caught.value.message
            with pytest.raises(GeofedError, match="TASK_INVALID"):
                await stage.client.submit(load(job_file).json, digest_of(b"never sent"), "r9")
            with pytest.raises(GeofedError, match="SPEC_INVALID"):
                await stage.client.submit("{}", digest_of(b""), "r9")
            assert await stage.client.jobs(ended=True) == []
            assert (await stage.submit(job_file, "r2")).created
            for agent in (a, b):
                await agent.close()

    run(scenario())


@pytest.mark.slow
def test_a_task_that_raises_fails_the_job_everywhere(serve_config: ServeConfig, job_file: Path) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            a, b = await bring_up(stage)
            job = (await stage.submit(job_file)).job.id
            await a.command("start")
            a.report(job, "failed", error=common_pb2.Error(code="TASK_FAILED", message="ZeroDivisionError"))
            assert (await b.command("stop")).job == job
            done = await stage.client.job(job)
            assert (done.state, done.error.code) == ("failed", "TASK_FAILED")
            assert "ZeroDivisionError" in json.loads(done.result_json)["error"]["message"]
            with pytest.raises(GeofedError, match="MODEL_NOT_FOUND"):
                _ = [chunk async for chunk in stage.client.model(job)]
            with pytest.raises(GeofedError, match="ILLEGAL_STATE"):
                await stage.client.cancel(job)
            for agent in (a, b):
                await agent.close()

    run(scenario())


@pytest.mark.slow
def test_the_account_of_an_ended_job_takes_in_what_its_regions_tell_late(
    serve_config: ServeConfig, job_file: Path
) -> None:
    """Regions that were at work, or away, when another one failed tell afterwards what their last calls took."""

    def spent(usd: float) -> list[common_pb2.Money]:
        return [common_pb2.Money(item="function-seconds", quantity=usd, unit="GB-s", usd=usd, source="list")]

    async def scenario() -> None:
        async with staged(serve_config) as stage:
            a, b = await bring_up(stage)
            job = (await stage.submit(job_file)).job.id
            await train(job, a, b)
            waits = "waiting for round 6 of a"
            b.report(job, "training", meter=5, round=1, condition=waits, totals={"money": spent(1.0)})
            await b.settled()
            a.report(
                job,
                "failed",
                error=common_pb2.Error(code="TASK_FAILED", message="x"),
                meter=4,
                totals={"money": spent(2.0)},
            )
            await b.command("stop")
            done = await stage.client.job(job)
            assert [(part.state, part.condition) for part in done.partitions] == [("failed", ""), ("stopping", "")]
            assert json.loads(done.result_json)["usd"] == 3.0
            assert done.condition == "cost not final: the last calls of b are not counted yet"
            ends = await stage.events(job)
            b.report(job, "stopped", epoch=0, meter=5, totals={"money": spent(8.0), "sent_bytes": {"a": 7}})
            await b.settled()
            done = await stage.client.job(job)
            result = json.loads(done.result_json)
            assert (result["usd"], result["wan_bytes"]["b>a"], result["rounds"]) == (10.0, 7, 1)
            assert (done.state, done.error.code, done.condition) == ("failed", "TASK_FAILED", "")
            b.report(job, "stopped")  # it has forgotten the job, and says so when it is asked again
            await b.settled()
            assert json.loads((await stage.client.job(job)).result_json)["usd"] == 10.0
            assert await stage.events(job) == ends
            for agent in (a, b):
                await agent.close()

    run(scenario())


@pytest.mark.slow
def test_cancel_ends_a_job_once_all_have_stopped(serve_config: ServeConfig, job_file: Path) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            a, b = await bring_up(stage)
            job = (await stage.submit(job_file)).job.id
            await train(job, a, b)
            assert (await stage.client.cancel("digits", "enough")).state == "cancelling"
            for agent in (a, b):
                assert (await agent.command("stop")).reason == "enough"
                agent.report(job, "stopped")
                await agent.settled()
            assert (await stage.client.job(job)).state == "cancelled"
            assert (await stage.client.cancel(job)).state == "cancelled"
            for agent in (a, b):
                await agent.close()

    run(scenario())


def test_a_broken_connection_loses_and_doubles_nothing(serve_config: ServeConfig, job_file: Path) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            a, b = await bring_up(stage)
            job = (await stage.submit(job_file)).job.id
            await a.command("start")
            await a.close()
            a.report(job, "accepted")
            a.report(job, "ready", ps_address="a.example:9000")
            b.report(job, "ready", ps_address="b.example:9000")
            await b.settled()
            await a.connect()
            await a.command("peers")
            assert [command.seq for command in a.commands] == [1, 2], "start came once; peers after the break"
            await a.settled()
            before = await stage.events(job)
            again = agent_pb2.FromAgent(seq=1, partition=agent_pb2.PartitionReport(job=job, epoch=1, state="failed"))
            a.unacknowledged.append(again)
            a.send_raw(again)
            await a.settled()
            assert await stage.events(job) == before, "a report that was applied is not applied again"
            events = [event async for event in stage.client.watch(job, follow=False)]
            rest = [event async for event in stage.client.watch(job, cursor=events[2].cursor, follow=False)]
            assert rest == events[3:]
            for agent in (a, b):
                await agent.close()

    run(scenario())


@pytest.mark.slow
def test_a_region_whose_lease_ends_comes_back_under_a_new_epoch(serve_config: ServeConfig, job_file: Path) -> None:
    async def scenario() -> None:
        async with staged(replace(serve_config, lease=timedelta(seconds=2))) as stage:
            a, b = await bring_up(stage)
            job = (await stage.submit(job_file, overrides=("limits.lostRegion=60s",))).job.id
            await train(job, a, b)
            await a.settled()
            await a.close()
            beating = asyncio.create_task(beat(b))
            await stage.until(lambda: stage.phase_is("a", "lost"))
            status = await stage.client.job(job)
            assert (status.state, status.partitions[0].epoch) == ("running", 2)
            assert "region a lost since" in status.condition
            a.report(job, "failed")  # what it says of the old epoch, late, does not count
            await a.connect()
            start = await a.command("start", 2)
            assert start.epoch == 2
            a.report(job, "ready", epoch=2, ps_address="a.example:9001")
            peers = await b.command("peers", 2)
            first = peers.peers[0]
            assert (first.region, first.epoch, first.address) == ("a", 2, "a.example:9001")
            assert (await stage.client.job(job)).state == "running"
            kinds = await stage.events(job)
            assert kinds.index("region.unreachable") < kinds.index("region.lost") < kinds.index("partition.restarted")
            beating.cancel()
            for agent in (a, b):
                await agent.close()

    run(scenario())


async def beat(agent: FakeAgent) -> None:
    while True:
        agent.heartbeat()
        await asyncio.sleep(0.5)


@pytest.mark.slow
def test_a_region_that_stays_away_fails_the_job(serve_config: ServeConfig, job_file: Path) -> None:
    async def scenario() -> None:
        async with staged(replace(serve_config, lease=timedelta(seconds=1))) as stage:
            a, b = await bring_up(stage)
            job = (await stage.submit(job_file, overrides=("limits.lostRegion=1s",))).job.id
            await a.close()
            await b.close()
            kinds = [event.kind async for event in stage.client.watch(job)]
            assert kinds[-1] == "job.failed"
            done = await stage.client.job(job)
            assert done.error.code == "REGION_LOST"

    run(scenario())


def test_blobs_go_on_where_they_broke_off(serve_config: ServeConfig, job_file: Path) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            a, b = await bring_up(stage)
            assert (await a.put(MODEL, upto=1000)).have_bytes == 1000
            ack = await a.put(MODEL)
            assert (ack.complete, ack.have_bytes) == (True, len(MODEL))
            assert (await b.put(MODEL)).complete
            with pytest.raises(GeofedError, match="DIGEST_MISMATCH"):
                await a.put(b"good", claim=b"evil")
            assert (await a.put(b"good")).complete
            with pytest.raises(GeofedError, match="FORBIDDEN"):
                await a.fetch(digest_of(MODEL))
            for agent in (a, b):
                await agent.close()

    run(scenario())


def test_a_model_that_did_not_arrive_is_asked_for_again(serve_config: ServeConfig, job_file: Path) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            a, b = await bring_up(stage)
            job = (await stage.submit(job_file)).job.id
            await train(job, a, b)
            for agent in (a, b):
                agent.report(job, "finished", model_digest="m")
            await a.command("publish")
            a.report(job, "published", model_digest="m", blob_digest=digest_of(MODEL))
            await a.command("publish", 2)
            await a.put(MODEL)
            a.report(job, "published", model_digest="m", blob_digest=digest_of(MODEL))
            await a.settled()
            assert (await stage.client.job(job)).state == "succeeded"
            for agent in (a, b):
                await agent.close()

    run(scenario())


def test_a_region_that_joins_again_goes_on(serve_config: ServeConfig, job_file: Path) -> None:
    """Once with its state kept, as after an expired certificate, and once with its disk lost."""

    async def scenario() -> None:
        async with staged(serve_config) as stage:
            a, b = await bring_up(stage)
            job = (await stage.submit(job_file)).job.id
            await train(job, a, b)
            await a.settled()
            await a.close()
            again = await stage.agent("a")
            a.identity, a.boot_id = again.identity, "boot-2"
            a.report(job, "training", round=1)
            await a.connect()
            await a.settled()
            assert (await a.command("start", 2)).epoch == 1
            await a.close()
            lost = await stage.agent("a")
            lost.boot_id, lost.strict = "boot-3", False
            await lost.connect()
            assert (await lost.command("start")).epoch == 1
            lost.report(job, "ready", ps_address="a.example:9002")
            await lost.settled()
            status = (await stage.client.job(job)).partitions[0]
            assert (status.state, status.round) == ("ready", 1), "figures never step back"
            for agent in (lost, b):
                await agent.close()

    run(scenario())


def test_a_full_disk_loses_nothing(serve_config: ServeConfig, job_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = False
    commit = Store.commit_all

    def commit_or_fail(store: Store, changes: Sequence[Change]) -> list[Committed]:
        if full:
            raise GeofedError("DISK_FULL", "the database cannot grow: no space left")
        return commit(store, changes)

    async def scenario() -> None:
        nonlocal full
        async with staged(serve_config) as stage:
            a, b = await bring_up(stage)
            job = (await stage.submit(job_file)).job.id
            await train(job, a, b)
            await a.settled()
            await b.settled()
            full = True
            a.report(job, "waiting", round=1)
            assert (await a.ended()).code == "DISK_FULL"
            assert (await stage.client.job(job)).partitions[0].round == 0, "what is not stored is not seen"
            with pytest.raises(GeofedError, match="DISK_FULL"):
                await stage.client.invite("c")
            await a.close()
            full = False
            await a.connect()
            await a.settled()
            await finish(job, a, b)
            assert (await stage.client.job(job)).state == "succeeded"
            assert (await stage.events(job)).count("partition.round") == 3
            for agent in (a, b):
                await agent.close()

    monkeypatch.setattr(Store, "commit_all", commit_or_fail)
    run(scenario())
