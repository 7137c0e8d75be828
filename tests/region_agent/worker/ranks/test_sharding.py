"""Two ranks that hold a part of the model each: their job makes the model that two ranks with whole models make."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from support.exchange_in_process import Federation

from region_agent.worker import loop
from region_agent.worker.invocation import Schedule

pytestmark = pytest.mark.processes

STEPS, ROUNDS, BATCH, SEED = 3, 2, 8, 5
GPUS = torch.cuda.device_count() > 1
TWO = ("cuda:0", "cuda:1") if GPUS else ("cpu", "cpu")
RTOL, ATOL = (1e-4, 1e-5) if GPUS else (2e-6, 5e-7)
"""Gradients are averaged in another order than those of whole models are."""

TASK = """
import torch
from torch import nn
from torch.utils.data import TensorDataset


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 6))
        self.norm = nn.LayerNorm(6)

    def forward(self, x):
        return x + self.inner(self.norm(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.names = nn.Embedding(8, 6)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.blocks[1].requires_grad_(False)
        self.recurrent = nn.LSTM(6, 6, batch_first=True)
        self.unused = nn.Linear(6, 5)
        self.head = nn.Linear(6, 8, bias=False)
        self.head.weight = self.names.weight
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("table", torch.arange(6.0), persistent=False)

    def forward(self, x):
        if self.training:
            self.seen += 1
        x = self.names(x) + self.table
        for block in self.blocks:
            x = block(x)
            x += 0.01
        return self.head(self.recurrent(x)[0])


def model(config):
    return Net()


def dataset(uri, split, config):
    x = torch.randint(8, (29, 5), generator=torch.Generator().manual_seed(1))
    return TensorDataset(x[:, :-1], x[:, 1:])


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]).float().flatten(0, 1), batch[1].flatten())


def optimizer(parameters, config):
    return OPTIMIZER
"""
SGD = "torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.1)"
ADAM = "torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)"
GROUPS = "torch.optim.Adam([{'params': list(parameters)[4:], 'lr': 0.01}], amsgrad=True)"
SCHEDULE = """

def schedule(optimizer, config):
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
"""
METRICS = """

def metrics(model, batches):
    with torch.no_grad():
        found = [(model(x).argmax(-1) == y).float().mean() for x, y in batches]
    return {"right": float(torch.stack(found).mean())}
"""


def _trained(task: str, folder: Path, monkeypatch: Any, **fields: Any) -> tuple[dict[str, torch.Tensor], Federation]:
    """The job's model, and its regions."""
    federation = Federation(folder, ("east",), steps_per_round=STEPS, rounds=ROUNDS)
    monkeypatch.setattr(loop, "PsClient", federation.client)
    federation.train(task, {}, **{"seed": SEED, "batch": BATCH, "slice_seconds": 100.0, "devices": TWO, **fields})
    return safetensors.torch.load(federation.exported()), federation


@pytest.mark.parametrize(
    ("optimizer", "more", "fields"),
    [
        (SGD, "", {"clip_norm": 0.05, "schedule": Schedule(shape="cosine", warmup=0.3)}),
        (ADAM, SCHEDULE + METRICS, {"batch": 7, "at_once": 3}),
        (GROUPS, "", {"batch": 1, "keeps_base": True}),
        (ADAM, "", {"local": ("recurrent.*",), "keeps_base": True, "slice_seconds": 1e-3}),
        (SGD, "", {"precision": "bf16"}),
    ],
    ids=["momentum, clipped", "adam, accumulated", "one sample, base", "slices, local, base", "bf16"],
)
def test_ranks_with_parts_of_the_model_make_the_model_of_ranks_with_whole_ones(
    optimizer: str, more: str, fields: dict[str, Any], tmp_path: Path, monkeypatch: Any
) -> None:
    task = TASK.replace("OPTIMIZER", optimizer) + more
    whole, one = _trained(task, tmp_path / "whole", monkeypatch, **fields)
    parts, other = _trained(task, tmp_path / "parts", monkeypatch, sharding="fsdp", **fields)
    rough = "precision" in fields
    assert set(parts) == set(whole)
    for name, tensor in whole.items():
        torch.testing.assert_close(parts[name], tensor, rtol=0.05 if rough else RTOL, atol=5e-3 if rough else ATOL)
    assert other.metrics["east"] == pytest.approx(one.metrics["east"], rel=0.01 if rough else 1e-5)
