"""Worker functions that run in this process put what they unpack where the test's own files are, and leave nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.jobs import worker_in_process
from support.warm_workers import WarmParent


@pytest.fixture(autouse=True)
def _worker_of_the_test(tmp_path: Path) -> Iterator[None]:
    with worker_in_process(tmp_path):
        yield


@pytest.fixture(scope="module")
def warm() -> Iterator[WarmParent]:
    """Forks workers that run in processes of their own."""
    with WarmParent() as parent:
        yield parent
