"""The models of the quality runs: LeNet-5, a small ResNet with BatchNorm, a character transformer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from quality_data import CONTEXT, VOCABULARY, Data, cifar, mnist, shakespeare
from torch import nn
from torch.nn import functional

__all__ = ["WORKLOADS", "Workload"]


@dataclass(frozen=True)
class Workload:
    """What is learnt, and how."""

    name: str
    data: Callable[[Path], Data]
    model: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module, float], torch.optim.Optimizer]
    rates: tuple[float, ...]
    """Learning rates that every contender may choose from."""
    batch: int
    """Of a region."""
    steps: int
    """Of a region, in a full run."""

    def loss(self, module: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return functional.cross_entropy(module(batch[0]).flatten(0, -2), batch[1].flatten())

    def quality(self, module: nn.Module, test: tuple[torch.Tensor, torch.Tensor]) -> tuple[float, float]:
        """Accuracy in per cent (of tokens, for text), and loss."""
        module.eval()
        right, loss, count = 0, 0.0, test[1].numel()
        with torch.no_grad():
            for given, wanted in zip(test[0].split(250), test[1].split(250), strict=True):
                scores = module(given).flatten(0, -2)
                right += int((scores.argmax(1) == wanted.flatten()).sum())
                loss += float(functional.cross_entropy(scores, wanted.flatten(), reduction="sum"))
        return 100 * right / count, loss / count


def _lenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


class _Block(nn.Module):
    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(inner, outer, 3, stride, 1, bias=False), nn.BatchNorm2d(outer))
        self.second = nn.Sequential(nn.Conv2d(outer, outer, 3, 1, 1, bias=False), nn.BatchNorm2d(outer))
        short = [nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer)] if stride > 1 else []
        self.short = nn.Sequential(*short)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = functional.relu(self.second(functional.relu(self.first(x))) + self.short(x))
        return out


def _resnet(width: int = 16) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(), _Block(width, width, 1),
        _Block(width, 2 * width, 2), _Block(2 * width, 4 * width, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(4 * width, 10),
    )  # fmt: skip


class _Transformer(nn.Module):
    def __init__(self, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.place = nn.Parameter(torch.zeros(CONTEXT, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(x) + self.place
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        out: torch.Tensor = self.out(self.norm(hidden))
        return out


def _sgd(module: nn.Module, rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), rate, momentum=0.9, weight_decay=1e-4, fused=True)


def _adamw(module: nn.Module, rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), rate, betas=(0.9, 0.99), weight_decay=0.01, fused=True)


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("lenet-mnist", mnist, _lenet, _sgd, (0.01, 0.03, 0.06), 32, 2000),
        Workload("resnet-cifar", cifar, _resnet, _sgd, (0.05, 0.1, 0.2), 32, 2000),
        Workload("transformer-text", shakespeare, _Transformer, _adamw, (4e-3, 8e-3, 16e-3), 8, 2000),
    )
}
