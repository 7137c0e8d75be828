"""A backup holds everything as of one instant; after its restore all continue, or fail with a code."""

from __future__ import annotations

import asyncio
import tarfile
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from support.commands import run_here
from support.postgres import Postgres

from control_plane.backup import back_up, restore
from control_plane.blobs import BlobStore
from control_plane.server import ServeConfig
from control_plane.store import Change, CommandRow, EventRow, open_store
from geofed_pb.errors import GeofedError
from tests.control_plane.conftest import Stage, staged
from tests.control_plane.fake_agent import FakeAgent, digest_of
from tests.control_plane.scenario import MODEL, bring_up, finish, train
from tests.control_plane.test_store import JOB, REGION

pytestmark = pytest.mark.processes


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, postgres: Postgres, tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'shared.db'}" if request.param == "sqlite" else postgres.database()


def _event(text: str) -> Change:
    return Change(events=(EventRow(1.0, "j1", "a", "told", text),))


def test_rows_blobs_and_keys_come_back_in_another_database(url: str, postgres: Postgres, tmp_path: Path) -> None:
    state, file = tmp_path / "state", tmp_path / "backup.tar"
    BlobStore(state / "blobs").path(digest_of(MODEL)).write_bytes(MODEL)
    (state / "pki").mkdir()
    (state / "pki" / "ca.key").write_text("key")
    with open_store(url) as store:
        store.put_meta("federation", "test")
        commands = (CommandRow("a", "j1", b"\x00\xff"),)
        store.commit(Change(jobs=(JOB,), regions=(REGION,), commands=commands))
        store.commit(_event("before"))
        copied = back_up(store, state, file)
        store.commit(_event("after"))
        epoch = store.leadership().epoch
    assert (copied.federation, copied.blobs, file.stat().st_mode & 0o777) == ("test", 1, 0o600)
    other_url = f"sqlite:///{tmp_path / 'other.db'}" if url.startswith("postgresql") else postgres.database()
    for target in (url, other_url):
        again = tmp_path / f"again{target == url}"
        with open_store(target) as store:
            restore(store, again, file)
        with open_store(target) as store:
            assert store.job("j1") == JOB
            assert store.commands_after("a", 0) == [replace(commands[0], seq=1)]
            assert [event.text for event in store.events_after(0)] == ["before"]
            cursor = store.commit(_event("next")).events[0].cursor
            assert cursor > store.events_after(0)[0].cursor
            assert store.leadership().epoch > epoch, "whoever led before can write no more"
        assert (again / "blobs" / digest_of(MODEL).removeprefix("sha256:")).read_bytes() == MODEL
        assert (again / "pki" / "ca.key").read_text() == "key"


def test_a_damaged_backup_changes_no_row(url: str, tmp_path: Path) -> None:
    state, file = tmp_path / "state", tmp_path / "backup.tar"
    BlobStore(state / "blobs")
    with open_store(url) as store:
        store.commit(_event("before"))
        back_up(store, state, file)
        store.commit(_event("after"))
        with tarfile.open(file) as archive:
            offset = archive.getmember("rows.jsonl").offset_data
        content = bytearray(file.read_bytes())
        content[offset + 20] ^= 0xFF
        (tmp_path / "damaged.tar").write_bytes(content)
        (tmp_path / "cut.tar").write_bytes(file.read_bytes()[: offset + 30])
        (tmp_path / "text").write_text("no archive")
        for name in ("damaged.tar", "cut.tar", "text"):
            with pytest.raises(GeofedError, match="STATE_INVALID"):
                restore(store, state, tmp_path / name)
        assert [event.text for event in store.events_after(0)] == ["before", "after"]


def test_a_leader_whose_changes_the_database_has_lost_stops(url: str) -> None:
    with open_store(url) as store:
        assert store.take(store.leadership(), "one")
        store.commit(_event("first"))
        with store.engine.connect().execution_options(geofed_write=True) as connection, connection.begin():
            connection.exec_driver_sql("UPDATE leadership SET changes = 0")
        with pytest.raises(GeofedError, match="STANDBY: the database has lost changes"):
            store.commit(_event("second"))


def _commanded(*words: str) -> None:
    done = run_here(*words)
    assert done.returncode == 0, done.stderr


async def _reconnected(stage: Stage, *agents: FakeAgent) -> None:
    """Agents that find the control plane at its new address."""
    for agent in agents:
        agent.strict = False
        agent.identity = replace(agent.identity, address=f"127.0.0.1:{stage.ports.agent}")
        await agent.connect()


def test_jobs_in_flight_continue_after_an_older_state_is_restored(
    url: str, serve_config: ServeConfig, job_file: Path, tmp_path: Path
) -> None:
    """One job begins before the backup and trains after it, one ends after it, and one is submitted after it."""
    config = replace(serve_config, database_url=url, lease=timedelta(seconds=30))
    file = tmp_path / "backup.tar"
    where = ("--state-dir", str(config.state_dir), "--database-url", url)

    async def until_restore() -> tuple[list[FakeAgent], list[str]]:
        async with staged(config) as stage:
            a, b = await bring_up(stage)
            job = (await stage.submit(job_file)).job.id
            await asyncio.to_thread(_commanded, "backup", str(file), *where)
            await train(job, a, b)
            late = (await stage.submit(job_file, "r2", ("metadata.name=late",))).job.id
            for agent in (a, b):
                await agent.settled()
                await agent.close()
            return [a, b], [job, late]

    async def scenario() -> None:
        agents, (job, late) = await until_restore()
        await asyncio.to_thread(_commanded, "restore", str(file), *where, "--yes")
        async with staged(config) as stage:
            for agent in agents:
                agent.commands.clear()
            await _reconnected(stage, *agents)
            with pytest.raises(GeofedError, match="JOB_NOT_FOUND"):
                await stage.client.job(late)
            for agent in agents:
                # The commands come again, and the agent says how far it is.
                assert (await agent.command("start")).job == job
                agent.report(job, "training")
                agent.report(late, "training")
                await agent.told_to_stop(late)
            a, b = agents
            await finish(job, a, b)
            assert (await stage.client.job(job)).state == "succeeded"
            for agent in agents:
                await agent.close()

    asyncio.run(scenario())
