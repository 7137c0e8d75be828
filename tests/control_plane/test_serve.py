"""The real `control-plane serve` process: starts, refuses, dies and comes back."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from control_plane.client import Context, ControlClient
from control_plane.server import ServeConfig
from control_plane.spec import load, pack
from geofed_pb.errors import GeofedError
from region_agent.link.enrolment import join_federation
from tests.control_plane.conftest import staged
from tests.control_plane.fake_agent import FakeAgent, digest_of, join
from tests.control_plane.test_life_of_a_job import finish, train

pytestmark = pytest.mark.processes

COMMAND = [sys.executable, "-m", "control_plane.cli.main"]
TESTS = Path(__file__).parents[1]
ANYWHERE = ("--listen", "127.0.0.1:0", "--agent-listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0")
NO_ADDRESSES = ("::1", "[::1]", "a:b:7443", "127.0.0.1", "127.0.0.1:x", "127.0.0.1:70000")


class Server:
    """A `serve` process."""

    def __init__(self, state: Path, *options: str) -> None:
        self.state = state
        self.options = options

    def start(self, *listen: str) -> dict[str, Any]:
        ready = self.state.with_suffix(".ready")
        ready.unlink(missing_ok=True)
        words = ("serve", "--state-dir", str(self.state), "--ready-file", str(ready), "--log-format", "json")
        self.log = self.state.with_suffix(".log").open("ab")
        self.process = subprocess.Popen([*COMMAND, *words, *(listen or ANYWHERE), *self.options], stderr=self.log)
        give_up = time.monotonic() + 20
        while not ready.exists():
            assert self.process.poll() is None, self.state.with_suffix(".log").read_text()
            assert time.monotonic() < give_up
            time.sleep(0.02)  # a file of another process cannot be waited for otherwise
        facts: dict[str, Any] = json.loads(ready.read_text())
        return facts

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        code = self.process.wait(timeout=15)
        self.log.close()
        return code

    @asynccontextmanager
    async def client(self) -> AsyncIterator[ControlClient]:
        async with ControlClient.connect(Context.load(self.state / "context.json")) as client:
            yield client


@contextmanager
def served(state: Path, *options: str) -> Iterator[tuple[Server, dict[str, Any]]]:
    server = Server(state, *options)
    facts = server.start()
    try:
        yield server, facts
    finally:
        if server.process.poll() is None:
            server.stop(signal.SIGKILL)


def refused(*words: str) -> tuple[int, str]:
    done = subprocess.run([*COMMAND, *words], capture_output=True, text=True, timeout=30)
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr


def refused_in_turn(*asked: tuple[list[str], dict[str, str]]) -> list[tuple[int, str]]:
    """The same of words with an environment, in one process: to import what it takes is most of what each would do."""
    code = (
        "import json, sys\n"
        "from support.commands import run_here\n"
        "ran = [run_here(*words, **environment) for words, environment in json.load(sys.stdin)]\n"
        "print(json.dumps([(one.returncode, one.stdout, one.stderr) for one in ran]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (TESTS.parent, TESTS)))},
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert not [out for _, out, _ in told if out]
    assert "Traceback" not in str(told) + done.stderr
    return [(code, error) for code, _, error in told]


@pytest.mark.e2e
def test_a_job_survives_kill_9_of_the_control_plane(tmp_path: Path, job_file: Path) -> None:
    async def scenario() -> None:
        with served(tmp_path / "state") as (server, facts):
            listen = (
                *("--listen", f"127.0.0.1:{facts['control']}"),
                *("--agent-listen", f"127.0.0.1:{facts['agent']}"),
                *("--metrics-listen", f"127.0.0.1:{facts['metrics']}"),
            )
            async with server.client() as client:
                a, b = [FakeAgent(await join((await client.invite(name)).token)) for name in ("a", "b")]
                for agent in (a, b):
                    await agent.connect()
                loaded = load(job_file)
                packed = pack(loaded.folder, loaded.spec.task.module)
                content, digest = packed.content, packed.digest
                await client.put_bundle(content, digest)
                job = (await client.submit(loaded.json, digest, "r1")).job.id
                seen: list[Any] = []
                watching = asyncio.create_task(collect(client, job, seen))
                await train(job, a, b)
                for agent in (a, b):
                    await agent.settled()

                server.stop(signal.SIGKILL)
                for agent in (a, b):
                    assert (await agent.ended()).code == "UNAVAILABLE"
                    await agent.close()
                a.report(job, "training", round=1, step=2, loss=0.5)  # what happens meanwhile is told later
                server.start(*listen)
                for agent in (a, b):
                    await agent.connect()
                assert (await client.job(job)).state == "running"
                assert (await client.submit(loaded.json, digest, "r1")).created is False
                await finish(job, a, b)

                async with asyncio.timeout(15):
                    await watching
                cursors = [event.cursor for event in seen]
                assert cursors == sorted(set(cursors)), "the watcher saw each event once, over the restart"
                kinds = [event.kind for event in seen]
                told = {event.kind: event.text async for event in client.watch("", follow=False)}
                assert told["control-plane.started"] == "the control plane has restarted with 1 active jobs"
                assert kinds.count("job.running") == 1
                assert kinds[-1] == "job.succeeded"
                assert [c.WhichOneof("body") for c in a.commands] == ["start", "peers", "publish", "stop"]
                assert [c.seq for c in b.commands][:2] == [1, 2]
                for agent in (a, b):
                    await agent.close()
            assert server.stop() == 0

    asyncio.run(scenario())


async def collect(client: ControlClient, job: str, seen: list[Any]) -> None:
    async for event in client.watch(job):
        seen.append(event)


@pytest.mark.e2e
def test_nobody_else_on_the_machine_can_read_jobs_and_models(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir(mode=0o755)
    with served(state):
        private = [*state.glob("state.db*"), state / "blobs", state / "admin.token"]
        assert len(private) > 3
        assert not [path for path in private if path.stat().st_mode & 0o077]


def test_a_half_sent_model_goes_on_after_a_restart(tmp_path: Path) -> None:
    model = os.urandom(300_000)

    async def scenario() -> None:
        with served(tmp_path / "state") as (server, facts):
            async with server.client() as client:
                agent = FakeAgent(await join((await client.invite("a")).token))
            await agent.connect()
            assert (await agent.put(model, upto=100_000)).have_bytes == 100_000
            server.stop(signal.SIGKILL)
            await agent.close()
            server.start(
                *("--listen", f"127.0.0.1:{facts['control']}"),
                *("--agent-listen", f"127.0.0.1:{facts['agent']}"),
                *("--metrics-listen", "127.0.0.1:0"),
            )
            await agent.connect()
            assert (await agent.put(model)).complete
            assert (server.state / "blobs" / digest_of(model).removeprefix("sha256:")).read_bytes() == model
            await agent.close()

    asyncio.run(scenario())


@pytest.mark.e2e
def test_what_stands_in_the_way_is_told_in_one_sentence(tmp_path: Path) -> None:
    state, broken, file = str(tmp_path / "second"), tmp_path / "broken", tmp_path / "file"
    broken.mkdir()
    (broken / "state.db").write_bytes(b"no database" * 1000)
    file.write_text("")
    with served(tmp_path / "state") as (_, facts):
        code, told = refused("serve", "--state-dir", state, "--listen", f"127.0.0.1:{facts['control']}")
        assert (code, told.splitlines()[-2].startswith("error[PORT_IN_USE]")) == (6, True), told
        with_password = "postgresql://u:secret@127.0.0.1:1/x"
        running, at_file, nowhere, soon, shown, hidden, invalid, *addresses = refused_in_turn(
            (["serve", "--state-dir", str(tmp_path / "state"), *ANYWHERE], {}),
            (["serve", "--state-dir", str(file)], {}),
            (["serve", "--state-dir", state, "--listen", "nowhere"], {}),
            (["serve", "--lease", "soon"], {}),
            (["serve", "--database-url", with_password], {}),
            (["serve", "--state-dir", state], {"GEOFED_DATABASE_URL": with_password}),
            (["serve", "--state-dir", str(broken), *ANYWHERE], {}),
            *((["serve", "--state-dir", str(tmp_path / "third"), "--listen", address], {}) for address in NO_ADDRESSES),
        )
    assert (running[0], "another control plane uses" in running[1]) == (8, True), running
    assert [code for code, _ in (at_file, nowhere, soon)] == [2, 2, 2]
    assert (shown[0], "secret" in shown[1], "CONFIG_INVALID" in shown[1]) == (2, False, True)
    assert (hidden[0], "secret" in hidden[1], "UNAVAILABLE" in hidden[1]) == (6, False, True)
    assert "STATE_INVALID" in invalid[1]
    assert len(addresses) == len(NO_ADDRESSES)
    assert not [told for code, told in addresses if code != 2 or "CONFIG_INVALID" not in told]


def test_a_client_without_a_server_is_told_so(tmp_path: Path, serve_config: ServeConfig) -> None:
    async def scenario() -> None:
        async with staged(serve_config) as stage:
            context = stage.context
        async with ControlClient.connect(context) as client:
            with pytest.raises(GeofedError, match="UNAVAILABLE"):
                await client.jobs()

    asyncio.run(scenario())
    with pytest.raises(GeofedError, match=r"context file .* not found"):
        Context.load(tmp_path / "nothing.json")


@pytest.mark.e2e
def test_help_imports_nothing_heavy() -> None:
    probe = (
        "import sys; from control_plane.cli.main import app\n"
        "from typer.testing import CliRunner\n"
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0\n"
        "heavy = {'grpc', 'sqlalchemy', 'pydantic', 'cryptography', 'torch'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", probe], check=True, timeout=30)


def test_a_port_that_is_taken_has_its_code() -> None:
    from control_plane.serving._address import bound_socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(GeofedError, match="PORT_IN_USE"):
            bound_socket("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(GeofedError, match="CONFIG_INVALID"):
        bound_socket("203.0.113.1", 0)


@pytest.mark.parametrize(("host", "agents"), [("[::]", "[::1]"), ("::1", "[::]")])
def test_it_listens_on_ipv6_and_tells_an_address_that_serves(tmp_path: Path, host: str, agents: str) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    server = Server(tmp_path / "state")
    listen = ("--listen", f"{host}:0", "--agent-listen", f"{agents}:0", "--metrics-listen", f"{host}:0")
    ports = server.start(*listen)

    async def look() -> str:
        async with server.client() as client:
            await client.version()
            told = (await client.invite("east", timedelta(hours=1))).token
        return (await join_federation(told, tmp_path / "agent", f"::1:{ports['control']}")).address

    try:
        assert json.loads((server.state / "context.json").read_text())["address"] == f"[::1]:{ports['control']}"
        assert asyncio.run(look()) == f"[::1]:{ports['agent']}"
    finally:
        assert server.stop() == 0
