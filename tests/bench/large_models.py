"""What a job sends that trains LoRA adapters of a large model, what it learns, and how fast servers exchange a large
model. With `--quick` it takes 3 minutes.

    .venv/bin/python tests/bench/large_models.py [--quick] [--json PATH]

Bytes: the template `llm-lora` with rank 8. The frames are those that workers and parameter servers make: the gradient
of a step, and the update of a round in each codec. They are compared with the adapter's values alone in that codec.

Loss: three regions train adapters of a small model on IID parts of a text and average them (policy `ma`, with the
parameter server's own replica) every few steps. One process makes as many steps on the same samples together. The test
loss is compared at the end, for `train_a: false` (exact means). With `true` the error of the means is shown, too,
without a bar.

Exchange: three real parameter servers exchange 498 MB, see `large_models_exchange.py`.

WAN: steps a second of a job that trains as large a model over 100 Mbit/s, see `large_models_wan.py`.
"""

from __future__ import annotations

import importlib.util
import math
import random
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from large_models_exchange import measure_exchange
from large_models_wan import measure_wan
from report import Bar, Report, options

from sync import framing
from sync.base import frozen_parameters
from sync.codec import codec_named, codecs
from sync.flat import FlatModel
from sync.policy import Contribution
from sync.ps.execution.replica import Replica, ReplicaState
from sync.wan import ExchangeSettings, policy_of

ROOT = Path(__file__).resolve().parents[2]
REGIONS = ("ams", "fra", "lon")
LARGE = {"width": 768, "blocks": 12, "heads": 12, "vocabulary": 50257, "length": 1024, "rank": 8}
"""GPT-2 with 124 million parameters."""
MEDIUM = {"width": 384, "blocks": 6, "heads": 6, "vocabulary": 50257, "length": 256, "rank": 8}
SMALL = {"width": 64, "blocks": 4, "heads": 4, "length": 48, "rank": 8, "lr": 0.005}
BATCH = 16
"""Samples of a region in a step."""
INTERVAL = 5
"""Steps of a round."""
ROUND_BAR, LOSS_BAR = 1.1, 1.0
"""Most bytes, as a multiple of the adapter's; most difference of the loss, in per cent."""


def main() -> int:
    given = options(__doc__)
    report = Report("large_models", given.quick)
    torch.set_num_threads(1)
    task = _template()
    measure_exchange(report, quick=given.quick)
    measure_wan(report, quick=given.quick)
    _bytes(report, task, MEDIUM if given.quick else LARGE)
    for seed in (1,) if given.quick else (1, 2, 3):
        _loss(report, task, train_a=False, seed=seed, steps=150 if given.quick else 300)
    worst = max(run["difference_percent"] for run in report.runs if run["what"] == "loss")
    report.bars.append(Bar.at_most("loss of three regions against one process, B trained", worst, "% more", LOSS_BAR))
    # Without a bar: what it costs to average A and B separately.
    _loss(report, task, train_a=True, seed=1, steps=30 if given.quick else 300)
    return report.close(given.json)


def _template() -> ModuleType:
    spec = importlib.util.spec_from_file_location("llm_lora", ROOT / "deploy/templates/llm-lora/task.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _made(task: ModuleType, config: dict[str, Any], seed: int) -> FlatModel:
    torch.manual_seed(seed)
    module = task.model(config)
    return FlatModel(module, base=frozen_parameters(module))


def _bytes(report: Report, task: ModuleType, size: dict[str, Any]) -> None:
    """The bytes of a step and of a round, in each codec."""
    flat = _made(task, {**size, "train_a": True}, 1)
    parameters = sum(p.numel() for p in flat.module.parameters())
    trained = sum(p.numel() for p in flat.module.parameters() if p.requires_grad)
    print(f"{parameters / 1e6:.1f} million parameters, {trained / 1e6:.3f} of them trained")
    x = torch.randint(0, 256, (2, 32))
    task.loss(flat.module, (x, x)).backward()
    step = _total(framing.encode({"gradient": flat.gradient()}, {"samples": 2}))
    _add(report, "a step", "fp32", step, 4 * trained, 4 * parameters)
    rng = np.random.default_rng(1)
    for name in codecs():
        codec, start = codec_named(name), flat.vector()
        replica = Replica(policy_of("ma"), ExchangeSettings(), codec, ReplicaState(start, start))
        replica.trained, replica.alone = flat.layout.trainable_size, False
        change = rng.normal(size=start.size).astype(np.float32) * 1e-3
        made = replica.own_update(start + change, 1, last=False)
        plain = sum(array.nbytes for array in codec.encode(change[:trained].copy()).values())
        _add(report, "a round", name, _total(framing.encode(made.tensors)), plain, 4 * parameters)


def _total(pieces: list[memoryview]) -> int:
    return sum(piece.nbytes for piece in pieces)


def _add(report: Report, what: str, codec: str, sent: int, adapter: int, whole: int) -> None:
    print(f"{what:<8} {codec:<9} {sent:>10,} bytes, {sent / adapter:.4f} of the adapter, 1/{whole / sent:.0f} of fp32")
    report.runs.append({"what": what, "codec": codec, "bytes": sent, "adapter_bytes": adapter, "whole_bytes": whole})
    report.bars.append(Bar.at_most(f"bytes of {what}, {codec}", sent / adapter, "x adapter", ROUND_BAR))


def _text(seed: int) -> torch.Tensor:
    drawn = random.Random(seed)
    words = ["harbour", "market", "orchard", "captain", "baker", "letters", "counts", "mends", "at noon", "in the rain"]
    text = " ".join(drawn.choice(words) for _ in range(40_000))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()


def _loss(report: Report, task: ModuleType, *, train_a: bool, seed: int, steps: int) -> None:
    """Train with three regions and with one process, and compare."""
    config, length = {**SMALL, "train_a": train_a}, int(SMALL["length"])
    windows = task.Windows(_text(seed), length)
    order = np.random.default_rng(seed).permutation(len(windows))
    test, train = order[:256], order[256:]
    draws = np.random.default_rng(seed + 100)
    batches = [draws.choice(train, (len(REGIONS), BATCH), replace=False) for _ in range(steps)]
    begun = time.monotonic()
    federated, skew = _federated(task, config, windows, batches, seed)
    alone = _Worker(task, config, seed, steps)
    for batch in batches:
        alone.step(windows, batch.reshape(-1))
    first, one, several = (
        _tested(task, flat, windows, test) for flat in (_made(task, config, seed), alone.flat, federated)
    )
    difference = 100 * (several / one - 1)
    print(
        f"train_a {train_a!s:<5} seed {seed}: loss {first:.3f} -> one process {one:.4f}, three regions {several:.4f} "
        f"({difference:+.2f} %); mean of products against product of means {100 * skew:.2g} % off"
    )
    report.runs.append(
        {
            "what": "loss", "train_a": train_a, "seed": seed, "steps": steps, "untrained": first, "one_process": one,
            "three_regions": several, "difference_percent": difference, "product_error": skew,
            "seconds": time.monotonic() - begun,
        }
    )  # fmt: skip


class _Worker:
    """A model with the template's optimiser, and a cosine schedule as `train.learningRate` has it."""

    def __init__(self, task: ModuleType, config: dict[str, Any], seed: int, steps: int) -> None:
        self._task, self.flat = task, _made(task, config, seed)
        self._optimizer = task.optimizer(self.flat.module.parameters(), config)
        self._schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self._optimizer, steps)

    def step(self, windows: Any, indices: Any) -> None:
        pairs = windows.__getitems__([int(index) for index in indices])
        batch = tuple(torch.stack(column) for column in zip(*pairs, strict=True))
        self._optimizer.zero_grad()
        self._task.loss(self.flat.module, batch).backward()
        self._optimizer.step()
        self._schedule.step()


def _federated(
    task: ModuleType, config: dict[str, Any], windows: Any, batches: list[Any], seed: int
) -> tuple[FlatModel, float]:
    """Return the final model, and how far the product of the means is from the mean of the products, at most."""
    workers = [_Worker(task, config, seed, len(batches)) for _ in REGIONS]
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
        products = torch.stack([_product(worker.flat) for worker in workers]).mean(0)
        updates = []
        for name, worker, replica in zip(REGIONS, workers, replicas, strict=True):
            made = replica.own_update(worker.flat.vector(), at, last=False)
            updates.append(Contribution(name, 1.0, made.sent.copy(), whole=made.whole))
        for name, worker, replica in zip(REGIONS, workers, replicas, strict=True):
            replica.merge(updates, None, own=name, rounds=1)
            replica.restart()
            worker.flat.load(replica.model)
        skew = max(skew, float((products - _product(workers[0].flat)).norm() / products.norm()))
    return workers[0].flat, skew


def _product(flat: FlatModel) -> torch.Tensor:
    """B A of the first block's first adapter."""
    lora: Any = flat.module.get_submodule("blocks.0.qkv")
    return (lora.lora_B.weight @ lora.lora_A.weight).detach()


def _tested(task: ModuleType, flat: FlatModel, windows: Any, test: Any) -> float:
    pairs = windows.__getitems__([int(index) for index in test])
    batch = tuple(torch.stack(column) for column in zip(*pairs, strict=True))
    with torch.no_grad():
        found = float(task.metrics(flat.module.eval(), [batch])["loss"])
    flat.module.train()
    assert math.isfinite(found)
    return found


if __name__ == "__main__":
    sys.exit(main())
