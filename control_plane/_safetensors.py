"""Read what the header of a safetensors file says of a model, without its tensors."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

_MAX_HEADER_BYTES = 16 << 20
"""Limit of the header's size."""
_INVALID = (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
"""Errors of a file that is missing, or no safetensors file."""


def flat_bytes(path: Path) -> int | None:
    """Return the bytes of a model as one float32 vector, as regions exchange it; None if the file is invalid.

    The header may state the number of elements; the sum over all tensors would count tied tensors repeatedly.
    """
    try:
        header = _header(path)
        if elements := header.get("__metadata__", {}).get("flat_elements"):
            return 4 * int(elements)
        shapes = [tensor["shape"] for name, tensor in header.items() if name != "__metadata__"]
        return 4 * sum(prod(int(size) for size in shape) for shape in shapes)
    except _INVALID:
        return None


def facts_of(path: Path) -> dict[str, Any]:
    """Return what the file states beside its tensors, such as job and round; empty if the file is invalid."""
    try:
        return dict(_header(path).get("__metadata__", {}))
    except _INVALID:
        return {}


def _header(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= _MAX_HEADER_BYTES:
            raise ValueError(f"a header of {length} bytes")
        header: dict[str, Any] = json.loads(file.read(length))
        return header
