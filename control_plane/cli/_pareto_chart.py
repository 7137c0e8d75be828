"""Draw Pareto fronts of predicted time and cost as SVG, from lists of dictionaries."""

from __future__ import annotations

import math
from xml.sax.saxutils import escape

from control_plane._view import Data, seconds_text, usd_text

__all__ = ["front_picture"]

_WIDTH, _HEIGHT = 760, 460
"""Size of the picture, in pixels."""
_LEFT, _TOP, _RIGHT, _BOTTOM = 90, 50, 30, 70
"""Margins around the plot, in pixels; they hold titles and axis labels."""
_COLOURS = ("#b45309", "#1d4ed8", "#047857", "#7e22ce", "#be123c", "#475569")
_TITLE = "predicted time and cost: dots are Pareto-optimal, circles the best of other numbers of workers"
_PADDING = 0.08
"""Free space before the first and after the last point, as a fraction of the axis."""


def front_picture(fronts: dict[str, list[Data]], others: dict[str, list[Data]] | None = None) -> str:
    """Return an SVG document with predicted time on the x axis, cost on the y axis, and a line for each region.

    Args:
        others: further configurations of each region, which the front's are better than; drawn as circles.
    """
    others = others or {}
    points = [row for rows in (*fronts.values(), *others.values()) for row in rows]
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="13">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>',
        _text(_WIDTH / 2, 26, _TITLE, 'font-weight="bold"'),
    ]
    if not points:
        return (
            "\n".join([*lines, _text(_WIDTH / 2, _HEIGHT / 2, "no configuration has enough memory"), "</svg>"]) + "\n"
        )
    across = _Axis([row["seconds"] for row in points], _LEFT, _WIDTH - _RIGHT)
    up = _Axis([row["usd"] for row in points], _HEIGHT - _BOTTOM, _TOP)
    for at in across.ticks:
        x = across.pixel(at)
        lines.append(_line(x, _TOP, x, _HEIGHT - _BOTTOM, "#e2e8f0"))
        lines.append(_text(x, _HEIGHT - _BOTTOM + 20, seconds_text(at)))
    for at in up.ticks:
        y = up.pixel(at)
        lines.append(_line(_LEFT, y, _WIDTH - _RIGHT, y, "#e2e8f0"))
        lines.append(_text(_LEFT - 8, y + 4, usd_text(at), 'text-anchor="end"'))
    for number, (name, rows) in enumerate(fronts.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        positions = [(across.pixel(row["seconds"]), up.pixel(row["usd"])) for row in rows]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in positions)
        lines.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-opacity="0.5"/>')
        lines += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"><title>{escape(_tooltip(row))}</title></circle>'
            for (x, y), row in zip(positions, rows, strict=True)
        ]
        lines += [
            f'<circle cx="{across.pixel(row["seconds"]):.1f}" cy="{up.pixel(row["usd"]):.1f}" r="4" fill="none" '
            f'stroke="{colour}"><title>{escape(_tooltip(row))}</title></circle>'
            for row in others.get(name, ())
        ]
        lines.append(_text(_LEFT + 110 * number + 40, _HEIGHT - 18, name, f'fill="{colour}" font-weight="bold"'))
    return "\n".join([*lines, "</svg>"]) + "\n"


def _tooltip(row: Data) -> str:
    merged = f", {row['collective']} K = {row['chunks']}" if row["workers"] > 1 else ""
    return (
        f"{row['workers']} workers of {row['memory_mb']} MB{merged}: "
        f"{seconds_text(row['seconds'])}, {usd_text(row['usd'])}"
    )


class _Axis:
    """Maps values to pixels on a logarithmic scale, since a front spans orders of magnitude."""

    def __init__(self, values: list[float], first: float, last: float) -> None:
        least, most = math.log(max(1e-12, min(values))), math.log(max(1e-12, max(values)))
        padding = max(0.05, (most - least) * _PADDING)
        self._least, self._most, self._first, self._last = least - padding, most + padding, first, last

    def pixel(self, value: float) -> float:
        share = (math.log(max(1e-12, value)) - self._least) / (self._most - self._least)
        return self._first + share * (self._last - self._first)

    @property
    def ticks(self) -> list[float]:
        """1, 2 and 5 times powers of ten; if fewer than two fit, the ends of the axis."""
        powers = range(math.floor(self._least / math.log(10)) - 1, math.ceil(self._most / math.log(10)) + 1)
        found = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
        inside = [value for value in found if self._least <= math.log(value) <= self._most]
        return inside if len(inside) > 1 else [math.exp(self._least * 0.9 + self._most * 0.1), math.exp(self._most)]


def _text(x: float, y: float, text: str, more: str = "") -> str:
    anchor = "" if "text-anchor" in more else 'text-anchor="middle" '
    return f'<text x="{x:.1f}" y="{y:.1f}" {anchor}{more}>{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'
