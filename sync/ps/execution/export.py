"""A model as the file that a user gets, and that another job may begin with."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import safetensors
import safetensors.numpy

from geofed_pb.errors import GeofedError
from sync.coordinates import array_dtype
from sync.layout import Layout, Slot, Vector

__all__ = ["from_safetensors", "to_safetensors"]

_MOST_TOLD = 3
"""Tensors that an error names."""
_FILE_TYPES = {
    "bool": "BOOL", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "complex64": "C64",
}  # fmt: skip
"""How a file calls a type, where it is not the first letter and the bits."""


def to_safetensors(layout: Layout, model: Vector, facts: dict[str, str]) -> tuple[bytes, str]:
    """The named tensors of a flat model as safetensors bytes, and their digest; loads with ``load_state_dict``.

    Tensors have the types that they have in the model, and the values that workers give them when they evaluate it.
    The head says how many elements the flat model has, as tied tensors stand under each of their names.
    """
    # Not ascontiguousarray, which makes a scalar a vector of one element.
    tensors = {name: np.asarray(array, order="C") for name, array in layout.tensors(model).items()}
    data = safetensors.numpy.save(tensors, metadata={**facts, "flat_elements": str(layout.size)})
    return data, "sha256:" + hashlib.sha256(data).hexdigest()


def from_safetensors(layout: Layout, path: Path) -> Vector:
    """The flat model that `to_safetensors` wrote, for a model of this layout; one tensor at a time is in memory
    beside it.

    The order of the tensors may be another, and others be trained, as where a job freezes what another has trained;
    float32 may stand for any narrower type. Raises ``GeofedError("MODEL_MISMATCH")`` for other names, shapes or types,
    or numbers that are not finite, FRAME_INVALID for what is no such file.
    """
    out = np.empty(layout.size, np.float32)
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            _check_names(layout, set(file.keys()))
        with path.open("rb") as raw:
            length = int.from_bytes(raw.read(8), "little")
            head = json.loads(raw.read(length))
        data = np.memmap(path, np.uint8, "r", offset=8 + length)
        for slot, place in layout.places():
            told = head[slot.name]
            shape, dtype = tuple(told["shape"]), str(told["dtype"])
            if shape != slot.shape or dtype not in _accepted(slot):
                own = f"{_type_of(slot.dtype)} {list(slot.shape)}"
                text = f"{slot.name} of the model to start from is {dtype} {list(shape)}, the task's {own}"
                raise GeofedError("MODEL_MISMATCH", text)
            start, stop = told["data_offsets"]
            stored = slot.dtype if dtype == _type_of(slot.dtype) else "float32"
            values = np.array(data[start:stop]).view(array_dtype(stored))
            if not slot.coding.marked and not np.isfinite(values).all():
                raise GeofedError("MODEL_MISMATCH", f"{slot.name} of the model to start from is not finite")
            out[place] = slot.encode(values)
    except (safetensors.SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
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


def _accepted(slot: Slot) -> tuple[str, ...]:
    narrow = slot.dtype.startswith(("float", "bfloat")) and slot.dtype != "float64"
    return (_type_of(slot.dtype), "F32") if narrow else (_type_of(slot.dtype),)


def _type_of(dtype: str) -> str:
    """As a file calls what torch calls ``dtype``."""
    return _FILE_TYPES.get(dtype) or dtype.replace("float", "F").replace("uint", "U").replace("int", "I")
