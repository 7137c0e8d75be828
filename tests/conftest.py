"""Rules that hold for every test: nothing is left behind, and in CI nothing is skipped for want of something."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from hypothesis import settings
from support.budget import SOAK, register_profiles
from support.lasting import daemons
from support.processes import alive
from support.turns import turn
from xdist.scheduler import LoadScopeScheduling

from region_agent.gateway.embedded.replicas import isolation

_GRACE_SECONDS = 5.0
_FOR_WANT_OF_A_PACKAGE = re.compile("not installed|missing|could not import")
_START_DAEMONS = ("tests/deploy/", "tests/docs/", "tests/e2e/", "tests/packaging/")
_MEASURE = (
    "tests/deploy/", "tests/docs/", "tests/packaging/", "tests/e2e/test_preemption.py", "tests/e2e/test_rerouting.py",
    "tests/e2e/test_scaling.py", "tests/e2e/test_tuned.py", "tests/e2e/test_wan.py",
)  # fmt: skip
"""Tests that measure the machine or shape its network; two at once would be in each other's way."""
_SHARE_FEDERATIONS = tuple(
    f"tests/e2e/test_{name}.py"
    for name in (
        "base", "collectives", "errors", "gone_region", "hostile_job", "logs", "odd_messages", "pipeline", "profile",
        "region_file", "task_hooks", "zoo",
    )
)  # fmt: skip
"""Tests that use one of the federations in tests/e2e/conftest.py, each of which is started once."""
_STARTS_ONE = {"os.fork", "os.forkpty", "os.posix_spawn", "subprocess.Popen"}
_RUN = uuid.uuid4().hex
os.environ["GEOFED_TEST_RUN"] = _RUN
register_profiles()
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts what it does not wait for so, and all that tests start would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


_started = 0
"""Processes that this one has started."""


def _count_processes(event: str, _: tuple[object, ...]) -> None:
    global _started
    _started += event in _STARTS_ONE


sys.addaudithook(_count_processes)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    soaks = settings.get_current_profile_name() == SOAK
    for item in items:
        if item.nodeid.startswith(_START_DAEMONS):
            item.add_marker(pytest.mark.processes)
    if left_out := [item for item in items if item.get_closest_marker("soak") and not soaks]:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


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
        module = nodeid.partition("::")[0]
        if module.startswith(_MEASURE):
            return "the machine"
        return "shared federations" if module in _SHARE_FEDERATIONS else module


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _Together:
    return _Together(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    if report.skipped and os.environ.get("CI"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if _FOR_WANT_OF_A_PACKAGE.search(reason):
            # On a machine that may install what it needs, such a skip hides a missing install step.
            report.outcome = "failed"
            report.longrepr = f"skipped in CI: {reason}"
    return report


@pytest.fixture(autouse=True)
def _in_turn(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        yield
        return
    # Each process has a folder in that of the run.
    with turn(tmp_path_factory.getbasetemp().parent, alone=request.node.get_closest_marker("alone") is not None):
        yield


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(request: pytest.FixtureRequest, _in_turn: None) -> Iterator[None]:
    """Fails a test that leaves processes, threads or listening sockets."""
    starts = request.node.get_closest_marker("processes") is not None
    before = _traces(starts)
    yield
    deadline = time.monotonic() + _GRACE_SECONDS
    while left := _left_since(before, starts):
        if time.monotonic() > deadline:
            processes = [_describe(pid) for pid in left.get("processes", ())]
            raise AssertionError(f"left behind: {left} {processes}")
        time.sleep(0.05)


def _left_since(before: dict[str, set[object]], starts: bool) -> dict[str, set[object]]:
    left = {kind: now - before[kind] for kind, now in _traces(starts).items()}
    # What a daemon of a longer-lived fixture has started is its own affair.
    lasting = before["processes"] | daemons()
    left["processes"] = {pid for pid in left["processes"] if not ({pid} | _ancestors(pid)) & lasting}
    return {kind: found for kind, found in left.items() if found}


def _ancestors(pid: object) -> set[object]:
    with contextlib.suppress(psutil.Error):
        return {parent.pid for parent in psutil.Process(int(str(pid))).parents()}
    return set()


def _traces(starts: bool) -> dict[str, set[object]]:
    """What a test could leave. Listening sockets only: gRPC closes the ends of old connections when it sees fit.

    ``starts``: whether the test may start processes; to look at all that there are is a third of what others take.
    """
    listening = {(c.fd, c.laddr) for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN}
    return {
        "processes": set(_children() | _marked()) if starts else set(isolation.children()),
        "threads": {thread for thread in threading.enumerate() if not thread.daemon},
        "listening sockets": set(listening),
    }


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
