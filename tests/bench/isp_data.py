"""The two tasks of the ISP benchmark: the templates' own modules, and data whose supports overlap as clicks' do."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import util
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from sync.layout import Vector

__all__ = ["TASKS", "Flat", "Kind", "Task", "batches", "prepare"]

TEMPLATES = Path(__file__).resolve().parents[2] / "deploy" / "templates"
CATEGORIES = 20_000
"""Of each of 26 made-up Criteo columns; their popularity is Zipf's, exponent 1.3, as the template draws it."""
ITEMS = 3700
"""Made up, as many as MovieLens 1M has; the popularity of rank r falls as (1 + r)^-0.6, as the template draws it."""
CUT_SEED = 7


@dataclass(frozen=True)
class Kind:
    """What is learnt, before there is data."""

    name: str
    template: str
    metric: str
    """Of the task's own, over held-out samples."""
    batch: int
    """Of each worker, in samples."""


TASKS = {
    "clicks": Kind("clicks", "sparse-logistic-regression", "loss", 512),
    "ratings": Kind("ratings", "matrix-factorisation", "mse", 512),
}


@dataclass(frozen=True)
class Task:
    """A kind with its data."""

    kind: Kind
    module: Any
    config: dict[str, Any]
    train: Any
    test: Any

    def model(self, seed: int = 0) -> torch.nn.Module:
        torch.manual_seed(seed)
        model: torch.nn.Module = self.module.model(self.config)
        return model

    def optimizer(self, model: torch.nn.Module, lr: float) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = self.module.optimizer(model.parameters(), {**self.config, "lr": lr})
        return optimizer

    def quality(self, model: torch.nn.Module) -> float:
        """The held-out metric."""
        with torch.no_grad():
            return float(self.module.metrics(model, [self._test])[self.kind.metric])

    @property
    def _test(self) -> Any:
        if "test" not in self.__dict__.get("_cache", {}):
            whole = default_collate(self.test.__getitems__(list(range(len(self.test)))))
            object.__setattr__(self, "_cache", {"test": whole})
        return self.__dict__["_cache"]["test"]


class Flat:
    """A module whose parameters are views of one vector."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        parameters = list(model.parameters())
        self.tensor = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
        self.gradient = torch.zeros_like(self.tensor)
        at = 0
        for parameter in parameters:
            parameter.data = self.tensor[at : at + parameter.numel()].view(parameter.shape)
            parameter.grad = self.gradient[at : at + parameter.numel()].view(parameter.shape)
            at += parameter.numel()
        self.vector: Vector = self.tensor.numpy()


def prepare(kind: Kind, folder: Path, source: Path | None, quick: bool, seed: int = 1) -> Task:
    """Write the kind's data as files, or cut a file of the user's, and read them with the task's own reader."""
    with _importing(TEMPLATES / kind.template) as load:
        maker = load("make_data")
        if kind.name == "clicks":
            lines, config = _clicks(maker, source, quick, seed)
            ending = "txt"
        else:
            lines, config = _ratings(maker, source, quick, seed)
            ending = "dat"
        for split, rest in (("train", range(9)), ("test", (9,))):
            text = "\n".join(line for number, line in enumerate(lines) if number % 10 in rest)
            (folder / f"{kind.name}-{split}.{ending}").write_text(text + "\n")
        module = load("task")
        train, test = (
            module.dataset(str(folder / f"{kind.name}-{split}.{ending}"), split, config) for split in ("train", "test")
        )
    return Task(kind, module, config, train, test)


def _clicks(maker: Any, source: Path | None, quick: bool, seed: int) -> tuple[list[str], dict[str, Any]]:
    if source is not None:
        lines = source.read_text("ascii").splitlines()
        if "\t" in lines[0]:
            return lines, {"dimension": 100_013}
        highest = max(int(field.split(":")[0]) for line in lines for field in line.split()[1:])
        return lines, {"dimension": max(14, highest + 1)}
    maker.CATEGORIES = CATEGORIES
    truth, random = np.random.default_rng(seed), np.random.default_rng([seed, 0])
    count = 40_000 if quick else 160_000
    return list(islice(maker.criteo_lines(random, truth, 0, count), count)), {"dimension": 100_013}


def _ratings(maker: Any, source: Path | None, quick: bool, seed: int) -> tuple[list[str], dict[str, Any]]:
    class Given:
        users = 3000 if quick else 6000

    Given.seed = seed  # type: ignore[attr-defined]
    maker.ITEMS = ITEMS
    rows = list(maker.dealt(source, ["all"]) if source is not None else maker.made_up(Given, ["all"]))
    # A user's ratings come together in the file; a worker sees any.
    np.random.default_rng(CUT_SEED).shuffle(rows)
    lines = [f"{user}::{item}::{rating:g}::{time}" for _, user, item, rating, time in rows]
    users, items = max(row[1] for row in rows) + 1, max(row[2] for row in rows) + 1
    mean = float(np.mean([row[3] for row in rows]))
    return lines, {"users": users, "items": items, "mean": mean, "rank": 8, "l2": 0.03}


def batches(task: Task, worker: int, workers: int, seed: int) -> Iterator[Any]:
    """A worker's batches without end: samples worker, worker + P, ..., in another order in each epoch."""
    mine = np.arange(worker, len(task.train), workers)
    random, size = np.random.default_rng([seed, worker]), min(task.kind.batch, len(mine))
    while True:
        order = random.permutation(mine)
        for start in range(0, len(order) - size + 1, size):
            yield default_collate(task.train.__getitems__(order[start : start + size].tolist()))


@contextmanager
def _importing(folder: Path) -> Iterator[Any]:
    """Load a template's modules; those of another template have the same names."""
    before = dict(sys.modules)
    sys.path.insert(0, str(folder))

    def load(name: str) -> ModuleType:
        spec = util.spec_from_file_location(f"{folder.name}-{name}", folder / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module

    try:
        yield load
    finally:
        sys.path.remove(str(folder))
        for name in ("records", "formats"):
            sys.modules.pop(name, None)
            if name in before:
                sys.modules[name] = before[name]
