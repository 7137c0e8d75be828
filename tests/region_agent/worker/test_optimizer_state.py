"""An optimiser that was taken down and set up again continues as if nothing had been."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from geofed_pb.errors import GeofedError
from region_agent.worker.training.optimizer_state import dump_state, load_state
from sync import framing

Make = Callable[[nn.Module], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01),
    "amsgrad": lambda m: torch.optim.Adam(m.parameters(), lr=0.01, amsgrad=True),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, weight_decay=0.1),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.1),
    "nadam": lambda m: torch.optim.NAdam(m.parameters(), lr=0.01),
    "rprop": lambda m: torch.optim.Rprop(m.parameters(), lr=0.01),
    "groups": lambda m: torch.optim.Adam([{"params": [p], "lr": 0.01 * (i + 1)} for i, p in enumerate(m.parameters())]),
}


def _step(module: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    torch.manual_seed(number)
    optimizer.zero_grad()
    drawn = torch.randn(6, 4).to(next(module.parameters()).dtype)
    module(drawn).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_goes_on_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1)).to(dtype)
    optimizer = OPTIMIZERS[name](module)
    for number in range(3):
        _step(module, optimizer, number)
    again = copy.deepcopy(module)
    taken_up = OPTIMIZERS[name](again)
    tensors, numbers = dump_state(optimizer)
    frame = framing.decode(b"".join(framing.encode(tensors, numbers)))
    load_state(taken_up, frame.tensors, frame.facts)
    for number in range(3, 6):
        _step(module, optimizer, number)
        _step(again, taken_up, number)
    for one, other in zip(module.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_fresh_optimizer_has_its_groups_to_carry() -> None:
    optimizer = OPTIMIZERS["adam"](nn.Linear(1, 1))
    optimizer.param_groups[0]["lr"] = 0.5
    fresh = OPTIMIZERS["adam"](nn.Linear(1, 1))
    load_state(fresh, *dump_state(optimizer))
    assert fresh.state_dict() == optimizer.state_dict()
    load_state(fresh, {}, {})
    assert fresh.state_dict() == optimizer.state_dict(), "nothing was carried over"


def test_lists_of_tensors_are_carried() -> None:
    module = nn.Linear(4, 1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = module(torch.ones(2, 4)).square().sum()
        loss.backward()
        return loss

    optimizer = torch.optim.LBFGS(module.parameters(), max_iter=2)
    optimizer.step(closure)
    again = torch.optim.LBFGS(module.parameters(), max_iter=2)
    load_state(again, *dump_state(optimizer))
    one, other = (made.state[module.weight] for made in (optimizer, again))
    assert one.keys() == other.keys()
    assert all(torch.equal(a, b) for a, b in zip(one["old_dirs"], other["old_dirs"], strict=True))
    assert one["func_evals"] == other["func_evals"]


def test_state_that_cannot_be_carried_is_told() -> None:
    optimizer = OPTIMIZERS["sgd"](module := nn.Linear(4, 1))
    optimizer.state[module.bias] = {"history": {"seen": {1, 2}}}
    with pytest.raises(GeofedError, match=r"\['history'\]\['seen'\] is a set") as raised:
        dump_state(optimizer)
    assert raised.value.code == "TASK_INVALID"
