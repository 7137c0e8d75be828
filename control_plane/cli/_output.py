"""Data go to stdout in the format that was asked for; all else goes to stderr.

In json and yaml a command writes exactly one envelope, also when it fails; in jsonl one for each item.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from control_plane.cli._settings import Format, settings
from geofed_pb.errors import GeofedError
from geofed_pb.output import output_failure

SCHEMA_VERSION = 1


def emit(data: Any, *, table: Callable[[Any], str], name: Callable[[Any], str]) -> None:
    """Write what a command returns. A list is one line for each item in `jsonl` and `name`."""
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
    """Write one item of a stream as one line of JSON, at once."""
    _write(json.dumps(_envelope(item), allow_nan=False))


def emit_error(error: GeofedError) -> None:
    """Tell a failure: a sentence and a hint on stderr; for programs the envelope on stdout too."""
    print(f"error[{error.code}]: {error.message}", file=sys.stderr)
    if error.hint:
        print(f"hint: {error.hint}", file=sys.stderr)
    envelope = {"schema_version": SCHEMA_VERSION, "status": "error", "error": error.as_dict()}
    # Where stdout takes nothing, the command still ends with the error that it has told above.
    with contextlib.suppress(GeofedError):
        match settings.format:
            case Format.JSON:
                _write(json.dumps(envelope, indent=2))
            case Format.JSONL:
                _write(json.dumps(envelope))
            case Format.YAML:
                _write(_yaml(envelope))


def unwritable(path: Path, error: OSError) -> GeofedError:
    """A file that the user has named cannot be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return GeofedError("DISK_FULL", f"no space left for {path}", hint="free space, or name another place")
    return GeofedError("USAGE", f"cannot write {path}: {error.strerror}", hint="name another place")


def say(text: str) -> None:
    """Tell the user something that is not data."""
    print(text, file=sys.stderr, flush=True)


def columns(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Rows under their heads, aligned; columns of numbers to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    whole = [list(heads), *cells]
    widths = [max(len(row[index]) for row in whole) for index in range(len(heads))]
    right = [bool(cells) and all(_is_number(row[index]) for row in cells) for index in range(len(heads))]
    lines = [
        "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in whole
    ]
    return "\n".join(lines)


def fields(pairs: Iterable[tuple[str, object]]) -> str:
    """Names and values under each other; what is empty is left out."""
    shown = [(name, str(value)) for name, value in pairs if value not in ("", None)]
    width = max((len(name) for name, _ in shown), default=0)
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in shown)


def _is_number(cell: str) -> bool:
    text = cell.lstrip("-$").replace(",", "").split(" ")[0]
    return cell in ("", "-") or text.replace(".", "", 1).replace("/", "").isdigit()


def _envelope(data: Any) -> dict[str, Any]:
    return {"schema_version": SCHEMA_VERSION, "status": "ok", "data": _finite(data)}


def _finite(value: Any) -> Any:
    """What is no number in JSON becomes null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(held) for key, held in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(held) for held in value]
    return value


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
