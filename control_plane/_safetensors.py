"""What the head of a safetensors file says; no tensor is read."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

_LARGEST_HEAD_BYTES = 16 << 20


def flat_bytes(path: Path) -> int | None:
    """Bytes of a model as one float32 vector, which is what regions send; None: it is no such file.

    As its head says, else of all tensors: tied ones travel once, and stand there under each of their names.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= _LARGEST_HEAD_BYTES:
                return None
            head = json.loads(file.read(length))
        if told := head.get("__metadata__", {}).get("flat_elements"):
            return 4 * int(told)
        shapes = [tensor["shape"] for name, tensor in head.items() if name != "__metadata__"]
        return 4 * sum(prod(int(size) for size in shape) for shape in shapes)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
