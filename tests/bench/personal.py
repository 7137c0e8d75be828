"""Accuracy with tensors that stay in their region (`train.local`), on each region's own test data.

    .venv/bin/python tests/bench/personal.py [--quick] [--json PATH] [--data DIR] [--seeds N]

Five regions, real gradients and the merges of parameter servers (`sync.ps.execution.replica`), in one process: a LeNet
with BatchNorm on MNIST, rounds of 10 steps, model averaging in fp32. Two kinds of regions that differ: `labels`: each
draws its own shares of the classes, by Dirichlet(0.3), for training and test alike. `features`: each has another
contrast, some inverted. A region is tested with its own model: the shared tensors, and those of its own. `alone` shares
nothing. With `--quick` it takes about 2 minutes.
"""

from __future__ import annotations

import statistics
import sys
from argparse import ArgumentParser
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from quality_data import Data, mnist, split
from quality_federation import Samples, Trainer, default_folder
from quality_models import WORKLOADS, Workload
from report import Bar, Report, options
from torch import nn

from sync.codec import codec_named
from sync.flat import FlatModel
from sync.local_tensors import local_names
from sync.policy import Contribution
from sync.ps.execution.replica import Replica, ReplicaState
from sync.wan import ExchangeSettings, policy_of

REGIONS = 5
INTERVAL = 10
"""Steps of a round."""
ALPHA = 0.3
CONTRASTS = ((1.0, 0.0), (-1.0, 0.0), (0.5, 1.0), (2.0, -0.5), (-0.5, -1.0))
"""Factor and offset of each region's pixels, in `features`."""
TESTED = 2000
"""Test samples of a region."""
WAYS: dict[str, tuple[str, ...] | None] = {
    "all shared": (), "local BatchNorm": ("bn*.*",), "local head": ("head.*",), "both": ("bn*.*", "head.*"),
    "alone": None,
}  # fmt: skip
"""Patterns of `train.local`; None: nothing is exchanged."""


@dataclass(frozen=True)
class Run:
    """Mean accuracy over the regions, in per cent, each with its own model on its own test data."""

    kind: str
    way: str
    seed: int
    steps: int
    accuracy: float
    worst: float
    """That of the region with the lowest."""


def _lenet_bn() -> nn.Module:
    return nn.Sequential(OrderedDict(
        conv1=nn.Conv2d(1, 6, 5, padding=2), bn1=nn.BatchNorm2d(6), relu1=nn.ReLU(), pool1=nn.MaxPool2d(2),
        conv2=nn.Conv2d(6, 16, 5), bn2=nn.BatchNorm2d(16), relu2=nn.ReLU(), pool2=nn.MaxPool2d(2),
        flat=nn.Flatten(), fc1=nn.Linear(400, 84), relu3=nn.ReLU(), head=nn.Linear(84, 10),
    ))  # fmt: skip


@cache
def _data(folder: Path) -> Data:
    return mnist(folder)


def _regions(kind: str, data: Data, seed: int) -> list[Data]:
    """Each region's training and test data."""
    alpha = ALPHA if kind == "labels" else None
    found = []
    random = np.random.default_rng([seed, 11])
    for part, (factor, offset) in zip(split(data, REGIONS, alpha, seed), CONTRASTS, strict=True):
        labels = data.labels[part]
        shares = np.bincount(labels, minlength=10)[data.test[1].numpy()].astype(float)
        chosen = random.choice(len(shares), TESTED, p=shares / shares.sum())
        train, test = data.train[0][part], data.test[0][chosen]
        if kind == "features":
            train, test = train * factor + offset, test * factor + offset
        targets = data.train[1][part], data.test[1][chosen]
        found.append(Data((train, targets[0]), (test, targets[1]), labels, data.real))
    return found


def _trainers(
    workload: Workload, parts: Sequence[Data], patterns: tuple[str, ...], steps: int, seed: int
) -> list[Trainer]:
    made = []
    for at, part in enumerate(parts):
        samples = Samples(part, np.arange(len(part.labels)), workload.batch, (seed, at))
        trainer = Trainer(workload, samples, 0.05, steps, seed)
        trainer.flat = FlatModel(trainer.module, local=local_names(trainer.module, patterns))
        made.append(trainer)
    return made


def make(kind: str, way: str, seed: int, steps: int, folder: Path) -> Run:
    """Carry out one run."""
    workload = Workload("lenet-bn", mnist, _lenet_bn, WORKLOADS["lenet-mnist"].optimizer, (0.05,), 32, steps)
    parts, patterns = _regions(kind, _data(folder), seed), WAYS[way]
    trainers = _trainers(workload, parts, patterns or (), steps, seed)
    first = trainers[0].flat.vector()
    replica = Replica(policy_of("ma", {}), ExchangeSettings(), codec_named("fp32"), ReplicaState(first, first))
    replica.trained = trainers[0].flat.layout.trainable_size
    for _ in range(steps // INTERVAL):
        begin, changes = replica.model.copy(), []
        for trainer in trainers:
            if patterns is not None:
                trainer.flat.load(begin)
            for _ in range(INTERVAL):
                trainer.step()
            changes.append(trainer.flat.vector() - begin)
        if patterns is not None:
            updates = [Contribution(f"r{at}", 1.0, change) for at, change in enumerate(changes)]
            replica.merge(updates, None, own="r0", rounds=1)
            replica.restart()
    if patterns is not None:
        for trainer in trainers:
            trainer.flat.load(replica.model)
    found = [trainer.outcome(part)[0] for trainer, part in zip(trainers, parts, strict=True)]
    return Run(kind, way, seed, steps, statistics.fmean(found), min(found))


def main() -> int:
    given = options(__doc__, data=default_folder(), more=_more)
    torch.set_num_threads(1)
    report = Report("personal", given.quick)
    steps, seeds = (60, 2) if given.quick else (200, given.seeds)
    runs = [
        make(kind, way, seed, steps, given.data)
        for seed in range(1, seeds + 1) for kind in ("labels", "features") for way in WAYS
    ]  # fmt: skip
    report.runs = [asdict(run) for run in runs]
    report.details = {"torch": torch.__version__, "real_data": _data(given.data).real}
    print(
        f"accuracy in per cent on the regions' own test data after {steps} steps: mean of {seeds} seeds (worst region)"
    )
    mean: dict[tuple[str, str], float] = {}
    for kind in ("labels", "features"):
        for way in WAYS:
            mine = [run for run in runs if (run.kind, run.way) == (kind, way)]
            mean[kind, way] = statistics.fmean(run.accuracy for run in mine)
            print(f"  {kind:<9} {way:<16} {mean[kind, way]:6.1f} ({min(run.worst for run in mine):.1f})")
    for kind, way in (("labels", "local head"), ("features", "local BatchNorm")):
        gain = mean[kind, way] - mean[kind, "all shared"]
        report.bars.append(Bar.at_least(f"{way} over all shared, {kind}", gain, "points", 0.0))
    return report.close(given.json)


def _more(parser: ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=5, help="of each row; default: 5")


if __name__ == "__main__":
    sys.exit(main())
