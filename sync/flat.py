"""Between a torch module and its flat vector. With `sync.device`, `sync.gradients` and `sync.pipeline` all of
this room that needs torch."""

from __future__ import annotations

import warnings

import numpy as np
import torch

from geofed_pb.errors import GeofedError
from sync.layout import Layout, Slot, Vector

__all__ = ["FlatModel"]

# Vectors out of frames are read-only, which torch has no notion of; nothing here writes to them. It warns of that once
# in a process: now, so that whoever turns warnings into errors does not meet it in the middle of a step.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.from_numpy(np.frombuffer(b"\0", np.uint8))

_EXACT_INTEGERS = 1 << 24
"""Above this, float32 does not hold every integer."""


class FlatModel:
    """A module together with its layout; reads and writes the flat vector and gradients.

    Tied parameters stand once in the layout. Not safe for use by several threads at once.
    """

    def __init__(self, module: torch.nn.Module, *, part: bool = False) -> None:
        """``part``: of a larger model, so it need not have anything that is trained."""
        self.module = module
        trained: dict[str, torch.Tensor] = {name: p for name, p in module.named_parameters() if p.requires_grad}
        frozen = [(name, p) for name, p in module.named_parameters() if not p.requires_grad]
        rest: dict[str, torch.Tensor] = dict([*frozen, *_persistent_buffers(module)])
        self._trained: list[torch.Tensor] = list(trained.values())
        self._all: list[torch.Tensor] = [*trained.values(), *rest.values()]
        slots = [
            Slot(name, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in (trained | rest).items()
        ]
        self.layout = Layout(tuple(slots), len(trained), tuple(_aliases(module, trained | rest)))
        if not trained and not part:
            raise GeofedError("TASK_INVALID", "the model has no trainable parameters")
        if odd := next((name for name, t in (trained | rest).items() if t.is_complex()), None):
            raise GeofedError("TASK_INVALID", f"{odd} of the model is complex; keep its two parts as real tensors")

    def vector(self, out: Vector | None = None) -> Vector:
        """A copy of the whole state, shape (layout.size,); into ``out``, where one is given."""
        if out is None:
            out = np.empty(self.layout.size, np.float32)
        with torch.no_grad():
            self._copy_out(torch.from_numpy(out), 0, self._all)
        return out

    def load(self, vector: Vector) -> None:
        """Put a whole state into the module."""
        self._copy_in(vector, 0, self._all)

    def add(self, change: Vector) -> None:
        """Add a change of the whole state to it; what is not a floating-point number is rounded."""
        flat, at = _as_tensor(change), 0
        with torch.no_grad():
            for tensor in self._all:
                part = flat[at : at + tensor.numel()].reshape(tensor.shape)
                if tensor.is_floating_point():
                    tensor += part.to(tensor.device, tensor.dtype)
                else:
                    tensor.copy_((tensor + part.to(tensor.device)).round())
                at += tensor.numel()

    def gradient(self) -> Vector:
        """Gradients of the trainable head (zero where there is none), followed by the rest of the state."""
        out = np.empty(self.layout.size, np.float32)
        flat = torch.from_numpy(out)
        at = 0
        with torch.no_grad():
            for parameter in self._trained:
                part = flat[at : at + parameter.numel()]
                part.zero_() if parameter.grad is None else part.copy_(parameter.grad.reshape(-1))
                at += parameter.numel()
            self._copy_out(flat, at, self._all[len(self._trained) :])
        return out

    def rest(self) -> Vector:
        """A copy of what gradients do not train: the tail of `vector`."""
        tensors = self._all[len(self._trained) :]
        out = np.empty(sum(tensor.numel() for tensor in tensors), np.float32)
        with torch.no_grad():
            self._copy_out(torch.from_numpy(out), 0, tensors)
        return out

    def load_gradient(self, vector: Vector, start: int = 0) -> None:
        """Put merged gradients into ``.grad`` and the merged rest of the state into the module.

        ``start``: the coordinate from which on the vector is; it and the vector's end must lie between two tensors.
        """
        flat, at, stop = _as_tensor(vector), 0, start + vector.size
        with torch.no_grad():
            for number, tensor in enumerate(self._all):
                if start <= at and at + tensor.numel() <= stop:
                    part = flat[at - start : at - start + tensor.numel()].reshape(tensor.shape)
                    if number >= len(self._trained):
                        tensor.copy_(part if tensor.is_floating_point() else part.round())
                    else:
                        if tensor.grad is None:
                            tensor.grad = torch.empty_like(tensor)
                        tensor.grad.copy_(part)
                at += tensor.numel()

    @staticmethod
    def _copy_out(flat: torch.Tensor, at: int, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            if _beyond_float32(tensor):
                raise GeofedError("TASK_INVALID", "an integer of the model's state is beyond 2^24 and cannot travel")
            flat[at : at + tensor.numel()].copy_(tensor.reshape(-1))
            at += tensor.numel()

    @staticmethod
    def _copy_in(vector: Vector, at: int, tensors: list[torch.Tensor]) -> None:
        flat = _as_tensor(vector)
        with torch.no_grad():
            for tensor in tensors:
                part = flat[at : at + tensor.numel()].reshape(tensor.shape)
                tensor.copy_(part if tensor.is_floating_point() else part.round())
                at += tensor.numel()


def _as_tensor(vector: Vector) -> torch.Tensor:
    """A view that is only read."""
    return torch.from_numpy(vector)


def _beyond_float32(tensor: torch.Tensor) -> bool:
    if tensor.is_floating_point() or tensor.dtype is torch.bool or not tensor.numel():
        return False
    least, most = torch.aminmax(tensor)
    return max(-int(least), int(most)) > _EXACT_INTEGERS


def _aliases(module: torch.nn.Module, slots: dict[str, torch.Tensor]) -> list[tuple[str, str]]:
    names = {id(tensor): name for name, tensor in slots.items()}
    state = module.state_dict(keep_vars=True)
    return [(alias, names[id(tensor)]) for alias, tensor in state.items() if alias not in slots and id(tensor) in names]


def _persistent_buffers(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    kept = set(module.state_dict(keep_vars=True))
    return [(name, buffer) for name, buffer in module.named_buffers() if name in kept]
