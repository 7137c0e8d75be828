"""Parameter servers that are gone when a test is over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.pki import Authority
from support.server_process import NumpyWorker, Server
from support.warm_servers import WarmServers


@pytest.fixture(scope="session")
def authority() -> Authority:
    return Authority()


@pytest.fixture(scope="session")
def warm_servers() -> Iterator[WarmServers]:
    with WarmServers(waits_for_disk=False) as parent:
        yield parent


@pytest.fixture
def servers(tmp_path: Path, authority: Authority, warm_servers: WarmServers) -> Iterator[Callable[..., list[Server]]]:
    """Makes running servers for the regions named, each told of the others."""
    made: list[Server] = []

    def start(*regions: str, **settings: Any) -> list[Server]:
        options = {"warm": warm_servers, **settings}
        members, each = options.pop("regions", regions), options.pop("each", lambda region: {})
        # `each` returns what one region's server has of its own.
        made.extend(
            Server(tmp_path / region, authority, region, members, **options, **each(region)) for region in regions
        )
        for server in made:
            server.launch()
        for server in made:
            server.await_ready()
        for server in made:
            server.configure(*(other for other in made if other is not server))
        return made

    yield start
    for server in made:
        if server.process is not None:
            server.kill()


@pytest.fixture
def workers() -> Iterator[Callable[..., NumpyWorker]]:
    """Makes running workers."""
    made: list[NumpyWorker] = []

    def start(server: Server, push: float, **options: Any) -> NumpyWorker:
        made.append(NumpyWorker(server, push, **options))
        made[-1].start()
        return made[-1]

    yield start
    for worker in made:
        worker.stop.set()
