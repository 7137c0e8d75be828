"""Where each tensor of a model lies in its flat vector.

A model travels as one float32 vector: the trainable parameters first, then everything else that belongs to the
model's state (frozen parameters, BatchNorm statistics, counters), as `sync.coordinates` has it. Averaging the vector
averages all of it; integers are rounded when they are put back. A vector of gradients has the same places, and behind
them one coordinate for each trainable parameter: 1 where it has a gradient, so that one merge serves all.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from geofed_pb.errors import GeofedError
from sync.coordinates import PLAIN, Coding, array_dtype, decode, encode

__all__ = ["Layout", "Slot", "Vector"]

Vector = npt.NDArray[np.float32]

_MOST_PARTS = 3


@dataclass(frozen=True)
class Slot:
    """One tensor of the model."""

    name: str
    """Its key in the module's state dict."""
    shape: tuple[int, ...]
    dtype: str
    """As torch calls it: "float32", "int64", ..."""
    coding: Coding = PLAIN

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def size(self) -> int:
        """Elements of the flat vector."""
        return self.elements * self.coding.coordinates

    def facts(self) -> dict[str, object]:
        """For JSON; what most slots have in common is left out."""
        found: dict[str, object] = {"name": self.name, "shape": self.shape, "dtype": self.dtype}
        if self.coding.parts > 1:
            found["parts"] = self.coding.parts
        if self.coding.marked:
            found["marked"] = True
        return found

    def encode(self, values: npt.NDArray[np.generic]) -> Vector:
        """Coordinates, shape (size,), of an array of this shape."""
        return encode(values, self.coding)

    def decode(self, vector: Vector) -> npt.NDArray[np.generic]:
        """An array of this shape; narrow floating-point types come as float32, not rounded yet."""
        return decode(vector, self.dtype, self.coding).reshape(self.shape)


@dataclass(frozen=True)
class Layout:
    """All tensors of a model, in the order of the flat vector."""

    slots: tuple[Slot, ...]
    trainable: int
    """How many of the slots, from the first, are trained by gradients."""
    aliases: tuple[tuple[str, str], ...] = ()
    """Further names in the state dict (tied parameters), each with the slot that it shares."""

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
        """Elements that gradients are for: the head of the vector."""
        return sum(slot.size for slot in self.slots[: self.trainable])

    @property
    def digest(self) -> str:
        return "sha256:" + hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        raw = {
            "slots": [slot.facts() for slot in self.slots], "trainable": self.trainable, "aliases": self.aliases
        }  # fmt: skip
        return json.dumps(raw, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Layout:
        try:
            raw = json.loads(text)
            slots = tuple(_slot(told) for told in raw["slots"])
            aliases = tuple((str(alias), str(name)) for alias, name in raw["aliases"])
            layout = cls(slots, int(raw["trainable"]), aliases)
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise GeofedError("FRAME_INVALID", f"not a model layout: {error}") from None
        names = {slot.name for slot in slots}
        if not 0 <= layout.trainable <= len(slots) or any(n < 0 for slot in slots for n in slot.shape):
            raise GeofedError("FRAME_INVALID", "not a model layout: sizes out of range")
        if len(names) < len(slots) or any(name not in names for _, name in aliases):
            raise GeofedError("FRAME_INVALID", "not a model layout: names do not fit")
        return layout

    def places(self) -> Iterator[tuple[Slot, slice]]:
        """Every slot, and where it lies in the vector."""
        at = 0
        for slot in self.slots:
            yield slot, slice(at, at + slot.size)
            at += slot.size

    def slot_at(self, coordinate: int) -> Slot:
        """Whose a coordinate of the vector is."""
        return next(slot for slot, place in self.places() if place.start <= coordinate < place.stop)

    def tensors(self, vector: Vector) -> Mapping[str, npt.NDArray[np.generic]]:
        """The vector cut into named arrays of their own shapes and types, under every name that the state dict has for
        them."""
        if vector.shape != (self.size,):
            raise GeofedError("FRAME_INVALID", f"vector of shape {vector.shape} for a model of {self.size} elements")
        cut = {
            slot.name: slot.decode(vector[place]).astype(array_dtype(slot.dtype), copy=False)
            for slot, place in self.places()
        }
        return cut | {alias: cut[name] for alias, name in self.aliases}

    def difference(self, other: Layout) -> str:
        """The first thing in which another model differs, for people; "": nothing."""
        here, there = ({slot.name: slot for slot in one.slots} for one in (self, other))
        for name in [*here, *(name for name in there if name not in here)]:
            if here.get(name) != there.get(name):
                return f"{name} is {_told(here.get(name))} here and {_told(there.get(name))} there"
        return "" if self == other else "its tensors are tied or trained otherwise, or in another order"


def _slot(raw: Mapping[str, Any]) -> Slot:
    shape, coding = tuple(int(n) for n in raw["shape"]), Coding(int(raw.get("parts", 1)), bool(raw.get("marked")))
    if not 1 <= coding.parts <= _MOST_PARTS:
        raise ValueError(f"{coding.parts} coordinates an element")
    return Slot(str(raw["name"]), shape, str(raw["dtype"]), coding)


def _told(slot: Slot | None) -> str:
    if slot is None:
        return "missing"
    more = "" if slot.coding == PLAIN else f" in {slot.coding.coordinates} coordinates"
    return f"{slot.dtype} {list(slot.shape)}{more}"
