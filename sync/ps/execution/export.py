"""Export of a model to a safetensors file, and import of one as the initial model of another job."""

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

_MAX_NAMES = 3
"""Tensor names that an error message lists; it only counts the others."""
_FILE_TYPES = {
    "bool": "BOOL", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "complex64": "C64",
}  # fmt: skip
"""Name of a torch dtype in a safetensors file, where it is not a letter followed by the number of bits."""


def to_safetensors(layout: Layout, model: Vector, facts: dict[str, str]) -> tuple[bytes, str]:
    """Return the named tensors of a flat model as safetensors bytes, and the bytes' digest.

    The tensors have the dtypes of the task's model, so that ``load_state_dict`` accepts them, and the values with which
    workers evaluate the model. Tied tensors are stored under each of their names; the header therefore also states the
    number of elements of the flat model.
    """
    # ascontiguousarray would turn a scalar into a vector of one element.
    tensors = {name: np.asarray(array, order="C") for name, array in layout.tensors(model).items()}
    data = safetensors.numpy.save(tensors, metadata={**facts, "flat_elements": str(layout.size)})
    return data, "sha256:" + hashlib.sha256(data).hexdigest()


def from_safetensors(layout: Layout, path: Path) -> Vector:
    """Read a file of `to_safetensors` as a flat model of this layout, shape (n,). Reads one tensor at a time.

    The file may order its tensors differently and may come from a job that trained other parameters, for instance
    because this job freezes some. float32 is accepted for any narrower floating-point type.
    Raises ``GeofedError("MODEL_MISMATCH")`` if names, shapes, types or finiteness don't fit, and
    ``GeofedError("FRAME_INVALID")`` if the file cannot be read.
    """
    out = np.empty(layout.size, np.float32)
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            _check_names(layout, set(file.keys()))
        with path.open("rb") as raw:
            length = int.from_bytes(raw.read(8), "little")
            head = json.loads(raw.read(length))
        data = np.memmap(path, np.uint8, "r", offset=8 + length)
        for slot, span in layout.places():
            entry = head[slot.name]
            shape, dtype = tuple(entry["shape"]), str(entry["dtype"])
            if shape != slot.shape or dtype not in _accepted(slot):
                own = f"{_type_of(slot.dtype)} {list(slot.shape)}"
                text = f"{slot.name} of the model to start from is {dtype} {list(shape)}, the task's {own}"
                raise GeofedError("MODEL_MISMATCH", text)
            start, stop = entry["data_offsets"]
            stored = slot.dtype if dtype == _type_of(slot.dtype) else "float32"
            values = np.array(data[start:stop]).view(array_dtype(stored))
            if not slot.coding.marked and not np.isfinite(values).all():
                raise GeofedError("MODEL_MISMATCH", f"{slot.name} of the model to start from is not finite")
            out[span] = slot.encode(values)
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
    ordered = sorted(names)
    more = f" and {len(ordered) - _MAX_NAMES} more" if len(ordered) > _MAX_NAMES else ""
    return ", ".join(ordered[:_MAX_NAMES]) + more


def _accepted(slot: Slot) -> tuple[str, ...]:
    narrow = slot.dtype.startswith(("float", "bfloat")) and slot.dtype != "float64"
    return (_type_of(slot.dtype), "F32") if narrow else (_type_of(slot.dtype),)


def _type_of(dtype: str) -> str:
    """Return the name in a safetensors file of the type that torch calls ``dtype``."""
    return _FILE_TYPES.get(dtype) or dtype.replace("float", "F").replace("uint", "U").replace("int", "I")
