"""Steps a second of a job over an emulated WAN that trains a model of 498 MB, for `large_models.py`.

Three regions in the emulator, 100 Mbit/s and 30 ms between each two, with the real daemons. The job is submitted as a
user submits it, everything about the exchange is `auto`. Its tensors are those of GPT-2 with 124 million parameters. A
step is a sleep of 100 ms, in which it changes a tenth of the model. It is compared with three loops of the same steps,
a process each, that run at the same time before the job and exchange nothing.

With `--quick` the model has a width of 256 instead of 768, 90 MB, and links are slower in proportion, so that an update
takes as long. At full size a region takes 5.4 GB (worker, parameter server, channel and agent); with less than 6 GB
available for each of the three it is not run.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from large_models_job import REGIONS, alone, sites, speed_of
from report import Bar, Report
from support.running import Running

from deploy.emulator import CONTROL, EmulatedLink, Emulator, WanProfile
from deploy.local import LocalFederation

__all__ = ["measure_wan"]

_MBPS, _RTT_MS, _STEP_MS = 100.0, 30.0, 100.0
_WIDTH, _QUICK_WIDTH = 768, 256
_NEEDED_BYTES = 3 * 6e9
"""Memory that three regions take at full size, 16.2 GB, and what the system needs for files that are being written."""
_STEPS = 100_000
"""Of the job, which is cancelled before."""
_SECONDS, _QUICK_SECONDS = 180.0, 45.0
"""That steps are counted for."""
_ROUNDS, _QUICK_ROUNDS = 8, 2
"""Rounds before that. The plan of the quick size does not change under way."""
_ALONE_STEPS = 50
_MEMORY_MB = 4096
_SHARE, _AIM = 0.90, 0.97
"""Bar and aim: least steps a second, as a part of those without communication."""
_JOB = """
apiVersion: geofed/v1
kind: TrainingJob
metadata: {name: large-model}
task: {module: task.py}
data: {dataset: text, residency: region}
train: {batch: 1, seed: 1, workers: 1, evaluateEvery: 0, end: {steps: STEPS}}
objective: {minimise: time}
"""
_TASK = '''
"""Tensors of GPT-2, and steps that sleep."""

import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

SECONDS = STEP_SECONDS
WIDTH, BLOCKS = MODEL_WIDTH, 12
PIECE = 1 << 20


def shapes():
    yield from ((50257, WIDTH), (1024, WIDTH))
    for _ in range(BLOCKS):
        yield from ((WIDTH,), (WIDTH,), (3 * WIDTH, WIDTH), (3 * WIDTH,), (WIDTH, WIDTH), (WIDTH,))
        yield from ((WIDTH,), (WIDTH,), (4 * WIDTH, WIDTH), (4 * WIDTH,), (WIDTH, 4 * WIDTH), (WIDTH,))
    yield from ((WIDTH,), (WIDTH,))


class Tensors(nn.Module):
    """Parameters; in each step a tenth of them changes, in pieces that stay in the processor's cache."""

    def __init__(self):
        super().__init__()
        self.all = nn.ParameterList([nn.Parameter(torch.randn(shape) * 0.02) for shape in shapes()])
        self.noise, self.step = torch.randn(PIECE) * 1e-4, 0

    def change(self):
        with torch.no_grad():
            pieces = [piece for tensor in self.all for piece in tensor.view(-1).split(PIECE)]
            for piece in pieces[self.step % 10 :: 10]:
                piece.add_(self.noise[: len(piece)])
        self.step += 1


class Last(torch.autograd.Function):
    """A gradient of the last tensor only: the time of a backward pass is in the sleep."""

    @staticmethod
    def forward(context, last):
        context.save_for_backward(last)
        return last.sum() * 0.0

    @staticmethod
    def backward(context, gradient):
        (last,) = context.saved_tensors
        return torch.zeros_like(last)


def model(config):
    return Tensors()


def dataset(uri, split, config):
    return TensorDataset(torch.zeros(20_000, 1))


def loss(model, batch):
    ends = time.perf_counter() + SECONDS
    model.change()
    found = Last.apply(model.all[-1])
    time.sleep(max(0.0, ends - time.perf_counter()))
    return found


def optimizer(parameters, config):
    return torch.optim.SGD(parameters, lr=0.1)
'''


def measure_wan(report: Report, *, quick: bool) -> None:
    """Run the job, and compare; nothing is measured where no WAN can be emulated."""
    reason = Emulator.supported()
    if reason is None and not quick and (free := psutil.virtual_memory().available) < _NEEDED_BYTES:
        reason = f"three regions take {_NEEDED_BYTES / 1e9:.0f} GB, and {free / 1e9:.0f} GB are free"
    if reason is not None:
        print(f"steps over a WAN are not measured: {reason}")
        report.details["wan_not_run"] = reason
        return
    width = _QUICK_WIDTH if quick else _WIDTH
    task = _TASK.replace("STEP_SECONDS", str(_STEP_MS / 1e3)).replace("MODEL_WIDTH", str(width))
    size, mbps = 4e-6 * _parameters(width), _MBPS * _parameters(width) / _parameters(_WIDTH)
    job = _JOB.replace("STEPS", str(_STEPS))
    seconds, warm = (_QUICK_SECONDS, _QUICK_ROUNDS) if quick else (_SECONDS, _ROUNDS)
    bound = alone(_loop, task)
    with tempfile.TemporaryDirectory(prefix="geofed-large-") as place:
        folder = Path(place)
        with Emulator(_profile(mbps), state_dir=folder / "emulator") as emulator:
            report.details["backend"] = emulator.backend
            made = sites(folder, memory_mb=_MEMORY_MB)
            with LocalFederation(folder / "federation", made, emulator=emulator) as federation:
                running = Running(federation, folder)
                found = speed_of(running, folder / "large-model", task, job, seconds, warm_rounds=warm)
    share = found["steps_per_second"] / bound
    report.runs.append(
        {
            "what": "wan",
            "megabytes": size,
            "mbps": mbps,
            "alone": bound,
            "share": share,
            "load": os.getloadavg()[0],
            **found,
        }
    )
    plan = " ".join(f"{name} {value}" for name, value in found["plan"].items())
    print(f"without communication {bound:.2f} steps/s, with {found['steps_per_second']:.2f} ({share:.3f}); {plan}")
    for name, part in found["parts"].items():
        told = ", ".join(f"{key.removesuffix('_seconds')} {value:.1f}" for key, value in part.items())
        print(f"  {name}: {told} s")
    report.bars.append(Bar.at_least(f"steps/s of {size:.0f} MB over {mbps:.0f} Mbit/s", share, "x alone", _SHARE))
    report.bars.append(Bar.at_least(f"aim: steps/s of {size:.0f} MB over {mbps:.0f} Mbit/s", share, "x alone", _AIM))


def _parameters(width: int) -> int:
    return (50257 + 1024 + 2) * width + 12 * (12 * width**2 + 13 * width)


def _profile(mbps: float) -> WanProfile:
    regions, link = (CONTROL, *REGIONS), EmulatedLink(rate_mbps=mbps, delay_ms=_RTT_MS / 2)
    links = {(a, b): EmulatedLink() if CONTROL in (a, b) else link for a in regions for b in regions if a != b}
    return WanProfile("three-equal", "Three regions", "a measurement's own", REGIONS, links)


def _loop(task: str) -> float:
    import torch

    torch.set_num_threads(1)
    names: dict[str, Any] = {}
    exec(task, names)
    model = names["model"]({})
    optimizer = names["optimizer"](model.parameters(), {})

    def steps(number: int) -> None:
        for _ in range(number):
            optimizer.zero_grad()
            names["loss"](model, None).backward()
            optimizer.step()

    # The first one allocates.
    steps(1)
    begun = time.monotonic()
    steps(_ALONE_STEPS)
    return _ALONE_STEPS / (time.monotonic() - begun)
