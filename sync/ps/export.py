"""A model as the file that a user gets, and that another job may begin with."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import safetensors
import safetensors.numpy

from geofed_pb.errors import GeofedError
from sync.layout import Layout, Slot, Vector

__all__ = ["from_safetensors", "to_safetensors"]

_MOST_TOLD = 3
"""Tensors that an error names."""


def to_safetensors(layout: Layout, model: Vector, facts: dict[str, str]) -> tuple[bytes, str]:
    """The named tensors of a flat model as safetensors bytes, and their digest; loads with ``load_state_dict``.

    Integers are whole again; floating-point tensors of another width stay float32, which loses nothing. The head says
    how many elements the flat model has, as tied tensors stand under each of their names.
    """
    # Not ascontiguousarray, which makes a scalar a vector of one element.
    tensors = {name: np.asarray(array, order="C") for name, array in layout.tensors(model).items()}
    data = safetensors.numpy.save(tensors, metadata={**facts, "flat_elements": str(layout.size)})
    return data, "sha256:" + hashlib.sha256(data).hexdigest()


def from_safetensors(layout: Layout, path: Path) -> Vector:
    """The flat model that `to_safetensors` wrote, for a model of this layout; one tensor at a time is in memory
    beside it.

    The order of the tensors may be another, and others be trained, as where a job freezes what another has trained.
    Raises ``GeofedError("MODEL_MISMATCH")`` for other names, shapes or types, or numbers that are not finite,
    FRAME_INVALID for what is no such file.
    """
    out = np.empty(layout.size, np.float32)
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            _check_names(layout, set(file.keys()))
            at = 0
            for slot in layout.slots:
                told = file.get_slice(slot.name)
                shape, dtype = tuple(told.get_shape()), str(told.get_dtype())
                if (shape, dtype) != (slot.shape, _dtype_of(slot)):
                    own = f"{_dtype_of(slot)} {list(slot.shape)}"
                    text = f"{slot.name} of the model to start from is {dtype} {list(shape)}, the task's {own}"
                    raise GeofedError("MODEL_MISMATCH", text)
                part = file.get_tensor(slot.name)
                if not np.isfinite(part).all():
                    raise GeofedError("MODEL_MISMATCH", f"{slot.name} of the model to start from is not finite")
                out[at : at + slot.size] = part.reshape(-1)
                at += slot.size
    except (safetensors.SafetensorError, OSError) as error:
        raise GeofedError("FRAME_INVALID", f"the model to start from cannot be read: {error}") from None
    return out


def _check_names(layout: Layout, found: set[str]) -> None:
    wanted = {slot.name for slot in layout.slots} | {alias for alias, _ in layout.aliases}
    differ = [f"has no {_listed(wanted - found)}"] if wanted - found else []
    differ += [f"has {_listed(found - wanted)}, which the task's lacks"] if found - wanted else []
    if differ:
        raise GeofedError("MODEL_MISMATCH", f"the model to start from {' and '.join(differ)}")


def _listed(names: set[str]) -> str:
    told = sorted(names)
    more = f" and {len(told) - _MOST_TOLD} more" if len(told) > _MOST_TOLD else ""
    return ", ".join(told[:_MOST_TOLD]) + more


def _dtype_of(slot: Slot) -> str:
    """As the file calls what `to_safetensors` makes of a slot."""
    if not slot.dtype.startswith(("int", "uint")):
        return "F32"
    return slot.dtype.replace("uint", "U").replace("int", "I")
