"""Gradients that leave while the backward pass runs come back as if they had left after it, bit for bit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as examples
from hypothesis import strategies as st
from support.budget import budget
from support.memory_channel import MemoryChannel
from torch import nn
from torch.utils.checkpoint import checkpoint

from geofed_pb.errors import GeofedError
from sync.collective import ChannelCosts, Settings
from sync.flat import FlatModel
from sync.means import weighted_mean
from sync.merging import MeanCollective, Member
from sync.merging.gradients import GradientMerge

ASKED = ChannelCosts(0.002, 0.001, 1e9, 1e9, parallel=8)
WAYS = (
    Settings("pipelined-scatter-reduce"),
    Settings("scatter-reduce"),
    Settings("k-reduce", chunks=3),
    Settings("k-reduce", chunks=3, codec="bf16"),
)


class Odd(nn.Module):
    """Statistics, a frozen layer, a parameter that nothing depends on, one that only some samples reach, and tied
    layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.frozen = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)
        self.frozen.weight.requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(5))
        self.sometimes = nn.Linear(6, 6)
        self.again, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.last.weight = self.again.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.frozen(torch.relu(self.norm(self.first(x))))
        if float(x.detach().sum()) > 0:
            x = x + self.sometimes(x)
        return self.last(torch.relu(self.again(x)))


class Recomputed(Odd):
    """The same, whose statistics count once more in the backward pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return out


class RecomputedLater(Odd):
    """The same from the second step on only."""

    passes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        if self.passes < 4:
            out: torch.Tensor = super().forward(x)
            return out
        out = checkpoint(super().forward, x, use_reentrant=False)
        return out


class Reentrant(nn.Module):
    """One layer in two checkpoints, each of which gives it a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.tied, self.last = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.twice = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(2 if self.twice else 1):
            x = torch.relu(checkpoint(self.tied, x, use_reentrant=True))
        out: torch.Tensor = self.last(x)
        return out


def made(model: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return model()


def trained(
    model: Callable[[], nn.Module], way: Settings, workers: int, steps: int, passes: int, *, overlap: bool
) -> list[tuple[bytes, bool]]:
    """What each worker holds after so many steps of as many passes, and whether it still hands in parts."""
    memory = MemoryChannel()
    # Before any of them computes: a checkpoint puts the state of the process's generator back.
    modules = [made(model) for _ in range(workers)]

    def work(worker: int) -> tuple[bytes, bool]:
        module = modules[worker]
        flat = FlatModel(module)
        settings = replace(way, in_parts=True, trained=flat.layout.trainable_size, timeout_seconds=20.0)
        collective = MeanCollective(
            settings, Member(worker, workers, 1), memory.another(), "c", flat.layout.gradient_size
        )
        merge = GradientMerge(flat, collective, overlap=overlap and collective.in_parts)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        for step in range(1, steps + 1):
            optimizer.zero_grad(set_to_none=True)
            for number in range(passes):
                draw = torch.Generator().manual_seed(1000 * worker + 10 * step + number)
                loss = module(torch.randn(5, 4, generator=draw)).square().mean() / passes
                if number == passes - 1:
                    merge.arm(step, worker + 1.0)
                loss.backward()
            for _ in merge.merged(step, worker + 1.0):
                optimizer.step()
        collective.close()
        return flat.vector().tobytes(), merge.overlap

    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(work, range(workers)))


@pytest.mark.slow
@examples(max_examples=budget(20), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    way=st.sampled_from(WAYS),
    asked=st.sampled_from([None, ASKED]),
    model=st.sampled_from([Odd, Recomputed, RecomputedLater]),
    workers=st.integers(3, 4),
    passes=st.integers(1, 2),
)
def test_the_model_is_the_same_as_without(
    way: Settings, asked: ChannelCosts | None, model: type[nn.Module], workers: int, passes: int
) -> None:
    way = replace(way, asked=asked)
    with_, without = (trained(model, way, workers, 3, passes, overlap=overlap) for overlap in (True, False))
    assert [held for held, _ in with_] == [held for held, _ in without]
    assert len({held for held, _ in with_}) == 1
    assert all(overlap for _, overlap in with_)
    assert not any(overlap for _, overlap in without)


def test_who_gets_a_gradient_in_parts_hands_it_in_whole() -> None:
    with_, without = (trained(Reentrant, WAYS[0], 3, 3, 1, overlap=overlap) for overlap in (True, False))
    assert with_ == without
    assert not any(overlap for _, overlap in with_)


def one_of_three(module: nn.Module, channel: MemoryChannel, **more: Any) -> tuple[GradientMerge, MeanCollective]:
    flat = FlatModel(module)
    settings = Settings("k-reduce", in_parts=True, **more)
    collective = MeanCollective(settings, Member(0, 3, 1), channel, "c", flat.layout.gradient_size)
    return GradientMerge(flat, collective, overlap=collective.in_parts), collective


def watched(merge: GradientMerge, module: nn.Module) -> None:
    """A first step, which shows what the module does; its merge does not come about."""
    merge.arm(1, 1.0)
    module(torch.ones(2, 4)).sum().backward()
    with pytest.raises(GeofedError) as raised:
        list(merge.merged(1, 1.0))
    assert raised.value.code == "CHANNEL_TIMEOUT"


def test_a_gradient_in_parts_that_was_whole_before_is_an_error_that_says_what_to_do() -> None:
    module = made(Reentrant)
    assert isinstance(module, Reentrant)
    module.twice = False
    merge, collective = one_of_three(module, MemoryChannel(), timeout_seconds=0.05)
    watched(merge, module)
    module.twice = True
    merge.arm(2, 1.0)
    module(torch.ones(2, 4)).sum().backward()
    with pytest.raises(GeofedError) as raised:
        list(merge.merged(2, 1.0))
    assert raised.value.code == "TASK_INVALID"
    assert "use_reentrant=False" in (raised.value.hint or "")
    collective.close()


class Held(torch.autograd.Function):
    """The backward pass waits here."""

    until = threading.Event()

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        assert Held.until.wait(20.0), "nothing has left before the pass is over"
        return gradients[0]


def test_the_last_layers_leave_while_the_first_ones_still_compute() -> None:
    first, rest = nn.Linear(4, 300), nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300))
    module = nn.Sequential(first, rest)

    def before(what: str, key: str) -> None:
        if what == "put" and "/g2/p/" in key:
            Held.until.set()

    channel = MemoryChannel(before=before)
    merge, collective = one_of_three(module, channel, timeout_seconds=0.3)
    Held.until.set()
    watched(merge, module)
    Held.until.clear()
    loss = rest(Held.apply(first(torch.ones(2, 4)))).sum()  # type: ignore[no-untyped-call]
    merge.arm(2, 1.0)
    loss.backward()
    assert any("/g2/p/" in key for key in channel.values)
    collective.close()


class _Idle(nn.Module):
    """Some parameters get no gradient in some steps of some workers."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.used, self.idle = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
        self.rare = nn.Parameter(torch.ones(2))
        self.table = nn.Embedding(6, 3, sparse=sparse)
        nn.init.ones_(self.table.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = x @ self.used + self.table(x[:, 0].long().abs() % 6).sum(1)
        rare = x[:, 1] > 0
        return torch.cat([out[~rare], out[rare] * self.rare.sum()]) if bool(rare.any()) else out


def _optimiser(name: str, module: nn.Module) -> torch.optim.Optimizer:
    parameters = module.parameters()
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=0.1)
    if name == "momentum":
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    if name == "adagrad":
        return torch.optim.Adagrad(parameters, lr=0.1)
    return torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.5)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of torch's own code
@pytest.mark.parametrize(
    ("name", "sparse"), [("sgd", False), ("adamw", False), ("momentum", False), ("sgd", True), ("adagrad", True)]
)
def test_workers_together_make_the_steps_of_one(name: str, sparse: bool) -> None:
    """A parameter that no sample's loss depends on is left alone, by weight decay and momentum too."""
    drawn = torch.Generator().manual_seed(4)
    alone, workers = _Idle(sparse), [_Idle(sparse) for _ in range(3)]
    flats, optimisers = [FlatModel(one) for one in workers], [_optimiser(name, one) for one in workers]
    optimiser = _optimiser(name, alone)
    for step in range(8):
        x = torch.randn(12, 3, generator=drawn)
        x[:, 1] = -1.0 if step % 3 else x[:, 1]
        parts = [x[:2], x[2:7], x[7:]]
        optimiser.zero_grad(set_to_none=True)
        alone(x).square().mean().backward()
        optimiser.step()
        vectors = []
        for module, flat, part, own in zip(workers, flats, parts, optimisers, strict=True):
            own.zero_grad(set_to_none=True)
            module(part).square().mean().backward()
            vectors.append(flat.gradient())
        merged = weighted_mean(vectors, [len(part) for part in parts])
        for module, flat, own in zip(workers, flats, optimisers, strict=True):
            flat.load_gradient(merged)
            own.step()
            for (place, one), other in zip(alone.named_parameters(), module.parameters(), strict=True):
                torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5, msg=lambda text, at=place: f"{at}: {text}")
    assert torch.equal(alone.idle, torch.ones(3))
    assert all(torch.equal(module.idle, torch.ones(3)) for module in workers)


def test_a_frozen_parameter_that_gets_a_gradient_is_told() -> None:
    module = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 1))
    flat = FlatModel(module)
    module[0].requires_grad_(True)
    module(torch.ones(1, 2)).sum().backward()
    with pytest.raises(GeofedError, match=r"parameter 0\.weight of the model was frozen") as raised:
        flat.gradient()
    assert raised.value.code == "TASK_INVALID"
