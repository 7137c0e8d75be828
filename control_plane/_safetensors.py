"""Read what the header of a safetensors file says of a model, and check it, without its tensors."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

_MAX_HEADER_BYTES = 16 << 20
"""Limit of the header's size."""
_MAX_NAME = 200
"""Characters of a name that an error shows."""
_TYPE_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}
"""Bytes of an element, by the type's name in a file. A model may have these types."""
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


def check_weights(path: Path) -> None:
    """Check that a file is whole and has tensors of known types only.

    Raises ``ValueError`` with what is wrong, for users, and ``OSError`` if it cannot be read.
    """
    size = path.stat().st_size
    try:
        header = _header(path)
        with path.open("rb") as file:
            begin = at = 8 + int.from_bytes(file.read(8), "little")
        tensors = [(name, entry) for name, entry in header.items() if name != "__metadata__"]
        if not tensors:
            raise ValueError("it has no tensors")
        for name, entry in sorted(tensors, key=lambda tensor: tuple(tensor[1]["data_offsets"])):
            at += _bytes_of(name, entry, at - begin)
    except (KeyError, TypeError, AttributeError, RecursionError, UnicodeDecodeError, json.JSONDecodeError):
        raise ValueError("its header is damaged") from None
    if at != size:
        raise ValueError(f"it has {size} bytes, and by its header {at}")


def _bytes_of(name: str, entry: dict[str, Any], begin: int) -> int:
    """Return the bytes of a tensor, which must begin at ``begin``. Raises ``ValueError``."""
    dtype, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
    if dtype not in _TYPE_BYTES:
        raise ValueError(f"{name[:_MAX_NAME]} has the type {str(dtype)[:_MAX_NAME]}, which no model here can have")
    if any(type(number) is not int or number < 0 for number in (*shape, start, stop)):
        raise ValueError(f"{name[:_MAX_NAME]} has no valid shape and place")
    if (start, stop) != (begin, begin + prod(shape) * _TYPE_BYTES[dtype]):
        raise ValueError(f"{name[:_MAX_NAME]} is not where its shape and the tensors before it say")
    return int(stop - start)


def _header(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= _MAX_HEADER_BYTES:
            raise ValueError(f"a header of {length} bytes")
        header: dict[str, Any] = json.loads(file.read(length))
        return header
