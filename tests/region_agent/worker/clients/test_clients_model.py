"""Rounds of clients: local training is federated averaging as one plain process does it, however it is sliced, and
however many workers divide the clients."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from support.exchange_in_process import Federation
from support.jobs import invocation
from support.pki import Authority
from support.server_process import Server
from support.warm_workers import WarmParent
from torch import nn

from geofed_pb.errors import GeofedError
from region_agent.worker import loop
from region_agent.worker.clients.local import LocalTraining
from region_agent.worker.clients.sampling import ClientSampler
from region_agent.worker.invocation import ClientRounds, ShardFile
from sync.seeding import reseed, seed_all

SEED = 5
TASK = """
import torch
from torch import nn
from torch.utils.data import Dataset


class ByClient(Dataset):
    def __init__(self, sizes):
        self.clients = [f"client {number}" for number, size in enumerate(sizes) for _ in range(size)]
        self.x = torch.randn(len(self.clients), 4, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.clients)

    def __getitem__(self, index):
        return self.x[index], self.x[index, :2] - self.x[index, 2:]


def model(config):
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.BatchNorm1d(8), nn.Linear(8, 2))


def dataset(uri, split, config):
    return ByClient(config["sizes"])


def loss(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def optimizer(parameters, config):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
"""
SIZES = [6, 2, 8, 12, 14, 18, 20, 2]


def plain(sizes: list[int], rounds: ClientRounds, count: int) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Algorithm 1 of McMahan et al.: the sample-weighted mean of the changes of the clients of each round."""
    ids = np.repeat(np.arange(len(sizes)), sizes)
    data = _Ids(ids)
    drawing = ClientSampler(data, SEED, "east", rounds)
    x = torch.randn(len(ids), 4, generator=torch.Generator().manual_seed(1))
    y = x[:, :2] - x[:, 2:]
    seed_all(SEED)
    module = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.BatchNorm1d(8), nn.Linear(8, 2))
    samples: list[int] = []
    for number in range(1, count + 1):
        start = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        sums = {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in start.items()}
        weight = 0
        samples.append(0)
        for client in drawing.drawn(number):
            module.load_state_dict(start)
            module.train()
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
            reseed(SEED, zlib.crc32(b"east"), client, number)
            for rows in drawing.batches(client, number):
                assert {int(ids[row]) for row in rows} == {client}
                samples[-1] += len(rows)
                optimizer.zero_grad()
                nn.functional.mse_loss(module(x[rows]), y[rows]).backward()
                optimizer.step()
            weight += sizes[client]
            for name, tensor in module.state_dict().items():
                sums[name] += sizes[client] * (tensor - start[name]).double()
        mean = {name: (tensor / weight).float() for name, tensor in sums.items()}
        module.load_state_dict({name: _added(tensor, mean[name]) for name, tensor in start.items()})
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}, samples


def _added(start: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    return start + mean if start.is_floating_point() else (start + mean).round().long()


class _Ids:
    def __init__(self, clients: Any) -> None:
        self.clients = clients

    def __len__(self) -> int:
        return len(self.clients)


@pytest.mark.slow
@pytest.mark.parametrize("slice_seconds", [1e-3, 100.0], ids=["a round a slice", "one slice"])
@pytest.mark.parametrize(
    "how", [{"epochs": 2, "batch": 3}, {"steps": 4, "batch": 2}, {"epochs": 1, "batch": 100}], ids=str
)
def test_it_is_the_papers_algorithm_bit_for_bit(
    how: dict[str, int], slice_seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = ClientRounds(fraction=0.4, least=2, stated=len(SIZES), **how)
    federation = Federation(tmp_path, ("east",), steps_per_round=1, rounds=4)
    monkeypatch.setattr(loop, "PsClient", federation.client)
    federation.train(TASK, {"sizes": SIZES}, seed=SEED, batch=8, slice_seconds=slice_seconds, clients=rounds)
    found = safetensors.torch.load(federation.exported())
    expected, _ = plain(SIZES, rounds, 4)
    assert _bits(found) == _bits(expected)


def test_a_round_that_was_cut_off_is_made_again_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is stored in the middle of a round: who has lost a worker continues from the round before."""
    rounds = ClientRounds(fraction=0.5, epochs=1, batch=3)
    federation = Federation(tmp_path, ("east",), steps_per_round=2, rounds=2)
    monkeypatch.setattr(loop, "PsClient", federation.client)
    train, lost = LocalTraining._train, iter([False] * 3 + [True] + [False] * 99)

    def cut_off(self: LocalTraining, client: int, step: int, start: Any, until: float | None) -> tuple[int, float]:
        done = train(self, client, step, start, until)
        if next(lost):
            raise GeofedError("FENCED", "the worker is gone")
        return done

    monkeypatch.setattr(LocalTraining, "_train", cut_off)
    with pytest.raises(AssertionError, match="left"):
        federation.train(TASK, {"sizes": SIZES}, seed=SEED, batch=8, slice_seconds=100.0, clients=rounds)
    federation.train(TASK, {"sizes": SIZES}, seed=SEED, batch=8, slice_seconds=100.0, clients=rounds)
    expected, _ = plain(SIZES, rounds, 4)
    assert _bits(safetensors.torch.load(federation.exported())) == _bits(expected)


@pytest.mark.processes
def test_several_workers_come_within_rounding_of_one(tmp_path: Path, warm: WarmParent) -> None:
    """Real processes, a real server; more workers than clients in a round, so that one has none."""
    rounds = ClientRounds(fraction=0.25, epochs=2, batch=3)
    expected, samples = plain(SIZES, rounds, 3)
    for collective in ("server-reduce", "all-reduce"):
        place = tmp_path / collective
        server = Server(place / "east", Authority(), "east", ("east",), rounds=3, steps_per_round=1, workers=3)
        server.launch()
        try:
            server.await_ready()
            server.configure()
            data = place / "data.bin"
            data.write_bytes(b"x")
            bodies = [
                invocation(
                    server, TASK, data, worker, config={"sizes": SIZES}, clients=rounds, collective=collective
                ).model_copy(update={"splits": {"train": (ShardFile(name="x", path=str(data)),)}})
                for worker in range(3)
            ]
            processes = [warm.live([body], place / "scratch") for body in bodies]
            ends = [process.end() for process in processes]
            for process in processes:
                process.close()
            assert [end[0][-1]["status"] for end in ends] == ["done"] * 3, ends
            assert sum(outcome["samples"] for end in ends for outcome in end[0]) == sum(samples)
            found = safetensors.torch.load(server.model())
        finally:
            server.kill()
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)


def _bits(model: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {name: tensor.tolist() for name, tensor in model.items()}
