"""Jobs that are deleted, and what is told of storage; over real TLS sockets, with agents played by a script."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from support.postgres import Postgres

from control_plane.blobs import BlobStore
from control_plane.server import ServeConfig
from control_plane.service import Federation, Sweeper
from control_plane.store import open_store
from deploy.local import reusable_port
from geofed_pb.errors import GeofedError
from geofed_pb.v1 import agent_pb2
from tests.control_plane.conftest import Stage, staged
from tests.control_plane.fake_agent import FakeAgent, digest_of
from tests.control_plane.scenario import MODEL, bring_up, finish, run, train
from tests.control_plane.test_users import as_user, refused, submitted


def _log(job: str, text: str) -> agent_pb2.FromAgent:
    record = agent_pb2.LogRecord(job=job, at=1.0, source="worker 1", text=text)
    return agent_pb2.FromAgent(logs=agent_pb2.LogBatch(records=[record]))


async def _ended(stage: Stage, job: str, a: FakeAgent, b: FakeAgent) -> None:
    await train(job, a, b)
    a.send(_log(job, "hello"))
    await finish(job, a, b)
    for agent in (a, b):
        await agent.told_to_stop(job)


def _rows_naming(config: ServeConfig, job: str) -> dict[str, int]:
    """By table, how many rows hold the job's ID anywhere."""
    url = config.database_url or f"sqlite:///{config.state_dir}/state.db"
    found = {}
    with open_store(url, upgrade=False) as store, store.engine.connect() as connection:
        from control_plane.store._schema import metadata

        for table in metadata.sorted_tables:
            rows = connection.execute(table.select()).all()
            if count := sum(job in str(tuple(row)) for row in rows):
                found[table.name] = count
    return found


def test_what_is_deleted_is_not_in_the_files_any_more(serve_config: ServeConfig, job_file: Path) -> None:
    """A canary in the settings of a job, and in a line of its log."""

    def found(text: bytes) -> list[str]:
        files = [file for file in serve_config.state_dir.glob("**/*") if file.is_file()]
        return [file.name for file in files if text in file.read_bytes()]

    async def scenario() -> None:
        async with staged(serve_config) as stage:
            a, b = await bring_up(stage)
            job = (await stage.submit(job_file, "r1", ("task.config.note=canary-config",))).job.id
            await train(job, a, b)
            a.send(_log(job, "canary-log " * 2000))
            await finish(job, a, b)
            for agent in (a, b):
                await agent.told_to_stop(job)
            assert found(b"canary-config")
            assert found(b"canary-log")
            await stage.client.delete(job)
            assert not found(b"canary-config")
            assert not found(b"canary-log")
            for agent in (a, b):
                await agent.close()

    run(scenario())


class Contract:
    """By every kind of database."""

    def test_nothing_is_left_of_a_deleted_job_but_who_deleted_it(self, config: ServeConfig, job_file: Path) -> None:
        async def scenario() -> None:
            async with staged(config) as stage:
                a, b = await bring_up(stage)
                job = (await stage.submit(job_file)).job
                other = (await stage.submit(job_file, "r2", ("metadata.name=other", "task.config.width=9"))).job.id
                await refused(stage.client.delete(job.id), "ILLEGAL_STATE", "only an ended job can be deleted")
                with pytest.raises(GeofedError) as early:
                    await stage.client.delete(other)
                assert early.value.hint == f"`geofed cancel {other}` ends it", "it has no model yet that could be kept"
                await _ended(stage, job.id, a, b)
                await b.close()
                told = await stage.client.delete("digits")
                assert (told.job, told.deleted_by, list(told.regions)) == (job.id, "operator", ["a", "b"])
                await refused(stage.client.job(job.id), "JOB_NOT_FOUND")
                assert (await stage.client.job(other)).id == other
                again = await stage.client.delete(job.id)
                assert (again.job, again.deleted_at, list(again.regions)) == (job.id, told.deleted_at, [])

                def ordered(agent: FakeAgent) -> list[Any]:
                    return [c.stop for c in agent.commands if c.stop.job == job.id and c.stop.deleted]

                await a._until(lambda: bool(ordered(a)))
                assert ordered(a)[0].bundle_digest == "", "the other job has the same code"
                a.report(job.id, "stopped")
                a.send(_log(job.id, "too late"))
                happening = agent_pb2.Happening(job=job.id, at=1.0, kind="setback", text="too late")
                a.send(agent_pb2.FromAgent(happening=happening))
                await a.settled()
                assert not ordered(b), "it is away"
                await b.connect()
                await b._until(lambda: bool(ordered(b)))
                b.report(job.id, "stopped")
                await b.settled()
                kinds = [event.kind async for event in stage.client.watch("", follow=False) if job.id in event.text]
                assert kinds == ["job.deleted"]
                await stage.client.cancel(other)
                for agent in (a, b):
                    agent.report(other, "stopped")
                    await agent.settled()
                    await agent.close()
                blobs = {path.name for path in (config.state_dir / "blobs").glob("[0-9a-f]*")}
                assert digest_of(MODEL).removeprefix("sha256:") not in blobs
                assert len(blobs) == 1, "the code of the other job"
                # With the last job its code goes as well.
                await stage.client.delete(other)
                assert list((config.state_dir / "blobs").glob("**/*")) == [config.state_dir / "blobs" / "partial"]
            # Its submission, its end and its deletion stay in the audit log.
            assert _rows_naming(config, job.id) == {"audit": 3, "events": 1, "deletions": 1}

        run(scenario())

    def test_ended_jobs_go_by_the_rule_with_what_their_regions_keep(self, config: ServeConfig, job_file: Path) -> None:
        kept = replace(config, keep={"jobs": 3600.0}, agent_listen=f"127.0.0.1:{reusable_port()}")
        url = config.database_url or f"sqlite:///{config.state_dir}/state.db"

        async def swept_at(now: float) -> None:
            """The sweep that the server makes every hour."""
            with open_store(url, upgrade=False) as store:
                blobs = BlobStore(config.state_dir / "blobs")
                federation = Federation(store, blobs, lambda: now, timedelta(seconds=30), "test")
                await federation.load()
                await Sweeper(federation, kept.keep).sweep()
                await federation.close()

        async def scenario() -> None:
            async with staged(kept) as stage:
                a, b = await bring_up(stage)
                job = (await stage.submit(job_file)).job.id
                await _ended(stage, job, a, b)
                start = f"train.initialModel.job={job}"
                later = (await stage.submit(job_file, "r2", (start, "metadata.name=later"))).job.id
                done = (await stage.client.job(job)).finished_at
                (kind,) = [one for one in (await stage.client.storage()).kinds if one.kind == "jobs"]
                assert (kind.count, kind.due_count, kind.next_at) == (2, 0, pytest.approx(done + 3600, abs=1))
                assert kind.bytes > 1000
                for agent in (a, b):
                    await agent.close()
            await swept_at(done + 3601)
            async with staged(kept) as stage:
                assert (await stage.client.job(job)).id == job, "a job that has not ended started from its model"
                await a.connect()
                await b.connect()
                await stage.client.cancel(later)
                for agent in (a, b):
                    agent.report(later, "stopped")
                    await agent.settled()
                    await agent.close()
            await swept_at(done + 3599)
            async with staged(kept) as stage:
                assert (await stage.client.job(job)).id == job
                ended = (await stage.client.job(later)).finished_at
            await swept_at((done + ended) / 2 + 3600)
            async with staged(kept) as stage:
                await refused(stage.client.job(job), "JOB_NOT_FOUND")
                assert (await stage.client.job(later)).id == later, "it ended later"
                assert (await stage.client.delete(job)).deleted_by == "--keep jobs"
                for agent in (a, b):
                    await agent.connect()
                    await agent._until(
                        lambda agent=agent: any(c.stop.job == job and c.stop.deleted for c in agent.commands)
                    )
                    await agent.close()
            blobs = {path.name for path in (config.state_dir / "blobs").glob("[0-9a-f]*")}
            assert digest_of(MODEL).removeprefix("sha256:") not in blobs
            with open_store(url, upgrade=False) as store:
                told = [json.loads(row.text) for row in store.audit_after(0)]
            (gone,) = [one for one in told if one["kind"] == "job.deleted"]
            assert (gone["job"], gone["by"]) == (job, "--keep jobs")

        run(scenario())

    def test_storage_tells_what_each_job_takes_and_what_goes_next(self, config: ServeConfig, job_file: Path) -> None:
        async def scenario() -> None:
            kept = replace(config, keep={"models": 30 * 86_400.0})
            async with staged(kept) as stage:
                a, b = await bring_up(stage)
                job = (await stage.submit(job_file)).job.id
                await _ended(stage, job, a, b)
                await a.put(b"begun" * 1000, upto=100)
                told = await stage.client.storage()
                kinds = {kind.kind: kind for kind in told.kinds}
                assert set(kinds) >= {
                    "models",
                    "bundles",
                    "unused",
                    "uploads",
                    "events",
                    "logs",
                    "history",
                    "measurements",
                }
                assert (kinds["models"].count, kinds["bundles"].count, kinds["uploads"].count) == (1, 1, 1)
                assert kinds["models"].bytes >= len(MODEL)
                assert kinds["logs"].bytes == len("hello")
                done = await stage.client.job(job)
                assert kinds["models"].next_at == pytest.approx(done.finished_at + 30 * 86_400, abs=1)
                assert not kinds["bundles"].HasField("keep_seconds")
                assert (told.database_bytes > 10_000, told.free_bytes > 0) == (True, True)
                (largest,) = told.jobs
                assert (largest.job, largest.state, largest.ended_at) == (job, "succeeded", done.finished_at)
                assert largest.bytes["models"] == kinds["models"].bytes
                assert [one.job for one in (await stage.client.storage(jobs=0)).jobs] == []
                alone = await stage.client.storage("digits")
                assert {kind.kind for kind in alone.kinds if kind.count} == {
                    "jobs",
                    "models",
                    "bundles",
                    "events",
                    "logs",
                    "measurements",
                }
                await refused(stage.client.storage("never"), "JOB_NOT_FOUND")
                for agent in (a, b):
                    await agent.close()

        run(scenario())


class TestSqlite(Contract):
    @pytest.fixture
    def config(self, serve_config: ServeConfig) -> ServeConfig:
        return serve_config


@pytest.mark.processes
class TestPostgres(Contract):
    @pytest.fixture
    def config(self, serve_config: ServeConfig, postgres: Postgres) -> ServeConfig:
        return replace(serve_config, database_url=postgres.database())


def test_who_may_delete(serve_config: ServeConfig, job_file: Path) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            a, b = await bring_up(stage)
            tokens = {name: (await stage.client.add_user(name)).token for name in ("ann", "bob")}
            async with as_user(stage, tokens["ann"]) as ann, as_user(stage, tokens["bob"]) as bob:
                job = (await submitted(ann, job_file, "r1")).id
                await _ended(stage, job, a, b)
                await refused(bob.delete(job), "FORBIDDEN")
                await ann.share(job, "bob")
                await refused(bob.delete(job), "FORBIDDEN", "may only read it")
                assert [one.job for one in (await bob.storage()).jobs] == []
                assert [one.job for one in (await ann.storage()).jobs] == [job]
                assert (await ann.storage()).free_bytes == 0
                assert (await ann.delete(job)).deleted_by == "ann"
                assert (await ann.delete(job)).deleted_by == "ann"
                await refused(bob.delete(job), "JOB_NOT_FOUND")
                await refused(ann.logs(job).__anext__(), "JOB_NOT_FOUND")
                await refused(ann.delete("never"), "JOB_NOT_FOUND")
            for agent in (a, b):
                await agent.close()

    run(scenario())


def test_a_job_whose_model_another_one_has_begun_from_waits_for_its_end(
    serve_config: ServeConfig, job_file: Path
) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            a, b = await bring_up(stage)
            first = (await stage.submit(job_file)).job.id
            await _ended(stage, first, a, b)
            later = (await stage.submit(job_file, "r2", (f"train.initialModel.job={first}", "metadata.name=l"))).job.id
            error = await refused(stage.client.delete(first), "ILLEGAL_STATE", f"{later} started from the model")
            assert "when that job has ended" in error.hint
            await stage.client.cancel(later)
            for agent in (a, b):
                agent.report(later, "stopped")
                await agent.settled()
            await stage.client.delete(first)
            assert (await stage.client.job(later)).initial_model.job == first
            for agent in (a, b):
                await agent.close()

    run(scenario())
