"""Where each tensor of a model lies in its flat vector.

A model travels as one float32 vector: the trainable parameters first, then everything else that belongs to the
model's state (frozen parameters, BatchNorm statistics, counters). Averaging the vector averages all of it; integers
are rounded when they are put back. Vectors of gradients have the same length, so that one merge serves both.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

from geofed_pb.errors import GeofedError

__all__ = ["Layout", "Slot", "Vector"]

Vector = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Slot:
    """One tensor of the model."""

    name: str
    """Its key in the module's state dict."""
    shape: tuple[int, ...]
    dtype: str
    """As torch calls it: "float32", "int64", ..."""

    @property
    def size(self) -> int:
        return math.prod(self.shape)


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
    def trainable_size(self) -> int:
        """Elements that gradients are for: the head of the vector."""
        return sum(slot.size for slot in self.slots[: self.trainable])

    @property
    def digest(self) -> str:
        return "sha256:" + hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Layout:
        try:
            raw = json.loads(text)
            slots = tuple(
                Slot(str(s["name"]), tuple(int(n) for n in s["shape"]), str(s["dtype"])) for s in raw["slots"]
            )
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

    def tensors(self, vector: Vector) -> Mapping[str, npt.NDArray[np.generic]]:
        """The vector cut into named arrays of their own shapes, under every name that the state dict has for them;
        integers are rounded, other dtypes left in float32."""
        if vector.shape != (self.size,):
            raise GeofedError("FRAME_INVALID", f"vector of shape {vector.shape} for a model of {self.size} elements")
        cut: dict[str, npt.NDArray[np.generic]] = {}
        at = 0
        for slot in self.slots:
            part = vector[at : at + slot.size].reshape(slot.shape)
            cut[slot.name] = np.rint(part).astype(slot.dtype) if slot.dtype.startswith(("int", "uint")) else part
            at += slot.size
        return cut | {alias: cut[name] for alias, name in self.aliases}
