"""What a job makes of a model is what one plain process makes of it, however it is cut into invocations; and what is
exported is what was evaluated."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from support import zoo
from support.exchange_in_process import Federation
from torch import nn

from region_agent.worker import loop
from region_agent.worker.data.shard import BatchStream
from sync.device import device
from sync.seeding import reseed, seed_all

pytestmark = pytest.mark.slow
STEPS, ROUNDS, BATCH, SEED = 3, 3, 8, 5

TASK = """
import zlib
import torch
from torch.utils.data import TensorDataset
from support import zoo

loss = zoo.loss


def model(config):
    return zoo.MODULES[config["module"]]()


def dataset(uri, split, config):
    drawn = torch.Generator().manual_seed(config["data"][uri.rsplit("/", 1)[-1]])
    x = torch.randn(21, 4, generator=drawn)
    return TensorDataset(x, x[:, :2] - x[:, 2:])


def optimizer(parameters, config):
    return zoo.OPTIMIZERS[config["optimizer"]](parameters)


def metrics(model, batches):
    return {"state": float(zoo_state(model))}


def zoo_state(model):
    crc = 0
    for name, tensor in sorted(model.state_dict().items()):
        crc = zlib.crc32(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(), crc)
    return crc
"""


def _crc(state: dict[str, torch.Tensor]) -> int:
    crc = 0
    for _, tensor in sorted(state.items()):
        crc = zlib.crc32(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(), crc)
    return crc


def _samples(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(21, 4, generator=torch.Generator().manual_seed(seed))
    return x, x[:, :2] - x[:, 2:]


def _plain(module_name: str, optimizer_name: str) -> nn.Module:
    """One process, and nothing of ours but the order of the samples and the seeds of the steps."""
    seed_all(SEED)
    module = zoo.MODULES[module_name]().to(device(0))
    optimizer = zoo.OPTIMIZERS[optimizer_name](module.parameters())
    x, y = (part.to(device(0)) for part in _samples(1))
    stream = BatchStream(range(len(x)), SEED, "east", 0, 1, BATCH)
    for step in range(1, STEPS * ROUNDS + 1):
        reseed(SEED, zlib.crc32(b"east"), 0, step)
        module.train()
        optimizer.zero_grad(set_to_none=True)
        rows = torch.tensor(stream.indices(step))
        zoo.loss(module, (x[rows], y[rows])).backward()
        optimizer.step()
    return module


def _run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    module: str,
    optimizer: str,
    slice_seconds: float,
    *regions: str,
    rounds: int = ROUNDS,
) -> Federation:
    federation = Federation(tmp_path, regions or ("east",), steps_per_round=STEPS, rounds=rounds)
    monkeypatch.setattr(loop, "PsClient", federation.client)
    config: dict[str, Any] = {"module": module, "optimizer": optimizer, "data": {}}
    for number, region in enumerate(federation.regions, 1):
        config["data"][f"{region}.bin"] = number
    federation.train(TASK, config, seed=SEED, batch=BATCH, slice_seconds=slice_seconds)
    return federation


def _assert_same(found: dict[str, torch.Tensor], expected: nn.Module, *, wide: bool) -> None:
    state = expected.state_dict()
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        assert found[name].dtype == tensor.dtype, name
        if wide:
            torch.testing.assert_close(found[name], tensor.cpu(), rtol=1e-6, atol=1e-6)
            continue
        one, other = (t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in (found[name], tensor))
        assert torch.equal(one, other), f"{name}: {found[name]} is not {tensor}"


@pytest.mark.parametrize("slice_seconds", [1e-3, 100.0], ids=["a step a slice", "one slice"])
@pytest.mark.parametrize("module", zoo.MODULES)
def test_a_module_becomes_what_one_process_makes_of_it(
    module: str, slice_seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer = "sgd, momentum" if "sparse" in module else "adamw" if module != "tied by data" else "sgd"
    optimizer = "sgd" if module == "a buffer that is a parameter's memory" else optimizer
    federation = _run(tmp_path, monkeypatch, module, optimizer, slice_seconds)
    exported = safetensors.torch.load(federation.exported())
    _assert_same(exported, _plain(module, optimizer), wide=module in zoo.WIDE)
    assert federation.metrics == {"east": {"state": float(_crc(exported))}}, "what is exported was evaluated"


@pytest.mark.parametrize(
    ("optimizer", "module"),
    [
        (optimizer, module)
        for optimizer in zoo.OPTIMIZERS
        for module in ("mlp", "never used", "bfloat16")
        if module != "bfloat16" or "eight-bit" not in optimizer
    ],
)
def test_an_optimiser_goes_on_from_slice_to_slice(
    module: str, optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = _run(tmp_path, monkeypatch, module, optimizer, 1e-3)
    _assert_same(safetensors.torch.load(federation.exported()), _plain(module, optimizer), wide=False)


@pytest.mark.parametrize("module", zoo.MODULES)
def test_with_two_regions_what_is_exported_is_what_both_evaluate(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = _run(tmp_path, monkeypatch, module, "sgd", 1e-3, "east", "west", rounds=2)
    exported = safetensors.torch.load(federation.exported())
    if module != "buffer: expanded":  # torch itself cannot load into one
        zoo.MODULES[module]().load_state_dict(exported, strict=True)
    if module not in zoo.WIDE:
        assert federation.metrics == {region: {"state": float(_crc(exported))} for region in ("east", "west")}
    assert all(not torch.isnan(t).any() for n, t in exported.items() if t.is_floating_point() and n != "kept")


def _averaged(states: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([one[name].double() for one in states]).mean(0) for name in states[0]}


def test_the_mean_of_two_regions_is_the_mean_of_their_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers that are assigned again too."""
    federation = _run(tmp_path, monkeypatch, "buffers assigned again", "sgd", 1e-3, "east", "west")
    exported = safetensors.torch.load(federation.exported())
    seed_all(SEED)
    common = zoo.MODULES["buffers assigned again"]()
    for round_ in range(ROUNDS):
        ends = []
        for number, region in enumerate(("east", "west"), 1):
            module = zoo.MODULES["buffers assigned again"]()
            module.load_state_dict(common.state_dict())
            optimizer = zoo.OPTIMIZERS["sgd"](module.parameters())
            x, y = _samples(number)
            stream = BatchStream(range(len(x)), SEED, region, 0, 1, BATCH)
            for step in range(round_ * STEPS + 1, (round_ + 1) * STEPS + 1):
                optimizer.zero_grad(set_to_none=True)
                rows = torch.tensor(stream.indices(step))
                zoo.loss(module.train(), (x[rows], y[rows])).backward()
                optimizer.step()
            ends.append(module.state_dict())
        common.load_state_dict(_averaged(ends))
    for name, tensor in common.state_dict().items():
        torch.testing.assert_close(exported[name], tensor, rtol=1e-5, atol=1e-6)
    assert int(exported["seen"]) == STEPS * ROUNDS * BATCH


def test_the_zoo_is_large() -> None:
    assert len(zoo.MODULES) >= 40
    assert len(zoo.OPTIMIZERS) >= 40
