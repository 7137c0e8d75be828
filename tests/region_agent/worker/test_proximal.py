"""FedProx: local training is that of one plain process per region with the proximal term, however it is sliced."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest
import safetensors.torch
import torch
from support import zoo
from support.exchange_in_process import Federation

from geofed_pb.errors import GeofedError
from region_agent.worker import loop
from region_agent.worker.data.shard import BatchStream
from region_agent.worker.training.proximal import ProximalTerm
from sync.flat import FlatModel
from sync.seeding import reseed, seed_all

STEPS, ROUNDS, BATCH, SEED, MU = 3, 3, 8, 5, 0.7
REGIONS = ("east", "west")
TASK = """
import torch
from torch.utils.data import TensorDataset
from support import zoo

loss = zoo.loss


def model(config):
    return zoo.MODULES["mlp"]()


def dataset(uri, split, config):
    drawn = torch.Generator().manual_seed(config["data"][uri.rsplit("/", 1)[-1]])
    x = torch.randn(21, 4, generator=drawn)
    return TensorDataset(x, x[:, :2] - x[:, 2:])


def optimizer(parameters, config):
    return torch.optim.SGD(parameters, lr=0.1)
"""


def plain(mu: float) -> dict[str, torch.Tensor]:
    """Algorithm 2 of the paper: the mean of the regions' models, each trained from the last mean."""
    seed_all(SEED)
    mean = {name: tensor.clone() for name, tensor in zoo.MODULES["mlp"]().state_dict().items()}
    for number in range(ROUNDS):
        models = []
        for shard, region in enumerate(REGIONS, 1):
            module = zoo.MODULES["mlp"]()
            module.load_state_dict(mean)
            x = torch.randn(21, 4, generator=torch.Generator().manual_seed(shard))
            y = x[:, :2] - x[:, 2:]
            stream = BatchStream(range(21), SEED, region, 0, 1, BATCH)
            for step in range(number * STEPS + 1, (number + 1) * STEPS + 1):
                reseed(SEED, zlib.crc32(region.encode()), 0, step)
                rows = torch.tensor(stream.indices(step))
                pull = sum(((p - mean[name]) ** 2).sum() for name, p in module.named_parameters())
                module.zero_grad()
                (zoo.loss(module, (x[rows], y[rows])) + mu / 2 * pull).backward()
                with torch.no_grad():
                    for parameter in module.parameters():
                        parameter -= 0.1 * parameter.grad
            models.append(module.state_dict())
        mean = {name: sum(model[name] for model in models) / len(models) for name in mean}
    return mean


def trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mu: float, slice_seconds: float
) -> dict[str, torch.Tensor]:
    federation = Federation(tmp_path, REGIONS, steps_per_round=STEPS, rounds=ROUNDS)
    monkeypatch.setattr(loop, "PsClient", federation.client)
    config = {"data": {f"{region}.bin": number for number, region in enumerate(REGIONS, 1)}}
    federation.train(TASK, config, seed=SEED, batch=BATCH, slice_seconds=slice_seconds, proximal=mu)
    return safetensors.torch.load(federation.exported())


@pytest.mark.parametrize("slice_seconds", [1e-3, 100.0], ids=["a step a slice", "one slice"])
def test_it_is_the_papers_algorithm(slice_seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, expected, without = trained(tmp_path, monkeypatch, MU, slice_seconds), plain(MU), plain(0.0)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5)
    assert any(not torch.allclose(found[name], without[name], rtol=1e-3, atol=1e-3) for name in without)


def test_a_sparse_gradient_is_refused_and_an_unused_parameter_stays() -> None:
    module = torch.nn.ModuleDict({"used": torch.nn.Embedding(5, 2, sparse=True), "unused": torch.nn.Linear(2, 2)})
    flat = FlatModel(module)
    term = ProximalTerm(flat, 0.1)
    term.begin_round(flat.vector() + 1.0)
    term.add()
    assert all(parameter.grad is None for parameter in module.parameters())
    module["used"](torch.tensor([1])).sum().backward()
    with pytest.raises(GeofedError, match="dense gradients"):
        term.add()
