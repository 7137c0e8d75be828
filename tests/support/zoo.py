"""Modules and optimisers of many kinds, whose training must not depend on how it is cut and shared out.

Every module maps inputs of shape (n, 4) to outputs of shape (n, 2). A task module serves each by its name.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

__all__ = ["MODULES", "OPTIMIZERS", "WIDE", "loss"]

Parameters = Iterable[nn.Parameter]
MODULES: dict[str, Callable[[], nn.Module]] = {}
OPTIMIZERS: dict[str, Callable[[Parameters], torch.optim.Optimizer]] = {}
WIDE = {"float64 parameters", "float64 everywhere"}
"""Modules whose parameters are rounded to float32 wherever they travel."""


def loss(module: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return nn.functional.mse_loss(module(x).to(y.dtype), y)


def _module(name: str) -> Callable[[Callable[[], nn.Module]], Callable[[], nn.Module]]:
    def note(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        MODULES[name] = make
        return make

    return note


class _Own(nn.Module):
    """A linear layer, and what a subclass adds in `extra`, shape (n, 2)."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 2)
        self.steps = 0
        self.build()

    def build(self) -> None: ...

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.line(x)
        return out + self.extra(x)

    def extra(self, x: torch.Tensor) -> Any:
        return 0.0


def _with_buffers(train: Callable[[Any, torch.Tensor], None] | None = None, **buffers: torch.Tensor) -> Any:
    """A class with these buffers; ``train`` is called with module and inputs in each forward pass of training."""

    class Buffered(_Own):
        def build(self) -> None:
            for name, value in buffers.items():
                self.register_buffer(name, value.clone() if value.is_contiguous() else value)

        def extra(self, x: torch.Tensor) -> Any:
            if train is not None and self.training:
                with torch.no_grad():
                    train(self, x)
            return 0.0

    return Buffered


def _sequence(*layers: nn.Module) -> Callable[[], nn.Module]:
    return lambda: copy.deepcopy(nn.Sequential(*layers))


class _Lambda(nn.Module):
    def __init__(self, call: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(x)


_last = nn.Linear(6, 2)
MODULES |= {
    "linear": lambda: nn.Linear(4, 2),
    "mlp": lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)),
    "batch norm": lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)),
    "batch norm, running mean": lambda: nn.Sequential(nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 2)),
    "batch norm, not affine": lambda: nn.Sequential(nn.BatchNorm1d(4, affine=False), nn.Linear(4, 2)),
    "batch norm, no statistics": lambda: nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 2)),
    "layer norm": lambda: nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 2)),
    "rms norm": lambda: nn.Sequential(nn.RMSNorm(4), nn.Linear(4, 2)),
    "group norm": lambda: nn.Sequential(nn.GroupNorm(2, 4), nn.Linear(4, 2)),
    "instance norm": lambda: nn.Sequential(
        _Lambda(lambda x: x[:, None, :]), nn.InstanceNorm1d(1, affine=True, track_running_stats=True), nn.Flatten(),
        nn.Linear(4, 2),
    ),
    "convolution": lambda: nn.Sequential(
        _Lambda(lambda x: x[:, None, :]), nn.Conv1d(1, 3, 3), nn.BatchNorm1d(3), nn.Flatten(), nn.Linear(6, 2)
    ),
    "dropout": lambda: nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.4), nn.Linear(6, 2)),
    "prelu": lambda: nn.Sequential(nn.Linear(4, 2), nn.PReLU()),
    "transformer": lambda: nn.Sequential(
        _Lambda(lambda x: x[:, None, :]), nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), nn.Flatten(),
        nn.Linear(4, 2),
    ),
    "spectral norm": lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 6)), nn.Linear(6, 2)),
    "weight norm": lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 6)), nn.Linear(6, 2)),
    "orthogonal": lambda: nn.Sequential(parametrizations.orthogonal(nn.Linear(4, 4)), nn.Linear(4, 2)),
    "bfloat16": lambda: nn.Sequential(_Lambda(lambda x: x.bfloat16()), nn.Linear(4, 2).bfloat16()),
    "float64 parameters": lambda: nn.Sequential(_Lambda(lambda x: x.double()), nn.Linear(4, 2).double()),
    "float64 everywhere": lambda: nn.Sequential(
        _Lambda(lambda x: x.double()), nn.BatchNorm1d(4).double(), nn.Linear(4, 2).double()
    ),
    "lazy, seen in model()": lambda: _seen(nn.Sequential(nn.LazyLinear(6), nn.LazyBatchNorm1d(), nn.LazyLinear(2))),
    "frozen layer": lambda: nn.Sequential(nn.Linear(4, 6).requires_grad_(False), nn.Linear(6, 2)),
}  # fmt: skip
for _name, _value in {
    "-inf mask": torch.full((3, 3), float("-inf")).triu(1),
    "not a number": torch.tensor([1.0, float("nan"), float("inf"), float("-inf")]),
    "large integers": torch.tensor([2_000_000_011, -2_000_000_011], dtype=torch.int32),
    "hash seeds": torch.tensor([(1 << 63) - 1, -(1 << 63), 77]),
    "unsigned": torch.tensor([(1 << 64) - 1, 5], dtype=torch.uint64),
    "packed weights": torch.arange(256, dtype=torch.uint8),
    "int8": torch.arange(-128, 127, dtype=torch.int8),
    "int16": torch.tensor([-(1 << 15), 77], dtype=torch.int16),
    "uint32": torch.tensor([(1 << 32) - 1], dtype=torch.uint32),
    "boolean": torch.tensor([True, False, True]),
    "float64 constants": torch.linspace(0, 1, 7, dtype=torch.float64) / 3,
    "float64 with infinity": torch.tensor([1 / 3, float("inf")], dtype=torch.float64),
    "float16": torch.linspace(0, 1, 7).half() / 3,
    "float8": torch.tensor([1.0, 2.0, -0.5]).to(torch.float8_e4m3fn),
    "complex constants": torch.polar(torch.ones(3), torch.tensor([0.1, 0.2, 0.3])),
    "expanded": torch.arange(4.0).expand(3, 4),
    "empty": torch.zeros(0, 3),
    "transposed": torch.arange(6.0).reshape(2, 3).t(),
}.items():
    MODULES[f"buffer: {_name}"] = _with_buffers(kept=_value)


def _count(module: Any, x: torch.Tensor) -> None:
    module.mean = 0.5 * module.mean + 0.5 * x.mean(0)
    module.seen = module.seen + len(x)


def _lowest(module: Any, x: torch.Tensor) -> None:
    torch.minimum(module.least, x.min(0).values, out=module.least)


def _flip(module: Any, x: torch.Tensor) -> None:
    module.flags ^= x[0] > 0
    module.small += 3


def _precisely(module: Any, x: torch.Tensor) -> None:
    module.total += x.sum().double() / 3


MODULES |= {
    "buffers assigned again": _with_buffers(_count, mean=torch.zeros(4), seen=torch.tensor(0)),
    "a counter of billions": _with_buffers(_count, mean=torch.zeros(4), seen=torch.tensor(1 << 40)),
    "least from infinity": _with_buffers(_lowest, least=torch.full((4,), float("inf"))),
    "flags that change": _with_buffers(
        _flip, flags=torch.tensor([True, False, True, False]), small=torch.tensor([250, 1], dtype=torch.uint8)
    ),
    "a sum in float64": _with_buffers(_precisely, total=torch.zeros((), dtype=torch.float64)),
}


def _seen(module: nn.Module) -> nn.Module:
    module.eval()(torch.zeros(2, 4))
    return module.train()


@_module("recurrent")
class _Recurrent(_Own):
    def build(self) -> None:
        self.cell = nn.LSTM(1, 2, num_layers=2, batch_first=True)

    def extra(self, x: torch.Tensor) -> Any:
        return self.cell(x[:, :, None])[0][:, -1]


@_module("embedding")
class _Embedding(_Own):
    sparse = False

    def build(self) -> None:
        self.table = nn.Embedding(9, 2, sparse=self.sparse)

    def extra(self, x: torch.Tensor) -> Any:
        return self.table((x[:, 0] * 2).long().clamp(-4, 4) + 4)


@_module("sparse embedding")
class _SparseEmbedding(_Embedding):
    sparse = True


@_module("tied")
class _Tied(_Own):
    def build(self) -> None:
        self.into, self.out = nn.Linear(2, 4, bias=False), nn.Linear(2, 4, bias=False)
        self.out.weight = self.into.weight

    def extra(self, x: torch.Tensor) -> Any:
        return self.out(x @ self.into.weight) @ self.into.weight


@_module("tied by data")
class _TiedByData(_Own):
    def build(self) -> None:
        self.one, self.other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        self.other.data = self.one.data

    def extra(self, x: torch.Tensor) -> Any:
        return self.one + 0.5 * self.other


@_module("a buffer that is a parameter's memory")
class _View(_Own):
    def build(self) -> None:
        self.register_buffer("bias_now", self.line.bias.data)


@_module("one layer in two places")
class _Shared(_Own):
    def build(self) -> None:
        self.first = nn.BatchNorm1d(4)
        self.again = self.first

    def extra(self, x: torch.Tensor) -> Any:
        return self.again(self.first(x))[:, :2]


@_module("never used")
class _Idle(_Own):
    def build(self) -> None:
        self.idle = nn.Parameter(torch.ones(3))


@_module("used by some samples only")
class _Sometimes(_Own):
    def build(self) -> None:
        self.rare = nn.Parameter(torch.ones(2))

    def extra(self, x: torch.Tensor) -> Any:
        return self.rare if bool(x[0, 0] > 0.5) else 0.0


@_module("unused after some steps")
class _Late(_Own):
    def build(self) -> None:
        self.early = nn.Parameter(torch.ones(2))
        self.register_buffer("count", torch.tensor(0))

    def extra(self, x: torch.Tensor) -> Any:
        if self.training:
            self.count += 1
        return self.early if int(self.count) <= 5 else 0.0


@_module("a scalar and an empty parameter")
class _Odd(_Own):
    def build(self) -> None:
        self.scale, self.nothing = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.zeros(0, 2))

    def extra(self, x: torch.Tensor) -> Any:
        return self.scale + self.nothing.sum()


@_module("lists and dicts of parameters")
class _Lists(_Own):
    def build(self) -> None:
        self.many = nn.ParameterList([nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(2))])
        self.named = nn.ParameterDict({"a b": nn.Parameter(torch.ones(2))})
        self.register_buffer("nothing", None)

    def extra(self, x: torch.Tensor) -> Any:
        return sum(self.many) + self.named["a b"]


@_module("pruned")
class _Pruned(_Own):
    def build(self) -> None:
        prune.l1_unstructured(self.line, "weight", amount=0.3)


@_module("spectral norm of old")
class _OldSpectral(_Own):
    def build(self) -> None:
        self.head = nn.utils.spectral_norm(nn.Linear(4, 2))

    def extra(self, x: torch.Tensor) -> Any:
        return self.head(x)


@_module("recomputed activations")
class _Recomputed(_Own):
    def build(self) -> None:
        self.hidden = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))

    def extra(self, x: torch.Tensor) -> Any:
        return checkpoint(self.hidden, x, use_reentrant=False)


@_module("a moving average inside")
class _Average(_Own):
    def build(self) -> None:
        self.average = AveragedModel(self.line)

    def extra(self, x: torch.Tensor) -> Any:
        if self.training:
            self.average.update_parameters(self.line)
        return 0.0


@_module("a teacher without gradients")
class _Teacher(_Own):
    def build(self) -> None:
        self.teacher = copy.deepcopy(self.line).requires_grad_(False)

    def extra(self, x: torch.Tensor) -> Any:
        if self.training:
            with torch.no_grad():
                self.teacher.weight.lerp_(self.line.weight, 0.25)
        return 0.1 * self.teacher(x)


@_module("extra state")
class _Extra(_Own):
    def build(self) -> None:
        self.total = torch.zeros(2, dtype=torch.float64)

    def extra(self, x: torch.Tensor) -> Any:
        if self.training:
            self.total = self.total + x[:, :2].sum(0).double().cpu() / 7
        return 0.0

    def get_extra_state(self) -> torch.Tensor:
        return self.total

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.total = state


@_module("a buffer that is not saved")
class _Scratch(_Own):
    def build(self) -> None:
        self.register_buffer("warm", torch.zeros(2), persistent=False)

    def extra(self, x: torch.Tensor) -> Any:
        if self.training:
            self.warm = 0.9 * self.warm + x[:, :2].mean(0)
        return self.warm


# Optimisers

_RATE = 0.05
OPTIMIZERS |= {
    "sgd": lambda p: torch.optim.SGD(p, lr=_RATE),
    "sgd, momentum": lambda p: torch.optim.SGD(p, lr=_RATE, momentum=0.9),
    "sgd, nesterov": lambda p: torch.optim.SGD(p, lr=_RATE, momentum=0.9, nesterov=True),
    "sgd, dampening": lambda p: torch.optim.SGD(p, lr=_RATE, momentum=0.9, dampening=0.3),
    "sgd, weight decay": lambda p: torch.optim.SGD(p, lr=_RATE, weight_decay=0.1),
    "sgd, maximise": lambda p: torch.optim.SGD(p, lr=0.001, maximize=True),
    "sgd, foreach": lambda p: torch.optim.SGD(p, lr=_RATE, momentum=0.9, foreach=True),
    "sgd, a rate that is a tensor": lambda p: torch.optim.SGD(p, lr=torch.tensor(_RATE)),
    "adam": lambda p: torch.optim.Adam(p, lr=_RATE),
    "adam, amsgrad": lambda p: torch.optim.Adam(p, lr=_RATE, amsgrad=True),
    "adam, weight decay": lambda p: torch.optim.Adam(p, lr=_RATE, weight_decay=0.1),
    "adam, fused": lambda p: torch.optim.Adam(p, lr=_RATE, fused=True),
    "adam, foreach": lambda p: torch.optim.Adam(p, lr=_RATE, foreach=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=_RATE, weight_decay=0.1),
    "adamw, fused": lambda p: torch.optim.AdamW(p, lr=_RATE, fused=True),
    "adamax": lambda p: torch.optim.Adamax(p, lr=_RATE),
    "nadam": lambda p: torch.optim.NAdam(p, lr=_RATE),
    "nadam, decoupled": lambda p: torch.optim.NAdam(p, lr=_RATE, weight_decay=0.1, decoupled_weight_decay=True),
    "radam": lambda p: torch.optim.RAdam(p, lr=_RATE),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=_RATE),
    "adagrad, rate decay": lambda p: torch.optim.Adagrad(p, lr=_RATE, lr_decay=0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=_RATE),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=_RATE),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "rmsprop, centred": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5),
    "rprop": lambda p: torch.optim.Rprop(p, lr=_RATE),
    "asgd": lambda p: torch.optim.ASGD(p, lr=_RATE),
    "two groups": lambda p: _two_groups(list(p)),
    "muon and adam by groups": lambda p: _Muon(list(p)),
    "own steps are hooked": lambda p: _hooked(torch.optim.Adam(p, lr=_RATE)),
}


def _two_groups(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    first, rest = parameters[:1], parameters[1:]
    return torch.optim.Adam([{"params": first, "lr": 0.01, "betas": (0.5, 0.9)}, {"params": rest}], lr=_RATE)


def _hooked(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    def clip(optimizer: torch.optim.Optimizer, arguments: Any, named: Any) -> None:
        for group in optimizer.param_groups:
            nn.utils.clip_grad_norm_(group["params"], 0.5)

    optimizer.register_step_pre_hook(clip)
    return optimizer


class _Simple(torch.optim.Optimizer):
    """Calls `update` for each parameter that has a gradient."""

    group: ClassVar[dict[str, Any]] = {}

    def __init__(self, parameters: Parameters) -> None:
        super().__init__(parameters, {"lr": _RATE, **copy.deepcopy(self.group)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            self.begin(group)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(group, self.state[parameter], parameter, parameter.grad)

    def begin(self, group: dict[str, Any]) -> None: ...

    def update(self, group: dict[str, Any], state: Any, parameter: torch.Tensor, grad: torch.Tensor) -> None:
        raise NotImplementedError


def _optimizer(name: str) -> Callable[[Any], Any]:
    def note(made: Any) -> Any:
        OPTIMIZERS[name] = made
        return made

    return note


@_optimizer("a counter in the group")
class _Harmonic(_Simple):
    group: ClassVar[dict[str, Any]] = {"k": 0}

    def begin(self, group: dict[str, Any]) -> None:
        group["k"] += 1

    def update(self, group: dict[str, Any], state: Any, parameter: torch.Tensor, grad: torch.Tensor) -> None:
        parameter -= group["lr"] / group["k"] * grad


@_optimizer("schedule-free")
class _ScheduleFree(_Simple):
    """Defazio et al. 2024: the weights' sum is in the group, z in the state."""

    group: ClassVar[dict[str, Any]] = {"k": 0, "weight_sum": 0.0, "lr_max": -1.0, "train_mode": True}

    def begin(self, group: dict[str, Any]) -> None:
        group["k"] += 1
        group["lr_max"] = max(group["lr"], group["lr_max"])
        group["weight_sum"] += group["k"] * group["lr_max"] ** 2

    def update(self, group: dict[str, Any], state: Any, parameter: torch.Tensor, grad: torch.Tensor) -> None:
        if "z" not in state:
            state["z"] = parameter.clone()
        weight = group["k"] * group["lr_max"] ** 2 / group["weight_sum"]
        parameter.lerp_(state["z"], weight)
        parameter.sub_(grad, alpha=group["lr"] * (0.9 * (1 - weight) - 1) * -1)
        state["z"].sub_(grad, alpha=group["lr"])


@_optimizer("a distance in the group")
class _Distance(_Simple):
    """As D-Adaptation and Prodigy keep theirs: numbers, tensors and lists in the group."""

    group: ClassVar[dict[str, Any]] = {"d": 1e-2, "numerator": torch.tensor(0.0), "history": []}

    def begin(self, group: dict[str, Any]) -> None:
        norm = sum(float(p.grad.square().sum()) for p in group["params"] if p.grad is not None)
        group["numerator"] = group["numerator"] + norm
        group["history"] = [*group["history"][-3:], norm]
        group["d"] = max(group["d"], 0.1 * sum(group["history"]) / (1 + float(group["numerator"])))

    def update(self, group: dict[str, Any], state: Any, parameter: torch.Tensor, grad: torch.Tensor) -> None:
        parameter -= group["d"] * grad


@_optimizer("float32 beside the parameters")
class _Master(_Simple):
    def update(self, group: dict[str, Any], state: Any, parameter: torch.Tensor, grad: torch.Tensor) -> None:
        if "master" not in state:
            state["master"] = parameter.double()
        state["master"] -= group["lr"] * grad.double()
        parameter.copy_(state["master"])


@_optimizer("state beside the parameters'")
class _Beside(_Simple):
    def __init__(self, parameters: Parameters) -> None:
        super().__init__(parameters)
        self.state["steps"] = torch.tensor([0])  # type: ignore[index]

    def begin(self, group: dict[str, Any]) -> None:
        self.state["steps"] += 1  # type: ignore[index, assignment]

    def update(self, group: dict[str, Any], state: Any, parameter: torch.Tensor, grad: torch.Tensor) -> None:
        parameter -= group["lr"] / float(self.state["steps"]) * grad  # type: ignore[index, arg-type]


@_optimizer("nested state")
class _Nested(_Simple):
    """As Shampoo and L-BFGS keep theirs."""

    def update(self, group: dict[str, Any], state: Any, parameter: torch.Tensor, grad: torch.Tensor) -> None:
        if not state:
            state |= {
                "kind": "first",
                "past": [],
                "shape": tuple(parameter.shape),
                "seen": None,
                "by": {"mean": {0: 0.0}},
            }
        state["past"] = [*state["past"][-2:], grad.clone()]
        state["by"]["mean"][0] += float(grad.mean()) if grad.numel() else 0.0
        state["kind"], state["seen"] = ("second", True) if state["kind"] == "first" else ("third", None)
        scale = {"first": 1.0, "second": 0.5, "third": 0.25}[state["kind"]] + 0.01 * state["by"]["mean"][0]
        parameter -= group["lr"] * scale * sum(state["past"])


@_optimizer("lion")
class _Lion(_Simple):
    def update(self, group: dict[str, Any], state: Any, parameter: torch.Tensor, grad: torch.Tensor) -> None:
        if not state:
            state["average"] = torch.zeros_like(parameter)
        parameter.add_(state["average"].lerp(grad, 0.1).sign(), alpha=-0.01)
        state["average"].lerp_(grad, 0.01)


@_optimizer("lamb")
class _Lamb(_Simple):
    def update(self, group: dict[str, Any], state: Any, parameter: torch.Tensor, grad: torch.Tensor) -> None:
        if not state:
            state |= {"step": 0, "m": torch.zeros_like(parameter), "v": torch.zeros_like(parameter)}
        state["step"] += 1
        state["m"].lerp_(grad, 0.1)
        state["v"].lerp_(grad.square(), 0.01)
        change = state["m"] / (state["v"].sqrt() + 1e-6) * (1 - 0.9 ** state["step"])
        trust = parameter.norm() / change.norm().clamp_min(1e-6) if parameter.numel() else 1.0
        parameter -= 0.01 * float(trust) * change


@_optimizer("lookahead")
class _Lookahead(_Simple):
    group: ClassVar[dict[str, Any]] = {"since": 0}

    def begin(self, group: dict[str, Any]) -> None:
        group["since"] = (group["since"] + 1) % 3

    def update(self, group: dict[str, Any], state: Any, parameter: torch.Tensor, grad: torch.Tensor) -> None:
        if "slow" not in state:
            state["slow"] = parameter.clone()
        parameter -= group["lr"] * grad
        if group["since"] == 0:
            state["slow"].lerp_(parameter, 0.5)
            parameter.copy_(state["slow"])


@_optimizer("eight-bit moments")
class _EightBit(_Simple):
    def update(self, group: dict[str, Any], state: Any, parameter: torch.Tensor, grad: torch.Tensor) -> None:
        if not state:
            state |= {
                "code": torch.zeros_like(parameter, dtype=torch.int8),
                "scale": torch.ones((), dtype=torch.float64),
            }
        average = state["code"].float() * float(state["scale"]) * 0.9 + 0.1 * grad
        state["scale"] = (average.abs().max().double() / 127 + 1e-12) if grad.numel() else state["scale"]
        state["code"] = (average / float(state["scale"])).round().to(torch.int8)
        parameter -= group["lr"] * average


@_optimizer("a state_dict of its own")
class _OwnStateDict(_Harmonic):
    def __init__(self, parameters: Parameters) -> None:
        super().__init__(parameters)
        self.calls = 0

    def begin(self, group: dict[str, Any]) -> None:
        super().begin(group)
        self.calls += 1
        group["k"] = max(group["k"], self.calls)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "calls": self.calls}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # type: ignore[override]
        self.calls = state_dict["calls"]
        super().load_state_dict({name: value for name, value in state_dict.items() if name != "calls"})


class _Muon(torch.optim.Optimizer):
    """Two optimisers behind one, as is usual for matrices and the rest."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__([{"params": parameters}], {"lr": _RATE})
        matrices = [p for p in parameters if p.ndim == 2 and p.numel()]
        rest = [p for p in parameters if not (p.ndim == 2 and p.numel())]
        self.inner = [torch.optim.Muon(matrices, lr=_RATE)] if matrices else []
        self.inner += [torch.optim.Adam(rest, lr=_RATE)] if rest else []  # type: ignore[list-item]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for one in self.inner:
            one.step()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "inner": [one.state_dict() for one in self.inner]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # type: ignore[override]
        for one, state in zip(self.inner, state_dict["inner"], strict=True):
            one.load_state_dict(state)
