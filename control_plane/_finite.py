"""Values that JSON can hold."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def finite(value: Any) -> Any:
    """Replace NaN and infinities, which JSON lacks, by null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, Mapping):
        return {key: finite(held) for key, held in value.items()}
    if isinstance(value, list | tuple):
        return [finite(held) for held in value]
    return value
