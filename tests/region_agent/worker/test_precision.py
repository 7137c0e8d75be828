"""Autocast, the scale of the loss and accumulated gradients: a job makes of a model what one plain process makes of it,
with torch's own autocast and GradScaler."""

from __future__ import annotations

import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from support.exchange_in_process import Federation
from support.jobs import invocation, write_samples
from support.pki import Authority
from support.server_process import Server
from torch import nn

from geofed_pb.errors import GeofedError
from region_agent.worker import loop
from region_agent.worker.data.shard import BatchStream, parts_of
from region_agent.worker.invocation import Invocation
from region_agent.worker.task import TaskModule
from region_agent.worker.training import loss_scale
from region_agent.worker.training.loss_scale import LossScale
from region_agent.worker.training.merging import merging_for
from sync.channel_clients import FileChannel
from sync.flat import FlatModel
from sync.seeding import reseed, seed_all

STEPS, ROUNDS, BATCH, SEED = 3, 3, 8, 5
TYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}

TASK = """
import torch
from torch import nn
from torch.utils.data import TensorDataset


def model(config):
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))


def dataset(uri, split, config):
    x = torch.randn(21, 4, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x[:, :2] - x[:, 2:])


def loss(model, batch):
    out = model(batch[0])
    assert out.dtype is getattr(torch, config_of["type"])
    return config_of["factor"] * nn.functional.mse_loss(out.float(), batch[1])


config_of = {}


def optimizer(parameters, config):
    config_of.update(config)
    return torch.optim.AdamW(parameters, lr=0.01)


def metrics(model, batches):
    return {"type": float(all(model(x).dtype is getattr(torch, config_of["type"]) for x, _ in batches))}
"""


def _plain(precision: str, accumulate: int, factor: float) -> tuple[nn.Module, float]:
    seed_all(SEED)
    module = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")
    x = torch.randn(21, 4, generator=torch.Generator().manual_seed(1))
    y = x[:, :2] - x[:, 2:]
    stream = BatchStream(range(len(x)), SEED, "east", 0, 1, BATCH)
    for step in range(1, STEPS * ROUNDS + 1):
        reseed(SEED, zlib.crc32(b"east"), 0, step)
        optimizer.zero_grad(set_to_none=True)
        for rows in torch.tensor(stream.indices(step)).chunk(accumulate):
            with torch.autocast("cpu", TYPES[precision] or torch.bfloat16, enabled=precision != "fp32"):
                value = factor * nn.functional.mse_loss(module(x[rows]).float(), y[rows])
            scaler.scale(value / accumulate).backward()
        scaler.step(optimizer)
        scaler.update()
    return module, scaler.get_scale()


@pytest.mark.slow
@pytest.mark.parametrize("slice_seconds", [1e-3, 100.0], ids=["a step a slice", "one slice"])
@pytest.mark.parametrize(
    ("precision", "accumulate", "factor"),
    [("fp32", 4, 1.0), ("bf16", 1, 1.0), ("bf16", 2, 1.0), ("fp16", 1, 0.01), ("fp16", 4, 100.0)],
)
def test_a_job_trains_as_torchs_own_autocast_and_scaler_do(
    precision: str, accumulate: int, factor: float, slice_seconds: float, tmp_path: Path, monkeypatch: Any
) -> None:
    federation = Federation(tmp_path, ("east",), steps_per_round=STEPS, rounds=ROUNDS)
    monkeypatch.setattr(loop, "PsClient", federation.client)
    kind = TYPES[precision] or torch.float32
    config = {"factor": factor, "type": str(kind).removeprefix("torch.")}
    federation.train(
        TASK, config, seed=SEED, batch=BATCH, slice_seconds=slice_seconds, precision=precision,
        at_once=BATCH // accumulate,
    )  # fmt: skip
    expected, scale = _plain(precision, accumulate, factor)
    if precision == "fp16":
        assert (scale < 2.0**16) == (factor > 1), "with a large loss the first steps overflow, and are left out"
    for name, tensor in safetensors.torch.load(federation.exported()).items():
        assert torch.equal(tensor, expected.state_dict()[name]), name
    assert federation.metrics == {"east": {"type": 1.0}}, "evaluations have the same precision"


def test_parts_are_as_few_as_fit_and_nearly_equal() -> None:
    assert [parts_of(10, 4), parts_of(8, 4), parts_of(3, 8), parts_of(7, 0)] == [[3, 3, 4], [4, 4], [3], [7]]


@pytest.fixture
def place(tmp_path: Path) -> Server:
    return Server(tmp_path / "east", Authority(), "east", ("east",), rounds=1, steps_per_round=2, workers=2)


@pytest.mark.parametrize("collective", ["all-reduce", "scatter-reduce", "pipelined-scatter-reduce", "k-reduce"])
def test_an_overflow_in_one_worker_is_left_out_by_all(place: Server, collective: str) -> None:
    body = invocation(place, TASK, write_samples(place.folder / "data.npz", 4))
    body = body.model_copy(update={"collective": collective, "precision": "fp16"})
    with ThreadPoolExecutor(2) as both:
        ends = list(both.map(lambda worker: _two_steps(body.model_copy(update={"worker": worker})), range(2)))
    assert ends[0] == ends[1]
    first, second, state = ends[0]
    assert first == [1.0, 1.0], "no worker has made the step"
    assert second != first
    assert state == {"loss_scale": 2.0**15, "loss_scale_since": 1.0}


def _two_steps(body: Invocation) -> tuple[list[float], list[float], dict[str, float]]:
    """The second worker's gradient overflows in the first step."""
    module = nn.Linear(2, 1, bias=False)
    nn.init.ones_(module.weight)
    flat, optimizer = FlatModel(module), torch.optim.SGD(module.parameters(), lr=0.1)
    task, scale, weights = TaskModule(Path(), {}, {}), LossScale(module), []
    merging = merging_for(
        body, task, optimizer, flat, FileChannel(Path(body.channel_address)), time.monotonic(), None, scale
    )
    for step in (1, 2):
        optimizer.zero_grad(set_to_none=True)
        merging.arm(step, 1)
        factor = float("inf") if step == 1 and body.worker == 1 else 1.0
        scale.scaled(factor * module(torch.ones(1, 2)).sum()).backward()
        merging.step(None, step, 1, 0.0)  # type: ignore[arg-type]  # no server takes part
        weights.append(module.weight.detach().reshape(-1).tolist())
    merging.close()
    return weights[0], weights[1], scale.state()


def test_the_scale_grows_after_many_steps_and_ends_the_job_where_none_suffices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loss_scale, "_STEPS", 3)
    module = nn.Linear(1, 1, bias=False)
    scale = LossScale(module)
    for _ in range(2):
        scale.scaled(module(torch.ones(1)).sum()).backward()
        assert scale.accepts()
    again = LossScale(nn.Linear(1, 1))
    again.restore(scale.state())
    assert again.accepts()
    assert again.state() == {"loss_scale": 2.0**17, "loss_scale_since": 0.0}
    module.weight.grad = torch.full((1, 1), float("nan"))
    while scale.state()["loss_scale"] > 2.0**-10:
        assert not scale.accepts()
    with pytest.raises(GeofedError, match="not finite in float16 with any scale"):
        scale.accepts()


def test_parameters_of_16_bits_are_refused() -> None:
    with pytest.raises(GeofedError, match="trained parameters of"):
        LossScale(nn.Linear(1, 1).to(torch.bfloat16))


def test_a_sparse_gradient_is_looked_at(tmp_path: Path) -> None:
    module = nn.Embedding(3, 1, sparse=True)
    scale = LossScale(module)
    scale.scaled(module(torch.tensor([1, 1])).sum()).backward()
    gradient = module.weight.grad
    assert gradient is not None
    assert gradient.to_dense().reshape(-1).tolist() == [0.0, 2.0, 0.0]
    assert scale.accepts()
