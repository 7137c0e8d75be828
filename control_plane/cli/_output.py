"""Write data to stdout in the requested format, and everything else to stderr.

In json and yaml a command writes exactly one envelope, also when it fails; in jsonl it writes one for each item.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from control_plane._finite import finite
from control_plane.cli._settings import Format, settings, stdout_is_terminal
from geofed_pb.errors import GeofedError
from geofed_pb.files.output import output_failure

STATE_STYLES = {"succeeded": "green", "failed": "red", "lost": "red", "cancelled": "yellow", "running": "cyan"}
"""Colours of states of jobs and regions."""
_GAP = 2
"""Characters between two columns."""
SCHEMA_VERSION = 1
"""Version of the envelope in json, yaml and jsonl; grows when a change breaks its readers."""


def emit(data: Any, *, table: Callable[[Any], str], name: Callable[[Any], str]) -> None:
    """Write the result of a command. In `jsonl` and `name` a list becomes one line for each item."""
    items = data if isinstance(data, list) else [data]
    match settings.format:
        case Format.TABLE:
            _write(table(data))
        case Format.NAME:
            _write("\n".join(name(item) for item in items))
        case Format.JSONL:
            for item in items:
                emit_line(item)
        case Format.JSON:
            _write(json.dumps(_envelope(data), indent=2, allow_nan=False))
        case Format.YAML:
            _write(_yaml(_envelope(data)))


def emit_line(item: Any) -> None:
    """Write one item of a stream immediately, as one line of JSON."""
    _write(json.dumps(_envelope(item), allow_nan=False))


def emit_error(error: GeofedError) -> None:
    """Write an error: message and hint to stderr, and in json, jsonl and yaml its envelope to stdout."""
    print(f"error[{error.code}]: {error.message}", file=sys.stderr)
    if error.hint:
        print(f"hint: {error.hint}", file=sys.stderr)
    envelope = {"schema_version": SCHEMA_VERSION, "status": "error", "error": error.as_dict()}
    # If stdout cannot be written, the command still fails with the error printed above, not with this one.
    with contextlib.suppress(GeofedError):
        match settings.format:
            case Format.JSON:
                _write(json.dumps(envelope, indent=2))
            case Format.JSONL:
                _write(json.dumps(envelope))
            case Format.YAML:
                _write(_yaml(envelope))


def unwritable(path: Path, error: OSError) -> GeofedError:
    """Return the error for a file named by the user that cannot be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return GeofedError(
            "DISK_FULL", f"no space left on the device for {path}", hint="free space, or write to another path"
        )
    return GeofedError("USAGE", f"cannot write {path}: {error.strerror}", hint="write to another path")


def say(text: str) -> None:
    """Write a message that is not data to stderr. A terminal's width wraps it, except an indented one: a command to
    copy."""
    if sys.stderr.isatty() and not text.startswith(" "):
        text = "\n".join(wrapped(text, shutil.get_terminal_size().columns))
    print(text, file=sys.stderr, flush=True)


def columns(heads: Sequence[str], rows: Iterable[Sequence[object]], *, leave_out: Sequence[str] = ()) -> str:
    """Format rows as a table with a head; columns of numbers are aligned to the right.

    On a terminal heads are bold, states have colours, and cells are wrapped at the terminal's width; elsewhere the
    table is plain text with one line for each row.

    Args:
        leave_out: heads of columns that a narrow terminal does not show, the first ones first.
    """
    cells = [[str(cell) for cell in row] for row in rows]
    if stdout_is_terminal():
        heads, cells = fitted(heads, cells, leave_out, shutil.get_terminal_size().columns)
    right = [bool(cells) and all(_is_number(row[index]) for row in cells) for index in range(len(heads))]
    if stdout_is_terminal():
        return _styled(heads, cells, right)
    whole = [list(heads), *cells]
    widths = [max(len(row[index]) for row in whole) for index in range(len(heads))]
    lines = [
        "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in whole
    ]
    return "\n".join(lines)


def fitted(
    heads: Sequence[str], cells: list[list[str]], leave_out: Sequence[str], width: int
) -> tuple[list[str], list[list[str]]]:
    """Return a table that fits a width, as far as the columns that may be left out allow; one whose cells are all empty
    goes in any case."""
    kept = [place for place, head in enumerate(heads) if head not in leave_out or any(row[place] for row in cells)]
    for head in leave_out:
        if sum(max(len(row[place]) for row in [heads, *cells]) + _GAP for place in kept) - _GAP <= width:
            break
        kept = [place for place in kept if heads[place] != head]
    return [heads[place] for place in kept], [[row[place] for place in kept] for row in cells]


def beside(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Format a table whose first column names the rows. Columns that a narrow terminal has no room for follow below,
    with the first column again."""
    cells = [[str(cell) for cell in row] for row in rows]
    if not stdout_is_terminal():
        return columns(heads, cells)
    first, *widths = (max(len(row[place]) for row in [heads, *cells]) for place in range(len(heads)))
    room, groups = shutil.get_terminal_size().columns - first, list[list[int]]()
    left = 0
    for place, width in enumerate(widths, 1):
        left -= width + _GAP
        if left < 0 or not groups:
            groups.append([])
            left = room - width - _GAP
        groups[-1].append(place)
    return "\n\n".join(
        columns([heads[0], *(heads[place] for place in group)], [[row[0], *(row[p] for p in group)] for row in cells])
        for group in groups
    )


def _styled(heads: Sequence[str], cells: list[list[str]], right: list[bool]) -> str:
    import io

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    for head, to_right in zip(heads, right, strict=True):
        table.add_column(Text(head), justify="right" if to_right else "left", overflow="fold")
    for row in cells:
        # As Text, since a cell with square brackets is no markup.
        table.add_row(*(Text(cell, style=STATE_STYLES.get(cell, "")) for cell in row))
    out = io.StringIO()
    width = shutil.get_terminal_size().columns
    Console(file=out, force_terminal=True, no_color="NO_COLOR" in os.environ, width=width, highlight=False).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def fields(pairs: Iterable[tuple[str, object]]) -> str:
    """Format names and values, one pair a line; empty values are left out. A terminal's width wraps long values."""
    shown = [(name, str(value)) for name, value in pairs if value not in ("", None)]
    width = max((len(name) for name, _ in shown), default=0) + _GAP
    return "\n".join(after(name.ljust(width), value) for name, value in shown)


def after(head: str, text: str) -> str:
    """Format a text that follows a head on its line. A terminal's width wraps the text, not the head."""
    room = shutil.get_terminal_size().columns - len(head) if stdout_is_terminal() else 0
    return head + (f"\n{' ' * len(head)}".join(wrapped(text, room)) if room > 0 else text)


def wrapped(text: str, width: int) -> list[str]:
    """Split a text into lines of a width, at spaces where there are some."""
    import textwrap

    return [line for part in text.split("\n") for line in textwrap.wrap(part, width) or [""]]


def _is_number(cell: str) -> bool:
    text = cell.lstrip("-$").replace(",", "").split(" ")[0]
    return cell in ("", "-") or text.replace(".", "", 1).replace("/", "").isdigit()


def _envelope(data: Any) -> dict[str, Any]:
    return {"schema_version": SCHEMA_VERSION, "status": "ok", "data": finite(data)}


def _yaml(value: Any) -> str:
    import io

    from ruamel.yaml import YAML

    text = io.StringIO()
    writer = YAML(typ="safe", pure=True)
    writer.default_flow_style = False
    writer.sort_base_mapping_type_on_output = False  # type: ignore[assignment]  # its stub knows only None
    writer.dump(value, text)
    return text.getvalue().rstrip("\n")


def _write(text: str) -> None:
    if not text:
        return
    try:
        print(text, flush=True)
    except OSError as error:
        raise output_failure(error) from None
