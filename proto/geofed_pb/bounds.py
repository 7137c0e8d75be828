"""How long texts and messages may be, and how they are made so: here alone, for every process.

Text comes from the user's code, from file names and from peers. `clean` makes it fit to be stored, sent and shown,
where it enters; a message of cleaned texts is far below what a receiver takes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import TypeVar

__all__ = [
    "LARGEST_MESSAGE_BYTES",
    "LOG_LINE_BYTES",
    "MOST_METRICS",
    "NAME_BYTES",
    "SESSION_MESSAGE_BYTES",
    "TEXT_BYTES",
    "TRUNCATED",
    "bounded_metrics",
    "clean",
    "parts_of",
]

LARGEST_MESSAGE_BYTES = 16 << 20
"""What every gRPC server and client here sends and takes at most."""
SESSION_MESSAGE_BYTES = 2 << 20
"""What an agent and the control plane send each other at most. Peers of earlier versions take 4 MiB, and sent more:
what is larger than this still arrives, and is cut where it does."""
TEXT_BYTES = 4 << 10
"""Of an error's message or hint, or of a condition."""
LOG_LINE_BYTES = 4000
NAME_BYTES = 200
"""Of a metric's name."""
MOST_METRICS = 1000
"""Of one evaluation."""
TRUNCATED = "… truncated"

_UNFIT = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_TRUNCATED = TRUNCATED.encode()
_Item = TypeVar("_Item")


def clean(text: str, most_bytes: int = TEXT_BYTES) -> str:
    """Valid UTF-8 of at most so many bytes (20 at least), without control characters but tabs and line ends.

    What is unfit is shown as Python would write it; a byte that `os.fsdecode` could not read is shown as that byte.
    Text that is cut ends with `TRUNCATED`. What is clean stays as it is.
    """
    # No character takes less than a byte: what lies further back is cut off in any case.
    shown = _UNFIT.sub(_escaped, text[: most_bytes + 1]).encode()
    if len(shown) > most_bytes:
        shown = shown[: most_bytes - len(_TRUNCATED)].decode(errors="ignore").encode() + _TRUNCATED
    return shown.decode()


def _escaped(found: re.Match[str]) -> str:
    code = ord(found[0])
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else f"\\u{code:04x}"


def bounded_metrics(metrics: Mapping[str, float]) -> tuple[dict[str, float], str]:
    """The first `MOST_METRICS`, under names that are clean, and what was left out, in words; empty: nothing."""
    kept = {clean(name, NAME_BYTES): value for name, value in islice(metrics.items(), MOST_METRICS)}
    left_out = len(metrics) - MOST_METRICS
    return kept, f"there are more than {MOST_METRICS:,} metrics: only the first ones are kept" if left_out > 0 else ""


def parts_of(
    items: Iterable[_Item], size: Callable[[_Item], int], most_bytes: int, most_items: int
) -> Iterator[list[_Item]]:
    """Cut items, in order, into lists of at most so many bytes and items; one that is larger alone has a list alone."""
    part: list[_Item] = []
    total = 0
    for item in items:
        length = size(item)
        if part and (total + length > most_bytes or len(part) >= most_items):
            yield part
            part, total = [], 0
        part.append(item)
        total += length
    if part:
        yield part
