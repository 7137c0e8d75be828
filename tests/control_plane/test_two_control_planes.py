"""Two control planes on one database: one leads, the other stands by and takes over."""

from __future__ import annotations

import asyncio
import signal
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.postgres import Postgres

from control_plane.client import Context, ControlClient
from control_plane.server import ServeConfig, running
from control_plane.spec import load, pack
from control_plane.store import Change, EventRow, open_store
from geofed_pb.errors import GeofedError
from tests.control_plane.fake_agent import FakeAgent, Identity, join
from tests.control_plane.test_serve import Server

pytestmark = [pytest.mark.processes, pytest.mark.e2e]
TAKES_OVER_SECONDS = 25.0
"""Seven seconds of silence, a start on a busy machine, and the client's own retries."""
SERVED_SECONDS = 12.0
"""From the death of the leader until a user and all agents have answers of the other one. Measured: 7.2 to 7.9 s on two
cores under a load of 20, of which 7 s are the silence."""


class Pair:
    """Two `serve` processes on one database and one state directory."""

    def __init__(self, folder: Path, url: str) -> None:
        self.state = folder / "state"
        self.state.mkdir()
        # The last one of two options counts: the first is where the process writes its log and its ready file.
        shared = ("--database-url", url, "--state-dir", str(self.state))
        self.servers = [Server(folder / name, *shared) for name in ("one", "two")]

    def context(self, *facts: dict[str, Any]) -> Context:
        own = Context.load(self.state / "context.json")
        return replace(own, address=",".join(f"127.0.0.1:{each['control']}" for each in facts))


@contextmanager
def paired(folder: Path, url: str) -> Iterator[Pair]:
    pair = Pair(folder, url)
    try:
        yield pair
    finally:
        for server in pair.servers:
            if hasattr(server, "process") and server.process.poll() is None:
                server.process.send_signal(signal.SIGCONT)
                server.stop(signal.SIGKILL)


async def within(seconds: float, ask: Callable[[], Awaitable[Any]]) -> Any:
    """The answer, once there is one."""
    give_up = time.monotonic() + seconds
    while True:
        try:
            return await ask()
        except GeofedError as error:
            if error.code not in ("UNAVAILABLE", "STANDBY") or time.monotonic() > give_up:
                raise
        await asyncio.sleep(0.2)


async def submitted(client: ControlClient, job_file: Path, request: str) -> Any:
    loaded = load(job_file)
    packed = pack(loaded.folder, loaded.spec.task.module)
    content, digest = packed.content, packed.digest
    await client.put_bundle(content, digest)
    return await client.submit(loaded.json, digest, request)


def health(facts: dict[str, Any], page: str = "healthz", body: bytes | None = None) -> int:
    """Status of the answer to a GET, or to a POST of a body."""
    unverified = ssl._create_unverified_context()
    try:
        address = f"https://127.0.0.1:{facts['metrics']}/{page}"
        with urllib.request.urlopen(address, body, context=unverified, timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def at(identity: Identity, facts: dict[str, Any]) -> Identity:
    return replace(identity, address=f"127.0.0.1:{facts['agent']}")


def test_the_second_takes_over_when_the_first_is_killed(postgres: Postgres, tmp_path: Path, job_file: Path) -> None:
    async def scenario() -> None:
        with paired(tmp_path, postgres.database()) as pair:
            first, second = pair.servers[0].start(), pair.servers[1].start()
            assert (first["leads"], second["leads"]) == (True, False)
            assert (health(first), health(second)) == (200, 503)
            assert health(second, "signin", b"password=x") == 503, "a proxy tries the leader then"
            async with ControlClient.connect(pair.context(second)) as client:
                with pytest.raises(GeofedError, match="STANDBY: this control plane stands by; the leader is"):
                    await client.version()
            async with ControlClient.connect(pair.context(second, first)) as client:
                identities = [await join((await client.invite(name)).token) for name in ("a", "b")]
                agents = [FakeAgent(at(identity, first)) for identity in identities]
                for agent in agents:
                    await agent.connect()
                for _ in range(50):
                    with pytest.raises(GeofedError, match="STANDBY"):
                        await FakeAgent(at(identities[0], second)).connect()
                job = (await submitted(client, job_file, "r1")).job.id
                await agents[0].command("start")

                pair.servers[0].stop(signal.SIGKILL)
                killed = time.monotonic()
                for agent in agents:
                    await agent.ended()
                    await agent.close()
                again = await within(TAKES_OVER_SECONDS, lambda: submitted(client, job_file, "r1"))
                assert (again.job.id, again.created) == (job, False)
                assert health(second) == 200
                for identity in identities:
                    # A new process, which is told all again; the old one may have stored its command.
                    agent = FakeAgent(at(identity, second), "boot-2")
                    await agent.connect()
                    assert (await agent.command("start")).job == job
                    await agent.close()
                assert time.monotonic() - killed < SERVED_SECONDS
                # The first one comes back, and stands by.
                assert pair.servers[0].start()["leads"] is False
            assert pair.servers[0].stop() == 0
            assert pair.servers[1].stop() == 0

    asyncio.run(scenario())


def test_a_leader_that_was_suspended_neither_writes_nor_answers(
    postgres: Postgres, tmp_path: Path, job_file: Path
) -> None:
    async def scenario() -> None:
        url = postgres.database()
        with paired(tmp_path, url) as pair:
            first, second = pair.servers[0].start(), pair.servers[1].start()
            async with (
                ControlClient.connect(pair.context(first, second)) as client,
                ControlClient.connect(pair.context(first)) as at_first,
            ):
                await client.add_user("before")
                await at_first.version()
                pair.servers[0].process.send_signal(signal.SIGSTOP)
                # This request waits in the first one's socket until it continues.
                late = asyncio.create_task(at_first.add_user("late"))
                await within(TAKES_OVER_SECONDS, lambda: client.add_user("after"))
                pair.servers[0].process.send_signal(signal.SIGCONT)
                with pytest.raises(GeofedError, match=r"STANDBY|UNAVAILABLE"):
                    await late
                refusal = await within_refused(at_first)
                assert refusal.code == "STANDBY"
                assert [user.name for user in await client.users()] == ["after", "before"]
            assert pair.servers[0].process.poll() is None, "it stands by instead of ending"
            with open_store(url, upgrade=False) as store:
                assert store.leadership().epoch == 2

    asyncio.run(scenario())


async def within_refused(client: ControlClient) -> GeofedError:
    """How a control plane that steps down refuses once it has begun to stand by."""
    for _ in range(100):
        try:
            await client.version()
        except GeofedError as error:
            if error.code == "STANDBY" and "stands by" in error.message:
                return error
        await asyncio.sleep(0.1)
    raise AssertionError("it still answers")


def test_a_hung_database_refuses_within_a_bound_and_then_all_continues(
    postgres: Postgres, tmp_path: Path, job_file: Path
) -> None:
    async def scenario() -> None:
        with paired(tmp_path, postgres.database()) as pair:
            first = pair.servers[0].start()
            async with ControlClient.connect(pair.context(first)) as client:
                await client.add_user("before")
                with postgres.hung():
                    begun = time.monotonic()
                    for name in ("x", "y"):
                        with pytest.raises(GeofedError, match=r"UNAVAILABLE|STANDBY"):
                            await client.add_user(name)
                    assert time.monotonic() - begun < 20.0
                    with pytest.raises(GeofedError, match=r"UNAVAILABLE|STANDBY"):
                        await client.users()
                names = [user.name for user in await within(TAKES_OVER_SECONDS, client.users)]
                assert "before" in names
                await within(10, lambda: client.add_user("after"))
            assert pair.servers[0].stop() == 0

    asyncio.run(scenario())


def test_a_store_of_an_earlier_epoch_cannot_write(postgres: Postgres) -> None:
    url = postgres.database()
    change = Change(events=(EventRow(1.0, "", "", "told", "text"),))
    with open_store(url) as old, open_store(url) as new:
        assert old.take(old.leadership(), "one")
        old.commit(change)
        seen = new.leadership()
        old.beat()
        assert not new.take(seen, "two"), "the first one has just given a sign of life"
        assert new.take(new.leadership(), "two")
        for write in (lambda: old.commit(change), old.beat, old.release, lambda: old.put_meta("x", "y")):
            with pytest.raises(GeofedError, match="STANDBY"):
                write()
        new.commit(change)
        assert len(new.events_after(0)) == 2


def _config(state: Path, url: str) -> ServeConfig:
    anywhere = "127.0.0.1:0"
    return ServeConfig(state, anywhere, anywhere, anywhere, database_url=url)


async def _refused_beside(first: ServeConfig, second: ServeConfig) -> GeofedError:
    async with running(first):
        with pytest.raises(GeofedError) as refusal:
            async with asyncio.timeout(10), running(second):
                pass
    return refusal.value


def test_another_federations_keys_are_refused(postgres: Postgres, tmp_path: Path) -> None:
    url = postgres.database()
    error = asyncio.run(_refused_beside(_config(tmp_path / "first", url), _config(tmp_path / "second", url)))
    assert error.code == "CONFIG_INVALID"
    assert "the database belongs to a federation whose keys are not those in" in error.message


def test_a_second_process_on_one_sqlite_file_is_refused(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'shared.db'}"
    error = asyncio.run(_refused_beside(_config(tmp_path / "first", url), _config(tmp_path / "second", url)))
    assert (error.code, "another control plane uses" in error.message) == ("ILLEGAL_STATE", True)
