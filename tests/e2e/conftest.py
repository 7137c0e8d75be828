from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.lasting import Lasting
from support.running import Federation, Running, digits_sites
from support.stores import RedisServer, redis_server

REGIONS = ("frankfurt", "shanghai", "virginia")
PAIR = ("shanghai", "virginia")
NUMBERS = 16
"""Samples in each region."""
NORTH = ("bergen", "oslo")
NORTH_PORTS = (27310, 27315)
"""Of Bergen's parameter servers. Below those that the system gives to connections, any of which may be open on this
machine."""
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
    return next((name for name in ("three", "pair", "redis_pair", "north") if name in names), "")


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


def numbers(region: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs of 4 and outputs of 2 numbers, others in each region of the pair."""
    x = torch.randn(NUMBERS, 4, generator=torch.Generator().manual_seed(PAIR.index(region)))
    return x, x[:, :2] - x[:, 2:]


def _two_regions(folder: Path) -> Federation:
    sites = digits_sites(folder, PAIR, workers=4)
    for site in sites:
        file = folder / f"{site.name}.pt"
        torch.save(numbers(site.name), file)
        splits = {split: {"uri": str(file), "samples": NUMBERS} for split in ("train", "test")}
        site.config["datasets"]["numbers"] = {"splits": splits}
    return Federation(folder / "federation", sites)


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lasting]:
    with Lasting(_two_regions, tmp_path_factory) as federation:
        yield federation


@pytest.fixture
def running_pair(pair: Lasting, request: pytest.FixtureRequest, tmp_path: Path) -> Running:
    """Two regions with four workers each, whose channel is files; they also hold `numbers`. In order and without a
    job."""
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


@contextmanager
def _two_in_the_north(folder: Path) -> Iterator[Federation]:
    sites = [
        replace(site, config=_north_config(folder, site.name, dict(site.config)))
        for site in digits_sites(folder, NORTH)
    ]
    log_format = ("--log-format", "json")
    serve = (*log_format, "--lease", "3s")
    with Federation(folder / "federation", sites, serve_options=serve, agent_options=log_format) as federation:
        (folder / "gone.npz").unlink()
        yield federation


def _north_config(folder: Path, name: str, config: dict[str, Any]) -> dict[str, Any]:
    if name == "oslo":
        words = folder / "words"
        words.mkdir()
        (words / "ok.txt").write_text("a")
        Path(os.fsdecode(os.fsencode(words) + b"/caf\xe9.txt")).write_text("b")
        more: dict[str, Any] = {"words": (f"{words}/", 2)}
    else:
        config["server"] = {"exchangeHost": "127.0.0.1", "ports": list(NORTH_PORTS)}
        whole = folder / "data" / name / "train.npz"
        (folder / "damaged.npz").write_bytes(whole.read_bytes()[:2000])
        (folder / "gone.npz").write_bytes(b"")
        more = {
            "miscounted": (whole, 50), "missing": (folder / "nowhere.npz", 500), "gone": (folder / "gone.npz", 500),
            "damaged": (folder / "damaged.npz", 500),
        }  # fmt: skip
    held = {key: {"splits": {"train": {"uri": str(uri), "samples": samples}}} for key, (uri, samples) in more.items()}
    return {**config, "datasets": {**config["datasets"], **held}}


@pytest.fixture(scope="session")
def north(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lasting]:
    with Lasting(_two_in_the_north, tmp_path_factory) as federation:
        yield federation


@pytest.fixture
def running_north(north: Lasting, request: pytest.FixtureRequest, tmp_path: Path) -> Running:
    """Two regions with a short lease, whose logs are JSON. Bergen, which no test ends, also names shards that are
    missing and damaged, and Oslo a folder with a file whose name is not UTF-8. In order and without a job."""
    return north.running(request, tmp_path)
