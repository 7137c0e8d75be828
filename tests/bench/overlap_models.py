"""Two CNNs of known sizes, how their backward pass gives its gradients, and stand-ins that give them at that pace."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

SAMPLES = 8


class _Basic(nn.Module):
    """A block of ResNet-18 (He et al. 2016)."""

    def __init__(self, there: int, out: int, stride: int) -> None:
        super().__init__()
        self.way = nn.Sequential(
            nn.Conv2d(there, out, 3, stride, 1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(),
            nn.Conv2d(out, out, 3, 1, 1, bias=False),
            nn.BatchNorm2d(out),
        )
        self.short: nn.Module = nn.Identity()
        if stride > 1 or there != out:
            self.short = nn.Sequential(nn.Conv2d(there, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.way(x) + self.short(x))


class _Inverted(nn.Module):
    """A block of MobileNetV2 (Sandler et al. 2018)."""

    def __init__(self, there: int, out: int, stride: int, wider: int) -> None:
        super().__init__()
        wide = there * wider
        widen = (nn.Conv2d(there, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU6()) if wider > 1 else ()
        self.way = nn.Sequential(
            *widen,
            nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU6(),
            nn.Conv2d(wide, out, 1, bias=False),
            nn.BatchNorm2d(out),
        )
        self.adds = stride == 1 and there == out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.way(x)
        return x + out if self.adds else out


def resnet18() -> nn.Module:
    """For images of 32 x 32 in ten classes: 44.7 MB."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    there = 64
    for out, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [_Basic(there, out, stride), _Basic(out, out, 1)]
        there = out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


def mobilenet() -> nn.Module:
    """For images of 32 x 32 in a thousand classes: 14.0 MB."""
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, 1, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU6()]
    there = 32
    for wider, out, count, stride in (
        (1, 16, 1, 1), (6, 24, 2, 1), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1),
    ):  # fmt: skip
        for number in range(count):
            layers.append(_Inverted(there, out, stride if number == 0 else 1, wider))
            there = out
    head = (nn.Conv2d(there, 1280, 1, bias=False), nn.BatchNorm2d(1280), nn.ReLU6(), nn.AdaptiveAvgPool2d(1))
    return nn.Sequential(*layers, *head, nn.Flatten(), nn.Linear(1280, 1000))


@dataclass(frozen=True)
class Pace:
    """When the backward pass gives each parameter its gradient."""

    sizes: tuple[int, ...]
    """Elements, in the order of the flat vector."""
    when: tuple[float, ...]
    """Share of the backward pass that is over."""
    forward: float
    """Its share of a step's compute."""


def pace_of(module: nn.Module, passes: int = 3) -> Pace:
    """Measured by the CPU time of the thread that computes, so that others on the machine hardly count."""
    images, labels = torch.randn(SAMPLES, 3, 32, 32), torch.arange(SAMPLES)
    parameters = list(module.parameters())
    given = [0.0] * len(parameters)

    def clock(at: int) -> Any:
        return lambda _: given.__setitem__(at, time.thread_time())

    for at, parameter in enumerate(parameters):
        parameter.register_post_accumulate_grad_hook(clock(at))  # type: ignore[no-untyped-call]
    best: tuple[float, tuple[float, ...], float] | None = None
    for _ in range(passes):
        module.zero_grad()
        begun = time.thread_time()
        loss = nn.functional.cross_entropy(module(images), labels)
        between = time.thread_time()
        loss.backward()  # type: ignore[no-untyped-call]
        over = time.thread_time()
        when = tuple((one - between) / (over - between) for one in given)
        if best is None or over - begun < best[0]:
            best = over - begun, when, (between - begun) / (over - begun)
    assert best is not None
    return Pace(tuple(parameter.numel() for parameter in parameters), best[1], best[2])


class _Paced(torch.autograd.Function):
    """Gives a parameter a gradient after so many seconds of the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, parameter: torch.Tensor, seconds: float, gradient: torch.Tensor) -> Any:
        ctx.seconds, ctx.gradient = seconds, gradient
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        time.sleep(ctx.seconds)
        return gradients[0], ctx.gradient.clone(), None, None


class StandIn(nn.Module):
    """As many parameters as the model, in the same order, whose gradients come at its pace; computing is sleeping."""

    def __init__(self, pace: Pace, seconds: float, scale: int, seed: Sequence[int]) -> None:
        """``seconds``: of a step's compute; ``scale``: by which the parameters are smaller."""
        super().__init__()
        draw = torch.Generator().manual_seed(hash(tuple(seed)) % (1 << 31))
        self._forward = seconds * pace.forward
        self.weights = nn.ParameterList(torch.zeros(max(1, size // scale)) for size in pace.sizes)
        self._gradients = [torch.randn(len(weight), generator=draw) for weight in self.weights]
        turns = sorted(range(len(pace.sizes)), key=lambda at: pace.when[at])
        before, self._turns = 0.0, list[tuple[int, float]]()
        for at in turns:
            self._turns.append((at, max(0.0, pace.when[at] - before) * seconds * (1 - pace.forward)))
            before = pace.when[at]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self._forward)
        for at, seconds in reversed(self._turns):
            x = _Paced.apply(x, self.weights[at], seconds, self._gradients[at])  # type: ignore[no-untyped-call]
        return x.sum()
