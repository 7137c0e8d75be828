"""The optional functions of a task module and the kinds of datasets, through the real daemons."""

from __future__ import annotations

import pytest
from support.running import Running

from tests.e2e.conftest import NUMBERS, PAIR

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

TASK = """\
import torch
from torch import nn
from torch.utils.data import IterableDataset


class Stream(IterableDataset):
    def __init__(self, x, y):
        self.x, self.y = x, y

    def __iter__(self):
        for number, (x, y) in enumerate(zip(self.x, self.y)):
            yield None if number % 8 == 7 else {"in": {"numbers": x}, "out": (y, [y.sum()])}


def dataset(uri, split, config):
    torch.manual_seed(0)
    x = torch.randn(16, 4)
    return Stream(x, x[:, :2] - x[:, 2:])


def collate(samples):
    return {
        "x": torch.stack([one["in"]["numbers"] for one in samples]),
        "y": torch.stack([one["out"][0] for one in samples]),
    }


def model(config):
    return nn.Linear(4, 2)


def loss(model, batch):
    out = model(batch["x"])
    assert out.dtype is torch.bfloat16, "train.precision"
    assert len(out) <= 2 or not model.training, "train.accumulate"
    fit = nn.functional.mse_loss(out.float(), batch["y"])
    return {"fit": fit, "penalty": 1e-3 * model.weight.square().sum()}


def schedule(optimizer, config):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200)


def on_round(model, completed):
    print(f"after round {completed} the bias is {model.bias.tolist()}")
"""


def test_a_task_with_every_hook_trains(running_pair: Running) -> None:
    settings = (
        "data.dataset=numbers", "train.end={steps: 120}", "train.batch=4", "train.workers=2", "train.clipNorm=5",
        "train.precision=bf16", "train.accumulate=2",
        "wan.interval=10", "train.evaluateEvery=0", "function.slice=1s", "task.config={lr: 0.2}",
    )  # fmt: skip
    job = running_pair.submit(*settings, task=TASK)
    described = running_pair.wait_end(job)
    assert described["state"] == "succeeded", described["error"]
    metrics = described["result"]["metrics"]
    assert set(metrics) == {"fit", "loss", "penalty"}
    assert metrics["loss"] == pytest.approx(metrics["fit"] + metrics["penalty"])
    assert metrics["fit"] < 0.1
    steps = 120 * 4 * 2
    for region in described["result"]["regions"]:
        # Of 16 samples 14 are not None, in training and in the evaluation.
        assert region["samples"] == pytest.approx(steps * 14 / NUMBERS, rel=0.02)
        assert region["metrics_samples"] == 14
    logs = running_pair.federation.control_plane("logs", job).stdout
    assert "after round 12 the bias is" in logs
    assert "samples of this invocation were None, and were left out" in logs
    assert [region["name"] for region in described["result"]["regions"]] == list(PAIR)
