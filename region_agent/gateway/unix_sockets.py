"""Unix sockets: HTTP over one, and paths that are short enough for them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2

from region_agent.gateway.stream_transport import StreamTransport

__all__ = ["UnixTransport", "short_path"]


_MAX_PATH_BYTES = 107
"""Longest path of a socket, as of `sys/un.h`, without its final NUL."""


@contextmanager
def short_path(path: Path) -> Iterator[str]:
    """Yield a path for a socket that is short enough for one, however long its own is.

    Raises ``OSError`` if its folder does not exist.
    """
    if len(os.fsencode(path)) <= _MAX_PATH_BYTES:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


class UnixTransport(StreamTransport):
    """Transport to one socket. ``limits``: limits of httpx2."""

    def __init__(self, path: str, limits: httpx2.Limits) -> None:
        async def connected() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            with short_path(Path(path)) as short:
                return await asyncio.open_unix_connection(short)

        super().__init__(connected, limits)
