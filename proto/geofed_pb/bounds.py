"""Limits of texts and messages, for all processes, and functions that enforce them.

Text comes from the user's code, from file names and from peers. `clean` is applied where it enters a process, so that
it can be stored, sent and shown; a message of cleaned texts is far below the limit of a receiver.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import TypeVar

__all__ = [
    "LARGEST_MESSAGE_BYTES",
    "LOGGED_NAME_BYTES",
    "LOG_LINE_BYTES",
    "MOST_BATCH_NORMS",
    "MOST_LABELS",
    "MOST_LOGGED",
    "MOST_METRICS",
    "MOST_SECRETS",
    "NAME_BYTES",
    "SECRET_NAME",
    "SESSION_MESSAGE_BYTES",
    "TEXT_BYTES",
    "TRUNCATED",
    "bounded_metrics",
    "clean",
    "parts_of",
]

LARGEST_MESSAGE_BYTES = 16 << 20
"""Largest message that gRPC servers and clients of geofed send and accept."""
SESSION_MESSAGE_BYTES = 2 << 20
"""Largest message that an agent and the control plane send each other. Peers of earlier versions accept 4 MiB and may
send larger messages; these are accepted and shortened by the receiver."""
TEXT_BYTES = 4 << 10
"""Longest error message, hint or condition."""
LOG_LINE_BYTES = 4000
"""Longest log line."""
NAME_BYTES = 200
"""Longest name of a metric."""
MOST_METRICS = 1000
"""Most metrics of one evaluation."""
MOST_BATCH_NORMS = 8
"""Most layers with batch statistics that a probe names: a plan's warning names fewer, `train.local` leaves some out."""
MOST_LABELS = 100
"""Most classes whose labels a profile counts, from 0 on: more numbers of a region's data do not leave it."""
LOGGED_NAME_BYTES = 100
"""Longest name of a value that a task logs."""
MOST_LOGGED = 100
"""Most names of values that a task logs in a round."""
SECRET_NAME = "^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"
"""Pattern of a secret's name: function platforms take DNS labels."""
MOST_SECRETS = 20
"""Most secrets of a job."""
TRUNCATED = "… truncated"
"""End of a text that was shortened."""

_UNFIT = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, line separators, lone surrogates, and characters that change the direction of writing: with these
a text can be shown as another one."""
_TRUNCATED = TRUNCATED.encode()
_Item = TypeVar("_Item")


def clean(text: str, most_bytes: int = TEXT_BYTES) -> str:
    """Return a text that is valid UTF-8 of at most ``most_bytes`` bytes (at least 20), without control characters.

    Tabs and line feeds are kept. Other control characters, characters that change the direction of writing and lone
    surrogates are replaced by Python escapes; a byte that `os.fsdecode` could not decode by the escape of that byte. A
    text that is shortened ends with `TRUNCATED`. A clean text is returned unchanged.
    """
    # No character takes less than a byte, so later characters would be cut off in any case.
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
    """Return the first `MOST_METRICS` metrics, with clean names, and a text if others were dropped."""
    kept = {clean(name, NAME_BYTES): value for name, value in islice(metrics.items(), MOST_METRICS)}
    left_out = len(metrics) - MOST_METRICS
    return kept, f"there are more than {MOST_METRICS:,} metrics: only the first ones are kept" if left_out > 0 else ""


def parts_of(
    items: Iterable[_Item], size: Callable[[_Item], int], most_bytes: int, most_items: int
) -> Iterator[list[_Item]]:
    """Split items, in order, into lists with limits of bytes and items; an item that is too large gets its own list."""
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
