"""Two ranks of one worker: their job makes the model that one device makes of the same samples."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import safetensors.torch
import torch
from support.exchange_in_process import Federation
from support.jobs import call, invocation
from support.processes import running_as

from geofed_pb.errors import GeofedError
from geofed_pb.v1 import worker_pb2
from region_agent.worker import handler, loop
from region_agent.worker.invocation import Outcome, Schedule
from region_agent.worker.ranks import group
from region_agent.worker.ranks.devices import devices_seen

pytestmark = pytest.mark.processes

STEPS, ROUNDS, BATCH, SEED = 3, 2, 8, 5
GPUS = torch.cuda.device_count() > 1
TWO = ("cuda:0", "cuda:1") if GPUS else ("cpu", "cpu")
RTOL, ATOL = (1e-4, 1e-5) if GPUS else (1e-6, 2e-7)
"""GPUs add up in another order than one of them does."""

TASK = """
import torch
from torch import nn
from torch.utils.data import TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.names = nn.Embedding(8, 4, sparse=SPARSE)
        self.first, self.frozen = nn.Linear(4, 16), nn.Linear(16, 16)
        self.frozen.requires_grad_(False)
        self.norm = nn.LayerNorm(16)
        self.unused = nn.Linear(16, 16)
        self.last = nn.Linear(16, 2)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.seen += 1
        names = self.names((x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long())
        hidden = torch.tanh(self.frozen(torch.relu(self.first(x + names))))
        return self.last(self.norm(hidden))


def model(config):
    return Net()


def dataset(uri, split, config):
    x = torch.randn(29, 4, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x[:, :2] - x[:, 2:])


def loss(model, batch):
    out = model(batch[0])
    mse = nn.functional.mse_loss(out.float(), batch[1])
    return {"mse": mse, "size": 0.01 * out.float().square().mean()}


def optimizer(parameters, config):
    return OPTIMIZER
"""
SGD = "torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.1)"
ADAM = "torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)"
SCHEDULE = """

def schedule(optimizer, config):
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
"""


def _task(optimizer: str = ADAM, *, sparse: bool = False) -> str:
    return TASK.replace("OPTIMIZER", optimizer).replace("SPARSE", str(sparse))


def _trained(task: str, folder: Path, monkeypatch: Any, **fields: Any) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The job's model, and the loss of each round."""
    federation, losses = Federation(folder, ("east",), steps_per_round=STEPS, rounds=ROUNDS), dict[int, float]()
    monkeypatch.setattr(loop, "PsClient", federation.client)
    region = federation.regions["east"]
    merge = region.boundary

    def boundary(request: worker_pb2.BoundaryRequest) -> worker_pb2.BoundaryReply:
        losses[request.round] = request.loss
        return merge(request)

    monkeypatch.setattr(region, "boundary", boundary)
    federation.train(task, {}, **{"seed": SEED, "batch": BATCH, "slice_seconds": 100.0, **fields})
    return safetensors.torch.load(federation.exported()), list(losses.values())


@pytest.mark.parametrize(
    ("task", "fields"),
    [
        (_task(SGD), {"clip_norm": 0.05, "schedule": Schedule(shape="cosine", warmup=0.3)}),
        (_task(ADAM) + SCHEDULE, {"batch": 7, "at_once": 3}),
        (_task("torch.optim.SGD(parameters, lr=0.1)", sparse=True), {"batch": 1}),
        (_task(SGD), {"proximal": 0.5, "local": ("last.*",)}),
        (_task(ADAM), {"slice_seconds": 1e-3}),
        (_task(SGD).replace("= nn.functional.mse_loss", "= 0.01 * nn.functional.mse_loss"), {"precision": "fp16"}),
        (_task(SGD), {"precision": "bf16"}),
    ],
    ids=["momentum, clipped", "adam, accumulated", "sparse, one sample", "proximal, local", "slices", "fp16", "bf16"],
)
def test_two_ranks_make_the_model_of_one_device(
    task: str, fields: dict[str, Any], tmp_path: Path, monkeypatch: Any
) -> None:
    one, losses = _trained(task, tmp_path / "one", monkeypatch, **fields)
    two, ranked = _trained(task, tmp_path / "two", monkeypatch, **fields, devices=TWO)
    # Products in 16 bits are rounded before the ranks' gradients are added up.
    rough = fields.get("precision", "fp32") != "fp32"
    seen, counted = float(one.pop("seen")), float(two["seen"])
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=0.05 if rough else RTOL, atol=5e-3 if rough else ATOL)
    assert ranked == pytest.approx(losses, rel=1e-2 if rough else RTOL)
    assert len(losses) == ROUNDS
    # 7 samples in passes of 3 at most; of the first rank's 3, in passes of 2.
    assert (seen, counted) == ((18, 12) if "at_once" in fields else (6, 6)), "buffers are those of the first rank"


LOGS = """
import os
import geofed

with_loss = loss


def loss(model, batch):
    geofed.log("rows", len(batch[0]))
    FAULT
    return with_loss(model, batch)
"""


def _faulty(fault: str, folder: Path, monkeypatch: Any, **fields: Any) -> Outcome:
    """What an invocation ends with; ``fault``: a line in `loss`."""
    federation = Federation(folder, ("east",), steps_per_round=STEPS, rounds=ROUNDS)
    monkeypatch.setattr(loop, "PsClient", federation.client)
    (folder / "data.bin").write_bytes(b"x")
    task = _task() + LOGS.replace("FAULT", fault)
    place = federation.regions["east"].place
    return call(invocation(place, task, folder / "data.bin", seed=SEED, region_batch=BATCH, devices=TWO, **fields))


OTHER = "if torch.distributed.get_rank() == 1 and model.seen >= 2: "


@pytest.mark.parametrize(
    ("fault", "code", "text"),
    [
        (OTHER + "raise KeyError('on the other')", "TASK_FAILED", "loss raised KeyError: 'on the other' at task.py:"),
        (OTHER + "os.kill(os.getpid(), 9)", "FUNCTION_OUT_OF_MEMORY", "a rank of the worker was killed"),
        (OTHER + "os._exit(3)", "TASK_FAILED", "a rank of the worker ended (exit status 3)"),
        (OTHER + "raise MemoryError", "FUNCTION_OUT_OF_MEMORY", "a rank of the worker ran out of memory"),
        (OTHER + "return model.last.weight", "TASK_INVALID", "loss(model, batch) returned a tensor of shape (2, 16)"),
        (OTHER + "return model.last.weight.sum() * float('nan')", "TASK_FAILED", "the loss is nan at step 3"),
        ("if torch.distributed.get_rank() == 0: raise KeyError('on the first')", "TASK_FAILED", "'on the first'"),
        ("raise KeyError('on both')", "TASK_FAILED", "'on both'"),
    ],
)
def test_what_a_rank_fails_with_is_the_invocations_error_and_nothing_is_left(
    fault: str, code: str, text: str, tmp_path: Path, monkeypatch: Any
) -> None:
    begun = time.monotonic()
    outcome = _faulty(fault, tmp_path, monkeypatch)
    assert (outcome.status, outcome.code) == ("failed", code), outcome
    assert text in outcome.message
    assert time.monotonic() - begun < 100, "no exchange is waited for"
    _nothing_is_left(tmp_path)


def _rank_processes() -> list[psutil.Process]:
    """Ranks that this process has started: it has other children, of other tests."""
    return running_as("region_agent.worker.ranks", psutil.Process().children(recursive=True))


def _nothing_is_left(folder: Path) -> None:
    handler._drop_loaded()
    assert not torch.distributed.is_initialized()
    gc.collect()
    assert not _rank_processes()
    assert not list((folder / "scratch").glob("ranks-*"))


def test_a_rank_that_answers_no_more_is_given_up(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(group, "COLLECTIVE_SECONDS", 2.0)
    outcome = _faulty(OTHER + "os.kill(os.getpid(), 19)", tmp_path, monkeypatch)
    assert outcome.code == "TASK_FAILED"
    _nothing_is_left(tmp_path)


def test_ranks_are_kept_between_invocations_and_made_again_where_one_has_ended(
    tmp_path: Path, monkeypatch: Any
) -> None:
    federation = Federation(tmp_path, ("east",), steps_per_round=STEPS, rounds=ROUNDS)
    monkeypatch.setattr(loop, "PsClient", federation.client)
    (tmp_path / "data.bin").write_bytes(b"x")
    place = federation.regions["east"].place
    body = invocation(
        place, _task(), tmp_path / "data.bin", seed=SEED, region_batch=BATCH, devices=TWO, slice_seconds=1e-3
    )
    first = call(body)
    (kept,) = _rank_processes()
    second = call(body.model_copy(update={"resume_key": first.resume_key}))
    assert (first.status, second.status, second.step) == ("continue", "continue", 2)
    assert _rank_processes() == [kept]
    kept.kill()
    kept.wait()
    third = call(body.model_copy(update={"resume_key": second.resume_key}))
    assert (third.status, third.step) == ("continue", 3), third
    (new,) = _rank_processes()
    assert new.pid != kept.pid
    _nothing_is_left(tmp_path)


def test_samples_that_are_none_count_on_no_rank(tmp_path: Path, monkeypatch: Any, capfd: Any) -> None:
    task = _task(SGD).replace(
        "return TensorDataset(x, x[:, :2] - x[:, 2:])",
        """\
class Some(torch.utils.data.Dataset):
        def __len__(self): return len(x)
        def __getitem__(self, index): return None if index % 2 else (x[index], x[index, :2] - x[index, 2:])
    return Some()""",
    )
    one, losses = _trained(task, tmp_path / "one", monkeypatch, batch=5)
    two, ranked = _trained(task, tmp_path / "two", monkeypatch, batch=5, devices=TWO)
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=RTOL, atol=ATOL)
    assert ranked == pytest.approx(losses, rel=RTOL)
    told = [line for line in capfd.readouterr().err.splitlines() if "were None" in line]
    assert len(told) == 2


def test_the_workers_own_process_is_the_first_of_its_gpus(monkeypatch: Any) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert [one.index for worker in (0, 1, 2) for one in devices_seen(2, worker)] == [0, 1, 2, 3, 0, 1]
    assert [one.index for one in devices_seen("auto")] == [0, 1, 2, 3]
    assert [one.index for one in devices_seen(1, 6)] == [2]
    assert [one.index for one in devices_seen(2, 0, 2, numbers=(2, 3))] == [2, 3]
    assert [one.index for one in devices_seen("auto", 1, 2, numbers=(0, 1))] == [0, 1], "those that are billed"
    with pytest.raises(GeofedError, match="gives this worker GPU 4, counted from 0, and a function sees 4") as unseen:
        devices_seen(1, numbers=(4,))
    assert unseen.value.code == "GPUS_TOO_FEW"
    with pytest.raises(GeofedError, match="a function sees 4 GPUs here") as raised:
        devices_seen(5)
    assert raised.value.code == "GPUS_TOO_FEW"


def test_a_worker_that_sees_fewer_gpus_than_are_billed_computes_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    federation = Federation(tmp_path, ("east",), steps_per_round=STEPS, rounds=ROUNDS)
    (tmp_path / "data.bin").write_bytes(b"x")
    outcome = call(invocation(federation.regions["east"].place, "raise", tmp_path / "data.bin", billed_gpus=1))
    text = "the region bills 1 GPU for a worker, and a function sees none"
    assert (outcome.status, outcome.code, outcome.message) == ("failed", "GPUS_TOO_FEW", text)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert len(devices_seen("auto", billed=2)) == 2
    assert len(devices_seen("auto", billed=1)) == 1, "the other one is kept for a preemptible worker"
    with pytest.raises(GeofedError, match="bills 4 GPUs for a worker, and a function sees 2"):
        devices_seen("auto", billed=4)


def test_gpus_that_are_not_there_are_refused_before_the_task_is_loaded(tmp_path: Path, monkeypatch: Any) -> None:
    assert devices_seen("auto") == devices_seen(1) == (torch.device("cpu"),)
    federation = Federation(tmp_path, ("east",), steps_per_round=STEPS, rounds=ROUNDS)
    (tmp_path / "data.bin").write_bytes(b"x")
    outcome = call(invocation(federation.regions["east"].place, "raise", tmp_path / "data.bin", gpus=2))
    assert (outcome.code, outcome.message) == (
        "GPUS_TOO_FEW", "`function.gpus: 2`, and a function sees no GPUs here",
    )  # fmt: skip
