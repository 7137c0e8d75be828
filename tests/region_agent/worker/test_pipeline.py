"""A model in stages, workers in processes of their own against real parameter servers: whatever the pipeline, however
it is cut into invocations, and whoever dies, the model is the one that a single process would have made."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.jobs import invocation, write_samples
from support.pki import Authority
from support.server_process import Server, wait_until
from support.warm_workers import WarmParent, WorkerProcess
from torch import nn

from geofed_pb.user_code.modules import PACKAGE
from geofed_pb.v1 import sync_pb2
from region_agent.worker import handler
from region_agent.worker.data.shard import BatchStream
from region_agent.worker.invocation import Outcome, Schedule
from sync import chunked_values
from sync.channel_clients import FileChannel, fence_key
from sync.layout import Vector
from sync.pipeline import Layers

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

STEPS, ROUNDS, BATCH, SEED, SAMPLES = 4, 3, 10, 5, 50

TASK = """
import os
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset


class Mortal(nn.Linear):
    # Ends its process in the forward pass that the file says.
    def __init__(self, there, out, place, number):
        super().__init__(there, out)
        self.file, self.passes = Path(place) / f"die-{number}", 0

    def forward(self, x):
        if self.training:
            self.passes += 1
            if self.file.exists() and self.passes == int(self.file.read_text()):
                self.file.unlink()
                os._exit(9)
        return super().forward(x)


def layers(config):
    widths, place = [4, 16, 12, 8, 2], config.get("place", "/nowhere")
    return [
        *[(lambda at=at: nn.Sequential(nn.Tanh(), Mortal(widths[at], widths[at + 1], place, at))) for at in range(4)],
        nn.Identity,
    ]


def dataset(uri, split, config):
    held = np.load(uri)
    return TensorDataset(torch.from_numpy(held["x"]), torch.from_numpy(held["y"]))


def loss(model, batch):
    x, y = batch
    return nn.functional.mse_loss(model(x), y)


def metrics(model, batches):
    errors = [(model(x) - y).abs().mean(1) for x, y in batches]
    return {"error": float(torch.cat(errors).mean())}


def optimizer(parameters, config):
    return torch.optim.Adam(parameters, lr=0.01)
"""

PIPELINES: dict[str, dict[str, Any]] = {
    "three stages": {"stages": ((0, 0), (1, 2), (3, 4)), "micro_batch": 3, "order": "1f1b"},
    "three stages in many slices": {
        "stages": ((0, 0), (1, 2), (3, 4)), "micro_batch": 3, "order": "1f1b", "slice_seconds": 0.001,
    },
    "two stages of two": {
        "stages": ((0, 1), (2, 4)), "degree": 2, "micro_batch": 2, "order": "gpipe", "rematerialise": (True, False),
    },
    "a stage without parameters": {"stages": ((0, 3), (4, 4)), "degree": 2, "micro_batch": 3},
    "three stages, cosine": {
        "stages": ((0, 0), (1, 2), (3, 4)), "micro_batch": 3, "schedule": Schedule(shape="cosine"),
    },
    "two stages in the background": {"stages": ((0, 1), (2, 4)), "micro_batch": 4},
}  # fmt: skip
PROCESSES = 4


@dataclass
class Life:
    """A job that was run to its end."""

    status: sync_pb2.PsStatus
    model: Vector
    outcomes: list[list[dict[str, Any]]]
    """By worker, and then by invocation."""
    left: list[str]
    """Keys in the channel."""


def _workers(pipeline: dict[str, Any]) -> int:
    return len(pipeline["stages"]) * pipeline.get("degree", 1)


def _server(folder: Path, name: str, workers: int, **more: Any) -> Server:
    # Parts of few elements, so that a stage's part of the model lies in several and shares some with its neighbours.
    settings = {"workers": workers, "rounds": ROUNDS, "steps_per_round": STEPS, "evaluate_every": 1, **more}
    server = Server(folder / name.replace(" ", "-"), Authority(), "east", ("east",), part_elements=37, **settings)
    server.launch()
    return server


def _bodies(server: Server, data: Path, pipeline: dict[str, Any], **more: Any) -> list[Any]:
    told = {"region_batch": BATCH, "seed": SEED, **pipeline, **more}
    return [invocation(server, TASK, data, worker, **told) for worker in range(_workers(pipeline))]


def _life(server: Server, outcomes: list[list[dict[str, Any]]]) -> Life:
    channel, folder = FileChannel(server.channel_folder), server.channel_folder
    model = chunked_values.read_vector(channel, f"model/{ROUNDS}", "model")
    assert model is not None, outcomes
    left = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    return Life(server.status(), model, outcomes, left)


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory, warm: WarmParent) -> Iterator[dict[str, Life]]:
    folder = tmp_path_factory.mktemp("lives")
    data = write_samples(folder / "data.npz", SAMPLES)
    servers, bodies = {}, {}
    for name, pipeline in PIPELINES.items():
        more = {"wan_settings": {"background": 1.0}} if "background" in name else {}
        servers[name] = _server(folder, name, _workers(pipeline), **more)
    for name, server in servers.items():
        server.await_ready()
        bodies[name] = _bodies(server, data, PIPELINES[name])
    processes = [
        warm.live([bodies[name][worker] for name in PIPELINES if worker < len(bodies[name])], folder / "scratch")
        for worker in range(PROCESSES)
    ]
    try:
        told = [process.end() for process in processes]
        found = {}
        for name in PIPELINES:
            found[name] = _life(servers[name], [told[worker].pop(0) for worker in range(len(bodies[name]))])
        yield found
    finally:
        for process in processes:
            process.close()
        for server in servers.values():
            server.kill()


def _alone(data: Path, *, cosine: bool = False) -> tuple[Vector, float]:
    """What a single process makes of the same samples; and its mean absolute error on all of them."""
    namespace: dict[str, Any] = {}
    exec(TASK, namespace)
    layers = Layers.declared(namespace["layers"]({}), SEED)
    model = layers.stage(0, len(layers) - 1)
    held = np.load(data)
    x, y = torch.from_numpy(held["x"]), torch.from_numpy(held["y"])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    lowest = 0.0 if cosine else 0.01
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS * ROUNDS, eta_min=lowest)
    stream = BatchStream(range(SAMPLES), SEED, "east", 0, 1, BATCH)
    for step in range(1, STEPS * ROUNDS + 1):
        drawn = stream.indices(step)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x[drawn]), y[drawn]).backward()
        optimizer.step()
        rate.step()
    with torch.no_grad():
        error = float((model(x) - y).abs().mean())
    return torch.cat([one.detach().reshape(-1) for one in model.parameters()]).numpy(), error


@pytest.mark.parametrize("name", [name for name in PIPELINES if "background" not in name])
def test_a_pipeline_makes_the_model_of_a_single_process(lives: dict[str, Life], name: str, tmp_path: Path) -> None:
    life = lives[name]
    model, error = _alone(write_samples(tmp_path / "again.npz", SAMPLES), cosine="schedule" in PIPELINES[name])
    np.testing.assert_allclose(life.model, model, atol=2e-5)
    assert life.status.phase == "finished"
    assert life.status.metrics["error"] == pytest.approx(error, abs=1e-4)
    assert life.status.metrics_samples == SAMPLES


def test_every_step_is_counted_once(lives: dict[str, Life]) -> None:
    for name, life in lives.items():
        assert life.status.samples == STEPS * ROUNDS * BATCH, name
        for outcomes in life.outcomes:
            assert [outcome["status"] for outcome in outcomes] == ["continue"] * (len(outcomes) - 1) + ["done"]
            assert sum(outcome["steps"] for outcome in outcomes) == STEPS * ROUNDS
        counted = [sum(outcome["samples"] for outcome in outcomes) for outcomes in life.outcomes]
        last = PIPELINES[name].get("degree", 1)
        assert sum(counted) == sum(counted[-last:]) == STEPS * ROUNDS * BATCH


def test_a_stage_goes_through_many_invocations(lives: dict[str, Life]) -> None:
    assert all(len(outcomes) >= STEPS * ROUNDS for outcomes in lives["three stages in many slices"].outcomes)
    whole, cut = lives["three stages"], lives["three stages in many slices"]
    assert cut.status.model_digest == whole.status.model_digest
    assert cut.status.metrics == whole.status.metrics


def test_nothing_of_the_pipeline_stays_in_the_channel(lives: dict[str, Life]) -> None:
    for life in lives.values():
        folders = {key.split("/")[0] for key in life.left}
        assert "w" not in folders
        assert "init" not in folders
        # Merged chunks of the last steps stay for a worker that would have to make them again.
        assert not [key for key in life.left if key.startswith("p/") and "/c" not in key]


@pytest.mark.parametrize(
    ("name", "dies", "store_seconds"),
    [
        ("three stages", 0, 5.0),
        ("three stages", 1, 0.0),
        ("three stages", 3, 5.0),
        ("two stages of two", 2, 5.0),
    ],
    ids=["first stage", "middle stage, with states", "last stage", "of two replicas both"],
)
def test_a_stage_that_is_killed_costs_at_most_two_steps(
    tmp_path: Path, warm: WarmParent, name: str, dies: int, store_seconds: float
) -> None:
    data, pipeline = write_samples(tmp_path / "data.npz", SAMPLES), PIPELINES[name]
    workers, degree, stages = _workers(pipeline), pipeline.get("degree", 1), pipeline["stages"]
    server = _server(tmp_path, "server", workers)
    server.await_ready()
    channel = FileChannel(server.channel_folder)
    victims = [
        number for number in range(workers) if stages[number // degree][0] <= dies <= stages[number // degree][1]
    ]
    # In the seventh step, in the middle of the second round. Each replica has a place of its own to die in.
    passes = -(-BATCH // degree // pipeline["micro_batch"])
    places = [tmp_path / f"place-{number}" for number in range(workers)]
    for place in places:
        place.mkdir()
        (place / f"die-{dies}").write_text(str(6 * passes + 2))
    bodies = _bodies(server, data, pipeline, store_seconds=store_seconds)
    bodies = [body.model_copy(update={"config": {"place": str(places[body.worker])}}) for body in bodies]
    processes = [warm.live([body], tmp_path / "scratch") for body in bodies]
    again: list[WorkerProcess] = []
    try:
        assert [processes[victim].end() for victim in victims] == [[]] * len(victims)
        channel.put(fence_key(1), [b"over"])
        ended = [process.end()[0][-1] for number, process in enumerate(processes) if number not in victims]
        assert {outcome["status"] for outcome in ended} == {"left"}
        furthest = max(ended, key=lambda outcome: outcome["step"])
        assert 6 <= furthest["step"] <= 7
        told = {"attempt": 2, "resume_key": furthest["resume_key"]}
        bodies = [body.model_copy(update={**told, "token": server.token(body.worker, 2)}) for body in bodies]
        again = [warm.live([body], tmp_path / "scratch") for body in bodies]
        outcomes = [Outcome.model_validate(process.end()[0][-1]) for process in again]
        assert {outcome.status for outcome in outcomes} == {"done"}
        # Steps that all made together in the second attempt, beyond those that the furthest worker had not: with
        # those that only the stage that was lost made again, from what had been sent to it.
        made = [outcome.steps for outcome in outcomes]
        lost = min(made) - (STEPS * ROUNDS - furthest["step"])
        assert 0 <= lost <= 2
        replayed = {made[victim] - min(made) for victim in victims}
        assert len(replayed) == 1
        assert replayed.pop() <= STEPS
        if store_seconds:
            # Nothing was stored: since the round's beginning.
            assert {made[victim] for victim in victims} == {STEPS * ROUNDS - STEPS}
        status = wait_until(lambda: server.status().phase == "finished" and server.status(), "the end")
        assert status.samples == STEPS * ROUNDS * BATCH
        model, _ = _alone(data)
        life = _life(server, [])
        np.testing.assert_allclose(life.model, model, atol=2e-5)
        assert not [key for key in life.left if key.startswith(("w/", "p/1/"))]
    finally:
        for process in (*processes, *again):
            process.close()
        server.kill()


WIDE_TASK = """
import gc

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

WIDTH = 256
most = 0


def held():
    # Parameters that take memory in this process.
    return sum(one.nbytes for one in gc.get_objects() if type(one) is nn.Parameter and one.device.type != "meta")


class Wide(nn.Linear):
    def __init__(self, *sizes):
        global most
        super().__init__(*sizes)
        most = max(most, held())


def layers(config):
    return [lambda: Wide(4, WIDTH), *[lambda: Wide(WIDTH, WIDTH)] * 6, lambda: Wide(WIDTH, 2)]


def dataset(uri, split, config):
    data = np.load(uri)
    return TensorDataset(torch.from_numpy(data["x"]), torch.from_numpy(data["y"]))


def loss(model, batch):
    x, y = batch
    return nn.functional.mse_loss(model(x), y)
"""


@pytest.mark.parametrize("worker", [0, 1, 2])
def test_a_worker_never_holds_more_parameters_than_its_stage(tmp_path: Path, worker: int) -> None:
    server = Server(tmp_path / "server", Authority(), "east", ("east",), workers=3)
    stages = ((0, 1), (2, 4), (5, 7))
    call = invocation(server, WIDE_TASK, write_samples(tmp_path / "data.npz", 20), worker, stages=stages, micro_batch=4)
    channel = FileChannel(server.channel_folder)
    before = _held()
    trainer = handler._trainer(call, channel, time.monotonic())
    try:
        own = sum(parameter.nbytes for parameter in trainer.flat.module.parameters())
        whole = 4 * sum(slot.size for slot in trainer.layout.slots)
        assert own < whole / 2
        # While layers were made, and now.
        loaded = sys.modules.get(f"{PACKAGE}.task") or sys.modules["task"]
        assert loaded.most - before <= own
        assert _held() - before == own
    finally:
        trainer.close()


def _held() -> int:
    gc.collect()
    return sum(one.nbytes for one in gc.get_objects() if type(one) is nn.Parameter and one.device.type != "meta")


def test_a_stage_that_was_answered_early_lets_nobody_wait(tmp_path: Path) -> None:
    """In a region that begins with another's model the server answers before all stages have offered theirs."""
    server = Server(tmp_path / "server", Authority(), "west", ("east", "west"), workers=2)
    data, pipeline = write_samples(tmp_path / "data.npz", 20), PIPELINES["two stages in the background"]
    channel = FileChannel(server.channel_folder)
    calls = [invocation(server, TASK, data, worker, region_batch=8, **pipeline) for worker in range(2)]
    trainers = [handler._trainer(call, channel, time.monotonic()) for call in calls]
    try:
        assert trainers[1].put_initial("init/1/1") == ""
        trainers[1].delete_initial("")
        key = trainers[0].put_initial("init/1/0")
        assert channel.has(key)
        trainers[0].delete_initial(key)
        assert not [path for path in (server.channel_folder / "init").rglob("*") if path.is_file()]
    finally:
        for trainer in trainers:
            trainer.close()
