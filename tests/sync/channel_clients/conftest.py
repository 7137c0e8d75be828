"""Real stores, started once, and channels in them, closed when a test is over."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.processes import are_wanted
from support.stores import RedisServer, S3Server, redis_server, s3_server

from sync.channel import Channel
from sync.channel_clients import FileChannel, open_channel

_SERVED = pytest.mark.processes


class Store:
    """Opens the same channel again and again, as different workers would."""

    def __init__(self, kind: str, open_one: Callable[[], Channel]) -> None:
        self.kind, self._open = kind, open_one
        self._opened: list[Channel] = []

    @property
    def is_slow(self) -> bool:
        """Whether a request takes milliseconds."""
        return self.kind == "s3"

    def __call__(self) -> Channel:
        channel = self._open()
        self._opened.append(channel)
        return channel

    def close(self) -> None:
        for channel in self._opened:
            channel.close()


@pytest.fixture(scope="session")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


@pytest.fixture(scope="session", autouse=True)
def _started(request: pytest.FixtureRequest) -> None:
    """Starts them before a test begins, which would otherwise be taken to have left them behind."""
    if are_wanted(request.session, Path(__file__).parent):
        for name in ("redis", "s3"):
            with contextlib.suppress(pytest.skip.Exception):
                request.getfixturevalue(name)


@pytest.fixture(params=["disk", "shared memory", *(pytest.param(kind, marks=_SERVED) for kind in ("redis", "s3"))])
def reopen(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    own = f"geofed-test-{uuid.uuid4().hex}"
    folder = Path("/dev/shm") / own if request.param == "shared memory" else tmp_path / "channel"
    if request.param == "shared memory" and not os.access("/dev/shm", os.W_OK):
        pytest.skip("this machine has no /dev/shm")
    if request.param in ("redis", "s3"):
        server = request.getfixturevalue(request.param)
        address = server.unix(own) if request.param == "redis" else server.address(own, parallel=6)
        store = Store(request.param, lambda: open_channel(request.param, address))
    else:
        store = Store("file", lambda: FileChannel(folder))
    yield store
    store.close()
    shutil.rmtree(folder, ignore_errors=True)
