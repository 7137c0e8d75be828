"""Compiled calls of the model: the same training and names, in every slice, and errors that name the compiler."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from support.compiler import NEEDS_COMPILER
from support.exchange_in_process import Federation
from torch._dynamo.utils import counters
from torch._inductor import config as inductor

from geofed_pb.errors import GeofedError
from region_agent.worker import loop
from region_agent.worker.compiling import check_compiler, compile_calls
from tests.region_agent.worker.test_profiling import profiled

# Of torch's own imports.
pytestmark = [
    NEEDS_COMPILER,
    pytest.mark.processes,
    # The compiler takes half a minute on two free cores, and much longer on busy ones.
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore::FutureWarning"),
]

TASK = """
import torch
from torch import nn
from torch.utils.data import TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 16, bias=False), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 2))

    def forward(self, x):
        return self.body(x), torch.full((), 1.0 if torch.compiler.is_compiling() else 0.0)


def model(config):
    return Net()


def dataset(uri, split, config):
    x = torch.randn(21, 4, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x[:, :2] - x[:, 2:])


def loss(model, batch):
    return nn.functional.mse_loss(model(batch[0])[0], batch[1])


def optimizer(parameters, config):
    return torch.optim.AdamW(parameters, lr=0.01)


def metrics(model, batches):
    return {"compiled": float(min(model(x)[1] for x, _ in batches))}
"""


@pytest.fixture(autouse=True)
def as_in_a_new_process() -> Iterator[None]:
    """Whether there is a compiler is found once in a process, and torch reads the number of its threads once."""
    check_compiler.cache_clear()
    with inductor.patch({"compile_threads": 1, "cpp.vec_isa_ok": None}):
        yield
    check_compiler.cache_clear()


def _trained(folder: Path, monkeypatch: Any, task: str = TASK, **fields: Any) -> tuple[dict[str, torch.Tensor], float]:
    federation = Federation(folder, ("east",), steps_per_round=3, rounds=3)
    monkeypatch.setattr(loop, "PsClient", federation.client)
    federation.train(task, {}, seed=5, batch=8, at_once=4, **fields)
    return safetensors.torch.load(federation.exported()), federation.metrics["east"]["compiled"]


def test_a_compiled_job_trains_what_a_plain_one_does_in_every_slice(tmp_path: Path, monkeypatch: Any) -> None:
    plain, compiled = _trained(tmp_path / "plain", monkeypatch, slice_seconds=100.0)
    assert compiled == 0.0
    # Nine slices: more than torch's limit of versions of the same code in one process, which is 8.
    sliced, compiled = _trained(tmp_path / "sliced", monkeypatch, slice_seconds=1e-3, compile=True)
    assert compiled == 1.0
    whole, compiled = _trained(tmp_path / "whole", monkeypatch, slice_seconds=100.0, compile=True)
    assert compiled == 1.0
    assert plain.keys() == sliced.keys() == whole.keys()
    for name, tensor in plain.items():
        assert torch.equal(sliced[name], whole[name]), name
        assert torch.allclose(whole[name], tensor, atol=1e-4), name


def test_two_ranks_compile_the_model_they_share(tmp_path: Path, monkeypatch: Any) -> None:
    task = TASK.replace("nn.BatchNorm1d(16), ", "")
    plain, _ = _trained(tmp_path / "plain", monkeypatch, task, slice_seconds=100.0)
    both, compiled = _trained(
        tmp_path / "both", monkeypatch, task, slice_seconds=100.0, compile=True, devices=("cpu", "cpu")
    )
    assert compiled == 1.0
    for name, tensor in plain.items():
        assert torch.allclose(both[name], tensor, atol=1e-4), name


def test_modules_of_one_class_share_what_is_compiled() -> None:
    """Also torch's own classes, whose frames torch does not trace from outside."""
    counters.clear()
    for width in (4, 4, 8):
        module = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Tanh())
        compile_calls(module)
        module(torch.ones(3, 4)).sum().backward()
        assert module[0].weight.grad is not None
    assert counters["stats"]["unique_graphs"] == 2, "one for each shape"


def test_a_profile_times_compiled_steps(tmp_path: Path) -> None:
    told, _ = profiled(tmp_path, TASK, samples=21, measure="pace", limit_seconds=2.0, compile=True)
    assert told.status == "done"
    assert all(0 < step.seconds < 1 for step in told.steps), "a step without the time of the compiler"


def test_a_worker_without_a_compiler_says_so_before_the_job(tmp_path: Path) -> None:
    with inductor.patch({"cpp.cxx": (None, "no-such-compiler"), "fx_graph_cache": False}):
        with pytest.raises(GeofedError, match=r"torch\.compile cannot be used here: .*C\+\+ compiler") as caught:
            check_compiler(tmp_path / "compiled", torch.device("cpu"))
        assert caught.value.code == "TASK_FAILED"
        assert caught.value.hint.startswith("the region's workers need g++ or clang")
        told, _ = profiled(tmp_path, measure="size", compile=True)
        assert (told.status, told.code) == ("failed", "TASK_FAILED")


def test_an_error_of_the_compiled_model_is_the_tasks(tmp_path: Path) -> None:
    task = TASK.replace("return self.body(x), ", "return self.body(x[:, :3]), ")
    told, _ = profiled(tmp_path, task, samples=21, measure="pace", limit_seconds=2.0, compile=True)
    assert (told.status, told.code) == ("failed", "TASK_FAILED")
    assert "task.py:" in told.message, told.message
