"""Workers of two ranks in processes of their own, against real parameter servers, and in a real sandbox."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from support.jobs import LINEAR_TASK, invocation, write_samples
from support.pki import Authority
from support.sandboxes import needs_sandboxes
from support.server_process import Server
from support.warm_workers import WarmParent

from region_agent.gateway import timeout_env
from region_agent.gateway.functions import Grants
from region_agent.worker.invocation import Invocation, Outcome
from sync import framing
from sync.channel_clients import FileChannel
from sync.layout import Vector
from tests.region_agent.gateway.conftest import Embedded, Target, open_url, until

pytestmark = pytest.mark.processes

STEPS, ROUNDS = 3, 2
TWO = ("cpu", "cpu")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@contextmanager
def _places(folder: Path, workers: int) -> Iterator[tuple[Server, Server]]:
    """Two parameter servers for the same job."""
    authority, settings = Authority(), {"workers": workers, "rounds": ROUNDS, "steps_per_round": STEPS}
    made = [Server(folder / name, authority, "east", ("east",), **settings) for name in ("one", "two")]
    try:
        for server in made:
            server.launch()
        for server in made:
            server.await_ready()
        yield made[0], made[1]
    finally:
        for server in made:
            server.kill()


def _model(server: Server) -> Vector:
    value = FileChannel(server.channel_folder).get(f"model/{ROUNDS}")
    assert value is not None
    return np.array(framing.decode(value).tensors["model"])


def _lived(warm: WarmParent, bodies: list[Invocation], folder: Path) -> list[list[dict[str, Any]]]:
    processes = [warm.live([body], folder) for body in bodies]
    try:
        told = [process.end() for process in processes]
    finally:
        for process in processes:
            process.close()
    assert [life[-1]["status"] for (life,) in told] == ["done"] * len(bodies), told
    return [life for (life,) in told]


def test_two_workers_of_two_ranks_merge_as_two_of_one(tmp_path: Path, warm: WarmParent) -> None:
    data = write_samples(tmp_path / "data.npz", 50)
    settings: dict[str, Any] = {"collective": "k-reduce", "merging": {"k": 2}}
    # A step a slice, so that the ranks are kept in the middle of a round.
    ranked = settings | {"devices": TWO, "slice_seconds": 0.001}
    with _places(tmp_path, 2) as servers:
        bodies = [
            invocation(server, LINEAR_TASK, data, worker, **more)
            for server, more in zip(servers, (settings, ranked), strict=True)
            for worker in (0, 1)
        ]
        lives = _lived(warm, bodies, tmp_path / "scratch")
        assert [len(life) for life in lives[:2]] == [1, 1]
        assert all(len(life) >= STEPS * ROUNDS for life in lives[2:])
        one, two = map(_model, servers)
    np.testing.assert_allclose(two, one, rtol=1e-5, atol=1e-6)


@needs_sandboxes
@pytest.mark.anyio
async def test_ranks_in_a_sandbox_without_a_network(tmp_path: Path, launch: Callable[..., Embedded]) -> None:
    data = write_samples(tmp_path / "data.npz", 50)
    preload = ["numpy", "torch", "region_agent.worker.handler"]
    images = {"worker": "region_agent.worker.handler:handle"}
    gateway = launch(images=images, isolation="require", preload=preload)
    with _places(tmp_path, 1) as servers:
        async with open_url(gateway.url, None, None, "worker", gateway) as target:
            for server, devices in zip(servers, ((), TWO), strict=True):
                await _live_in_a_sandbox(target, invocation(server, LINEAR_TASK, data, devices=devices), server, data)
            assert len(_ranks(gateway)) == 1, "it is kept for the next slice"
        until(lambda: not _ranks(gateway), 60)
        one, two = map(_model, servers)
    np.testing.assert_allclose(two, one, rtol=1e-5, atol=1e-6)


async def _live_in_a_sandbox(target: Target, body: Invocation, server: Server, data: Path) -> None:
    """Call a new function until the job is done, a step a slice."""
    address = body.ps_address
    grants = Grants(read=(str(data),), write=(str(server.channel_folder),), egress={address: address})
    # A rank imports torch again, which takes long where others compute, too.
    limit = timedelta(seconds=150)
    worker = await target.deploy(annotations=grants.annotations(), env_vars=timeout_env(limit))
    outcome, body = Outcome(status="continue"), body.model_copy(update={"slice_seconds": 0.001})
    while outcome.status == "continue":
        body = body.model_copy(update={"resume_key": outcome.resume_key})
        told = await worker(body=body.model_dump_json().encode(), timeout=limit)
        outcome = Outcome.model_validate_json(told.body)
    assert outcome.status == "done", outcome


def _ranks(gateway: Embedded) -> list[psutil.Process]:
    """Processes of ranks in its sandboxes."""
    found = []
    for one in gateway.family():
        with contextlib.suppress(psutil.Error):
            found += [one] if "region_agent.worker.ranks" in " ".join(one.cmdline()) else []
    return found
