"""All modules of the zoo as one model, trained by real workers: what the job makes of it against one plain process."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import safetensors.torch
import torch
from support import zoo
from support.running import Running
from torch import nn

from sync.seeding import seed_all
from tests.e2e.conftest import NUMBERS, PAIR, numbers

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

STEPS, SEED = 12, 5
RATE = 0.05
BOUNDS = {"rtol": 1e-4, "atol": 1e-5}
TASK = """

import zlib

import torch
import zoo
from torch import nn
from torch.utils.data import TensorDataset


class Zoo(nn.Module):
    def __init__(self):
        super().__init__()
        self.kinds = nn.ModuleList(make() for make in zoo.MODULES.values())


def model(config):
    return Zoo()


def dataset(uri, split, config):
    return TensorDataset(*torch.load(uri))


def optimizer(parameters, config):
    return torch.optim.SGD(parameters, lr=config["lr"])


def loss(model, batch):
    return sum(zoo.loss(kind, batch).float() for kind in model.kinds)


def metrics(model, batches):
    states = [kind.state_dict() for kind in model.kinds]
    told = {name: crc(state) for name, state in zip(zoo.MODULES, states) if name not in zoo.WIDE}
    return told | {"size": sum(float(parameter.abs().sum()) for parameter in model.parameters())}


def crc(state):
    return float(zlib.crc32(b"".join(bits(state[name]) for name in sorted(state))))


def bits(tensor):
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
"""


@pytest.fixture
def running(running_pair: Running) -> Running:
    return running_pair


@pytest.fixture
def task(running: Running, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The job's task module, as this process sees it."""
    folder = running.job_folder(TASK)
    shutil.copy(str(zoo.__file__), folder / "zoo.py")
    monkeypatch.setitem(sys.modules, "zoo", zoo)
    spec = importlib.util.spec_from_file_location("zoo_task", folder / "task.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _trained(running: Running, tmp_path: Path, *settings: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Run the job; what it tells of itself, and its model."""
    job = running.submit(
        "data.dataset=numbers", f"task.config={{lr: {RATE}}}", f"train.batch={NUMBERS // 2}", f"train.seed={SEED}",
        "train.workers=2", f"train.end={{steps: {STEPS}}}", "train.evaluateEvery=0", "wan.interval=2", *settings,
        task=TASK,
    )  # fmt: skip
    described = running.wait_end(job)
    assert described["state"] == "succeeded", described["error"]
    file = tmp_path / "model.safetensors"
    running.federation.control_plane("export", job, "--output-file", str(file))
    return described, safetensors.torch.load_file(file)


def _constants(module: nn.Module) -> dict[str, torch.Tensor]:
    """Tensors of the state that are in no parameter's memory."""
    trained = {parameter.data_ptr() for parameter in module.parameters()}
    return {name: tensor for name, tensor in module.state_dict().items() if tensor.data_ptr() not in trained}


def _halves_merge(task: ModuleType, name: str, data: tuple[torch.Tensor, torch.Tensor]) -> bool:
    """Whether torch itself makes the same gradient of a batch and, as a mean, of its halves, and changes no buffer and
    draws no random number. Of such a module several workers must make what one makes."""
    torch.manual_seed(SEED)
    module = zoo.MODULES[name]()
    before = {key: task.bits(value) for key, value in _constants(module).items()}
    random = torch.get_rng_state()

    def gradients(*rows: torch.Tensor) -> list[torch.Tensor]:
        module.zero_grad()
        for some in rows:
            (zoo.loss(module, (data[0][some], data[1][some])) / len(rows)).backward()
        return [p.grad.to_dense() for p in module.parameters() if p.grad is not None]

    every = torch.arange(NUMBERS)
    even, odd = every[::2], every[1::2]
    whole, halves, swapped = gradients(every), gradients(even, odd), gradients(even.flip(0), odd.flip(0))
    return (
        len(whole) == len(halves) == len(swapped)
        and all(torch.allclose(one, other, rtol=1e-4, atol=1e-6) for one, other in zip(whole, halves, strict=True))
        and all(torch.allclose(one, other, rtol=1e-4, atol=1e-6) for one, other in zip(halves, swapped, strict=True))
        and before == {key: task.bits(value) for key, value in _constants(module).items()}
        and torch.equal(random, torch.get_rng_state())
    )


@pytest.mark.parametrize("collective", ["server-reduce", "all-reduce"])
def test_two_workers_make_of_a_model_what_one_process_makes(
    running: Running, task: ModuleType, tmp_path: Path, collective: str
) -> None:
    _, state = _trained(running, tmp_path, f"regions.use=[{PAIR[0]}]", f"collective={collective}")
    seed_all(SEED)
    plain = task.model({})
    optimizer = task.optimizer(plain.parameters(), {"lr": RATE})
    data = numbers(PAIR[0])
    for _ in range(STEPS):
        optimizer.zero_grad(set_to_none=True)
        task.loss(plain.train(), data).backward()
        optimizer.step()
    assert state.keys() == plain.state_dict().keys()
    alike = [name for name in zoo.MODULES if _halves_merge(task, name, data)]
    assert len(alike) >= 40
    for number, name in enumerate(zoo.MODULES):
        if name in alike:
            for key, tensor in plain.kinds[number].state_dict().items():
                found = state[f"kinds.{number}.{key}"]
                assert found.dtype == tensor.dtype, name
                if key not in _constants(plain.kinds[number]):
                    bounds = {"rtol": 2e-2, "atol": 1e-2} if tensor.dtype == torch.bfloat16 else BOUNDS
                    torch.testing.assert_close(found, tensor, msg=partial("{}: {}".format, name), **bounds)
                else:
                    assert task.bits(found) == task.bits(tensor), f"{name}: a constant keeps every bit"


def test_in_the_background_the_regions_evaluate_what_is_exported_but_for_rounding(
    running: Running, task: ModuleType, tmp_path: Path
) -> None:
    described, state = _trained(running, tmp_path, "wan.exchange=background", "wan.codec=fp32")
    model = task.model({})
    unloadable = f"kinds.{list(zoo.MODULES).index('buffer: expanded')}."  # torch itself cannot load into one
    missing, unexpected = model.load_state_dict(
        {name: tensor for name, tensor in state.items() if not name.startswith(unloadable)}, strict=False
    )
    assert not unexpected
    assert all(name.startswith(unloadable) for name in missing)
    exported = {
        name: task.crc({key: tensor for key, tensor in state.items() if key.startswith(f"kinds.{number}.")})
        for number, name in enumerate(zoo.MODULES)
        if name not in zoo.WIDE
    }
    told = {part["region"]: part["metrics"] for part in described["partitions"]}
    (publisher,) = [event["region"] for event in running.events(described["id"]) if event["kind"] == "job.publishing"]
    size = told[publisher].pop("size")
    assert told[publisher] == exported
    assert [metrics["size"] for region, metrics in told.items() if region != publisher] == [pytest.approx(size, 1e-5)]
