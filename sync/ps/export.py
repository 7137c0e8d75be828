"""A model as the file that a user gets."""

from __future__ import annotations

import hashlib

import numpy as np
import safetensors.numpy

from sync.layout import Layout, Vector

__all__ = ["to_safetensors"]


def to_safetensors(layout: Layout, model: Vector, facts: dict[str, str]) -> tuple[bytes, str]:
    """The named tensors of a flat model as safetensors bytes, and their digest; loads with ``load_state_dict``.

    Integers are whole again; floating-point tensors of another width stay float32, which loses nothing. The head says
    how many elements the flat model has, as tied tensors stand under each of their names.
    """
    # Not ascontiguousarray, which makes a scalar a vector of one element.
    tensors = {name: np.asarray(array, order="C") for name, array in layout.tensors(model).items()}
    data = safetensors.numpy.save(tensors, metadata={**facts, "flat_elements": str(layout.size)})
    return data, "sha256:" + hashlib.sha256(data).hexdigest()
