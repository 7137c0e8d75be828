"""The layout of a model: the position of each tensor in its flat vector.

A model is exchanged as one float32 vector: first the trained parameters, then all other state that changes (BatchNorm
statistics, counters), in the coordinates of `sync.coordinates`. Averaging the vector averages all of it; integers are
rounded when they are written back. A vector of gradients has the same positions, followed by one coordinate per trained
parameter: 1 if it has a gradient, so that one merge covers everything.

Tensors that never change (frozen parameters, constant buffers) are the base. Each worker has it, and no vector contains
it. Local tensors (`train.local`) are trained in each region by itself, and the model's vector does not contain them
either.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from geofed_pb.errors import GeofedError
from sync.coordinates import PLAIN, Coding, array_dtype, decode, encode

__all__ = ["LOCAL", "Layout", "Slot", "Vector"]

Vector = npt.NDArray[np.float32]

LOCAL = "local/"
"""Prefix of the names of local tensors' bytes in a worker's stored state."""
_MAX_PARTS = 3
"""Coordinates of an element, at most."""


@dataclass(frozen=True)
class Slot:
    """One tensor of the model."""

    name: str
    """Key in the module's state dict."""
    shape: tuple[int, ...]
    dtype: str
    """Torch's name of the type: "float32", "int64", ..."""
    coding: Coding = PLAIN
    digest: str = ""
    """SHA-256 of the tensor's bytes in the base, in hexadecimal digits; "": unknown, or the tensor is not constant."""

    @property
    def elements(self) -> int:
        """Number of elements, the product of the shape."""
        return math.prod(self.shape)

    @property
    def size(self) -> int:
        """Elements of the flat vector."""
        return self.elements * self.coding.coordinates

    def facts(self) -> dict[str, object]:
        """Return the slot for JSON; defaults are left out."""
        found: dict[str, object] = {"name": self.name, "shape": self.shape, "dtype": self.dtype}
        if self.coding.parts > 1:
            found["parts"] = self.coding.parts
        if self.coding.marked:
            found["marked"] = True
        if self.digest:
            found["sha256"] = self.digest
        return found

    def encode(self, values: npt.NDArray[np.generic]) -> Vector:
        """Return the coordinates of an array of this shape, shape (size,)."""
        return encode(values, self.coding)

    def decode(self, vector: Vector) -> npt.NDArray[np.generic]:
        """Return the array of these coordinates; narrow floating-point types as float32, not rounded yet."""
        return decode(vector, self.dtype, self.coding).reshape(self.shape)


@dataclass(frozen=True)
class Layout:
    """All tensors of a model, in the order of the flat vector."""

    slots: tuple[Slot, ...]
    trainable: int
    """Number of leading slots that gradients train."""
    aliases: tuple[tuple[str, str], ...] = ()
    """Further names in the state dict (of tied parameters), each with the name of its slot."""
    base: tuple[Slot, ...] = ()
    """Tensors that never change, and that the flat vector does not contain."""
    local: tuple[Slot, ...] = ()
    """Tensors that stay in their region, and that the flat vector does not contain."""

    @property
    def size(self) -> int:
        """Elements of the flat vector."""
        return sum(slot.size for slot in self.slots)

    @property
    def gradient_size(self) -> int:
        """Elements of a vector of gradients."""
        return self.size + self.trainable

    @property
    def trainable_size(self) -> int:
        """Elements that gradients train: the head of the vector."""
        return sum(slot.size for slot in self.slots[: self.trainable])

    @property
    def digest(self) -> str:
        """SHA-256 of the layout."""
        return "sha256:" + hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        """Return the layout as compact JSON."""
        raw: dict[str, object] = {
            "slots": [slot.facts() for slot in self.slots], "trainable": self.trainable, "aliases": self.aliases
        }  # fmt: skip
        if self.base:
            raw["base"] = [slot.facts() for slot in self.base]
        if self.local:
            raw["local"] = [slot.facts() for slot in self.local]
        return json.dumps(raw, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Layout:
        """Parse a layout. Raises ``GeofedError("FRAME_INVALID")`` if it is invalid."""
        try:
            raw = json.loads(text)
            slots = tuple(_slot(entry) for entry in raw["slots"])
            aliases = tuple((str(alias), str(name)) for alias, name in raw["aliases"])
            base = tuple(_slot(entry) for entry in raw.get("base", ()))
            local = tuple(_slot(entry) for entry in raw.get("local", ()))
            layout = cls(slots, int(raw["trainable"]), aliases, base, local)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise GeofedError("FRAME_INVALID", f"not a model layout: {error}") from None
        every = (*slots, *base, *local)
        names = {slot.name for slot in every}
        if not 0 <= layout.trainable <= len(slots) or any(n < 0 for slot in every for n in slot.shape):
            raise GeofedError("FRAME_INVALID", "not a model layout: sizes out of range")
        if len(names) < len(every) or any(name not in names for _, name in aliases):
            raise GeofedError("FRAME_INVALID", "not a model layout: names do not fit")
        return layout

    def places(self) -> Iterator[tuple[Slot, slice]]:
        """Yield every slot, and its range in the vector."""
        at = 0
        for slot in self.slots:
            yield slot, slice(at, at + slot.size)
            at += slot.size

    def slot_at(self, coordinate: int) -> Slot:
        """Return the slot that a coordinate of the vector belongs to."""
        return next(slot for slot, place in self.places() if place.start <= coordinate < place.stop)

    def tensors(self, vector: Vector) -> Mapping[str, npt.NDArray[np.generic]]:
        """Return the tensors of a vector by name, with their shapes and types, under every name that the state dict
        has. The base is not among them."""
        if vector.shape != (self.size,):
            raise GeofedError("FRAME_INVALID", f"vector of shape {vector.shape} for a model of {self.size} elements")
        cut = {
            slot.name: slot.decode(vector[place]).astype(array_dtype(slot.dtype), copy=False)
            for slot, place in self.places()
        }
        return cut | {alias: cut[name] for alias, name in self.aliases if name in cut}

    def with_digests(self, digests: Mapping[str, str]) -> Layout:
        """Return the layout with digests of tensors of the base, by name, where it has none yet."""
        base = tuple(replace(slot, digest=slot.digest or digests.get(slot.name, "")) for slot in self.base)
        return replace(self, base=base)

    @property
    def base_digests(self) -> dict[str, str]:
        """The digests of the tensors of the base that are known, by name."""
        return {slot.name: slot.digest for slot in self.base if slot.digest}

    @property
    def without_digests(self) -> Layout:
        """The layout without the digests of the base."""
        return replace(self, base=tuple(replace(slot, digest="") for slot in self.base))

    def difference(self, other: Layout) -> str:
        """Describe the first difference to another layout, for users; "": there is none. Unknown digests of the base
        do not count."""
        here, there = ({slot.name: slot for slot in (*one.slots, *one.base, *one.local)} for one in (self, other))
        ours, theirs = (one._kinds() for one in (self, other))
        for name in [*here, *(name for name in there if name not in here)]:
            if (mine := _described(here.get(name))) != (other_one := _described(there.get(name))):
                return f"{name} is {mine} here and {other_one} there"
            if ours.get(name) != theirs.get(name):
                return f"{name} {ours.get(name, _CHANGES)} here and {theirs.get(name, _CHANGES)} there"
            if here[name].digest and there[name].digest and here[name].digest != there[name].digest:
                return f"{name}, which is not trained, has other values here than there"
        same = self.without_digests == other.without_digests
        return "" if same else "its tensors are tied or trained otherwise, or in another order"

    def _kinds(self) -> dict[str, str]:
        """Return what is special about tensors, as text for users, by name."""
        return {slot.name: "never changes" for slot in self.base} | {slot.name: "is local" for slot in self.local}


_CHANGES = "changes"


def _slot(raw: Mapping[str, Any]) -> Slot:
    shape, coding = tuple(int(n) for n in raw["shape"]), Coding(int(raw.get("parts", 1)), bool(raw.get("marked")))
    if not 1 <= coding.parts <= _MAX_PARTS:
        raise ValueError(f"{coding.parts} coordinates per element")
    return Slot(str(raw["name"]), shape, str(raw["dtype"]), coding, str(raw.get("sha256", "")))


def _described(slot: Slot | None) -> str:
    if slot is None:
        return "missing"
    more = "" if slot.coding == PLAIN else f" in {slot.coding.coordinates} coordinates"
    return f"{slot.dtype} {list(slot.shape)}{more}"
