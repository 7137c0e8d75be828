"""Export of a model to a safetensors file, and import of one as the initial model of another job."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import safetensors

from geofed_pb.errors import GeofedError
from sync.coordinates import array_dtype
from sync.framing import Array
from sync.layout import Layout, Slot, Vector

__all__ = ["BASE_FACT", "LOCAL_FACT", "base_in", "from_safetensors", "local_in", "to_safetensors"]

BASE_FACT = "base"
"""Key, in the header of a safetensors file, of the names of the tensors that were not trained, as a JSON list."""
LOCAL_FACT = "local"
"""Key, in the header, of the names of the tensors that stay in their region, as a JSON list; a federated model lacks
them."""

_MAX_NAMES = 3
"""Tensor names that an error message lists; it only counts the others."""
_FILE_TYPES = {
    "bool": "BOOL", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "complex64": "C64",
}  # fmt: skip
"""Name of a torch dtype in a safetensors file, where it is not a letter followed by the number of bits."""


def to_safetensors(
    layout: Layout,
    model: Vector,
    facts: dict[str, str],
    base: Mapping[str, Array] | None = None,
    local: Mapping[str, Array] | None = None,
) -> tuple[bytes, str]:
    """Return the named tensors of a flat model as safetensors bytes, and the bytes' digest.

    The tensors have the dtypes of the task's model, so that ``load_state_dict`` accepts them, and the values with which
    workers evaluate the model. Tied tensors are stored under each of their names; the header therefore also states the
    number of elements of the flat model. ``base``: bytes of the tensors that never change, by name; the header lists
    their names. ``local``: the same of the tensors that stay in a region, for its own model; None: they are left out.
    Raises ``GeofedError("MODEL_NOT_FOUND")`` if a tensor of the base, or one that stays in the region, is missing.
    """
    # ascontiguousarray would turn a scalar into a vector of one element.
    tensors = {name: np.asarray(array, order="C") for name, array in layout.tensors(model).items()}
    constant = _with_aliases(layout, _from_bytes(layout.base, base or {}, "which is not trained, "))
    own = {}
    if local is not None:
        own = _with_aliases(layout, _from_bytes(layout.local, local, "which stays in its region, "))
    facts = {**facts, "flat_elements": str(layout.size)}
    if constant:
        facts[BASE_FACT] = json.dumps(sorted(constant))
    if layout.local:
        names = {slot.name for slot in layout.local}
        facts[LOCAL_FACT] = json.dumps(sorted({*names, *(alias for alias, name in layout.aliases if name in names)}))
    types = {slot.name: _type_of(slot.dtype) for slot in (*layout.slots, *layout.base, *layout.local)}
    types |= {alias: types[name] for alias, name in layout.aliases}
    data = _serialised({**tensors, **constant, **own}, types, facts)
    return data, "sha256:" + hashlib.sha256(data).hexdigest()


def _from_bytes(slots: tuple[Slot, ...], contents: Mapping[str, Array], which: str) -> dict[str, Array]:
    if lacking := [slot.name for slot in slots if slot.name not in contents]:
        raise GeofedError("MODEL_NOT_FOUND", f"the values of {lacking[0]}, {which}are not here")
    return {slot.name: contents[slot.name].view(array_dtype(slot.dtype)).reshape(slot.shape) for slot in slots}


def _with_aliases(layout: Layout, tensors: dict[str, Array]) -> dict[str, Array]:
    return tensors | {alias: tensors[name] for alias, name in layout.aliases if name in tensors}


def _serialised(tensors: Mapping[str, Array], types: Mapping[str, str], facts: Mapping[str, str]) -> bytes:
    """Return a safetensors file; the same tensors and facts are the same bytes. The `safetensors` package writes the
    facts in any order."""
    head: dict[str, object] = {"__metadata__": dict(sorted(facts.items()))}
    at = 0
    # The largest types first, so that each tensor is aligned.
    names = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    for name in names:
        array = tensors[name]
        head[name] = {"dtype": types[name], "shape": array.shape, "data_offsets": (at, at + array.nbytes)}
        at += array.nbytes
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    contents = (np.ascontiguousarray(tensors[name]).reshape(-1).view(np.uint8).data for name in names)
    return b"".join((len(text).to_bytes(8, "little"), text, *contents))


def from_safetensors(layout: Layout, path: Path) -> Vector:
    """Read a file of `to_safetensors` as a flat model of this layout, shape (n,). Reads one tensor at a time.

    The file may order its tensors differently and may come from a job that trained other parameters, for instance
    because this job freezes some. float32 is accepted for any narrower floating-point type. The file may hold the base
    (`base_in`), which is not part of the result.
    Raises ``GeofedError("MODEL_MISMATCH")`` if names, shapes, types or finiteness don't fit, and
    ``GeofedError("FRAME_INVALID")`` if the file cannot be read.
    """
    out = np.empty(layout.size, np.float32)
    with _reading(path) as file:
        _check_names(layout, set(file.names))
        for slot, span in layout.places():
            values = file.values(slot, _accepted(slot))
            if not slot.coding.marked and not np.isfinite(values).all():
                raise GeofedError("MODEL_MISMATCH", f"{slot.name} of the model to start from is not finite")
            out[span] = slot.encode(values)
    return out


def base_in(layout: Layout, path: Path) -> dict[str, Array]:
    """Return the bytes of the base's tensors in a safetensors file, by name, as views of the file; empty: it has none.

    Raises ``GeofedError("MODEL_MISMATCH")`` if only some are there, or with other shapes or types, and
    ``GeofedError("FRAME_INVALID")`` if the file cannot be read.
    """
    with _reading(path) as file:
        if not any(slot.name in file.names for slot in layout.base):
            return {}
        if missing := {slot.name for slot in layout.base} - set(file.names):
            raise GeofedError("MODEL_MISMATCH", f"the model to start from has no {_listed(missing)}")
        return {slot.name: file.content(slot, (_type_of(slot.dtype),))[1] for slot in layout.base}


def local_in(layout: Layout, path: Path) -> dict[str, Array]:
    """Return the bytes of the tensors that stay in their region as far as a file has them, as `base_in`."""
    with _reading(path) as file:
        known = [slot for slot in layout.local if slot.name in file.names]
        return {slot.name: file.content(slot, (_type_of(slot.dtype),))[1] for slot in known}


class _File:
    """An open safetensors file."""

    def __init__(self, path: Path) -> None:
        with safetensors.safe_open(path, framework="numpy") as file:
            self.names = frozenset(file.keys())
        with path.open("rb") as raw:
            length = int.from_bytes(raw.read(8), "little")
            self._head = json.loads(raw.read(length))
        self._data = np.memmap(path, np.uint8, "r", offset=8 + length)

    def content(self, slot: Slot, types: tuple[str, ...]) -> tuple[str, Array]:
        """Return type and bytes of a tensor, which must have the slot's shape and one of these types."""
        entry = self._head[slot.name]
        shape, dtype = tuple(entry["shape"]), str(entry["dtype"])
        if shape != slot.shape or dtype not in types:
            own = f"{_type_of(slot.dtype)} {list(slot.shape)}"
            text = f"{slot.name} of the model to start from is {dtype} {list(shape)}, the task's {own}"
            raise GeofedError("MODEL_MISMATCH", text)
        start, stop = entry["data_offsets"]
        return dtype, self._data[start:stop]

    def values(self, slot: Slot, types: tuple[str, ...]) -> Array:
        """Return the values of a tensor, as `content`, in one dimension."""
        dtype, content = self.content(slot, types)
        stored = slot.dtype if dtype == _type_of(slot.dtype) else "float32"
        return np.array(content).view(array_dtype(stored))


@contextmanager
def _reading(path: Path) -> Iterator[_File]:
    """Open a file, and turn what makes it unreadable into ``GeofedError("FRAME_INVALID")``."""
    try:
        yield _File(path)
    except (safetensors.SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise GeofedError("FRAME_INVALID", f"the model to start from cannot be read: {error}") from None


def _check_names(layout: Layout, found: set[str]) -> None:
    base = {slot.name for slot in (*layout.base, *layout.local)}
    base |= {alias for alias, name in layout.aliases if name in base}
    wanted = {slot.name for slot in layout.slots} | {alias for alias, _ in layout.aliases} - base
    found = found - base
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
