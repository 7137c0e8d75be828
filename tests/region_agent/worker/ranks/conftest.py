"""Gateways of one's own, as in their own tests, and ranks that are forked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.warm_ranks import warm_ranks

from region_agent.worker.ranks import group
from tests.region_agent.gateway.conftest import gateways, launch  # noqa: F401


@pytest.fixture(scope="session")
def forked_ranks() -> Iterator[Callable[..., Any]]:
    with warm_ranks() as start:
        yield start


@pytest.fixture(autouse=True)
def _ranks_are_forked(forked_ranks: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of workers in this process. Others are executed: in test_ranks_live.py, ../test_compiling.py and e2e."""
    monkeypatch.setattr(group, "_execute", forked_ranks)
