"""Bounded buffer of log lines: of a burst it keeps the first and the newest lines, and counts those in between."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

__all__ = ["LineBuffer", "dropped_text"]

_Line = TypeVar("_Line")


def dropped_text(count: int) -> str:
    """Return the text that stands for dropped lines."""
    return f"… {count:,} lines dropped"


class LineBuffer(Generic[_Line]):
    """Holds lines up to a number of bytes: a quarter for the first lines, the rest for the newest, which matter most,
    since an error comes last."""

    def __init__(self, max_bytes: int) -> None:
        self._first_bytes, self._newest_bytes = max_bytes // 4, max_bytes - max_bytes // 4
        self.clear()

    def clear(self) -> None:
        """Drop all lines, without counting them."""
        self._first: list[_Line] = []
        self._newest: deque[tuple[_Line, int]] = deque()
        self._first_left, self._newest_left = self._first_bytes, self._newest_bytes
        self._dropped = 0

    def __bool__(self) -> bool:
        return bool(self._first or self._newest)

    def add(self, line: _Line, size: int) -> None:
        """Add a line with its size in bytes. A line that is larger than the buffer replaces all newest lines."""
        if not self._newest and size <= self._first_left:
            self._first.append(line)
            self._first_left -= size
            return
        self._newest.append((line, size))
        self._newest_left -= size
        while self._newest_left < 0 and len(self._newest) > 1:
            self._newest_left += self._newest.popleft()[1]
            self._dropped += 1

    def take(self) -> tuple[list[_Line], int, list[_Line]]:
        """Return the first lines, the number of dropped lines after them, and the newest lines; empties the buffer."""
        taken = self._first, self._dropped, [line for line, _ in self._newest]
        self.clear()
        return taken
