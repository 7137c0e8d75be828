"""Two ranks that hold a part of the model each: their job makes the model that two ranks with whole models make."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from support.exchange_in_process import Federation
from support.jobs import call, invocation

from region_agent.worker import handler, loop
from region_agent.worker.invocation import Outcome, Schedule

pytestmark = pytest.mark.processes

STEPS, ROUNDS, BATCH, SEED = 3, 2, 8, 5
GPUS = torch.cuda.device_count() > 1
TWO = ("cuda:0", "cuda:1") if GPUS else ("cpu", "cpu")
RTOL, ATOL = (1e-4, 1e-5) if GPUS else (2e-6, 5e-7)
"""Gradients are averaged in another order than those of whole models are."""

TASK = """
import torch
from torch import nn
from torch.utils.data import TensorDataset


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 6))
        self.norm = nn.LayerNorm(6)

    def forward(self, x):
        return x + self.inner(self.norm(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.names = nn.Embedding(8, 6)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.blocks[1].requires_grad_(False)
        self.recurrent = nn.LSTM(6, 6, batch_first=True)
        self.unused = nn.Linear(6, 5)
        self.head = nn.Linear(6, 8, bias=False)
        self.head.weight = self.names.weight
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("table", torch.arange(6.0), persistent=False)

    def forward(self, x):
        if self.training:
            self.seen += 1
        x = self.names(x) + self.table
        for block in self.blocks:
            x = block(x)
            x += 0.01
        return self.head(self.recurrent(x)[0])


def model(config):
    return Net()


def dataset(uri, split, config):
    x = torch.randint(8, (29, 5), generator=torch.Generator().manual_seed(1))
    return TensorDataset(x[:, :-1], x[:, 1:])


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]).float().flatten(0, 1), batch[1].flatten())


def optimizer(parameters, config):
    return OPTIMIZER
"""
SGD = "torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.1)"
ADAM = "torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)"
GROUPS = "torch.optim.Adam([{'params': list(parameters)[4:], 'lr': 0.01}], amsgrad=True)"
SCHEDULE = """

def schedule(optimizer, config):
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
"""
METRICS = """

def metrics(model, batches):
    with torch.no_grad():
        found = [(model(x).argmax(-1) == y).float().mean() for x, y in batches]
    return {"right": float(torch.stack(found).mean())}
"""


def _trained(task: str, folder: Path, monkeypatch: Any, **fields: Any) -> tuple[dict[str, torch.Tensor], Federation]:
    """The job's model, and its regions."""
    federation = Federation(folder, ("east",), steps_per_round=STEPS, rounds=ROUNDS)
    monkeypatch.setattr(loop, "PsClient", federation.client)
    federation.train(task, {}, **{"seed": SEED, "batch": BATCH, "slice_seconds": 100.0, "devices": TWO, **fields})
    return safetensors.torch.load(federation.exported()), federation


@pytest.mark.parametrize(
    ("optimizer", "more", "fields"),
    [
        (SGD, "", {"clip_norm": 0.05, "schedule": Schedule(shape="cosine", warmup=0.3)}),
        (ADAM, SCHEDULE + METRICS, {"batch": 7, "at_once": 3}),
        (GROUPS, "", {"batch": 1, "keeps_base": True}),
        (ADAM, "", {"local": ("recurrent.*",), "keeps_base": True, "slice_seconds": 1e-3}),
        (SGD, "", {"precision": "bf16"}),
    ],
    ids=["momentum, clipped", "adam, accumulated", "one sample, base", "slices, local, base", "bf16"],
)
def test_ranks_with_parts_of_the_model_make_the_model_of_ranks_with_whole_ones(
    optimizer: str, more: str, fields: dict[str, Any], tmp_path: Path, monkeypatch: Any
) -> None:
    task = TASK.replace("OPTIMIZER", optimizer) + more
    whole, one = _trained(task, tmp_path / "whole", monkeypatch, **fields)
    parts, other = _trained(task, tmp_path / "parts", monkeypatch, sharding="fsdp", **fields)
    rough = "precision" in fields
    assert set(parts) == set(whole)
    for name, tensor in whole.items():
        torch.testing.assert_close(parts[name], tensor, rtol=0.05 if rough else RTOL, atol=5e-3 if rough else ATOL)
    assert other.metrics["east"] == pytest.approx(one.metrics["east"], rel=0.01 if rough else 1e-5)


COUNTS = """
import os
import pathlib


class Counted(torch.optim.AdamW):
    def step(self):
        super().step()
        held = [one for group in self.param_groups for p in group["params"]
                for one in (p.detach(), p.grad, *self.state[p].values()) if isinstance(one, torch.Tensor)]
        parts = [one.to_local() if hasattr(one, "to_local") else one for one in held]
        # Gradients of a unit are in one storage.
        memory = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in parts}
        path = pathlib.Path(config["folder"], str(torch.distributed.get_rank()))
        path.write_text(str(sum(memory.values())))
"""


def test_each_rank_holds_half_of_parameters_gradients_and_optimiser_state(tmp_path: Path, monkeypatch: Any) -> None:
    held = {}
    for sharding in ("none", "fsdp"):
        (folder := tmp_path / sharding).mkdir()
        counts = COUNTS.replace('config["folder"]', repr(str(folder)))
        task = TASK.replace("OPTIMIZER", "Counted(parameters, lr=0.01)") + counts
        _trained(task, tmp_path / f"job-{sharding}", monkeypatch, sharding=sharding)
        held[sharding] = {one.name: int(one.read_text()) for one in folder.iterdir()}
    (whole,) = held["none"].values()
    assert set(held["fsdp"]) == {"0", "1"}
    # Rows of small tensors are not divided evenly, and each parameter's number of steps is whole.
    assert all(0.4 * whole < one < 0.55 * whole for one in held["fsdp"].values()), (whole, held)


def _refused(task: str, folder: Path, monkeypatch: Any, **fields: Any) -> Outcome:
    federation = Federation(folder, ("east",), steps_per_round=STEPS, rounds=ROUNDS)
    monkeypatch.setattr(loop, "PsClient", federation.client)
    (folder / "data.bin").write_bytes(b"x")
    place = federation.regions["east"].place
    more = {"seed": SEED, "region_batch": BATCH, "devices": TWO, "sharding": "fsdp", **fields}
    outcome = call(invocation(place, task, folder / "data.bin", **more))
    handler._drop_loaded()
    # The error that an invocation ended with refers to modules, and these to the group.
    gc.collect()
    return outcome


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("self.scale = nn.Parameter(torch.ones(()))", "parameter scale of the model is of no dimension"),
        ("self.more = nn.Embedding(8, 6, sparse=True)", "more, an embedding whose gradients are sparse"),
        ("self.turned = nn.Parameter(torch.ones(3, 4).t())", "parameter turned of the model is not contiguous"),
        ("self.wide = nn.Linear(2, 2).double()", "trained parameters of torch.float32 and torch.float64"),
        ("self.kept = [self.unused.weight]", "parameter unused.weight of the model is kept in an attribute"),
        ("self.same = nn.Parameter(self.unused.weight.detach())", "memory, which cannot be sharded"),
        ("self.register_buffer('view', self.unused.weight.detach())", "memory, which cannot be sharded"),
    ],
)
def test_what_a_model_holds_that_cannot_be_divided_is_refused(
    line: str, told: str, tmp_path: Path, monkeypatch: Any
) -> None:
    task = TASK.replace("OPTIMIZER", ADAM).replace("        self.unused = nn.Linear(6, 5)\n", f"""\
        self.unused = nn.Linear(6, 5)
        {line}
""")  # fmt: skip
    outcome = _refused(task, tmp_path, monkeypatch)
    assert (outcome.status, outcome.code) == ("failed", "TASK_INVALID"), outcome
    assert told in outcome.message


LARGE_STATE = """

class Own(torch.optim.SGD):
    def step(self):
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["norms"] = torch.ones(3)
"""
ADAFACTOR = """

Own = torch.optim.Adafactor
"""
LOADING = """

class Own(torch.optim.SGD):
    def load_state_dict(self, state):
        super().load_state_dict(state)
"""


@pytest.mark.parametrize(
    ("more", "fields", "code", "told"),
    [
        (LARGE_STATE, {}, "TASK_INVALID", "the optimiser's state 'norms' cannot be divided among ranks: Own"),
        (LOADING, {}, "TASK_INVALID", "with Own, which loads its state by code of its own"),
        ("\n\ndef on_round(model, completed):\n    pass\n", {}, "TASK_INVALID", "a task that defines on_round"),
        (ADAFACTOR, {}, "TASK_FAILED", "the optimiser's step raised RuntimeError"),
        ("", {"workers": 2}, "CONFIG_INVALID", "needs one worker in a region, and east has 2"),
    ],
    ids=["state of another shape", "loading", "on_round", "factors", "two workers"],
)
def test_what_cannot_be_done_in_parts_is_refused(
    more: str, fields: dict[str, Any], code: str, told: str, tmp_path: Path, monkeypatch: Any
) -> None:
    optimizer = ADAM if "on_round" in more or not more else "Own(parameters, lr=0.1)"
    outcome = _refused(TASK.replace("OPTIMIZER", optimizer) + more, tmp_path, monkeypatch, **fields)
    assert (outcome.status, outcome.code) == ("failed", code), outcome
    assert told in outcome.message


OTHER = "if torch.distributed.get_rank() == 1 and model.seen >= 2: "
FAULTS = """
import os

with_loss = loss


def loss(model, batch):
    LOSS
    return with_loss(model, batch)


class Own(torch.optim.SGD):
    def step(self):
        STEP
        super().step()


def metrics(model, batches):
    METRICS
    return {}
"""


@pytest.mark.parametrize(
    ("where", "fault", "code", "told"),
    [
        ("LOSS", OTHER + "raise KeyError('on the other')", "TASK_FAILED", "loss raised KeyError: 'on the other'"),
        ("LOSS", OTHER + "os.kill(os.getpid(), 9)", "FUNCTION_OUT_OF_MEMORY", "a rank of the worker was killed"),
        ("STEP", "if torch.distributed.get_rank() == 1: raise KeyError('in a step')", "TASK_FAILED", "'in a step'"),
        ("METRICS", "raise KeyError('of the test')", "TASK_FAILED", "metrics raised KeyError: 'of the test'"),
    ],
)
def test_what_a_rank_with_a_part_fails_with_is_the_invocations_error(
    where: str, fault: str, code: str, told: str, tmp_path: Path, monkeypatch: Any
) -> None:
    faults = FAULTS.replace(where, fault).replace("LOSS", "").replace("STEP", "").replace("METRICS", "")
    task = TASK.replace("OPTIMIZER", "Own(parameters, lr=0.1)") + faults
    begun = time.monotonic()
    outcome = _refused(task, tmp_path, monkeypatch)
    assert (outcome.status, outcome.code) == ("failed", code), outcome
    assert told in outcome.message
    assert time.monotonic() - begun < 100, "no exchange is waited for"


def test_a_model_that_needs_values_to_be_made_is_made_whole_by_each_rank(tmp_path: Path, monkeypatch: Any) -> None:
    task = TASK.replace("OPTIMIZER", ADAM).replace(
        "        self.unused = nn.Linear(6, 5)\n",
        "        self.unused = nn.Linear(6, 5)\n        self.slopes = [float(self.unused.weight.detach().sum())]\n",
    )
    whole, _ = _trained(task, tmp_path / "whole", monkeypatch)
    parts, _ = _trained(task, tmp_path / "parts", monkeypatch, sharding="fsdp")
    for name, tensor in whole.items():
        torch.testing.assert_close(parts[name], tensor, rtol=RTOL, atol=ATOL)
