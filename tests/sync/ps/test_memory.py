"""The memory of a parameter server that holds a large model."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.server_process import NumpyWorker, Server, wait_until

from sync.layout import Layout, Slot

LARGE = Layout((Slot("w", (16_000_000,), "float32"),), 1)
MODEL_BYTES = 4 * LARGE.size
FIXED_BYTES = 48e6
"""Blocks of files, buffers of sockets and encoded updates, at most. A fourth model would be more."""
REGIONS = ("east", "south", "west")
ROUNDS = 8
ALONE_ROUNDS = 5
"""With a quorum a region waits for all others in the last quarter of its steps."""


def peak(server: Server) -> int:
    """Most memory so far, mapped files included, in bytes."""
    assert server.process is not None
    lines = Path(f"/proc/{server.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder in memory, for channels."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_a_region_that_is_missing_or_late_costs_no_further_model(
    servers: Callable[..., list[Server]], workers: Callable[..., NumpyWorker], memory: Path
) -> None:
    """Two of three regions train, one of their servers is killed, and the third region comes late. The codec is one
    that has a residual besides."""
    settings = {"background": 1.0, "quorum": 2.0, "grace_seconds": 0.2}
    options = {"warm": None, "codec": "ternary", "rounds": ROUNDS, "wan_settings": settings, "regions": REGIONS}
    own = lambda region: {"channel_address": str(memory / region)}  # noqa: E731 - one expression
    made = servers(*REGIONS, each=own, **options)
    empty = max(peak(server) for server in made)
    east, south, west = made

    def begin(server: Server) -> NumpyWorker:
        return workers(server, 1e-3, layout=LARGE)

    def most(what: str) -> None:
        for server in made:
            held = peak(server) - empty
            assert held <= 3 * MODEL_BYTES + FIXED_BYTES, f"{what}: {server.region} has held {held / 1e6:.0f} MB more"

    west.kill()
    training = [begin(east), begin(south)]
    for server in (east, south):
        wait_until(lambda server=server: server.status().round >= ALONE_ROUNDS, "rounds without west", 120)
    west.launch()
    west.await_ready()
    most("a region is missing")
    east.kill()
    east.launch()
    east.await_ready()
    for server in made:
        server.configure(*(other for other in made if other is not server))
    training.append(begin(west))
    for worker in training:
        worker.join(120)
        assert worker.failure is None, worker.failure
    most("after a crash, and a region is late")
    assert len(east.model()) > MODEL_BYTES
    most("the model is fetched")
