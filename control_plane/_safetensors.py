"""Read the size of a model from the header of a safetensors file, without its tensors."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

_MAX_HEADER_BYTES = 16 << 20
"""Limit of the header's size."""


def flat_bytes(path: Path) -> int | None:
    """Return the bytes of a model as one float32 vector, as regions exchange it; None if the file is invalid.

    The header may state the number of elements; the sum over all tensors would count tied tensors repeatedly.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= _MAX_HEADER_BYTES:
                return None
            header = json.loads(file.read(length))
        if elements := header.get("__metadata__", {}).get("flat_elements"):
            return 4 * int(elements)
        shapes = [tensor["shape"] for name, tensor in header.items() if name != "__metadata__"]
        return 4 * sum(prod(int(size) for size in shape) for shape in shapes)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None
