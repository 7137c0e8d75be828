"""A commit whose answer is lost: the truth is looked up, or the control plane stops; memory never differs from it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from support.postgres import CommitRelay, Postgres

from control_plane.blobs import BlobStore
from control_plane.service import Federation
from control_plane.service.state._certificates import unseen_region
from control_plane.store import CommandRow, Store, open_store
from control_plane.store import _database as store_module
from geofed_pb.errors import GeofedError
from geofed_pb.v1 import agent_pb2
from tests.control_plane.fake_agent import catalogue

pytestmark = pytest.mark.processes
REGION = "a"


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, postgres: Postgres, tmp_path: Path) -> Iterator[tuple[Store, str, Any]]:
    """A store, the URL of its database, and what makes its next commit fail."""
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path / 'state.db'}"
        with open_store(url) as store:
            yield store, url, SqliteFault(store)
    else:
        url = postgres.database()
        with closing(CommitRelay(postgres)) as relay, open_store(relay.url(url)) as store:
            yield store, url, relay


class SqliteFault:
    """Makes a commit fail as a broken disk does."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._commit = store.engine.dialect.do_commit
        self.refuses = False
        self.cuts = 0
        store.engine.dialect.do_commit = self._fail  # type: ignore[method-assign]

    cut = ""

    def _fail(self, connection: Any) -> None:
        from sqlite3 import OperationalError

        if self.refuses and self.cuts:
            raise OperationalError("disk I/O error")
        how, self.cut = self.cut, ""
        if how != "before":
            self._commit(connection)
        if how:
            self.cuts += 1
            raise OperationalError("disk I/O error")


def _federation(store: Store, tmp_path: Path) -> Federation:
    return Federation(store, BlobStore(tmp_path / "blobs"), lambda: 1000.0, timedelta(seconds=30), "test")


async def _connected(federation: Federation) -> Any:
    await federation.load()
    async with federation.change() as draft:
        draft.put_region(unseen_region(REGION))
    hello = agent_pb2.Hello(boot_id="boot", catalogue_json=json.dumps(asdict(catalogue(REGION))))
    return await federation.connect(REGION, hello)


async def _command(federation: Federation) -> None:
    message = agent_pb2.ToAgent(stop=agent_pb2.StopPartition(job="j"))
    async with federation.change() as draft:
        draft.commands.append(CommandRow(REGION, "j", message.SerializeToString()))
        draft.record("told", "a command")


async def _next(session: Any, federation: Federation) -> Any:
    """The next command; the head of the audit log is none."""
    async with asyncio.timeout(10):
        async for message in session.outgoing(
            lambda seq: federation.read(lambda store: store.commands_after(REGION, seq)), None
        ):
            if message.WhichOneof("body") != "audit_head":
                return message


@pytest.mark.parametrize("cut", ["before", "after"])
def test_what_was_stored_is_carried_out_and_what_was_not_is_refused(
    database: tuple[Store, str, Any], tmp_path: Path, cut: str
) -> None:
    store, url, fault = database

    async def scenario() -> None:
        federation = _federation(store, tmp_path)
        session = await _connected(federation)
        fault.cut = cut
        if cut == "before":
            with pytest.raises(GeofedError, match="UNAVAILABLE"):
                await _command(federation)
            with open_store(url, upgrade=False) as other:
                assert other.commands_after(REGION, 0) == []
            await _command(federation)
        else:
            await _command(federation)
        assert fault.cuts == 1
        assert (await _next(session, federation)).stop.job == "j"
        with open_store(url, upgrade=False) as other:
            assert [command.seq for command in other.commands_after(REGION, 0)] == [1]
        assert not federation.leading.lost.is_set()
        await federation.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("cut", ["before", "after"])
def test_where_the_truth_cannot_be_looked_up_nothing_is_served_any_more(
    database: tuple[Store, str, Any], tmp_path: Path, cut: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, url, fault = database
    monkeypatch.setattr(store_module, "SETTLE_SECONDS", 0.3)

    async def scenario() -> None:
        federation = _federation(store, tmp_path)
        await _connected(federation)
        fault.cut, fault.refuses = cut, True
        with pytest.raises(GeofedError, match="UNAVAILABLE"):
            await _command(federation)
        fault.refuses = False
        assert federation.leading.lost.is_set()
        with pytest.raises(GeofedError, match="STANDBY"):
            await _command(federation)
        await federation.close()
        # The next control plane serves what was stored.
        with open_store(url) as store_after:
            again = _federation(store_after, tmp_path)
            await again.load()
            assert len(store_after.commands_after(REGION, 0)) == (cut == "after")
            await again.close()

    asyncio.run(scenario())
