"""Export of a model to a safetensors file, and import of one as the initial model of another job."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
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
_FLOATS = {
    "F64": "float64", "F32": "float32", "F16": "float16",
    **{_FILE_TYPES[name]: name for name in _FILE_TYPES if name not in ("bool", "complex64")},
}  # fmt: skip
"""Torch's names of the floating-point types, which are converted into each other, by their names in a file."""
_PEFT_PREFIX = "base_model.model."
"""Begins the names of a model in `peft`, and of the tensors in an adapter's file."""
_PARTIAL = "with `train.initialModel.partial: true` the file may lack tensors of the model, and have others"


def to_safetensors(
    layout: Layout,
    model: Vector,
    facts: dict[str, str],
    base: Mapping[str, Array] | None = None,
    local: Mapping[str, Array] | None = None,
) -> list[memoryview]:
    """Return the named tensors of a flat model as the consecutive pieces of a safetensors file. They are views of
    ``model`` where its types are the task's.

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
    return _serialised({**tensors, **constant, **own}, types, facts)


def _from_bytes(slots: tuple[Slot, ...], contents: Mapping[str, Array], which: str) -> dict[str, Array]:
    if lacking := [slot.name for slot in slots if slot.name not in contents]:
        raise GeofedError("MODEL_NOT_FOUND", f"the values of {lacking[0]}, {which}are not here")
    return {slot.name: contents[slot.name].view(array_dtype(slot.dtype)).reshape(slot.shape) for slot in slots}


def _with_aliases(layout: Layout, tensors: dict[str, Array]) -> dict[str, Array]:
    return tensors | {alias: tensors[name] for alias, name in layout.aliases if name in tensors}


def _serialised(tensors: Mapping[str, Array], types: Mapping[str, str], facts: Mapping[str, str]) -> list[memoryview]:
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
    return [memoryview(len(text).to_bytes(8, "little") + text), *contents]


def from_safetensors(
    layout: Layout, path: Path, holds: str = "", own: Vector | None = None, adapter: Path | None = None
) -> Vector:
    """Read a file as a flat model of this layout, shape (n,). Reads one tensor at a time.

    The file may order its tensors differently, and may have other floating-point types, which are converted. It may
    hold the base (`base_in`), which is not part of the result.

    Args:
        holds: "": it is a file of `to_safetensors`, of a job that may have trained other parameters, for instance
            because this job freezes some. Of a user: "all" tensors and no others, or "some" and perhaps others; of
            tied tensors each needs one name only.
        own: the model that tensors come from which the file lacks, with "some".
        adapter: file whose tensors replace those of the first one. All of them must be tensors of the model; they may
            have the names that `peft` gives them.

    Raises ``GeofedError("MODEL_MISMATCH")`` if names, shapes, types or finiteness don't fit, and
    ``GeofedError("FRAME_INVALID")`` if the file cannot be read.
    """
    out = np.empty(layout.size, np.float32) if own is None else own.copy()
    with _reading(layout, path, adapter) as file:
        file.check_names(layout, holds)
        for slot, span in layout.places():
            if (name := file.name_of(layout, slot)) is None:
                continue
            values = file.values(slot, name)
            if not slot.coding.marked and not np.isfinite(values).all():
                raise GeofedError("MODEL_MISMATCH", f"{slot.name} of the model to start from is not finite")
            out[span] = slot.encode(values)
    return out


def base_in(layout: Layout, path: Path, holds: str = "", adapter: Path | None = None) -> dict[str, Array]:
    """Return the bytes of the base's tensors in a safetensors file, by name, where the type is the task's as views of
    the file; empty: it has none. ``holds``, ``adapter``: see `from_safetensors`; with "some" it may hold a part.

    Raises ``GeofedError("MODEL_MISMATCH")`` if only some are there, or with other shapes or types, and
    ``GeofedError("FRAME_INVALID")`` if the file cannot be read.
    """
    with _reading(layout, path, adapter) as file:
        file.check_names(layout, holds)
        found = file.contents(layout, layout.base)
        if not holds and found and (missing := {slot.name for slot in layout.base} - set(found)):
            raise GeofedError("MODEL_MISMATCH", f"the model to start from has no {_listed(missing)}")
        return found


def local_in(layout: Layout, path: Path, adapter: Path | None = None) -> dict[str, Array]:
    """Return the bytes of the tensors that stay in their region as far as a file has them, as `base_in`."""
    with _reading(layout, path, adapter) as file:
        return file.contents(layout, layout.local)


@dataclass(frozen=True)
class _Entry:
    """A tensor in a safetensors file."""

    dtype: str
    shape: tuple[int, ...]
    content: Array
    """Its bytes."""


def _entries(path: Path) -> dict[str, _Entry]:
    """Map a file's tensors, by name."""
    with safetensors.safe_open(path, framework="numpy") as file:
        names = file.keys()
    with path.open("rb") as raw:
        length = int.from_bytes(raw.read(8), "little")
        head = json.loads(raw.read(length))
    data = np.memmap(path, np.uint8, "r", offset=8 + length)
    return {
        name: _Entry(str(head[name]["dtype"]), tuple(head[name]["shape"]), data[slice(*head[name]["data_offsets"])])
        for name in names
    }


class _File:
    """An open safetensors file, and an adapter whose tensors replace some of it."""

    def __init__(self, layout: Layout, path: Path, adapter: Path | None = None) -> None:
        self._entries = _entries(path)
        self._of_file = frozenset(self._entries)
        """Names in the file itself."""
        if adapter is not None:
            self._adapt(layout, _entries(adapter))
        self.names = frozenset(self._entries)

    def _adapt(self, layout: Layout, replacing: dict[str, _Entry]) -> None:
        """Put an adapter's tensors in place of the file's. Raises ``GeofedError("MODEL_MISMATCH")`` if one is not of
        the model."""
        slots = (*layout.slots, *layout.base, *layout.local)
        first = {slot.name: slot.name for slot in slots} | dict(layout.aliases)
        plain = {_plain_name(name): name for name in first}
        named = {name if name in first else plain.get(_plain_name(name), name): name for name in replacing}
        if len(named) < len(replacing):
            text = "the adapter to start from has a tensor under two names"
            raise GeofedError("MODEL_MISMATCH", text, hint="names are those of the model's `state_dict()`, or PEFT's")
        if others := {name for name in named if name not in first}:
            lacking = {slot.name for slot in slots} - set(self._entries) - set(named)
            near = ((name, _nearest(name, lacking)) for name in sorted(others)[:_MAX_NAMES])
            pair = next((pair for pair in near if pair[1]), None)
            text = f"the adapter to start from has {_listed(others)}, which the task's model lacks"
            text += f"; did you mean {pair[0]} to be {pair[1]}?" if pair else ""
            raise GeofedError("MODEL_MISMATCH", text, hint="names are those of the model's `state_dict()`, or PEFT's")
        # Of tied tensors, none must stay as the file has it.
        replaced = {first[name] for name in named}
        kept = {name: entry for name, entry in self._entries.items() if first.get(name) not in replaced}
        self._entries = kept | {name: replacing[given] for name, given in named.items()}

    def check_names(self, layout: Layout, holds: str) -> None:
        """Raise ``GeofedError("MODEL_MISMATCH")`` unless the file has the names that it must have."""
        if not holds:
            _check_names_of_job(layout, set(self.names))
            return
        slots = (*layout.slots, *layout.base, *layout.local)
        lacking = {slot.name for slot in slots if not self._names_of(layout, slot)}
        known = {slot.name for slot in slots} | {alias for alias, _ in layout.aliases}
        if holds == "all":
            _refuse(lacking, set(self.names) - known)
        elif self._of_file.isdisjoint(known):
            # The adapter's tensors do not make a file fit that has none of the model's.
            lacking = {slot.name for slot in slots}
            _refuse(lacking, set(self._of_file), hint="names are those of the model's `state_dict()`")

    def name_of(self, layout: Layout, slot: Slot) -> str | None:
        """Return the name under which the file has a tensor; None: it lacks it.

        Raises ``GeofedError("MODEL_MISMATCH")`` if it has different ones under names that the model ties.
        """
        names = self._names_of(layout, slot)
        if not names:
            return None
        first, *others = names
        for other in others:
            if not np.array_equal(self._stored(slot, first)[1], self._stored(slot, other)[1]):
                text = f"{first} and {other} are one tensor of the task's model, and differ in the model to start from"
                raise GeofedError("MODEL_MISMATCH", text)
        return first

    def contents(self, layout: Layout, slots: tuple[Slot, ...]) -> dict[str, Array]:
        """Return the bytes of tensors in their slots' types, by the slots' names, as far as the file has them."""
        names = {slot: self.name_of(layout, slot) for slot in slots}
        return {slot.name: self._content(slot, name) for slot, name in names.items() if name is not None}

    def values(self, slot: Slot, name: str) -> Array:
        """Return the values of a tensor in one dimension: in its slot's type, or as the file has them in a wider
        one."""
        dtype, content = self._stored(slot, name)
        values = np.array(content).view(array_dtype(slot.dtype if dtype == _type_of(slot.dtype) else _FLOATS[dtype]))
        if dtype == _type_of(slot.dtype):
            return values
        with np.errstate(over="ignore"):
            held = values.astype(array_dtype(slot.dtype))
            if not np.array_equal(np.isfinite(values), np.isfinite(held)):
                text = (
                    f"{name} of the model to start from has values that the task's {_type_of(slot.dtype)} cannot hold"
                )
                raise GeofedError("MODEL_MISMATCH", text)
            return values if dtype == "F32" else held

    def _content(self, slot: Slot, name: str) -> Array:
        dtype, content = self._stored(slot, name)
        if dtype == _type_of(slot.dtype):
            return content
        return self.values(slot, name).astype(array_dtype(slot.dtype), copy=False).view(np.uint8)

    def _names_of(self, layout: Layout, slot: Slot) -> list[str]:
        names = [slot.name, *(alias for alias, name in layout.aliases if name == slot.name)]
        return [name for name in names if name in self.names]

    def _stored(self, slot: Slot, name: str) -> tuple[str, Array]:
        """Return type and bytes of a tensor, which must have the slot's shape, and its type unless both are
        floating-point ones."""
        entry, own = self._entries[name], _type_of(slot.dtype)
        shape, dtype = entry.shape, entry.dtype
        if shape != slot.shape or (dtype != own and not (dtype in _FLOATS and own in _FLOATS)):
            text = f"{name} of the model to start from is {dtype} {list(shape)}, the task's {own} {list(slot.shape)}"
            raise GeofedError("MODEL_MISMATCH", text)
        return dtype, entry.content


def _plain_name(name: str) -> str:
    """Return a tensor's name without what `peft` adds to it, in a model or in the file of an adapter."""
    return name.removeprefix(_PEFT_PREFIX).replace(".default.weight", ".weight")


@contextmanager
def _reading(layout: Layout, path: Path, adapter: Path | None = None) -> Iterator[_File]:
    """Open a file, and turn what makes it unreadable into ``GeofedError("FRAME_INVALID")``."""
    try:
        yield _File(layout, path, adapter)
    except (safetensors.SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise GeofedError("FRAME_INVALID", f"the model to start from cannot be read: {error}") from None


def _check_names_of_job(layout: Layout, found: set[str]) -> None:
    base = {slot.name for slot in (*layout.base, *layout.local)}
    base |= {alias for alias, name in layout.aliases if name in base}
    wanted = {slot.name for slot in layout.slots} | {alias for alias, _ in layout.aliases} - base
    _refuse(wanted - found, found - base - wanted, hint=None)


def _refuse(lacking: set[str], others: set[str], hint: str | None = _PARTIAL) -> None:
    """Raise ``GeofedError("MODEL_MISMATCH")`` if a file lacks tensors of the model, or has others."""
    differ = [f"has no {_listed(lacking)}"] if lacking else []
    differ += [f"has {_listed(others)}, which the task's lacks"] if others else []
    if not differ:
        return
    text = f"the model to start from {' and '.join(differ)}"
    near = ((name, _nearest(name, others)) for name in sorted(lacking)[:_MAX_NAMES])
    if (pair := next(((name, other) for name, other in near if other), None)) is not None:
        text += f"; did you mean {pair[1]} to be {pair[0]}?"
    raise GeofedError("MODEL_MISMATCH", text, hint=hint)


def _nearest(name: str, others: set[str]) -> str | None:
    """Return the name that is most like another one: one is the other below a prefix, as of a wrapper, or similar."""
    below = (other for other in sorted(others) if other.endswith(f".{name}") or name.endswith(f".{other}"))
    return next(below, None) or next(iter(get_close_matches(name, sorted(others), 1)), None)


def _listed(names: set[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - _MAX_NAMES} more" if len(ordered) > _MAX_NAMES else ""
    return ", ".join(ordered[:_MAX_NAMES]) + more


def _type_of(dtype: str) -> str:
    """Return the name in a safetensors file of the type that torch calls ``dtype``."""
    return _FILE_TYPES.get(dtype) or dtype.replace("float", "F").replace("uint", "U").replace("int", "I")
