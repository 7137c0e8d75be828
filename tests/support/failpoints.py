"""Places where a process dies, as by SIGKILL: before one of its operations on files, or in the middle of a write."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable
from typing import Any

__all__ = ["FILE_OPERATIONS", "die_at"]

FILE_OPERATIONS = ("replace", "rename", "link", "unlink", "truncate", "fsync", "fdatasync", "write")
"""Functions of `os` before which a process may die."""


def die_at(number: int, more: tuple[tuple[Any, str], ...] = ()) -> None:
    """Have this process die at its operation of this number, from 0, of those on files and of ``more``: owners and
    names of functions, which may also have returned."""
    count = itertools.count()
    for name in FILE_OPERATIONS:
        _mortal(os, name, count, number, after=False)
    for owner, name in more:
        _mortal(owner, name, count, number, after=True)


def _mortal(owner: Any, name: str, count: itertools.count[int], number: int, *, after: bool) -> None:
    real: Callable[..., Any] = getattr(owner, name)

    def operation(*arguments: Any, **options: Any) -> Any:
        if next(count) == number:
            if name == "write":
                real(arguments[0], arguments[1][: len(arguments[1]) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        done = real(*arguments, **options)
        if after and next(count) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return done

    setattr(owner, name, operation)
