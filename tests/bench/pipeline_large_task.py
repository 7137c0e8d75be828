"""The task of `pipeline_large.py`: a chain of residual blocks that predicts the next letter.

It notes what it does, in a file that its config names: each optimiser's step, and each micro-batch's loss.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

LETTERS = 64


class Tokens(nn.Module):
    """What is read, and where."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(LETTERS, width), nn.Embedding(length, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.letters(x) + self.places(torch.arange(x.shape[1]))


class Block(nn.Module):
    """Adds to each place what follows from the mean of those before it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.norm(x).cumsum(1) / torch.arange(1, x.shape[1] + 1).view(-1, 1)
        return x + 0.2 * self.down(functional.gelu(self.up(before)))


def layers(config: dict[str, Any]) -> list[Callable[[], nn.Module]]:
    width = config["width"]
    blocks = [lambda: Block(width)] * config["blocks"]
    head = lambda: nn.Sequential(nn.LayerNorm(width), nn.Linear(width, LETTERS))  # noqa: E731
    return [lambda: Tokens(width, config["length"]), *blocks, head]


def dataset(uri: str, split: str, config: dict[str, Any]) -> TensorDataset:
    codes, row = torch.tensor(list(Path(uri).read_bytes())) % LETTERS, config["length"] + 1
    codes = codes[: len(codes) // row * row].reshape(-1, row)
    return TensorDataset(codes[:, :-1], codes[:, 1:])


_notes: list[Path] = []


def note(**what: float) -> None:
    """One line by one write: several processes do this at the same time."""
    line = json.dumps({"at": time.monotonic(), "process": os.getpid(), **what}) + "\n"
    for path in _notes:
        with path.open("ab", buffering=0) as file:
            file.write(line.encode())


def loss(model: Callable[[torch.Tensor], torch.Tensor], batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    x, y = batch
    value = functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
    note(loss=float(value.detach()), samples=len(x))
    return value


class Noted(torch.optim.SGD):
    """Tells of each of its steps."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        begun = time.monotonic()
        super().step(closure)
        note(step_seconds=time.monotonic() - begun, busy_seconds=time.process_time())


def optimizer(parameters: Iterable[nn.Parameter], config: dict[str, Any]) -> torch.optim.Optimizer:
    _notes[:] = [Path(config["notes"])]
    return Noted(parameters, lr=config["lr"], momentum=0.9)
