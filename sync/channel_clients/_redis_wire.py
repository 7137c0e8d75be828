"""Large values to and from Redis without copies: replaces parts of redis-py.

redis-py opens and authenticates the connection and knows the server's errors. But its packer would need a value's
pieces joined, and its parser collects a reply in blocks of 64 KiB and copies it twice, which halves the rate of large
gets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from redis._parsers import _RESP2Parser

from sync.channel import Buffer
from sync.mapped_files import buffer_of

__all__ = ["Argument", "InPlaceParser", "packed"]

Argument = str | bytes | int | Sequence[memoryview]
"""An argument of a command; a sequence of pieces is sent as one argument."""

_JOIN_BYTES = 1 << 14
"""Smaller pieces are joined: another system call would cost more than the copy."""
_IN_PLACE_BYTES = 1 << 15
"""Replies from this size are read in place."""


def packed(commands: Sequence[Sequence[Argument]]) -> list[Buffer]:
    """Return the commands in the Redis serialisation protocol, as consecutive buffers."""
    out: list[Buffer] = []
    small = bytearray()

    def add(piece: Buffer) -> None:
        nonlocal small
        if len(piece) < _JOIN_BYTES:
            small += piece
            return
        out.append(small)
        out.append(piece)
        small = bytearray()

    for command in commands:
        small += b"*%d\r\n" % len(command)
        for argument in command:
            pieces = _pieces(argument)
            small += b"$%d\r\n" % sum(len(piece) for piece in pieces)
            for piece in pieces:
                add(piece)
            small += b"\r\n"
    out.append(small)
    return [piece for piece in out if len(piece)]


def _pieces(argument: Argument) -> Sequence[Buffer]:
    if isinstance(argument, bytes):
        return (argument,)
    if isinstance(argument, (str, int)):
        return (str(argument).encode(),)
    return argument


class InPlaceParser(_RESP2Parser):
    """Reads a large reply from the socket into its final buffer, and returns it as a memoryview."""

    def on_connect(self, connection: Any) -> None:
        super().on_connect(connection)  # type: ignore[no-untyped-call]
        gathered: Any = self._buffer
        read_small, stored, sock = gathered.read, gathered._buffer, connection._sock

        def read(length: int, *arguments: Any, **options: Any) -> Buffer:
            if length < _IN_PLACE_BYTES:
                return bytes(read_small(length, *arguments, **options))
            target = buffer_of(length + len(b"\r\n"))
            have = stored.readinto(target)
            while have < target.nbytes:
                got = sock.recv_into(target[have:])
                if not got:
                    raise ConnectionResetError("the server has closed the connection")
                have += got
            return target[:length]

        gathered.read = read
