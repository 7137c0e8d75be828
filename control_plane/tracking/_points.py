"""Which figures an event has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from control_plane._view import SO_FAR, USAGE


@dataclass(frozen=True)
class Point:
    """A figure of a region after a round."""

    cursor: int
    """Of its event."""
    at: str
    """Time in UTC."""
    region: str
    round: int
    name: str
    """`loss`, `step`, `samples`, `usd` and `wan_bytes` of the training, names that the task has logged, `system/…` for
    what the workers have used; `test_loss` and the metrics of an evaluation."""
    value: float


def points_of(event: Mapping[str, Any]) -> list[Point]:
    """Return the figures of an event's view; most events have none."""
    data = event["data"]
    if event["kind"] == "partition.round":
        figures = {name: data[name] for name in ("loss", "step", "samples", *SO_FAR) if name in data}
        figures |= {f"system/{name}": data[name] for name in USAGE if name in data}
    elif event["kind"] == "partition.logged":
        figures = data["values"]
    elif event["kind"] == "partition.evaluated":
        figures = {"test_loss" if name == "loss" else name: value for name, value in data["metrics"].items()}
    else:
        return []
    return [
        Point(event["cursor"], event["at"], event["region"], int(data["round"]), name, float(value))
        for name, value in figures.items()
        if value is not None
    ]
