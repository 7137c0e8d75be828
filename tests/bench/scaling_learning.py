"""Real training with a number of workers that changes, one model for all of them; time and money are MODELLED.

Workers that merge after every step hold the same model, so one copy is trained on all their samples: the gradient is
the mean of theirs, exactly what they would have merged. A step takes the measured compute of a worker's batch and the
closed form of a merge (`sync.collective`) over a Redis of 1 ms and 1 Gbit/s, with a lateness that is drawn. Gradients
of the two sparse tasks travel as lists of entries, of 8 bytes each, through K-REDUCE; those of networks whole.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from isp_data import TASKS, Flat, Kind, Task, prepare
from quality_models import WORKLOADS
from torch import nn
from torch.nn import functional as F
from torch.utils.data import default_collate

from scheduler.scaling import StepCosts, StepObservation, learning_rate_factor
from sync.collective import ChannelCosts, Merge, choose, estimate

__all__ = ["POOL", "SETTINGS", "Controller", "PoolTime", "Run", "Setting", "play", "pool_time", "task_of"]

POOL = 24
"""Workers to begin with, and at most; MLLess's examples have as many."""
CHANNEL = ChannelCosts(0.001, 0.001, 1.25e8, 1.25e8, parallel=16)
"""1 ms, 1 Gbit/s a worker, a store that tells."""
ENTRY_BYTES = 8
FUNCTION_GB = 0.5
FULL_CORE_GB = 1769 / 1024
"""AWS Lambda gives a function a core by its memory; a smaller one gets its share of it."""
USD_PER_GB_SECOND = 0.0000166667
"""AWS Lambda, us-east-1, x86."""
USD_PER_SECOND = 0.17 / 3600 + FUNCTION_GB * USD_PER_GB_SECOND
"""What does not depend on the workers, as MLLess bills it: the machine of the Redis, and the supervisor's function."""
JOIN_SECONDS = 1.0
"""For which all stand still when workers join. Those that leave do so after a merge, which then is made once more."""
LATE = 0.05
"""Standard deviation of the logarithm of a step's seconds."""


@dataclass(frozen=True)
class Setting:
    """How a task is trained."""

    batch: int
    """Samples of one worker in a step."""
    lr: float
    """With the whole pool; with W workers: by the square root of W / pool."""
    steps: int
    """Of the pool, at most, in a run; fewer workers may see as many samples."""


SETTINGS = {
    "clicks": Setting(256, 0.005, 300),
    "ratings": Setting(512, 0.05, 200),
    "images": Setting(16, 0.002, 200),
    # The batch of images. At their rate so small a set is learnt in few steps; at a quarter of it in hundreds.
    "mnist": Setting(16, 0.0005, 600),
}
MOST_STEPS = 6000
"""Of one run."""
HELD_OUT = 500
"""Of MNIST's, spread over all: they are asked after each step."""


def task_of(name: str, folder: Path, quick: bool, data: Path) -> Task:
    """The task with its data: of the ISP benchmark, images of digits that scikit-learn brings along, or MNIST in
    ``data``, which is made up where it is not there."""
    if name == "images":
        return _digits()
    return _mnist(data) if name == "mnist" else prepare(TASKS[name], folder, None, quick)


class _Images:
    def __init__(self, pictures: Any, kinds: Any) -> None:
        self.pictures, self.kinds = pictures, kinds

    def __len__(self) -> int:
        return len(self.kinds)

    def __getitems__(self, indices: list[int]) -> list[Any]:
        chosen = torch.as_tensor(indices)
        return [(self.pictures[chosen], self.kinds[chosen])]


def _digits() -> Task:
    from sklearn.datasets import load_digits

    pictures, kinds = load_digits(return_X_y=True)
    order = np.random.default_rng(7).permutation(len(kinds))
    x = torch.from_numpy((pictures[order] / 16.0).reshape(-1, 1, 8, 8)).float()
    y = torch.from_numpy(kinds[order].astype(np.int64))

    def model() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10),
        )  # fmt: skip

    return _network("images", model, _Images(x[:1500], y[:1500]), _Images(x[1500:], y[1500:]))


def _mnist(folder: Path) -> Task:
    workload = WORKLOADS["lenet-mnist"]
    data = workload.data(folder)
    some = slice(None, None, len(data.test[1]) // HELD_OUT)
    return _network("mnist", workload.model, _Images(*data.train), _Images(data.test[0][some], data.test[1][some]))


def _network(name: str, network: Callable[[], nn.Module], train: _Images, test: _Images) -> Task:
    """To tell images apart."""

    def model(config: dict[str, Any]) -> nn.Module:
        return network()

    def loss(module: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(module(batch[0].flatten(0, -4)), batch[1].flatten())

    def metrics(module: nn.Module, batches: list[Any]) -> dict[str, float]:
        return {"loss": statistics.mean(float(loss(module, batch)) for batch in batches)}

    def optimizer(parameters: Any, config: dict[str, Any]) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=config["lr"])

    module = SimpleNamespace(model=model, loss=loss, metrics=metrics, optimizer=optimizer)
    return Task(Kind(name, "", "loss", SETTINGS[name].batch), module, {}, train, test)


@dataclass(frozen=True)
class PoolTime:
    """What a step takes with each number of workers, from 1 on."""

    compute: float
    """Seconds of a worker's batch, measured, on the share of a core that the function has."""
    merge: tuple[float, ...]
    """Where each worker's own 1 Gbit/s bounds it."""
    at_store: tuple[float, ...]
    """Where all go through the one card of 1 Gbit/s that the Redis has, as in MLLess's experiments."""
    shared: bool = False
    """Which of the two holds."""

    @property
    def merges(self) -> tuple[float, ...]:
        return self.at_store if self.shared else self.merge

    def step(self, workers: int) -> float:
        return self.compute + self.merges[workers - 1]

    def terms(self, compute_off: float = 1.0) -> StepCosts:
        """As a tuner is told; ``compute_off``: how wrong the plan is about the compute."""
        return StepCosts(
            expected_seconds=tuple(self.compute * compute_off + merge for merge in self.merges),
            worker_usd_per_second=FUNCTION_GB * USD_PER_GB_SECOND,
            usd_per_second=USD_PER_SECOND,
            join_seconds=JOIN_SECONDS,
        )


def pool_time(task: Task, batch: int) -> PoolTime:
    """CPU seconds of one thread, so that what else runs on the machine does not count: the median of 12 batches, their
    putting together included."""
    model = Flat(task.model())
    optimizer, taken = task.optimizer(model.model, 0.001), []
    stream = _samples(task, 0)
    for _ in range(15):
        begun = time.thread_time()
        given = _batch(task, stream, batch)
        model.gradient.zero_()
        task.module.loss(model.model, given).backward()
        optimizer.step()
        taken.append(time.thread_time() - begun)
    counts = (1, 2, 4, 8, 16, POOL)
    sizes = [float(_entries(task, model, stream, batch * workers) * ENTRY_BYTES) for workers in counts]
    merged = np.interp(np.arange(1, POOL + 1), counts, sizes)
    whole = float(model.vector.nbytes)
    merge, at_store = [0.0], [0.0]
    for workers in range(2, POOL + 1):
        if not task.kind.template:  # a network
            one = all_ = whole
            seconds = choose(workers, whole, CHANNEL).estimate.seconds
        else:
            one, all_ = float(merged[0]), float(merged[workers - 1])
            seconds = estimate(Merge("isp", workers, one, workers, merged_bytes=all_), CHANNEL).seconds
        # A worker keeps its part of its own chunk; all else goes out of the store. Less goes in; the card is duplex.
        out = (workers - 1) * (one + all_) / CHANNEL.down_bytes_per_second
        merge.append(seconds)
        at_store.append(max(seconds, out))
    return PoolTime(statistics.median(taken[3:]) * FULL_CORE_GB / FUNCTION_GB, tuple(merge), tuple(at_store))


def _entries(task: Task, model: Flat, stream: Iterator[int], samples: int) -> int:
    """Coordinates that a gradient of so many samples has."""
    model.gradient.zero_()
    task.module.loss(model.model, _batch(task, stream, samples)).backward()
    return int(torch.count_nonzero(model.gradient))


def _samples(task: Task, seed: int) -> Iterator[int]:
    random = np.random.default_rng([seed, 11])
    while True:
        yield from random.permutation(len(task.train)).tolist()


def _batch(task: Task, stream: Iterator[int], count: int) -> Any:
    return default_collate(task.train.__getitems__([next(stream) for _ in range(count)]))


@dataclass
class Run:
    """One training run."""

    task: str
    policy: str
    seed: int
    steps: list[int] = field(default_factory=list)
    """Of which the following lists tell."""
    quality: list[float] = field(default_factory=list)
    """Held-out loss."""
    seconds: list[float] = field(default_factory=list)
    usd: list[float] = field(default_factory=list)
    workers: list[int] = field(default_factory=list)
    changes: list[tuple[int, int]] = field(default_factory=list)
    """Step and workers from then on."""
    reached: bool = False
    """Whether it got to the held-out loss at which it was to end."""
    wall_seconds: float = 0.0

    def to(self, target: float) -> tuple[float, float]:
        """Seconds and dollars to a held-out loss; infinite where it is not reached."""
        for quality, seconds, usd in zip(self.quality, self.seconds, self.usd, strict=True):
            if quality <= target:
                return seconds, usd
        return math.inf, math.inf


Controller = Callable[[StepObservation], int]
"""Told every step, it says with how many workers to continue."""


def play(
    task: Task, name: str, policy: str, seed: int, begin: int, controller: Controller, times: PoolTime, target: float,
    usd_most: float = math.inf,
) -> Run:  # fmt: skip
    """Train until the target is reached, or so many dollars are spent, or too many samples seen.

    What is told is what the control plane tells: the held-out loss, which the target is of, and nothing of gradients.
    """
    setting, run, begun = SETTINGS[name], Run(name, policy, seed), time.monotonic()
    flat = Flat(task.model(seed))
    optimizer = task.optimizer(flat.model, setting.lr)
    stream, late = _samples(task, seed), np.random.default_rng([seed, 13])
    terms, workers, seconds, usd, seen = times.terms(), begin, 0.0, 0.0, 0
    held_out = task.quality(flat.model)
    _note(run, 0, held_out, seconds, usd, workers)
    step = 0
    while held_out > target and usd < usd_most and seen < setting.steps * POOL * setting.batch and step < MOST_STEPS:
        step += 1
        for group in optimizer.param_groups:
            group["lr"] = setting.lr * learning_rate_factor(workers, POOL)
        flat.gradient.zero_()
        # The mean over all their samples is what the workers would have merged.
        task.module.loss(flat.model, _batch(task, stream, setting.batch * workers)).backward()
        optimizer.step()
        seen += workers * setting.batch
        took = times.step(workers) * float(np.exp(late.normal(0.0, LATE)))
        seconds += took
        usd += terms.rate(workers) * took
        held_out = task.quality(flat.model)
        _note(run, step, held_out, seconds, usd, workers)
        wanted = controller(StepObservation(step, seconds, held_out, workers, usd))
        if wanted != workers:
            most = max(wanted, workers)
            pause = JOIN_SECONDS if wanted > workers else times.merges[workers - 1]
            seconds += pause
            usd += terms.rate(most) * pause
            workers = wanted
            run.changes.append((step, workers))
    run.reached = held_out <= target
    run.wall_seconds = time.monotonic() - begun
    return run


def _note(run: Run, step: int, quality: float, seconds: float, usd: float, workers: int) -> None:
    run.steps.append(step)
    run.quality.append(quality)
    run.seconds.append(seconds)
    run.usd.append(usd)
    run.workers.append(workers)
