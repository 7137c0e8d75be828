"""Of a large model of which a small part is trained, only that part travels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from support.running import Running

from tests.e2e.conftest import NUMBERS, PAIR

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

WIDTH = 512
BASE_BYTES = 4 * WIDTH * WIDTH
TASK = f"""
import torch
from torch import nn
from torch.utils.data import TensorDataset

seen = 0.0


class Adapted(nn.Module):
    def __init__(self, shift):
        super().__init__()
        self.first = nn.Linear(4, {WIDTH}).requires_grad_(False)
        self.whole = nn.Linear({WIDTH}, {WIDTH}).requires_grad_(False)
        self.down, self.up = nn.Linear({WIDTH}, 2, bias=False), nn.Linear(2, {WIDTH}, bias=False)
        self.last = nn.Linear({WIDTH}, 2).requires_grad_(False)
        nn.init.zeros_(self.up.weight)
        self.register_buffer("table", torch.full(({WIDTH}, {WIDTH}), 3.5))
        with torch.no_grad():
            self.whole.weight += shift

    def forward(self, x):
        x = torch.tanh(self.first(x))
        return self.last(torch.tanh(self.whole(x) + self.up(self.down(x))))


def model(config):
    return Adapted(config.get("shift", 0.0) + (seen if config.get("differ") else 0.0))


def dataset(uri, split, config):
    global seen
    x, y = torch.load(uri)
    seen = float(x.mean())
    return TensorDataset(x, y)


def optimizer(parameters, config):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def loss(model, batch):
    x, y = batch
    return nn.functional.mse_loss(model(x), y)


def metrics(model, batches):
    assert float(model.table.mean()) == 3.5
    return {{"base": float(model.whole.weight.double().sum())}}
"""
FIXED = ("whole.weight", "whole.bias", "first.weight", "first.bias", "last.weight", "last.bias", "table")


def _ended(running: Running, *settings: str) -> dict[str, Any]:
    job = running.submit(
        "data.dataset=numbers", "task.config={}", f"train.batch={NUMBERS // 2}", "train.seed=5", "train.workers=2",
        "train.end={steps: 6}", "train.evaluateEvery=0", "wan.interval=2", "wan.codec=fp32", *settings, task=TASK,
    )  # fmt: skip
    return running.wait_end(job)


def _model(running: Running, described: dict[str, Any], folder: Path) -> dict[str, torch.Tensor]:
    assert described["state"] == "succeeded", described["error"]
    file = folder / f"{described['id']}.safetensors"
    running.federation.control_plane("export", described["id"], "--output-file", str(file))
    return safetensors.torch.load_file(file)


@pytest.mark.parametrize(
    "settings",
    [
        ("collective=scatter-reduce", "wan.exchange=synchronous"),
        ("collective=server-reduce", "wan.exchange=background", "function.slice=1s"),
    ],
    ids=["scatter-reduce", "server-reduce, in the background"],
)
def test_what_is_not_trained_stays_where_it_is(running_pair: Running, tmp_path: Path, settings: tuple[str]) -> None:
    described = _ended(running_pair, *settings)
    first = _model(running_pair, described, tmp_path)
    for part in described["partitions"]:
        assert 0 < sum(part["sent_bytes"].values()) < BASE_BYTES / 8, part
        assert part["metrics"]["base"] == pytest.approx(float(first["whole.weight"].double().sum()), rel=1e-12)
    assert float(first["up.weight"].abs().max()) > 0
    adapter = tmp_path / "adapter.safetensors"
    export = ("export", described["id"], "--output-file")
    running_pair.federation.control_plane(*export, str(adapter), "--as", "trained")
    assert adapter.stat().st_size < BASE_BYTES / 8
    assert {name: held.tolist() for name, held in safetensors.torch.load_file(adapter).items()} == {
        name: first[name].tolist() for name in ("down.weight", "up.weight")
    }
    refused = running_pair.federation.control_plane(*export, str(tmp_path / "peft"), "--as", "peft", check=False)
    assert "error[MODEL_MISMATCH]: down.weight was trained, and is no matrix of a LoRA adapter" in refused.stderr
    # Another job's base counts, whatever the task makes.
    after = _ended(running_pair, f"train.initialModel.job={described['id']}", "task.config={shift: 1.0}", *settings)
    second = _model(running_pair, after, tmp_path)
    assert all(torch.equal(first[name], second[name]) for name in FIXED)
    assert not torch.equal(first["up.weight"], second["up.weight"])
    assert {part["metrics"]["base"] for part in after["partitions"]} == {
        part["metrics"]["base"] for part in described["partitions"]
    }


def test_regions_that_make_another_base_are_told_the_tensor(running_pair: Running) -> None:
    described = _ended(running_pair, "task.config={differ: true}")
    assert described["state"] == "failed"
    assert described["error"]["code"] == "TASK_INVALID"
    assert "whole.weight, which is not trained, has other values here than there" in described["error"]["message"]
    assert PAIR[0] in described["error"]["message"]
