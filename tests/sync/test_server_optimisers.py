"""The server optimisers, against torch's own where it has one, and against the papers' formulas, written coordinate by
coordinate."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from geofed_pb.errors import GeofedError
from sync.policy import Contribution, ModelAverage, Outer, policy_named
from sync.wan import policy_of

SIZE = 200
ADAPTIVE = ("fedadagrad", "fedadam", "fedyogi")


def deltas(seed: int) -> list[Contribution]:
    random = np.random.default_rng(seed)
    return [
        Contribution(name, weight, random.normal(scale=0.1, size=SIZE).astype(np.float32))
        for name, weight in (("a", 3.0), ("b", 1.0))
    ]


def mean(seed: int) -> np.ndarray:
    return sum(c.weight * c.delta.astype(np.float64) for c in deltas(seed)) / 4.0


def after(name: str, rounds: int, **settings: float) -> Outer:
    outer = Outer(np.zeros(SIZE, np.float32))
    for seed in range(rounds):
        outer = policy_of(name, settings).merge(outer.model, deltas(seed), outer.memory)
    return outer


def test_fedavgm_is_sgd_with_momentum_over_the_mean_change() -> None:
    parameter = torch.nn.Parameter(torch.zeros(SIZE))
    optimizer = torch.optim.SGD([parameter], lr=0.5, momentum=0.8)
    for seed in range(6):
        parameter.grad = -torch.from_numpy(mean(seed).astype(np.float32))
        optimizer.step()
    assert np.allclose(after("fedavgm", 6, lr=0.5, momentum=0.8).model, parameter.detach().numpy(), atol=1e-6)


@pytest.mark.parametrize("name", ADAPTIVE)
def test_the_adaptive_ones_are_algorithm_2_of_reddi_et_al(name: str) -> None:
    lr, beta1, beta2, tau = 0.02, 0.9, 0.95, 0.01
    settings = {"lr": lr, "beta1": beta1, "tau": tau} | ({"beta2": beta2} if name != "fedadagrad" else {})
    expected = [0.0] * SIZE
    first, second = [0.0] * SIZE, [tau * tau] * SIZE
    for seed in range(6):
        for at, d in enumerate(mean(seed)):
            first[at] = beta1 * first[at] + (1 - beta1) * d
            if name == "fedadagrad":
                second[at] += d * d
            elif name == "fedadam":
                second[at] = beta2 * second[at] + (1 - beta2) * d * d
            else:
                second[at] -= (1 - beta2) * d * d * math.copysign(1.0, second[at] - d * d)
            expected[at] += lr * first[at] / (math.sqrt(second[at]) + tau)
    assert np.allclose(after(name, 6, **settings).model, expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("name", [*ADAPTIVE, "fedavgm"])
def test_regions_get_the_same_bits_in_any_order_of_arrival(name: str) -> None:
    policy, first = policy_of(name), after(name, 3)
    one = policy.merge(first.model, deltas(9), first.memory)
    other = policy.merge(first.model, deltas(9)[::-1], first.memory)
    assert one.model.tobytes() == other.model.tobytes()
    assert {key: v.tobytes() for key, v in one.memory.items()} == {key: v.tobytes() for key, v in other.memory.items()}


def test_fedprox_averages_models() -> None:
    base = np.ones(SIZE, np.float32)
    assert np.array_equal(
        policy_of("fedprox", {"mu": 0.1}).merge(base, deltas(1), {}).model,
        ModelAverage().merge(base, deltas(1), {}).model,
    )
    assert policy_named("fedprox").proximal == "mu"


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("fedavgm", {"lr": 0.0}),
        ("fedavgm", {"momentum": 1.0}),
        ("fedadam", {"beta2": 1.0}),
        ("fedyogi", {"tau": 0.0}),
        ("fedadagrad", {"beta2": 0.9}),
        ("fedprox", {"mu": -1.0}),
        ("fedprox", {"mu": float("nan")}),
        ("fedadam", {"lr": float("inf")}),
    ],
)
def test_settings_are_checked(name: str, settings: dict[str, float]) -> None:
    with pytest.raises(GeofedError, match="CONFIG_INVALID"):
        policy_of(name, settings)
