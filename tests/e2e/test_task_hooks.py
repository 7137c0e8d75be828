"""The optional functions of a task module and the kinds of datasets, through the real daemons."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from support.running import Running

from tests.e2e.conftest import NUMBERS, PAIR

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

TASK = """\
import torch
from geofed import log
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
    if model.training:
        log("weight norm", model.weight.detach().norm())
        log("parts", 1)
        log("not finite", float("nan"))
    return {"fit": fit, "penalty": 1e-3 * model.weight.square().sum()}


def schedule(optimizer, config):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200)


def on_round(model, completed):
    print(f"after round {completed} the bias is {model.bias.tolist()}")
    log("completed", completed)
"""


def test_a_task_with_every_hook_trains(running_pair: Running, tmp_path: Path) -> None:
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
    assert "log: values of not finite that are not finite are left out" in logs
    rows = json.loads(running_pair.federation.control_plane("history", job, "-o", "json").stdout)["data"]
    logged = [row for row in rows if "completed" in row]
    assert all(row["completed"] == row["round"] and row["parts"] == 1 for row in logged)
    assert {(row["round"], row["region"]) for row in logged} >= {(12, region) for region in PAIR}
    assert all(0.1 < row["weight norm"] < 10 for row in logged)
    assert not any("not finite" in row for row in rows)
    for row in logged:
        # What is minimised is their sum, of the same steps.
        assert 0 < row["train/penalty"] < 0.1
        assert row["train/fit"] > 0
    for part in described["partitions"]:
        assert set(part["logged"]) == {"completed", "parts", "train/fit", "train/penalty", "weight norm"}
        # Two workers, each of which is busy for part of the time; torch alone takes more than 50 MB.
        assert 0 < part["usage"]["cpu_cores"] <= os.cpu_count() * 1.1
        assert 50e6 < part["usage"]["memory_bytes"] < 4e9
        assert part["usage"]["gpu_memory_bytes"] == 0 or torch.cuda.is_available()
    largest = max(part["usage"]["memory_bytes"] for part in described["partitions"])
    assert f" {largest / 1e6:.0f} MB " in running_pair.federation.control_plane("list", "--all").stdout
    told = running_pair.federation.control_plane("track", job, str(tmp_path / "metrics.csv"))
    assert told.returncode == 0, told.stderr
    names = {line.split(",")[5] for line in (tmp_path / "metrics.csv").read_text().splitlines()[1:]}
    assert {"completed", "weight norm", "system/cpu_cores", "system/memory_bytes"} <= names
    assert "samples of this invocation were None, and were left out" in logs
    assert [region["name"] for region in described["result"]["regions"]] == list(PAIR)
