"""An optimiser's state as a tensor frame, so that it survives from one invocation to the next."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from geofed_pb.errors import GeofedError
from sync import framing

__all__ = ["State", "dump_state", "load_state"]

State = tuple[dict[str, framing.Array], dict[str, float]]
"""Tensors and numbers, by name."""


def dump_state(optimizer: torch.optim.Optimizer) -> State:
    """Tensors and numbers of the state, named ``index/key``; hyper-parameters are the task module's to set again."""
    tensors: dict[str, framing.Array] = {}
    numbers: dict[str, float] = {}
    for index, entries in optimizer.state_dict()["state"].items():
        for key, value in entries.items():
            name = f"{index}/{key}"
            if isinstance(value, torch.Tensor):
                tensors[name] = _to_array(value)
            elif isinstance(value, bool | int | float):
                numbers[name] = float(value)
            elif value is not None:
                kind = type(value).__name__
                raise GeofedError("TASK_INVALID", f"the optimiser keeps a {kind} ({key}); it cannot be carried over")
    return tensors, numbers


def load_state(
    optimizer: torch.optim.Optimizer, tensors: Mapping[str, framing.Array], numbers: Mapping[str, float]
) -> None:
    """Put a dumped state into a fresh optimiser over the same parameters."""
    state: dict[int, dict[str, Any]] = {}
    for name, array in tensors.items():
        index, key = name.split("/", 1)
        state.setdefault(int(index), {})[key] = torch.from_numpy(np.array(array))
    for name, value in numbers.items():
        index, key = name.split("/", 1)
        state.setdefault(int(index), {})[key] = int(value) if value.is_integer() else value
    fresh = optimizer.state_dict()
    optimizer.load_state_dict({"state": state, "param_groups": fresh["param_groups"]})


def _to_array(tensor: torch.Tensor) -> framing.Array:
    # NumPy has no bfloat16; float32 holds all of its values, and loading makes the parameter's type of it again.
    kept = tensor.float() if tensor.dtype is torch.bfloat16 else tensor
    array: framing.Array = kept.detach().cpu().numpy()
    return array
