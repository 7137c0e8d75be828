"""What the charts of a job show, from the views of its events: lists of numbers that a browser draws."""

from __future__ import annotations

import math
from collections.abc import Iterable
from datetime import datetime
from typing import Any

from control_plane._view import Data, round_rows
from control_plane.dashboard._chart import thinned

__all__ = ["series_of"]

_MAX_POINTS = 500
"""Limit of points of one line."""
_MAX_CHARTS = 40
"""Limit of charts: a task may log a hundred names."""
_FIRST = ("loss", "test_loss")
_LAST = ("seconds", "usd", "wan_bytes", "samples_per_second", "cpu_cores", "memory_bytes", "gpu_memory_bytes")
_OTHER = ("round", "region", "at", "step", "samples")


def series_of(job: Data, events: Iterable[Data]) -> dict[str, Any]:
    """Return the charts of a job's view: for each a name, a line for each region, and the range that is planned.

    A line has the numbers of its rounds, and the values after them; what is not finite is left out.
    """
    rows = round_rows(events)
    lines: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for region in sorted({row["region"] for row in rows}):
        own = [row for row in rows if row["region"] == region]
        for row, before in zip(own, [None, *own[:-1]], strict=True):
            for name, value in (row | _pace(row, before)).items():
                if name not in _OTHER and isinstance(value, int | float) and math.isfinite(value):
                    lines.setdefault(name, {}).setdefault(region, []).append((row["round"], float(value)))
    tasks = sorted(name for name in lines if name not in (*_FIRST, *_LAST))
    names = [name for name in (*_FIRST, *tasks[: _MAX_CHARTS - len(_FIRST) - len(_LAST)], *_LAST) if name in lines]
    estimate = (job["plan"] or {}).get("estimate", {})
    charts = []
    for name in names:
        chart: dict[str, Any] = {"name": name, "lines": []}
        for region, points in lines[name].items():
            kept = thinned(points, _MAX_POINTS)
            chart["lines"].append({"region": region, "x": [x for x, _ in kept], "y": [y for _, y in kept]})
        if name in ("usd", "wan_bytes") and name in estimate:
            chart["range"] = [estimate[name]["low"], estimate[name]["high"]]
        charts.append(chart)
    return {"job": job["id"], "name": job["name"], "charts": charts, "network": _network(job)}


def _pace(row: Data, before: Data | None) -> Data:
    """Return the seconds of a round, and the samples per second of its region; of several rounds their mean."""
    if before is None or "at" not in row or "at" not in before:
        return {}
    seconds = (datetime.fromisoformat(row["at"]) - datetime.fromisoformat(before["at"])).total_seconds()
    count, samples = row["round"] - before["round"], row["samples"] - before["samples"]
    return {"seconds": seconds / count, "samples_per_second": samples / seconds} if seconds > 0 and count > 0 else {}


def _network(job: Data) -> dict[str, Any]:
    """Return the regions with their states, and the links between them."""
    return {
        "regions": [{"name": part["region"], "state": part["state"]} for part in job["partitions"]],
        "links": [
            {
                name: link[name]
                for name in ("source", "destination", "state", "rtt_ms", "goodput_mbps", "codec", "sent_bytes")
            }
            for link in job["links"]
        ],
    }
