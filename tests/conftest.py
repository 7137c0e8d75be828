"""Rules that hold for every test: nothing is left behind, and in CI nothing is skipped without a good reason."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import stat
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import settings
from support.budget import SOAK, register_profiles
from support.lasting import daemons, parents
from support.processes import alive
from support.skips import fail_in_ci
from support.turns import turn
from xdist.scheduler import LoadScopeScheduling

from region_agent.gateway.embedded.replicas import isolation

_GRACE_SECONDS = 5.0
_START_DAEMONS = ("tests/deploy/", "tests/docs/", "tests/e2e/", "tests/packaging/")
_MEASURE = (
    "tests/deploy/", "tests/docs/", "tests/packaging/", "tests/region_agent/gateway/test_warm_start.py",
    "tests/e2e/test_preemption.py", "tests/e2e/test_rerouting.py",
    "tests/e2e/test_scaling.py", "tests/e2e/test_tuned.py", "tests/e2e/test_wan.py",
)  # fmt: skip
"""Tests that measure the machine or shape its network; two at once would be in each other's way."""
_OWN_FEDERATIONS = tuple(
    f"tests/e2e/test_{name}.py"
    for name in (
        "approval", "audit", "clients", "containers", "extensions", "first_hour", "first_job", "full_disk", "left_out",
        "platforms", "refusals", "requirements", "restore", "robust_background", "secrets", "shards_elsewhere",
        "systemd", "tracking", "upgrade",
    )
)  # fmt: skip
_THREE_REGIONS = tuple(
    f"tests/e2e/test_{name}.py"
    for name in (
        "compile", "dashboard", "deletion", "differential_privacy", "federated_methods", "goal", "initial_model",
        "kept_models", "probing", "secure_aggregation", "survival", "sweep", "task_folders",
    )
)  # fmt: skip
_NORTH_AND_REDIS = tuple(
    f"tests/e2e/test_{name}.py"
    for name in ("chosen_batch", "collectives", "errors", "logs", "odd_messages", "profile")
)  # fmt: skip
"""Of the federations in tests/e2e/conftest.py, each of which is started once in a group. Other end-to-end tests use
that of two regions whose channel is files."""
_MACHINE, _OF_THREE, _OF_TWO = "the machine", "federations of three regions", "federations of two regions"
_OF_OTHERS = "federations in the north and with a redis-server"
_LONG = (
    _MACHINE, _OF_THREE, _OF_TWO, "tests/e2e/test_containers.py", _OF_OTHERS, "tests/e2e/test_platforms.py",
    "tests/region_agent/gateway/test_lambda.py", "tests/e2e/", "tests/region_agent/gateway/",
)  # fmt: skip
"""Groups of tests, and beginnings of their paths: the longest come first, so that all processes end at the same
time."""
_TURNS = "geofed_turns"
_STARTS_ONE = {"os.fork", "os.forkpty", "os.posix_spawn", "subprocess.Popen"}
_RUN = uuid.uuid4().hex
os.environ["GEOFED_TEST_RUN"] = _RUN
# Daemons start again and again: what they are compiled to is kept, whatever the environment has Python do.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
register_profiles()
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts what it does not wait for so, and all that tests start would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


_started = 0
"""Processes that this one has started."""


_turn = contextlib.ExitStack()
_turn_kept = False


def _count_processes(event: str, _: tuple[object, ...]) -> None:
    global _started
    _started += event in _STARTS_ONE


sys.addaudithook(_count_processes)


def pytest_itemcollected(item: pytest.Item) -> None:
    # Here, since pytest chooses by marks before the next hook.
    if item.nodeid.startswith(_START_DAEMONS):
        item.add_marker(pytest.mark.processes)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    soaks = settings.get_current_profile_name() == SOAK
    if left_out := [item for item in items if item.get_closest_marker("soak") and not soaks]:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    alone = {item.path for item in items} - {item.path for item in items if not _is_alone(item)}
    items.sort(key=lambda item: (_takes_longest_first(item), item.path not in alone))


def pytest_collection_finish() -> None:
    """Leave what is imported, millions of objects, out of every garbage collection: 8 % of the quick tests' time."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Take turns with tests of other processes: around all fixtures, and around the clock of a test's timeout. Tests
    that are alone and follow each other have one turn: to get it takes as long as the test of another process."""
    if _TURNS not in getattr(item.config, "workerinput", {}):
        return (yield)
    folder, alone = Path(item.config.workerinput[_TURNS]), _is_alone(item)
    if not _turn_kept:
        _turn.enter_context(turn(folder, alone=alone))
    try:
        return (yield)
    finally:
        _keep_turn(alone and nextitem is not None and _is_alone(nextitem))


def _keep_turn(keep: bool) -> None:
    global _turn_kept
    if not keep:
        _turn.close()
    _turn_kept = keep


def _is_alone(item: pytest.Item) -> bool:
    return item.get_closest_marker("alone") is not None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    if time.time() > float(os.environ.get("GEOFED_TEST_UNTIL", "inf")):
        pytest.skip("the time of this run is over")
    yield from _without_processes(item)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    yield from _without_processes(item)


class _SessionFixtures:
    """What they start is for many tests: the first of these is not to answer for it. A plugin, since the fixtures of a
    session know nothing of a conftest below it."""

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Iterator[Any]:
        global _started
        before = _started
        try:
            return (yield)
        finally:
            if fixturedef.scope == "session":
                _started = before


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()
    config.pluginmanager.register(_SessionFixtures())


def _without_processes(item: pytest.Item) -> Iterator[None]:
    before = _started
    yield
    if _started > before and item.get_closest_marker("processes") is None:
        pytest.fail("starts a process; give the test, or its module, the mark `processes`", pytrace=False)


class _Together(LoadScopeScheduling):
    """Where tests run in several processes, those of a module stay together; and all that measure the machine; and all
    that share federations."""

    def _split_scope(self, nodeid: str) -> str:
        return _scope(nodeid)


def _scope(nodeid: str) -> str:
    module = nodeid.partition("::")[0]
    if module.startswith(_MEASURE):
        return _MACHINE
    if not module.startswith("tests/e2e/") or module in _OWN_FEDERATIONS:
        return module
    if module in _THREE_REGIONS:
        return _OF_THREE
    return _OF_OTHERS if module in _NORTH_AND_REDIS else _OF_TWO


def _takes_longest_first(item: pytest.Item) -> int:
    """Rank of a test."""
    scope = _scope(item.nodeid)
    return next((rank for rank, start in enumerate(_LONG) if scope.startswith(start)), len(_LONG))


def pytest_configure_node(node: Any) -> None:
    """Each of the processes among which tests are divided knows the folder of their turns."""
    if not hasattr(node.config, _TURNS):
        folder = tempfile.TemporaryDirectory(prefix="geofed-turns-")
        node.config.add_cleanup(folder.cleanup)
        setattr(node.config, _TURNS, folder.name)
    node.workerinput[_TURNS] = getattr(node.config, _TURNS)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _Together:
    # In the order of collection, see below.
    config.option.loadscopereorder = False
    return _Together(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    fail_in_ci(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    report = yield
    fail_in_ci(report)
    return report


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves processes, threads, listening sockets or another working directory."""
    folder = os.getcwd()
    starts = request.node.get_closest_marker("processes") is not None
    before = _traces(starts)
    yield
    deadline = time.monotonic() + _GRACE_SECONDS
    while left := _left_since(before, starts):
        if time.monotonic() > deadline:
            processes = [_describe(pid) for pid in left.get("processes", ())]
            raise AssertionError(f"left behind: {left} {processes}")
        time.sleep(0.05)
    _returned_to(folder)


def _returned_to(folder: str) -> None:
    """Fails the test that has changed the working directory, and not all that come after it."""
    try:
        now = os.getcwd()
    except FileNotFoundError:
        now = "(removed)"
    if now != folder:
        os.chdir(folder)
        raise AssertionError(f"the working directory is {now}")


def _left_since(before: dict[str, set[object]], starts: bool) -> dict[str, set[object]]:
    left = {kind: now - before[kind] for kind, now in _traces(starts).items()}
    # What a daemon of a longer-lived fixture has started is its own affair.
    lasting = before["processes"] | daemons()
    found = left["processes"] - parents()
    left["processes"] = {pid for pid in found if not ({pid} | _ancestors(pid)) & lasting}
    return {kind: found for kind, found in left.items() if found}


def _ancestors(pid: object) -> set[object]:
    with contextlib.suppress(psutil.Error):
        return {parent.pid for parent in psutil.Process(int(str(pid))).parents()}
    return set()


def _traces(starts: bool) -> dict[str, set[object]]:
    """What a test could leave. Listening sockets only: gRPC closes the ends of old connections when it sees fit.

    ``starts``: whether the test may start processes; to look at all that there are is a third of what others take.
    """
    return {
        "processes": set(_children() | _marked()) if starts else set(isolation.children()),
        "threads": {thread for thread in threading.enumerate() if not thread.daemon},
        "listening sockets": set(_listening()),
    }


def _listening() -> Iterator[tuple[int, object]]:
    """Descriptors and addresses. Not from the kernel's tables of connections, which take 8 ms to read, twice a test."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            mine = socket.socket(fileno=int(name))
            try:
                inet = mine.family in (socket.AF_INET, socket.AF_INET6)
                if inet and mine.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    yield int(name), mine.getsockname()
            finally:
                mine.detach()


def _marked() -> set[int]:
    """Processes that stem from this run, wherever they have gone: one that keeps a network namespace is among them."""
    mark = f"GEOFED_TEST_RUN={_RUN}".encode()
    found = set()
    # Twice a test, of all processes there are: without the comfort of paths it takes a quarter of the time.
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb", buffering=0) as environment:
            if mark in environment.read():
                found.add(int(pid))
    return found - {os.getpid()}


def _children() -> set[int]:
    # Mostly there is none, which the kernel tells at once; to look for those of all processes takes 3 ms.
    if not isolation.children():
        return set()
    return {child.pid for child in psutil.Process().children(recursive=True) if alive(child)}


def _describe(pid: int) -> str:
    try:
        return " ".join(psutil.Process(pid).cmdline())[:200]
    except psutil.Error:
        return str(pid)
