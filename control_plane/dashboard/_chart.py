"""A line chart as SVG, without styles of its own: classes name what a stylesheet colours."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape

__all__ = ["line_chart", "thinned", "ticks"]

Points = Sequence[tuple[float, float]]

_WIDTH, _HEIGHT = 720, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 12, 34
_MOST_POINTS = 300
_COLOURS = 8
"""Classes c0 to c7 of the stylesheet."""


def line_chart(series: Mapping[str, Points], *, x_name: str, y_name: str) -> str:
    """One line for each series, with axes from the least to the largest value; "" where there is no point.

    Points whose value is not finite are left out.
    """
    lines = {name: [p for p in points if all(map(math.isfinite, p))] for name, points in sorted(series.items())}
    xs, ys = [x for points in lines.values() for x, _ in points], [y for points in lines.values() for _, y in points]
    if not xs:
        return ""
    x_ticks, y_ticks = ticks(min(xs), max(xs)), ticks(min(ys), max(ys))
    left, right = min(xs[0], x_ticks[0], *xs), max(x_ticks[-1], *xs)
    low, high = min(y_ticks[0], *ys), max(y_ticks[-1], *ys)

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - left) / ((right - left) or 1)
        up = (y - low) / ((high - low) or 1)
        return _LEFT + across * (_WIDTH - _LEFT - _RIGHT), _HEIGHT - _BOTTOM - up * (_HEIGHT - _TOP - _BOTTOM)

    label = escape(f"{y_name} by {x_name}")
    parts = [f'<svg class="chart" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">']
    for value in y_ticks:
        _, y = place(left, value)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    for value in x_ticks:
        x, _ = place(value, low)
        parts.append(f'<text class="tick" x="{x:.1f}" y="{_HEIGHT - 18}" text-anchor="middle">{value:g}</text>')
    corner = f'x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 3}"'
    parts.append(f'<text class="tick" {corner} text-anchor="end">{escape(x_name)}</text>')
    for number, (name, points) in enumerate(lines.items()):
        path = " ".join("{:.1f},{:.1f}".format(*place(x, y)) for x, y in thinned(points))
        colour = f"c{number % _COLOURS}"
        if not points:
            continue
        if len(points) == 1:
            x, y = place(*points[0])
            parts.append(f'<circle class="{colour}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>')
        else:
            parts.append(f'<polyline class="{colour}" points="{path}"><title>{escape(name)}</title></polyline>')
    return "".join([*parts, "</svg>"])


def thinned(points: Points, most: int = _MOST_POINTS) -> list[tuple[float, float]]:
    """At most so many of them, evenly, the last one included."""
    if len(points) <= most:
        return list(points)
    step = (len(points) - 1) / (most - 1)
    return [points[round(number * step)] for number in range(most)]


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers that span a range, about so many."""
    if not high > low:
        return [low]
    rough = (high - low) / about
    size = 10.0 ** math.floor(math.log10(rough))
    step = next((size * by for by in (1, 2, 5) if size * by >= rough), size * 10)
    return list(_span(math.floor(low / step), math.ceil(high / step), step))


def _span(first: int, last: int, step: float) -> Iterator[float]:
    for number in range(first, last + 1):
        yield round(number * step, 12)
