from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.lasting import Lasting
from support.running import Federation, Running, digits_sites
from support.stores import RedisServer, redis_server

REGIONS = ("frankfurt", "shanghai", "virginia")
PAIR = ("shanghai", "virginia")
REDIS_PASSWORD = "the region's own"
STORE_PRICES = {"source": "test", "asOf": "2026-01", "usdPerHour": 0.02, "usdPerPut": 5e-6, "usdPerGet": 4e-7}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that share a federation come one after the other: only one lasts at a time."""
    here = [item for item in items if item.path.parent == Path(__file__).parent]
    order = iter(sorted(here, key=_federation_of))
    mine = set(here)
    items[:] = [next(order) if item in mine else item for item in items]


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """No federation runs beside tests of other folders."""
    if nextitem is None or nextitem.path.parent != Path(__file__).parent:
        Lasting.end_now()


def _federation_of(item: pytest.Item) -> str:
    """The name of its fixture; empty for a test that has a federation of its own."""
    names = getattr(item, "fixturenames", ())
    return next((name for name in ("three", "pair", "redis_pair") if name in names), "")


def _three_regions(folder: Path) -> Federation:
    return Federation(folder / "federation", digits_sites(folder, REGIONS, workers=2))


@pytest.fixture(scope="session")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lasting]:
    with Lasting(_three_regions, tmp_path_factory) as federation:
        yield federation


@pytest.fixture
def running(three: Lasting, request: pytest.FixtureRequest, tmp_path: Path) -> Running:
    """Three regions on loopback; each has two workers. In order and without a job."""
    return three.running(request, tmp_path)


def _two_regions(folder: Path) -> Federation:
    return Federation(folder / "federation", digits_sites(folder, PAIR, workers=4))


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lasting]:
    with Lasting(_two_regions, tmp_path_factory) as federation:
        yield federation


@pytest.fixture
def running_pair(pair: Lasting, request: pytest.FixtureRequest, tmp_path: Path) -> Running:
    """Two regions with four workers each, whose channel is files. In order and without a job."""
    return pair.running(request, tmp_path)


@pytest.fixture(scope="session")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """Which only the two regions of `redis_pair` use."""
    with redis_server(tmp_path_factory.mktemp("redis"), password=REDIS_PASSWORD) as server:
        yield server


@pytest.fixture(scope="session")
def redis_pair(redis: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lasting]:
    def start(folder: Path) -> Federation:
        password = folder / "password"
        password.write_text(REDIS_PASSWORD)
        channel = {
            "kind": "redis", "url": f"redis://127.0.0.1:{redis.port}/0", "passwordFile": str(password),
            "prices": STORE_PRICES,
        }  # fmt: skip
        return Federation(folder / "federation", digits_sites(folder, PAIR, workers=3, channel=channel))

    with Lasting(start, tmp_path_factory) as federation:
        yield federation


@pytest.fixture
def running_redis(redis_pair: Lasting, request: pytest.FixtureRequest, tmp_path: Path) -> Running:
    """Two regions with three workers each, whose channel is one redis-server. In order and without a job."""
    return redis_pair.running(request, tmp_path)
