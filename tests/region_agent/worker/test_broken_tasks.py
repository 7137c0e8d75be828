# ruff: noqa: E501 - rows of small programs
"""A fault of the user's code is told as theirs, with its place or the name of what is wrong, and never as ours."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from support.exchange_in_process import Federation
from support.jobs import call, invocation

from region_agent.worker import loop
from region_agent.worker.handler import handle
from region_agent.worker.profile_call import ProfileCall, Profiled

BASE = """
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

X = torch.randn(12, 4, generator=torch.Generator().manual_seed(1))


def model(config):
    return nn.Linear(4, 2)


def dataset(uri, split, config):
    return TensorDataset(X, X[:, :2])


def loss(model, batch):
    x, y = batch
    return nn.functional.mse_loss(model(x), y)


class Own(nn.Linear):
    def __init__(self):
        super().__init__(4, 2)


class Data(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return X[index], X[index, :2]
"""

MODEL, DATA, OPTIMIZER = (
    "def model(config):\n    ",
    "def dataset(uri, split, config):\n    ",
    ("def optimizer(parameters, config):\n    "),
)
IN_LOSS = "def loss(model, batch):\n    "
BROKEN: dict[str, tuple[str, str]] = {
    # what it adds to the task, and what its error says
    "import raises": ("raise ValueError('at the top')", "at the top"),
    "import exits": ("import sys; sys.exit(3)", "SystemExit"),
    "a module is missing": ("import no_such_module_here", "no_such_module_here"),
    "syntax": ("def broken(:", "SyntaxError"),
    "no loss": ("del loss", "loss"),
    "no dataset": ("del dataset", "dataset"),
    "no model": ("del model", "model"),
    "model takes nothing": ("def model():\n    return nn.Linear(4, 2)", "model"),
    "model is None": (MODEL + "pass", "NoneType"),
    "model raises": (MODEL + "raise KeyError('width')", "width"),
    "model raises what is no Exception": (MODEL + "raise KeyboardInterrupt('stop')", "KeyboardInterrupt"),
    "an error without words": (
        "class Odd(Exception):\n    def __str__(self):\n        raise RuntimeError('no text')\n" + MODEL + "raise Odd()",
        "Odd",
    ),
    "an error that is not text": (MODEL + "raise ValueError('caf\\udce9.txt')", "caf"),
    "endless recursion": (MODEL + "return model(config)", "RecursionError"),
    "on the device meta": (MODEL + "with torch.device('meta'):\n        return nn.Linear(4, 2)", "weight"),
    "lazy": (MODEL + "return nn.LazyLinear(2)", "weight"),
    "nothing to train": (MODEL + "return nn.Linear(4, 2).requires_grad_(False)", "no trainable parameters"),
    "a complex parameter": (
        "class Net(Own):\n    def __init__(self):\n        super().__init__()\n"
        "        self.turn = nn.Parameter(torch.zeros(2, dtype=torch.complex64))\n" + MODEL + "return Net()",
        "turn",
    ),
    "a sparse buffer": (
        MODEL + "net = nn.Linear(4, 2)\n    net.register_buffer('links', torch.eye(3).to_sparse())\n    return net", "links"
    ),
    "a quantised buffer": (
        MODEL + "net = nn.Linear(4, 2)\n    net.register_buffer('packed', torch.quantize_per_tensor(torch.ones(2), 0.1, "
        "0, torch.qint8))\n    return net",
        "",
    ),
    "complex128": (
        MODEL + "net = nn.Linear(4, 2)\n    net.register_buffer('turn', torch.ones(2, dtype=torch.complex128))\n"
        "    return net",
        "turn",
    ),
    "beyond float32's range": (
        MODEL + "net = nn.Linear(4, 2)\n    net.register_buffer('huge', torch.tensor([1e300], dtype=torch.float64))\n"
        "    return net",
        "huge",
    ),
    "an expanded parameter": (
        MODEL + "net = nn.Linear(4, 2)\n    net.bias = nn.Parameter(torch.zeros(1).expand(2))\n    return net", "bias"
    ),
    "extra state that is no tensor": (
        "class Net(Own):\n    def get_extra_state(self):\n        return {'calls': 1}\n"
        "    def set_extra_state(self, state):\n        pass\n" + MODEL + "return Net()",
        "_extra_state",
    ),
    "extra state of bytes": (
        "class Net(Own):\n    def get_extra_state(self):\n        return torch.zeros(3, dtype=torch.uint8)\n"
        "    def set_extra_state(self, state):\n        pass\n" + MODEL + "return Net()",
        "_extra_state",
    ),
    "a state_dict that raises": (
        "class Net(Own):\n    def state_dict(self, *arguments, **named):\n        raise RuntimeError('no state')\n"
        + MODEL + "return Net()",
        "no state",
    ),
    "train() raises": (
        "class Net(Own):\n    def train(self, mode=True):\n        raise RuntimeError('never trained')\n"
        + MODEL + "return Net()",
        "never trained",
    ),
    "forward raises": (
        "class Net(Own):\n    def forward(self, x):\n        raise RuntimeError('no way')\n" + MODEL + "return Net()",
        "no way",
    ),
    "a buffer that changes its shape": (
        "class Net(Own):\n    def __init__(self):\n        super().__init__()\n"
        "        self.register_buffer('seen', torch.zeros(1))\n"
        "    def forward(self, x):\n        self.seen = torch.cat([self.seen, x[0, :1].detach()])\n"
        "        return super().forward(x)\n" + MODEL + "return Net()",
        "seen",
    ),
    "a buffer that changes its type": (
        "class Net(Own):\n    def __init__(self):\n        super().__init__()\n"
        "        self.register_buffer('mean', torch.zeros(1))\n"
        "    def forward(self, x):\n        self.mean = self.mean.double()\n        return super().forward(x)\n"
        + MODEL + "return Net()",
        "mean",
    ),
    "a buffer that comes late": (
        "class Net(Own):\n    def forward(self, x):\n        self.register_buffer('late', torch.ones(1))\n"
        "        return super().forward(x)\n" + MODEL + "return Net()",
        "late",
    ),
    "a buffer that goes": (
        "class Net(Own):\n    def __init__(self):\n        super().__init__()\n"
        "        self.register_buffer('gone', torch.zeros(1))\n"
        "    def forward(self, x):\n        self.gone = None\n        return super().forward(x)\n" + MODEL + "return Net()",
        "gone",
    ),
    "dataset raises": (DATA + "raise FileNotFoundError(uri)", "FileNotFoundError"),
    "dataset is None": (DATA + "pass", "dataset"),
    "a dataset without a length": (DATA + "return iter([1, 2])", "dataset"),
    "a length that raises": (
        "class Bad(Data):\n    def __len__(self):\n        raise OSError('no index')\n" + DATA + "return Bad()", "no index"
    ),
    "a length that is no number": (
        "class Bad(Data):\n    def __len__(self):\n        return 'twelve'\n" + DATA + "return Bad()", "dataset"
    ),
    "a length below zero": (
        "class Bad(Data):\n    def __len__(self):\n        return -1\n" + DATA + "return Bad()", "dataset"
    ),
    "a sample raises": (
        "class Bad(Data):\n    def __getitem__(self, index):\n        raise IndexError('row')\n" + DATA + "return Bad()",
        "row",
    ),
    "samples of several shapes": (
        "class Bad(Data):\n    def __getitem__(self, index):\n        return torch.ones(1 + index), torch.ones(2)\n"
        + DATA + "return Bad()",
        "dataset",
    ),
    "samples that are None": (
        "class Bad(Data):\n    def __getitem__(self, index):\n        return None\n" + DATA + "return Bad()", "dataset"
    ),
    "samples of an unknown kind": (
        "class Bad(Data):\n    def __getitem__(self, index):\n        return object()\n" + DATA + "return Bad()", "dataset"
    ),
    "loss raises": (IN_LOSS + "return undefined_name", "undefined_name"),
    "loss takes three": ("def loss(model, batch, more):\n    return model(batch[0]).sum()", "loss"),
    "loss is None": (IN_LOSS + "pass", "NoneType"),
    "loss is a number": (IN_LOSS + "return model(batch[0]).sum().item()", "float"),
    "loss has many elements": (IN_LOSS + "return model(batch[0])", "shape"),
    "loss without a gradient": (IN_LOSS + "return model(batch[0]).sum().detach()", "backward"),
    "loss is complex": (IN_LOSS + "return model(batch[0]).sum() * 1j", "loss"),
    "loss is an integer": (IN_LOSS + "return model(batch[0]).sum().long()", "backward"),
    "loss is not finite": (IN_LOSS + "return model(batch[0]).sum() * float('nan')", "nan"),
    "shapes do not fit": (IN_LOSS + "return (model(batch[0]) @ model(batch[0])).sum()", "loss"),
    "exit in the loss": (IN_LOSS + "raise SystemExit(1)", "SystemExit"),
    "a backward that raises": (
        "class Fail(torch.autograd.Function):\n    @staticmethod\n    def forward(context, x):\n        return x.clone()\n"
        "    @staticmethod\n    def backward(context, given):\n        raise RuntimeError('no gradient')\n"
        + IN_LOSS + "return Fail.apply(model(batch[0])).sum()",
        "no gradient",
    ),
    "optimizer raises": (OPTIMIZER + "raise TypeError('momentum')", "momentum"),
    "optimizer is None": (OPTIMIZER + "pass", "optimizer"),
    "optimizer of nothing": (OPTIMIZER + "return torch.optim.SGD([], lr=0.1)", "optimizer"),
    "a rate below zero": (OPTIMIZER + "return torch.optim.SGD(parameters, lr=-1)", "optimizer"),
    "an optimiser that needs a closure": (OPTIMIZER + "return torch.optim.LBFGS(parameters)", "LBFGS takes a closure"),
    "an optimiser for sparse gradients": (OPTIMIZER + "return torch.optim.SparseAdam(parameters)", "optimiser's step"),
    "a step that raises": (
        "class Step(torch.optim.SGD):\n    def step(self, closure=None):\n        raise ZeroDivisionError('step')\n"
        + OPTIMIZER + "return Step(parameters, lr=0.1)",
        "ZeroDivisionError",
    ),
    "zero_grad raises": (
        "class Zero(torch.optim.SGD):\n    def zero_grad(self, set_to_none=True):\n        raise RuntimeError('zero')\n"
        + OPTIMIZER + "return Zero(parameters, lr=0.1)",
        "zero",
    ),
}  # fmt: skip
ONLY_IN_JOBS: dict[str, tuple[str, str]] = {
    "a state_dict of the optimiser that raises": (
        "class State(torch.optim.SGD):\n    def state_dict(self):\n        raise RuntimeError('not to be had')\n"
        + OPTIMIZER + "return State(parameters, lr=0.1)",
        "not to be had",
    ),
    "state that cannot be written down": (
        "class State(torch.optim.SGD):\n    def step(self, closure=None):\n        super().step()\n"
        "        for p in self.param_groups[0]['params']:\n            self.state[p]['seen'] = {1, 2}\n"
        + OPTIMIZER + "return State(parameters, lr=0.1)",
        "seen",
    ),
    "a load_state_dict that raises": (
        "class State(torch.optim.SGD):\n    def load_state_dict(self, state):\n        raise RuntimeError('not taken')\n"
        + OPTIMIZER + "return State(parameters, lr=0.1)",
        "not taken",
    ),
}  # fmt: skip
IN_METRICS = {
    "metrics raise": "raise ValueError('no measure')",
    "metrics are None": "pass",
    "metrics are words": "return {'accuracy': 'high'}",
    "metrics exit": "raise SystemExit(2)",
    "metrics take too much": "raise MemoryError()",
    "metrics give a tensor": "return torch.ones(3)",
}
OURS = ("INTERNAL", "FUNCTION_FAILED", "FENCED", "FRAME_INVALID", "")


def _told(name: str) -> tuple[str, str]:
    return (BROKEN | ONLY_IN_JOBS)[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*BROKEN, *ONLY_IN_JOBS])
def test_a_job_says_what_is_wrong_with_its_task(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    more, says = _told(name)
    federation = Federation(tmp_path, ("east",), steps_per_round=2, rounds=2)
    monkeypatch.setattr(loop, "PsClient", federation.client)
    data = tmp_path / "data.bin"
    data.write_bytes(b"x")
    body = invocation(federation.regions["east"].place, f"{BASE}\n{more}\n", data, slice_seconds=1e-3)
    for _ in range(8):
        if (outcome := call(body)).status == "failed":
            break
        body = body.model_copy(update={"resume_key": outcome.resume_key})
    assert outcome.status == "failed"
    assert outcome.code in ("TASK_FAILED", "TASK_INVALID"), outcome
    assert says in outcome.message
    assert len(outcome.message) < 2000


@pytest.mark.slow
@pytest.mark.parametrize("measure", ["all", "pace", "size"])
@pytest.mark.parametrize("name", BROKEN)
def test_a_probe_says_what_is_wrong_with_a_task(name: str, measure: str, tmp_path: Path) -> None:
    more, _ = _told(name)
    federation = Federation(tmp_path, ("east",), steps_per_round=2, rounds=2)
    data = tmp_path / "data.bin"
    data.write_bytes(b"x")
    job = invocation(federation.regions["east"].place, f"{BASE}\n{more}\n", data)
    body = ProfileCall(
        job=job.job, region="east", channel="file", channel_address=job.channel_address, bundle_key=job.bundle_key,
        module="task.py", config={}, splits=job.splits, batch=4, seed=1, limit_seconds=1.0, measure=measure,
    )  # fmt: skip
    answer = handle(SimpleNamespace(body=body.model_dump_json().encode()), None)
    told = Profiled.model_validate_json(str(answer["body"]))
    assert told.status == "done" or told.code in ("TASK_FAILED", "TASK_INVALID"), told


@pytest.mark.parametrize("name", IN_METRICS)
def test_a_job_whose_metrics_fail_has_trained_all_the_same(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = Federation(tmp_path, ("east",), steps_per_round=2, rounds=2)
    monkeypatch.setattr(loop, "PsClient", federation.client)
    federation.takes_errors = True
    federation.train(
        f"{BASE}\ndef metrics(model, batches):\n    {IN_METRICS[name]}\n", {}, seed=1, batch=4, slice_seconds=9
    )
    assert federation.exported()
    assert set(federation.errors) == {"east"}


def test_there_are_many_kinds() -> None:
    assert len(BROKEN) + len(ONLY_IN_JOBS) + len(IN_METRICS) >= 60
