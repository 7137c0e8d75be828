"""A task that ends with an error fails its owner, whatever the error is."""

from __future__ import annotations

import ast
import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from control_plane import server
from control_plane.server import ServeConfig
from control_plane.service.rpc._agents import AgentHubService
from geofed_pb import tasks
from geofed_pb.errors import GeofedError
from geofed_pb.tasks import awaited, background
from geofed_pb.v1 import agent_pb2
from region_agent.daemon import Agent
from region_agent.gateway.embedded import provider
from region_agent.gateway.embedded.async_queue import AsyncQueue, QueuedCall
from region_agent.gateway.embedded.replicas import zygote_link
from region_agent.gateway.embedded.table import ReplicaExited
from region_agent.partition.runner import PartitionRunner
from region_agent.partition.server_process import PsProcess
from region_agent.profiling import Profiler
from region_agent.shards.sending import Sending
from sync.ps.engine import Engine

ROOT = Path(__file__).parents[2]
ROOMS = ("control_plane", "region_agent", "sync", "scheduler", "deploy", "proto/geofed_pb")
STARTS_TASKS = {"create_task", "ensure_future", "TaskGroup", "start_soon"}
THREADS = {
    "control_plane/service/state/_leading.py",  # its pool's results are awaited
    "region_agent/gateway/container.py",  # accept, and the signals that end the process
    "region_agent/gateway/embedded/replicas/calls.py",  # a call's error is its answer
    "region_agent/gateway/embedded/replicas/relay.py",  # an error closes the connection
    "region_agent/gateway/embedded/replicas/replica.py",  # accept
    "region_agent/worker/loop.py",
    "region_agent/worker/training/stage_checkpoints.py",
    "sync/merging/_driver.py",
    "sync/merging/_mean_collective.py",
    "sync/merging/_probe.py",
    "sync/pipeline/_lanes.py",  # guarded: an error reaches the computing thread
    "sync/ps/engine.py",
    "sync/ps/execution/checkpoints.py",
    "sync/ps/execution/executor.py",
    "sync/store/_s3.py",
    "sync/transfer/bulk.py",
    "sync/transfer/intake.py",
    "sync/transport/receiver.py",
    "sync/transport/sender.py",
}
"""Modules with threads of their own. Whoever adds one sees that an error reaches its owner: a future that nobody asks
holds it for ever."""


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
    agent = _bare(Agent, _hub=hub, _closing=set())
    agent._run_to_end(_broken(), "j", 2)
    await _soon(lambda: reports)
    assert (reports[0].job, reports[0].epoch, reports[0].state, reports[0].error.code) == ("j", 2, "failed", "INTERNAL")


async def _partition() -> None:
    reports: list[Any] = []
    context = SimpleNamespace(report=lambda report, durable: reports.append(report))
    start = agent_pb2.StartPartition(job="j", epoch=3)
    runner = _bare(PartitionRunner, job="j", start=start, _context=context, _tasks=set(), _feed=None)
    runner.feed = lambda event: (_ for _ in ()).throw(Injected())
    runner._run(_broken())
    await _soon(lambda: reports)
    assert (reports[0].epoch, reports[0].state, reports[0].error.code) == (3, "failed", "INTERNAL")


async def _log_of_a_server() -> None:
    killed: list[bool] = []
    process = SimpleNamespace(returncode=None, kill=lambda: killed.append(True))
    server_process = _bare(PsProcess, _error=None, _process=process)
    background(_broken(), server_process._unread)
    await _soon(lambda: killed)
    assert server_process._error.code == "INTERNAL"


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


async def _session() -> None:
    ended: list[GeofedError] = []
    hub = _bare(AgentHubService, _read=_broken)
    background(hub._read(None, None), ended.append)
    await _soon(lambda: ended)
    assert ended[0].code == "INTERNAL"


@pytest.mark.parametrize(
    "owner",
    [
        _engine, _agent_of_a_region, _partition, _log_of_a_server, _shard, _profile, _replica, _asynchronous_call,
        _session,
    ],
)  # fmt: skip
def test_a_failed_task_fails_its_owner(owner: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(owner())  # type: ignore[arg-type]


@pytest.mark.parametrize("task", ["_tick", "Succession.run", "Leading.keep"])
def test_a_failed_task_of_the_control_plane_ends_its_leadership(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str
) -> None:
    kind, _, method = task.rpartition(".")
    monkeypatch.setattr(getattr(server, kind) if kind else server, method, _broken)

    async def scenario() -> None:
        anywhere = "127.0.0.1:0"
        config = ServeConfig(tmp_path / "state", anywhere, anywhere, anywhere, lease=timedelta(seconds=30))
        async with AsyncExitStack() as stack:
            opened = await asyncio.gather(server._opened(config, stack), return_exceptions=True)
            if isinstance(opened[0], GeofedError):
                # It has ended before the state was loaded.
                assert (opened[0].code, task) == ("STANDBY", "Leading.keep")
            else:
                async with asyncio.timeout(10):
                    await opened[0].lost.wait()

    asyncio.run(scenario())


@pytest.mark.parametrize("module", [provider, zygote_link], ids=["memory watch", "warm parent"])
def test_without_its_watch_the_gateway_ends(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What starts it again is the agent, which waits for the end of its process."""
    ends: list[GeofedError] = []
    monkeypatch.setattr(module, "end_process", ends.append)

    async def scenario() -> None:
        if module is zygote_link:
            link = _bare(zygote_link.ZygoteLink, _keep_running=_broken, _ready=asyncio.Event())
            link._ready.set()
            await link.start()
        else:
            owner = _bare(provider.Provider, _tasks=set())
            owner._run_task(_broken(), provider.end_process)
        await _soon(lambda: ends)
        assert ends[0].code == "INTERNAL"

    asyncio.run(scenario())
