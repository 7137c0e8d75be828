"""Training over clients in this process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import geofed
from geofed_pb.errors import GeofedError
from region_agent.worker.clients.sampling import ClientSampler
from region_agent.worker.invocation import ClientRounds
from sync.seeding import seed_all

TASK = """
import numpy as np
import torch
from torch.utils.data import TensorDataset


def model(config):
    return torch.nn.Linear(4, 3)


def dataset(uri, split, config):
    held = np.load(uri)
    return TensorDataset(torch.from_numpy(held["x"]), torch.from_numpy(held["y"]))


def loss(model, batch):
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


def metrics(model, batches):
    hits = [(model(x).argmax(1) == y).float() for x, y in batches]
    return {"accuracy": float(torch.cat(hits).mean())}


def optimizer(parameters, config):
    return torch.optim.SGD(parameters, lr=config["lr"])
"""


def _arrays(seed: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(seed).standard_normal((count, 4)).astype(np.float32)
    return x, x[:, :3].argmax(1).astype(np.int64)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def task(tmp_path: Path) -> Path:
    path = tmp_path / "task.py"
    path.write_text(TASK)
    return path


def _plain(x: np.ndarray, y: np.ndarray, owners: list[int], rounds: int) -> torch.nn.Linear:
    class Ids:
        clients = owners

        def __len__(self) -> int:
            return len(owners)

    drawing = ClientSampler(Ids(), 1, "here", ClientRounds(fraction=0.05, least=1, epochs=2, batch=2))
    seed_all(1)
    module = torch.nn.Linear(4, 3)
    inputs, labels = torch.from_numpy(x), torch.from_numpy(y)
    for number in range(1, rounds + 1):
        start = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        sums = {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in start.items()}
        weight = 0
        for client in drawing.drawn(number):
            module.load_state_dict(start)
            optimizer = torch.optim.SGD(module.parameters(), lr=0.3)
            for rows in drawing.batches(client, number):
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(module(inputs[rows]), labels[rows]).backward()
                optimizer.step()
            weight += owners.count(client)
            for name, tensor in module.state_dict().items():
                sums[name] += owners.count(client) * (tensor - start[name]).double()
        module.load_state_dict({name: start[name] + (sums[name] / weight).float() for name in start})
    return module


@pytest.mark.slow
def test_a_thousand_clients_train_in_this_process_as_the_algorithm_says(task: Path) -> None:
    before = os.getcwd()
    (x, y), test = _arrays(1, 3000), _arrays(2, 500)
    training = geofed.simulate(
        task, {"train": (x, y), "test": test}, clients=1000,
        sampling={"fraction": 0.05, "epochs": 2}, config={"lr": 0.3},
        train={"batch": 2, "end": {"steps": 40}, "evaluateEvery": 20},
    )  # fmt: skip
    assert training.plan == {"clients": 1000, "clients_per_round": 50, "rounds": 40}
    rows = training.rounds()
    assert [row["round"] for row in rows] == list(range(1, 41))
    assert {row["clients"] for row in rows} == {50.0}
    assert [row["samples"] for row in rows] == [at * 50 * 3 * 2 for at in range(1, 41)]
    assert [row["round"] for row in rows if "accuracy" in row] == [20, 40]
    assert training.result["metrics"]["accuracy"] > 0.9, training.result
    assert rows[-1]["loss"] < rows[0]["loss"] / 2
    parts = np.array_split(np.random.default_rng(1).permutation(3000), 1000)
    order = np.concatenate([np.sort(part) for part in parts])
    expected = _plain(x[order], y[order], np.repeat(np.arange(1000), 3).tolist(), 40)
    found = training.model()
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        name: tensor.tolist() for name, tensor in expected.state_dict().items()
    }
    assert os.getcwd() == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wan", "alpha"), [({"policy": "fedadam", "outer": {"lr": 0.05}}, 0.3), ({"policy": "fedprox"}, None)]
)
def test_server_optimisers_and_the_proximal_term_apply(task: Path, wan: dict[str, object], alpha: float | None) -> None:
    training = geofed.simulate(
        task, {"train": _arrays(1, 1500), "test": _arrays(2, 500)}, clients=300, alpha=alpha,
        sampling={"fraction": 0.1}, config={"lr": 0.3}, wan=wan, train={"batch": 4, "end": {"epochs": 8}},
    )  # fmt: skip
    assert training.plan["rounds"] == 80
    assert training.result["metrics"]["accuracy"] > 0.75, training.result


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"regions": 3}, "give `clients`, which train in this process, or `regions`"),
        ({"clients": 5000}, "1500 samples cannot be partitioned over 5000 clients"),
        ({"wan": {"codec": "int8"}}, "wan.codec has no effect on clients in one process"),
        ({"train": {"keep": "best", "evaluateEvery": 1}}, "train.keep has no effect on clients in one process"),
        ({"wan": {"policy": "fednova"}}, "fednova"),
        ({"sampling": {"fraction": 2}}, "clients.fraction"),
        ({"clients": None, "sampling": {}}, "`sampling` requires `clients`"),
    ],
)
def test_what_has_no_effect_is_refused(task: Path, given: dict[str, object], told: str) -> None:
    with pytest.raises(GeofedError, match=told):
        geofed.simulate(task, {"train": _arrays(1, 1500)}, **{"clients": 10, **given})  # type: ignore[arg-type]
