"""A rank's model without values, which rank 0 then sends part by part."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from geofed_pb.errors import GeofedError
from region_agent.worker.ranks.passes import described
from region_agent.worker.task import TaskModule

__all__ = ["attributes_of", "shell_of"]

_STATE = ("_parameters", "_buffers", "_modules")
"""Attributes of a module that hold its state."""


def shell_of(
    task: TaskModule, seed: int, model: list[tuple[str, str, tuple[int, ...], bool]]
) -> torch.nn.Module | None:
    """Create a rank's model without values, which rank 0 then sends; None: the task needs values to create it.

    ``model``: what rank 0's is, see `described`.
    """
    try:
        with torch.device("meta"), warnings.catch_warnings():
            # torch says of each tensor of a file that it is not loaded.
            warnings.simplefilter("ignore")
            module = task.model(seed)
        if described(module) != model:
            return None
    except (GeofedError, RuntimeError, NotImplementedError):
        return None
    held = {id(one) for one in (*module.parameters(), *module.buffers())}
    for owner in module.modules():
        if any(one.device.type == "meta" and id(one) not in held for one in attributes_of(owner)):
            # A tensor that is neither parameter nor buffer, so that nobody sends its values.
            return None
    return module


def attributes_of(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield the tensors in a module's attributes that are not its state."""
    return _tensors_in(value for name, value in vars(module).items() if name not in _STATE)


def _tensors_in(values: Iterable[Any], depth: int = 3) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple | dict) and depth:
            yield from _tensors_in(value.values() if isinstance(value, dict) else value, depth - 1)
