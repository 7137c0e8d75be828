"""Part of `large_models`: how well three regions learn that train LoRA adapters and average them.

A small model learns to predict the bytes of Python's own modules; these weights are frozen. Three regions then train
adapters of them on IID parts of an English text, Python's help topics, and average them every few steps (policy `ma`,
with the parameter server's own replica). One process makes as many steps on the same samples together. Their test
losses are compared at the end, each at the best of a few learning rates, or both at one with `--quick`. With
`train_a: false` the means are exact. With `true` the error of the means is shown, too, without a bar.
"""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Callable
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from types import ModuleType
from typing import Any

import numpy as np
import torch
from report import Bar, Report

from sync.base import frozen_parameters
from sync.codec import codec_named
from sync.flat import FlatModel
from sync.policy import Contribution
from sync.ps.execution.replica import Replica, ReplicaState
from sync.wan import ExchangeSettings, policy_of

Weights = dict[str, torch.Tensor]

REGIONS = ("ams", "fra", "lon")
SMALL = {"width": 64, "blocks": 4, "heads": 4, "length": 48, "rank": 8}
BATCH = 16
"""Samples of a region in a step."""
INTERVAL = 5
"""Steps of a round."""
STEPS, STEPS_QUICK = 300, 50
"""Steps of each region."""
RATES, RATES_QUICK = (0.01, 0.02, 0.04), (0.02,)
"""Learning rates at the beginning of a cosine schedule."""
SEEDS, SEEDS_QUICK = (1, 2, 3), (1,)
PRETRAINING, PRETRAINING_QUICK = (1500, 64), (300, 16)
"""Steps, and samples of each, in which the model learns the weights that are then frozen."""
TEST_WINDOWS = 512
LOSS_BAR = 1.0
"""Most difference of the loss, in per cent."""


def measure_loss(report: Report, task: ModuleType, *, quick: bool) -> None:
    """Add the runs, and the bar, to ``report``. ``task``: the template `llm-lora`."""
    base = _pretrained(task, *(PRETRAINING_QUICK if quick else PRETRAINING))
    worst = max(
        _compare(report, task, base, train_a=False, seed=seed, quick=quick)
        for seed in (SEEDS_QUICK if quick else SEEDS)
    )
    report.bars.append(Bar.at_most("loss of three regions against one process, B trained", worst, "% more", LOSS_BAR))
    # Without a bar: what it costs to average A and B separately.
    _compare(report, task, base, train_a=True, seed=1, quick=quick)


def _pretrained(task: ModuleType, steps: int, batch: int) -> Weights:
    """Return all weights but the adapters'."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    windows = _windows(task, b"\n".join(path.read_bytes() for path in sorted(folder.glob("*.py"))))
    torch.manual_seed(7)
    module = task.model(SMALL)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_("lora_" not in name)
    optimizer = torch.optim.AdamW(parameter for parameter in module.parameters() if parameter.requires_grad)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=steps)
    draws = np.random.default_rng(1)
    for _ in range(steps):
        optimizer.zero_grad()
        task.loss(module, _batch(windows, draws.integers(0, len(windows), batch))).backward()
        optimizer.step()
        schedule.step()
    return {name: value for name, value in module.state_dict().items() if "lora_" not in name}


def _windows(task: ModuleType, text: bytes) -> Any:
    return task.Windows(torch.frombuffer(bytearray(text), dtype=torch.uint8), int(SMALL["length"]))


def _batch(windows: Any, indices: Any) -> tuple[torch.Tensor, ...]:
    pairs = windows.__getitems__([int(index) for index in indices])
    return tuple(torch.stack(column) for column in zip(*pairs, strict=True))


def _compare(report: Report, task: ModuleType, base: Weights, *, train_a: bool, seed: int, quick: bool) -> float:
    """Return by how many per cent the loss of three regions is above that of one process, each at its best rate."""
    windows = _windows(task, "\n".join(topics[name] for name in sorted(topics)).encode())
    order = np.random.default_rng(seed).permutation(len(windows))
    test, train = order[:TEST_WINDOWS], order[TEST_WINDOWS:]
    draws = np.random.default_rng(seed + 100)
    steps = STEPS_QUICK if quick else STEPS
    batches = [draws.choice(train, (len(REGIONS), BATCH), replace=False) for _ in range(steps)]
    one_process, three_regions = [], []
    for rate in RATES_QUICK if quick else RATES:
        made = partial(_Worker, task, base, {**SMALL, "train_a": train_a, "lr": rate}, seed, steps)
        untrained = made().tested(windows, test)
        federated, skew = _federated(made, windows, batches)
        alone = made()
        for batch in batches:
            alone.step(windows, batch.reshape(-1))
        one_process.append(alone.tested(windows, test))
        three_regions.append(federated.tested(windows, test))
        print(
            f"train_a {train_a!s:<5} seed {seed} rate {rate}: loss {untrained:.4f} -> one process "
            f"{one_process[-1]:.4f}, "
            f"three regions {three_regions[-1]:.4f}; product of means {100 * skew:.2g} % off the mean of products"
        )
        report.runs.append(
            {
                "what": "loss", "train_a": train_a, "seed": seed, "steps": steps, "rate": rate, "untrained": untrained,
                "one_process": one_process[-1], "three_regions": three_regions[-1], "product_error": skew,
            }
        )  # fmt: skip
    difference = 100 * (min(three_regions) / min(one_process) - 1)
    print(f"train_a {train_a!s:<5} seed {seed}, each at its best rate: {difference:+.2f} %")
    return difference


class _Worker:
    """A model with the template's optimiser, and a cosine schedule as `train.learningRate` has it."""

    def __init__(self, task: ModuleType, base: Weights, config: dict[str, Any], seed: int, steps: int) -> None:
        torch.manual_seed(seed)
        module = task.model(config)
        module.load_state_dict(base, strict=False)
        self._task, self.flat = task, FlatModel(module, base=frozen_parameters(module))
        self._optimizer = task.optimizer(module.parameters(), config)
        self._schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self._optimizer, steps)

    def step(self, windows: Any, indices: Any) -> None:
        self._optimizer.zero_grad()
        self._task.loss(self.flat.module, _batch(windows, indices)).backward()
        self._optimizer.step()
        self._schedule.step()

    def tested(self, windows: Any, indices: Any) -> float:
        with torch.no_grad():
            found = float(self._task.metrics(self.flat.module.eval(), [_batch(windows, indices)])["loss"])
        self.flat.module.train()
        assert math.isfinite(found)
        return found

    def product(self) -> torch.Tensor:
        """B A of the first block's first adapter."""
        lora: Any = self.flat.module.get_submodule("blocks.0.qkv")
        return (lora.lora_B.weight @ lora.lora_A.weight).detach()


def _federated(made: Callable[[], _Worker], windows: Any, batches: list[Any]) -> tuple[_Worker, float]:
    """Return a worker with the final model, and how far the product of the means is from the mean of the products, at
    most, as a fraction of the latter."""
    workers = [made() for _ in REGIONS]
    start = workers[0].flat.vector()
    replicas = [
        Replica(policy_of("ma"), ExchangeSettings(), codec_named("fp32"), ReplicaState(start.copy(), start.copy()))
        for _ in REGIONS
    ]
    for replica in replicas:
        replica.trained, replica.alone = workers[0].flat.layout.trainable_size, False
    skew = 0.0
    for at, batch in enumerate(batches, 1):
        for worker, indices in zip(workers, batch, strict=True):
            worker.step(windows, indices)
        if at % INTERVAL and at < len(batches):
            continue
        products = torch.stack([worker.product() for worker in workers]).mean(0)
        updates = []
        for name, worker, replica in zip(REGIONS, workers, replicas, strict=True):
            update = replica.own_update(worker.flat.vector(), at, last=False)
            updates.append(Contribution(name, 1.0, update.sent.copy(), whole=update.whole))
        for name, worker, replica in zip(REGIONS, workers, replicas, strict=True):
            replica.merge(updates, None, own=name, rounds=1)
            replica.restart()
            worker.flat.load(replica.model)
        skew = max(skew, float((products - workers[0].product()).norm() / products.norm()))
    return workers[0], skew
