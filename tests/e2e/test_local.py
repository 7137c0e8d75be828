"""Tensors that stay in their region, through the real daemons."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import safetensors.torch
import torch
from support.running import Running

from geofed_pb.errors import GeofedError
from tests.e2e.conftest import NUMBERS, PAIR

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

WIDTH = 512
HEAD_BYTES = 4 * WIDTH * WIDTH
TASK = f"""
import torch
from torch import nn
from torch.utils.data import TensorDataset


class Personal(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, {WIDTH})
        self.head = nn.Sequential(nn.Linear({WIDTH}, {WIDTH}), nn.BatchNorm1d({WIDTH}), nn.Linear({WIDTH}, 2))

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))


def model(config):
    return Personal()


def dataset(uri, split, config):
    x, y = torch.load(uri)
    return TensorDataset(x, -y if "{PAIR[1]}" in uri else y)


def loss(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def metrics(model, batches):
    return {{"head": float(sum(one.double().sum() for one in model.head.parameters()))}}
"""


def test_each_region_has_its_own_head_which_no_other_gets(running_pair: Running, tmp_path: Path) -> None:
    settings = (
        "data.dataset=numbers", "task.config={lr: 0.001}", f"train.batch={NUMBERS // 2}", "train.workers=2",
        "train.end={steps: 8}", "train.evaluateEvery=2", "wan.interval=2", "wan.codec=int8", "function.slice=1s",
    )  # fmt: skip
    job = running_pair.submit(*settings, "train.local=['head.*']", task=TASK)
    described = running_pair.wait_end(job)
    assert described["state"] == "succeeded", described["error"]
    models = {}
    for part in described["partitions"]:
        assert 0 < sum(part["sent_bytes"].values()) < HEAD_BYTES / 8, part
        file = tmp_path / f"{part['region']}.safetensors"
        export = ("export", job, "--region", part["region"], "--output-file", str(file))
        running_pair.federation.control_plane(*export)
        own = models[part["region"]] = safetensors.torch.load_file(file)
        names = [name for name in own if name.startswith("head.") and name.endswith(("weight", "bias"))]
        head = sum(float(own[name].double().sum()) for name in names)
        assert part["metrics"]["head"] == pytest.approx(head, rel=1e-9), "what is exported is what was evaluated"
    file = tmp_path / "shared.safetensors"
    running_pair.federation.control_plane("export", job, "--output-file", str(file))
    shared = safetensors.torch.load_file(file)
    assert shared.keys() == {"body.weight", "body.bias"}
    first, second = (models[region] for region in PAIR)
    for name in shared:
        assert torch.equal(first[name], second[name])
        assert torch.equal(first[name], shared[name])
    assert not torch.equal(first["head.0.weight"], second["head.0.weight"])
    (tmp_path / "task.py").write_text(TASK)
    asked = ("--as", "torch-export", "--task", str(tmp_path / "task.py"), "--input", "1x4")
    refused = running_pair.federation.control_plane("export", job, *asked, check=False)
    assert re.search(r"the model lacks head\.\S+, which stays in its region", refused.stderr)
    program = tmp_path / "own.pt2"
    asked = (*asked, "--region", PAIR[0], "--output-file", str(program))
    running_pair.federation.control_plane("export", job, *asked)
    inner = torch.export.load(program).state_dict
    assert all(torch.equal(inner[name], first[name]) for name in first)
    more = running_pair.wait_end(
        running_pair.submit(
            *settings,
            "train.local=['head.*']",
            f"train.initialModel={{job: {job}}}",
            "task.config={lr: 0.0}",
            "wan.exchange=background",
            task=TASK,
        )
    )
    assert more["state"] == "succeeded", more["error"]
    for part, before in zip(more["partitions"], described["partitions"], strict=True):
        assert part["metrics"]["head"] == pytest.approx(before["metrics"]["head"], rel=1e-9), (
            "it continues with its own"
        )
    refused = running_pair.federation.control_plane("export", job, "--region", "oslo", check=False)
    assert f"oslo is no region of {job}" in refused.stderr
    with pytest.raises(GeofedError, match=r"no tensor of the model matches 'haed\.\*'") as caught:
        running_pair.submit(*settings, "train.local=['haed.*']", task=TASK)
    assert "did you mean 'head.*'?; it failed in a probe before the plan, and no job was created" in str(caught.value)
