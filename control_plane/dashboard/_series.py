"""What the charts of a job show, from the views of its events: lists of numbers that a browser draws."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from control_plane._view import Data, round_rows
from control_plane.core import WanLink
from control_plane.dashboard._chart import thinned
from control_plane.dashboard._timeline import grouped, timeline_of

__all__ = ["federation_network", "series_of"]

_MAX_POINTS = 500
"""Limit of points of one line."""
_MAX_ALL_POINTS = 6000
"""Limit of points of all lines together, which keeps the answer below 200 kB."""
_MAX_SPANS = 1000
"""Limit of the rounds, or groups of rounds, in the timelines of all regions."""
_MAX_CHARTS = 40
"""Limit of charts: a task may log a hundred names."""
_FIRST = ("loss", "test_loss")
_LAST = ("seconds", "usd", "wan_bytes", "samples_per_second", "cpu_cores", "memory_bytes", "gpu_memory_bytes")
_OTHER = ("round", "region", "at", "step", "samples")


def series_of(job: Data, events: Iterable[Data], rounds: Iterable[Data]) -> dict[str, Any]:
    """Return the charts of a job's view: for each a name, a line for each region, and the range that is planned.

    A line has the numbers of its rounds, and the values after them; what is not finite is left out.

    Args:
        events: of which some may be left out, evenly.
        rounds: all events of the last rounds, for the timeline.
    """
    rows = round_rows(events)
    lines: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for region in sorted({row["region"] for row in rows}):
        own = [row for row in rows if row["region"] == region]
        before: Data | None = None
        for row in own:
            paced, before = row | _pace(row, before), row if "at" in row else before
            for name, value in paced.items():
                if name not in _OTHER and isinstance(value, int | float) and math.isfinite(value):
                    lines.setdefault(name, {}).setdefault(region, []).append((row["round"], float(value)))
    tasks = sorted(name for name in lines if name not in (*_FIRST, *_LAST))
    names = [name for name in (*_FIRST, *tasks[: _MAX_CHARTS - len(_FIRST) - len(_LAST)], *_LAST) if name in lines]
    estimate = (job["plan"] or {}).get("estimate", {})
    charts, most = [], max(2, min(_MAX_POINTS, _MAX_ALL_POINTS // (sum(len(lines[name]) for name in names) or 1)))
    for name in names:
        chart: dict[str, Any] = {"name": name, "lines": []}
        for region, points in lines[name].items():
            kept = thinned(points, most)
            chart["lines"].append({"region": region, "x": [x for x, _ in kept], "y": [y for _, y in kept]})
        if name in ("usd", "wan_bytes") and name in estimate:
            chart["range"] = [estimate[name]["low"], estimate[name]["high"]]
        charts.append(chart)
    return {
        "job": job["id"],
        "name": job["name"],
        "charts": charts,
        "axes": _axes(rows),
        "network": _network(job),
        "timeline": _timeline(rounds),
    }


def _pace(row: Data, before: Data | None) -> Data:
    """Return the seconds of a round, and the samples per second of its region; of several rounds their mean."""
    if before is None or "at" not in row or "at" not in before:
        return {}
    seconds = (datetime.fromisoformat(row["at"]) - datetime.fromisoformat(before["at"])).total_seconds()
    count, samples = row["round"] - before["round"], row["samples"] - before["samples"]
    return {"seconds": seconds / count, "samples_per_second": samples / seconds} if seconds > 0 and count > 0 else {}


def _timeline(events: Iterable[Data]) -> list[dict[str, Any]]:
    """Return for each region its rounds: first and last, begin (Unix seconds), and the seconds of its parts."""
    timeline = timeline_of(events)
    most = max(1, min(100, _MAX_SPANS // (len(timeline) or 1)))
    return [
        {
            "region": region,
            "rounds": [
                [span.first, span.last, round(span.begin, 3), *(round(part, 4) for part in span.parts)]
                for span in grouped(spans, most)
            ],
        }
        for region, spans in timeline.items()
    ]


def _axes(rows: list[Data]) -> dict[str, dict[str, list[float]]]:
    """Return for each region the step and the time (Unix seconds) at which rounds have ended, in their order."""
    found: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        if "at" in row:
            axes = found.setdefault(row["region"], {"round": [], "step": [], "at": []})
            axes["round"].append(row["round"])
            axes["step"].append(row["step"])
            axes["at"].append(round(datetime.fromisoformat(row["at"]).timestamp(), 1))
    return found


def federation_network(
    regions: Sequence[tuple[str, str]], links: Iterable[Sequence[WanLink]]
) -> dict[str, list[dict[str, Any]]]:
    """Return regions with their states, and the links between them, in the form of a job's network.

    ``links``: those of each job, the newest job first.
    """
    named = {name for name, _ in regions}
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for link in (link for of_job in links for link in of_job):
        pair = (link.source, link.destination)
        if pair not in found and named.issuperset(pair) and link.state not in ("idle", "unknown"):
            found[pair] = {
                "source": link.source,
                "destination": link.destination,
                "state": link.state,
                "rtt_ms": link.rtt_ms or None,
                "goodput_mbps": link.goodput_mbps or None,
                "codec": link.codec,
            }
    return {"regions": [{"name": name, "state": state} for name, state in regions], "links": list(found.values())}


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
