"""Worker functions that run in this process put what they unpack where the test's own files are, and leave nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.warm_workers import WarmParent

from geofed_pb.user_code.modules import drop_task_modules
from region_agent.worker import handler


@pytest.fixture(autouse=True)
def _worker_of_the_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(handler, "_scratch", lambda: tmp_path / "scratch")
    # To look through all that the tests before have left in this process takes a third of a second each time.
    monkeypatch.setattr(handler, "gc", SimpleNamespace(collect=lambda: 0))
    yield
    handler._drop_loaded()
    drop_task_modules()


@pytest.fixture(scope="module")
def warm() -> Iterator[WarmParent]:
    """Forks workers that run in processes of their own."""
    with WarmParent() as parent:
        yield parent
