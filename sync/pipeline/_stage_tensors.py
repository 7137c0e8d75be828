"""The values that layers and stages pass on: a tensor, or a tuple of tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from geofed_pb.errors import GeofedError
from sync import framing

__all__ = ["Carried", "as_tuple", "decoded", "encoded", "like", "requiring"]

Carried = torch.Tensor | tuple[torch.Tensor, ...]
_ONE = "one"
"""Fact of a frame: the value is a tensor, not a tuple."""
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.float64, torch.bfloat16)}


def as_tuple(value: Any, where: str) -> tuple[torch.Tensor, ...]:
    """Return the tensors of a value. Raises ``GeofedError("TASK_INVALID")`` for anything else. ``where``: for the
    message."""
    tensors = (value,) if isinstance(value, torch.Tensor) else value
    if not (isinstance(tensors, tuple) and tensors and all(isinstance(one, torch.Tensor) for one in tensors)):
        text = f"{where} is a {type(value).__name__}; stages pass on a tensor or a tuple of tensors"
        raise GeofedError("TASK_INVALID", text, hint="keep the layers that pass it in one stage, or return tensors")
    return tensors


def like(value: Any, tensors: tuple[torch.Tensor, ...]) -> Carried:
    """Return the tensors in the form of ``value``."""
    return tensors if isinstance(value, tuple) else tensors[0]


def requiring(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Return detached tensors that require gradients if their type allows it."""
    return tuple(one.detach().requires_grad_(one.is_floating_point() or one.is_complex()) for one in tensors)


def encoded(value: Carried | None, codec: str, facts: dict[str, float] | None = None) -> list[memoryview]:
    """Return the value as a frame; ``codec`` "bf16" halves floating-point numbers, "fp32" keeps all unchanged. None: no
    tensors.

    Tensors are named by their position. A bfloat16 tensor is stored as its bits, with the original type in its name.
    """
    all_facts = dict(facts or {})
    if isinstance(value, torch.Tensor):
        all_facts[_ONE] = 1.0
    tensors = () if value is None else value if isinstance(value, tuple) else (value,)
    arrays: dict[str, framing.Array] = {}
    for position, tensor in enumerate(tensors):
        plain = tensor.detach().cpu()
        kind = str(plain.dtype).removeprefix("torch.")
        if kind in _DTYPES and (codec == "bf16" or plain.dtype is torch.bfloat16):
            bits = plain.to(torch.bfloat16).contiguous().view(torch.int16).numpy()
            arrays[f"{position}.{kind}"] = bits.view(np.uint16)
        else:
            arrays[str(position)] = plain.numpy()
    return framing.encode(arrays, all_facts)


def decoded(buffer: framing.Buffer, device: torch.device) -> tuple[Carried | None, dict[str, float]]:
    """Return the value of a frame, as a copy, and the facts."""
    frame = framing.decode(buffer)
    tensors: dict[int, torch.Tensor] = {}
    for name, array in frame.tensors.items():
        position, _, kind = name.partition(".")
        if kind and kind not in _DTYPES:
            raise GeofedError("FRAME_INVALID", f"tensor {name!r} of an unknown type")
        own = torch.from_numpy(np.array(array.view(np.int16) if kind else array))
        tensors[int(position)] = (own.view(torch.bfloat16).to(_DTYPES[kind]) if kind else own).to(device)
    if not tensors:
        return None, frame.facts
    ordered = tuple(tensor for _, tensor in sorted(tensors.items()))
    return ordered[0] if _ONE in frame.facts else ordered, frame.facts
