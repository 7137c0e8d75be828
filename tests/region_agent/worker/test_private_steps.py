"""DP-SGD in the worker: gradients of single samples, their bound, the noise, and who is in a step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from geofed_pb.errors import GeofedError
from region_agent.worker.data.shard import BatchStream
from region_agent.worker.invocation import PrivateSteps
from region_agent.worker.task import TaskModule
from region_agent.worker.training.private_steps import PrivateGradients

KEY = "5a" * 32
Loss = Callable[[nn.Module, Any], torch.Tensor]


def steps(clip: float = 1.0, noise: float = 1e-9, rate: float = 0.5) -> PrivateSteps:
    return PrivateSteps(clip=clip, noise=noise, rate=rate, key=KEY)


def task(loss: Loss) -> TaskModule:
    return TaskModule(Path("/"), {}, {"loss": loss})


def cross_entropy(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return functional.cross_entropy(model(x), y)


def of_a_condition(model: nn.Module, batch: Any) -> torch.Tensor:
    """Python's own control flow depends on the data, which cannot be vectorised."""
    return cross_entropy(model, batch) * (2.0 if batch[0].sum().item() > 0 else 0.5)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(x.reshape(len(x), 4, 3))[0][:, -1])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.scale = nn.Linear(12, 12), nn.Linear(12, 12), nn.Parameter(torch.ones(()))
        self.other.weight = self.one.weight
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * self.other(torch.relu(self.one(x)))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "dense": lambda: nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3)),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 3, 4)), nn.Conv2d(1, 4, 2), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(24, 3)
    ),
    "recurrent": Recurrent,
    "tied and unused": Tied,
}


def samples(count: int, seed: int = 0) -> list[list[torch.Tensor]]:
    drawn = torch.Generator().manual_seed(seed)
    return [[torch.randn(1, 12, generator=drawn) * (at + 1), torch.tensor([at % 3])] for at in range(count)]


def expected(model: nn.Module, loss: Loss, batches: list[Any], clip: float) -> tuple[torch.Tensor, list[float]]:
    """Straight from the definition: a backward pass for each sample."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    total, norms = torch.zeros(sum(p.numel() for p in parameters)), []
    for batch in batches:
        model.zero_grad(set_to_none=False)
        loss(model, batch).backward()
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters])
        norms.append(float(flat.norm()))
        total += flat * min(1.0, clip / norms[-1])
    return total, norms


def flat_gradient(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])  # type: ignore[union-attr]


@pytest.mark.parametrize("at_once", [0, 1, 3])
@pytest.mark.parametrize("loss", [cross_entropy, of_a_condition])
@pytest.mark.parametrize("kind", MODELS)
def test_it_is_the_sum_of_each_samples_clipped_gradient(kind: str, loss: Loss, at_once: int) -> None:
    torch.manual_seed(1)
    model = MODELS[kind]()
    batches = samples(7)
    _, norms = expected(model, loss, batches, 1.0)
    clip = sorted(norms)[3]
    wanted, _ = expected(model, loss, batches, clip)
    told = sum(float(loss(model, batch).detach()) for batch in batches) / 7
    value = PrivateGradients(steps(clip), task(loss), model, 1, at_once).set(iter(batches), 10.0)
    assert value == pytest.approx(told, rel=1e-5)
    assert torch.allclose(flat_gradient(model), wanted / 10, rtol=1e-4, atol=1e-6)


def total(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch[0]).sum()


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [0, 1])
def test_parameters_of_half_the_precision_get_the_whole_sum_and_its_noise(at_once: int) -> None:
    """In bfloat16 a sum of ones ends at 256, and noise of 1 is rounded away beside 1000."""
    model = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    ones = [[torch.ones(1, 1, dtype=torch.bfloat16), torch.zeros(1)] for _ in range(600)]
    PrivateGradients(steps(1.0), task(total), model, 1, at_once).set(iter(ones), 600.0)
    assert model.weight.grad is not None
    assert (model.weight.grad.dtype, float(model.weight.grad)) == (torch.bfloat16, 1.0)
    made = set()
    for _ in range(20):
        # The sum and its noise, of which bfloat16 keeps eight bits.
        PrivateGradients(steps(1.0, noise=20.0), task(total), model, 1, at_once).set(iter(ones), 1.0)
        made.add(float(model.weight.grad))
    assert len(made) > 5


def test_what_is_complex_has_no_noise() -> None:
    model = nn.Linear(2, 2, dtype=torch.complex64)
    with pytest.raises(GeofedError, match="parameter weight is complex") as told:
        PrivateGradients(steps(1.0), task(total), model, 1)
    assert told.value.code == "TASK_INVALID"


def test_samples_of_different_shapes_are_taken_one_by_one() -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch["x"].mean(1)).square().mean()

    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    batches = [{"x": torch.randn(1, length, 3), "name": "text"} for length in (4, 5, 9)]
    wanted, _ = expected(model, loss, batches, 0.5)
    PrivateGradients(steps(0.5), task(loss), model, 1).set(batches, 1.0)
    assert torch.allclose(flat_gradient(model), wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@settings(deadline=None, max_examples=30)
@given(
    count=st.integers(1, 6), clip=st.floats(1e-3, 10), scale=st.floats(1e-3, 1e4), seed=st.integers(0, 99),
    at_once=st.sampled_from([0, 1]),
)  # fmt: skip
def test_one_sample_changes_the_sum_by_no_more_than_the_bound(
    count: int, clip: float, scale: float, seed: int, at_once: int
) -> None:
    torch.manual_seed(seed)
    model = MODELS["dense"]()
    batches = [[x * scale, y] for x, y in samples(count, seed)]
    gradients = PrivateGradients(steps(clip, noise=1e-12), task(cross_entropy), model, 1, at_once)
    gradients.set(batches, 1.0)
    whole = flat_gradient(model).double()
    gradients.set(batches[1:], 1.0)
    assert float((whole - flat_gradient(model).double()).norm()) <= clip * (1 + 1e-4)


@pytest.mark.parametrize("workers", [1, 4])
def test_workers_add_the_noise_together(workers: int) -> None:
    model = nn.Linear(500, 400)
    gradients = PrivateGradients(steps(clip=0.5, noise=2.0), task(cross_entropy), model, workers)
    total = torch.zeros(500 * 400 + 400)
    for _ in range(workers):
        assert gradients.set([], 10.0) == 0.0
        total += flat_gradient(model) * 10.0
    # Four standard errors.
    assert float(total.std()) == pytest.approx(1.0, abs=4 / math.sqrt(2 * total.numel()))


@pytest.mark.parametrize(
    ("layer", "kind"),
    [
        (nn.BatchNorm1d(8), "BatchNorm1d"),
        (nn.SyncBatchNorm(8), "SyncBatchNorm"),
        (nn.InstanceNorm1d(8, track_running_stats=True), "InstanceNorm1d with running statistics"),
    ],
)
def test_what_has_no_gradient_of_a_sample_is_refused_by_name(layer: nn.Module, kind: str) -> None:
    model = nn.Sequential(nn.Linear(12, 8), nn.Sequential(layer), nn.Linear(8, 3))
    with pytest.raises(GeofedError, match=rf"1\.0 is an? {kind}") as told:
        PrivateGradients(steps(), task(cross_entropy), model, 1)
    assert told.value.code == "TASK_INVALID"
    PrivateGradients(steps(), task(cross_entropy), nn.Sequential(nn.InstanceNorm1d(8), nn.Linear(8, 3)), 1)


def test_an_error_of_the_task_is_told_as_such() -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        raise ValueError("no label")

    with pytest.raises(GeofedError, match="no label") as told:
        PrivateGradients(steps(), task(loss), nn.Linear(12, 3), 1).set(samples(2), 1.0)
    assert told.value.code == "TASK_FAILED"


def streams(workers: int, size: int = 1000) -> list[BatchStream]:
    data = TensorDataset(torch.arange(size))
    return [BatchStream(data, 0, "east", worker, workers, workers) for worker in range(workers)]


def drawn(stream: BatchStream, step: int, rate: float = 0.1, key: str = KEY) -> list[int]:
    return [int(batch[0]) for batch in stream.sampled(step, rate, bytes.fromhex(key))]


def test_workers_draw_parts_of_the_same_step() -> None:
    (alone,) = streams(1)
    whole = drawn(alone, 7)
    parts = [drawn(stream, 7) for stream in streams(3)]
    assert sorted(itertools.chain(*parts)) == whole == drawn(alone, 7), "a step that is made again has the same samples"
    assert whole != drawn(alone, 8)
    assert whole != drawn(alone, 7, key="5b" * 32)


def test_each_sample_is_in_a_step_by_chance_alone() -> None:
    (stream,) = streams(1, size=400)
    rate, number = 0.1, 500
    made = np.zeros((number, 400))
    for step in range(number):
        made[step, drawn(stream, step + 1, rate)] = 1
    counts = made.sum(1)
    # Four standard errors of mean and variance of a binomial distribution.
    assert counts.mean() == pytest.approx(40, abs=4 * 6 / math.sqrt(number))
    assert counts.var() == pytest.approx(36, abs=4 * 36 * math.sqrt(2 / number))
    assert abs(np.corrcoef(made[:-1].ravel(), made[1:].ravel())[0, 1]) < 4 / math.sqrt(made.size)
    assert drawn(stream, 1, rate=1.0) == list(range(400))
