"""The outer optimiser, against torch's own, and its memory on disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from geofed_pb.errors import GeofedError
from sync.policy import Contribution, DiLoCo, ModelAverage, Outer
from sync.ps.core.actions import MergeUpdates
from sync.ps.core.machine import Setup
from sync.ps.execution.replica import ReplicaState
from sync.ps.execution.storage import Storage
from sync.wan import policy_of

SIZE = 1000


def deltas(seed: int) -> list[Contribution]:
    random = np.random.default_rng(seed)
    return [
        Contribution(name, weight, random.normal(size=SIZE).astype(np.float32))
        for name, weight in (("a", 3.0), ("b", 1.0))
    ]


def test_it_is_sgd_with_nesterov_momentum_over_the_mean_change() -> None:
    parameter = torch.nn.Parameter(torch.zeros(SIZE))
    optimizer = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True)
    outer = Outer(np.zeros(SIZE, np.float32))
    for seed in range(8):
        outer = DiLoCo().merge(outer.model, deltas(seed), outer.memory)
        weighted = sum(c.weight * c.delta for c in deltas(seed)) / 4.0
        parameter.grad = -torch.from_numpy(np.asarray(weighted, np.float32))
        optimizer.step()
    assert np.allclose(outer.model, parameter.detach().numpy(), atol=1e-4)


def test_without_momentum_it_is_model_averaging() -> None:
    base = np.ones(SIZE, np.float32)
    plain, outer = ModelAverage().merge(base, deltas(1), {}), DiLoCo(lr=1.0, momentum=0.0).merge(base, deltas(1), {})
    assert np.array_equal(plain.model, outer.model)


def test_every_region_computes_the_same_bits() -> None:
    first = DiLoCo().merge(np.ones(SIZE, np.float32), deltas(1), {})
    one = DiLoCo().merge(first.model, deltas(2), first.memory)
    other = DiLoCo().merge(first.model, deltas(2)[::-1], first.memory)
    assert one.model.tobytes() == other.model.tobytes()
    assert one.memory["velocity"].tobytes() == other.memory["velocity"].tobytes()


def test_settings() -> None:
    assert isinstance(policy_of("diloco", {"lr": 0.5, "momentum": 0.8}), DiLoCo)
    for lr, momentum in ((0.0, 0.9), (11.0, 0.9), (0.7, 1.0), (0.7, -0.1)):
        with pytest.raises(GeofedError, match="CONFIG_INVALID"):
            DiLoCo(lr, momentum)


def test_its_memory_is_stored_with_the_model_and_a_damaged_one_does_not_count(tmp_path: Path) -> None:
    setup = Setup("a", ("a",), workers=1, rounds=3, steps_per_round=1, evaluate_every=0)
    storage = Storage(tmp_path, setup)
    model, velocity = np.ones(SIZE, np.float32), np.full(SIZE, 2.0, np.float32)
    storage.keep_checkpoint(
        ReplicaState(model, model, None, {"velocity": velocity}), MergeUpdates(1, (), 1, 1.0, 0, version=1)
    )
    recovered, numbers, _ = Storage(tmp_path, setup).recover()
    assert recovered.sequence == 1
    assert numbers is not None
    assert np.array_equal(numbers.memory["velocity"], velocity)

    (checkpoint,) = tmp_path.glob("checkpoint-1-*")
    damaged = bytearray(checkpoint.read_bytes())
    damaged[-1] ^= 0xFF
    checkpoint.write_bytes(damaged)
    with pytest.raises(GeofedError, match="STATE_INVALID"):
        Storage(tmp_path, setup).recover()
