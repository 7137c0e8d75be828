"""Values that a task's `metrics` returns: numbers, and histograms."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from geofed_pb.errors import GeofedError
from sync.histograms import Histogram, by_category

__all__ = ["measure", "numbers"]


def measure(name: str, value: Any) -> float | Histogram:
    """Return a value of `metrics` as a number or a histogram.

    A histogram is a pair (counts, edges), as of `torch.histogram` and `numpy.histogram`, or a mapping from category
    to count, such as a `collections.Counter`. Raises ``GeofedError("TASK_INVALID")`` for one without valid counts, and
    what ``float`` raises for another value.
    """
    if not isinstance(value, (Mapping, tuple, list)):
        return float(value)
    try:
        if isinstance(value, Mapping):
            # Keys that are equal as text are one category: PyTorch's default collate makes a tensor of each integer.
            return by_category(zip(map(_text, value), _whole(value.values()), strict=True))
        counts, edges = value
        # float32's 0.1 stays 0.1.
        limits = tuple(float(str(edge)) for edge in _array(edges))
        return Histogram(edges=limits, counts=_whole(_array(counts).tolist()))
    except (TypeError, ValueError, OverflowError) as error:
        text = f"`metrics` returned no valid histogram as {name}: {error}"
        hint = "return (counts, edges), as torch.histogram does, or a dict of category and count"
        raise GeofedError("TASK_INVALID", text, hint=hint) from None


def numbers(found: Mapping[str, float | Histogram]) -> dict[str, float]:
    """Return metrics that are all numbers. Raises ``GeofedError("TASK_INVALID")`` if one is a histogram."""
    for name, value in found.items():
        if isinstance(value, Histogram):
            raise GeofedError("TASK_INVALID", f"`metrics` returned a histogram as {name}; in a pipeline it must not")
    return {name: value for name, value in found.items() if not isinstance(value, Histogram)}


def _text(category: Any) -> str:
    return str(category.item() if isinstance(category, torch.Tensor) and category.numel() == 1 else category)


def _array(values: Any) -> npt.NDArray[Any]:
    return np.asarray(values.detach().cpu() if isinstance(values, torch.Tensor) else values).reshape(-1)


def _whole(values: Iterable[Any]) -> tuple[int, ...]:
    found = []
    for value in values:
        if float(value) != int(value):
            raise ValueError(f"{value} is no number of samples")
        found.append(int(value))
    return tuple(found)
