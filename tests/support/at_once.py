"""An executor without threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

__all__ = ["AtOnce"]


class AtOnce(Executor):
    """Does what it is given before anything else happens, in the caller's thread: a process that is to die dies at the
    same place whenever it is played again."""

    def submit(self, work: Callable[..., Any], /, *given: Any, **named: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(work(*given, **named))
        return done
