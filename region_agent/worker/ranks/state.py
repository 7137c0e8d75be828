"""The optimiser's state of a worker whose ranks hold parts of it. It is dumped whole, so that it depends neither on the
number of ranks nor on whether the model is divided among them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from geofed_pb.errors import GeofedError
from region_agent.worker.ranks.messages import Piece, Restore
from region_agent.worker.ranks.sharding import is_part
from region_agent.worker.tensor_tree import dump_tree, load_tree
from region_agent.worker.training.optimizer_state import load_state, loads_itself
from sync.framing import Array

__all__ = ["check_optimizer", "check_state", "pieces_of", "restored", "tensor_of"]

_HINT = "use an optimiser whose state of a parameter has its shape, such as Adam, or leave out `function.sharding`"
_WHOLE = "-1"
"""Owner of the arrays that are of the whole optimiser."""


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise ``GeofedError("TASK_INVALID")`` for an optimiser whose state cannot be loaded in parts."""
    if loads_itself(optimizer):
        text = f"`function.sharding: fsdp` with {type(optimizer).__name__}, which loads its state by code of its own"
        raise GeofedError("TASK_INVALID", text, hint=_HINT)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return the parameters by their numbers in the optimiser's state."""
    return [one for group in optimizer.param_groups for one in group["params"]]


def check_state(optimizer: torch.optim.Optimizer) -> None:
    """Raise ``GeofedError("TASK_INVALID")`` for state of a parameter that is neither divided as it is, nor the same on
    all ranks."""
    for parameter in parameters_of(optimizer):
        for key, value in optimizer.state.get(parameter, {}).items():
            alike = is_part(value) and value.shape == parameter.shape
            if not alike and any(is_large(one) for one in _tensors_in(value)):
                text = f"the optimiser's state {key!r} cannot be divided among ranks: {type(optimizer).__name__}"
                raise GeofedError("TASK_INVALID", text, hint=_HINT)


def is_large(tensor: torch.Tensor) -> bool:
    """Whether a tensor is divided, or has more than one value, so that ranks may have different ones."""
    return hasattr(tensor, "placements") or tensor.numel() > 1


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(one)


def tensor_of(optimizer: torch.optim.Optimizer, piece: Piece) -> Any:
    """Return the part of a state's tensor that this rank holds; with a type, a new one takes its place."""
    parameter = parameters_of(optimizer)[piece.number]
    if piece.dtype is not None:
        optimizer.state[parameter][piece.key] = torch.zeros_like(parameter.detach(), dtype=piece.dtype)
    return optimizer.state[parameter][piece.key]


def pieces_of(
    optimizer: torch.optim.Optimizer, tensors: Mapping[str, Array]
) -> tuple[Restore, list[Callable[[], torch.Tensor]]]:
    """Divide a dumped state into what all ranks hold alike and what they hold parts of; returns a call for each of the
    latter, which loads its values."""
    parameters, held, pieces = parameters_of(optimizer), dict[str, Any](), list[Piece]()
    values: list[Callable[[], torch.Tensor]] = []
    owners = sorted({name.split("/", 1)[0] for name in tensors})
    for owner in owners:
        own = {name: array for name, array in tensors.items() if name.startswith(f"{owner}/")}
        if owner == _WHOLE:
            held |= {name: np.array(array) for name, array in own.items()}
            continue
        entry, parameter = load_tree(own, f"{owner}/"), parameters[int(owner)]
        apart = {
            key: value
            for key, value in entry.items()
            if isinstance(value, torch.Tensor) and value.dim() and value.shape == parameter.shape
        }
        alike = {key: value for key, value in entry.items() if key not in apart}
        held |= {name: np.array(array) for name, array in dump_tree(alike, f"{owner}/").items()}
        for key, value in apart.items():
            pieces.append(Piece(int(owner), key, value.dtype))
            values.append(lambda value=value: value)  # type: ignore[misc]
    return Restore(held, tuple(pieces)), values


def restored(optimizer: torch.optim.Optimizer, request: Restore) -> Iterator[Any]:
    """Load what all ranks hold alike; then yield this rank's part of each of the other tensors, to be written to."""
    load_state(optimizer, request.held, {})
    for piece in request.pieces:
        yield tensor_of(optimizer, piece)
