"""Layers are made one by one, alike everywhere, or it is said what to do; and measured one by one."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import nn

from geofed_pb.errors import GeofedError
from sync.flat import FlatModel, layout_of
from sync.pipeline import Layers, _measure, measure_layers


def _sequential() -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            first=nn.Linear(6, 8),
            norm=nn.BatchNorm1d(8),
            act=nn.ReLU(),
            middle=nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
            last=nn.Linear(8, 3),
        )
    )


FACTORIES: list[Callable[[], nn.Module]] = [lambda: nn.Linear(6, 8), nn.Tanh, lambda: nn.Linear(8, 3)]


@pytest.mark.parametrize(
    "layers", [Layers.of(_sequential, 7), Layers.declared(FACTORIES, 7)], ids=["sequential", "declared"]
)
def test_stages_made_apart_are_the_whole_model(layers: Layers) -> None:
    count = len(layers)
    whole = layers.stage(0, count - 1).state_dict()
    parts: dict[str, torch.Tensor] = {}
    for cut in range(1, count):
        parts = layers.stage(cut, count - 1).state_dict() | layers.stage(0, cut - 1).state_dict()
        assert parts.keys() == whole.keys()
        assert all(torch.equal(parts[name], whole[name]) for name in whole)
    shell = layers.shell()
    assert {tensor.device.type for tensor in shell.parameters()} == {"meta"}
    assert layout_of(shell) == FlatModel(layers.stage(0, count - 1)).layout


def test_two_layers_of_the_same_shape_begin_differently() -> None:
    twins = Layers.of(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), 1).stage(0, 1)
    assert not torch.equal(twins[0].weight, twins[1].weight)


class _Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class _Mask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(4, dtype=torch.bool), persistent=False)


class _Reading(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = float(torch.ones(4).sum())


def _tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    return model


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: nn.Sequential(nn.Linear(4, 4), _Bare()), "layer 1: scale has no value"),
        (lambda: nn.Sequential(nn.Linear(4, 4), _Mask()), "layer 1: mask has no value"),
        (lambda: nn.Sequential(_Reading()), "needs the values"),
        (lambda: nn.Linear(4, 4), "returns a Linear"),
        (_tied, "1.weight is the same parameter as 0.weight"),
    ],
)
def test_what_cannot_be_made_layer_by_layer_is_told(build: Callable[[], nn.Module], says: str) -> None:
    with pytest.raises(GeofedError, match=says) as raised:
        Layers.of(build, 1).stage(0, 1 if "layer 1" in says else 0)
    assert raised.value.code == "TASK_INVALID"
    assert raised.value.hint


def test_what_is_declared_must_make_modules() -> None:
    with pytest.raises(GeofedError, match="layer 0 of layers"):
        Layers.declared([3], 1)  # type: ignore[list-item]
    with pytest.raises(GeofedError, match=r"not a torch\.nn\.Module"):
        Layers.declared([lambda: 3], 1).make(0)  # type: ignore[list-item,return-value]


def test_bytes_of_layers_are_those_that_can_be_counted_by_hand() -> None:
    samples = 8
    layers = [lambda: nn.Linear(6, 10), nn.ReLU, lambda: nn.Linear(10, 3, bias=False)]
    linear, relu, last = measure_layers(layers, torch.randn(samples, 6), [2, 8], rounds=2)
    assert (linear.parameter_bytes, relu.parameter_bytes, last.parameter_bytes) == (4 * 70, 0, 4 * 30)
    assert (linear.output_bytes, relu.output_bytes, last.output_bytes) == (40, 40, 12)
    # A linear layer keeps its input, ReLU its output, which is the next one's input and counts once.
    assert (linear.activation_bytes, relu.activation_bytes, last.activation_bytes) == (24, 40, 0)


def test_only_one_layer_is_in_memory_at_a_time() -> None:
    alive: list[int] = []
    most = 0

    class Counted(nn.Linear):
        def __init__(self) -> None:
            nonlocal most
            super().__init__(4, 4)
            alive.append(1)
            most = max(most, len(alive))

        def __del__(self) -> None:
            alive.pop()

    measures = measure_layers([Counted] * 5, torch.randn(4, 4), [4], rounds=2)
    assert len(measures) == 5
    assert most == 1


@pytest.mark.slow
def test_times_grow_with_the_work() -> None:
    small, large = measure_layers(
        # So much more that what a busy machine adds to either is little beside it.
        [lambda: nn.Linear(16, 16), lambda: nn.Sequential(nn.Linear(16, 2048), nn.Linear(2048, 2048))],
        torch.randn(64, 16),
        [8, 32, 64],
    )
    took = [one.forward_alpha_seconds + 64 * one.forward_beta_seconds for one in (small, large)]
    assert took[1] > took[0]
    assert all(one.forward_beta_seconds >= 0 for one in (small, large))


def test_backward_passes_add_to_gradients_and_the_optimisers_step_is_measured() -> None:
    """As in a step of several micro-batches."""
    added: list[bool] = []

    class Watched(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            added.append(self.weight.grad is not None)
            return super().forward(x)

    layers: list[Callable[[], nn.Module]] = [lambda: Watched(8, 8), nn.ReLU]
    optimizer = lambda parameters: torch.optim.Adam(parameters, lr=0.1)  # noqa: E731
    linear, relu = measure_layers(layers, torch.randn(4, 8), [2, 4], optimizer=optimizer)
    # What the layer passes on is found without a backward pass, and the first one makes the gradients.
    assert added == [False, False, *[True] * (len(added) - 2)]
    assert len(added) > 4
    assert linear.update_seconds > 0
    assert relu.update_seconds == 0
    assert linear.make_seconds > 0
    # Adam's two, and its count of steps, of each parameter.
    assert linear.optimizer_bytes == 2 * linear.parameter_bytes + 2 * 4
    assert relu.optimizer_bytes == 0


def test_tokens_and_tuples_pass() -> None:
    class Both(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x, x * 2

    class Sum(nn.Module):
        def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            return pair[0] + pair[1]

    layers: list[Callable[[], nn.Module]] = [lambda: nn.Embedding(11, 4), Both, Sum]
    measures = measure_layers(layers, torch.randint(0, 11, (6, 5)), [3, 6], rounds=2)
    assert [round(one.output_bytes) for one in measures] == [80, 160, 80]


def test_batches_that_are_too_small_are_refused() -> None:
    with pytest.raises(GeofedError, match="CONFIG_INVALID"):
        measure_layers(FACTORIES, torch.randn(4, 6), [8])


def test_names_are_those_of_the_whole() -> None:
    names = Layers.of(_sequential, 0).names
    assert names == ["first", "norm", "act", "middle", "last"]
    assert all(a != b for a, b in pairwise(names))


def test_what_was_measured_is_let_go_of() -> None:
    """Also where a layer's graph holds its own output, as that of relu does."""
    weights: list[weakref.ref[torch.Tensor]] = []

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.inner = nn.LayerNorm(8), nn.Linear(8, 8)
            weights.append(weakref.ref(self.inner.weight))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.relu(self.inner(self.norm(x)))

    measure_layers([Block, Block, Block], torch.zeros(4, 8), [2, 4])
    assert len(weights) == 3
    assert not any(weight() is not None for weight in weights)


def test_waiting_for_a_core_is_not_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may use the machine while a profile is made; what the layer itself waits for counts."""
    waited = iter([10.0, 10.75, 20.0, 99.0])
    clock = iter([1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 4.0, 4.0])
    monkeypatch.setattr(_measure, "_waited_seconds", lambda: next(waited))
    monkeypatch.setattr(_measure.time, "perf_counter", lambda: next(clock))
    assert _measure._Timer(torch.device("cpu")).seconds == 0.25
    assert _measure._Timer(torch.device("cpu")).seconds == 0.0, "never less than nothing"


def test_what_is_waited_while_looking_counts_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread loses its core between two looks, once at the beginning and once at the end."""
    waited = iter([10.0, 10.5, 10.5, 10.75])
    clock = iter([1.0, 1.5, 1.5, 1.5, 2.5, 2.75, 2.75, 2.75])
    monkeypatch.setattr(_measure, "_waited_seconds", lambda: next(waited))
    monkeypatch.setattr(_measure.time, "perf_counter", lambda: next(clock))
    assert _measure._Timer(torch.device("cpu")).seconds == 1.0


def test_what_waited_for_a_core_is_as_the_system_tells_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0.0 <= _measure._waited_seconds() <= _measure._waited_seconds()
    monkeypatch.setattr(_measure, "_quota", lambda: True)
    assert _measure._waited_seconds() == 0.0, "a quota holds it back in every run"
