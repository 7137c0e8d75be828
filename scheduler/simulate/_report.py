"""The output of a simulation: a row for each job, and a picture."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

from scheduler.simulate._outcome import SimulationRun

HEADS = (
    "policy", "job", "submit_s", "deadline_s", "promised_s", "declined", "start_s", "end_s", "met", "broken",
    "device_s", "value",
)  # fmt: skip
_COLOURS = (
    "#1b6ca8",
    "#c8553d",
    "#588157",
    "#8e6c8a",
    "#e0a458",
    "#4a4e69",
    "#2a9d8f",
    "#b56576",
    "#7f5539",
    "#6c757d",
)
_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 960, 560, 70, 30, 60


def outcome_rows(run: SimulationRun) -> list[tuple[str, ...]]:
    """Return a row for each job, the header first, for a CSV file; blank: there is no such instant."""
    rows: list[tuple[str, ...]] = [HEADS]
    for job in run.outcomes:
        instants = [_instant(at) for at in (job.submit_s, job.deadline_s, job.promised_s)]
        times = [_instant(at) for at in (job.started_s, job.ended_s)]
        flags = [str(int(flag)) for flag in (job.met, job.broken)]
        rows.append(
            (run.policy, job.name, *instants, str(int(job.declined)), *times, *flags, f"{job.device_s:.1f}",
             f"{job.value:g}")
        )  # fmt: skip
    return rows


def chart(runs: Sequence[SimulationRun]) -> str:
    """An SVG picture: devices in use over time above, deadlines met so far below, a line for each run."""
    begin = min((run.timeline[0][0] for run in runs if run.timeline), default=0.0)
    end = max((run.timeline[-1][0] for run in runs if run.timeline), default=1.0)
    panel = (_HEIGHT - 2 * _TOP - _GAP) / 2
    width = _WIDTH - _LEFT - 180
    devices = max((run.devices for run in runs), default=1)
    jobs = max((len(run.outcomes) for run in runs), default=1)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        f'font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        *_frame(_TOP, panel, width, "devices in use", devices, end - begin),
        *_frame(_TOP + panel + _GAP, panel, width, "deadlines met", jobs, end - begin),
    ]
    scale = width / max(end - begin, 1e-9)
    for number, run in enumerate(runs):
        colour = _COLOURS[number % len(_COLOURS)]
        used = _sampled([at for at, _, _ in run.timeline], [in_use for _, in_use, _ in run.timeline], begin, end)
        ends = sorted(job.ended_s for job in run.outcomes if job.met)
        met = _sampled(ends, list(range(1, len(ends) + 1)), begin, end)
        for top, line, most in ((_TOP, used, devices), (_TOP + panel + _GAP, met, jobs)):
            points = " ".join(
                f"{_LEFT + (at - begin) * scale:.1f},{top + panel - panel * value / most:.1f}" for at, value in line
            )
            parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="1.2" points="{points}"/>')
        y = _TOP + 14 + 18 * number
        parts.append(f'<rect x="{_WIDTH - 170}" y="{y - 9}" width="12" height="3" fill="{colour}"/>')
        parts.append(f'<text x="{_WIDTH - 152}" y="{y - 3}">{_escaped(run.policy)}: {run.ratio:.1%}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _instant(at: float) -> str:
    return f"{at:.1f}" if math.isfinite(at) else ""


def _frame(top: float, height: float, width: float, title: str, most: int, seconds: float) -> list[str]:
    return [
        f'<rect x="{_LEFT}" y="{top}" width="{width}" height="{height:.1f}" fill="none" stroke="#999"/>',
        f'<text x="{_LEFT}" y="{top - 6}">{title}</text>',
        f'<text x="{_LEFT - 6}" y="{top + 10}" text-anchor="end">{most}</text>',
        f'<text x="{_LEFT - 6}" y="{top + height:.1f}" text-anchor="end">0</text>',
        f'<text x="{_LEFT + width}" y="{top + height + 16:.1f}" text-anchor="end">{seconds / 3600:.1f} h</text>',
    ]


def _sampled(times: list[float], values: list[int], begin: float, end: float) -> list[tuple[float, float]]:
    """Steps read at as many instants as the picture has points across."""
    if not times:
        return []
    count = 600
    line = []
    for step in range(count + 1):
        at = begin + (end - begin) * step / count
        index = bisect_right(times, at)
        line.append((at, float(values[index - 1]) if index else 0.0))
    return line


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
