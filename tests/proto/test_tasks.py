"""A task that ends with an error fails its owner, whatever the error is."""

from __future__ import annotations

import ast
import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from datetime import timedelta
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.exchange_site import Site
from support.pki import Authority
from support.server_process import Server

import sync.ps.__main__ as parameter_server
from control_plane import server
from control_plane.server import ServeConfig
from control_plane.service.rpc._agents import AgentHubService
from control_plane.serving import _web
from geofed_pb import tasks
from geofed_pb.errors import GeofedError
from geofed_pb.fork_server import ExecStarter
from geofed_pb.tasks import awaited, background
from geofed_pb.v1 import agent_pb2
from region_agent.daemon.jobs import RegionJobs
from region_agent.gateway.embedded import provider
from region_agent.gateway.embedded.async_queue import AsyncQueue, QueuedCall
from region_agent.gateway.embedded.replica_table import ReplicaExited
from region_agent.gateway.embedded.replicas import zygote_link
from region_agent.partition.batches import BatchPlan
from region_agent.partition.events import SendReport, ShutDown, ShutDownFinished
from region_agent.partition.machine import PartitionMachine
from region_agent.partition.runner import PartitionRunner
from region_agent.partition.server.process import PsProcess
from region_agent.profiling import Profiler
from region_agent.shards import receiving
from region_agent.shards.receiving import ShardPort
from region_agent.shards.sending import Sending
from sync.file_transfer.manifest import PeerAddress
from sync.file_transfer.peer_sender import PeerSender
from sync.ps.config import PsConfig
from sync.ps.engine import Engine
from tests.control_plane.conftest import staged

ROOT = Path(__file__).parents[2]
ROOMS = ("control_plane", "region_agent", "sync", "scheduler", "deploy", "proto/geofed_pb")
STARTS_TASKS = {"create_task", "ensure_future", "TaskGroup", "start_soon"}
THREADS = {
    "control_plane/service/state/_leadership.py",  # its pool's results are awaited
    "control_plane/tracking/_track.py",  # its pool's results are awaited
    "proto/geofed_pb/tracing.py",  # last spans of a process; the exporter logs its errors
    "region_agent/gateway/container.py",  # accept, and the signals that end the process
    "region_agent/gateway/dial_out.py",  # a connection is opened again; after too many failures the process ends
    "region_agent/gateway/embedded/containers.py",  # whatever ends a thread, its container is told to have ended
    "region_agent/gateway/embedded/replicas/calls.py",  # a call's error is its answer
    "region_agent/gateway/embedded/replicas/relay.py",  # an error closes the connection
    "region_agent/gateway/embedded/replicas/replica.py",  # accept
    "region_agent/gateway/embedded/serverless/provider.py",  # who asked the cloud awaits the answer
    "region_agent/gateway/handler_process.py",  # an error ends the container; a call's error is its answer
    "region_agent/gateway/serverless/invocation.py",  # output is lost with its connection; the rest ends the invocation
    "region_agent/worker/data/loaders.py",  # its pools' results are awaited, but those that nobody wants any more
    "region_agent/worker/loop.py",
    "region_agent/worker/training/stage_checkpoints.py",
    "sync/merging/_driver.py",
    "sync/merging/_mean_collective.py",
    "sync/merging/_probe.py",
    "sync/pipeline/_stage_transfers.py",  # guarded: an error reaches the computing thread
    "sync/ps/engine.py",
    "sync/ps/execution/checkpoints.py",
    "sync/ps/execution/executor.py",
    "sync/channel_clients/_s3.py",
    "sync/file_transfer/bulk.py",
    "sync/file_transfer/file_receiver.py",
    "sync/tcp_streams/receiver.py",
    "sync/tcp_streams/sender.py",
}
"""Modules with threads of their own. Whoever adds one sees that an error reaches its owner: a future that nobody asks
holds it for ever."""


@cache
def _calls(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            called = node.func
            names.add(called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", ""))
    return names


def _sources() -> list[Path]:
    found = [path for room in ROOMS for path in (ROOT / room).rglob("*.py") if "_pb2" not in path.name]
    assert len(found) > 300
    return found


@pytest.mark.slow
def test_tasks_are_started_by_the_helper_only() -> None:
    found = [path for path in _sources() if STARTS_TASKS & _calls(path)]
    assert [str(path.relative_to(ROOT)) for path in found] == ["proto/geofed_pb/tasks.py"]


def test_modules_with_threads_are_known() -> None:
    starts = {"Thread", "run_in_executor", "run_coroutine_threadsafe"}
    found = {str(path.relative_to(ROOT)) for path in _sources() if starts & _calls(path)}
    assert found <= THREADS, "see that an error in the thread reaches its owner, then add the module"


class Injected(RuntimeError):
    """What a test makes a task end with."""


async def _broken(*_: object, **__: object) -> Any:
    raise Injected


async def _soon(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.001)


def test_an_error_is_passed_on_and_a_cancellation_is_not() -> None:
    async def scenario() -> None:
        told: list[GeofedError] = []

        async def full() -> None:
            raise GeofedError("DISK_FULL", "no space")

        cancelled = background(asyncio.sleep(100), told.append)
        for work in (_broken(), full()):
            background(work, told.append)
        await asyncio.sleep(0)
        cancelled.cancel()
        await _soon(lambda: len(told) == 2 and cancelled.done())
        assert [error.code for error in told] == ["INTERNAL", "DISK_FULL"]
        with pytest.raises(Injected):
            await awaited(_broken())
        assert not tasks._running

    asyncio.run(scenario())


def _bare(kind: type[Any], **fields: Any) -> Any:
    """An owner with no more than what a test needs."""
    owner = object.__new__(kind)
    owner.__dict__.update(fields)
    return owner


async def _engine() -> None:
    """Also where a timer, or a callback of the links, feeds an event that cannot be handled."""
    for injure in (lambda e: e._start(_broken()), lambda e: e.feed("an event")):
        engine = _bare(
            Engine, failed=None, broken=asyncio.Event(), _calls={1: asyncio.get_running_loop().create_future()},
            _tasks=set(), _changed=asyncio.Condition(), version=0, links=dict, machine=None, _exchange_since=None,
        )  # fmt: skip
        call = engine._calls[1]
        injure(engine)
        async with asyncio.timeout(10):
            await engine.broken.wait()
        assert engine.failed.code == "INTERNAL"
        assert call.exception() is engine.failed


async def _agent_of_a_region() -> None:
    reports: list[Any] = []
    hub = SimpleNamespace(report=lambda report, durable: reports.append(report))
    logs, audit = SimpleNamespace(flush_job=lambda job: None), SimpleNamespace(note=lambda report: None)
    jobs = _bare(RegionJobs, _hub=hub, _logs=logs, _audit=audit, _closing=set())
    jobs._run_to_end(_broken(), "j", 2)
    await _soon(lambda: reports)
    assert (reports[0].job, reports[0].epoch, reports[0].state, reports[0].error.code) == ("j", 2, "failed", "INTERNAL")


async def _partition() -> None:
    machine, done = PartitionMachine("a", 1, epoch=3, batches=BatchPlan(1, 8)), list[Any]()
    runner = _bare(PartitionRunner, job="j", machine=machine, _tasks=set(), _carry_out=done.append)
    runner.feed = lambda event: (_ for _ in ()).throw(Injected())
    runner._run(_broken())
    await _soon(lambda: done)
    assert done == [ShutDown(discard=False)]
    assert machine.handle(ShutDownFinished()) == [SendReport("failed", "Injected: ", machine.error, "")]
    assert machine.error is not None
    assert machine.error.code == "INTERNAL"


async def _shard() -> None:
    states: list[str] = []
    sending = _bare(Sending, job="j", state="sending", _error=None)
    sending._enter = lambda state, condition="": states.append(state)
    sending._work = _broken
    sending.begin()
    await _soon(lambda: "failed" in states)
    assert sending._error.code == "INTERNAL"


async def _profile() -> None:
    reports: list[Any] = []
    profiler = _bare(Profiler, _answers={}, _tasks={}, _report=reports.append, _answer=_broken)
    profiler._begin(agent_pb2.ProfileTask(id="p"), _broken)
    await _soon(lambda: reports)
    assert (reports[0].id, reports[0].error.code) == ("p", "INTERNAL")


async def _replica() -> None:
    applied: list[Any] = []
    owner = _bare(provider.Provider, _running={}, _tasks=set(), apply=applied.append)
    owner._run_task(_broken(), lambda error: owner._not_started("r", error))
    await _soon(lambda: applied)
    assert applied == [ReplicaExited("r")]


async def _asynchronous_call() -> None:
    delivered: list[Any] = []

    async def deliver(url: str, headers: dict[str, str], body: bytes) -> None:
        delivered.append((url, headers["X-Function-Status"]))

    queue = AsyncQueue(None, SimpleNamespace(queue_inflight=1, queue_body_bytes=9, queue_items=9), None)  # type: ignore[arg-type]
    queue._call_when_free = _broken  # type: ignore[method-assign]
    queue._deliver = deliver  # type: ignore[method-assign]
    call = SimpleNamespace(call_id="c", function="f", body=b"")
    queue._waiting.append(QueuedCall(call, "https://x", "0"))  # type: ignore[arg-type]
    queue._fill()
    await _soon(lambda: delivered)
    assert delivered == [("https://x", "500")]


@pytest.mark.parametrize(
    "owner",
    [
        _engine, _agent_of_a_region, _partition, _shard, _profile, _replica, _asynchronous_call,
    ],
)  # fmt: skip
def test_a_failed_task_fails_its_owner(owner: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(owner())  # type: ignore[arg-type]


def test_without_the_reader_of_its_log_a_server_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would wait for ever once the pipe of its log is full."""
    monkeypatch.setattr(PsProcess, "_read_stderr", _broken)
    config: Any = SimpleNamespace(ready_file=tmp_path / "ready", model_dump_json=lambda: "{}")
    ended: list[int] = []

    async def started(*_: object, **__: object) -> Any:
        async def wait() -> int:
            return -9

        process = SimpleNamespace(returncode=None, wait=wait)
        process.kill = process.terminate = lambda: (ended.append(9), setattr(process, "returncode", -9))
        return process

    async def scenario() -> None:
        monkeypatch.setattr(asyncio, "create_subprocess_exec", started)
        server_process = PsProcess(config, tmp_path / "ps.json", Any, print, log_format="text", starter=ExecStarter())  # type: ignore[arg-type]
        with pytest.raises(GeofedError, match="INTERNAL: Injected"):
            await server_process.start()

    asyncio.run(scenario())
    assert ended


def _config_of(folder: Path) -> ServeConfig:
    anywhere = "127.0.0.1:0"
    return ServeConfig(folder / "state", anywhere, anywhere, anywhere, lease=timedelta(seconds=30))


def test_a_session_whose_reader_fails_ends_with_a_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent then opens another one."""
    monkeypatch.setattr(AgentHubService, "_read", _broken)

    async def scenario() -> None:
        async with staged(_config_of(tmp_path)) as stage:
            agent = await stage.agent("a")
            with contextlib.suppress(GeofedError):
                await agent.connect()
            assert (await agent.ended()).code == "INTERNAL"
            await agent.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("owner", "method"),
    [
        (server, "_tick"), (server, "_keep_certificate"), (server.Replanner, "run"), (server.LeaderState, "keep"),
        (_web._WithoutSignals, "serve"),
    ],
)  # fmt: skip
def test_a_failed_task_of_the_control_plane_ends_its_leadership(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, method: str
) -> None:
    monkeypatch.setattr(owner, method, _broken)

    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            opened = await asyncio.gather(server._opened(_config_of(tmp_path), stack), return_exceptions=True)
            if isinstance(opened[0], GeofedError):
                # It has ended before the state was loaded.
                assert (opened[0].code, method) == ("STANDBY", "keep")
            else:
                async with asyncio.timeout(10):
                    await opened[0].lost.wait()

    asyncio.run(scenario())


def test_a_server_that_no_longer_looks_for_revoked_certificates_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parameter_server, "end_revoked", _broken)
    settings = Server(tmp_path / "east", Authority(), "east", ("east", "west")).settings
    with pytest.raises(GeofedError, match="INTERNAL: Injected"):
        asyncio.run(asyncio.wait_for(parameter_server.serve(PsConfig(**settings)), 20))


def test_a_port_for_shards_that_no_longer_looks_for_revoked_certificates_fails_its_partition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiving, "end_revoked", _broken)
    identity = Authority().region("west")
    config: Any = SimpleNamespace(
        name="west", advertise="127.0.0.1", server=SimpleNamespace(exchange_host="127.0.0.1", ports=None)
    )
    store: Any = SimpleNamespace(source="east", failed=None, complete=False)

    async def scenario() -> None:
        port = ShardPort("j", "west", "cloud", [store])
        async with receiving.open_port(port, config, lambda: identity), asyncio.timeout(10):
            with pytest.raises(GeofedError, match="INTERNAL: Injected"):
                await port.complete()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("work", "name"),
    [("run", "sender to west"), ("collect", "Collect call to west"), ("_end_revoked", "sender to west")],
)
def test_a_sender_that_ends_fails_its_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, work: str, name: str
) -> None:
    monkeypatch.setattr(PeerSender, work, _broken)

    async def scenario() -> None:
        east = Site("east", ("east", "west"), tmp_path, Authority().region("east"))
        try:
            east.links.set_peers([PeerAddress("west", 1, "127.0.0.1:1")])
            await _soon(lambda: east.failed)
            assert east.failed is not None
            assert (east.failed.code, east.failed.message) == ("INTERNAL", f"{name}: Injected: ")
        finally:
            await east.stop()

    asyncio.run(scenario())


@pytest.mark.parametrize("watch", ["_watch_memory", "_watch_disk"])
def test_without_a_watch_the_gateway_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, watch: str) -> None:
    """What starts it again is the agent, which waits for the end of its process."""
    ends: list[GeofedError] = []
    monkeypatch.setattr(provider, "end_process", ends.append)
    for name in ("_watch_memory", "_watch_disk"):
        monkeypatch.setattr(provider.Provider, name, _broken if name == watch else _waiting)

    async def nothing(*_: object) -> Any:
        return SimpleNamespace(kind="bubblewrap")

    monkeypatch.setattr(provider, "remove_old_groups", lambda: None)
    monkeypatch.setattr(provider, "system_view", lambda *_: None)

    async def scenario() -> None:
        zygote = SimpleNamespace(start=nothing, python_path=())
        config = SimpleNamespace(state_dir=tmp_path, hide_paths=())
        owner = _bare(provider.Provider, config=config, _zygote=zygote, _hidden=(), _tasks=set())
        owner._tried_isolation = nothing
        await owner.start()
        await _soon(lambda: ends)
        assert ends[0].code == "INTERNAL"
        for task in list(owner._tasks):
            task.cancel()
        await asyncio.gather(*owner._tasks, return_exceptions=True)

    asyncio.run(scenario())


async def _waiting(*_: object) -> None:
    await asyncio.Event().wait()


def test_without_its_warm_parent_the_gateway_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[GeofedError] = []
    monkeypatch.setattr(zygote_link, "end_process", ends.append)

    async def scenario() -> None:
        link = _bare(zygote_link.ZygoteLink, _keep_running=_broken, _ready=asyncio.Event())
        link._ready.set()
        await link.start()
        await _soon(lambda: ends)
        assert ends[0].code == "INTERNAL"

    asyncio.run(scenario())
