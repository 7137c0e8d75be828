"""What passes from one layer to the next: a tensor, or a tuple of tensors."""

from __future__ import annotations

from typing import Any

import torch

from geofed_pb.errors import GeofedError

__all__ = ["Carried", "as_tuple", "like", "requiring"]

Carried = torch.Tensor | tuple[torch.Tensor, ...]


def as_tuple(value: Any, where: str) -> tuple[torch.Tensor, ...]:
    """The tensors; raises ``GeofedError("TASK_INVALID")`` for anything else. ``where``: for people."""
    tensors = (value,) if isinstance(value, torch.Tensor) else value
    if not (isinstance(tensors, tuple) and tensors and all(isinstance(one, torch.Tensor) for one in tensors)):
        text = f"{where} is a {type(value).__name__}; stages pass on a tensor or a tuple of tensors"
        raise GeofedError("TASK_INVALID", text, hint="let the layers of one stage pass it, or return tensors")
    return tensors


def like(value: Any, tensors: tuple[torch.Tensor, ...]) -> Carried:
    """The tensors in the form that ``value`` has."""
    return tensors if isinstance(value, tuple) else tensors[0]


def requiring(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Apart from what they came from, and asking for gradients where they can have any."""
    return tuple(one.detach().requires_grad_(one.is_floating_point() or one.is_complex()) for one in tensors)
