"""Draw a plan as SVG: regions around an ellipse, and links between those that exchange updates."""

from __future__ import annotations

import math
from itertools import combinations
from xml.sax.saxutils import escape

from control_plane._view import Data, bytes_text, seconds_text, usd_text

__all__ = ["plan_picture"]

_BOX_WIDTH, _BOX_HEIGHT = 190, 78
"""Size of a region's box, in pixels."""
_HEAD = 60
"""Height of the title lines, in pixels."""
_MARGIN = 30
"""Free space at each edge, in pixels."""
_MIN_WIDTH = 560.0
"""Least width of the picture, in pixels; the title lines need it."""
_THINNEST, _THICKEST = 1.5, 7.0
"""Stroke width of an idle link and of the busiest link, in pixels."""
_MAX_LABELLED_LINKS = 10
"""With more links than this, their labels would hide the picture; the boxes of the regions show the sums."""
_LETTER_WIDTH = 6.2
"""Average width of a letter in a label, in pixels."""


def plan_picture(plan: Data) -> str:
    """Return an SVG document that shows each region's workers and cost, and the bytes over each link."""
    parts = plan["partitions"]
    positions, width, height = _layout([part["region"] for part in parts])
    pairs = plan.get("neighbours") or list(combinations(sorted(positions), 2))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="13">',
        f'<rect width="{width:.0f}" height="{height:.0f}" fill="#ffffff"/>',
        *_head(plan, width),
        *_links(plan, pairs, positions),
        *(line for part in parts for line in _box(part, plan, *positions[part["region"]])),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _layout(names: list[str]) -> tuple[dict[str, tuple[float, float]], float, float]:
    """Return the centres of the boxes, around an ellipse, and the width and height of the picture."""
    count = len(names)
    across = 0.0 if count == 1 else max(300.0, _BOX_WIDTH * 1.3 * count / (2 * math.pi))
    first = math.pi if count == 2 else -math.pi / 2
    angles = [first + 2 * math.pi * number / count for number in range(count)]
    xs, ys = [across * math.cos(at) for at in angles], [0.75 * across * math.sin(at) for at in angles]
    left, top = min(xs) - _BOX_WIDTH / 2 - _MARGIN, min(ys) - _BOX_HEIGHT / 2 - _MARGIN - _HEAD
    width = max(_MIN_WIDTH, max(xs) - left + _BOX_WIDTH / 2 + _MARGIN)
    height = max(ys) - top + _BOX_HEIGHT / 2 + _MARGIN
    # Centre the boxes where the picture is wider than they need.
    left -= (width - (max(xs) - min(xs)) - _BOX_WIDTH) / 2 - _MARGIN
    return {name: (x - left, y - top) for name, x, y in zip(names, xs, ys, strict=True)}, width, height


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="middle" {more}>{escape(text)}</text>'


def _head(plan: Data, width: float) -> list[str]:
    estimate = plan["estimate"]
    figures = " · ".join(
        f"{name} {write(estimate[key]['expected'])} ({write(estimate[key]['low'])} to {write(estimate[key]['high'])})"
        for name, key, write in (("time", "seconds", seconds_text), ("cost", "usd", usd_text))
    )
    how = f"{plan['rounds']} rounds, {plan['topology']}, {plan['wan_policy']}, {plan['codec']}"
    return [
        _text(width / 2, 28, figures, 'font-weight="bold"'),
        _text(width / 2, 48, f"{how}, {bytes_text(estimate['wan_bytes']['expected'])} over the WAN", 'fill="#475569"'),
    ]


def _links(plan: Data, pairs: list[tuple[str, str]], positions: dict[str, tuple[float, float]]) -> list[str]:
    sent = plan["estimate"]["link_bytes"]
    usd = {
        (item["region"], item["item"].removeprefix("egress to ")): item["usd"]
        for item in plan["estimate"]["items"]
        if item["item"].startswith("egress to ")
    }
    most = max(sent.values(), default=1) or 1
    lines, labels = [], []
    for a, b in pairs:
        (ax, ay), (bx, by) = positions[a], positions[b]
        share = max(sent.get(f"{a}>{b}", 0), sent.get(f"{b}>{a}", 0)) / most
        thick = _THINNEST + (_THICKEST - _THINNEST) * share
        lines.append(
            f'<line x1="{ax:.1f}" y1="{ay:.1f}" x2="{bx:.1f}" y2="{by:.1f}" stroke="#b45309" '
            f'stroke-opacity="0.5" stroke-width="{thick:.1f}"/>'
        )
        texts = [
            f"{source} → {to}: {bytes_text(sent.get(f'{source}>{to}', 0))}, {usd_text(usd.get((source, to), 0.0))}"
            for source, to in ((a, b), (b, a))
        ]
        labels += _label((ax + bx) / 2, (ay + by) / 2, texts)
    return [*lines, *(labels if len(pairs) <= _MAX_LABELLED_LINKS else [])]


def _label(x: float, y: float, texts: list[str]) -> list[str]:
    width = _LETTER_WIDTH * max(len(text) for text in texts)
    back = f'<rect x="{x - width / 2:.1f}" y="{y - 16:.1f}" width="{width:.1f}" height="32" rx="4" fill="#ffffff"/>'
    written = [_text(x, y - 3 + 14 * n, text, 'font-size="11" fill="#7c2d12"') for n, text in enumerate(texts)]
    return [back, *written]


def _box(part: Data, plan: Data, x: float, y: float) -> list[str]:
    usd = sum(item["usd"] for item in plan["estimate"]["items"] if item["region"] == part["region"])
    sent = sum(n for link, n in plan["estimate"]["link_bytes"].items() if link.startswith(f"{part['region']}>"))
    left, top = x - _BOX_WIDTH / 2, y - _BOX_HEIGHT / 2
    workers = f"{part['workers']} worker{'s' * (part['workers'] != 1)} of {part['memory_mb']} MB"
    small = 'font-size="11.5" fill="#334155"'
    return [
        f'<rect x="{left:.1f}" y="{top:.1f}" width="{_BOX_WIDTH}" height="{_BOX_HEIGHT}" rx="8" fill="#eef2ff" '
        'stroke="#4338ca"/>',
        _text(x, top + 20, part["region"], 'font-weight="bold"'),
        _text(x, top + 37, workers, small),
        _text(x, top + 53, f"{part['samples']:,} samples {_shards_text(part)}", small),
        _text(x, top + 69, f"{usd_text(usd)}" + (f", sends {bytes_text(sent)}" if sent else ""), small),
    ]


def _shards_text(part: Data) -> str:
    """Say which regions' shards a region processes; plans of older versions lack ``shards``."""
    others = [region for region in part.get("shards", ()) if region != part["region"]]
    return f"of {', '.join(part['shards'])}" if others else "stay here"
