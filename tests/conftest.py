"""Rules that hold for every test: nothing is left behind, and in CI nothing is skipped for want of something."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import psutil
import pytest

_GRACE_SECONDS = 5.0


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    if report.skipped and os.environ.get("CI") and not hasattr(report, "wasxfail"):
        # On a machine that may install what it needs, a skip hides a missing install step.
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"skipped in CI: {reason}"
    return report


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    """Fails a test that leaves processes or threads."""
    threads = set(threading.enumerate())
    processes = _children()
    yield
    deadline = time.monotonic() + _GRACE_SECONDS
    while True:
        left = [t for t in threading.enumerate() if t not in threads and not t.daemon]
        children = _children() - processes
        if not left and not children:
            return
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    assert not left, f"threads left behind: {left}"
    assert not children, f"processes left behind: {[_describe(pid) for pid in children]}"


def _children() -> set[int]:
    found = psutil.Process().children(recursive=True)
    return {child.pid for child in found if child.is_running() and child.status() != psutil.STATUS_ZOMBIE}


def _describe(pid: int) -> str:
    try:
        return " ".join(psutil.Process(pid).cmdline())[:200]
    except psutil.Error:
        return str(pid)
