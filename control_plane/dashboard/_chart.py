"""Line charts as SVG. Colours come from the stylesheet, by CSS classes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape

__all__ = ["line_chart", "thinned", "ticks"]

Points = Sequence[tuple[float, float]]

_WIDTH, _HEIGHT = 720, 260
"""Size of the chart, in pixels."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 12, 34
"""Margins around the plot, in pixels, for ticks and labels."""
_MAX_POINTS = 300
"""Limit of points drawn of a line."""
_COLOURS = 8
"""Number of colours: classes c0 to c7 of the stylesheet."""


def line_chart(series: Mapping[str, Points], *, x_name: str, y_name: str) -> str:
    """Return a chart with one line for each series, or "" if there are no points.

    Points that are not finite are left out.
    """
    lines = {name: [p for p in points if all(map(math.isfinite, p))] for name, points in sorted(series.items())}
    xs, ys = [x for points in lines.values() for x, _ in points], [y for points in lines.values() for _, y in points]
    if not xs:
        return ""
    x_ticks, y_ticks = ticks(min(xs), max(xs)), ticks(min(ys), max(ys))
    left, right = min(xs[0], x_ticks[0], *xs), max(x_ticks[-1], *xs)
    low, high = min(y_ticks[0], *ys), max(y_ticks[-1], *ys)

    def pixel(x: float, y: float) -> tuple[float, float]:
        across = (x - left) / ((right - left) or 1)
        up = (y - low) / ((high - low) or 1)
        return _LEFT + across * (_WIDTH - _LEFT - _RIGHT), _HEIGHT - _BOTTOM - up * (_HEIGHT - _TOP - _BOTTOM)

    label = escape(f"{y_name} by {x_name}")
    parts = [f'<svg class="chart" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">']
    for value in y_ticks:
        _, y = pixel(left, value)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    for value in x_ticks:
        x, _ = pixel(value, low)
        parts.append(f'<text class="tick" x="{x:.1f}" y="{_HEIGHT - 18}" text-anchor="middle">{value:g}</text>')
    corner = f'x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 3}"'
    parts.append(f'<text class="tick" {corner} text-anchor="end">{escape(x_name)}</text>')
    for number, (name, points) in enumerate(lines.items()):
        path = " ".join("{:.1f},{:.1f}".format(*pixel(x, y)) for x, y in thinned(points))
        colour = f"c{number % _COLOURS}"
        if not points:
            continue
        if len(points) == 1:
            x, y = pixel(*points[0])
            parts.append(f'<circle class="{colour}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>')
        else:
            parts.append(f'<polyline class="{colour}" points="{path}"><title>{escape(name)}</title></polyline>')
    return "".join([*parts, "</svg>"])


def thinned(points: Points, most: int = _MAX_POINTS) -> list[tuple[float, float]]:
    """Return at most `most` evenly spaced points, including the first and the last."""
    if len(points) <= most:
        return list(points)
    step = (len(points) - 1) / (most - 1)
    return [points[round(number * step)] for number in range(most)]


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Return about `about` round numbers that span a range."""
    if not high > low:
        return [low]
    rough = (high - low) / about
    size = 10.0 ** math.floor(math.log10(rough))
    step = next((size * by for by in (1, 2, 5) if size * by >= rough), size * 10)
    return list(_span(math.floor(low / step), math.ceil(high / step), step))


def _span(first: int, last: int, step: float) -> Iterator[float]:
    for number in range(first, last + 1):
        yield round(number * step, 12)
