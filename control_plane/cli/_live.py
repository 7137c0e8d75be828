"""Live display of a watched job on stderr, redrawn when the job changes."""

from __future__ import annotations

import os
import time
from collections import deque
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from control_plane._view import Data, bytes_text, clock, usd_text
from control_plane.cli._output import STATE_STYLES, fitted
from control_plane.cli._report import metrics_text, number_text

_EVENTS_SHOWN = 5
"""Number of latest events below the table."""
_SHOWN_IN_TABLE = ("partition.round", "partition.logged", "partition.evaluated")
"""Event kinds that the table shows already."""
_REDRAW_SECONDS = 0.1
"""Least time between two redraws caused by events, so that a long history does not redraw for each of them."""


class LiveDisplay:
    """Draws the job's state, its progress, one row for each region, and the latest events. A context manager."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, no_color="NO_COLOR" in os.environ, highlight=False)
        self._view: Data | None = None
        self._events: deque[str] = deque(maxlen=_EVENTS_SHOWN)
        self._live = Live(console=self._console, auto_refresh=False, transient=False)
        self._drawn_at = 0.0

    def __enter__(self) -> LiveDisplay:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def note(self, text: str) -> None:
        self._events.append(text)
        self._draw()

    def event(self, event: Data) -> None:
        if event["kind"] not in _SHOWN_IN_TABLE:
            self._events.append(f"{clock(event['at'])}  {event['text']}")
        if time.monotonic() - self._drawn_at > _REDRAW_SECONDS:
            self._draw()

    def job(self, view: Data) -> None:
        self._view = view
        self._draw()

    def _draw(self) -> None:
        self._drawn_at = time.monotonic()
        if self._view is not None:
            self._live.update(_drawing(self._view, list(self._events), self._console.width), refresh=True)


def _drawing(view: Data, events: list[str], width: int) -> RenderableType:
    line = Text.assemble((view["id"], "bold"), "  ", (view["state"], STATE_STYLES.get(view["state"], "")))
    if view["condition"]:
        line.append(f"  {view['condition']}", "yellow")
    return Group(line, _progress(view), _regions(view, width), Text("\n".join(events), "dim", no_wrap=True))


def _progress(view: Data) -> RenderableType:
    rounds, done = view["rounds"], min((part["round"] for part in view["partitions"]), default=0)
    row = Table.grid(padding=(0, 1))
    row.add_row(ProgressBar(total=max(rounds, 1), completed=done, width=40), f"round {done} of {rounds}")
    return row


_HEADS = ("region", "state", "round", "step", "loss", "samples/s", "metrics", "WAN sent", "cost", "condition")
_LEAVES = ("samples/s", "step", "WAN sent", "condition", "metrics", "cost")
"""Columns that a narrow terminal does not show, the first ones first."""


def _regions(view: Data, width: int) -> RenderableType:
    cells = [
        [
            part["region"],
            part["state"],
            f"{part['round']}/{view['rounds']}",
            str(part["step"]),
            number_text(part["loss"]),
            f"{part['samples_per_second']:.0f}",
            metrics_text(part["logged"] | part["metrics"]),
            bytes_text(sum(part["sent_bytes"].values())),
            usd_text(part["usd"]),
            part["condition"],
        ]
        for part in view["partitions"]
    ]
    heads, rows = fitted(_HEADS, cells, _LEAVES, width)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for head in heads:
        to_right = head in ("round", "step", "loss", "samples/s", "WAN sent", "cost")
        style = "yellow" if head == "condition" else ""
        table.add_column(head, justify="right" if to_right else "left", overflow="fold", style=style)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table
