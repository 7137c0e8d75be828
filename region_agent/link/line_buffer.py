"""Lines on their way, bounded: of a burst the first and the newest are kept, and how many were dropped between them."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

__all__ = ["LineBuffer", "dropped_text"]

_Line = TypeVar("_Line")


def dropped_text(count: int) -> str:
    """What stands where lines were dropped."""
    return f"… {count:,} lines dropped"


class LineBuffer(Generic[_Line]):
    """Takes lines of any number, holds at most so many bytes. The newest are worth the most: an error comes last."""

    def __init__(self, most_bytes: int) -> None:
        self._first_bytes, self._newest_bytes = most_bytes // 4, most_bytes - most_bytes // 4
        self.clear()

    def clear(self) -> None:
        """Hold nothing."""
        self._first: list[_Line] = []
        self._newest: deque[tuple[_Line, int]] = deque()
        self._first_left, self._newest_left = self._first_bytes, self._newest_bytes
        self._dropped = 0

    def __bool__(self) -> bool:
        return bool(self._first or self._newest)

    def add(self, line: _Line, size: int) -> None:
        """Take a line, and the bytes it counts for; one that is larger than the whole is held alone."""
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
        """All that is held, and hold it no more: the first lines, how many were dropped then, and the newest."""
        taken = self._first, self._dropped, [line for line, _ in self._newest]
        self.clear()
        return taken
