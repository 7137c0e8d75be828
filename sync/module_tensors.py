"""Where a module holds the tensors of its state, each of which it may replace at any time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from geofed_pb.errors import GeofedError

__all__ = ["KINDS", "Access", "Found", "Place", "memory_of", "refused", "tensors_of", "unlisted_buffers", "version_of"]

KINDS = ("parameter", "buffer", "extra state")
"""What a tensor of the state may be."""
_EXTRA = "_extra_state"
_BYTES = (torch.uint8,)
"""Types of extra state that may contain anything serialised, so that its meaning is unknown."""


@dataclass(frozen=True)
class Place:
    """The attribute of a module that holds a tensor, which the module may replace at any time."""

    name: str
    owner: torch.nn.Module
    attribute: str
    kind: str
    """One of `KINDS`."""

    def tensor(self) -> torch.Tensor:
        """Return the current tensor. Raises ``GeofedError("TASK_INVALID")`` if there is none any more."""
        if self.kind == "extra state":
            found = self.owner.get_extra_state()
        else:
            held = self.owner._parameters if self.kind == "parameter" else self.owner._buffers
            found = held.get(self.attribute)
        if not isinstance(found, torch.Tensor):
            raise refused(self, f"is {type(found).__name__ if found is not None else 'None'} now, not a tensor")
        return found

    def replace(self, tensor: torch.Tensor) -> None:
        """Replace the tensor; for buffers and extra state only."""
        if self.kind == "extra state":
            self.owner.set_extra_state(tensor)
        else:
            self.owner._buffers[self.attribute] = tensor


class Access:
    """How the values of a module's tensors are read and written. Here each tensor is held whole by this process."""

    def is_whole(self, tensor: torch.Tensor) -> bool:
        """Whether this process holds all values of a tensor."""
        return True

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return all values of a tensor, without gradient."""
        return tensor.detach()

    def write(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """Write all values of a tensor, which has no gradient meanwhile."""
        tensor.copy_(values)


def refused(place: Place, why: str, hint: str = "") -> GeofedError:
    """Return the error for a tensor that cannot be exchanged."""
    return GeofedError("TASK_INVALID", f"{place.kind} {place.name} of the model {why}", hint=hint)


Found = tuple[Place, torch.Tensor, bool]
"""A place, its tensor, and whether gradients train it."""


def tensors_of(module: torch.nn.Module) -> list[Found]:
    """Return parameters, persistent buffers and extra state; each parameter once, and no buffer that is a parameter's
    memory: it is another name of the parameter."""
    kept = set(module.state_dict(keep_vars=True))
    found: list[Found] = []
    seen: set[int] = set()
    for prefix, owner in module.named_modules():
        dot = f"{prefix}." if prefix else ""
        for attribute, parameter in owner._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                place = Place(dot + attribute, owner, attribute, "parameter")
                found.append((place, parameter, parameter.requires_grad))
    memory = {memory_of(parameter) for _, parameter, _ in found}
    for place, buffer in _buffers_of(module):
        if place.name in kept and (memory_of(buffer) is None or memory_of(buffer) not in memory):
            found.append((place, buffer, False))
    for name in sorted(kept):
        if name.rsplit(".", 1)[-1] == _EXTRA:
            owner = module.get_submodule(name.rpartition(".")[0])
            place = Place(name, owner, _EXTRA, "extra state")
            found.append((place, _extra_state(place), False))
    return found


def memory_of(tensor: torch.Tensor) -> tuple[object, ...] | None:
    """Return what two tensors have in common that are the same view of the same memory; None without memory."""
    if torch.nn.parameter.is_lazy(tensor) or tensor.layout != torch.strided or not tensor.data_ptr():
        return None
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _buffers_of(module: torch.nn.Module) -> Iterator[tuple[Place, torch.Tensor]]:
    for prefix, owner in module.named_modules():
        for attribute, buffer in owner._buffers.items():
            if buffer is not None:
                yield Place(f"{prefix}.{attribute}" if prefix else attribute, owner, attribute, "buffer"), buffer


def unlisted_buffers(module: torch.nn.Module) -> list[tuple[Place, torch.Tensor]]:
    """Return the buffers that are not part of the state dict."""
    kept = set(module.state_dict(keep_vars=True))
    return [(place, buffer) for place, buffer in _buffers_of(module) if place.name not in kept]


def _extra_state(place: Place) -> torch.Tensor:
    state: Any = place.owner.get_extra_state()
    if not isinstance(state, torch.Tensor) or state.dtype in _BYTES:
        kind = "bytes" if isinstance(state, torch.Tensor) else f"a {type(state).__name__}"
        text = f"is {kind}: it can be neither merged nor exported"
        raise refused(place, text, "keep it in buffers, or return a tensor of numbers from get_extra_state()")
    return state


def version_of(tensor: torch.Tensor) -> int:
    """Return a number that grows with each write; 0 if torch does not count them."""
    return 0 if tensor.is_inference() else tensor._version
