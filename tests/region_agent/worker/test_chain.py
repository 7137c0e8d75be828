"""Workers in processes of their own, against real parameter servers: however they are cut into invocations, and
however many of them share the work, the model is the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.jobs import LINEAR_TASK, RESTLESS_TASK, call, chain, invocation, write_samples
from support.pki import Authority
from support.server_process import Server
from support.warm_workers import WarmParent
from torch import nn

from geofed_pb.v1 import sync_pb2
from region_agent.worker.data.shard import BatchStream
from region_agent.worker.invocation import Schedule, Stretch
from sync import framing
from sync.channel_clients import FileChannel
from sync.layout import Vector
from sync.seeding import seed_all

pytestmark = pytest.mark.processes

STEPS, ROUNDS, WORKERS = 4, 3, 2
COSINE = Schedule(shape="cosine", floor=0.1)


@dataclass
class Life:
    """A job that was run to its end."""

    status: sync_pb2.PsStatus
    model: Vector
    outcomes: list[list[dict[str, Any]]]
    """By worker, and then by invocation."""
    left: list[str]
    """Keys in the channel."""


def _run_all(
    servers: dict[str, Server], bodies: dict[str, list[Any]], scratch: Path, warm: WarmParent
) -> dict[str, Life]:
    """All jobs at once, each worker's part of them in one process."""
    processes = [warm.live([bodies[name][worker] for name in servers], scratch) for worker in range(WORKERS)]
    try:
        told = [process.end() for process in processes]
    finally:
        for process in processes:
            process.close()
    lives = {}
    for place, (name, server) in enumerate(servers.items()):
        value = FileChannel(server.channel_folder).get(f"model/{ROUNDS}")
        assert value is not None, told
        model = np.array(framing.decode(value).tensors["model"])
        folder = server.channel_folder
        left = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
        lives[name] = Life(server.status(), model, [worker[place] for worker in told], left)
    return lives


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory, warm: WarmParent) -> Iterator[dict[str, Life]]:
    folder, authority = tmp_path_factory.mktemp("lives"), Authority()
    data = write_samples(folder / "data.npz", 50)
    jobs = {
        "one slice": (RESTLESS_TASK, 100.0),
        "many slices": (RESTLESS_TASK, 0.001),
        "made ahead": (f"num_workers = 2\n{RESTLESS_TASK}", 100.0),
        "made ahead, many slices": (f"num_workers = 3\n{RESTLESS_TASK}", 0.001),
        "linear": (LINEAR_TASK, 100.0),
        "cosine": (LINEAR_TASK, 0.001),
    }
    servers, bodies = {}, {}
    for name in jobs:
        settings = {"workers": WORKERS, "rounds": ROUNDS, "steps_per_round": STEPS, "evaluate_every": 1}
        servers[name] = Server(
            folder / name.replace(", ", "-").replace(" ", "-"), authority, "east", ("east",), **settings
        )
        servers[name].launch()
    for name, (task, slice_seconds) in jobs.items():
        servers[name].await_ready()
        more = {"slice_seconds": slice_seconds, "schedule": COSINE if name == "cosine" else None}
        bodies[name] = [invocation(servers[name], task, data, worker, **more) for worker in range(WORKERS)]
    try:
        yield _run_all(servers, bodies, folder / "scratch", warm)
    finally:
        for server in servers.values():
            server.kill()


def test_the_model_does_not_depend_on_how_the_work_was_cut(lives: dict[str, Life]) -> None:
    whole, cut = lives["one slice"], lives["many slices"]
    assert [len(outcomes) for outcomes in whole.outcomes] == [1, 1]
    assert all(len(outcomes) >= STEPS * ROUNDS for outcomes in cut.outcomes)
    assert cut.status.model_digest == whole.status.model_digest
    assert cut.status.metrics == whole.status.metrics
    assert cut.status.loss == pytest.approx(whole.status.loss)


def test_the_model_does_not_depend_on_who_makes_the_samples(lives: dict[str, Life]) -> None:
    """The task's dataset draws random numbers, and so does its model."""
    whole = lives["one slice"]
    for name in ("made ahead", "made ahead, many slices"):
        assert lives[name].status.model_digest == whole.status.model_digest, name
        assert lives[name].status.metrics == whole.status.metrics, name


def test_every_invocation_comes_further_and_all_steps_are_counted_once(lives: dict[str, Life]) -> None:
    for life in lives.values():
        assert life.status.phase == "finished"
        for outcomes in life.outcomes:
            assert [outcome["status"] for outcome in outcomes] == ["continue"] * (len(outcomes) - 1) + ["done"]
            assert all(outcome["steps"] >= 1 for outcome in outcomes[:-1])
            assert sum(outcome["steps"] for outcome in outcomes) == STEPS * ROUNDS
            assert sum(outcome["samples"] for outcome in outcomes) == STEPS * ROUNDS * 8


def _alone(schedule: Schedule | None) -> Vector:
    """What one process makes of all workers' samples."""
    # The same beginning as the job: its seed decides it.
    seed_all(5)
    module = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    lowest = 0.1 * schedule.floor if schedule else 0.1
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS * ROUNDS, eta_min=lowest)
    x, y = _samples(50)
    streams = [BatchStream(range(50), 5, "east", worker, WORKERS, 8 * WORKERS) for worker in range(WORKERS)]
    for step in range(1, STEPS * ROUNDS + 1):
        whole = [index for stream in streams for index in stream.indices(step)]
        optimizer.zero_grad()
        nn.functional.mse_loss(module(x[whole]), y[whole]).backward()
        optimizer.step()
        rate.step()
    return torch.cat([module.weight.detach().reshape(-1), module.bias.detach()]).numpy()


@pytest.mark.parametrize(("name", "schedule"), [("linear", None), ("cosine", COSINE)])
def test_merged_steps_equal_one_process_with_the_whole_batch(
    lives: dict[str, Life], name: str, schedule: Schedule | None
) -> None:
    np.testing.assert_allclose(lives[name].model, _alone(schedule), atol=1e-5)


def _samples(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        held = np.load(write_samples(Path(folder) / "again.npz", count))
        return torch.from_numpy(held["x"]), torch.from_numpy(held["y"])


def test_what_the_workers_leave_in_the_channel_is_little(lives: dict[str, Life]) -> None:
    """Slices, gradients and rounds that are over are forgotten as the job continues."""
    left = lives["many slices"].left
    assert {name.split("/")[0] for name in left} <= {"bundle", "model", "state", "b", "g"}
    assert sum(name.startswith("model/") for name in left) <= 2
    assert len(left) < 15, left


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path / "east", Authority(), "east", ("east",), rounds=2, steps_per_round=2)
    server.launch()
    server.await_ready()
    yield server
    server.kill()


def test_a_new_attempt_goes_on_from_the_last_round(alone: Server, tmp_path: Path) -> None:
    """The first attempt dies in its second round; the second one repeats that round only."""
    data = write_samples(tmp_path / "data.npz", 20)
    first = invocation(alone, LINEAR_TASK, data, slice_seconds=0.001)
    outcomes = [call(first)]
    while alone.status().round < 1:
        outcomes.append(call(first.model_copy(update={"resume_key": outcomes[-1].resume_key})))
    done = chain(invocation(alone, LINEAR_TASK, data, attempt=2, token=alone.token(attempt=2)))
    assert [outcome.status for outcome in done] == ["done"]
    assert sum(outcome.steps for outcome in done) == 2
    assert call(first).code == "FENCED"
    assert alone.status().phase == "finished"
    assert alone.status().metrics["loss"] > 0


def test_an_attempt_with_a_smaller_batch_ends_its_round_with_that_of_before(tmp_path: Path) -> None:
    """The first breaks off within a round; from the next round on half of the samples are drawn, at another learning
    rate. What the server counts, and what the model is, follow from the steps alone."""
    server = Server(tmp_path / "east", Authority(), "east", ("east",), rounds=3, steps_per_round=2, workers=2)
    server.launch()
    server.await_ready()
    try:
        data = write_samples(tmp_path / "data.npz", 20)
        channel = FileChannel(server.channel_folder)
        first = invocation(server, LINEAR_TASK, data, workers=1, token=server.token(workers=1), slice_seconds=0.001)
        left = call(first.model_copy(update={"region_batch": 16}))
        assert (left.status, left.step, left.samples) == ("continue", 1, 16)
        assert channel.has(left.resume_key)
        stretch = Stretch(first_step=3, batch=8, rate=0.5)
        token = server.token(attempt=2, workers=1)
        again = first.model_copy(update={"attempt": 2, "token": token, "stretches": (stretch,)})
        done = chain(again.model_copy(update={"region_batch": 16, "resume_key": left.resume_key}))
        assert done[-1].status == "done"
        assert sum(outcome.samples for outcome in done) == 16 + 4 * 8
        assert server.status().samples == 2 * 16 + 4 * 8
        value = channel.get("model/3")
        assert value is not None
        model = np.array(framing.decode(value).tensors["model"])
    finally:
        server.kill()
    np.testing.assert_allclose(model, _alone_with([16, 16, 8, 8, 8, 8], [0.1, 0.1, *[0.05] * 4]), atol=1e-5)


def _alone_with(batches: list[int], rates: list[float]) -> Vector:
    seed_all(5)
    module = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    x, y = _samples(20)
    stream = BatchStream(range(20), 5, "east", 0, 1, 1)
    drawn = 0
    for batch, rate in zip(batches, rates, strict=True):
        whole = [stream.indices(drawn + at)[0] for at in range(1, batch + 1)]
        drawn += batch
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        nn.functional.mse_loss(module(x[whole]), y[whole]).backward()
        optimizer.step()
    return torch.cat([module.weight.detach().reshape(-1), module.bias.detach()]).numpy()
