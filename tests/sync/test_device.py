"""What is done where a process computes: on the CPU, and on a GPU where there is one."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from support.memory_channel import MemoryChannel
from support.pipelines import WorkerGroup, mse
from torch import nn

from sync import device as devices
from sync.device import device, finish
from sync.flat import FlatModel
from sync.pipeline import Layers, Pipeline, measure_layers

PLACES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def test_workers_are_spread_over_the_gpus_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(devices.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(devices.torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(devices.torch.cuda, "set_device", chosen.append)
    assert [str(device(worker)) for worker in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]
    assert [str(one) for one in chosen] == ["cuda:0", "cuda:1", "cuda:0"]


def test_without_a_gpu_there_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices.torch.cuda, "is_available", lambda: False)
    assert device(3) == torch.device("cpu")
    finish(device())


class _Mixed(nn.Module):
    """Parameters of two types, and state that is counted."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(3), nn.Linear(3, 2)
        self.low = nn.Parameter(torch.randn(2, dtype=torch.bfloat16))
        self.unused = nn.Parameter(torch.randn(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.norm(x)) + self.low.float()
        return out


@pytest.mark.parametrize("where", PLACES)
def test_a_model_and_its_gradients_travel_from_where_they_are_and_back(where: str) -> None:
    torch.manual_seed(3)
    here = _Mixed()
    there = _Mixed().to(where)
    there.load_state_dict(here.state_dict())
    one, other = FlatModel(here), FlatModel(there)
    assert other.vector().tobytes() == one.vector().tobytes()
    x = torch.randn(5, 3)
    here(x).square().mean().backward()
    there(x.to(where)).square().mean().backward()
    np.testing.assert_allclose(other.gradient(), one.gradient(), rtol=1e-2, atol=1e-5)
    merged = one.gradient()
    for flat in (one, other):
        flat.load_gradient(merged)
        flat.add(np.full(flat.layout.size, 0.25, np.float32))
    assert other.gradient().tobytes() == one.gradient().tobytes()
    assert other.vector().tobytes() == one.vector().tobytes()
    changed = one.vector() + 1
    for flat in (one, other):
        flat.load(changed)
    assert other.vector().tobytes() == one.vector().tobytes()
    assert {str(parameter.device).split(":")[0] for parameter in there.parameters()} == {where}


@pytest.mark.parametrize("where", PLACES)
def test_layers_are_measured_where_the_batch_is(where: str) -> None:
    seen = set()

    class Seen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.update({x.device.type, self.inner.weight.device.type})
            out: torch.Tensor = self.inner(x)
            return out

    told = measure_layers(
        [Seen, nn.ReLU], torch.randn(8, 64, device=where), [4, 8], optimizer=lambda own: torch.optim.Adam(own)
    )
    assert seen == {where}
    assert all(one.forward_alpha_seconds + 8 * one.forward_beta_seconds > 0 for one in told)
    assert told[0].update_seconds > 0
    assert told[0].optimizer_bytes >= 2 * told[0].parameter_bytes


@pytest.mark.parametrize("where", PLACES)
def test_what_is_measured_is_what_was_computed(where: str) -> None:
    """Not what was asked for: a GPU is asked in microseconds."""
    large = torch.randn(*([2048, 2048] if where == "cuda" else [256, 256]), device=where)
    # On a busy machine this thread waits for a core: that time counts neither here nor in what is told.
    clock = time.perf_counter if where == "cuda" else time.thread_time
    work, alone = _Products(8), []
    for _ in range(4):
        begun = clock()
        work(large)
        finish(large.device)
        alone.append(clock() - begun)
    told = measure_layers([lambda: _Products(8)], large, [len(large)], rounds=3)
    took = told[0].forward_alpha_seconds + len(large) * told[0].forward_beta_seconds
    assert took > min(alone[1:]) / 5


class _Products(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self._count):
            out = x @ x
        return out


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("degree", [1, 2])
def test_a_stage_computes_where_it_is_told_also_one_without_parameters(where: str, degree: int) -> None:
    layers = Layers.declared([lambda: nn.Linear(3, 8), nn.Tanh, lambda: nn.Linear(8, 2), nn.Tanh], 1)
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(8, 3, generator=draw), torch.randn(8, 2, generator=draw)
    store = MemoryChannel()
    shape = Pipeline(((0, 0), (1, 2), (3, 3)), degree, 2)
    with WorkerGroup(
        shape, layers, lambda: MemoryChannel(store.values, changed=store.changed), mse, device=where
    ) as worker_group:  # fmt: skip
        losses = [worker_group.step(step, (x, y)) for step in (1, 2)]
        found = worker_group.gradients()
    whole = layers.stage(0, 3)
    loss = mse(whole, (x, y))
    loss.backward()
    assert losses == pytest.approx([float(loss.detach())] * 2, rel=1e-3)
    for name, parameter in whole.named_parameters():
        assert parameter.grad is not None
        assert found[name].device.type == where
        torch.testing.assert_close(found[name].cpu(), parameter.grad, rtol=1e-2, atol=1e-4)
